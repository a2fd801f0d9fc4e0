//! `gdasync plot` and `gdasync report` on the results in `benchmarks`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::common::{Scratch, command, fails, succeeds};

/// The command-line tool in the folder of the repository.
fn tool(args: &[&str]) -> Command {
    let mut command = command("gdasync");
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args);
    command
}

fn benchmark(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benchmarks").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The results in the repository.
fn results() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("benchmarks")).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    assert!(files.len() >= 8, "{files:?}");
    files
}

/// The picture that these arguments draw.
#[track_caller]
fn plot(args: &[&str]) -> String {
    let svg = Scratch::new(&format!("plot-{:?}", std::thread::current().id()));
    succeeds(tool(&[&["plot"], args, &["-o", svg.text()]].concat()));
    let svg = std::fs::read_to_string(svg.path()).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    svg
}

/// Filled elements of a colour.
fn count(svg: &str, element: &str, fill: &str) -> usize {
    let lines = svg.split('<').filter(|tag| tag.starts_with(element));
    lines.filter(|tag| tag.contains(&format!("fill=\"{fill}\""))).count()
}

const COLORS: [&str; 4] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"];

#[test]
fn every_result_is_drawn_and_reported() {
    let files: Vec<_> = results().iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    for file in &files {
        let svg = plot(&[file]);
        let json = benchmark(Path::new(file).file_name().unwrap().to_str().unwrap());
        let commit = json["machine"]["commit"].as_str().unwrap().to_owned();
        assert!(svg.contains(&format!("commit {commit}")), "{file}");
        for series in json["series"].as_array().unwrap() {
            if series["group"] == json["series"][0]["group"] {
                assert!(svg.contains(series["name"].as_str().unwrap()), "{file}: {series}");
            }
        }
    }
    let page = Scratch::new("report");
    let args: Vec<_> = files.iter().map(String::as_str).collect();
    succeeds(tool(&[&["report"], &args[..], &["-o", page.text()]].concat()));
    let page = std::fs::read_to_string(page.path()).unwrap();
    for tag in ["<script", "<link", "<img", "<iframe", " src=", "url(", "@import"] {
        assert!(!page.contains(tag), "{tag}: the page must be self-contained");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("class=\"figures\"").count());
    for text in ["bare word", "cuStreamSynchronize", "wait for a receive", "3,559", "commit"] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn curves_and_bars_have_every_point() {
    let copies = benchmark("copy-h200-16-cores.json");
    let points = |name: &str| {
        let all = copies["series"].as_array().unwrap().iter();
        all.filter(|s| s["group"] == "to GPU" && s["name"] == name)
            .map(|s| s["points"].as_array().unwrap().len())
            .sum::<usize>()
    };
    for kind in ["latency", "bandwidth"] {
        let svg = plot(&["benchmarks/copy-h200-16-cores.json", "--group", "to GPU", "--kind", kind]);
        // One more is in the legend.
        assert_eq!(count(&svg, "circle", COLORS[0]), points("bare word").max(points("CPU")) + 1, "{kind}");
        let axis = if kind == "latency" { "time, us" } else { "bandwidth, GB/s" };
        assert!([axis, "1 B", "64 MiB"].iter().all(|text| svg.contains(text)), "{svg}");
    }
    let svg = plot(&["benchmarks/trigger-h200.json"]);
    assert!(["idle GPU", "8 busy streams", "time, us"].iter().all(|text| svg.contains(text)));
    let less = plot(&["benchmarks/trigger-h200.json", "--without", "batch", "--series", "idle"]);
    assert!(
        count(&less, "rect", COLORS[1]) == 0
            && count(&less, "rect", COLORS[0]) < count(&svg, "rect", COLORS[0])
    );
    assert!(!less.contains("batch") && !less.contains("busy"));
}

#[test]
fn files_share_axes_and_the_legend_has_their_labels() {
    let [a, b] = ["memop", "kernel"].map(|via| format!("benchmarks/pingpong-h200x2-{via}.json"));
    let texts = |args: &[&str]| plot(&[&[a.as_str(), b.as_str()], args].concat());
    let svg = texts(&[]);
    assert!(svg.contains("memop: stream") && svg.contains("kernel: stream"), "{svg}");
    let svg =
        texts(&["--label", "one", "--label", "two", "--title", "A <title> & more", "--size", "700x400"]);
    for text in ["one: stream", "two: stream", "A &lt;title&gt; &amp; more", "width=\"700\" height=\"400\""] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    assert!(texts(&["--log"]) != texts(&["--linear"]));
}

#[test]
fn timelines_are_drawn_in_lanes() {
    let file = Scratch::new("plot-timeline");
    let message = |rank: u64, seq: u64, at: f64| {
        json!({"rank": rank, "seq": seq, "enqueue": at, "trigger": at + 1.0, "fetched": at + 1.5,
               "completed": at + 2.5, "released": at + 3.0})
    };
    let mut messages = vec![message(0, 1, 10.0), message(1, 1, 13.0), message(0, 2, 16.0)];
    messages.push(json!({"rank": 1, "seq": 2, "enqueue": 19.0, "trigger": 19.5, "completed": null}));
    std::fs::write(file.path(), json!({"unit": "us", "messages": messages}).to_string()).unwrap();
    let svg = plot(&[file.text()]);
    for text in ["rank 0", "rank 1", "1: 3 us", "2: 3 us", "2: 0.5 us", "triggered, not fetched yet"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    // The last one was neither fetched nor completed; the legend has one more of each.
    assert_eq!(COLORS.map(|color| count(&svg, "rect", color)), [5, 4, 4, 4]);
    // A part: the first of rank 0 without its first stage, that of rank 1 without its last.
    let part = plot(&[file.text(), "--from", "11.2", "--to", "15"]);
    assert_eq!(COLORS.map(|color| count(&part, "rect", color)), [2, 3, 3, 2], "{part}");
    let error = fails(tool(&["plot", file.text(), "--from", "50", "-o", "/dev/null"]));
    assert!(error.contains("between 50 and"), "{error}");
    plot(&["benchmarks/timelines/pingpong-h200x2.json"]);
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
    for (text, expected) in [
        ("{", &["not results", "plot-bad"][..]),
        ("", &["not results"]),
        ("{\"name\": 1}", &["missing field"]),
        ("{\"messages\": []}", &["no measurements"]),
        ("{\"messages\": [{\"rank\": 0, \"seq\": 1}]}", &["no measurements"]),
    ] {
        refuse(text, &[], expected);
    }
    let whole = benchmark("pingpong-h200x2-memop.json");
    let mut damaged = whole.clone();
    damaged["series"][0]["points"][0]["p50"] = Value::Null;
    refuse(&damaged.to_string(), &[], &["not results"]);
    damaged["series"][0]["points"][0]["p50"] = 0.into();
    refuse(&damaged.to_string(), &["--log"], &["--log", "above 0"]);
    damaged["series"] = json!([]);
    refuse(&damaged.to_string(), &[], &["no measurements"]);
    let memop = whole.to_string();
    refuse(&memop, &["--group", "wake"], &["no group `wake`", "`half round trip`"]);
    refuse(&memop, &["--series", "nobody"], &["nobody"]);
    refuse(&memop, &["--size", "100x100"], &["too small", "needs"]);
    refuse(&memop, &["--label", "a", "--label", "b"], &["2 times --label for 1 files"]);
    refuse(&memop, &["benchmarks/trigger-h200.json"], &["do not share an axis"]);
    refuse(&benchmark("trigger-h200.json").to_string(), &["--kind", "bandwidth"], &["`trigger`"]);
}

#[test]
fn names_are_escaped_in_pictures_and_pages() {
    let nasty = "</text><script>alert(\"1\")</script>&amp;'\u{1}\u{7f} ü";
    let mut json = benchmark("trigger-h200.json");
    json["series"][0]["points"][0]["x"] = nasty.into();
    json["device"] = nasty.into();
    json["machine"]["commit"] = "{{body}}".into();
    let (file, page) = (Scratch::new("plot-nasty"), Scratch::new("plot-nasty-page"));
    std::fs::write(file.path(), json.to_string()).unwrap();
    let svg = plot(&[file.text(), "--title", nasty]);
    succeeds(tool(&["report", file.text(), "--title", nasty, "-o", page.text()]));
    let page = std::fs::read_to_string(page.path()).unwrap();
    for text in [&svg, &page] {
        assert!(
            !text.contains("<script>") && text.contains("&lt;script&gt;") && !text.contains('\u{1}'),
            "{text}"
        );
    }
    assert_eq!(page.matches("<h2>").count(), 1);
}

/// Each picture of the documents has its command, and the command draws.
#[test]
fn commands_of_the_pictures_draw() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures");
    let text = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let mut drawn = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("    gdasync plot ")) {
        let pieces = line.split('"').enumerate();
        let words =
            |(i, piece)| if i % 2 == 1 { vec![piece] } else { str::split_whitespace(piece).collect() };
        let args: Vec<&str> = pieces.flat_map(words).collect();
        let [args @ .., "-o", output] = &args[..] else { panic!("{line}") };
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(output).exists(), "{output}");
        plot(args);
        drawn += 1;
    }
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let pictures = files.filter(|path| path.extension().is_some_and(|end| end == "svg")).count();
    assert_eq!(drawn, pictures, "a picture without its command, or a command without its picture");
}
