//! Draws series as curves or bars, in SVG.

use super::Group;
use gdasync::results::{At, Point, Result, Unit};
use plotters::backend::{DrawingBackend, SVGBackend};
use plotters::chart::{ChartBuilder, MeshStyle};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, Drawable, PathElement, PointCollection, Polygon, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, RGBColor, ShapeStyle, TextStyle};
use std::ops::Range;

// The style sheet of a report replaces these for readers of dark pages.
pub(super) const PAPER: RGBColor = RGBColor(255, 255, 255);
pub(super) const INK: RGBColor = RGBColor(34, 34, 34);
pub(super) const MUTED: RGBColor = RGBColor(95, 95, 95);
pub(super) const GRID: RGBColor = RGBColor(214, 214, 214);
pub(super) const FINE_GRID: RGBColor = RGBColor(238, 238, 238);
pub(super) const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(118, 118, 118),
];

/// The colour of a series. Colours and marks repeat after different numbers of series.
pub(super) fn color(series: usize) -> RGBColor {
    COLORS[series % COLORS.len()]
}

/// The width of a text in the widest common font (`DejaVu` Sans): the viewer chooses the font.
pub(super) fn width(text: &str, size: i32) -> i32 {
    let percent = |c: char| match c {
        'm' | 'M' | 'W' | '@' | '%' => 97,
        'w' => 82,
        'A'..='Z' => 74,
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' ' => 34,
        'f' | 't' | 'r' | '(' | ')' | '-' => 42,
        c if c.is_ascii() => 64,
        _ => 100,
    };
    let all = text.chars().fold(0_i32, |all, c| all.saturating_add(percent(c)));
    all.saturating_mul(size) / 100
}

/// Breaks a text into lines of at most `max` pixels, where words allow.
pub(super) fn wrap(text: &str, size: i32, max: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(line, size) + width(word, size) + size <= max => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

pub(super) fn font(size: i32, color: RGBColor) -> TextStyle<'static> {
    // plotters divides the size by 1.24.
    ("sans-serif", f64::from(size) * 1.24).into_font().color(&color)
}

pub(super) fn dress<X: Ranged, Y: Ranged, D: DrawingBackend>(mesh: &mut MeshStyle<'_, '_, X, Y, D>) {
    mesh.bold_line_style(GRID)
        .light_line_style(FINE_GRID)
        .axis_style(MUTED)
        .label_style(font(12, INK))
        .axis_desc_style(font(13, INK));
}

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A picture being drawn. Positions are pixels from the upper left corner.
pub(super) struct Canvas<'a> {
    pub(super) root: Area<'a>,
    pub(super) height: i32,
}

impl<'a> Canvas<'a> {
    pub(super) fn new(svg: &'a mut String, (width, height): (i32, i32)) -> Result<Self> {
        let size = (width.unsigned_abs(), height.unsigned_abs());
        let root = SVGBackend::with_string(svg, size).into_drawing_area();
        root.fill(&PAPER)?;
        Ok(Self { root, height })
    }

    pub(super) fn draw<'e, E>(&self, element: &'e E) -> Result<()>
    where
        &'e E: PointCollection<'e, (i32, i32)>,
        E: Drawable<SVGBackend<'a>>,
    {
        Ok(self.root.draw(element)?)
    }

    fn write(&self, text: &str, at: (i32, i32), style: TextStyle<'_>, align: HPos) -> Result<()> {
        self.draw(&Text::new(super::printable(text), at, style.pos(Pos::new(align, VPos::Center))))
    }

    /// A line of text; `at` is in the middle of its height.
    pub(super) fn text(
        &self,
        text: &str,
        at: (i32, i32),
        size: i32,
        color: RGBColor,
        align: HPos,
    ) -> Result<()> {
        self.write(text, at, font(size, color), align)
    }

    pub(super) fn title(&self, text: &str, at: (i32, i32), size: i32) -> Result<()> {
        let bold = ("sans-serif", f64::from(size) * 1.24, FontStyle::Bold).into_font().color(&INK);
        self.write(text, at, bold, HPos::Left)
    }

    pub(super) fn line(&self, points: &[(i32, i32)], color: RGBColor, width: u32) -> Result<()> {
        self.draw(&PathElement::new(points.to_vec(), ShapeStyle::from(color).stroke_width(width)))
    }

    pub(super) fn pale(&self, points: &[(i32, i32)], color: RGBColor) -> Result<()> {
        self.draw(&PathElement::new(points.to_vec(), ShapeStyle::from(color.mix(0.5)).stroke_width(1)))
    }

    pub(super) fn band(&self, line: &[(i32, i32)], other: &[(i32, i32)], color: RGBColor) -> Result<()> {
        let around: Vec<_> = line.iter().chain(other.iter().rev()).copied().collect();
        self.draw(&Polygon::new(around, color.mix(0.1)))
    }

    pub(super) fn rect(&self, corners: [(i32, i32); 2], color: RGBColor) -> Result<()> {
        self.draw(&Rectangle::new(corners, color.filled()))
    }

    /// The mark of a point of a series.
    pub(super) fn mark(&self, series: usize, (x, y): (i32, i32)) -> Result<()> {
        let color = color(series);
        let polygon = |points: &[(i32, i32)]| {
            let points: Vec<_> = points.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
            self.draw(&Polygon::new(points, color.filled()))
        };
        match series % 5 {
            0 => self.draw(&Circle::new((x, y), 4, color.filled())),
            1 => self.rect([(x - 4, y - 4), (x + 4, y + 4)], color),
            2 => polygon(&[(0, -5), (5, 4), (-5, 4)]),
            3 => polygon(&[(0, -5), (5, 0), (0, 5), (-5, 0)]),
            _ => {
                self.line(&[(x - 4, y - 4), (x + 4, y + 4)], color, 2)?;
                self.line(&[(x - 4, y + 4), (x + 4, y - 4)], color, 2)
            }
        }
    }
}

/// Pixels at the sides.
pub(super) const MARGIN: i32 = 18;
pub(super) const TITLE: i32 = 17;
pub(super) const TEXT: i32 = 13;
pub(super) const FOOT: i32 = 10;
/// From the sign of a legend entry to its name.
pub(super) const SIGN: i32 = 32;

/// How a series is drawn.
#[derive(Clone, Copy)]
pub(super) enum Sign {
    Curve,
    Bar,
}

/// Title, legend and origin around a plot.
pub(super) struct Frame<'a> {
    pub(super) title: &'a str,
    pub(super) subtitle: &'a str,
    pub(super) sign: Sign,
    /// The names of series 0, 1, ...
    pub(super) legend: Vec<&'a str>,
    pub(super) foot: &'a [String],
    pub(super) width: i32,
}

impl Frame<'_> {
    pub(super) fn lines(&self, text: &str, size: i32) -> Vec<String> {
        wrap(text, size, self.width - 2 * MARGIN)
    }

    /// The position of each legend entry: pixels from the left, and row.
    pub(super) fn places(&self) -> Vec<(i32, i32)> {
        let (mut x, mut row) = (0, 0);
        let mut places = Vec::new();
        for name in &self.legend {
            let wide = SIGN + width(name, TEXT) + 14;
            if x > 0 && x + wide > self.width - 2 * MARGIN {
                (x, row) = (0, row + 1);
            }
            places.push((x, row));
            x += wide;
        }
        places
    }

    pub(super) fn foot_lines(&self) -> Vec<String> {
        self.foot.iter().flat_map(|text| self.lines(text, FOOT)).collect()
    }

    pub(super) fn above(&self) -> i32 {
        let rows = self.places().last().map_or(0, |(_, row)| row + 1);
        let lines = |text, size| i32::try_from(self.lines(text, size).len()).unwrap_or(i32::MAX / 100);
        MARGIN + lines(self.title, TITLE) * 22 + lines(self.subtitle, TEXT) * 18 + rows * 20 + 8
    }

    pub(super) fn below(&self) -> i32 {
        i32::try_from(self.foot_lines().len()).unwrap_or(i32::MAX / 14) * 14 + 18
    }

    pub(super) fn draw(&self, canvas: &Canvas<'_>) -> Result<()> {
        let mut y = MARGIN + 5;
        for line in self.lines(self.title, TITLE) {
            canvas.title(&line, (MARGIN, y), TITLE)?;
            y += 22;
        }
        for line in self.lines(self.subtitle, TEXT) {
            canvas.text(&line, (MARGIN, y), TEXT, MUTED, HPos::Left)?;
            y += 18;
        }
        for (series, (name, (x, row))) in self.legend.iter().zip(self.places()).enumerate() {
            let (x, y) = (MARGIN + x, y + 3 + row * 20);
            match self.sign {
                Sign::Curve => {
                    canvas.line(&[(x, y), (x + 24, y)], color(series), 2)?;
                    canvas.mark(series, (x + 12, y))?;
                }
                Sign::Bar => canvas.rect([(x, y - 6), (x + 24, y + 6)], color(series))?,
            }
            canvas.text(name, (x + SIGN, y), TEXT, INK, HPos::Left)?;
        }
        let mut y = canvas.height - self.below() + 13;
        for line in self.foot_lines() {
            canvas.text(&line, (MARGIN, y), FOOT, MUTED, HPos::Left)?;
            y += 14;
        }
        Ok(())
    }
}

pub(super) struct Picture {
    pub(super) title: String,
    pub(super) group: Group,
    /// Whether values are logarithmic; `None` decides by the values.
    pub(super) log: Option<bool>,
    /// The origin of the figures.
    pub(super) foot: Vec<String>,
    /// Width and height in pixels; `None` fits the content.
    pub(super) size: Option<(i32, i32)>,
}

pub(super) const SIZE: (i32, i32) = (860, 540);

pub(super) fn quantity(unit: Unit) -> &'static str {
    match unit {
        Unit::Micros => "time, us",
        Unit::GigabytesPerSecond => "bandwidth, GB/s",
        Unit::PerSecond => "rate, 1/s",
        Unit::Ratio => "ratio",
    }
}

impl Picture {
    /// The smallest and the largest median or 99th percentile.
    pub(super) fn extent(&self) -> (f64, f64) {
        let points = self.group.series.iter().flat_map(|series| &series.points);
        let values = points.flat_map(|point| [point.p50, point.p99]);
        values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    }

    pub(super) fn scale(&self) -> Result<Scale> {
        let (low, high) = self.extent();
        let suits = match (!self.group.is_named, self.group.unit) {
            (true, Unit::Micros | Unit::PerSecond) => high > low * 4.0,
            (true, _) => false,
            (false, _) => high > low * 20.0,
        };
        match self.log {
            Some(true) if low <= 0.0 => {
                Err(format!("--log needs values above 0; the least is {low}: leave it out").into())
            }
            Some(true) => Ok(Scale::Log),
            None if low > 0.0 && suits => Ok(Scale::Log),
            _ => Ok(Scale::Linear),
        }
    }

    pub(super) fn frame<'a>(&'a self, subtitle: &'a str, sign: Sign, width: i32) -> Frame<'a> {
        let legend = self.group.series.iter().map(|series| series.name.as_str()).collect();
        Frame { title: &self.title, subtitle, sign, legend, foot: &self.foot, width }
    }

    pub(super) fn svg(&self) -> Result<String> {
        if self.group.is_named { bars(self) } else { curves(self) }
    }
}

/// Draws a picture with a title for screen readers.
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
    let (tag, rest) = svg.split_once('>').ok_or("the picture cannot be drawn: no picture came")?;
    let title = super::escape(title);
    Ok(format!("{tag} role=\"img\">\n<title>{title}</title>{rest}"))
}

/// Rejects a size that is too small.
pub(super) fn enough(size: (i32, i32), needed: (i32, i32)) -> Result<()> {
    if size.0 >= needed.0 && size.1 >= needed.1 {
        return Ok(());
    }
    let ((width, height), (wide, high)) = (size, needed);
    Err(format!("--size {width}x{height} is too small for this picture, which needs {wide}x{high}").into())
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    /// By powers of ten.
    Log,
    /// By powers of two.
    Doubling,
}

/// An axis with its ticks, in values of [`Scale::place`].
#[derive(Clone, Debug)]
pub(super) struct Ticks {
    pub(super) scale: Scale,
    pub(super) range: Range<f64>,
    /// Ticks with labels.
    pub(super) bold: Vec<f64>,
    /// Ticks with a fine line only.
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

/// The multiples of `step` in a range.
pub(super) fn steps(range: &Range<f64>, step: f64) -> Vec<f64> {
    let first = (range.start / step).ceil();
    (0..1000).map(|i| (first + f64::from(i)) * step).take_while(|&at| at <= range.end + step * 1e-6).collect()
}

/// 1, 2 or 5 times a power of ten that divides a length into about `count` parts.
pub(super) fn round_step(length: f64, count: f64) -> f64 {
    let rough = length / count;
    let power = 10_f64.powf(rough.log10().floor());
    let factors = [1.0, 2.0, 5.0];
    power * factors.into_iter().find(|factor| factor * power >= rough * 0.999).unwrap_or(10.0)
}

impl Ticks {
    /// An axis of values; a linear one includes 0.
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

    /// An axis of sizes or counts.
    pub(super) fn places(x: &str, places: &[u64]) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a pixel is coarser")]
        let values: Vec<f64> = places.iter().map(|&place| place as f64).collect();
        let (low, high) = (
            values.iter().copied().fold(f64::INFINITY, f64::min),
            values.iter().copied().fold(0.0, f64::max),
        );
        let doubling = low > 0.0 && (x == "bytes" || high >= low * 16.0);
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

    /// The label of a size or count.
    pub(super) fn place_label(&self, place: f64, x: &str) -> String {
        let value = self.scale.value(place);
        if x == "bytes" { bytes(value) } else { number(value) }
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

/// Ticks at powers of ten, and between them if there are few.
pub(super) fn decades(range: &Range<f64>) -> (Vec<f64>, Vec<f64>) {
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

/// A number with up to four significant digits: `0.05`, `2.5`, `1,000`.
pub(super) fn number(value: f64) -> String {
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

/// A size with its unit: `8 B`, `4 KiB`.
pub(super) fn bytes(value: f64) -> String {
    let value = value.round();
    let units = [(1_073_741_824.0, "GiB"), (1_048_576.0, "MiB"), (1024.0, "KiB")];
    let unit =
        units.into_iter().find(|(factor, _)| value >= *factor && (value * 4.0 / factor).fract() == 0.0);
    unit.map_or_else(
        || format!("{} B", number(value)),
        |(factor, name)| format!("{} {name}", number(value / factor)),
    )
}

/// Pixels for the labels of the axes.
pub(super) const BELOW: i32 = 46;
pub(super) const LEFT: i32 = 76;

/// The most series whose bands stay readable.
pub(super) const SHADED: usize = 5;

pub(super) fn curves(picture: &Picture) -> Result<String> {
    let group = &picture.group;
    let size = picture.size.unwrap_or(SIZE);
    let shaded = group.series.len() <= SHADED;
    let subtitle = match shaded {
        true => "median; shaded: to the 99th percentile",
        false => "median; pale: 99th percentile",
    };
    let frame = picture.frame(subtitle, Sign::Curve, size.0);
    let (above, below) = (frame.above(), frame.below());
    enough(size, (2 * MARGIN + LEFT + 160, above + below + BELOW + 120))?;
    let number = |at: &At| if let At::Number(number) = at { *number } else { 0 };
    let places: Vec<u64> = group.places().into_iter().map(number).collect();
    let x = Ticks::places(&group.x, &places);
    let (low, high) = picture.extent();
    let y = Ticks::values(picture.scale()?, low, high);
    let x_name = if group.x == "bytes" { "size" } else { &group.x };
    document(&picture.title, size, |canvas| {
        frame.draw(canvas)?;
        let area = canvas.root.clone().shrink((0, above), (size.0 - MARGIN, size.1 - above - below));
        let mut chart = ChartBuilder::on(&area)
            .margin_left(MARGIN - 8)
            .x_label_area_size(BELOW)
            .y_label_area_size(LEFT - 8)
            .build_cartesian_2d(x.clone(), y.clone())?;
        let mut mesh = chart.configure_mesh();
        dress(&mut mesh);
        mesh.x_label_formatter(&|&at| x.place_label(at, &group.x))
            .y_label_formatter(&|&at| y.label(at, group.unit))
            .x_desc(x_name)
            .y_desc(quantity(group.unit))
            .draw()?;
        for (index, series) in group.series.iter().enumerate() {
            let mut points: Vec<_> = series.points.iter().collect();
            points.sort_by_key(|point| number(&point.x));
            #[expect(clippy::cast_precision_loss, reason = "a pixel is coarser")]
            let pixel = |at: &At, value: f64| {
                chart.backend_coord(&(x.scale.place(number(at) as f64), y.scale.place(value)))
            };
            let line = |value: fn(&Point) -> f64| -> Vec<_> {
                points.iter().map(|point| pixel(&point.x, value(point))).collect()
            };
            let (medians, p99s) = (line(|point| point.p50), line(|point| point.p99));
            if shaded {
                canvas.band(&medians, &p99s, color(index))?;
            }
            canvas.pale(&p99s, color(index))?;
            if let ([from], [(x, y)]) = (&medians[..], &p99s[..]) {
                canvas.line(&[*from, (*x, *y)], color(index), 1)?;
                canvas.line(&[(x - 3, *y), (x + 3, *y)], color(index), 1)?;
            }
            canvas.line(&medians, color(index), 2)?;
            medians.into_iter().try_for_each(|at| canvas.mark(index, at))?;
        }
        Ok(())
    })
}

/// Pixels of a bar, of the gap between names, of a line and of the font of a name.
pub(super) const BAR: i32 = 15;
pub(super) const GAP: i32 = 11;
pub(super) const LINE: i32 = 14;
pub(super) const NAME: i32 = 12;

pub(super) fn bars(picture: &Picture) -> Result<String> {
    let group = &picture.group;
    let wide = picture.size.map_or(SIZE.0, |(wide, _)| wide);
    let log = picture.scale()? == Scale::Log;
    let subtitle = format!(
        "median / 99th percentile (whisker){}",
        if log { "; the axis is logarithmic: compare the numbers, not the lengths" } else { "" }
    );
    let frame = picture.frame(&subtitle, Sign::Bar, wide);
    let (above, below) = (frame.above(), frame.below());

    // Balances the lines of a name.
    let lines = |at: &&At| {
        let name = at.to_string();
        let lines = i32::try_from(wrap(&name, NAME, wide * 2 / 5).len()).unwrap_or(1);
        wrap(&name, NAME, width(&name, NAME) / lines.max(1) + if lines > 1 { 50 } else { NAME })
    };
    let names: Vec<Vec<String>> = group.places().iter().map(lines).collect();
    let left = names.iter().flatten().map(|line| width(line, NAME)).max().unwrap_or(0) + MARGIN + 8;
    let bars = i32::try_from(group.series.len())?;
    let lines = |name: &Vec<String>| i32::try_from(name.len()).unwrap_or(i32::MAX / LINE);
    let mut tops = vec![0];
    for name in &names {
        let needs = (bars * BAR).max(lines(name) * LINE) + GAP;
        tops.push(tops.last().copied().unwrap_or(0) + needs);
    }
    let needed = above + below + BELOW + tops.last().copied().unwrap_or(0);
    let size = picture.size.unwrap_or((wide, needed));
    enough(size, (left + 200, needed))?;

    let (low, high) = picture.extent();
    let mut x = Ticks::values(picture.scale()?, low, high);
    // Room for the numbers behind the longest whisker.
    x.range.end += (x.range.end - x.range.start) * 0.14;
    document(&picture.title, size, |canvas| {
        frame.draw(canvas)?;
        let area = canvas.root.clone().shrink((0, above), (size.0 - MARGIN, size.1 - above - below));
        let rows = 0..size.1 - above - below - BELOW;
        let room = rows.end - tops.last().copied().unwrap_or(0);
        let mut chart = ChartBuilder::on(&area)
            .margin_left(left)
            .x_label_area_size(BELOW)
            .build_cartesian_2d(x.clone(), rows.clone())?;
        let mut mesh = chart.configure_mesh();
        dress(&mut mesh);
        mesh.disable_y_mesh()
            .disable_y_axis()
            .x_label_formatter(&|&at| x.label(at, group.unit))
            .x_desc(quantity(group.unit))
            .draw()?;
        let along = |value: f64| chart.backend_coord(&(x.scale.place(value), 0)).0;
        let zero =
            if x.scale == Scale::Linear { along(0.0) } else { chart.backend_coord(&(x.range.start, 0)).0 };
        // Spare room goes between the names.
        let each = room / i32::try_from(names.len().max(1)).unwrap_or(i32::MAX);
        for (index, ((at, name), edges)) in
            group.places().into_iter().zip(&names).zip(tops.windows(2)).enumerate()
        {
            let shift = each * i32::try_from(index).unwrap_or(0);
            let middle = above + shift + i32::midpoint(edges[0], edges[1]) + each / 2;
            let first = middle - (lines(name) - 1) * LINE / 2;
            for (line, y) in name.iter().zip((first..).step_by(LINE.unsigned_abs() as usize)) {
                canvas.text(line, (left - 8, y), NAME, INK, HPos::Right)?;
            }
            for (series, y) in (middle - bars * BAR / 2..)
                .step_by(BAR.unsigned_abs() as usize)
                .enumerate()
                .take(group.series.len())
            {
                let Some(value) = group.series[series].at(at) else { continue };
                let (from, to) = (zero.min(along(value.p50)), zero.max(along(value.p50)));
                canvas.rect([(from, y + 1), (to, y + BAR - 2)], color(series))?;
                let (tip, middle) = (along(value.p99), y + BAR / 2 - 1);
                canvas.line(&[(along(value.p50), middle), (tip, middle)], INK, 1)?;
                canvas.line(&[(tip, middle - 3), (tip, middle + 4)], INK, 1)?;
                let (end, numbers) = (to.max(tip), [value.p50, value.p99].map(number));
                canvas.text(&numbers.join(" / "), (end + 6, y + BAR / 2), 11, INK, HPos::Left)?;
            }
        }
        canvas.line(&[(zero, above), (zero, above + rows.end)], MUTED, 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &Ticks) -> Vec<String> {
        ticks.bold.iter().map(|&at| ticks.label(at, Unit::Micros)).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
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
    fn sizes_are_labelled_at_points_or_powers_of_two() {
        let labels = |places: &[u64]| {
            let ticks = Ticks::places("bytes", places);
            ticks.bold.iter().map(|&at| ticks.place_label(at, "bytes")).collect::<Vec<_>>()
        };
        assert_eq!(labels(&[8, 4096]), ["8 B", "4 KiB"]);
        assert_eq!(labels(&[1000]), ["1,000 B"]);
        let all: Vec<u64> = (0..27).map(|i| 1 << i).collect();
        assert_eq!(labels(&all)[..6], ["1 B", "4 B", "16 B", "64 B", "256 B", "1 KiB"]);
        let few = Ticks::places("queue pairs", &[1, 2, 3, 4]);
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
