//! Locks that are held for moments, and mostly by one thread: to let one go is one store, where a lock that wakes those who wait takes
//! a locked instruction, which waits until all that was written before is in the cache.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::lock_api::{self, GuardNoSend, RawMutex};

use crate::spin_lock;

/// Looks of who waits before it lets others run between two, and before it sleeps.
const SPINS: u32 = 64;
const AWAKE: u32 = SPINS + 16;
/// How long.
const NAP: Duration = Duration::from_micros(50);

/// A mutex over [`RawSpinLock`].
pub type SpinLock<T> = lock_api::Mutex<RawSpinLock, T>;
/// Its guard.
pub type SpinLockGuard<'a, T> = lock_api::MutexGuard<'a, RawSpinLock, T>;

/// The lock itself.
#[derive(Debug)]
pub struct RawSpinLock(AtomicU32);

// SAFETY: who has taken it has it alone until it is given back; see `protocol::spin_lock`.
unsafe impl RawMutex for RawSpinLock {
    const INIT: Self = Self(AtomicU32::new(0));

    type Guard = GuardNoSend;

    #[inline(always)]
    fn lock(&self) -> GuardNoSend {
        spin_lock::take(&self.0, |rests| match rests {
            ..SPINS => std::hint::spin_loop(),
            SPINS..AWAKE => thread::yield_now(),
            _ => thread::sleep(NAP),
        });
        GuardNoSend::new()
    }

    #[inline(always)]
    fn try_lock(&self) -> Option<GuardNoSend> {
        spin_lock::try_take(&self.0).then(GuardNoSend::new)
    }

    #[inline(always)]
    unsafe fn unlock(&self, _taken: GuardNoSend) {
        spin_lock::give(&self.0);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}
