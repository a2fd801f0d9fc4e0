//! A timeline: messages as bars of their stages, in a lane for each rank.

use plotters::chart::ChartBuilder;

use super::Result;
use super::canvas::{Align, Canvas, FINE_GRID, GRID, INK, MUTED, color, font};
use super::frame::{Frame, MARGIN, Sign};
use super::picture::{SIZE, document, enough};
use super::scale::{Scale, Ticks, number};
use crate::results::{Message, STAGES};

use gdasync::measure::series::Unit;

/// Messages of each rank that are drawn.
const MESSAGES: usize = 16;
const ROW: i32 = 32;
const BELOW: i32 = 46;
const LEFT: i32 = 80;

/// Messages of one rank, in rows in which none covers another.
struct Lane<'a> {
    rank: u64,
    rows: Vec<Vec<&'a Message>>,
}

fn extent(message: &Message) -> (f64, f64) {
    let times = message.times.iter().flatten();
    times.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &time| (low.min(time), high.max(time)))
}

/// Lanes by rank, and whether messages were left out.
fn lanes(messages: &[Message], gap: f64) -> (Vec<Lane<'_>>, bool) {
    let mut sorted: Vec<_> = messages.iter().collect();
    sorted.sort_by(|a, b| extent(a).0.total_cmp(&extent(b).0).then((a.rank, a.seq).cmp(&(b.rank, b.seq))));
    let mut ranks: Vec<u64> = messages.iter().map(|message| message.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut cut = false;
    let lanes = ranks.into_iter().map(|rank| {
        let mut rows: Vec<Vec<&Message>> = Vec::new();
        for (index, message) in sorted.iter().filter(|message| message.rank == rank).enumerate() {
            if index == MESSAGES {
                cut = true;
                break;
            }
            let free = |row: &&mut Vec<&Message>| {
                row.last().is_none_or(|last| extent(last).1 + gap <= extent(message).0)
            };
            match rows.iter_mut().find(free) {
                Some(row) => row.push(message),
                None => rows.push(vec![message]),
            }
        }
        Lane { rank, rows }
    });
    (lanes.collect(), cut)
}

/// The picture as SVG.
pub(super) fn draw(
    title: &str,
    messages: &[Message],
    foot: &[String],
    size: Option<(i32, i32)>,
) -> Result<String> {
    let drawn = lanes(messages, 0.0).0;
    let shown = || drawn.iter().flat_map(|lane| lane.rows.iter().flatten());
    let (start, end) = shown()
        .map(|message| extent(message))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (from, to)| (low.min(from), high.max(to)));
    // A message has its number above its beginning, which needs some room.
    let (drawn, cut) = lanes(messages, (end - start) / 30.0);
    let subtitle = if cut {
        format!("the first {MESSAGES} messages of each rank, of {}", messages.len())
    } else {
        String::new()
    };
    let wide = size.map_or(SIZE.0, |(wide, _)| wide);
    let legend = STAGES[1..].iter().map(|stage| stage.until).collect();
    let frame = Frame { title, subtitle: &subtitle, sign: Sign::Bar, legend, foot, width: wide };
    let (above, below) = (frame.above(), frame.below());
    let rows: usize = drawn.iter().map(|lane| lane.rows.len()).sum();
    let needed = above + below + BELOW + ROW * i32::try_from(rows).unwrap_or(i32::MAX / ROW);
    let size = size.unwrap_or((wide, needed));
    enough(size, (LEFT + 240, needed))?;
    let x = Ticks::values(Scale::Linear, 0.0, end - start);
    document(title, size, |canvas| {
        frame.draw(canvas)?;
        let area = canvas.root.clone().shrink((0, above), (size.0 - MARGIN, size.1 - above - below));
        let height = size.1 - above - below - BELOW;
        let mut chart = ChartBuilder::on(&area)
            .margin_left(LEFT)
            .x_label_area_size(BELOW)
            .build_cartesian_2d(x.clone(), 0..height)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .bold_line_style(GRID)
            .light_line_style(FINE_GRID)
            .axis_style(MUTED)
            .label_style(font(12, INK))
            .axis_desc_style(font(13, INK))
            .x_label_formatter(&|&at| x.label(at, Unit::Micros))
            .x_desc("time since the first enqueue, us")
            .draw()?;
        let along = |time: f64| chart.backend_coord(&(time - start, 0)).0;
        let mut top = above;
        for lane in &drawn {
            let bottom = top + ROW * i32::try_from(lane.rows.len()).unwrap_or(0);
            let middle = i32::midpoint(top, bottom);
            canvas.text(&format!("rank {}", lane.rank), (LEFT - 10, middle), 13, INK, Align::Right)?;
            for (row, y) in lane.rows.iter().zip((top..).step_by(ROW.unsigned_abs() as usize)) {
                row.iter().try_for_each(|message| bar(canvas, message, y, along))?;
            }
            top = bottom;
            canvas.line(&[(LEFT, top), (size.0 - MARGIN, top)], MUTED, 1)?;
        }
        Ok(())
    })
}

/// A message, its stages marked, below `y`.
fn bar(canvas: &Canvas<'_>, message: &Message, y: i32, along: impl Fn(f64) -> i32) -> Result<()> {
    let (top, bottom) = (y + 15, y + 28);
    let reached: Vec<_> =
        message.times.iter().enumerate().filter_map(|(stage, time)| Some((stage, (*time)?))).collect();
    for pair in reached.windows(2) {
        let [(_, from), (stage, to)] = [pair[0], pair[1]];
        canvas.rect([(along(from.min(to)), top), (along(to.max(from)), bottom)], color(stage - 1))?;
    }
    for &(_, time) in &reached {
        canvas.line(&[(along(time), top - 2), (along(time), bottom + 2)], INK, 1)?;
    }
    let (from, to) = extent(message);
    let name = format!("{}: {} us", message.seq, number(to - from));
    canvas.text(&name, (along(from), y + 7), 10, MUTED, Align::Left)
}
