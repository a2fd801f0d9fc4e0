//! Whether packets wait on any link, seen without the lock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::wire::Peek;

/// Places that are looked at one by one; with more, the answer is always yes.
const MAX: usize = 256;

/// The receiving ends of all links, by their places. Links come and go; their places stay, and show nothing meanwhile.
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
    /// Adds the place with this number, if it is new.
    pub(crate) fn add(&self, number: usize, peek: Arc<Peek>) {
        if let Some(slot) = self.peeks.get(number) {
            slot.get_or_init(|| peek);
        }
        self.count.fetch_max(number + 1, Ordering::AcqRel);
    }

    /// Whether a packet may wait.
    pub(crate) fn any(&self) -> bool {
        let count = self.count.load(Ordering::Acquire);
        count > MAX || self.peeks[..count].iter().any(|peek| peek.get().is_some_and(|peek| peek.has_record()))
    }
}
