//! A time limit that cannot overflow, whatever the user passes.

use std::time::{Duration, Instant};

use crate::error::Error;

/// A start and how long it may take from there.
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
