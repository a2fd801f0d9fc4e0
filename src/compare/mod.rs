//! `gdasync bench --compare`: two results of one benchmark side by side.

mod verdict;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::plot::number;
use crate::results::{self, At, Axis, Group, Results, Value};
use verdict::{Verdict, judge};

/// Options of `gdasync bench --compare`.
#[derive(Args)]
pub(crate) struct Options {
    /// Compares two results of one benchmark, series by series and size by size, instead of measuring.
    ///
    /// The ratio is that of the medians, B over A. A difference beyond the threshold is marked `worse` or `better`, and
    /// `noise` if it is less than half of what lies between the smallest sample and the median, on the mean of A and B.
    /// Ends with 0; with 1 if the files cannot be compared; with 2 on misuse; with 4 if --fail is given and something is worse.
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    compare: Vec<PathBuf>,
    /// Percent by which medians may differ.
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = percent, requires = "compare")]
    threshold: f64,
    /// Ends with status 4 if something is worse.
    #[arg(long, requires = "compare")]
    fail: bool,
    /// Prints the comparison as JSON, or writes it to a file.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", requires = "compare")]
    json: Option<PathBuf>,
}

fn percent(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok().filter(|percent| (0.0..=10_000.0).contains(percent));
    percent.ok_or_else(|| "not a number of percent from 0 to 10000".into())
}

/// Why two files cannot be compared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Results(#[from] results::Error),
    #[error("{} is of `{a_kind}`, {} of `{b_kind}`: only results of one benchmark compare", a.display(), b.display())]
    Kinds { a: PathBuf, a_kind: String, b: PathBuf, b_kind: String },
    #[error("{} is a timeline; only measurements compare", .0.display())]
    Timeline(PathBuf),
    #[error("{} and {} have no figure in common: {} against {}", a.display(), b.display(), a_has.join(", "), b_has.join(", "))]
    NothingInCommon { a: PathBuf, a_has: Vec<String>, b: PathBuf, b_has: Vec<String> },
    #[error("{}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

/// A comparison.
#[derive(Serialize)]
struct Comparison {
    benchmark: String,
    a: String,
    b: String,
    threshold_percent: f64,
    /// Facts about machine, build and command that are not the same: name, A's, B's.
    differing: Vec<(String, String, String)>,
    rows: Vec<Row>,
    only_in_a: Vec<String>,
    only_in_b: Vec<String>,
    better: usize,
    worse: usize,
}

#[derive(Serialize)]
struct Row {
    group: String,
    series: String,
    at: At,
    #[serde(skip)]
    axis: Axis,
    unit: String,
    a: Figure,
    b: Figure,
    /// B's median over A's; none if one of them is not above 0.
    ratio: Option<f64>,
    verdict: Verdict,
}

#[derive(Serialize)]
struct Figure {
    min: Option<f64>,
    p50: f64,
    p99: Option<f64>,
}

impl From<Value> for Figure {
    fn from(Value { min, p50, p99 }: Value) -> Self {
        Self { min, p50, p99 }
    }
}

impl Options {
    /// The exit status.
    pub(crate) fn run(&self) -> Result<ExitCode, Error> {
        let [a, b] = &self.compare[..] else { unreachable!("clap sees to two values") };
        let comparison = Comparison::new(a, b, self.threshold)?;
        let json = || serde_json::to_string_pretty(&comparison).unwrap_or_default() + "\n";
        match self.json.as_deref() {
            None => print(&comparison.text())?,
            Some(path) if path == Path::new("-") => print(&json())?,
            Some(path) => {
                let written = std::fs::write(path, json());
                written.map_err(|source| Error::Write { path: path.to_owned(), source })?;
            }
        }
        Ok(if self.fail && comparison.worse > 0 { ExitCode::from(4) } else { ExitCode::SUCCESS })
    }
}

/// Prints; a reader who has seen enough is no error.
fn print(text: &str) -> Result<(), Error> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::Write { path: "standard output".into(), source })
        }
        _ => Ok(()),
    }
}

/// The names of all series.
fn series(results: &Results) -> Vec<String> {
    let names = |group: &Group| {
        group.series.iter().map(|series| format!("`{}, {}`", group.name, series.name)).collect::<Vec<_>>()
    };
    results.groups.iter().flat_map(names).collect()
}

/// The figures of one file that the other lacks: whole series by their names, and places of common series.
fn only_in(results: &Results, other: &Results) -> Vec<String> {
    let mut only = Vec::new();
    for group in &results.groups {
        for series in &group.series {
            match find(other, group, &series.name) {
                None => only.push(format!("{}, {}", group.name, series.name)),
                Some(theirs) => {
                    let lacking = series.points.iter().filter(|point| theirs.at(&point.at).is_none());
                    only.extend(
                        lacking.map(|point| format!("{}, {}, {}", group.name, series.name, point.at)),
                    );
                }
            }
        }
    }
    only
}

/// The series of this name in the same group of other results.
fn find<'a>(results: &'a Results, group: &Group, name: &str) -> Option<&'a results::Series> {
    let same =
        |other: &&Group| other.name == group.name && other.unit == group.unit && other.axis == group.axis;
    results.groups.iter().find(same)?.series.iter().find(|series| series.name == name)
}

impl Comparison {
    fn new(a_path: &Path, b_path: &Path, threshold: f64) -> Result<Self, Error> {
        let (a, b) = (Results::read(a_path)?, Results::read(b_path)?);
        for (results, path) in [(&a, a_path), (&b, b_path)] {
            if !results.messages.is_empty() {
                return Err(Error::Timeline(path.to_owned()));
            }
        }
        if a.kind != b.kind {
            let (a_kind, b_kind) = (a.kind, b.kind);
            return Err(Error::Kinds { a: a_path.to_owned(), a_kind, b: b_path.to_owned(), b_kind });
        }
        let mut rows = Vec::new();
        for group in &a.groups {
            for series in &group.series {
                let Some(theirs) = find(&b, group, &series.name) else { continue };
                for point in &series.points {
                    let Some(value) = theirs.at(&point.at) else { continue };
                    let (ratio, verdict) = judge(group.unit, point.value, value, threshold / 100.0);
                    rows.push(Row {
                        group: group.name.clone(),
                        series: series.name.clone(),
                        at: point.at.clone(),
                        axis: group.axis.clone(),
                        unit: group.unit.to_string(),
                        a: point.value.into(),
                        b: value.into(),
                        ratio,
                        verdict,
                    });
                }
            }
        }
        if rows.is_empty() {
            let (a_has, b_has) = (series(&a), series(&b));
            return Err(Error::NothingInCommon { a: a_path.to_owned(), a_has, b: b_path.to_owned(), b_has });
        }
        let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
        let facts = a.facts.iter().filter_map(|(name, ours)| {
            let theirs = b.fact(name).unwrap_or("not noted");
            (ours != theirs).then(|| (name.clone(), ours.clone(), theirs.to_owned()))
        });
        Ok(Self {
            benchmark: a.kind.clone(),
            a: a_path.display().to_string(),
            b: b_path.display().to_string(),
            threshold_percent: threshold,
            differing: facts.collect(),
            better: count(Verdict::Better),
            worse: count(Verdict::Worse),
            rows,
            only_in_a: only_in(&a, &b),
            only_in_b: only_in(&b, &a),
        })
    }

    /// What a reader sees.
    fn text(&self) -> String {
        let mut text = String::new();
        _ = writeln!(text, "{}\nA: {}\nB: {}", self.benchmark, self.a, self.b);
        for (name, a, b) in &self.differing {
            _ = writeln!(text, "{name}: A {a}; B {b}");
        }
        for rows in self.rows.chunk_by(|a, b| a.group == b.group) {
            let Some(Row { group, unit, .. }) = rows.first() else { continue };
            let mut table = Table::new();
            table.load_style(presets::NOTHING);
            table.set_header([&format!("{group}, {unit}"), "", "A p50", "B p50", "B/A", ""]);
            for row in rows {
                let ratio = row.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
                let mark = match row.verdict {
                    Verdict::Same => "",
                    Verdict::Noise => "noise",
                    Verdict::Better => "better",
                    Verdict::Worse => "WORSE",
                    Verdict::Differs => "differs",
                };
                let [a, b] = [row.a.p50, row.b.p50].map(number);
                table.add_row([&row.series, &row.axis.label(&row.at), &a, &b, &ratio, mark]);
            }
            let numbers = table.column_iter_mut().skip(2).take(3);
            numbers.for_each(|column| column.set_cell_alignment(CellAlignment::Right));
            _ = writeln!(text, "\n{table}");
        }
        text.push('\n');
        for (name, only) in [("A", &self.only_in_a), ("B", &self.only_in_b)] {
            for figure in only {
                _ = writeln!(text, "only in {name}: {figure}");
            }
        }
        _ = writeln!(
            text,
            "{} figures, {} worse, {} better, by more than {} % and noise",
            self.rows.len(),
            self.worse,
            self.better,
            self.threshold_percent
        );
        text
    }
}
