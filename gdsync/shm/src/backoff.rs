//! Backoff of a thread that waits for something that will come soon: it spins, then yields, then sleeps.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Measures one wait. The caller looks at what it waits for, then calls [`Backoff::spin`], and sleeps when that says so.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    since: Instant,
    spin: Duration,
}

impl Backoff {
    /// A wait that begins now, and sleeps after `spin`.
    pub fn new(spin: Duration) -> Self {
        Self::since(Instant::now(), spin)
    }

    /// A wait that began before.
    pub fn since(since: Instant, spin: Duration) -> Self {
        Self { since, spin }
    }

    /// How long it has lasted.
    pub fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Between two looks: spins in the first eighth of the time, and then yields the core, as there may be more threads than
    /// cores. Returns false, at once, when it is time to sleep instead.
    pub fn spin(&self) -> bool {
        self.spin_after(self.waited())
    }

    /// As [`Backoff::spin`], for a caller that has read the clock.
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

/// How long to sleep until the next look, after `waited`: an eighth of it, so that what comes is noticed late by that much at most.
pub fn nap(waited: Duration, range: RangeInclusive<Duration>) -> Duration {
    (waited / 8).clamp(*range.start(), *range.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_spins_then_yields_then_sleeps() {
        let ms = Duration::from_millis;
        let backoff = Backoff::new(ms(8));
        assert!([0, 1, 7].iter().all(|&waited| backoff.spin_after(ms(waited))));
        assert!(!backoff.spin_after(ms(8)));
        assert!(!Backoff::new(Duration::ZERO).spin());
        assert_eq!([1, 80, 800].map(|waited| nap(ms(waited), ms(1)..=ms(20))), [ms(1), ms(10), ms(20)]);
    }
}
