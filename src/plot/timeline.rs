//! Draws a timeline: messages as bars of their stages, one lane per rank.

use std::collections::BTreeSet;

use gdasync::results::{Result, Unit};
use plotters::chart::ChartBuilder;
use plotters::style::text_anchor::HPos;
use serde::Deserialize;

use super::draw::{Canvas, Frame, INK, MARGIN, MUTED, SIZE, Scale, Sign, Ticks};
use super::draw::{color, document, dress, enough, number};

/// What `gdasync trace --timeline` writes; times in microseconds.
#[derive(Deserialize)]
pub(super) struct Timeline {
    pub(super) messages: Vec<Message>,
}

/// A message and when it reached its stages.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Message {
    rank: u64,
    seq: u64,
    enqueue: Option<f64>,
    trigger: Option<f64>,
    fetched: Option<f64>,
    completed: Option<f64>,
    released: Option<f64>,
}

impl Message {
    /// The stages that it reached, by number, and when.
    pub(super) fn times(&self) -> Vec<(usize, f64)> {
        let times = [self.enqueue, self.trigger, self.fetched, self.completed, self.released];
        times.into_iter().enumerate().filter_map(|(stage, time)| Some((stage, time?))).collect()
    }
}

/// What happens before each stage but the first.
const STAGES: [&str; 4] = [
    "enqueued, waits for its trigger",
    "triggered, not fetched yet",
    "fetched, in flight",
    "completed, not yet released by the CPU",
];

/// The most messages of a rank that are drawn.
const MESSAGES: usize = 16;
const ROW: i32 = 32;
const BELOW: i32 = 46;
const LEFT: i32 = 80;

/// Messages of one rank, in rows without overlap.
struct Lane<'a> {
    rank: u64,
    rows: Vec<Vec<&'a Message>>,
}

fn extent(message: &Message) -> (f64, f64) {
    let times = message.times().into_iter();
    times.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (_, time)| (low.min(time), high.max(time)))
}

/// The first and the last time of several messages.
fn whole<'a>(messages: impl Iterator<Item = &'a Message>) -> (f64, f64) {
    messages
        .map(extent)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (from, to)| (low.min(from), high.max(to)))
}

/// The time that is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Span {
    from: f64,
    to: f64,
    /// Not all of the time: little happens in most of it.
    chosen: bool,
}

impl Span {
    fn new(messages: &[Message], (from, to): (Option<f64>, Option<f64>)) -> Result<Self> {
        let (first, last) = whole(messages.iter());
        if from.is_some() || to.is_some() {
            let (from, to) = (from.unwrap_or(first), to.unwrap_or(last));
            let span = Self { from, to, chosen: false };
            let any = from < to && messages.iter().any(|message| span.shows(message));
            let why = || {
                format!(
                    "no message is between {from} and {to} us; they are from {first} to {last} us: give other times"
                )
            };
            return if any { Ok(span) } else { Err(why().into()) };
        }
        let active =
            |message: &Message| message.trigger.map(|trigger| (trigger, extent(message).1.max(trigger)));
        let under_way: f64 = messages.iter().filter_map(active).map(|(from, to)| to - from).sum();
        let all = Self { from: first, to: last, chosen: false };
        if under_way > (last - first) / 10.0 {
            return Ok(all);
        }
        let ranks: BTreeSet<u64> = messages.iter().map(|message| message.rank).collect();
        let end = |rank: &u64| {
            let own = messages.iter().filter(|message| message.rank == *rank).filter_map(active);
            own.max_by(|a, b| a.1.total_cmp(&b.1))
        };
        let ends = ranks.iter().filter_map(end);
        let (from, to) = ends.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (from, to)| {
            (low.min(from), high.max(to))
        });
        let margin = (to - from) / 8.0;
        Ok(if margin > 0.0 { Self { from: from - margin, to: to + margin / 2.0, chosen: true } } else { all })
    }

    fn shows(&self, message: &Message) -> bool {
        let (from, to) = extent(message);
        from <= self.to && to >= self.from
    }

    fn clip(&self, time: f64) -> f64 {
        time.clamp(self.from, self.to)
    }
}

/// Lanes by rank, and whether messages were left out.
fn lanes<'a>(messages: &'a [Message], span: &Span, gap: f64) -> (Vec<Lane<'a>>, bool) {
    let extent = |message: &Message| {
        let (from, to) = extent(message);
        (span.clip(from), span.clip(to))
    };
    let mut sorted: Vec<_> = messages.iter().filter(|message| span.shows(message)).collect();
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

/// The picture as SVG, of the requested time.
pub(super) fn draw(
    title: &str,
    messages: &[Message],
    foot: &[String],
    size: Option<(i32, i32)>,
    asked: (Option<f64>, Option<f64>),
) -> Result<String> {
    let span = Span::new(messages, asked)?;
    let (drawn, cut) = lanes(messages, &span, 0.0);
    let (first, last) = whole(drawn.iter().flat_map(|lane| lane.rows.iter().flatten().copied()));
    let is_part = span.chosen || asked != (None, None);
    let span = if is_part { span } else { Span { from: first, to: last, ..span } };
    // Room for the label above the start of a message.
    let drawn = lanes(messages, &span, (span.to - span.from) / 20.0).0;
    let subtitle = match (cut, span.chosen) {
        (true, _) => format!("the first {MESSAGES} messages of each rank, of {}", messages.len()),
        (false, true) => format!("the last of {} messages, from their triggers on", messages.len()),
        (false, false) => String::new(),
    };
    let x_name = if is_part {
        format!("time, us, from {} on", number(span.from))
    } else {
        "time since the first enqueue, us".to_owned()
    };
    let wide = size.map_or(SIZE.0, |(wide, _)| wide);
    let legend = STAGES.to_vec();
    let frame = Frame { title, subtitle: &subtitle, sign: Sign::Bar, legend, foot, width: wide };
    let (above, below) = (frame.above(), frame.below());
    let rows: usize = drawn.iter().map(|lane| lane.rows.len()).sum();
    let needed = above + below + BELOW + ROW * i32::try_from(rows).unwrap_or(i32::MAX / ROW);
    let size = size.unwrap_or((wide, needed));
    enough(size, (LEFT + 240, needed))?;
    let x = Ticks::values(Scale::Linear, 0.0, span.to - span.from);
    document(title, size, |canvas| {
        frame.draw(canvas)?;
        let area = canvas.root.clone().shrink((0, above), (size.0 - MARGIN, size.1 - above - below));
        let height = size.1 - above - below - BELOW;
        let mut chart = ChartBuilder::on(&area)
            .margin_left(LEFT)
            .x_label_area_size(BELOW)
            .build_cartesian_2d(x.clone(), 0..height)?;
        let mut mesh = chart.configure_mesh();
        dress(&mut mesh);
        mesh.disable_y_mesh()
            .disable_y_axis()
            .x_label_formatter(&|&at| x.label(at, Unit::Micros))
            .x_desc(x_name)
            .draw()?;
        let along = |time: f64| chart.backend_coord(&(span.clip(time) - span.from, 0)).0;
        let mut top = above;
        for lane in &drawn {
            let bottom = top + ROW * i32::try_from(lane.rows.len()).unwrap_or(0);
            let middle = i32::midpoint(top, bottom);
            canvas.text(&format!("rank {}", lane.rank), (LEFT - 10, middle), 13, INK, HPos::Right)?;
            for (row, y) in lane.rows.iter().zip((top..).step_by(ROW.unsigned_abs() as usize)) {
                row.iter().try_for_each(|message| bar(canvas, message, y, &span, along))?;
            }
            top = bottom;
            canvas.line(&[(LEFT, top), (size.0 - MARGIN, top)], MUTED, 1)?;
        }
        Ok(())
    })
}

fn bar(
    canvas: &Canvas<'_>,
    message: &Message,
    y: i32,
    span: &Span,
    along: impl Fn(f64) -> i32,
) -> Result<()> {
    let (top, bottom) = (y + 15, y + 28);
    let reached = message.times();
    for pair in reached.windows(2) {
        let [(_, from), (stage, to)] = [pair[0], pair[1]];
        let (left, right) = (along(from.min(to)), along(to.max(from)));
        if left < right {
            canvas.rect([(left, top), (right, bottom)], color(stage - 1))?;
        }
    }
    for &(_, time) in reached.iter().filter(|(_, time)| (span.from..=span.to).contains(time)) {
        canvas.line(&[(along(time), top - 2), (along(time), bottom + 2)], INK, 1)?;
    }
    let (from, to) = extent(message);
    let name = match message.trigger {
        Some(trigger) if from < span.from => {
            format!("{}: {} us from its trigger on", message.seq, number(to - trigger))
        }
        _ => format!("{}: {} us", message.seq, number(to - from)),
    };
    canvas.text(&name, (along(from), y + 7), 10, MUTED, HPos::Left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(rank: u64, seq: u64, enqueue: f64, trigger: f64) -> Message {
        let [enqueue, trigger, released] = [enqueue, trigger, trigger + 4.0].map(Some);
        Message { rank, seq, enqueue, trigger, fetched: None, completed: None, released }
    }

    #[test]
    fn long_waits_are_drawn_from_their_triggers_on() {
        let short = [message(0, 1, 0.0, 1.0), message(1, 1, 5.0, 6.0)];
        assert_eq!(Span::new(&short, (None, None)).unwrap(), Span { from: 0.0, to: 10.0, chosen: false });
        let long = [message(0, 1, 0.0, 50.0), message(0, 2, 100.0, 1000.0), message(1, 2, 100.0, 1004.0)];
        let span = Span::new(&long, (None, None)).unwrap();
        assert_eq!(span, Span { from: 999.0, to: 1008.5, chosen: true });
        let shown = long.iter().map(|message| span.shows(message)).collect::<Vec<_>>();
        assert_eq!(shown, [false, true, true]);
        assert_eq!(
            Span::new(&long, (Some(0.0), None)).unwrap(),
            Span { from: 0.0, to: 1008.0, chosen: false }
        );
        for nothing in
            [(Some(2000.0), None), (Some(60.0), Some(90.0)), (Some(5.0), Some(5.0)), (None, Some(-1.0))]
        {
            assert!(
                Span::new(&long, nothing).unwrap_err().to_string().contains("no message is between"),
                "{nothing:?}"
            );
        }
    }
}
