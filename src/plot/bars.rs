//! Bars for tests and calls with names: long names want bars that lie.

use plotters::chart::ChartBuilder;

use super::canvas::{Align, INK, MUTED, color, dress, width, wrap};
use super::frame::{MARGIN, Sign};
use super::picture::{Picture, SIZE, document, enough, quantity};
use super::scale::{Scale, Ticks, number};
use super::{Error, Result};
use crate::results::At;

/// Pixels of a bar, between the bars of two names, of a line of a name, and below the bars for the axis.
const BAR: i32 = 15;
const GAP: i32 = 11;
const LINE: i32 = 14;
const BELOW: i32 = 46;
const NAME: i32 = 12;

pub(super) fn draw(picture: &Picture) -> Result<String> {
    let group = &picture.group;
    let wide = picture.size.map_or(SIZE.0, |(wide, _)| wide);
    let log = picture.scale()? == Scale::Log;
    let subtitle = format!(
        "median / 99th percentile (whisker){}",
        if log { "; the axis is logarithmic: compare the numbers, not the lengths" } else { "" }
    );
    let frame = picture.frame(&subtitle, Sign::Bar, wide);
    let (above, below) = (frame.above(), frame.below());

    // Lines of a name are about as long as each other.
    let lines = |at: &&At| {
        let name = at.to_string();
        let lines = i32::try_from(wrap(&name, NAME, wide * 2 / 5).len()).unwrap_or(1);
        wrap(&name, NAME, width(&name, NAME) / lines.max(1) + if lines > 1 { 50 } else { NAME })
    };
    let names: Vec<Vec<String>> = group.places().iter().map(lines).collect();
    let left = names.iter().flatten().map(|line| width(line, NAME)).max().unwrap_or(0) + MARGIN + 8;
    let bars = i32::try_from(group.series.len()).map_err(|_| Error::Draw("too many series".into()))?;
    let lines = |name: &Vec<String>| i32::try_from(name.len()).unwrap_or(i32::MAX / LINE);
    // From its upper edge each name has room for its lines and its bars.
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
    // The numbers at the end of the longest whisker are inside too.
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
        // What is left over goes between the names.
        let each = room / i32::try_from(names.len().max(1)).unwrap_or(i32::MAX);
        for (index, ((at, name), edges)) in
            group.places().into_iter().zip(&names).zip(tops.windows(2)).enumerate()
        {
            let shift = each * i32::try_from(index).unwrap_or(0);
            let middle = above + shift + i32::midpoint(edges[0], edges[1]) + each / 2;
            let first = middle - (lines(name) - 1) * LINE / 2;
            for (line, y) in name.iter().zip((first..).step_by(LINE.unsigned_abs() as usize)) {
                canvas.text(line, (left - 8, y), NAME, INK, Align::Right)?;
            }
            for (series, y) in (middle - bars * BAR / 2..)
                .step_by(BAR.unsigned_abs() as usize)
                .enumerate()
                .take(group.series.len())
            {
                let Some(value) = group.series[series].at(at) else { continue };
                let (from, to) = (zero.min(along(value.p50)), zero.max(along(value.p50)));
                canvas.rect([(from, y + 1), (to, y + BAR - 2)], color(series))?;
                let mut end = to;
                if let Some(p99) = value.p99 {
                    let (tip, y) = (along(p99), y + BAR / 2 - 1);
                    canvas.line(&[(along(value.p50), y), (tip, y)], INK, 1)?;
                    canvas.line(&[(tip, y - 3), (tip, y + 4)], INK, 1)?;
                    end = end.max(tip);
                }
                let numbers: Vec<_> =
                    [Some(value.p50), value.p99].into_iter().flatten().map(number).collect();
                canvas.text(&numbers.join(" / "), (end + 6, y + BAR / 2), 11, INK, Align::Left)?;
            }
        }
        canvas.line(&[(zero, above), (zero, above + rows.end)], MUTED, 1)
    })
}
