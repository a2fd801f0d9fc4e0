//! Results of benchmarks: series of points with their baselines, the table printed and the JSON written.

use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use gdsync::verbs::Context;
use indicatif::{ProgressBar, ProgressStyle};
use mp::Communicator;
use serde::{Deserialize, Serialize};

use crate::measure::{Machine, Pattern, Samples, size};
use crate::out;

/// What a benchmark may fail with.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The results of one benchmark: what `--json` writes.
///
/// ```json
/// {"benchmark": "latency", "device": "software HCA", "wire": "shared memory", "machine": {"cpu": "..."},
///  "options": {"sizes": [8]},
///  "series": [{"group": "half round trip", "name": "stream", "x": "bytes", "unit": "us", "baseline": "cache line",
///              "points": [{"x": 8, "p50": 2.1, "p99": 3.0, "min": 1.9, "ratio": 4.2}]}],
///  "skipped": [{"name": "GPU to GPU", "reason": "CUDA shows no GPU"}]}
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The subcommand of `gdasync bench`, or the example.
    pub benchmark: String,
    /// The RDMA device or the GPU.
    pub device: String,
    /// What connects the two ends; empty where nothing is sent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub wire: String,
    /// The machine and the build.
    pub machine: Machine,
    /// Options, and facts such as driver versions.
    pub options: serde_json::Value,
    /// The measurements.
    pub series: Vec<Series>,
    /// What was not measured.
    pub skipped: Vec<Skipped>,
}

/// Measurements of one thing at several sizes, counts or calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// What is measured. Series of one group share a plot.
    pub group: String,
    /// Its name, unique in the group.
    pub name: String,
    /// What the points differ in, such as `bytes`.
    pub x: String,
    /// The unit of the values.
    pub unit: Unit,
    /// The name of the series, or of the point, that the ratios compare with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<String>,
    /// The points, in ascending order if `x` is a number.
    pub points: Vec<Point>,
}

/// The unit of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Microseconds.
    #[serde(rename = "us")]
    Micros,
    /// 10^9 bytes per second.
    #[serde(rename = "GB/s")]
    GigabytesPerSecond,
    /// Events per second.
    #[serde(rename = "1/s")]
    PerSecond,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Micros => "us",
            Self::GigabytesPerSecond => "GB/s",
            Self::PerSecond => "1/s",
        })
    }
}

/// The position of a point: a number, or the name of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "the names say it")]
pub enum At {
    Number(u64),
    Name(String),
}

impl From<u64> for At {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for At {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// One measurement, in the unit of its series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Its position.
    pub x: At,
    /// The median.
    pub p50: f64,
    /// The 99th percentile of times; for rates the value that 99 % of the samples exceed.
    pub p99: f64,
    /// The smallest value.
    pub min: f64,
    /// The median divided by that of the baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

/// A measurement that was not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// The name of the series or point.
    pub name: String,
    /// The reason, and how to change it.
    pub reason: String,
}

impl Point {
    /// Times, each divided by `parts`.
    pub fn time(x: impl Into<At>, samples: &Samples, parts: u32) -> Self {
        let at = |quantile| samples.micros(quantile) / f64::from(parts);
        Self { x: x.into(), p50: at(0.5), p99: at(0.99), min: at(0.0), ratio: None }
    }

    /// Rates: each sample is the time, in microseconds, for `amount`.
    pub fn rate(x: impl Into<At>, samples: &Samples, amount: f64) -> Self {
        let at = |quantile| amount / samples.micros(quantile);
        Self { x: x.into(), p50: at(0.5), p99: at(0.99), min: at(1.0), ratio: None }
    }

    /// A value without samples.
    pub fn value(x: impl Into<At>, value: f64) -> Self {
        Self { x: x.into(), p50: value, p99: value, min: value, ratio: None }
    }
}

impl Series {
    /// A series without points.
    pub fn new(group: &str, name: impl Into<String>, x: &str, unit: Unit) -> Self {
        let (group, name, x) = (group.to_owned(), name.into(), x.to_owned());
        Self { group, name, x, unit, baseline: None, points: Vec::new() }
    }

    /// Sets the ratios to the medians of `baseline` at the same positions.
    fn compare(&mut self, baseline: &Series) {
        if baseline.points.is_empty() {
            return;
        }
        self.baseline = Some(baseline.name.clone());
        for point in &mut self.points {
            let base = baseline.at(&point.x);
            point.ratio = base.map(|base| point.p50 / base.p50).filter(|ratio| ratio.is_finite());
        }
    }

    /// Sets the ratios to the median of the first point.
    fn compare_with_first(&mut self) {
        let Some(first) = self.points.first().cloned() else { return };
        self.baseline = Some(match &first.x {
            At::Number(number) => format!("{number} {}", self.x),
            At::Name(name) => name.clone(),
        });
        for point in &mut self.points {
            point.ratio = Some(point.p50 / first.p50).filter(|ratio| ratio.is_finite());
        }
    }

    /// The point at a position.
    pub fn at(&self, x: &At) -> Option<&Point> {
        self.points.iter().find(|point| point.x == *x)
    }
}

impl Report {
    /// The series of this group and name.
    pub fn find(&self, group: &str, name: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.group == group && series.name == name)
    }

    fn print(&self, note: Option<&str>, summary: Option<&str>) -> io::Result<()> {
        let Self { device, wire, machine, .. } = self;
        let over = if wire.is_empty() { String::new() } else { format!(" over {wire}") };
        out!("{device}{over}, {} x {}", machine.cpus, machine.cpu)?;
        if let Some(note) = note {
            out!("{note}")?;
        }
        match summary {
            Some(summary) => out!("{summary}")?,
            None => {
                for series in self.series.chunk_by(|a, b| a.group == b.group) {
                    out!("\n{}\n{}", series[0].group, table(series))?;
                }
            }
        }
        for skipped in self.skipped.chunk_by(|a, b| a.reason == b.reason) {
            let names: Vec<_> = skipped.iter().map(|skipped| skipped.name.as_str()).collect();
            out!("skipped: {}: {}", names.join("; "), skipped[0].reason)?;
        }
        Ok(())
    }
}

/// A table without borders; these columns are right-aligned.
pub fn plain_table(
    header: impl IntoIterator<Item = impl Into<String>>,
    right: impl IntoIterator<Item = usize>,
) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(header.into_iter().map(Into::into).collect::<Vec<String>>());
    for column in right {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A figure for tables.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 1e3 => format!("{value:.0}"),
        small if small < 0.1 => format!("{value:.5}"),
        _ => format!("{value:.3}"),
    }
}

/// A row for each point of a group.
pub fn table(series: &[Series]) -> Table {
    let mut table = plain_table(["", "at", "p50", "p99", "min", "", "ratio", "to"], [1, 2, 3, 4, 6]);
    for (series, point) in series.iter().flat_map(|one| one.points.iter().map(move |point| (one, point))) {
        let at = match &point.x {
            At::Number(number) => format!("{number} {}", series.x),
            At::Name(name) => name.clone(),
        };
        let [p50, p99, min] = [point.p50, point.p99, point.min].map(number);
        let ratio = point.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let to = point.ratio.and(series.baseline.clone()).unwrap_or_default();
        table.add_row([series.name.clone(), at, p50, p99, min, series.unit.to_string(), ratio, to]);
    }
    table
}

/// Options of every benchmark: where results go and how long measuring may take.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Output {
    /// Seconds after which no further measurement starts, 1 to 86400; the rest is listed as skipped.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    budget: u64,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Output {
    /// Results to this file, however long it takes.
    pub(crate) fn to(json: Option<PathBuf>) -> Self {
        Self { budget: 86_400, json }
    }
}

/// Options of benchmarks whose ranks check what they receive.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Checks {
    /// Seconds after which a wait fails, 1 to 86400.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Rank 1 sends wrong data: for tests of the check.
    #[arg(long, hide = true)]
    wrong_bytes: bool,
}

impl Checks {
    /// How long a wait may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Whether this rank sends wrong data.
    pub fn is_wrong(&self, rank: usize) -> bool {
        self.wrong_bytes && rank == 1
    }

    /// What this rank sends as message `n`; the receiver checks for [`expected`].
    pub fn sent(&self, rank: usize, n: u64) -> Pattern {
        expected(rank, if self.is_wrong(rank) { !n } else { n })
    }
}

/// What `rank` sends as message `n`.
pub fn expected(rank: usize, n: u64) -> Pattern {
    Pattern::new(rank as u64, n)
}

/// The file of `--json`, if one is named.
#[derive(Debug)]
pub struct JsonFile(Option<(PathBuf, File)>);

impl JsonFile {
    /// Creates it before anything is measured, so that a bad path fails early.
    pub fn create(path: Option<&Path>) -> std::result::Result<Self, String> {
        let create = |path: &Path| match path.to_str() {
            Some("-") => Err("standard output has the table; name a file, or /dev/stdout for both".into()),
            _ => File::create(path).map(|file| (path.to_owned(), file)).map_err(|error| error.to_string()),
        };
        let named = |path: &Path| create(path).map_err(|why| format!("--json {}: {why}", path.display()));
        path.map(named).transpose().map(Self)
    }

    /// Writes the results.
    pub fn write(self, results: &impl Serialize) -> std::result::Result<(), String> {
        let Some((path, mut file)) = self.0 else { return Ok(()) };
        let written = serde_json::to_writer_pretty(&mut file, results).map_err(io::Error::from);
        let written = written.and_then(|()| writeln!(file));
        written.map_err(|error| format!("--json {}: {error}", path.display()))
    }
}

/// Collects the results of a benchmark. Every rank has one; rank 0 prints and writes them.
#[derive(Debug)]
pub struct Sheet {
    is_shown: bool,
    file: JsonFile,
    bar: ProgressBar,
    end: Instant,
    series: Vec<Series>,
    skipped: Vec<Skipped>,
    /// Printed before the tables.
    pub note: Option<String>,
    /// Printed in place of the tables.
    pub summary: Option<String>,
    /// Messages with wrong data that this rank received.
    wrong: u64,
}

impl Sheet {
    /// A sheet for `steps` steps. Ranks other than 0 pass `is_shown` false.
    pub fn new(output: &Output, is_shown: bool, steps: usize) -> Result<Self> {
        let bar = if is_shown { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
        let file = JsonFile::create(output.json.as_deref().filter(|_| is_shown))?;
        let end = Instant::now() + Duration::from_secs(output.budget);
        let (series, skipped) = (Vec::new(), Vec::new());
        Ok(Self { is_shown, file, bar, end, series, skipped, note: None, summary: None, wrong: 0 })
    }

    /// Starts a step. Nothing is drawn while it is measured.
    pub fn step(&self, what: impl Into<String>) {
        if !self.bar.message().is_empty() {
            self.bar.inc(1);
        }
        self.bar.set_message(what.into());
    }

    /// Whether less than `time` of the budget is left.
    pub fn has_less_than(&self, time: Duration) -> bool {
        Instant::now() + time > self.end
    }

    /// Starts a step of all ranks if it is the first, or if rank 0 has budget left; otherwise lists it as skipped.
    pub fn may_start(&mut self, comm: &Communicator, what: String) -> Result<bool> {
        let is_first = self.bar.message().is_empty();
        let over = comm.exchange(&[self.has_less_than(Duration::ZERO).into()], None)?;
        if is_first || over[0] == [0] {
            self.step(what);
            return Ok(true);
        }
        self.out_of_time(what);
        Ok(false)
    }

    /// Counts messages with wrong data.
    pub fn wrong(&mut self, messages: u64) {
        self.wrong += messages;
    }

    /// Adds a point to a series, which is created if it is new.
    pub fn add_point(&mut self, group: &str, name: &str, x: &str, unit: Unit, point: Point) {
        let is_it = |series: &&mut Series| series.group == group && series.name == name;
        match self.series.iter_mut().find(is_it) {
            Some(series) => series.points.push(point),
            None => {
                let mut series = Series::new(group, name, x, unit);
                series.points.push(point);
                // Series of a group stand together.
                let end = self.series.iter().rposition(|series| series.group == group);
                self.series.insert(end.map_or(self.series.len(), |end| end + 1), series);
            }
        }
    }

    /// Sets the ratios of all other series of a group to `baseline`.
    pub fn compare(&mut self, group: &str, baseline: &str) {
        let Some(base) = self.find(group, baseline).cloned() else { return };
        let others = self.series.iter_mut().filter(|one| one.group == group && one.name != baseline);
        others.for_each(|series| series.compare(&base));
    }

    /// Sets the ratios of all series of a group to their first points.
    pub fn compare_with_first(&mut self, group: &str) {
        let of_group = self.series.iter_mut().filter(|series| series.group == group);
        of_group.for_each(Series::compare_with_first);
    }

    /// Sets the ratios of a group, at each position, to the best series but these, which has this name then.
    pub fn compare_with_best(&mut self, group: &str, others: &[&str], name: &str) {
        let of_group: Vec<_> = self.series.iter().filter(|series| series.group == group).cloned().collect();
        let Some(first) = of_group.first() else { return };
        let mut best = Series { name: name.into(), points: Vec::new(), ..first.clone() };
        for series in of_group.iter().filter(|series| !others.contains(&series.name.as_str())) {
            for point in &series.points {
                match best.points.iter_mut().find(|known| known.x == point.x) {
                    Some(known) if known.p50 <= point.p50 => {}
                    Some(known) => *known = point.clone(),
                    None => best.points.push(point.clone()),
                }
            }
        }
        self.series
            .iter_mut()
            .filter(|series| series.group == group)
            .for_each(|series| series.compare(&best));
    }

    /// The series of this group and name, so far.
    pub fn find(&self, group: &str, name: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.group == group && series.name == name)
    }

    /// Lists something as not measured.
    pub fn skip(&mut self, name: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push(Skipped { name: name.into(), reason: reason.into() });
    }

    /// Lists something for which the budget was too short.
    pub fn out_of_time(&mut self, name: impl Into<String>) {
        self.skip(name, "the time was used up: allow more with --budget");
    }

    /// Sums the wrong messages of all ranks at rank 0.
    pub fn gather_wrong(&mut self, comm: &Communicator) -> Result<()> {
        let all = sum(comm, self.wrong)?;
        self.wrong = if comm.rank() == 0 { all } else { 0 };
        Ok(())
    }

    /// Ends the job, and prints and writes the results.
    pub fn finish(mut self, comm: Communicator, benchmark: &str, options: serde_json::Value) -> Result<()> {
        self.gather_wrong(&comm)?;
        let context = comm.context().clone();
        // First: the other ranks must not fail because of the output.
        comm.finalize(None)?;
        self.write(benchmark, &context, options)
    }

    /// Prints and writes the results of traffic on a device.
    pub fn write(self, benchmark: &str, context: &Context, options: serde_json::Value) -> Result<()> {
        self.write_of(benchmark, context.description(), context.wire(), options)
    }

    /// Prints and writes the results of a device with this description.
    pub fn write_of(
        self,
        benchmark: &str,
        device: &str,
        wire: &str,
        options: serde_json::Value,
    ) -> Result<()> {
        self.bar.finish_and_clear();
        let [benchmark, device, wire] = [benchmark, device, wire].map(str::to_owned);
        let (machine, series, skipped) = (Machine::here(), self.series, self.skipped);
        let report = Report { benchmark, device, wire, machine, options, series, skipped };
        if self.is_shown {
            report.print(self.note.as_deref(), self.summary.as_deref())?;
        }
        self.file.write(&report)?;
        match self.wrong {
            0 => Ok(()),
            wrong => Err(format!("{wrong} checks found wrong data: the figures mean nothing").into()),
        }
    }
}

/// The sum of a number over all ranks.
pub fn sum(comm: &Communicator, own: u64) -> Result<u64> {
    Ok(all_ranks(comm, own)?.into_iter().sum())
}

/// A number of every rank.
pub fn all_ranks(comm: &Communicator, own: u64) -> Result<Vec<u64>> {
    let all = comm.exchange(&own.to_be_bytes(), None)?;
    Ok(all.iter().filter_map(|bytes| bytes.first_chunk()).map(|bytes| u64::from_be_bytes(*bytes)).collect())
}

/// The label of a size in a progress bar.
pub fn size_label(bytes: usize) -> String {
    format!("{} B", size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, values: &[(u64, f64)]) -> Series {
        let mut series = Series::new("time", name, "bytes", Unit::Micros);
        series.points = values.iter().map(|&(x, value)| Point::value(x, value)).collect();
        series
    }

    #[test]
    fn compare_sets_baseline_and_ratios() {
        let mut curve = series("latency", &[(1, 2.0), (4, 3.0)]);
        curve.compare_with_first();
        assert_eq!(curve.baseline.as_deref(), Some("1 bytes"));
        assert_eq!(curve.points.iter().map(|point| point.ratio).collect::<Vec<_>>(), [Some(1.0), Some(1.5)]);
        curve.compare(&series("floor", &[(4, 1.5)]));
        assert_eq!(curve.baseline.as_deref(), Some("floor"));
        assert_eq!(curve.points.iter().map(|point| point.ratio).collect::<Vec<_>>(), [None, Some(2.0)]);
        curve.baseline = None;
        curve.compare(&series("none", &[]));
        assert_eq!(curve.baseline, None);
        let mut empty = series("none", &[]);
        empty.compare_with_first();
        assert_eq!(empty.baseline, None);
    }
}
