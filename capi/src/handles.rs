//! Handles: numbers for what the program has opened.
//!
//! A number has the place in a table, the kind of the table, and how often the place was used before. So an ended handle, one of
//! another kind and a random number are recognised. Places are not freed. Each place has one word, which tells whose turn it is and
//! who uses it: a message takes few of these steps, as it should cost little more than in Rust.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::yield_now;

use gdsync_device::fork_guard::ForkGuard;

use crate::abi::Raw;
use crate::guard::{Error, Result, invalid};

/// Bits of a place in its table.
const PLACE_BITS: u32 = 24;
/// Bits of the kind.
const KIND_BITS: u32 = 8;
const MAX_PLACES: usize = 1 << PLACE_BITS;

/// The types of the header, by kind.
const KINDS: [&str; 10] = [
    "",
    "gda_ctx_t",
    "gda_comm_t",
    "gda_listen_t",
    "gda_mem_t",
    "gda_req_t",
    "gda_stream_t",
    "gda_graph_t",
    "gda_win_t",
    "gda_chan_t",
];

/// In the word of a place: there is an object.
const LIVE: u64 = 1;
/// One call has the object for itself.
const TAKEN: u64 = 2;
/// One more call reads the object.
const READER: u64 = 4;
const READERS: u64 = (1 << 32) - READER;
/// One more object had the place. Wraps.
const TURN: u64 = 1 << 32;

fn kind_of(raw: Raw) -> usize {
    raw >> PLACE_BITS & ((1 << KIND_BITS) - 1)
}

fn turn_of(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The objects of one kind.
pub(crate) struct Table<T: 'static> {
    kind: u8,
    slots: OnceLock<boxcar::Vec<Slot<T>>>,
    /// The first free place and one more, or 0; above it a count of changes, so that none goes unnoticed.
    free: AtomicU64,
}

struct Slot<T> {
    word: AtomicU64,
    /// The next free place and one more, or 0.
    next: AtomicU32,
    object: UnsafeCell<Option<T>>,
}

// SAFETY: readers share the object, as `T: Sync` allows; who sets `TAKEN`, or adds one to a place of its own, has it alone, and may be
// another thread than the one that made it, as `T: Send` allows.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// An object that cannot end meanwhile. Drop it before anything waits.
pub(crate) struct Guard<T: 'static> {
    slot: &'static Slot<T>,
    object: &'static T,
}

impl<T> Deref for Guard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.object
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        self.slot.word.fetch_sub(READER, Ordering::Release);
    }
}

/// Refuses calls of forked children: threads that they do not have may be in the middle of something.
#[inline]
fn check_process() -> Result<()> {
    static OWNER: OnceLock<ForkGuard> = OnceLock::new();
    let owner = OWNER.get_or_init(ForkGuard::default);
    // One load; the error is made elsewhere.
    if owner.is_here() { Ok(()) } else { Err(forked(*owner)) }
}

#[cold]
fn forked(owner: ForkGuard) -> Error {
    match owner.check() {
        Err(gdsync::Error::OtherProcess { owner, .. }) => {
            let text = format!(
                "this process was forked from process {owner}, which uses the library, and cannot use it; start processes before \
                 gda_open, or have the child call exec"
            );
            Error::Own(libc::EACCES, text)
        }
        other => Error::Own(libc::EACCES, format!("{other:?}")),
    }
}

impl<T: 'static> Table<T> {
    /// Of a kind of [`KINDS`].
    pub(crate) const fn new(kind: u8) -> Self {
        Self { kind, slots: OnceLock::new(), free: AtomicU64::new(0) }
    }

    /// The type of the header, for errors.
    fn name(&self) -> &'static str {
        KINDS[usize::from(self.kind)]
    }

    fn slots(&'static self) -> &'static boxcar::Vec<Slot<T>> {
        self.slots.get_or_init(boxcar::Vec::new)
    }

    /// The slot of a handle of this kind.
    #[inline]
    fn find(&'static self, raw: Raw) -> Result<&'static Slot<T>> {
        check_process()?;
        let slot =
            self.slots().get(raw & (MAX_PLACES - 1)).filter(|_| kind_of(raw) == usize::from(self.kind));
        slot.ok_or_else(|| self.unknown(raw))
    }

    #[cold]
    fn unknown(&self, raw: Raw) -> Error {
        let value = match KINDS.get(kind_of(raw)).filter(|_| raw >> (PLACE_BITS + KIND_BITS) < 1 << 12) {
            _ if raw == 0 => "NULL".into(),
            // Numbers with more turns may be addresses.
            Some(other) if !other.is_empty() && *other != self.name() => {
                format!("{raw:#x}, which is a {other}")
            }
            _ => format!("{raw:#x}"),
        };
        invalid(self.name(), value, "a handle that has not ended")
    }

    /// Why a place with this word has no object for the handle.
    #[cold]
    fn refusal(&self, raw: Raw, word: u64) -> Error {
        if is_of(raw, word) && word & TAKEN != 0 {
            return Error::Own(libc::EBUSY, format!("another call waits with this {}", self.name()));
        }
        self.unknown(raw)
    }

    #[inline]
    fn pop(&'static self) -> Option<usize> {
        let mut head = self.free.load(Ordering::Acquire);
        loop {
            let place = (head & u64::from(u32::MAX)).checked_sub(1)?;
            let place = usize::try_from(place).ok()?;
            let next = u64::from(self.slots()[place].next.load(Ordering::Relaxed));
            let new = (head >> 32).wrapping_add(1) << 32 | next;
            match self.free.compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(place),
                Err(now) => head = now,
            }
        }
    }

    #[inline]
    fn push(&'static self, place: usize) {
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            // The lower half.
            #[expect(clippy::cast_possible_truncation)]
            self.slots()[place].next.store(head as u32, Ordering::Relaxed);
            let new = (head >> 32).wrapping_add(1) << 32 | (place as u64 + 1);
            match self.free.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Adds an object under a new handle.
    #[inline]
    pub(crate) fn insert(&'static self, object: T) -> Result<Raw> {
        check_process()?;
        let place = match self.pop() {
            Some(place) => place,
            None => {
                let (word, next, object) = (AtomicU64::new(0), AtomicU32::new(0), UnsafeCell::new(None));
                let place = self.slots().push(Slot { word, next, object });
                if place >= MAX_PLACES {
                    return Err(Error::Own(
                        libc::ENOMEM,
                        format!("{MAX_PLACES} of {}: end some", self.name()),
                    ));
                }
                place
            }
        };
        let slot = &self.slots()[place];
        // SAFETY: a place that is not `LIVE` is only of who has got it from the free list, or has just made it.
        unsafe { *slot.object.get() = Some(object) };
        // Readers with ended handles may count meanwhile.
        let word = slot.word.fetch_or(LIVE, Ordering::Release);
        // The kind is never 0, and neither is the number.
        let above = (turn_of(word) as usize) << KIND_BITS | usize::from(self.kind);
        Ok(above << PLACE_BITS | place)
    }

    /// The object of a handle.
    #[inline]
    pub(crate) fn get(&'static self, raw: Raw) -> Result<Guard<T>> {
        let slot = self.find(raw)?;
        let word = slot.word.fetch_add(READER, Ordering::Acquire);
        let object = match is_of(raw, word) && word & (LIVE | TAKEN) == LIVE {
            // SAFETY: the object is there. The reader counted above keeps it: a thread that takes it waits for all readers.
            true => unsafe { (*slot.object.get()).as_ref() },
            false => None,
        };
        object.map(|object| Guard { slot, object }).ok_or_else(|| {
            slot.word.fetch_sub(READER, Ordering::Release);
            self.refusal(raw, word)
        })
    }

    /// Takes an object out for a while: others are refused.
    #[inline]
    pub(crate) fn borrow(&'static self, raw: Raw) -> Result<Borrowed<T>> {
        let slot = self.find(raw)?;
        let mut word = slot.word.load(Ordering::Relaxed);
        loop {
            if !is_of(raw, word) || word & (LIVE | TAKEN) != LIVE {
                return Err(self.refusal(raw, word));
            }
            match slot.word.compare_exchange_weak(word, word | TAKEN, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        // Readers do not wait, so they are soon gone.
        for turn in 0_u32.. {
            if slot.word.load(Ordering::Acquire) & READERS == 0 {
                break;
            }
            if turn < 100 { spin_loop() } else { yield_now() }
        }
        Ok(Borrowed { table: self, slot, place: raw & (MAX_PLACES - 1) })
    }

    /// Ends a handle: of several callers one gets its object.
    pub(crate) fn take(&'static self, raw: Raw) -> Result<T> {
        Ok(self.borrow(raw)?.end())
    }
}

/// Whether a handle is of the present turn of a place.
fn is_of(raw: Raw, word: u64) -> bool {
    (raw as u64) >> (PLACE_BITS + KIND_BITS) == u64::from(turn_of(word))
}

/// An object that one call has alone. It is put back unless it is ended.
pub(crate) struct Borrowed<T: 'static> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
    place: usize,
}

impl<T> Borrowed<T> {
    pub(crate) fn object(&self) -> &T {
        // SAFETY: this call has set `TAKEN`, and there were no readers left.
        unsafe { (*self.slot.object.get()).as_ref() }.expect("it is live")
    }

    /// Ends the handle.
    #[inline]
    pub(crate) fn end(self) -> T {
        // SAFETY: this call has set `TAKEN`, and there were no readers left.
        let object = unsafe { (*self.slot.object.get()).take() }.expect("it is live");
        let Self { table, slot, place } = *std::mem::ManuallyDrop::new(self);
        // The next turn, without the two flags.
        slot.word.fetch_add(TURN - LIVE - TAKEN, Ordering::Release);
        table.push(place);
        object
    }
}

impl<T> Drop for Borrowed<T> {
    fn drop(&mut self) {
        self.slot.word.fetch_and(!TAKEN, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn handles_end_and_are_told_apart() {
        static FIRST: Table<u32> = Table::new(1);
        static SECOND: Table<u32> = Table::new(2);
        let errno = |result: Result<u32>| match result {
            Err(Error::Own(errno, _)) => errno,
            other => panic!("{other:?}"),
        };
        let read = |table: &'static Table<u32>, raw| table.get(raw).map(|guard| *guard);
        let (a, b) = (FIRST.insert(7).unwrap(), SECOND.insert(8).unwrap());
        assert_eq!((read(&FIRST, a).unwrap(), read(&SECOND, b).unwrap()), (7, 8));
        for wrong in [0, b, a + 1, a | 1 << 40, usize::MAX] {
            assert_eq!(errno(read(&FIRST, wrong)), libc::EINVAL, "{wrong:#x}");
        }
        let borrowed = FIRST.borrow(a).unwrap();
        assert_eq!(errno(read(&FIRST, a)), libc::EBUSY);
        assert_eq!(errno(FIRST.take(a)), libc::EBUSY);
        drop(borrowed);
        assert_eq!(FIRST.take(a).unwrap(), 7);
        let c = FIRST.insert(9).unwrap();
        assert!(c != a && c & (MAX_PLACES - 1) == a & (MAX_PLACES - 1), "the place is used again");
        assert_eq!(errno(FIRST.take(a)), libc::EINVAL);
        let (one, other) = (FIRST.get(c).unwrap(), FIRST.get(c).unwrap());
        assert_eq!((*one, *other), (9, 9));
        drop((one, other));
        assert_eq!(FIRST.borrow(c).unwrap().end(), 9);
        assert_eq!(errno(read(&FIRST, c)), libc::EINVAL);
    }

    #[test]
    fn threads_share_places_and_end_each_object_once() {
        static TABLE: Table<Box<[u64; 4]>> = Table::new(3);
        const ROUNDS: u64 = 5_000;
        let handle = AtomicUsize::new(0);
        let ended: u64 = std::thread::scope(|scope| {
            let work = |thread: u64| {
                let (handle, mut ended) = (&handle, 0);
                move || {
                    for round in 0..ROUNDS {
                        let new = TABLE.insert(Box::new([thread << 32 | round; 4])).unwrap();
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
        assert!(TABLE.slots().count() <= 64, "places are used again");
    }
}
