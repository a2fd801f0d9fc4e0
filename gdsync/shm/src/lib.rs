//! Lock-free hand-overs and shared-memory structures between threads and processes.
//!
//! They are generic over the atomics, so that `tests/loom` explores the code that runs. Not a stable API.

mod backoff;
mod doorbell;
pub mod doorbell_watch;
pub mod event_count;
pub mod packet_ring;
pub mod pending_flag;
pub mod producer_index;
pub mod reset;
pub mod seqlock;
pub mod shm_fifo;
pub mod spin_lock;

pub use backoff::{BACK_OFF_YIELDS, Backoff, back_off, cores_are_busy, sleep_time, yield_core};
pub use doorbell::{
    free_slots, freed_slots, is_complete, is_rung, publish_cqe, recorded, request_calls, ring_doorbell,
    take_doorbell, wants_calls,
};
pub use spin_lock::{RawSpinLock, SpinLock, SpinLockGuard};

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// A 32-bit atomic word.
pub trait Atom32 {
    /// Atomic load.
    fn load(&self, order: Ordering) -> u32;
    /// Atomic store.
    fn store(&self, value: u32, order: Ordering);
    /// Atomic exchange.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Atomic addition, modulo 2^32; returns the value before.
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// A fence of the same memory model.
    fn fence(order: Ordering);
}

/// A 64-bit atomic word.
pub trait Atom64 {
    /// Atomic load.
    fn load(&self, order: Ordering) -> u64;
    /// Atomic store.
    fn store(&self, value: u64, order: Ordering);
    /// Atomic exchange.
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// Atomic maximum; returns the value before.
    fn fetch_max(&self, value: u64, order: Ordering) -> u64;
    /// Atomic bitwise and; returns the value before.
    fn fetch_and(&self, value: u64, order: Ordering) -> u64;
    /// Stores `new` if the value is `current`. Returns the previous value.
    ///
    /// # Errors
    /// The previous value, if it was not `current`.
    fn compare_exchange(&self, current: u64, new: u64, yes: Ordering, no: Ordering) -> Result<u64, u64>;
    /// A fence of the same memory model.
    fn fence(order: Ordering);
}

// Inlined, so that the memory order is a constant.
impl Atom32 for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    #[inline]
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }
    #[inline]
    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }
    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Atom64 for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }
    #[inline]
    fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_max(value, order)
    }
    #[inline]
    fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_and(value, order)
    }
    #[inline]
    fn compare_exchange(&self, current: u64, new: u64, yes: Ordering, no: Ordering) -> Result<u64, u64> {
        self.compare_exchange(current, new, yes, no)
    }
    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}
