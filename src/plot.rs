//! `gdasync plot`: results as a picture, and `gdasync report`: results as a page.

mod draw;
mod timeline;

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::result::Result as StdResult;

use clap::{Args, ValueEnum};
use gdasync::note;
use gdasync::results::{At, Point, Report, Result, Series, Unit};
use serde_json::Value;

use draw::{Picture, bytes, number};
use timeline::Timeline;

/// Options of `gdasync plot`.
#[derive(Args)]
pub(crate) struct Options {
    /// Results that benchmarks and examples wrote with --json, or the timeline of `gdasync trace`.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// The picture, SVG.
    #[arg(short, long, value_name = "FILE", value_parser = svg)]
    output: PathBuf,
    /// Which measurements of a file. Default: the first; the others are listed.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Times as bandwidths, or bandwidths as times. Default: as measured.
    #[arg(long)]
    kind: Option<Kind>,
    /// Only series with this in their names; may be repeated.
    #[arg(long, value_name = "TEXT")]
    series: Vec<String>,
    /// No series and no points with this in their names; may be repeated.
    #[arg(long, value_name = "TEXT")]
    without: Vec<String>,
    /// The name of a file in the legend, once for each. Default: what differs in the names of the files.
    #[arg(long, value_name = "NAME")]
    label: Vec<String>,
    /// Default: the benchmark and the group.
    #[arg(long)]
    title: Option<String>,
    /// Pixels. Default: as high as needed.
    #[arg(long, value_name = "WxH", value_parser = size)]
    size: Option<(i32, i32)>,
    /// Logarithmic values. Default: where they differ much.
    #[arg(long)]
    log: bool,
    /// Linear values from 0 on.
    #[arg(long, conflicts_with = "log")]
    linear: bool,
    /// Start of a timeline, microseconds. Default: all, or the last messages from their triggers on.
    #[arg(long, value_name = "US", value_parser = time)]
    from: Option<f64>,
    /// End of a timeline, microseconds.
    #[arg(long, value_name = "US", value_parser = time)]
    to: Option<f64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Latency,
    Bandwidth,
}

fn svg(text: &str) -> StdResult<PathBuf, String> {
    let path = PathBuf::from(text);
    let other = ["png", "jpg", "jpeg", "gif", "webp", "pdf", "eps"];
    match path.extension().and_then(OsStr::to_str) {
        Some(name) if other.contains(&&*name.to_ascii_lowercase()) => {
            Err("a picture is SVG: name it .svg".into())
        }
        _ => Ok(path),
    }
}

fn time(text: &str) -> StdResult<f64, String> {
    let time = text.parse().ok().filter(|time: &f64| time.is_finite());
    time.ok_or_else(|| "not a number of microseconds".into())
}

fn size(text: &str) -> StdResult<(i32, i32), String> {
    let parse = |text: &str| text.parse().ok().filter(|pixels| (100..=10_000).contains(pixels));
    let both = text.split_once('x').and_then(|(width, height)| Some((parse(width)?, parse(height)?)));
    both.ok_or_else(|| "not two numbers of pixels from 100 to 10000, such as 860x540".into())
}

struct File {
    /// Its name without folder and ending.
    stem: String,
    content: Content,
}

enum Content {
    Report(Box<Report>),
    Timeline(Timeline),
}

impl File {
    fn read(path: &Path) -> Result<Self> {
        let file = path.display();
        let text = std::fs::read(path).map_err(|error| format!("{file}: {error}"))?;
        let json = |error| {
            format!(
                "{file}: not results of this version: {error}; give files that `--json` or `gdasync trace --timeline` wrote"
            )
        };
        let value: Value = serde_json::from_slice(&text).map_err(json)?;
        let content = match value.get("messages") {
            Some(_) => Content::Timeline(serde_json::from_value(value).map_err(json)?),
            None => Content::Report(serde_json::from_value(value).map_err(json)?),
        };
        let is_empty = match &content {
            Content::Report(report) => report.series.iter().all(|series| series.points.is_empty()),
            Content::Timeline(timeline) => timeline.messages.iter().all(|message| message.times().is_empty()),
        };
        if is_empty {
            return Err(format!("{file}: it has no measurements").into());
        }
        Ok(Self { stem: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), content })
    }

    fn kind(&self) -> &str {
        match &self.content {
            Content::Report(report) => &report.benchmark,
            Content::Timeline(_) => "trace --timeline",
        }
    }

    /// Machine, device and commit in a line.
    fn origin(&self) -> String {
        let Content::Report(report) = &self.content else { return self.kind().to_owned() };
        let Report { device, machine, .. } = &**report;
        let (cpus, cpu, commit) = (machine.cpus, &machine.cpu, &machine.commit);
        format!("{}; {device}; {cpus} x {cpu}; commit {commit}", self.kind())
    }

    fn groups(&self) -> Vec<Group> {
        let Content::Report(report) = &self.content else { return Vec::new() };
        let mut groups: Vec<Group> = Vec::new();
        for series in report.series.iter().filter(|series| !series.points.is_empty()) {
            match groups.iter_mut().find(|group| group.name == series.group && group.shares_axes(series)) {
                Some(group) => group.series.push(series.clone()),
                None => groups.push(Group::of(series)),
            }
        }
        groups
    }
}

/// Series of one plot.
#[derive(Clone)]
struct Group {
    name: String,
    /// What the points differ in.
    x: String,
    /// Whether the points have names instead of numbers.
    is_named: bool,
    unit: Unit,
    series: Vec<Series>,
}

impl Group {
    fn of(series: &Series) -> Self {
        let is_named = series.points.iter().any(|point| matches!(point.x, At::Name(_)));
        let (name, x, unit) = (series.group.clone(), series.x.clone(), series.unit);
        Self { name, x, is_named, unit, series: vec![series.clone()] }
    }

    fn shares_axes(&self, series: &Series) -> bool {
        let other = Self::of(series);
        (&self.x, self.unit, self.is_named) == (&other.x, other.unit, other.is_named)
    }

    /// All positions, numbers in ascending order.
    fn places(&self) -> Vec<&At> {
        let mut places: Vec<&At> = Vec::new();
        for point in self.series.iter().flat_map(|series| &series.points) {
            if !places.contains(&&point.x) {
                places.push(&point.x);
            }
        }
        places.sort_by_key(|at| if let At::Number(number) = at { *number } else { 0 });
        places
    }

    fn describe(&self) -> String {
        format!("`{}`, {} by {}", self.name, draw::quantity(self.unit), self.x)
    }

    /// Times of sizes as bandwidths, or bandwidths as times; `None` if they are neither.
    fn convert(&self, to: Unit) -> Option<Self> {
        let both = [Unit::Micros, Unit::GigabytesPerSecond];
        if self.unit == to {
            return Some(self.clone());
        }
        if self.x != "bytes" || self.is_named || !both.contains(&self.unit) || !both.contains(&to) {
            return None;
        }
        let mut group = Self { unit: to, ..self.clone() };
        for point in group.series.iter_mut().flat_map(|series| &mut series.points) {
            let At::Number(bytes) = point.x else { return None };
            #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
            let [p50, p99, min] = [point.p50, point.p99, point.min].map(|value| bytes as f64 / value / 1e3);
            *point = Point { p50, p99, min, ..point.clone() };
            if !p50.is_finite() || !p99.is_finite() {
                return None;
            }
        }
        Some(group)
    }

    fn title(&self, kind: &str) -> String {
        let title = if kind.is_empty() { self.name.clone() } else { format!("{kind}: {}", self.name) };
        let mut chars = title.chars();
        chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
    }
}

/// The words of each file name that the others do not share.
fn labels(stems: &[&str]) -> Vec<String> {
    let words: Vec<Vec<&str>> = stems.iter().map(|stem| stem.split('-').collect()).collect();
    let least = words.iter().map(Vec::len).min().unwrap_or(0);
    let same = |index: &usize| words.windows(2).all(|pair| pair[0][*index] == pair[1][*index]);
    let skip = (0..least.saturating_sub(1)).take_while(same).count();
    words.iter().map(|words| words[skip..].join("-")).collect()
}

fn foot(files: &[File]) -> Vec<String> {
    let mut lines: Vec<String> = files.iter().map(File::origin).collect();
    lines.dedup();
    lines
}

/// All series in one group. Names that several files use are prefixed with the labels of the files.
fn merge(groups: Vec<Group>, labels: &[String]) -> Group {
    let names: Vec<String> =
        groups.iter().flat_map(|group| &group.series).map(|series| series.name.clone()).collect();
    let is_shared = |name: &String| names.iter().filter(|other| *other == name).count() > 1;
    let mut labelled = groups.into_iter().zip(labels).map(|(mut group, label)| {
        for series in group.series.iter_mut().filter(|series| is_shared(&series.name)) {
            series.name = format!("{label}: {}", series.name);
        }
        group
    });
    let first = labelled.next().expect("clap requires a file");
    labelled.fold(first, |mut all, group| {
        all.series.extend(group.series);
        all
    })
}

fn write(path: &Path, text: &str) -> Result<ExitCode> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

impl Options {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let files = self.files.iter().map(|path| File::read(path)).collect::<Result<Vec<_>>>()?;
        let timelines = files.iter().filter(|file| matches!(file.content, Content::Timeline(_))).count();
        let svg = if timelines > 0 { self.timeline(&files)? } else { self.picture(&files)? };
        write(&self.output, &svg)
    }

    fn timeline(&self, files: &[File]) -> Result<String> {
        let mut messages = Vec::new();
        for file in files {
            match &file.content {
                Content::Timeline(timeline) => messages.extend(timeline.messages.iter().cloned()),
                Content::Report(_) => return Err(apart(file, "no timeline", "a timeline")),
            }
        }
        let title = self.title.as_deref().unwrap_or("Messages and their stages");
        timeline::draw(title, &messages, &foot(files), self.size, (self.from, self.to))
    }

    fn picture(&self, files: &[File]) -> Result<String> {
        if !self.label.is_empty() && self.label.len() != files.len() {
            let (labels, files) = (self.label.len(), files.len());
            return Err(format!("{labels} times --label for {files} files: give one for each").into());
        }
        let stems: Vec<_> = files.iter().map(|file| file.stem.as_str()).collect();
        let labels = if self.label.is_empty() { labels(&stems) } else { self.label.clone() };
        let mut groups: Vec<Group> = Vec::new();
        for file in files {
            let group = self.group(file, groups.first())?;
            if let Some(first) = groups.first().filter(|first| !first.shares_axes(&group.series[0])) {
                return Err(apart(file, &group.describe(), &first.describe()));
            }
            groups.push(group);
        }
        let mut group = merge(groups, &labels);
        self.filter(&mut group)?;
        let is_one = files.windows(2).all(|pair| pair[0].kind() == pair[1].kind());
        let kind = if is_one { files[0].kind() } else { "" };
        let title = self.title.clone().unwrap_or_else(|| group.title(kind));
        let log = (self.log || self.linear).then_some(self.log);
        Picture { title, group, log, foot: foot(files), size: self.size }.svg()
    }

    /// The group of a file: the named one, or that of the file before, or the first.
    fn group(&self, file: &File, before: Option<&Group>) -> Result<Group> {
        let groups = file.groups();
        let named = |name: &str| groups.iter().find(|group| group.name == name);
        let list = |of: &dyn Fn(&&Group) -> bool| {
            let names = groups.iter().filter(of).map(|group| format!("`{}`", group.name));
            names.collect::<Vec<_>>().join(", ")
        };
        let group = match &self.group {
            Some(wanted) => named(wanted).ok_or_else(|| {
                format!("{} has no group `{wanted}`; it has: {}", file.stem, list(&|_| true))
            })?,
            None => before.and_then(|before| named(&before.name)).unwrap_or(&groups[0]),
        };
        if groups.len() > 1 && self.group.is_none() {
            let others = list(&|other| other.name != group.name);
            note!("{}: draws `{}`; --group draws {others}", file.stem, group.name);
        }
        let (unit, wanted) = match self.kind {
            None => return Ok(group.clone()),
            Some(Kind::Latency) => (Unit::Micros, "latency"),
            Some(Kind::Bandwidth) => (Unit::GigabytesPerSecond, "bandwidth"),
        };
        let (name, file, what) = (&group.name, &file.stem, group.describe());
        let why = || {
            format!("--kind {wanted} needs times or bandwidths by bytes, and `{name}` of {file} has {what}")
        };
        Ok(group.convert(unit).ok_or_else(why)?)
    }

    fn filter(&self, group: &mut Group) -> Result<()> {
        let has = |name: &str, texts: &[String]| texts.iter().any(|text| name.contains(text.as_str()));
        for (texts, keep) in [(&self.series, true), (&self.without, false)] {
            let names = group.series.iter().map(|series| series.name.clone());
            let places = group.places().into_iter().filter(|_| !keep).map(ToString::to_string);
            let names: Vec<String> = names.chain(places).collect();
            if let Some(text) = texts.iter().find(|text| !names.iter().any(|name| name.contains(*text))) {
                return Err(nothing(text));
            }
        }
        group.series.retain(|series| {
            (self.series.is_empty() || has(&series.name, &self.series)) && !has(&series.name, &self.without)
        });
        for series in &mut group.series {
            series.points.retain(|point| !has(&point.x.to_string(), &self.without));
        }
        group.series.retain(|series| !series.points.is_empty());
        match group.series.is_empty() {
            true => Err(nothing(&[&self.series[..], &self.without].concat().join(", "))),
            false => Ok(()),
        }
    }
}

fn apart(file: &File, what: &str, first: &str) -> Box<dyn std::error::Error> {
    let file = &file.stem;
    format!("{file} has {what}, {first} has not: they do not share an axis; plot them apart, or choose with --group").into()
}

fn nothing(text: &str) -> Box<dyn std::error::Error> {
    format!("nothing is left to draw: {text:?} of --series or --without is in no name, or in all").into()
}

/// Options of `gdasync report`.
#[derive(Args)]
pub(crate) struct ReportOptions {
    /// Results that benchmarks and examples wrote with --json, or the timeline of `gdasync trace`.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// The page, self-contained HTML.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[arg(long, default_value = "GPUDirect Async: results")]
    title: String,
}

const TEMPLATE: &str = include_str!("plot/template.html");

/// A text in one line without characters that XML forbids.
fn printable(text: &str) -> String {
    let text = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c });
    text.filter(|c| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')).collect()
}

/// Text for elements and attributes of HTML and XML.
fn escape(text: &str) -> String {
    let text = printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

impl ReportOptions {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let sections = self.files.iter().map(|path| section(&File::read(path)?));
        let body = sections.collect::<Result<String>>()?;
        // In one pass: text of files is not searched for placeholders.
        let mut page = String::new();
        for part in TEMPLATE.split_inclusive("}}") {
            match part.split_once("{{") {
                Some((before, "title}}")) => page.extend([before, &escape(&self.title)]),
                Some((before, "body}}")) => page.extend([before, &body]),
                _ => page.push_str(part),
            }
        }
        write(&self.output, &page)
    }
}

/// The part of the page about one file.
fn section(file: &File) -> Result<String> {
    let (stem, kind) = (escape(&file.stem), escape(file.kind()));
    let mut html = format!("<section>\n<h2>{stem} <small>{kind}</small></h2>\n");
    let report = match &file.content {
        Content::Timeline(timeline) => {
            let svg =
                timeline::draw("Messages and their stages", &timeline.messages, &[], None, (None, None))?;
            return Ok(format!("{html}<figure>{svg}</figure>\n</section>\n"));
        }
        Content::Report(report) => report,
    };
    html.push_str("<table class=\"facts\">\n");
    let mut fact = |name: &str, value: &str| {
        if !value.is_empty() && value != "null" {
            let _ = writeln!(html, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(value));
        }
    };
    let machine = &report.machine;
    fact("command", if machine.command.is_empty() { "not in this file" } else { &machine.command });
    fact("device", &report.device);
    fact("wire", &report.wire);
    fact("machine", &format!("{} x {}", machine.cpus, machine.cpu));
    for (name, value) in [
        ("kernel", &machine.kernel),
        ("commit", &machine.commit),
        ("version", &machine.version),
        ("compiler", &machine.rustc),
    ] {
        fact(name, value);
    }
    for (name, value) in report.options.as_object().into_iter().flatten() {
        fact(name, &value.as_str().map_or_else(|| Value::to_string(value), str::to_owned));
    }
    html.push_str("</table>\n");
    for group in file.groups() {
        let picture =
            Picture { title: group.title(""), group: group.clone(), log: None, foot: Vec::new(), size: None };
        let _ = writeln!(html, "<figure>{}</figure>", picture.svg()?);
        html.push_str(&table(&group));
    }
    if !report.skipped.is_empty() {
        html.push_str("<h3>Not measured</h3>\n<ul>\n");
        for skipped in &report.skipped {
            let _ = writeln!(html, "<li>{}: {}</li>", escape(&skipped.name), escape(&skipped.reason));
        }
        html.push_str("</ul>\n");
    }
    html.push_str("</section>\n");
    Ok(html)
}

/// All figures of a group: a row for each position, three columns for each series.
fn table(group: &Group) -> String {
    let label = |at: &At| match at {
        #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
        At::Number(size) if group.x == "bytes" => bytes(*size as f64).replace(' ', "\u{a0}"),
        at => at.to_string(),
    };
    let cells = |point: Option<&Point>| {
        let values = point.map(|point| [point.p50, point.p99, point.min].map(number)).unwrap_or_default();
        values.map(|value| format!("<td>{value}</td>")).concat()
    };
    let mut html = String::from("<div class=\"wide\"><table class=\"figures\">\n<thead><tr><td></td>");
    for series in &group.series {
        let _ = write!(html, "<th colspan=\"3\">{}</th>", escape(&series.name));
    }
    let _ = write!(html, "</tr>\n<tr><th>{}</th>", group.unit);
    html.push_str(&"<th>p50</th><th>p99</th><th>min</th>".repeat(group.series.len()));
    html.push_str("</tr></thead>\n<tbody>\n");
    for at in group.places() {
        let row: String = group.series.iter().map(|series| cells(series.at(at))).collect();
        let _ = writeln!(html, "<tr><th>{}</th>{row}</tr>", escape(&label(at)));
    }
    html.push_str("</tbody></table></div>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_the_words_that_differ() {
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

    /// Values that JSON allows must not panic when drawn.
    #[test]
    fn odd_values_are_drawn_or_refused() {
        for x in ["bytes", "ranks", "call"] {
            for value in [0.0, -1.0, 1e308, 1e-308, f64::NAN] {
                let at = |n: u64| if x == "call" { At::Name(format!("call {n}")) } else { At::Number(n) };
                let mut series = Series::new("time", "name", x, Unit::Micros);
                for n in [0, 1, u64::MAX] {
                    series.points.push(Point { x: at(n), ..Point::value(n, value) });
                    series.points.push(Point { x: at(n), ..Point::value(n, 1.0) });
                    for log in [None, Some(true), Some(false)] {
                        let group = Group::of(&series);
                        let _ = group.convert(Unit::GigabytesPerSecond);
                        let _ = Picture { title: "t".into(), group, log, foot: vec![], size: None }.svg();
                    }
                }
            }
        }
    }

    #[test]
    fn text_is_escaped() {
        let text = "<a href=\"x\">'&amp;\u{1}\u{ffff}\nb";
        assert_eq!(escape(text), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;amp; b");
    }
}
