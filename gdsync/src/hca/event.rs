//! Wakes threads that sleep until completions arrive on a queue.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::protocol::bell;

/// A bell for the threads of one process. Raised after every completion; costs a fence and a load while nobody sleeps.
#[derive(Debug, Default)]
pub(crate) struct CqEvent {
    sleepers: AtomicU32,
    sequence: AtomicU32,
    lock: Mutex<()>,
    raised: Condvar,
}

impl CqEvent {
    /// Sleeps unless `ready`, until raised or for `timeout`. May return for no reason.
    pub(crate) fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let ticket = bell::announce(&self.sleepers, &self.sequence);
        if ready() {
            return;
        }
        let mut guard = self.lock.lock();
        if self.sequence.load(Ordering::Relaxed) == ticket {
            self.raised.wait_for(&mut guard, timeout);
        }
    }

    /// Tells sleepers that a completion was written.
    pub(crate) fn raise(&self) {
        if bell::ring(&self.sleepers, &self.sequence) {
            // Taken and dropped, so that a sleeper between its look at the sequence and its wait is not missed.
            drop(self.lock.lock());
            self.raised.notify_all();
        }
    }
}
