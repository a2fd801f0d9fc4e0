//! The rules of handles, and threads that share a table.

use std::sync::atomic::{AtomicUsize, Ordering};

use gdsync_capi_support::handles::{Handle, MARK, Refusal, Table};

fn place(handle: Handle) -> usize {
    handle & (MARK - 1)
}

#[test]
fn handles_end_and_are_told_apart() {
    static FIRST: Table<u32> = Table::new(1, &["", "first", "second"]);
    static SECOND: Table<u32> = Table::new(2, &["", "first", "second"]);
    let errno = |result: Result<u32, Refusal>| result.unwrap_err().errno;
    let read = |table: &'static Table<u32>, raw| table.get(raw).map(|guard| *guard);
    let (a, b) = (FIRST.insert(7).unwrap(), SECOND.insert(8).unwrap());
    assert_eq!((read(&FIRST, a).unwrap(), read(&SECOND, b).unwrap()), (7, 8));
    for wrong in [0, b, a + 1, a | MARK, a | 1 << 40, usize::MAX] {
        assert_eq!(errno(read(&FIRST, wrong)), libc::EINVAL, "{wrong:#x}");
    }
    assert_eq!(
        SECOND.get(a).unwrap_err().text,
        format!("second is {a:#x}, which is a first: expected a handle that has not ended")
    );
    let borrowed = FIRST.borrow(a).unwrap();
    assert_eq!(errno(read(&FIRST, a)), libc::EBUSY);
    assert_eq!(errno(FIRST.take(a)), libc::EBUSY);
    drop(borrowed);
    assert_eq!(FIRST.take(a).unwrap(), 7);
    let c = FIRST.insert(9).unwrap();
    assert!(c != a && place(c) == place(a), "the place is used again");
    assert_eq!(errno(FIRST.take(a)), libc::EINVAL);
    let (one, other) = (FIRST.get(c).unwrap(), FIRST.get(c).unwrap());
    assert_eq!((*one, *other), (9, 9));
    drop((one, other));
    assert_eq!(FIRST.borrow(c).unwrap().end(), 9);
    assert_eq!(errno(read(&FIRST, c)), libc::EINVAL);
    let (d, e) = (FIRST.insert(1).unwrap(), FIRST.insert(2).unwrap());
    FIRST.borrow(e).unwrap().discard();
    assert!(!FIRST.has_ended(d).unwrap());
    FIRST.clear();
    assert!([a, c, d, e].into_iter().all(|ended| FIRST.has_ended(ended).unwrap()));
    assert_eq!(FIRST.has_ended(d | 1 << 40).unwrap_err().errno, libc::EINVAL);
}

#[test]
fn threads_share_places_and_end_each_object_once() {
    static TABLE: Table<Box<[u64; 4]>> = Table::new(1, &["", "number"]);
    const ROUNDS: u64 = 5_000;
    let handle = AtomicUsize::new(0);
    let ended: u64 = std::thread::scope(|scope| {
        let work = |thread: u64| {
            let (handle, mut ended) = (&handle, 0);
            move || {
                for round in 0..ROUNDS {
                    let new = TABLE.insert(Box::new([thread << 32 | round; 4])).unwrap();
                    assert!(place(new) < 64, "places are used again");
                    // One that another thread has made, may read or may end.
                    let old = handle.swap(new, Ordering::Relaxed);
                    if let Ok(object) = TABLE.get(old) {
                        assert_eq!(object[0], object[3]);
                    }
                    let now = handle.load(Ordering::Relaxed);
                    for raw in [old, now, old] {
                        if let Ok(object) = TABLE.take(raw) {
                            assert_eq!(object[0], object[3]);
                            ended += 1;
                        }
                    }
                }
                ended
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let left = u64::from(TABLE.take(handle.load(Ordering::Relaxed)).is_ok());
    assert_eq!(ended + left, 4 * ROUNDS);
}
