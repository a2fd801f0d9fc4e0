//! The release of all that waits, once, when a rank is lost. `tests/it/loom.rs` explores the code of this file.

use crate::sync::{AtomicU8, Mutex, Ordering};

/// All ranks are there.
const ALIVE: u8 = 0;
/// One is lost, and words are being released.
const RELEASING: u8 = 1;
/// All that waited may go on.
const RELEASED: u8 = 2;

/// Waiting items, and how far their release is.
#[derive(Debug)]
pub(crate) struct Release<T> {
    phase: AtomicU8,
    /// `None` once it was taken. So each is released by one thread: twice 2^62 would be less than 0.
    waiting: Mutex<Option<Vec<T>>>,
}

impl<T> Release<T> {
    pub(crate) fn new() -> Self {
        Self { phase: AtomicU8::new(ALIVE), waiting: Mutex::new(Some(Vec::new())) }
    }

    /// Whether a rank is lost.
    pub(crate) fn has_begun(&self) -> bool {
        self.phase.load(Ordering::Acquire) != ALIVE
    }

    /// Whether all is released.
    pub(crate) fn is_over(&self) -> bool {
        self.phase.load(Ordering::Acquire) == RELEASED
    }

    /// Adds an item to release. Returns it if the release has begun to take items: the caller releases it then.
    pub(crate) fn add(&self, one: T) -> Result<(), T> {
        match &mut *self.waiting.lock() {
            Some(waiting) => {
                waiting.push(one);
                Ok(())
            }
            None => Err(one),
        }
    }

    /// Drops entries that are no longer needed.
    pub(crate) fn retain(&self, keeps: impl Fn(&T) -> bool) {
        if let Some(waiting) = &mut *self.waiting.lock() {
            waiting.retain(keeps);
        }
    }

    /// A rank is lost. Returns whether the caller has to release what waits: the first one.
    pub(crate) fn begin(&self) -> bool {
        self.phase.compare_exchange(ALIVE, RELEASING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// What the caller of [`begin`](Self::begin) has to release.
    pub(crate) fn take(&self) -> Vec<T> {
        self.waiting.lock().take().unwrap_or_default()
    }

    /// All of it is released.
    pub(crate) fn end(&self) {
        self.phase.store(RELEASED, Ordering::Release);
    }
}
