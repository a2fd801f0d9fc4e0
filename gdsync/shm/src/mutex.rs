//! Spin lock as a `lock_api` mutex. Unlocking is a plain release store, cheaper than the locked instruction of a lock
//! that wakes its waiters.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::lock_api::{self, GuardNoSend, RawMutex};

use crate::spin_lock;

/// Polls before yielding; polls before sleeping.
const SPINS: u32 = 64;
const AWAKE: u32 = SPINS + 16;
/// Sleep between polls after that.
const NAP: Duration = Duration::from_micros(50);

/// A mutex over [`RawSpinLock`].
pub type SpinLock<T> = lock_api::Mutex<RawSpinLock, T>;
/// Guard of a [`SpinLock`].
pub type SpinLockGuard<'a, T> = lock_api::MutexGuard<'a, RawSpinLock, T>;

/// Raw spin lock.
#[derive(Debug)]
pub struct RawSpinLock(AtomicU32);

// SAFETY: `spin_lock::take` returns only in the thread whose exchange changed 0 to 1, and only `unlock` stores 0, so
// one thread holds the lock at a time.
unsafe impl RawMutex for RawSpinLock {
    const INIT: Self = Self(AtomicU32::new(0));

    type Guard = GuardNoSend;

    #[inline]
    fn lock(&self) -> GuardNoSend {
        spin_lock::take(&self.0, |rests| match rests {
            ..SPINS => std::hint::spin_loop(),
            SPINS..AWAKE => thread::yield_now(),
            _ => thread::sleep(NAP),
        });
        GuardNoSend::new()
    }

    #[inline]
    fn try_lock(&self) -> Option<GuardNoSend> {
        spin_lock::try_take(&self.0).then(GuardNoSend::new)
    }

    #[inline]
    unsafe fn unlock(&self, _taken: GuardNoSend) {
        spin_lock::give(&self.0);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}
