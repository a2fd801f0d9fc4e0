//! Links from document to document.

use std::fs;

use crate::document::Document;

/// The links of a document that lead nowhere.
pub(crate) fn broken(document: &Document) -> Vec<String> {
    let prose = document.prose();
    let targets = prose.match_indices("](").map(|(at, _)| {
        let rest = &prose[at + 2..];
        &rest[..rest.find(')').unwrap_or(rest.len())]
    });
    let ours = targets.filter(|target| !target.contains("://"));
    ours.filter_map(|target| {
        let why = wrong(document, target)?;
        Some(format!("{}: {target}: {why}", document.path))
    })
    .collect()
}

fn wrong(document: &Document, target: &str) -> Option<&'static str> {
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = document.folder().join(file);
    if !file.is_empty() && !path.exists() {
        return Some("no such file");
    }
    if heading.is_empty() {
        return None;
    }
    let text = if file.is_empty() { document.text.clone() } else { fs::read_to_string(path).ok()? };
    let prose = Document::parse(&document.path, &text).prose();
    let mut headings = prose.lines().filter(|line| line.starts_with('#'));
    headings.all(|line| anchor(line) != heading).then_some("no such heading")
}

/// A heading as GitHub writes it in links.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
