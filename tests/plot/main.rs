//! Pictures, reports and comparisons of results: the real binary on the results that are kept.

#[path = "../common/mod.rs"]
mod common;
mod compare;
mod pictures;
mod report;
mod xml;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Scratch, gdasync, succeeds};
use serde_json::Value;
use xml::{Document, elements};

/// The command-line tool in the folder of the repository.
fn tool(args: &[&str]) -> Command {
    let mut command = gdasync();
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args);
    command
}

/// The results that are kept.
fn kept() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benchmarks");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    files.sort();
    assert!(files.len() >= 8, "{files:?}");
    files
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn benchmark(name: &str) -> Value {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("benchmarks").join(name))
}

fn write(scratch: &Scratch, json: &Value) {
    std::fs::write(scratch.path(), json.to_string()).unwrap();
}

fn path(scratch: &Scratch) -> &str {
    scratch.path().to_str().unwrap()
}

/// The picture that these arguments draw.
#[track_caller]
fn plot(args: &[&str]) -> Document {
    let svg = Scratch::new(&format!("plot-{:?}", std::thread::current().id()));
    succeeds(tool(&[&["plot"], args, &["-o", path(&svg)]].concat()));
    elements(&std::fs::read_to_string(svg.path()).unwrap())
}

/// The first colours and marks of series.
const FIRST: &str = "#0072B2";
const SECOND: &str = "#D55E00";

#[test]
fn help_tells_what_there_is() {
    let help = succeeds(tool(&["--help"]));
    assert!(help.contains("plot") && help.contains("report"), "{help}");
    let help = succeeds(tool(&["plot", "--help"]));
    for option in [
        "--output",
        "--group",
        "--kind",
        "--series",
        "--without",
        "--label",
        "--title",
        "--size",
        "--log",
        "--linear",
    ] {
        assert!(help.contains(option), "{option}: {help}");
    }
    let help = succeeds(tool(&["bench", "--help"]));
    for option in ["--compare <A> <B>", "--threshold", "--fail", "--json", "noise", "hca"] {
        assert!(help.contains(option), "{option}: {help}");
    }
}
