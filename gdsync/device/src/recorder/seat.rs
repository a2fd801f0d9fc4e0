//! Which lane a thread writes to: a number that no other living thread of the process has.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::LANES;

const BITS: usize = 64;
static TAKEN: [AtomicU64; LANES / BITS] = [const { AtomicU64::new(0) }; LANES / BITS];

thread_local! {
    static SEAT: Seat = Seat::take();
    /// The recorder that knows the thread, and its lane there.
    static KNOWN: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

/// The lane of the calling thread, if the recorder of this number, which is not 0, knows it.
#[inline]
pub(super) fn known(serial: u64) -> Option<usize> {
    let (known_to, thread_slot) = KNOWN.get();
    (known_to == serial).then_some(thread_slot)
}

/// From now on the recorder of this number knows the calling thread by this lane, which is its seat's.
pub(super) fn make_known(serial: u64, thread_slot: usize) {
    KNOWN.set((serial, thread_slot));
}

/// A thread's number, given back when the thread ends.
pub(super) struct Seat {
    /// None where all are taken.
    pub thread_slot: Option<usize>,
}

impl Seat {
    /// Runs `f` with the seat of the calling thread; not while the thread is ending.
    #[inline]
    pub(super) fn with<T>(f: impl FnOnce(&Self) -> T) -> Option<T> {
        SEAT.try_with(f).ok()
    }

    fn take() -> Self {
        let free = |(at, word): (usize, &AtomicU64)| loop {
            let taken = word.load(Ordering::Relaxed);
            let bit = taken.trailing_ones();
            if bit == u64::BITS {
                return None;
            }
            // Acquire: after all that the last one on this seat has written.
            let before = word.fetch_or(1 << bit, Ordering::Acquire);
            if before & 1 << bit == 0 {
                return Some(at * BITS + bit as usize);
            }
        };
        Self { thread_slot: TAKEN.iter().enumerate().find_map(free) }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        KNOWN.set((0, 0));
        if let Some(thread_slot) = self.thread_slot {
            TAKEN[thread_slot / BITS].fetch_and(!(1 << (thread_slot % BITS)), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn living_threads_have_seats_of_their_own() {
        let barrier = Barrier::new(8);
        let seat = || {
            let thread_slot = Seat::with(|seat| seat.thread_slot).unwrap().unwrap();
            assert_eq!(Seat::with(|seat| seat.thread_slot).unwrap(), Some(thread_slot), "it stays");
            barrier.wait();
            thread_slot
        };
        let mut thread_slots: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(seat)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        thread_slots.sort_unstable();
        thread_slots.dedup();
        assert_eq!(thread_slots.len(), 8);
    }

    #[test]
    fn seats_come_back_when_threads_end() {
        // Many more than there are seats; one of another test may be taken meanwhile.
        for _ in 0..2 * LANES {
            std::thread::spawn(|| assert!(Seat::with(|seat| seat.thread_slot).unwrap().is_some()))
                .join()
                .unwrap();
        }
    }
}
