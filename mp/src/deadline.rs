//! Time limits that cannot overflow, and the pauses of a wait that polls.

use std::hint::spin_loop;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use crate::error::Error;

/// A start, and how long it may take from there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }

    pub(crate) fn error(&self, what: String) -> Error {
        Error::Deadline { what, after: self.limit }
    }
}

/// How long a wait that polls spins.
const SPIN: Duration = Duration::from_micros(5);
/// How long it yields before it sleeps.
pub(crate) const YIELD: Duration = Duration::from_millis(10);
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Pauses a wait that polls what nobody wakes it for, `waited` after its start: it spins, then yields, then sleeps a small part
/// of the time waited, at most `limit`.
pub(crate) fn back_off(waited: Duration, limit: Duration) {
    if waited < SPIN {
        spin_loop();
    } else if waited < YIELD {
        yield_now();
    } else {
        sleep((waited / 64).clamp(SHORTEST_SLEEP, LONGEST_SLEEP).min(limit));
    }
}
