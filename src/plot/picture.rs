//! A picture of one group of series.

use gdasync::measure::series::Unit;

use super::canvas::Canvas;
use super::frame::{Frame, Sign};
use super::scale::Scale;
use super::{Error, Result, bars, curves};
use crate::results::{At, Axis, Group, Value};

/// What is drawn, and how.
pub(crate) struct Picture {
    pub(crate) title: String,
    pub(crate) group: Group,
    /// Whether values go by powers of ten; left out, as suits them.
    pub(crate) log: Option<bool>,
    /// Where the figures are from.
    pub(crate) foot: Vec<String>,
    /// Width and height in pixels; left out, as suits them.
    pub(crate) size: Option<(i32, i32)>,
}

/// Width and height of a picture if nobody says.
pub(super) const SIZE: (i32, i32) = (860, 540);

/// What a unit measures.
pub(super) fn quantity(unit: Unit) -> &'static str {
    match unit {
        Unit::Micros => "time, us",
        Unit::GigabytesPerSecond => "bandwidth, GB/s",
        Unit::PerSecond => "rate, 1/s",
        Unit::Ratio => "ratio",
    }
}

/// Times of sizes as bandwidths, or bandwidths as times; `None` if they are neither.
pub(super) fn convert(group: &Group, to: Unit) -> Option<Group> {
    if group.unit == to {
        return Some(group.clone());
    }
    let both = [Unit::Micros, Unit::GigabytesPerSecond];
    if group.axis != Axis::Bytes || !both.contains(&group.unit) || !both.contains(&to) {
        return None;
    }
    let mut group = Group { unit: to, ..group.clone() };
    for point in group.series.iter_mut().flat_map(|series| &mut series.points) {
        let At::Number(bytes) = point.at else { return None };
        #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
        let other = |value: f64| bytes as f64 / value / 1e3;
        // The best time is not the lowest bandwidth.
        point.value = Value { min: None, p50: other(point.value.p50), p99: point.value.p99.map(other) };
        if !point.value.p50.is_finite() || !point.value.p99.is_none_or(f64::is_finite) {
            return None;
        }
    }
    Some(group)
}

impl Picture {
    /// The least and the greatest value, medians and 99th percentiles.
    pub(super) fn extent(&self) -> (f64, f64) {
        let points = self.group.series.iter().flat_map(|series| &series.points);
        let values = points.flat_map(|point| [Some(point.value.p50), point.value.p99]).flatten();
        values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    }

    /// How the axis of values goes.
    pub(super) fn scale(&self) -> Result<Scale> {
        let (low, high) = self.extent();
        let suits = match (self.group.axis.is_numeric(), self.group.unit) {
            (true, Unit::Micros | Unit::PerSecond) => high > low * 4.0,
            (true, _) => false,
            (false, _) => high > low * 20.0,
        };
        match self.log {
            Some(true) if low <= 0.0 => Err(Error::NotPositive(low)),
            Some(true) => Ok(Scale::Log),
            None if low > 0.0 && suits => Ok(Scale::Log),
            _ => Ok(Scale::Linear),
        }
    }

    pub(super) fn frame<'a>(&'a self, subtitle: &'a str, sign: Sign, width: i32) -> Frame<'a> {
        let legend = self.group.series.iter().map(|series| series.name.as_str()).collect();
        Frame { title: &self.title, subtitle, sign, legend, foot: &self.foot, width }
    }

    /// The picture as SVG.
    pub(crate) fn svg(&self) -> Result<String> {
        if self.group.axis.is_numeric() { curves::draw(self) } else { bars::draw(self) }
    }
}

/// Draws on a fresh picture of a size, with its title for those who hear it.
pub(super) fn document(
    title: &str,
    size: (i32, i32),
    draw: impl FnOnce(&Canvas<'_>) -> Result<()>,
) -> Result<String> {
    let mut svg = String::new();
    {
        let canvas = Canvas::new(&mut svg, size)?;
        draw(&canvas)?;
        canvas.root.present()?;
    }
    let (tag, rest) = svg.split_once('>').ok_or_else(|| Error::Draw("no picture came".into()))?;
    let title = crate::report::escape(title);
    Ok(format!("{tag} role=\"img\">\n<title>{title}</title>{rest}"))
}

/// Refuses a plot of fewer pixels than a reader needs.
pub(super) fn enough(size: (i32, i32), needed: (i32, i32)) -> Result<()> {
    if size.0 < needed.0 || size.1 < needed.1 { Err(Error::Small { size, needed }) } else { Ok(()) }
}
