//! What the command line asks for, and how several files become one picture.

use gdasync::note;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use gdasync::measure::series::Unit;

use super::picture::{Picture, convert, quantity};
use super::{Error, Result, lanes};
use crate::results::{Axis, Group, Results};

/// Options of `gdasync plot`.
#[derive(Args)]
pub(crate) struct Options {
    /// Results: what benchmarks and examples wrote with --json, or the timeline of `gdasync trace`.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// The picture, SVG.
    #[arg(short, long, value_name = "FILE", value_parser = svg)]
    output: PathBuf,
    /// Which figures of a file. Default: what its benchmark is about; the others are told.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Times as bandwidths, size over time, or bandwidths as times. Default: as measured.
    #[arg(long)]
    kind: Option<Kind>,
    /// Only series with this in their names; may be given several times.
    #[arg(long, value_name = "TEXT")]
    series: Vec<String>,
    /// No series and no tests with this in their names; may be given several times.
    #[arg(long, value_name = "TEXT")]
    without: Vec<String>,
    /// What a file is called in the legend, once for each. Default: what differs in the names of the files.
    #[arg(long, value_name = "NAME")]
    label: Vec<String>,
    /// Default: the group and the benchmark.
    #[arg(long)]
    title: Option<String>,
    /// Pixels. Default: as high as needed.
    #[arg(long, value_name = "WxH", value_parser = size)]
    size: Option<(i32, i32)>,
    /// Values by powers of ten. Default: where they differ much.
    #[arg(long)]
    log: bool,
    /// Values from 0 on.
    #[arg(long, conflicts_with = "log")]
    linear: bool,
    /// Of a timeline only what is from this time on, microseconds. Default: all, or the last messages from their triggers on, where
    /// most of the time they wait for them.
    #[arg(long, value_name = "US", value_parser = time)]
    from: Option<f64>,
    /// Of a timeline only what is until this time, microseconds.
    #[arg(long, value_name = "US", value_parser = time)]
    to: Option<f64>,
}

fn svg(text: &str) -> std::result::Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let other = ["png", "jpg", "jpeg", "gif", "webp", "pdf", "eps"];
    match path.extension().and_then(OsStr::to_str) {
        Some(name) if other.contains(&&*name.to_ascii_lowercase()) => {
            Err("a picture is SVG: name it .svg".into())
        }
        _ => Ok(path),
    }
}

fn time(text: &str) -> std::result::Result<f64, String> {
    text.parse()
        .ok()
        .filter(|time: &f64| time.is_finite())
        .ok_or_else(|| "not a number of microseconds".into())
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Latency,
    Bandwidth,
}

fn size(text: &str) -> std::result::Result<(i32, i32), String> {
    let parse = |text: &str| text.parse().ok().filter(|pixels| (100..=10_000).contains(pixels));
    let both = text.split_once('x').and_then(|(width, height)| Some((parse(width)?, parse(height)?)));
    both.ok_or_else(|| "not two numbers of pixels from 100 to 10000, such as 860x540".into())
}

/// Reads all files.
pub(crate) fn read(files: &[PathBuf]) -> Result<Vec<Results>> {
    files.iter().map(|path| Results::read(path).map_err(Into::into)).collect()
}

/// The part of each name that others do not have: whole words, so that they can be read.
fn labels(stems: &[&str]) -> Vec<String> {
    let words: Vec<Vec<&str>> = stems.iter().map(|stem| stem.split('-').collect()).collect();
    let least = words.iter().map(Vec::len).min().unwrap_or(0);
    let same = |index: &usize| words.windows(2).all(|pair| pair[0][*index] == pair[1][*index]);
    let skip = (0..least.saturating_sub(1)).take_while(same).count();
    words.iter().map(|words| words[skip..].join("-")).collect()
}

/// First letter large.
fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// The title of a group if nobody gives one.
pub(crate) fn title(group: &Group, kind: &str) -> String {
    let kind = kind.trim_start_matches("bench ");
    let known = kind.is_empty() || group.name.starts_with(kind);
    if known { capital(&group.name) } else { format!("{}: {}", capital(kind), group.name) }
}

/// The lines at the foot of a picture, each once.
pub(crate) fn foot(results: &[Results]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for line in results.iter().map(Results::origin) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// All series in one group; a name that several files have is told apart by the files' labels.
fn merge(groups: Vec<Group>, labels: &[String]) -> Group {
    let names = || groups.iter().flat_map(|group| &group.series).map(|series| &series.name);
    let twice: Vec<String> =
        names().filter(|name| names().filter(|other| other == name).count() > 1).cloned().collect();
    let mut labelled = groups.into_iter().zip(labels).map(|(mut group, label)| {
        for series in group.series.iter_mut().filter(|series| twice.contains(&series.name)) {
            series.name = format!("{label}: {}", series.name);
        }
        group
    });
    let first = labelled.next().expect("clap sees to one file");
    labelled.fold(first, |mut all, group| {
        all.series.extend(group.series);
        all
    })
}

impl Options {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let results = read(&self.files)?;
        let svg = if results.iter().any(|results| !results.messages.is_empty()) {
            self.timeline(&results)?
        } else {
            self.picture(&results)?
        };
        write(&self.output, &svg)?;
        Ok(ExitCode::SUCCESS)
    }

    fn timeline(&self, results: &[Results]) -> Result<String> {
        let apart = |other: &&Results| other.messages.is_empty();
        if let Some(other) = results.iter().find(apart) {
            let (file, first) = (other.stem.clone(), "a timeline".to_owned());
            return Err(Error::Apart { file, what: "no timeline".into(), first });
        }
        let messages: Vec<_> = results.iter().flat_map(|results| results.messages.clone()).collect();
        let title = self.title.as_deref().unwrap_or("Messages and their stages");
        lanes::draw(title, &messages, &foot(results), self.size, (self.from, self.to))
    }

    fn picture(&self, results: &[Results]) -> Result<String> {
        if !self.label.is_empty() && self.label.len() != results.len() {
            return Err(Error::Labels { labels: self.label.len(), files: results.len() });
        }
        let stems: Vec<_> = results.iter().map(|results| results.stem.as_str()).collect();
        let labels = if self.label.is_empty() { labels(&stems) } else { self.label.clone() };
        let mut groups: Vec<Group> = Vec::new();
        for results in results {
            let group = self.group(results, groups.first())?;
            if results.groups.len() > 1 && self.group.is_none() {
                let others = results.groups.iter().filter(|other| other.name != group.name);
                let names: Vec<_> = others.map(|other| format!("`{}`", other.name)).collect();
                note!("{}: drawn is `{}`; --group draws {}", results.stem, group.name, names.join(", "));
            }
            if let Some(first) =
                groups.first().filter(|first| first.axis != group.axis || first.unit != group.unit)
            {
                let tell = |group: &Group| {
                    format!("`{}`, {} by {}", group.name, quantity(group.unit), places(&group.axis))
                };
                let (file, what, first) = (results.stem.clone(), tell(&group), tell(first));
                return Err(Error::Apart { file, what, first });
            }
            groups.push(group);
        }
        let mut group = merge(groups, &labels);
        self.filter(&mut group)?;
        let kinds: Vec<_> = results.iter().map(|results| results.kind.as_str()).collect();
        let kind = if kinds.windows(2).all(|pair| pair[0] == pair[1]) { kinds[0] } else { "" };
        let title = self.title.clone().unwrap_or_else(|| title(&group, kind));
        let log = (self.log || self.linear).then_some(self.log);
        Picture { title, group, log, foot: foot(results), size: self.size }.svg()
    }

    /// The group of a file that is asked for: by name, or like that of the file before, or its first one.
    fn group(&self, results: &Results, before: Option<&Group>) -> Result<Group> {
        let named = |name: &str| results.groups.iter().find(|group| group.name == name);
        let group = match &self.group {
            Some(wanted) => named(wanted).ok_or_else(|| Error::NoGroup {
                file: results.stem.clone(),
                wanted: wanted.clone(),
                there: results
                    .groups
                    .iter()
                    .map(|group| format!("`{}`", group.name))
                    .collect::<Vec<_>>()
                    .join(", "),
            })?,
            None => before.and_then(|before| named(&before.name)).unwrap_or(&results.groups[0]),
        };
        let (unit, wanted) = match self.kind {
            None => return Ok(group.clone()),
            Some(Kind::Latency) => (Unit::Micros, "latency"),
            Some(Kind::Bandwidth) => (Unit::GigabytesPerSecond, "bandwidth"),
        };
        convert(group, unit).ok_or_else(|| Error::Kind {
            wanted,
            group: group.name.clone(),
            file: results.stem.clone(),
            what: format!("{} by {}", quantity(group.unit), places(&group.axis)),
        })
    }

    fn filter(&self, group: &mut Group) -> Result<()> {
        let has =
            |name: &str, texts: &[String]| texts.iter().find(|text| name.contains(text.as_str())).cloned();
        for (texts, keep) in [(&self.series, true), (&self.without, false)] {
            if let Some(text) = texts.iter().find(|text| {
                let names = group.series.iter().map(|series| series.name.clone());
                let places = group.places().into_iter().map(ToString::to_string);
                !names.chain(places.filter(|_| !keep)).any(|name| name.contains(text.as_str()))
            }) {
                return Err(Error::Nothing(text.clone()));
            }
        }
        group.series.retain(|series| {
            (self.series.is_empty() || has(&series.name, &self.series).is_some())
                && has(&series.name, &self.without).is_none()
        });
        for series in &mut group.series {
            series.points.retain(|point| has(&point.at.to_string(), &self.without).is_none());
        }
        group.series.retain(|series| !series.points.is_empty());
        if group.series.is_empty() {
            Err(Error::Nothing(
                self.series.iter().chain(&self.without).cloned().collect::<Vec<_>>().join(", "),
            ))
        } else {
            Ok(())
        }
    }
}

fn places(axis: &Axis) -> &str {
    match axis {
        Axis::Bytes => "bytes",
        Axis::Count(what) => what,
        Axis::Names => "names of tests",
    }
}

/// Writes a file, whole.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_what_differs() {
        assert_eq!(labels(&["pingpong-h200x2-kernel", "pingpong-h200x2-memop"]), ["kernel", "memop"]);
        assert_eq!(labels(&["copy-h200-16-cores", "copy-h200-32-cores"]), ["16-cores", "32-cores"]);
        assert_eq!(labels(&["a", "a-b"]), ["a", "a-b"]);
        assert_eq!(labels(&["same", "same"]), ["same", "same"]);
        assert_eq!(labels(&[""]), [""]);
    }

    #[test]
    fn sizes_are_two_numbers() {
        assert_eq!(size("860x540"), Ok((860, 540)));
        for bad in ["", "860", "860x", "99x540", "860x10001", "-860x540", "860x540x3", "860X540"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
