//! What `gdasync bench copy` says.

use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdrcopy::Planner;
use gdasync::gdrcopy::planner::Direction;
use gdasync::measure::{Machine, Micros, size};
use gdasync::out;
use serde::Serialize;
use std::io;

/// All figures of a run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) gpu: String,
    /// The backend, and why not an earlier one.
    pub(super) backend: String,
    /// The routines that [`Mapping`](gdasync::gdrcopy::Mapping) uses.
    pub(super) store: String,
    pub(super) load: String,
    pub(super) plan: Vec<Choice>,
    /// What the planner measured to choose.
    pub(super) calibration: Vec<Calibrated>,
    pub(super) rows: Vec<Row>,
}

/// From this size on the planner takes this way.
#[derive(Serialize)]
pub(super) struct Choice {
    direction: &'static str,
    from_bytes: usize,
    way: String,
}

impl Choice {
    pub(super) fn all(planner: &Planner, direction: Direction) -> Vec<Self> {
        let choices = planner.table(direction).choices().iter();
        let choice = |&(from_bytes, way): &(usize, gdasync::gdrcopy::planner::Way)| Self {
            direction: name(direction),
            from_bytes,
            way: way.to_string(),
        };
        choices.map(choice).collect()
    }
}

/// One time that the planner measured.
#[derive(Serialize)]
pub(super) struct Calibrated {
    direction: &'static str,
    way: String,
    bytes: usize,
    us: f64,
}

impl Calibrated {
    pub(super) fn all(planner: &Planner) -> Vec<Self> {
        let mut all = Vec::new();
        for direction in [Direction::ToGpu, Direction::FromGpu] {
            for (way, points) in planner.table(direction).curves() {
                let (way, direction) = (way.to_string(), name(direction));
                all.extend(points.iter().map(|p| Self {
                    direction,
                    way: way.clone(),
                    bytes: p.len,
                    us: p.micros,
                }));
            }
        }
        all
    }
}

pub(super) fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::ToGpu => "to GPU",
        Direction::FromGpu => "from GPU",
    }
}

/// One figure.
#[derive(Serialize)]
pub(super) struct Row {
    /// What is compared: rows of one group and size were measured by turns.
    group: String,
    bytes: usize,
    way: String,
    us: Micros,
    /// 10^9 bytes a second, at the median.
    gb_s: f64,
    /// The median over that of the group's best single way (for the planner: never above 1.05).
    ratio: f64,
}

impl Row {
    pub(super) fn new(group: &str, bytes: usize, way: String, us: Micros, best: f64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^52")]
        let gb_s = bytes as f64 / us.p50 / 1e3;
        Self { group: group.to_owned(), bytes, way, us, gb_s, ratio: us.p50 / best }
    }
}

impl Report {
    pub(super) fn print(&self) -> io::Result<()> {
        out!("{} on {} x {}, through {}", self.gpu, self.machine.cpus, self.machine.cpu, self.backend)?;
        out!("stores by {}, loads by {}", self.store, self.load)?;
        for choice in &self.plan {
            out!("planner, {}: from {} bytes by {}", choice.direction, choice.from_bytes, choice.way)?;
        }
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["", "bytes", "way", "p50 us", "p99 us", "min us", "GB/s", "ratio to best"]);
        let mut group = "";
        for row in &self.rows {
            let title = if row.group == group { "" } else { &row.group };
            group = &row.group;
            let Micros { min, p50, p99 } = row.us;
            let numbers = [p50, p99, min].map(|us| format!("{us:.3}"));
            table.add_row(
                [title.to_owned(), size(row.bytes), row.way.clone()]
                    .into_iter()
                    .chain(numbers)
                    .chain([format!("{:.2}", row.gb_s), format!("{:.2}", row.ratio)]),
            );
        }
        for column in table.column_iter_mut().skip(1).filter(|column| column.index != 2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        out!("{table}")
    }
}
