//! Spin lock for short, mostly uncontended sections: unlock is a release store, waiters poll and are never woken.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;
use std::time::Duration;

use parking_lot::lock_api::{self, GuardNoSend, RawMutex};

use super::Atom32;

/// Takes the lock if it is free.
#[inline]
pub fn try_take(taken: &impl Atom32) -> bool {
    taken.swap(1, Acquire) == 0
}

/// Takes the lock. `rest` pauses between polls; its argument counts the pauses. It must not wait for a wake-up.
#[inline]
pub fn take(taken: &impl Atom32, rest: impl FnMut(u32)) {
    if !try_take(taken) {
        wait(taken, rest);
    }
}

#[cold]
#[inline(never)]
fn wait(taken: &impl Atom32, mut rest: impl FnMut(u32)) {
    let mut rests = 0;
    // Polls with loads, so the holder keeps the cache line.
    while taken.load(Relaxed) != 0 || !try_take(taken) {
        rest(rests);
        rests = rests.saturating_add(1);
    }
}

/// Releases the lock, which the caller holds.
#[inline]
pub fn give(taken: &impl Atom32) {
    taken.store(0, Release);
}

/// Polls before yielding; polls before sleeping.
const SPINS: u32 = 64;
const AWAKE: u32 = SPINS + 16;
/// Sleep between polls after that.
const SLEEP: Duration = Duration::from_micros(50);

/// A mutex over [`RawSpinLock`].
pub type SpinLock<T> = lock_api::Mutex<RawSpinLock, T>;
/// Guard of a [`SpinLock`].
pub type SpinLockGuard<'a, T> = lock_api::MutexGuard<'a, RawSpinLock, T>;

/// Raw spin lock.
#[derive(Debug)]
pub struct RawSpinLock(AtomicU32);

// SAFETY: `take` returns only in the thread whose exchange changed 0 to 1, and only `unlock` stores 0, so
// one thread holds the lock at a time.
unsafe impl RawMutex for RawSpinLock {
    const INIT: Self = Self(AtomicU32::new(0));

    type Guard = GuardNoSend;

    #[inline]
    fn lock(&self) -> GuardNoSend {
        take(&self.0, |rests| match rests {
            ..SPINS => std::hint::spin_loop(),
            SPINS..AWAKE => thread::yield_now(),
            _ => thread::sleep(SLEEP),
        });
        GuardNoSend::new()
    }

    #[inline]
    fn try_lock(&self) -> Option<GuardNoSend> {
        try_take(&self.0).then(GuardNoSend::new)
    }

    #[inline]
    unsafe fn unlock(&self, _taken: GuardNoSend) {
        give(&self.0);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Relaxed) != 0
    }
}
