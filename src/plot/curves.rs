//! Curves over sizes or numbers.

use plotters::chart::ChartBuilder;

use super::Result;
use super::canvas::{color, dress};
use super::frame::{MARGIN, Sign};
use super::picture::{Picture, SIZE, document, enough, quantity};
use super::scale::Ticks;
use crate::results::{At, Axis};

/// Pixels that the labels of the axes take.
const BELOW: i32 = 46;
const LEFT: i32 = 76;

/// Series up to which bands do not hide each other.
const SHADED: usize = 5;

pub(super) fn draw(picture: &Picture) -> Result<String> {
    let group = &picture.group;
    let size = picture.size.unwrap_or(SIZE);
    let with_p99 =
        group.series.iter().flat_map(|series| &series.points).any(|point| point.value.p99.is_some());
    let shaded = group.series.len() <= SHADED;
    let subtitle = match (with_p99, shaded) {
        (true, true) => "median; shaded: to the 99th percentile",
        (true, false) => "median; pale: 99th percentile",
        (false, _) => "",
    };
    let frame = picture.frame(subtitle, Sign::Curve, size.0);
    let (above, below) = (frame.above(), frame.below());
    enough(size, (2 * MARGIN + LEFT + 160, above + below + BELOW + 120))?;
    let number = |at: &At| if let At::Number(number) = at { *number } else { 0 };
    let places: Vec<u64> = group.places().into_iter().map(number).collect();
    let x = Ticks::places(&group.axis, &places);
    let (low, high) = picture.extent();
    let y = Ticks::values(picture.scale()?, low, high);
    let x_name = match &group.axis {
        Axis::Count(what) => what.as_str(),
        Axis::Bytes | Axis::Names => "size",
    };
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
        mesh.x_label_formatter(&|&at| x.place_label(at, &group.axis))
            .y_label_formatter(&|&at| y.label(at, group.unit))
            .x_desc(x_name)
            .y_desc(quantity(group.unit))
            .draw()?;
        for (index, series) in group.series.iter().enumerate() {
            let mut points: Vec<_> = series.points.iter().collect();
            points.sort_by_key(|point| number(&point.at));
            #[expect(clippy::cast_precision_loss, reason = "a pixel is coarser")]
            let pixel = |at: &At, value: f64| {
                chart.backend_coord(&(x.scale.place(number(at) as f64), y.scale.place(value)))
            };
            let line = |value: &dyn Fn(&crate::results::Value) -> Option<f64>| -> Vec<_> {
                points.iter().filter_map(|point| Some(pixel(&point.at, value(&point.value)?))).collect()
            };
            let (medians, p99s) = (line(&|value| Some(value.p50)), line(&|value| value.p99));
            if shaded {
                canvas.band(&medians, &p99s, color(index))?;
            }
            canvas.pale(&p99s, color(index))?;
            if let ([from], [(x, y)]) = (&medians[..], &p99s[..]) {
                // A line needs two points.
                canvas.line(&[*from, (*x, *y)], color(index), 1)?;
                canvas.line(&[(x - 3, *y), (x + 3, *y)], color(index), 1)?;
            }
            canvas.line(&medians, color(index), 2)?;
            medians.into_iter().try_for_each(|at| canvas.mark(index, at))?;
        }
        Ok(())
    })
}
