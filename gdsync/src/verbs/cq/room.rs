//! Room for completions: a request is only posted with a slot set aside for its completion.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The slots of a completion queue that may still be written or are not freed yet: never more than it has.
#[derive(Debug)]
pub(super) struct Room {
    slots: u64,
    /// One queue completes here, which is locked by who sets room aside: then that needs no locked instruction.
    is_own: AtomicBool,
    /// Set aside so far.
    reserved: AtomicU64,
    /// Given back since; changes under the lock of the completion queue.
    freed: AtomicU64,
}

impl Room {
    pub(super) fn new(slots: u64) -> Self {
        let (reserved, freed) = Default::default();
        Self { slots, is_own: AtomicBool::new(true), reserved, freed }
    }

    /// Several queues complete here. Who has not seen that when this returns holds the lock of the first one.
    pub(super) fn share(&self) {
        self.is_own.store(false, Ordering::Relaxed);
    }

    /// Slots set aside and not freed.
    pub(super) fn in_use(&self) -> u64 {
        let freed = self.freed.load(Ordering::Acquire);
        self.reserved.load(Ordering::Relaxed).saturating_sub(freed)
    }

    /// Sets a slot aside for a request of a queue that the caller has locked.
    #[inline(always)]
    pub(super) fn reserve(&self) -> bool {
        // Acquire: what was freed had been set aside before.
        let freed = self.freed.load(Ordering::Acquire);
        if !self.is_own.load(Ordering::Relaxed) {
            return self.reserve_shared(freed);
        }
        let reserved = self.reserved.load(Ordering::Relaxed);
        let fits = reserved - freed < self.slots;
        if fits {
            self.reserved.store(reserved + 1, Ordering::Relaxed);
        }
        fits
    }

    #[cold]
    fn reserve_shared(&self, freed: u64) -> bool {
        let more = |reserved: u64| (reserved - freed < self.slots).then_some(reserved + 1);
        self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Takes back what was set aside for requests that will not be made, of a queue that the caller has locked.
    pub(super) fn take_back(&self, count: u64) {
        if self.is_own.load(Ordering::Relaxed) {
            self.reserved.store(self.reserved.load(Ordering::Relaxed) - count, Ordering::Relaxed);
        } else {
            self.reserved.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Frees slots, under the lock of the completion queue.
    pub(super) fn free(&self, count: u64) {
        self.freed.store(self.freed.load(Ordering::Relaxed) + count, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn there_is_as_much_room_as_slots() {
        let room = Room::new(2);
        for is_shared in [false, true] {
            if is_shared {
                room.share();
            }
            assert_eq!([room.reserve(), room.reserve(), room.reserve()], [true, true, false]);
            room.take_back(1);
            assert_eq!((room.in_use(), room.reserve(), room.reserve()), (1, true, false));
            room.free(2);
            assert_eq!(room.in_use(), 0);
        }
    }

    /// Nothing is lost when a second queue comes along while the first one reserves.
    #[test]
    fn a_queue_that_is_shared_later_counts_on() {
        const EACH: u64 = 20_000;
        let room = Room::new(u64::MAX);
        let first = Mutex::new(());
        std::thread::scope(|scope| {
            let one = scope.spawn(|| {
                for _ in 0..EACH {
                    let _held = first.lock();
                    assert!(room.reserve());
                }
            });
            let two = scope.spawn(|| {
                room.share();
                drop(first.lock());
                for _ in 0..EACH {
                    assert!(room.reserve());
                }
            });
            one.join().unwrap();
            two.join().unwrap();
        });
        assert_eq!(room.in_use(), 2 * EACH);
    }
}
