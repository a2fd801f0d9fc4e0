//! The tables.

use comfy_table::{CellAlignment, Table, presets};
use gdasync::measure::{Machine, Micros, size};
use gdasync::out;
use serde::Serialize;
use std::io;

use super::Mode;
use super::calls::Call;

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) device: String,
    pub(super) wire: String,
    pub(super) machine: Machine,
    pub(super) work_us: u32,
    pub(super) calls: Vec<Call>,
    pub(super) lines: Vec<Line>,
}

/// One size in one mode.
#[derive(Serialize)]
pub(super) struct Line {
    pub(super) mode: Mode,
    pub(super) bytes: usize,
    pub(super) iters: u64,
    /// Half a round trip, or the time of one message of many; means of windows.
    pub(super) us: Micros,
    /// Windows' slots with wrong data, at both ranks.
    pub(super) errors: u64,
}

impl Report {
    pub(super) fn print(&self, modes: &[Mode]) -> io::Result<()> {
        out!("{} over {}, {} x {}", self.device, self.wire, self.machine.cpus, self.machine.cpu)?;
        out!("Half a round trip in us (p50 of windows), work: {} us; rate: MB/s", self.work_us)?;
        let name = |mode: &Mode| match mode {
            Mode::Sync => "Sync",
            Mode::SyncWork => "Sync+Work",
            Mode::Async => "Async",
            Mode::AsyncWork => "Async+Work",
            Mode::Tagged => "Tagged",
            Mode::Rate => "Rate",
        };
        let mut table = table(std::iter::once("bytes").chain(modes.iter().map(name)));
        for lines in self.lines.chunk_by(|a, b| a.bytes == b.bytes) {
            let cells = lines.iter().map(|line| match line.mode {
                #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
                Mode::Rate => format!("{:.0}", line.bytes as f64 / line.us.p50),
                _ => format!("{:.2}", line.us.p50),
            });
            let bytes = lines.first().map(|line| size(line.bytes)).unwrap_or_default();
            table.add_row(std::iter::once(bytes).chain(cells));
        }
        align(&mut table, 0);
        out!("{table}")?;
        let wrong: u64 = self.lines.iter().map(|line| line.errors).sum();
        out!("{wrong} errors")?;
        if self.calls.is_empty() {
            return Ok(());
        }
        let mut table = self::table(["a call with 8 bytes, p50", "mp us", "gdsync us", "mp adds ns"]);
        for call in &self.calls {
            let (mp, gdsync) = (format!("{:.3}", call.mp_us.p50), format!("{:.3}", call.gdsync_us.p50));
            table.add_row([call.name.to_owned(), mp, gdsync, format!("{:.0}", call.overhead_ns)]);
        }
        align(&mut table, 1);
        out!("{table}")
    }
}

fn table<'a>(header: impl IntoIterator<Item = &'a str>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    table
}

fn align(table: &mut Table, from: usize) {
    table.column_iter_mut().skip(from).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
}
