//! What benchmarks wrote, whichever they were: facts about the machine, and groups of series that belong on one axis.

mod kinds;
mod node;
#[cfg(test)]
mod tests;
mod timeline;

use std::path::{Path, PathBuf};

use gdasync::measure::{Micros, series::Unit};

pub(crate) use timeline::{Message, STAGES};

use node::Node;
use serde::Serialize;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: not JSON: {source}; give files that `--json` wrote", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: no result that this version can read: {shape}", path.display())]
    Shape { path: PathBuf, shape: Shape },
}

/// What a file lacks.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Shape {
    #[error("it lacks `{0}`")]
    Lacks(String),
    #[error("`{path}` is not {what}")]
    Expected { path: String, what: &'static str },
    #[error("`{0}` occurs twice")]
    Twice(String),
    #[error("it lacks figures: {0}")]
    Empty(&'static str),
}

/// One file.
#[derive(Debug)]
pub(crate) struct Results {
    /// Its name without folder and ending.
    pub(crate) stem: String,
    /// The benchmark that wrote it, such as `bench copy`.
    pub(crate) kind: String,
    /// Machine, GPU, commit, command, settings: name and value, in the order of the file.
    pub(crate) facts: Vec<(String, String)>,
    /// The first is what the benchmark is about. None in a timeline.
    pub(crate) groups: Vec<Group>,
    /// In a timeline only.
    pub(crate) messages: Vec<Message>,
    /// What was not measured, and why.
    pub(crate) missing: Vec<String>,
}

/// Series that belong in one picture.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) axis: Axis,
    pub(crate) unit: Unit,
    pub(crate) series: Vec<Series>,
}

/// What the places of points are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Sizes in bytes.
    Bytes,
    /// Numbers of this.
    Count(String),
    /// Names of tests or calls.
    Names,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<Point>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) at: At,
    pub(crate) value: Value,
}

/// The place of a point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum At {
    Number(u64),
    Name(String),
}

/// A median, in the unit of its group, and what is known of its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Value {
    pub(crate) min: Option<f64>,
    pub(crate) p50: f64,
    pub(crate) p99: Option<f64>,
}

impl From<Micros> for Value {
    fn from(Micros { min, p50, p99 }: Micros) -> Self {
        Self { min: Some(min), p50, p99: Some(p99) }
    }
}

impl From<f64> for Value {
    fn from(p50: f64) -> Self {
        Self { min: None, p50, p99: None }
    }
}

impl Axis {
    /// Whether points are joined by lines.
    pub(crate) fn is_numeric(&self) -> bool {
        *self != Self::Names
    }

    /// A place for readers: sizes with their unit.
    pub(crate) fn label(&self, at: &At) -> String {
        match (self, at) {
            #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
            (Self::Bytes, At::Number(number)) => crate::plot::bytes(*number as f64),
            _ => at.to_string(),
        }
    }
}

impl Group {
    fn new(name: impl Into<String>, axis: Axis, unit: Unit) -> Self {
        Self { name: name.into(), axis, unit, series: Vec::new() }
    }

    /// Adds a point to the series of this name, which need not be there yet.
    fn add(&mut self, series: &str, at: At, value: impl Into<Value>) -> Result<(), Shape> {
        let index = self.series.iter().position(|known| known.name == series).unwrap_or_else(|| {
            self.series.push(Series { name: series.to_owned(), points: Vec::new() });
            self.series.len() - 1
        });
        let points = &mut self.series[index].points;
        if points.iter().any(|point| point.at == at) {
            return Err(Shape::Twice(format!("{}, {series}, {at}", self.name)));
        }
        points.push(Point { at, value: value.into() });
        Ok(())
    }

    /// The names of places, each once, in the order of their first occurrence.
    pub(crate) fn places(&self) -> Vec<&At> {
        let mut places: Vec<&At> = Vec::new();
        for point in self.series.iter().flat_map(|series| &series.points) {
            if !places.contains(&&point.at) {
                places.push(&point.at);
            }
        }
        if self.axis.is_numeric() {
            places.sort_by_key(|at| if let At::Number(n) = at { *n } else { 0 });
        }
        places
    }
}

impl Series {
    pub(crate) fn at(&self, at: &At) -> Option<Value> {
        self.points.iter().find(|point| point.at == *at).map(|point| point.value)
    }
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl Results {
    /// Reads a file that a benchmark, an example or `gdasync trace` wrote.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let own = || path.to_owned();
        let text = std::fs::read(path).map_err(|source| Error::Read { path: own(), source })?;
        let json = serde_json::from_slice(&text).map_err(|source| Error::Json { path: own(), source })?;
        let shape = |shape| Error::Shape { path: own(), shape };
        let mut results = Self::parse(&Node::root(&json)).map_err(shape)?;
        results.stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(results)
    }

    fn parse(root: &Node<'_>) -> Result<Self, Shape> {
        let mut results = kinds::read(root)?;
        results.groups.iter_mut().for_each(|group| group.series.retain(|series| !series.points.is_empty()));
        results.groups.retain(|group| !group.series.is_empty());
        if results.groups.is_empty() && results.messages.is_empty() {
            return Err(Shape::Empty("every list of measurements in it is empty"));
        }
        Ok(results)
    }

    /// The value of a fact.
    pub(crate) fn fact(&self, name: &str) -> Option<&str> {
        self.facts.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Where and from what it was measured, in a line.
    pub(crate) fn origin(&self) -> String {
        let gpu = self.fact("GPU").map(|gpu| {
            let parts = gpu.split([',', ';']).take(if gpu.starts_with("GPU ") { 2 } else { 1 });
            parts.collect::<Vec<_>>().join(",")
        });
        let parts = [
            Some(self.kind.clone()),
            gpu,
            self.fact("device").map(str::to_owned),
            self.fact("machine").map(str::to_owned),
            self.fact("commit").map(|commit| format!("commit {commit}")),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }
}
