//! Backoff for polling loops: spin, then yield, then sleep.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// State of one wait. The caller polls, then calls [`Backoff::spin`], and sleeps when that returns false.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    since: Instant,
    spin: Duration,
}

impl Backoff {
    /// A wait that starts now and sleeps after `spin`.
    pub fn new(spin: Duration) -> Self {
        Self::since(Instant::now(), spin)
    }

    /// A wait that started at `since`.
    pub fn since(since: Instant, spin: Duration) -> Self {
        Self { since, spin }
    }

    /// Time since the start.
    pub fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Between two polls: spins during the first eighth of the time, then yields. Returns false at once when the caller
    /// should sleep.
    pub fn spin(&self) -> bool {
        self.spin_after(self.waited())
    }

    /// As [`Backoff::spin`], with the time since the start.
    pub fn spin_after(&self, waited: Duration) -> bool {
        if waited >= self.spin {
            return false;
        }
        if waited < self.spin / 8 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        true
    }
}

/// Sleep until the next poll: an eighth of `waited`, within `range`.
pub fn nap(waited: Duration, range: RangeInclusive<Duration>) -> Duration {
    (waited / 8).clamp(*range.start(), *range.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_spins_then_yields_then_sleeps() {
        let ms = Duration::from_millis;
        let backoff = Backoff::new(ms(8));
        assert!([0, 1, 7].iter().all(|&waited| backoff.spin_after(ms(waited))));
        assert!(!backoff.spin_after(ms(8)));
        assert!(!Backoff::new(Duration::ZERO).spin());
        assert_eq!([1, 80, 800].map(|waited| nap(ms(waited), ms(1)..=ms(20))), [ms(1), ms(10), ms(20)]);
    }
}
