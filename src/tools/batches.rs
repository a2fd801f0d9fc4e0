//! Times of things that are shorter than reading the clock.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::tools_shared::Result;
use crate::measure::{Micros, Samples};

/// Calls are timed in at most so many batches, as GDRCopy's tools do.
const MOST: u32 = 100;

/// How many calls, in how many batches of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batches {
    count: u32,
    each: u32,
}

impl Batches {
    /// At least so many calls, rounded up to whole batches.
    pub(super) fn of(calls: u32) -> Self {
        let count = calls.clamp(1, MOST);
        Self { count, each: calls.div_ceil(count).max(1) }
    }

    /// All calls.
    pub(super) fn calls(self) -> u64 {
        u64::from(self.count) * u64::from(self.each)
    }

    /// Times the calls, after a tenth as many that warm up.
    pub(super) fn time(self, mut call: impl FnMut() -> Result<()>) -> Result<Timing> {
        for _ in 0..self.calls().div_ceil(10) {
            call()?;
        }
        let mut timing = Timing { batches: self, samples: Samples::default(), total: Duration::ZERO };
        for _ in 0..self.count {
            let start = Instant::now();
            for _ in 0..self.each {
                call()?;
            }
            timing.add(start.elapsed());
        }
        Ok(timing)
    }

    /// Like [`time`](Self::time) with something before each call that is not timed. The clock's own time counts.
    pub(super) fn time_each(
        self,
        mut before: impl FnMut() -> Result<()>,
        mut call: impl FnMut() -> Result<()>,
    ) -> Result<Timing> {
        let mut timing = Timing { batches: self, samples: Samples::default(), total: Duration::ZERO };
        for warm in 0..=self.count {
            let mut sum = Duration::ZERO;
            for _ in 0..self.each {
                before()?;
                let start = Instant::now();
                call()?;
                sum += start.elapsed();
            }
            if warm > 0 {
                timing.add(sum);
            }
        }
        Ok(timing)
    }
}

/// The times of batches.
#[derive(Clone, Debug)]
pub(super) struct Timing {
    batches: Batches,
    samples: Samples,
    total: Duration,
}

/// Times of one call, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PerCall {
    /// Calls timed.
    pub(super) calls: u64,
    /// Calls in a batch: the other values are of averages over so many.
    pub(super) batch: u32,
    #[serde(flatten)]
    pub(super) us: Micros,
    pub(super) mean: f64,
}

impl Timing {
    fn add(&mut self, batch: Duration) {
        self.samples.add(batch);
        self.total += batch;
    }

    /// The times of one call.
    pub(super) fn per_call(&self) -> PerCall {
        let calls = self.samples.count() * u64::from(self.batches.each);
        let mean = self.total.as_secs_f64() * 1e6 / calls as f64;
        PerCall { calls, batch: self.batches.each, us: self.samples.micros(self.batches.each), mean }
    }

    /// The rate of calls that move so many bytes each.
    pub(super) fn mib_per_s(&self, bytes: usize) -> f64 {
        bytes as f64 / f64::from(1 << 20) / (self.per_call().mean / 1e6)
    }

    /// With the times that another thread took at the same.
    pub(super) fn append(mut self, other: Self) -> Self {
        self.samples.append(&other.samples);
        self.total += other.total;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_at_least_the_calls() {
        for calls in [0, 1, 2, 99, 100, 101, 199, 10_000, 12_345, u32::MAX] {
            let batches = Batches::of(calls);
            assert!(batches.count <= MOST && batches.calls() >= u64::from(calls.max(1)), "{batches:?}");
            assert!(batches.calls() < u64::from(calls.max(1)) + u64::from(MOST), "{batches:?}");
        }
    }

    #[test]
    fn every_call_is_made_and_counted() {
        let mut made = 0;
        let timing = Batches::of(250).time(|| {
            made += 1;
            Ok(())
        });
        let timing = timing.unwrap();
        assert_eq!((timing.per_call().calls, timing.per_call().batch), (300, 3));
        assert_eq!(timing.clone().append(timing).per_call().calls, 600);
        assert_eq!(made, 330);
        let (mut before, mut after) = (0, 0);
        let each = Batches::of(7).time_each(|| (before += 1, Ok(())).1, || (after += 1, Ok(())).1).unwrap();
        assert_eq!((before, after, each.per_call().calls), (8, 8, 7));
    }
}
