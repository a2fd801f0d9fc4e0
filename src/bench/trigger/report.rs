//! What `gdasync bench trigger` says.

use comfy_table::{CellAlignment, Table, presets};
use gdasync::measure::{Machine, Micros, Samples};
use gdasync::out;
use serde::Serialize;
use std::io;

use crate::bench::Result;

/// All figures of a run. Times are microseconds.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    /// Name of the GPU and its PCI address.
    pub(super) gpu: String,
    /// Version of the kernel driver.
    pub(super) driver: String,
    /// Version of CUDA that the driver offers.
    pub(super) cuda: String,
    /// `CUDA_DEVICE_MAX_CONNECTIONS`.
    pub(super) connections: String,
    /// How GPU memory is mapped.
    pub(super) backend: String,
    pub(super) levels: Vec<Level>,
    pub(super) rows: Vec<Row>,
    /// Why the run ended early.
    pub(super) incomplete: Option<String>,
}

/// One value of `--busy`.
#[derive(Serialize)]
pub(super) struct Level {
    /// Streams that were kept filled.
    pub(super) busy: u8,
    /// Share of the time for which a kernel ran in each of them.
    pub(super) share: Option<f64>,
}

/// One figure while it is measured.
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) samples: Samples,
    pub(super) failed: Option<String>,
}

impl Figure {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, samples: Samples::default(), failed: None }
    }

    /// Keeps the reason if it failed.
    pub(super) fn end(&mut self, result: Result<()>) {
        self.failed = result.err().map(|error| error.to_string());
    }
}

/// One figure.
#[derive(Serialize)]
pub(super) struct Row {
    group: &'static str,
    variant: &'static str,
    /// Streams that were kept filled meanwhile.
    busy: u8,
    /// Samples.
    n: u64,
    /// None without samples.
    min: Option<f64>,
    p50: Option<f64>,
    p99: Option<f64>,
    /// Why it was given up.
    failed: Option<String>,
}

impl Row {
    /// Times are divided by `parts`.
    pub(super) fn new(group: &'static str, busy: u8, figure: Figure, parts: u32) -> Self {
        let Figure { name, samples, failed } = figure;
        let us = (samples.count() > 0).then(|| samples.micros(parts));
        Self {
            group,
            variant: name,
            busy,
            n: samples.count(),
            min: us.map(|Micros { min, .. }| min),
            p50: us.map(|Micros { p50, .. }| p50),
            p99: us.map(|Micros { p99, .. }| p99),
            failed,
        }
    }
}

/// What the groups are, in the table.
const TITLES: [(&str, &str); 5] = [
    ("trigger", "end of a kernel to the CPU's seeing the trigger"),
    ("wake", "completion stored to the next kernel's word"),
    ("enqueue", "time of the call on the CPU"),
    ("register", "time of the call on the CPU"),
    ("barrier", "GPU time of one repetition"),
];

impl Report {
    pub(super) fn print(&self) -> io::Result<()> {
        out!(
            "{}, driver {}, CUDA {}, on {} x {}, through {}",
            self.gpu,
            self.driver,
            self.cuda,
            self.machine.cpus,
            self.machine.cpu,
            self.backend
        )?;
        for level in &self.levels {
            if let Some(share) = level.share {
                out!(
                    "{} busy streams: a kernel ran for {:.0} % of the time in each",
                    level.busy,
                    share * 100.0
                )?;
            }
        }
        for (group, title) in TITLES {
            let rows: Vec<_> = self.rows.iter().filter(|row| row.group == group).collect();
            if !rows.is_empty() {
                out!("\n{group}: {title}\n{}", table(&rows))?;
            }
        }
        let failed = self.rows.iter().filter_map(|row| Some((row, row.failed.as_ref()?)));
        for (row, reason) in failed {
            out!("failed: {}, {}, {} busy streams: {reason}", row.group, row.variant, row.busy)?;
        }
        Ok(())
    }
}

fn table(rows: &[&Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["", "busy streams", "n", "p50 us", "p99 us", "min us", ""]);
    for row in rows {
        let times = [row.p50, row.p99, row.min].map(|us| us.map_or("-".into(), |us| format!("{us:.3}")));
        table.add_row(
            [row.variant.to_owned(), row.busy.to_string(), row.n.to_string()]
                .into_iter()
                .chain(times)
                .chain([row.failed.as_ref().map_or("", |_| "failed").to_owned()]),
        );
    }
    table
        .column_iter_mut()
        .skip(1)
        .take(5)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn report() -> Report {
        let mut good = Figure::new("good");
        good.samples.add(Duration::from_micros(20));
        let mut bad = Figure::new("bad");
        bad.end(Err("it did not work".into()));
        Report {
            machine: Machine::here(),
            gpu: "GPU".into(),
            driver: "1".into(),
            cuda: "13.0".into(),
            connections: "32".into(),
            backend: "rm".into(),
            levels: vec![Level { busy: 0, share: None }],
            rows: vec![Row::new("barrier", 0, good, 10), Row::new("trigger", 8, bad, 1)],
            incomplete: None,
        }
    }

    #[test]
    fn rows_have_one_shape_whatever_happened() {
        let json = serde_json::to_value(report()).unwrap();
        let rows = json["rows"].as_array().unwrap();
        let keys = ["busy", "failed", "group", "min", "n", "p50", "p99", "variant"];
        for row in rows {
            let mut found: Vec<_> = row.as_object().unwrap().keys().collect();
            found.sort();
            assert_eq!(found, keys);
        }
        assert_eq!((&rows[0]["n"], &rows[0]["failed"]), (&1.into(), &serde_json::Value::Null));
        let p50 = rows[0]["p50"].as_f64().unwrap();
        assert!((p50 - 2.0).abs() < 0.01, "a tenth of 20 us, not {p50}");
        assert!(rows[1]["p50"].is_null() && rows[1]["busy"] == 8);
        assert_eq!(rows[1]["failed"], "it did not work");
        for fact in ["machine", "gpu", "driver", "cuda", "connections", "backend", "levels", "incomplete"] {
            assert!(json.get(fact).is_some(), "{fact}");
        }
    }

    #[test]
    fn every_group_has_a_title_and_every_row_a_line() {
        let report = report();
        for row in &report.rows {
            assert!(TITLES.iter().any(|(group, _)| *group == row.group));
            let line = table(&[row]).to_string();
            assert!(line.contains(row.variant) && line.contains("failed") == row.failed.is_some(), "{line}");
        }
    }
}
