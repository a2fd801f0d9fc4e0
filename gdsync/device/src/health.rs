//! Why a queue pair does no more work.

use std::sync::atomic::{AtomicBool, Ordering};

use gdsync_shm::SpinLock;

use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;

/// Why a queue pair does no more work: the first failure, kept for every later call; or this is not its process.
#[derive(Debug, Default)]
pub struct Health {
    broken: AtomicBool,
    /// The process that made the queue pair.
    pub fork_guard: ForkGuard,
    error: SpinLock<Option<Error>>,
}

impl Health {
    /// Records a failure. A flush never replaces anything, and any cause replaces a flush.
    pub fn record(&self, error: Error) {
        let flush = |e: &Error| matches!(e, Error::Completion(c) if c.is_flush());
        let mut slot = self.error.lock();
        if slot.as_ref().is_none_or(|known| flush(known) && !flush(&error)) {
            *slot = Some(error);
        }
        self.broken.store(true, Ordering::Release);
    }

    /// Whether the queue pair does no more work, or belongs to another process.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire) || !self.fork_guard.is_here()
    }

    /// The failure, if there was one.
    pub fn check(&self) -> Result<()> {
        if !self.is_broken() {
            return Ok(());
        }
        self.fork_guard.check()?;
        self.error.lock().clone().map_or(Ok(()), Err)
    }

    /// Forgets the failure, for a reset.
    pub fn clear(&self) {
        *self.error.lock() = None;
        self.broken.store(false, Ordering::Release);
    }
}
