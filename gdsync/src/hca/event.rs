//! Wakes threads that sleep until completions arrive on a queue.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Raised after every completion; costs a fence and a load while nobody sleeps.
#[derive(Debug, Default)]
pub(crate) struct CqEvent {
    sleepers: AtomicU32,
    lock: Mutex<()>,
    raised: Condvar,
}

impl CqEvent {
    /// Sleeps unless `ready`, until raised or for `timeout`.
    pub(crate) fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `raise`: either `ready` sees the completion, or `raise` sees the sleeper.
        fence(Ordering::SeqCst);
        let mut guard = self.lock.lock();
        if !ready() {
            self.raised.wait_for(&mut guard, timeout);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Tells sleepers that a completion was written.
    pub(crate) fn raise(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // Taken and dropped, so that a sleeper between its check and its wait is not missed.
            drop(self.lock.lock());
            self.raised.notify_all();
        }
    }
}
