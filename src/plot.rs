//! `gdasync plot`: results as a picture, and `gdasync report`: results as a page.

mod draw;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use gdasync::note;
use gdasync::results::{At, Report, Result, Series, table};

use draw::Picture;

#[derive(Args)]
struct Files {
    /// Results that benchmarks, examples and tools wrote with --json.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Where to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    paths: Files,
    /// Which measurements of a file. Default: the first; the others are listed.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Only series with this in their names; may be repeated.
    #[arg(long, value_name = "TEXT")]
    series: Vec<String>,
    /// Default: the benchmark and the group.
    #[arg(long)]
    title: Option<String>,
}

#[derive(Args)]
pub(crate) struct ReportOptions {
    #[command(flatten)]
    paths: Files,
    #[arg(long, default_value = "GPUDirect Async: results")]
    title: String,
}

impl Files {
    fn read(&self) -> Result<Vec<File>> {
        self.files.iter().map(|path| File::read(path)).collect()
    }

    fn write(&self, text: &str) -> Result<ExitCode> {
        std::fs::write(&self.output, text).map_err(|error| format!("{}: {error}", self.output.display()))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Results, and the name of their file without folder and ending.
struct File {
    stem: String,
    report: Report,
}

impl File {
    fn read(path: &Path) -> Result<Self> {
        let file = path.display();
        let text = std::fs::read(path).map_err(|error| format!("{file}: {error}"))?;
        let mut report: Report = serde_json::from_slice(&text).map_err(|error| {
            format!("{file}: not results of this version: {error}; give files that `--json` wrote")
        })?;
        report.series.retain(|series| !series.points.is_empty());
        if report.series.is_empty() {
            return Err(format!("{file}: it has no measurements").into());
        }
        Ok(Self { stem: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), report })
    }

    /// Benchmark, device, machine and commit in a line.
    fn origin(&self) -> String {
        let Report { benchmark, device, machine, .. } = &self.report;
        format!("{benchmark}; {device}; {} x {}; commit {}", machine.cpus, machine.cpu, machine.commit)
    }

    /// Series that stand in one picture.
    fn groups(&self) -> Vec<Vec<Series>> {
        let mut groups: Vec<Vec<Series>> = Vec::new();
        for series in &self.report.series {
            match groups.iter_mut().find(|group| axes(&group[0]) == axes(series)) {
                Some(group) => group.push(series.clone()),
                None => groups.push(vec![series.clone()]),
            }
        }
        groups
    }
}

/// What series of one picture share.
fn axes(series: &Series) -> impl PartialEq {
    let is_named = series.points.iter().any(|point| matches!(point.x, At::Name(_)));
    (series.group.clone(), series.x.clone(), series.unit, is_named)
}

impl Options {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let files = self.paths.read()?;
        let mut all: Vec<Series> = Vec::new();
        for file in &files {
            let mut group = self.group(file, all.first().map(|series| series.group.clone()))?;
            if all.first().is_some_and(|first| axes(first) != axes(&group[0])) {
                return Err(format!(
                    "{}: its axes are others: plot it apart, or choose with --group",
                    file.stem
                )
                .into());
            }
            if files.len() > 1 {
                group.iter_mut().for_each(|series| series.name = format!("{}: {}", file.stem, series.name));
            }
            all.extend(group);
        }
        let wanted = |series: &Series| self.series.iter().any(|text| series.name.contains(text.as_str()));
        all.retain(|series| self.series.is_empty() || wanted(series));
        let first = all.first().ok_or_else(|| format!("no series has {:?} in its name", self.series))?;
        let title = format!("{}: {}", files[0].report.benchmark, first.group);
        let mut foot: Vec<_> = files.iter().map(File::origin).collect();
        foot.dedup();
        let title = self.title.as_deref().unwrap_or(&title);
        self.paths.write(&Picture { title, series: &all, foot: &foot }.svg()?)
    }

    /// The named group of a file, or that of the file before, or the first.
    fn group(&self, file: &File, before: Option<String>) -> Result<Vec<Series>> {
        let groups = file.groups();
        let names: Vec<_> = groups.iter().map(|group| format!("`{}`", group[0].group)).collect();
        let (stem, names) = (&file.stem, names.join(", "));
        let wanted = self.group.clone().or(before);
        if wanted.is_none() && groups.len() > 1 {
            note!("{stem}: draws the first of {names}; --group draws another");
        }
        let is_it = |group: &Vec<Series>| wanted.as_ref().is_none_or(|wanted| group[0].group == *wanted);
        let found = groups.into_iter().find(is_it);
        Ok(found.ok_or_else(|| {
            format!("{stem} has no group `{}`; it has: {names}", wanted.unwrap_or_default())
        })?)
    }
}

/// Text in one line for elements and attributes of HTML and XML, without characters that XML forbids.
fn escape(text: &str) -> String {
    let text = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c });
    let text: String = text.filter(|c| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')).collect();
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

const STYLE: &str = "\
body { font: 15px/1.45 sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .8rem; display: block; overflow-x: auto; }
th, td { padding: .15rem .6rem; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
pre { font-size: .8rem; overflow-x: auto; }
figure { margin: 1.5rem 0 .5rem; }
svg { max-width: 100%; height: auto; }
@media print { section { break-before: page; } figure, tr { break-inside: avoid; } }";

impl ReportOptions {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let (title, files) = (escape(&self.title), self.paths.read()?);
        let body: String = files.iter().map(section).collect();
        let page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<title>{title}</title>\n\
             <style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
        );
        self.paths.write(&page)
    }
}

/// The part of the page about one file.
fn section(file: &File) -> String {
    let Report { benchmark, device, wire, machine, options, skipped, .. } = &file.report;
    let cpus = format!("{} x {}", machine.cpus, machine.cpu);
    let facts = [
        ("command", &machine.command),
        ("device", device),
        ("wire", wire),
        ("machine", &cpus),
        ("kernel", &machine.kernel),
        ("commit", &machine.commit),
        ("version", &machine.version),
        ("compiler", &machine.rustc),
    ];
    let facts = facts.map(|(name, fact)| (name, fact.clone())).into_iter();
    let options = options.as_object().into_iter().flatten();
    let facts = facts.chain(options.map(|(name, value)| (name.as_str(), value.to_string())));
    let mut html = format!("<section>\n<h2>{}, {}</h2>\n<table>\n", escape(&file.stem), escape(benchmark));
    for (name, fact) in facts.filter(|(_, fact)| !["", "null"].contains(&fact.as_str())) {
        let _ = writeln!(html, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(&fact));
    }
    html.push_str("</table>\n");
    for series in file.groups() {
        let picture = Picture { title: &series[0].group, series: &series, foot: &[] }.svg();
        let picture = picture.unwrap_or_else(|reason| format!("<p>No picture: {reason}.</p>"));
        let _ = writeln!(html, "<figure>{picture}</figure>\n<pre>");
        for line in table(&series).lines() {
            let _ = writeln!(html, "{}", escape(&line));
        }
        html.push_str("</pre>\n");
    }
    for skipped in skipped {
        let (name, reason) = (escape(&skipped.name), escape(&skipped.reason));
        let _ = writeln!(html, "<p>Not measured: {name}: {reason}</p>");
    }
    html + "</section>\n"
}
