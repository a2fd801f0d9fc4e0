//! Axes: where values are on them, and where their ticks are.

use std::ops::Range;

use gdasync::measure::series::Unit;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;

use crate::results::Axis;

/// How an axis goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    /// By powers of ten.
    Log,
    /// By powers of two.
    Doubling,
}

/// An axis: places on it are values of [`Scale::place`].
#[derive(Clone, Debug)]
pub(super) struct Ticks {
    pub(super) scale: Scale,
    pub(super) range: Range<f64>,
    /// Places with a label.
    pub(super) bold: Vec<f64>,
    /// Places with a fine line only.
    pub(super) fine: Vec<f64>,
}

impl Scale {
    pub(super) fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log => value.log10(),
            Self::Doubling => value.log2(),
        }
    }

    pub(super) fn value(self, place: f64) -> f64 {
        match self {
            Self::Linear => place,
            Self::Log => 10_f64.powf(place),
            Self::Doubling => place.exp2(),
        }
    }
}

/// Steps from one number to another; at most a few hundred are ever asked for.
fn steps(range: &Range<f64>, step: f64) -> Vec<f64> {
    let first = (range.start / step).ceil();
    (0..1000).map(|i| (first + f64::from(i)) * step).take_while(|&at| at <= range.end + step * 1e-6).collect()
}

/// A step of 1, 2 or 5 times a power of ten that goes about so many times into a length.
fn round_step(length: f64, count: f64) -> f64 {
    let rough = length / count;
    let power = 10_f64.powf(rough.log10().floor());
    let factors = [1.0, 2.0, 5.0];
    power * factors.into_iter().find(|factor| factor * power >= rough * 0.999).unwrap_or(10.0)
}

impl Ticks {
    /// An axis of values between two of them; a linear one begins at 0.
    pub(super) fn values(scale: Scale, low: f64, high: f64) -> Self {
        match scale {
            Scale::Linear => {
                let (low, high) = (low.min(0.0), high.max(0.0));
                let length = if high > low { high - low } else { 1.0 };
                let step = round_step(length, 6.0);
                let end = low + length * 1.05;
                let start = (low / step).floor() * step;
                Self { scale, range: start..end, bold: steps(&(start..end), step), fine: Vec::new() }
            }
            Scale::Log | Scale::Doubling => {
                let range = (low / 1.4).log10()..(high * 1.25).log10();
                let (bold, fine) = decades(&range);
                Self { scale: Scale::Log, range, bold, fine }
            }
        }
    }

    /// An axis of sizes or numbers, at which there are points.
    pub(super) fn places(axis: &Axis, places: &[u64]) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a pixel is coarser")]
        let values: Vec<f64> = places.iter().map(|&place| place as f64).collect();
        let (low, high) = (
            values.iter().copied().fold(f64::INFINITY, f64::min),
            values.iter().copied().fold(0.0, f64::max),
        );
        let doubling = low > 0.0 && (*axis == Axis::Bytes || high >= low * 16.0);
        let scale = if doubling { Scale::Doubling } else { Scale::Linear };
        let (start, end) = (scale.place(low), scale.place(high));
        let margin = if end > start { (end - start) * 0.03 } else { 1.0 };
        let range = start - margin..end + margin;
        let at: Vec<f64> = values.iter().map(|&value| scale.place(value)).collect();
        let apart = |at: &[f64]| at.windows(2).all(|pair| pair[1] - pair[0] >= (end - start) / 13.0);
        let bold = if apart(&at) {
            at
        } else if doubling {
            let step =
                [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| (end - start) / step <= 13.0).unwrap_or(20.0);
            steps(&range, step)
        } else {
            steps(&range, round_step(end - start, 8.0).max(1.0))
        };
        Self { scale, range, bold, fine: Vec::new() }
    }

    /// The label of a place with a value.
    pub(super) fn label(&self, place: f64, unit: Unit) -> String {
        let value = self.scale.value(place);
        match unit {
            Unit::PerSecond => [(1e9, "G"), (1e6, "M"), (1e3, "k")]
                .into_iter()
                .find(|(factor, _)| value >= factor * 0.9999)
                .map_or_else(|| number(value), |(factor, name)| format!("{} {name}", number(value / factor))),
            _ => number(value),
        }
    }

    /// The label of a place with a size or a number.
    pub(super) fn place_label(&self, place: f64, axis: &Axis) -> String {
        let value = self.scale.value(place);
        if *axis == Axis::Bytes { bytes(value) } else { number(value) }
    }
}

impl Ranged for Ticks {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range.clone()).map(place, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { self.fine.clone() } else { self.bold.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// Ticks at powers of ten; where there are few, between them too.
fn decades(range: &Range<f64>) -> (Vec<f64>, Vec<f64>) {
    let length = range.end - range.start;
    let within = |at: &f64| range.contains(at);
    let powers = steps(&(range.start.floor()..range.end), (length / 10.0).ceil().max(1.0));
    let times = |factors: &[f64]| -> Vec<f64> {
        let all = powers.iter().flat_map(|power| factors.iter().map(move |factor| power + factor.log10()));
        all.filter(within).collect()
    };
    let fine = if length <= 6.0 { times(&[2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) } else { Vec::new() };
    for factors in [&[1.0][..], &[1.0, 2.0, 5.0], &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]] {
        let bold = times(factors);
        if bold.len() >= 3 {
            return (bold, fine);
        }
    }
    let linear = 10_f64.powf(range.start)..10_f64.powf(range.end);
    let step = round_step(linear.end - linear.start, 4.0);
    (steps(&linear, step).into_iter().filter(|&at| at > 0.0).map(f64::log10).collect(), fine)
}

/// A number as short as it is exact to four digits: `0.05`, `2.5`, `1,000`.
pub(crate) fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e15 || (size > 0.0 && size < 1e-4) {
        return format!("{value:.2e}");
    }
    let decimals = match size {
        s if s >= 100.0 => 0,
        s if s >= 10.0 => 1,
        s if s >= 1.0 => 2,
        s if s >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{value:.decimals$}");
    let (whole, part) = text.split_once('.').unwrap_or((&text, ""));
    let part = part.trim_end_matches('0');
    let (sign, digits) = whole.split_at(usize::from(whole.starts_with('-')));
    let mut grouped = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let dot = if part.is_empty() { "" } else { "." };
    let sign = if grouped == "0" && part.is_empty() { "" } else { sign };
    format!("{sign}{grouped}{dot}{part}")
}

/// A size with its unit: `8 B`, `4 KiB`; in bytes what no unit tells exactly.
pub(crate) fn bytes(value: f64) -> String {
    let value = value.round();
    let units = [(1_073_741_824.0, "GiB"), (1_048_576.0, "MiB"), (1024.0, "KiB")];
    let unit =
        units.into_iter().find(|(factor, _)| value >= *factor && (value * 4.0 / factor).fract() == 0.0);
    unit.map_or_else(
        || format!("{} B", number(value)),
        |(factor, name)| format!("{} {name}", number(value / factor)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &Ticks) -> Vec<String> {
        ticks.bold.iter().map(|&at| ticks.label(at, Unit::Micros)).collect()
    }

    #[test]
    fn ticks_are_round_and_enough() {
        assert_eq!(
            labels(&Ticks::values(Scale::Log, 0.01, 90_000.0)),
            ["0.01", "0.1", "1", "10", "100", "1,000", "10,000", "100,000"]
        );
        assert_eq!(labels(&Ticks::values(Scale::Log, 2.0, 30.0)), ["2", "5", "10", "20"]);
        assert_eq!(labels(&Ticks::values(Scale::Log, 3.1, 5.4)), ["3", "4", "5", "6"]);
        assert_eq!(labels(&Ticks::values(Scale::Linear, 2.0, 68.0)), ["0", "20", "40", "60"]);
        assert_eq!(labels(&Ticks::values(Scale::Linear, -0.4, 1.0)), ["-0.5", "0", "0.5", "1"]);
        for (low, high) in
            [(1e-300, 1e300), (5.0, 5.0), (1e9, 1.000_001e9), (f64::MIN_POSITIVE, f64::MIN_POSITIVE)]
        {
            for scale in [Scale::Log, Scale::Linear] {
                let ticks = Ticks::values(scale, low, high);
                assert!((1..=14).contains(&ticks.bold.len()), "{scale:?} {low} {high}: {:?}", ticks.bold);
                assert!(ticks.range.start < ticks.range.end, "{ticks:?}");
            }
        }
    }

    #[test]
    fn sizes_are_labelled_where_the_points_are_or_at_powers_of_two() {
        let labels = |places: &[u64]| {
            let ticks = Ticks::places(&Axis::Bytes, places);
            ticks.bold.iter().map(|&at| ticks.place_label(at, &Axis::Bytes)).collect::<Vec<_>>()
        };
        assert_eq!(labels(&[8, 4096]), ["8 B", "4 KiB"]);
        assert_eq!(labels(&[1000]), ["1,000 B"]);
        let all: Vec<u64> = (0..27).map(|i| 1 << i).collect();
        assert_eq!(labels(&all)[..6], ["1 B", "4 B", "16 B", "64 B", "256 B", "1 KiB"]);
        let few = Ticks::places(&Axis::Count("queue pairs".into()), &[1, 2, 3, 4]);
        assert_eq!(few.scale, Scale::Linear);
        assert_eq!(few.bold, [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, -0.0, 0.05, 2.5, 10.25, 999.6, 1000.0, -1234567.0, 1e20, 1e-9].map(number);
        assert_eq!(
            numbers,
            ["0", "0", "0.05", "2.5", "10.2", "1,000", "1,000", "-1,234,567", "1.00e20", "1.00e-9"]
        );
        assert_eq!(
            [1.0, 4096.0, 5000.0, 1.5 * 1_048_576.0].map(bytes),
            ["1 B", "4 KiB", "5,000 B", "1.5 MiB"]
        );
    }
}
