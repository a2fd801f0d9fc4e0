//! `gdasync report`: one page with pictures, tables, machine and command.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::plot::{self, Picture, number};
use crate::results::{Group, Results, Value};

/// Options of `gdasync report`.
#[derive(Args)]
pub(crate) struct Options {
    /// Results: what benchmarks and examples wrote with --json, or the timeline of `gdasync trace`.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// The page, HTML with everything in it.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[arg(long, default_value = "GPUDirect Async: results")]
    title: String,
}

const TEMPLATE: &str = include_str!("template.html");

/// What XML may contain of a text, in one line.
pub(crate) fn printable(text: &str) -> String {
    let text = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c });
    text.filter(|c| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')).collect()
}

/// Text for HTML and XML, in elements and attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

impl Options {
    pub(crate) fn run(&self) -> plot::Result<ExitCode> {
        let results = plot::read(&self.files)?;
        let mut body = String::new();
        for results in &results {
            body.push_str(&section(results)?);
        }
        // One pass: what comes from files is not looked through for more places.
        let mut page = String::new();
        for part in TEMPLATE.split_inclusive("}}") {
            match part.split_once("{{") {
                Some((before, "title}}")) => page.extend([before, &escape(&self.title)]),
                Some((before, "body}}")) => page.extend([before, &body]),
                _ => page.push_str(part),
            }
        }
        plot::write(&self.output, &page)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Everything about one file.
fn section(results: &Results) -> plot::Result<String> {
    let mut html =
        format!("<section>\n<h2>{} <small>{}</small></h2>\n", escape(&results.stem), escape(&results.kind));
    html.push_str("<table class=\"facts\">\n");
    let command = if results.fact("command").is_none() {
        Some(("command".into(), "not noted in this file".into()))
    } else {
        None
    };
    for (name, value) in command.iter().chain(&results.facts) {
        line(&mut html, &format!("<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(value)));
    }
    html.push_str("</table>\n");
    for group in &results.groups {
        let picture = Picture {
            title: plot::title(group, ""),
            group: group.clone(),
            log: None,
            foot: Vec::new(),
            size: None,
        };
        line(&mut html, &format!("<figure>{}</figure>", picture.svg()?));
        html.push_str(&table(group));
    }
    if !results.messages.is_empty() {
        let svg = plot::timeline("Messages and their stages", &results.messages, &[])?;
        line(&mut html, &format!("<figure>{svg}</figure>"));
    }
    if !results.missing.is_empty() {
        html.push_str("<h3>Not measured</h3>\n<ul>\n");
        results.missing.iter().for_each(|reason| line(&mut html, &format!("<li>{}</li>", escape(reason))));
        html.push_str("</ul>\n");
    }
    html.push_str("</section>\n");
    Ok(html)
}

fn line(html: &mut String, text: &str) {
    html.push_str(text);
    html.push('\n');
}

/// All figures of a group: a row for each place, three columns for each series.
fn table(group: &Group) -> String {
    let place = |at| {
        let label = group.axis.label(at);
        // A size stays in one line; names of tests need more.
        if group.axis.is_numeric() { label.replace(' ', "\u{a0}") } else { label }
    };
    let cells = |value: Option<Value>| {
        let value = value.map(|value| [Some(value.p50), value.p99, value.min]).unwrap_or_default();
        value.map(|value| format!("<td>{}</td>", value.map(number).unwrap_or_default())).concat()
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
        line(&mut html, &format!("<tr><th>{}</th>{row}</tr>", escape(&place(at))));
    }
    html.push_str("</tbody></table></div>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_text_says_is_markup() {
        let text = "<a href=\"x\">'&amp;\u{1}\u{ffff}\nb";
        assert_eq!(escape(text), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;amp; b");
    }
}
