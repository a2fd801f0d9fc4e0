//! The slots of a completion queue that are in use.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts the slots that are reserved or not yet freed: never more than the ring has. A request is posted only with a
/// slot reserved for its completion.
#[derive(Debug)]
pub(super) struct Room {
    slots: u64,
    /// Set while only one queue completes here. The reserving thread has locked that queue, so plain stores suffice.
    is_own: AtomicBool,
    /// Number reserved so far.
    reserved: AtomicU64,
    /// Number freed so far; written under the completion queue's lock.
    freed: AtomicU64,
}

impl Room {
    pub(super) fn new(slots: u64) -> Self {
        let (reserved, freed) = Default::default();
        Self { slots, is_own: AtomicBool::new(true), reserved, freed }
    }

    /// Switches to atomic updates, for several queues. Afterwards, a thread that has not seen the change holds the
    /// first queue's lock.
    pub(super) fn share(&self) {
        self.is_own.store(false, Ordering::Relaxed);
    }

    /// Whether only one queue completes here.
    pub(super) fn is_own(&self) -> bool {
        self.is_own.load(Ordering::Relaxed)
    }

    /// Slots reserved and not freed.
    pub(super) fn in_use(&self) -> u64 {
        let freed = self.freed.load(Ordering::Acquire);
        self.reserved.load(Ordering::Relaxed).saturating_sub(freed)
    }

    /// Reserves a slot for a request of a queue that the caller has locked.
    #[inline]
    pub(super) fn reserve(&self) -> bool {
        // Acquire: each freed slot was reserved before.
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

    /// Returns reservations of requests that are not posted. The caller has locked their queue.
    pub(super) fn take_back(&self, count: u64) {
        if self.is_own.load(Ordering::Relaxed) {
            self.reserved.store(self.reserved.load(Ordering::Relaxed) - count, Ordering::Relaxed);
        } else {
            self.reserved.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Frees slots. The caller has locked the completion queue.
    pub(super) fn free(&self, count: u64) {
        self.freed.store(self.freed.load(Ordering::Relaxed) + count, Ordering::Release);
    }
}
