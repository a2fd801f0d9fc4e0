//! What `gdasync bench stream` says.

use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdsync::stream::Via;
use gdasync::measure::{Machine, Micros, Samples};
use gdasync::out;
use serde::Serialize;
use std::io;

use super::cases::Case;
use super::driver::Call;

/// All figures of a run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) gpu: String,
    pub(super) rows: Vec<Row>,
}

/// One kind of call.
#[derive(Serialize)]
pub(super) struct Row {
    /// What runs the operations: "memop" or "kernel".
    via: String,
    /// Where queues and records are.
    queues: &'static str,
    call: &'static str,
    /// Operations of the library in a call.
    operations: u32,
    /// Operations of the driver in a call, without marks.
    memops: u64,
    /// A call of the library, and its mean.
    library_us: Micros,
    library_mean_us: f64,
    /// The driver's call alone, and its mean.
    driver_us: Micros,
    driver_mean_us: f64,
    /// The difference of the medians, for each operation of the library.
    library_ns: f64,
    /// The difference of the means: with marks, and what is done only now and then.
    library_mean_ns: f64,
}

impl Row {
    pub(super) fn new(
        case: Case<'_>,
        (via, queues): (Via, &'static str),
        calls: &[Call],
        library: &Samples,
        driver: &Samples,
    ) -> Self {
        let (library_us, driver_us) = (library.micros(1), driver.micros(1));
        let (library_mean_us, driver_mean_us) = (library.mean(), driver.mean());
        let each = |us: f64| us * 1e3 / f64::from(case.parts);
        Self {
            via: via.to_string(),
            queues,
            call: case.name,
            operations: case.parts,
            memops: calls.iter().map(Call::len).sum(),
            library_us,
            library_mean_us,
            driver_us,
            driver_mean_us,
            library_ns: each(library_us.p50 - driver_us.p50),
            library_mean_ns: each(library_mean_us - driver_mean_us),
        }
    }
}

impl Report {
    pub(super) fn print(&self) -> io::Result<()> {
        out!("{} on {} x {}", self.gpu, self.machine.cpus, self.machine.cpu)?;
        out!("time of a call, and what of it is the library's, for each operation")?;
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "",
            "queues",
            "call",
            "memops",
            "library p50 us",
            "p99 us",
            "driver p50 us",
            "p99 us",
            "library ns",
            "mean ns",
        ]);
        for row in &self.rows {
            let us = [row.library_us.p50, row.library_us.p99, row.driver_us.p50, row.driver_us.p99];
            let ns = [row.library_ns, row.library_mean_ns];
            table.add_row(
                [row.via.clone(), row.queues.into(), row.call.into(), row.memops.to_string()]
                    .into_iter()
                    .chain(us.map(|us| format!("{us:.3}")))
                    .chain(ns.map(|ns| format!("{ns:.0}"))),
            );
        }
        for column in table.column_iter_mut().skip(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        out!("{table}")
    }
}
