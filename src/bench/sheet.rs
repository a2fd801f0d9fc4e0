//! What the benchmarks of messages have in common: how long they may take, how they check, one shape of results.

use gdasync::out;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdsync::verbs::Context;
use gdasync::lane::{Lane, Placed};
use gdasync::measure::series::{Report, Series, Skipped};
use gdasync::measure::{Machine, Pattern, create_json, write_json};
use gdasync::mp::Communicator;
use indicatif::{ProgressBar, ProgressStyle};

use super::Result;

/// Where results go, and how long it may take to get them.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Output {
    /// Seconds after which nothing new is begun, 1 to 86400: what was not measured then is listed as skipped.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    budget: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How ranks wait and check.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Checks {
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Rank 1 sends what nobody expects: for tests of the check.
    #[arg(long, hide = true)]
    wrong_bytes: bool,
}

impl Checks {
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// What this rank sends as message `n`; others expect [`expected`].
    pub(super) fn sent(&self, rank: usize, n: u64) -> Pattern {
        expected(rank, if self.wrong_bytes && rank == 1 { !n } else { n })
    }
}

/// What arrives from `rank` as message `n`.
pub(super) fn expected(rank: usize, n: u64) -> Pattern {
    Pattern::new(rank as u64, n)
}

/// The results of a benchmark. Every rank has one; that of rank 0 is shown.
pub(super) struct Sheet {
    shown: bool,
    file: Option<File>,
    bar: ProgressBar,
    end: Instant,
    series: Vec<Series>,
    skipped: Vec<Skipped>,
    /// Messages with wrong data that this rank got.
    wrong: u64,
}

impl Sheet {
    /// There will be so many steps.
    pub(super) fn new(output: &Output, shown: bool, steps: usize) -> Result<Self> {
        let bar = if shown { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
        Ok(Self {
            shown,
            file: create_json(output.json.as_deref().filter(|_| shown))?,
            bar,
            end: Instant::now() + Duration::from_secs(output.budget),
            series: Vec::new(),
            skipped: Vec::new(),
            wrong: 0,
        })
    }

    /// Begins a step. Nothing is drawn while it is measured.
    pub(super) fn step(&self, what: impl Into<String>) {
        // The step before this one is done.
        if !self.bar.message().is_empty() {
            self.bar.inc(1);
        }
        self.bar.set_message(what.into());
    }

    /// Whether the budget is used up.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() > self.end
    }

    /// Whether this is more than what is left of the budget.
    pub(super) fn has_less_than(&self, time: Duration) -> bool {
        Instant::now() + time > self.end
    }

    /// Whether another step may begin; rank 0 decides for all.
    pub(super) fn goes_on(&self, comm: &Communicator, timeout: Duration) -> Result<bool> {
        let over = comm.exchange(&[self.is_over().into()], timeout)?;
        Ok(over[0] == [0])
    }

    pub(super) fn wrong(&mut self, messages: u64) {
        self.wrong += messages;
    }

    /// Takes curves; those without points are left out.
    pub(super) fn add(&mut self, series: impl IntoIterator<Item = Series>) {
        self.series.extend(series.into_iter().filter(|series| !series.points.is_empty()));
    }

    pub(super) fn skip(&mut self, name: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push(Skipped { name: name.into(), reason: reason.into() });
    }

    /// Notes what the budget was not enough for.
    pub(super) fn out_of_time(&mut self, name: impl Into<String>) {
        self.skip(name, "the time was used up: allow more with --budget");
    }

    /// Tells rank 0 of all wrong data.
    pub(super) fn tell(&mut self, comm: &Communicator, timeout: Duration) -> Result<()> {
        let all = comm.exchange(&self.wrong.to_be_bytes(), timeout)?;
        let all = all.iter().filter_map(|bytes| bytes.first_chunk()).map(|bytes| u64::from_be_bytes(*bytes));
        // What was told once is not told again.
        self.wrong = if comm.rank() == 0 { all.sum() } else { 0 };
        Ok(())
    }

    /// Writes what all ranks have found, and ends the job.
    pub(super) fn finish(
        mut self,
        comm: Communicator,
        benchmark: &str,
        options: serde_json::Value,
        timeout: Duration,
    ) -> Result<()> {
        self.tell(&comm, timeout)?;
        let context = comm.context().clone();
        let written = self.write(benchmark, &context, options);
        comm.finalize(timeout)?;
        written
    }

    /// The same of a benchmark on a lane, which the options tell as well.
    pub(super) fn finish_lane(
        self,
        comm: Communicator,
        lane: Lane,
        placed: &Placed,
        benchmark: &str,
        mut options: serde_json::Value,
        timeout: Duration,
    ) -> Result<()> {
        options["stream"] = lane.stream.kind().into();
        options["place"] = serde_json::to_value(placed.describe(&comm, timeout)?)?;
        drop(lane);
        self.finish(comm, benchmark, options, timeout)
    }

    /// Prints and writes everything. Fails if there was wrong data.
    pub(super) fn write(self, benchmark: &str, context: &Context, options: serde_json::Value) -> Result<()> {
        self.bar.finish_and_clear();
        let report = Report {
            benchmark: benchmark.into(),
            device: context.description().into(),
            wire: context.wire().into(),
            machine: Machine::here(),
            options,
            series: self.series,
            skipped: self.skipped,
        };
        if self.shown {
            print(&report)?;
        }
        write_json(self.file, &report)?;
        match self.wrong {
            0 => Ok(()),
            wrong => Err(format!("{wrong} checks found wrong data: the figures mean nothing").into()),
        }
    }
}

/// The first reason that any rank has against something.
pub(super) fn objection(
    comm: &Communicator,
    own: Option<String>,
    timeout: Duration,
) -> Result<Option<String>> {
    let all = comm.exchange(own.unwrap_or_default().as_bytes(), timeout)?;
    Ok(all.iter().find(|reason| !reason.is_empty()).map(|reason| String::from_utf8_lossy(reason).into()))
}

fn print(report: &Report) -> io::Result<()> {
    let Report { device, wire, machine, .. } = report;
    out!("{device} over {wire}, {} x {}", machine.cpus, machine.cpu)?;
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["", "at", "p50", "p99", "min", "", "ratio", "to"]);
    for series in &report.series {
        for point in &series.points {
            let number = |value: f64| match value.abs() {
                large if large >= 1e3 => format!("{value:.0}"),
                small if small < 0.1 => format!("{value:.5}"),
                _ => format!("{value:.3}"),
            };
            table.add_row([
                series.name.clone(),
                format!("{} {}", point.x, series.x),
                number(point.p50),
                number(point.p99),
                number(point.min),
                series.unit.to_string(),
                point.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
                point.ratio.and(series.baseline.clone()).unwrap_or_default(),
            ]);
        }
    }
    for column in [1, 2, 3, 4, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    out!("{table}")?;
    for skipped in report.skipped.chunk_by(|a, b| a.reason == b.reason) {
        let names: Vec<_> = skipped.iter().map(|skipped| skipped.name.as_str()).collect();
        out!("skipped: {}: {}", names.join("; "), skipped[0].reason)?;
    }
    Ok(())
}
