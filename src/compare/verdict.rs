//! Whether two figures differ.

use gdasync::measure::series::Unit;
use serde::Serialize;

use crate::results::Value;

/// What the second figure is, beside the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// Within the threshold.
    Same,
    /// Beyond the threshold, within what such figures differ by anyway.
    Noise,
    Better,
    Worse,
    /// Beyond the threshold, of a kind of which nobody can say what is better.
    Differs,
}

/// How far a median may move without a reason: the mean of both figures' lower quarters, taken as half of what lies between
/// the smallest and the median. Not known (0) without a smallest, and of rates, whose smallest is their worst.
fn noise(unit: Unit, a: Value, b: Value) -> f64 {
    let quarter = |value: Value| value.min.map_or(0.0, |min| (value.p50 - min).max(0.0) / 2.0);
    if unit == Unit::Micros { f64::midpoint(quarter(a), quarter(b)) } else { 0.0 }
}

/// The second median over the first, if that says anything, and the verdict.
pub(crate) fn judge(unit: Unit, a: Value, b: Value, threshold: f64) -> (Option<f64>, Verdict) {
    if a.p50 <= 0.0 || b.p50 <= 0.0 {
        #[expect(clippy::float_cmp, reason = "without a ratio only the same is the same")]
        return (None, if a.p50 == b.p50 { Verdict::Same } else { Verdict::Differs });
    }
    let ratio = b.p50 / a.p50;
    let limit = 1.0 + threshold;
    let verdict = if ratio <= limit && ratio >= 1.0 / limit {
        Verdict::Same
    } else if (b.p50 - a.p50).abs() <= noise(unit, a, b) {
        Verdict::Noise
    } else {
        match unit {
            Unit::Micros if ratio > 1.0 => Verdict::Worse,
            Unit::PerSecond | Unit::GigabytesPerSecond if ratio < 1.0 => Verdict::Worse,
            Unit::Micros | Unit::PerSecond | Unit::GigabytesPerSecond => Verdict::Better,
            Unit::Ratio => Verdict::Differs,
        }
    };
    (Some(ratio), verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(min: f64, p50: f64) -> Value {
        Value { min: Some(min), p50, p99: Some(p50 * 2.0) }
    }

    fn verdict(unit: Unit, a: (f64, f64), b: (f64, f64)) -> Verdict {
        judge(unit, value(a.0, a.1), value(b.0, b.1), 0.1).1
    }

    #[test]
    fn more_is_worse_of_times_and_better_of_rates() {
        for (a, b, times, rates) in [
            (10.0, 10.9, Verdict::Same, Verdict::Same),
            (10.0, 9.2, Verdict::Same, Verdict::Same),
            (10.0, 11.5, Verdict::Worse, Verdict::Better),
            (10.0, 8.5, Verdict::Better, Verdict::Worse),
        ] {
            assert_eq!(verdict(Unit::Micros, (a, a), (b, b)), times, "{a} {b}");
            assert_eq!(verdict(Unit::PerSecond, (a, a), (b, b)), rates, "{a} {b}");
            assert_eq!(verdict(Unit::GigabytesPerSecond, (a, a), (b, b)), rates, "{a} {b}");
        }
        assert_eq!(verdict(Unit::Ratio, (1.0, 1.0), (2.0, 2.0)), Verdict::Differs);
    }

    #[test]
    fn wide_figures_differ_only_by_more_than_their_width() {
        assert_eq!(verdict(Unit::Micros, (4.0, 8.0), (4.0, 9.5)), Verdict::Noise);
        assert_eq!(verdict(Unit::Micros, (4.0, 8.0), (4.0, 11.5)), Verdict::Worse);
        assert_eq!(verdict(Unit::Micros, (7.9, 8.0), (7.9, 9.5)), Verdict::Worse);
        assert_eq!(
            verdict(Unit::PerSecond, (1.0, 8.0), (1.0, 7.0)),
            Verdict::Worse,
            "nothing is known of its noise"
        );
    }

    #[test]
    fn nothing_is_divided_by_nothing() {
        assert_eq!(judge(Unit::Micros, 0.0.into(), 0.0.into(), 0.1), (None, Verdict::Same));
        assert_eq!(judge(Unit::Ratio, 0.0.into(), 1.0.into(), 0.1), (None, Verdict::Differs));
        assert_eq!(judge(Unit::Ratio, (-0.1).into(), 0.2.into(), 0.1), (None, Verdict::Differs));
    }
}
