//! `gdasync plot` and `gdasync report` on the results in `benchmarks`.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::common::{Scratch, command, fails, succeeds};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The command-line tool in the folder of the repository.
fn tool(args: &[&str]) -> Command {
    let mut command = command("gdasync");
    command.current_dir(root()).args(args);
    command
}

fn benchmark(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(root().join("benchmarks").join(name)).unwrap()).unwrap()
}

/// What `plot` or `report` writes with these arguments.
#[track_caller]
fn drawn(args: &[&str]) -> String {
    let file = Scratch::new("drawn");
    succeeds(tool(&[args, &["-o", file.text()]].concat()));
    std::fs::read_to_string(file.path()).unwrap()
}

#[test]
fn every_result_is_drawn_and_reported() {
    let entries = std::fs::read_dir(root().join("benchmarks")).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    let files: Vec<_> = files.iter().map(|path| path.to_str().unwrap()).collect();
    assert!(files.len() >= 8, "{files:?}");
    for file in &files {
        let svg = drawn(&["plot", file]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{svg}");
        let json = benchmark(file);
        assert!(svg.contains(&format!("commit {}", json["machine"]["commit"].as_str().unwrap())), "{file}");
        let all = json["series"].as_array().unwrap();
        let group: Vec<_> = all.iter().filter(|one| one["group"] == all[0]["group"]).collect();
        assert!(group.iter().all(|one| svg.contains(one["name"].as_str().unwrap())), "{file}");
        // Each point has its mark, each series one in the legend.
        let points: usize = group.iter().map(|one| one["points"].as_array().unwrap().len()).sum();
        assert_eq!(svg.matches("<circle").count(), points + group.len(), "{file}");
    }
    let page = drawn(&[&["report"], &files[..]].concat());
    for tag in ["<script", "<link", "<img", "<iframe", " src=", "url(", "@import"] {
        assert!(!page.contains(tag), "{tag}: the page must be self-contained");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("<pre>").count());
    for text in ["bare word", "cuStreamSynchronize", "wait for a receive", "3559", "commit"] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn files_share_axes_and_series_are_chosen() {
    let [a, b] = ["memop", "kernel"].map(|via| format!("benchmarks/pingpong-h200x2-{via}.json"));
    let svg = drawn(&["plot", &a, &b, "--title", "A <title> & more"]);
    for text in ["h200x2-memop: stream", "h200x2-kernel: stream", "A &lt;title&gt; &amp; more", "time, us"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    let less = drawn(&["plot", "benchmarks/trigger-h200.json", "--group", "wake", "--series", "idle"]);
    assert!(
        less.contains("idle GPU") && !less.contains("8 busy streams") && less.contains("MemOp wait"),
        "{less}"
    );
}

#[test]
fn errors_name_what_cannot_be_drawn() {
    let (file, output) = (Scratch::new("plot-bad"), Scratch::new("plot-none"));
    let refuse = |text: &str, args: &[&str], expected: &[&str]| {
        std::fs::write(file.path(), text).unwrap();
        let error = fails(tool(&[&["plot", file.text(), "-o", output.text()], args].concat()));
        assert!(expected.iter().all(|word| error.contains(word)), "{text} {args:?}: {error}");
        assert!(!output.path().exists(), "{text} {args:?}");
    };
    for (text, expected) in [("{", "not results"), ("", "plot-bad"), ("{\"name\": 1}", "missing field")] {
        refuse(text, &[], &[expected]);
    }
    let whole = benchmark("pingpong-h200x2-memop.json");
    let mut damaged = whole.clone();
    damaged["series"][0]["points"][0]["p50"] = Value::Null;
    refuse(&damaged.to_string(), &[], &["not results"]);
    damaged["series"] = json!([]);
    refuse(&damaged.to_string(), &[], &["no measurements"]);
    refuse(&whole.to_string(), &["--group", "wake"], &["no group `wake`", "`half round trip`"]);
    refuse(&whole.to_string(), &["--series", "nobody"], &["nobody"]);
    refuse(&whole.to_string(), &["benchmarks/trigger-h200.json"], &["no group"]);
    damaged["series"] = json!([{"group": "g", "name": "n", "x": "bytes", "unit": "us",
                                "points": [{"x": 8, "p50": 0.0, "p99": 0.0, "min": 0.0}]}]);
    refuse(&damaged.to_string(), &[], &["logarithmic"]);
}

#[test]
fn names_are_escaped_in_pictures_and_pages() {
    let nasty = "</text><script>alert(\"1\")</script>&amp;'\u{1}\u{7f} ü";
    let mut json = benchmark("trigger-h200.json");
    json["series"][0]["points"][0]["x"] = nasty.into();
    json["device"] = nasty.into();
    let file = Scratch::new("plot-nasty");
    std::fs::write(file.path(), json.to_string()).unwrap();
    for kind in ["plot", "report"] {
        let text = drawn(&[kind, file.text(), "--title", nasty]);
        assert!(!text.contains("<script>") && !text.contains('\u{1}'), "{text}");
        assert!(text.contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;amp;&#39; ü"), "{text}");
    }
}

/// Each picture of the documents is what its command draws.
#[test]
fn pictures_are_those_of_their_commands() {
    let folder = root().join("docs/pictures");
    let text = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let mut commands = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("    gdasync ")) {
        let pieces = line.split('"').enumerate();
        let words =
            |(i, piece)| if i % 2 == 1 { vec![piece] } else { str::split_whitespace(piece).collect() };
        let args: Vec<&str> = pieces.flat_map(words).collect();
        let [args @ .., "-o", output] = &args[..] else { panic!("{line}") };
        assert_eq!(
            drawn(args),
            std::fs::read_to_string(root().join(output)).unwrap(),
            "{output}: draw it anew"
        );
        commands += 1;
    }
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let pictures = files.filter(|path| path.extension().is_some_and(|end| end == "svg")).count();
    assert_eq!(commands, pictures, "a picture without its command, or a command without its picture");
}
