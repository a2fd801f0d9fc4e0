//! What surrounds every picture: title, legend, and at the foot where the figures are from.

use super::Result;
use super::canvas::{Align, Canvas, INK, MUTED, color, width, wrap};

/// Pixels at the sides.
pub(super) const MARGIN: i32 = 18;
const TITLE: i32 = 17;
const TEXT: i32 = 13;
const FOOT: i32 = 10;
/// Between what a legend's sign begins with and its name.
const SIGN: i32 = 32;

/// How a series is drawn.
#[derive(Clone, Copy)]
pub(super) enum Sign {
    Curve,
    Bar,
}

/// Texts around a plot.
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
    fn lines(&self, text: &str, size: i32) -> Vec<String> {
        wrap(text, size, self.width - 2 * MARGIN)
    }

    /// For each series its place in the legend: pixels from the left, and row.
    fn places(&self) -> Vec<(i32, i32)> {
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

    fn foot_lines(&self) -> Vec<String> {
        self.foot.iter().flat_map(|text| self.lines(text, FOOT)).collect()
    }

    /// Pixels above the plot.
    pub(super) fn above(&self) -> i32 {
        let rows = self.places().last().map_or(0, |(_, row)| row + 1);
        let lines = |text, size| i32::try_from(self.lines(text, size).len()).unwrap_or(i32::MAX / 100);
        MARGIN + lines(self.title, TITLE) * 22 + lines(self.subtitle, TEXT) * 18 + rows * 20 + 8
    }

    /// Pixels below the plot.
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
            canvas.text(&line, (MARGIN, y), TEXT, MUTED, Align::Left)?;
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
            canvas.text(name, (x + SIGN, y), TEXT, INK, Align::Left)?;
        }
        let mut y = canvas.height - self.below() + 13;
        for line in self.foot_lines() {
            canvas.text(&line, (MARGIN, y), FOOT, MUTED, Align::Left)?;
            y += 14;
        }
        Ok(())
    }
}
