//! Names and messages that documents quote from the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::document::{Document, root};

/// The libraries and the command line.
const CRATES: [&str; 6] =
    ["gdrcopy/src", "gdrcopy/capi/src", "gdsync/src", "mp/src", "rdma-core-sys/src", "src"];
/// What variables of ours begin with.
const FAMILIES: [&str; 4] = ["GDSYNC_", "GDRCOPY_", "GDASYNC_", "MP_"];

/// The sources, with messages that span lines as one line each.
pub(crate) fn sources() -> String {
    let mut text = String::new();
    CRATES.iter().for_each(|folder| read(&root().join(folder), &mut text));
    read(&root().join("examples"), &mut text);
    text.split("\\\n")
        .enumerate()
        .fold(String::new(), |all, (number, part)| all + if number == 0 { part } else { part.trim_start() })
}

fn read(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        if is_test {
            continue;
        } else if path.is_dir() {
            read(&path, text);
        } else if path.extension().is_some_and(|end| end == "rs") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// Variables of the environment that the code reads, but for those of tests and of the build.
pub(crate) fn variables() -> BTreeSet<String> {
    let text = sources();
    let quoted = text.split('"').filter(|word| FAMILIES.iter().any(|family| word.starts_with(family)));
    let is_name = |word: &&str| {
        word.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
            && !FAMILIES.contains(word)
    };
    quoted.filter(is_name).filter(|name| of_users(name)).map(str::to_owned).collect()
}

/// Whether a variable is for users: not for tests, nor for the build.
fn of_users(name: &str) -> bool {
    !name.contains("_TEST_") && !name.starts_with("GDRCOPY_KMOD_") && !name.starts_with("GDASYNC_")
}

/// What a document quotes that the repository does not have: `Type::name`, `folder/file`, variables, and lines below
/// `<!-- from the code -->`.
pub(crate) fn unknown(document: &Document, sources: &str) -> Vec<String> {
    let prose = document.prose();
    let tells_of_others = document.path == "docs/porting.md" || document.path == "docs/comparison.md";
    let code: Vec<_> = prose.split('`').skip(1).step_by(2).collect();
    let files = code.iter().copied().filter(|word| is_lost(document, word));
    let paths = code.iter().copied().filter_map(last_of_path).filter(|name| !has_word(sources, name));
    let variables = prose
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|_| !tells_of_others)
        .filter(|word| FAMILIES.iter().any(|family| word.len() > family.len() && word.starts_with(family)))
        .filter(|word| of_users(word) && !has_word(sources, word));
    let unknown =
        files.chain(paths).chain(variables).map(|name| format!("{}: there is no {name}", document.path));
    let quotes = quotes(document).into_iter().filter(|part| !sources.contains(part.as_str()));
    unknown.chain(quotes.map(|part| format!("{}: nothing says '{part}'", document.path))).collect()
}

/// Whether it is written as the path of something in the repository, which is not there.
fn is_lost(document: &Document, word: &str) -> bool {
    let folder = word.split('/').next().expect("a part at least");
    let is_path =
        word.contains('/') && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"/._-".contains(&b));
    let is_ours = !folder.is_empty() && folder != "target" && root().join(folder).is_dir();
    is_path && is_ours && !root().join(word).exists() && !document.folder().join(word).exists()
}

/// The last part of `A::b`, `A::b(...)`, if it is that.
fn last_of_path(code: &str) -> Option<&str> {
    let path = code.split(['(', ' ', '<', '[']).next()?;
    let is_path = path.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b':');
    let (_, last) = path.rsplit_once("::")?;
    (is_path && !last.is_empty()).then_some(last)
}

fn has_word(sources: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    sources.match_indices(word).any(|(at, _)| {
        !is_part(sources[..at].chars().next_back()) && !is_part(sources[at + word.len()..].chars().next())
    })
}

/// What is quoted, in parts between the places where a message has names and numbers.
fn quotes(document: &Document) -> Vec<String> {
    let blocks = document.text.split("<!-- from the code -->\n```text\n").skip(1);
    let lines = blocks.filter_map(|rest| rest.split("```").next()).flat_map(str::lines);
    let parts = lines.flat_map(|line| line.split('…'));
    parts.map(|part| part.trim().to_owned()).filter(|part| part.len() > 2).collect()
}
