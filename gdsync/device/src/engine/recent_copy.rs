//! Whether a copy of payload, or a long message, began a moment ago: who waits then does not sleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::copy_engine::FRESH;

/// When a copy last began. Read by anybody at any time; it grows stale by itself.
#[derive(Debug)]
pub struct RecentCopy {
    base: Instant,
    /// Nanoseconds from `base` to that moment, and one; 0 before the first copy.
    at: AtomicU64,
}

impl Default for RecentCopy {
    fn default() -> Self {
        Self { base: Instant::now(), at: AtomicU64::new(0) }
    }
}

impl RecentCopy {
    /// A copy began at this time.
    pub fn note(&self, at: Instant) {
        self.at.store(1 + self.nanoseconds(at), Ordering::Relaxed);
    }

    /// Whether that is less than [`FRESH`] ago.
    pub fn is_recent(&self) -> bool {
        self.when().is_some_and(|at| Instant::now() < at + FRESH)
    }

    /// When a copy last began; `None` before the first.
    pub fn when(&self) -> Option<Instant> {
        let at = self.at.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.base + Duration::from_nanos(at))
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.base).as_nanos()).unwrap_or(u64::MAX - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_recent_for_a_while() {
        let recent_copy = RecentCopy::default();
        assert!(!recent_copy.is_recent(), "there was none");
        // In the future, so that it is recent however slow this machine is.
        recent_copy.note(Instant::now() + 1000 * FRESH);
        assert!(recent_copy.is_recent());
        recent_copy.note(recent_copy.base);
        while recent_copy.base.elapsed() < FRESH {
            std::thread::yield_now();
        }
        assert!(!recent_copy.is_recent());
    }
}
