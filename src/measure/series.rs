//! What the benchmarks of messages write and what plots and comparisons read: curves with their baselines.

use serde::{Deserialize, Serialize};

use super::{Machine, Micros, Samples};

/// The results of one benchmark: what `--json` writes.
///
/// ```json
/// {"benchmark": "pingpong", "device": "software HCA", "wire": "shared memory", "machine": {"cpu": "..."},
///  "options": {"sizes": [8]},
///  "series": [{"name": "stream", "x": "bytes", "unit": "us", "baseline": "cache line",
///              "points": [{"x": 8, "p50": 2.1, "p99": 3.0, "min": 1.9, "ratio": 4.2}]}],
///  "skipped": [{"name": "GPU to GPU", "reason": "CUDA shows no GPU"}]}
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The subcommand of `gdasync bench`.
    pub benchmark: String,
    /// What carried the messages.
    pub device: String,
    /// What lies between the two ends.
    pub wire: String,
    /// The machine and the build.
    pub machine: Machine,
    /// What was asked for.
    pub options: serde_json::Value,
    /// The curves.
    pub series: Vec<Series>,
    /// What was not measured.
    pub skipped: Vec<Skipped>,
}

/// A curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Its name, unique in the report.
    pub name: String,
    /// What the places of its points count, such as `bytes`.
    pub x: String,
    /// The unit of its values.
    pub unit: Unit,
    /// What the ratios compare with: the name of another series, or words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<String>,
    /// The points in the order of their places.
    pub points: Vec<Point>,
}

/// The unit of the values of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Microseconds.
    #[serde(rename = "us")]
    Micros,
    /// 10^9 bytes in a second.
    #[serde(rename = "GB/s")]
    GigabytesPerSecond,
    /// So many in a second.
    #[serde(rename = "1/s")]
    PerSecond,
    /// A number without a unit.
    #[serde(rename = "ratio")]
    Ratio,
}

impl std::fmt::Display for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Micros => "us",
            Self::GigabytesPerSecond => "GB/s",
            Self::PerSecond => "1/s",
            Self::Ratio => "ratio",
        })
    }
}

/// A point of a curve. All values are in the unit of the series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Its place.
    pub x: u64,
    /// The median.
    pub p50: f64,
    /// What 99 of 100 samples are no worse than: of times the long ones are bad, of rates the low ones.
    pub p99: f64,
    /// The smallest.
    pub min: f64,
    /// The median over that of the baseline at the same place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

/// Something that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// The name that its series would have.
    pub name: String,
    /// Why, and what would change that.
    pub reason: String,
}

impl Point {
    /// Times, each divided by `parts`, in microseconds.
    pub fn time(x: u64, samples: &Samples, parts: u32) -> Self {
        samples.micros(parts).at(x)
    }

    /// What is got when a sample's time brings `amount`: rates in `amount` for each microsecond.
    pub fn rate(x: u64, samples: &Samples, amount: f64) -> Self {
        let Micros { p50, p99, .. } = samples.micros(1);
        Self { x, p50: amount / p50, p99: amount / p99, min: amount / samples.max_micros(), ratio: None }
    }

    /// A value that is known without samples of it.
    pub fn value(x: u64, value: f64) -> Self {
        Self { x, p50: value, p99: value, min: value, ratio: None }
    }
}

impl Micros {
    /// Times as a point of a curve.
    pub fn at(self, x: u64) -> Point {
        let Self { min, p50, p99 } = self;
        Point { x, p50, p99, min, ratio: None }
    }
}

impl Series {
    /// A curve without points.
    pub fn new(name: impl Into<String>, x: impl Into<String>, unit: Unit) -> Self {
        Self { name: name.into(), x: x.into(), unit, baseline: None, points: Vec::new() }
    }

    /// Sets the ratios to the medians of another curve at the same places; where it has no point, there is no ratio, and without any
    /// it is no baseline.
    pub fn compare(&mut self, baseline: &Series) {
        if baseline.points.is_empty() {
            return;
        }
        self.baseline = Some(baseline.name.clone());
        for point in &mut self.points {
            point.ratio =
                baseline.at(point.x).map(|base| point.p50 / base.p50).filter(|ratio| ratio.is_finite());
        }
    }

    /// Sets the ratios to the median of the curve's own first point.
    pub fn compare_with_first(&mut self) {
        let Some(first) = self.points.first().copied() else { return };
        self.baseline = Some(format!("{} {}", first.x, self.x));
        for point in &mut self.points {
            point.ratio = Some(point.p50 / first.p50).filter(|ratio| ratio.is_finite());
        }
    }

    /// The point at a place.
    pub fn at(&self, x: u64) -> Option<&Point> {
        self.points.iter().find(|point| point.x == x)
    }
}

impl Report {
    /// The curve of this name.
    pub fn find(&self, name: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.name == name)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn series(name: &str, values: &[(u64, f64)]) -> Series {
        let mut series = Series::new(name, "bytes", Unit::Micros);
        series.points = values.iter().map(|&(x, value)| Point::value(x, value)).collect();
        series
    }

    #[test]
    fn reports_are_read_as_they_were_written() {
        let mut stream = series("stream", &[(8, 3.0), (64, 4.0)]);
        stream.compare(&series("floor", &[(8, 1.5)]));
        let report = Report {
            benchmark: "pingpong".into(),
            device: "software HCA".into(),
            wire: "shared memory".into(),
            machine: Machine::here(),
            options: serde_json::json!({"sizes": [8, 64]}),
            series: vec![stream],
            skipped: vec![Skipped { name: "cuda".into(), reason: "no GPU".into() }],
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["series"][0]["unit"], "us");
        assert_eq!(json["series"][0]["points"][0]["ratio"], 2.0);
        assert!(json["series"][0]["points"][1].get("ratio").is_none(), "the floor has no such point");
        let read: Report = serde_json::from_value(json).unwrap();
        assert_eq!(read, report);
        assert!(read.find("stream").is_some() && read.find("floor").is_none());
        for unit in [Unit::Micros, Unit::GigabytesPerSecond, Unit::PerSecond, Unit::Ratio] {
            assert_eq!(serde_json::to_value(unit).unwrap(), unit.to_string());
        }
    }

    #[test]
    fn rates_are_worst_where_times_are_longest() {
        let mut samples = Samples::default();
        (1..=1000).for_each(|us| samples.add(Duration::from_micros(us)));
        let time = Point::time(1, &samples, 1);
        let rate = Point::rate(1, &samples, 1000.0);
        assert!(time.min <= time.p50 && time.p50 <= time.p99);
        assert!(rate.min <= rate.p99 && rate.p99 <= rate.p50);
        assert!((rate.p50 - 2.0).abs() < 0.01 && (rate.min - 1.0).abs() < 0.01, "{rate:?}");
    }

    #[test]
    fn ratios_to_the_first_point_name_it() {
        let mut curve = series("latency", &[(1, 2.0), (4, 3.0)]);
        curve.compare_with_first();
        assert_eq!(curve.baseline.as_deref(), Some("1 bytes"));
        assert_eq!(curve.points.iter().map(|point| point.ratio).collect::<Vec<_>>(), [Some(1.0), Some(1.5)]);
        curve.baseline = None;
        curve.compare(&series("none", &[]));
        assert_eq!(curve.baseline, None);
        let mut empty = series("none", &[]);
        empty.compare_with_first();
        assert_eq!(empty.baseline, None);
    }
}
