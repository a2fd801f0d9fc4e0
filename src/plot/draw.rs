//! Draws series on logarithmic axes, as SVG.

use std::fmt::Write as _;

use gdasync::measure::size;
use gdasync::results::{At, Point, Series, Unit};

use super::escape;

/// Colours that people with colour blindness can tell apart (Okabe and Ito).
const COLORS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777"];
const INK: &str = "#222222";
const GRID: &str = "#d6d6d6";
const WIDTH: f64 = 860.0;
const MARGIN: f64 = 18.0;
const FONT: f64 = 12.0;
const LINE: f64 = 18.0;
/// The height of curves, and of a row of a named point.
const CURVES: f64 = 400.0;
const ROW: f64 = 20.0;
const LABELS: usize = 12;

/// A picture of series that share their axes.
pub(super) struct Picture<'a> {
    pub(super) title: &'a str,
    pub(super) series: &'a [Series],
    /// Where the figures come from.
    pub(super) foot: &'a [String],
}

/// A logarithmic axis between two pixels.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

/// Whether a value has a place on a logarithmic axis.
fn fits(value: f64) -> bool {
    value.is_normal() && value > 0.0
}

fn position(at: &At) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a pixel is coarser")]
    let number = if let At::Number(number) = at { *number as f64 } else { 0.0 };
    number
}

impl Axis {
    /// An axis for these values; `None` if none of them fits.
    fn new(values: impl Iterator<Item = f64>, margin: f64, (from, to): (f64, f64)) -> Option<Self> {
        let (low, high) = values
            .filter(|value| fits(*value))
            .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        fits(high).then(|| Self { low: low / margin, high: (high * margin).min(f64::MAX), from, to })
    }

    fn at(&self, value: f64) -> f64 {
        // Differences of logarithms: the quotient of the largest and the smallest value is not finite.
        self.from + (self.to - self.from) * (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln())
    }

    /// Powers of the base, and multiples of them where powers are few.
    fn labels(&self, base: f64) -> Vec<f64> {
        #[expect(clippy::cast_possible_truncation, reason = "exponents of an f64")]
        let [first, last] = [self.low.log(base).floor() as i32, self.high.log(base).ceil() as i32];
        let multiples = |step: usize, factors: &[f64]| -> Vec<f64> {
            let powers = (first..=last).step_by(step).map(|power| base.powi(power));
            let all = powers.flat_map(|power| factors.iter().map(move |factor| factor * power));
            all.filter(|value| (self.low..=self.high).contains(value)).collect()
        };
        let powers = (1..1000).map(|step| multiples(step, &[1.0])).find(|powers| powers.len() <= LABELS);
        let powers = powers.unwrap_or_default();
        if base < 10.0 || powers.len() >= 3 {
            return powers;
        }
        let few = multiples(1, &[1.0, 2.0, 5.0]);
        if few.len() >= 3 { few } else { multiples(1, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) }
    }
}

/// A number without needless digits: `0.05`, `20`, `1.5e9`.
fn number(value: f64) -> String {
    if !(1e-4..1e6).contains(&value) {
        return format!("{value:e}");
    }
    let text = format!("{value:.5}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn quantity(unit: Unit) -> &'static str {
    match unit {
        Unit::Micros => "time, us",
        Unit::GigabytesPerSecond => "bandwidth, GB/s",
        Unit::PerSecond => "rate, 1/s",
    }
}

#[derive(Default)]
struct Svg(String);

impl Svg {
    fn line(&mut self, points: &[(f64, f64)], color: &str, style: &str) {
        let points: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        let _ = writeln!(self.0, "<polyline fill=\"none\" stroke=\"{color}\" {style} points=\"{points}\"/>");
    }

    fn dot(&mut self, (x, y): (f64, f64), color: &str) {
        let _ = writeln!(self.0, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{color}\"/>");
    }

    fn text(&mut self, (x, y): (f64, f64), anchor: &str, style: &str, text: &str) {
        let text = escape(text);
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{INK}\" {style}>{text}</text>"
        );
    }
}

/// Pixels of a text; the viewer chooses the font.
fn width(text: &str) -> f64 {
    f64::from(u32::try_from(text.chars().count()).unwrap_or(u32::MAX)) * FONT * 0.55
}

impl Picture<'_> {
    /// The picture; an error if no value has a place on a logarithmic axis.
    pub(super) fn svg(&self) -> Result<String, &'static str> {
        let mut svg = Svg::default();
        svg.text((MARGIN, 26.0), "start", "font-size=\"16\" font-weight=\"bold\"", self.title);
        let (mut x, mut y) = (MARGIN, 48.0);
        for (index, series) in self.series.iter().enumerate() {
            let wide = width(&series.name) + 40.0;
            if x > MARGIN && x + wide > WIDTH {
                (x, y) = (MARGIN, y + LINE);
            }
            svg.dot((x + 5.0, y - 4.0), COLORS[index % COLORS.len()]);
            svg.text((x + 14.0, y), "start", "", &series.name);
            x += wide;
        }
        let is_named = self.series.iter().flat_map(|one| &one.points).any(|one| matches!(one.x, At::Name(_)));
        let bottom = if is_named { self.rows(&mut svg, y + LINE) } else { self.curves(&mut svg, y + LINE) };
        let mut y = bottom.ok_or("no value is above 0, and the axes are logarithmic")?;
        for line in self.foot {
            svg.text((MARGIN, y), "start", "font-size=\"10\"", line);
            y += 14.0;
        }
        let (title, elements) = (escape(self.title), svg.0);
        Ok(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{WIDTH}\" height=\"{y:.0}\" \
             viewBox=\"0 0 {WIDTH} {y:.0}\" font-family=\"sans-serif\" font-size=\"{FONT}\">\n<title>{title}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{elements}</svg>\n"
        ))
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.series.iter().flat_map(|one| &one.points).flat_map(|one| [one.p50, one.p99])
    }

    /// Medians over numbers, with a pale line to the 99th percentile. Gives where the plot ends.
    fn curves(&self, svg: &mut Svg, top: f64) -> Option<f64> {
        let first = &self.series[0];
        let (left, right, bottom) = (76.0, WIDTH - MARGIN, top + CURVES);
        let places = self.series.iter().flat_map(|one| &one.points).map(|one| position(&one.x));
        let x = Axis::new(places, 1.15, (left, right))?;
        let y = Axis::new(self.values(), 1.25, (bottom, top))?;
        for label in x.labels(2.0) {
            let at = x.at(label);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positions are u64")]
            let text = if first.x == "bytes" { size(label as usize) } else { number(label) };
            svg.line(&[(at, top), (at, bottom)], GRID, "");
            svg.text((at, bottom + 16.0), "middle", "", &text);
        }
        for label in y.labels(10.0) {
            let at = y.at(label);
            svg.line(&[(left, at), (right, at)], GRID, "");
            svg.text((left - 6.0, at + 4.0), "end", "", &number(label));
        }
        svg.text((f64::midpoint(left, right), bottom + 36.0), "middle", "", &first.x);
        let turned = format!("transform=\"rotate(-90 14 {0:.0})\"", f64::midpoint(top, bottom));
        svg.text((14.0, f64::midpoint(top, bottom)), "middle", &turned, quantity(first.unit));
        for (index, series) in self.series.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            let dashes = if index < COLORS.len() { "" } else { " stroke-dasharray=\"6 3\"" };
            let fitting = |one: &&Point| fits(one.p50) && fits(position(&one.x));
            let mut points: Vec<_> = series.points.iter().filter(fitting).collect();
            points.sort_by(|a, b| position(&a.x).total_cmp(&position(&b.x)));
            let at = |point: &Point, value: f64| (x.at(position(&point.x)), y.at(value));
            for point in points.iter().filter(|point| fits(point.p99)) {
                svg.line(&[at(point, point.p50), at(point, point.p99)], color, "stroke-opacity=\"0.5\"");
            }
            let medians: Vec<_> = points.iter().map(|point| at(point, point.p50)).collect();
            svg.line(&medians, color, &format!("stroke-width=\"2\"{dashes}"));
            medians.into_iter().for_each(|at| svg.dot(at, color));
        }
        Some(bottom + 60.0)
    }

    /// A row for each name: the medians of all series, with a pale line to the 99th percentile.
    fn rows(&self, svg: &mut Svg, top: f64) -> Option<f64> {
        let mut names: Vec<String> = Vec::new();
        for point in self.series.iter().flat_map(|one| &one.points) {
            let name = point.x.to_string();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let longest = names.iter().map(|name| width(name)).fold(0.0, f64::max);
        let left = (MARGIN + longest).min(WIDTH * 0.66);
        let x = Axis::new(self.values(), 1.15, (left + 10.0, WIDTH - MARGIN))?;
        let bottom = top + ROW * f64::from(u32::try_from(names.len()).ok()?);
        for label in x.labels(10.0) {
            svg.line(&[(x.at(label), top), (x.at(label), bottom)], GRID, "");
            svg.text((x.at(label), bottom + 16.0), "middle", "", &number(label));
        }
        for (row, name) in (0_u32..).zip(&names) {
            let y = top + ROW * (f64::from(row) + 0.5);
            svg.text((left, y + 4.0), "end", "", name);
            for (index, series) in self.series.iter().enumerate() {
                let color = COLORS[index % COLORS.len()];
                let named = |point: &&Point| point.x.to_string() == *name && fits(point.p50);
                for point in series.points.iter().filter(named) {
                    let end = if fits(point.p99) { point.p99 } else { point.p50 };
                    svg.line(&[(x.at(point.p50), y), (x.at(end), y)], color, "stroke-opacity=\"0.5\"");
                    svg.dot((x.at(point.p50), y), color);
                }
            }
        }
        let middle = f64::midpoint(left, WIDTH);
        svg.text((middle, bottom + 36.0), "middle", "", quantity(self.series[0].unit));
        Some(bottom + 60.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pictures of the documents show those of usual values.
    #[test]
    fn labels_are_few() {
        for (low, high) in [(1e-300, 1e300), (1.0, 1.8e19), (0.7, 0.9)] {
            let axis = Axis::new([low, high].into_iter(), 1.0, (0.0, 1.0)).unwrap();
            assert!((1..=LABELS).contains(&axis.labels(10.0).len()), "{low} {high}");
        }
    }

    /// Values that JSON allows must not panic when drawn.
    #[test]
    fn odd_values_are_drawn_or_refused() {
        for name in [true, false] {
            for value in [0.0, -1.0, f64::MAX, f64::MIN_POSITIVE, f64::NAN, 1.0] {
                for number in [0, 1, u64::MAX] {
                    let mut series = Series::new("time", "name", "bytes", Unit::Micros);
                    let x = if name { At::from("call") } else { At::from(number) };
                    series.points = vec![Point::value(x, value), Point::value(1, 1.0)];
                    let picture = Picture { title: "t", series: &[series], foot: &[] };
                    let svg = picture.svg().unwrap();
                    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{value} {number}: {svg}");
                }
            }
        }
        let mut zero = Series::new("time", "name", "bytes", Unit::Micros);
        zero.points = vec![Point::value(8, 0.0)];
        Picture { title: "t", series: &[zero], foot: &[] }.svg().unwrap_err();
    }
}
