//! `gdasync report`: one page with pictures, tables, machine and command.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gdasync::results::{At, Point, Result};
use serde_json::Value;

use super::draw::{Picture, bytes, number};
use super::{Content, File, Group, timeline, write};

/// Options of `gdasync report`.
#[derive(Args)]
pub(crate) struct Options {
    /// Results that benchmarks and examples wrote with --json, or the timeline of `gdasync trace`.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// The page, self-contained HTML.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[arg(long, default_value = "GPUDirect Async: results")]
    title: String,
}

const TEMPLATE: &str = include_str!("template.html");

/// A text in one line without characters that XML forbids.
pub(super) fn printable(text: &str) -> String {
    let text = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c });
    text.filter(|c| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')).collect()
}

/// Text for elements and attributes of HTML and XML.
pub(super) fn escape(text: &str) -> String {
    let text = printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

impl Options {
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
    fn text_is_escaped() {
        let text = "<a href=\"x\">'&amp;\u{1}\u{ffff}\nb";
        assert_eq!(escape(text), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;amp; b");
    }
}
