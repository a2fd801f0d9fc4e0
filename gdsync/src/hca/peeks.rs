//! Whether packets wait on any link, seen without the lock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::wire::Peek;

/// Links that are looked at one by one; with more, the answer is always yes.
const MAX: usize = 256;

/// The receiving ends of all links. Links are added and never taken away.
#[derive(Debug)]
pub(crate) struct Peeks {
    count: AtomicUsize,
    peeks: [OnceLock<Arc<Peek>>; MAX],
}

impl Default for Peeks {
    fn default() -> Self {
        Self { count: AtomicUsize::new(0), peeks: [const { OnceLock::new() }; MAX] }
    }
}

impl Peeks {
    /// Adds a link. Callers hold the core's lock.
    pub(crate) fn add(&self, peek: Arc<Peek>) {
        let at = self.count.fetch_add(1, Ordering::AcqRel);
        if let Some(slot) = self.peeks.get(at) {
            slot.get_or_init(|| peek);
        }
    }

    /// Whether a packet may wait.
    pub(crate) fn any(&self) -> bool {
        let count = self.count.load(Ordering::Acquire);
        count > MAX || self.peeks[..count].iter().any(|peek| peek.get().is_none_or(|peek| peek.has_record()))
    }
}
