//! Wakes those who sleep until completions arrive on a queue.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::protocol::bell;

/// Prods a GPU to look at what its streams wait for.
pub trait Kicks: Send + Sync + fmt::Debug {
    /// Called after a completion was written, without locks.
    fn kick(&self);
}

/// A bell for the threads of one process, and for a GPU whose streams wait on the queue. Raised after every completion;
/// costs a fence and a load while nobody sleeps.
#[derive(Debug, Default)]
pub(crate) struct CqEvent {
    kicker: OnceLock<Arc<dyn Kicks>>,
    /// Streams that want to be kicked wait for completions before this one.
    kick_until: AtomicU64,
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

    /// Streams wait for completions before number `until`, and `kicker` wakes them.
    pub(crate) fn kick_until(&self, until: u64, kicker: &Arc<dyn Kicks>) {
        self.kicker.get_or_init(|| kicker.clone());
        self.kick_until.fetch_max(until, Ordering::Release);
    }

    /// Who is to be kicked after completion `n` was written.
    pub(crate) fn kicker(&self, n: u64) -> Option<&Arc<dyn Kicks>> {
        self.kicker.get().filter(|_| n < self.kick_until.load(Ordering::Acquire))
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
