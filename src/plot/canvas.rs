//! What pictures are drawn on and look like: colours that differ for colour-blind readers (Okabe and Ito), marks, text.

use plotters::backend::{DrawingBackend, SVGBackend};
use plotters::chart::MeshStyle;
use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, Drawable, PathElement, PointCollection, Polygon, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, RGBColor, ShapeStyle, TextStyle};

use super::Result;

// A report turns these into others where its reader prefers dark pages: its style sheet knows them.
pub(super) const PAPER: RGBColor = RGBColor(255, 255, 255);
pub(super) const INK: RGBColor = RGBColor(34, 34, 34);
pub(super) const MUTED: RGBColor = RGBColor(95, 95, 95);
pub(super) const GRID: RGBColor = RGBColor(214, 214, 214);
pub(super) const FINE_GRID: RGBColor = RGBColor(238, 238, 238);
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(118, 118, 118),
];

/// The colour of a series; they come again when there are many, with other marks.
pub(super) fn color(series: usize) -> RGBColor {
    COLORS[series % COLORS.len()]
}

/// Pixels that a text is wide in the widest of usual fonts (`DejaVu` Sans): nobody knows which one shows it.
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

/// Breaks a text between words, so that lines are at most so many pixels wide where words allow.
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

/// Which end of a text is at its pixel.
#[derive(Clone, Copy)]
pub(super) enum Align {
    Left,
    Right,
}

/// A font of this many pixels.
pub(super) fn font(size: i32, color: RGBColor) -> TextStyle<'static> {
    // Plotters divides by this before it writes the size down.
    ("sans-serif", f64::from(size) * 1.24).into_font().color(&color)
}

/// What grid, axes and their texts look like, in all plots.
pub(super) fn dress<X: Ranged, Y: Ranged, D: DrawingBackend>(mesh: &mut MeshStyle<'_, '_, X, Y, D>) {
    mesh.bold_line_style(GRID)
        .light_line_style(FINE_GRID)
        .axis_style(MUTED)
        .label_style(font(12, INK))
        .axis_desc_style(font(13, INK));
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A picture while it is drawn. Places are pixels from its upper left corner.
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

    fn draw<'e, E>(&self, element: &'e E) -> Result<()>
    where
        &'e E: PointCollection<'e, (i32, i32)>,
        E: Drawable<SVGBackend<'a>>,
    {
        Ok(self.root.draw(element)?)
    }

    fn write(&self, text: &str, at: (i32, i32), style: TextStyle<'_>, align: Align) -> Result<()> {
        let h_pos = match align {
            Align::Left => HPos::Left,
            Align::Right => HPos::Right,
        };
        self.draw(&Text::new(crate::report::printable(text), at, style.pos(Pos::new(h_pos, VPos::Center))))
    }

    /// A line of text; `at` is in the middle of its height.
    pub(super) fn text(
        &self,
        text: &str,
        at: (i32, i32),
        size: i32,
        color: RGBColor,
        align: Align,
    ) -> Result<()> {
        self.write(text, at, font(size, color), align)
    }

    pub(super) fn title(&self, text: &str, at: (i32, i32), size: i32) -> Result<()> {
        let bold = ("sans-serif", f64::from(size) * 1.24, FontStyle::Bold).into_font().color(&INK);
        self.write(text, at, bold, Align::Left)
    }

    pub(super) fn line(&self, points: &[(i32, i32)], color: RGBColor, width: u32) -> Result<()> {
        self.draw(&PathElement::new(points.to_vec(), ShapeStyle::from(color).stroke_width(width)))
    }

    /// A thin, pale line.
    pub(super) fn pale(&self, points: &[(i32, i32)], color: RGBColor) -> Result<()> {
        self.draw(&PathElement::new(points.to_vec(), ShapeStyle::from(color.mix(0.5)).stroke_width(1)))
    }

    /// What lies between two lines.
    pub(super) fn band(&self, line: &[(i32, i32)], other: &[(i32, i32)], color: RGBColor) -> Result<()> {
        let around: Vec<_> = line.iter().chain(other.iter().rev()).copied().collect();
        self.draw(&Polygon::new(around, color.mix(0.1)))
    }

    pub(super) fn rect(&self, corners: [(i32, i32); 2], color: RGBColor) -> Result<()> {
        self.draw(&Rectangle::new(corners, color.filled()))
    }

    /// A mark for a point of a series. Shapes and colours come again after different numbers of series.
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
