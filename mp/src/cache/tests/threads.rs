//! Many threads at one cache.

use std::thread;

use gdsync::verbs::{Access, SendWr};

use super::{Bed, LONG, config};

/// Each thread writes through its handles, over a connection to itself: a key that is dead, or opens other memory, fails.
#[test]
fn a_handle_is_registered_as_long_as_it_lives() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 300;
    const SHARE: usize = 4096;
    let bed = Bed::new(24, config(6, 6000));
    let target = bed.pd.register(&bed.memory, Access::all()).unwrap();
    let play = |me: usize| {
        let [a, b] = [(); 2].map(|()| bed.pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let mut random = me as u64 + 1;
        let mut next = |below: usize| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            usize::try_from(random >> 33).unwrap() % below
        };
        for round in 0..ROUNDS {
            // The threads look up the same ranges, and write to places of their own.
            let start = next(8) * 512;
            let len = 16 + next(2000);
            let source = bed.get(start..start + len);
            assert_eq!(source.memory().len(), len);
            let sge = source.0.sge(0, 16).unwrap();
            let to = target.remote(8192 + me * SHARE).unwrap();
            a.post_send(&[SendWr::write(to, &[sge])]).unwrap().wait(LONG).unwrap();
            while a.poll_send().is_some() {}
            if round % 50 == me {
                bed.invalidate(0..next(8192).max(1));
            }
        }
    };
    thread::scope(|scope| (0..THREADS).for_each(|me| drop(scope.spawn(move || play(me)))));
    let stats = bed.cache.stats();
    assert!(stats.entries <= 6 && stats.bytes <= 6000, "{stats:?}");
    assert_eq!(stats.hits + stats.misses + stats.uncached, (THREADS * ROUNDS) as u64, "{stats:?}");
    bed.cache.clear();
    assert_eq!(bed.cache.stats().entries, 0);
    let rest: Vec<_> = (0..23).map(|_| bed.register(&bed.memory).unwrap()).collect();
    assert!(
        bed.register(&bed.memory).is_err(),
        "nothing else is registered but {} and the target",
        rest.len()
    );
}
