//! Times collected, and what is said of them.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Times of one kind.
#[derive(Clone, Debug)]
pub struct Samples(Histogram<u64>);

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Micros {
    pub min: f64,
    pub p50: f64,
    pub p99: f64,
}

impl Default for Samples {
    fn default() -> Self {
        // Three digits, from a nanosecond to a minute.
        Self(Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("constant bounds are legal"))
    }
}

impl Samples {
    /// Adds a time; more than a minute counts as a minute.
    pub fn add(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds `count` times that are known only together: each as their mean.
    pub fn add_mean(&mut self, together: Duration, count: u64) {
        let mean =
            u32::try_from(count).ok().and_then(|count| together.checked_div(count)).unwrap_or_default();
        (0..count).for_each(|_| self.add(mean));
    }

    /// Adds all times of another collection.
    pub fn append(&mut self, other: &Samples) {
        self.0 += &other.0;
    }

    /// The mean in microseconds.
    pub fn mean(&self) -> f64 {
        self.0.mean() / 1e3
    }

    /// The longest in microseconds.
    pub fn max_micros(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "times below a minute are exact")]
        let max = self.0.max() as f64;
        max / 1e3
    }

    /// The number of times collected.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The percentiles, each divided by `parts`.
    pub fn micros(&self, parts: u32) -> Micros {
        #[expect(clippy::cast_precision_loss, reason = "times below a minute are exact")]
        let at = |value: u64| value as f64 / 1e3 / f64::from(parts);
        Micros {
            min: at(self.0.min()),
            p50: at(self.0.value_at_quantile(0.5)),
            p99: at(self.0.value_at_quantile(0.99)),
        }
    }
}

/// A number of bytes, short: `64`, `4 Ki`, `1 Mi`.
pub fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} Mi", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} Ki", b >> 10),
        b => b.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_samples() {
        let mut samples = Samples::default();
        (1..=1000).for_each(|us| samples.add(Duration::from_micros(us)));
        let half = samples.micros(2);
        assert!(
            (half.min - 0.5).abs() < 0.01 && (half.p50 - 250.0).abs() < 1.0 && (half.p99 - 495.0).abs() < 1.0
        );
        assert_eq!(samples.count(), 1000);
        assert!((samples.mean() - 500.5).abs() < 1.0);
        let mut samples = Samples::default();
        samples.add_mean(Duration::from_micros(300), 100);
        assert_eq!(samples.count(), 100);
        assert!((samples.micros(1).p50 - 3.0).abs() < 0.01 && (samples.micros(1).min - 3.0).abs() < 0.01);
        assert_eq!([1, 1024, 1000, 3 << 20].map(size), ["1", "1 Ki", "1000", "3 Mi"]);
    }
}
