//! Pictures, reports and comparisons of results: the real binary on the results that are kept.

mod common;
mod xml;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Scratch, fails, gdasync, run, succeeds};
use serde_json::{Value, json};
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

#[test]
fn every_kept_result_is_drawn() {
    for file in kept() {
        let svg = plot(&[file.to_str().unwrap()]);
        let (root, texts) = (&svg.elements[0], svg.texts());
        assert_eq!(
            (root.name.as_str(), root.get("xmlns")),
            ("svg", "http://www.w3.org/2000/svg"),
            "{file:?}"
        );
        let json = read(&file);
        let commit = format!("commit {}", json["machine"]["commit"].as_str().unwrap());
        assert!(texts.iter().any(|text| text.contains(&commit)), "{file:?}: {texts:?}");
        // All inside, so that nothing is cut.
        let size = |name| root.get(name).parse::<f64>().unwrap();
        let (width, height) = (size("width"), size("height"));
        for text in svg.elements.iter().filter(|element| element.name == "text") {
            let at = |name: &str| text.get(name).parse::<f64>().unwrap();
            assert!(
                (0.0..=width).contains(&at("x")) && (0.0..=height).contains(&at("y")),
                "{file:?}: {text:?}"
            );
        }
    }
}

#[test]
fn curves_have_every_series_and_every_point() {
    let file = "benchmarks/copy-h200-16-cores.json";
    let rows = benchmark("copy-h200-16-cores.json");
    let rows: Vec<_> =
        rows["rows"].as_array().unwrap().iter().filter(|row| row["group"] == "to GPU").collect();
    let points = |way: &str| rows.iter().filter(|row| row["way"] == way).count();
    for kind in ["latency", "bandwidth"] {
        let svg = plot(&[file, "--group", "to GPU", "--kind", kind]);
        let texts = svg.texts();
        for way in rows.iter().map(|row| row["way"].as_str().unwrap()).collect::<BTreeSet<_>>() {
            assert!(texts.contains(&way), "{way}: {texts:?}");
        }
        // One more is in the legend.
        assert_eq!(svg.count("circle", FIRST), points("CPU") + 1);
        assert_eq!(svg.count("rect", SECOND), points("copy engine") + 1);
        let axis = if kind == "latency" { "time, us" } else { "bandwidth, GB/s" };
        for text in [axis, "size", "1 B", "64 MiB"] {
            assert!(texts.contains(&text), "{text}: {texts:?}");
        }
    }
}

#[test]
fn bars_have_every_test() {
    let json = benchmark("trigger-h200.json");
    let rows: Vec<_> =
        json["rows"].as_array().unwrap().iter().filter(|row| row["group"] == "trigger").collect();
    let svg = plot(&["benchmarks/trigger-h200.json"]);
    let (texts, all) = (svg.texts(), svg.texts().join(" "));
    for name in ["idle GPU", "8 busy streams", "time, us"] {
        assert!(texts.contains(&name), "{name}: {texts:?}");
    }
    for (busy, color) in [(0, FIRST), (8, SECOND)] {
        let measured: Vec<_> =
            rows.iter().filter(|row| row["busy"] == busy && row["failed"].is_null()).collect();
        assert_eq!(svg.count("rect", color), measured.len() + 1, "{busy}");
        for row in measured {
            let last = row["variant"].as_str().unwrap().split(' ').next_back().unwrap();
            assert!(all.contains(last), "{row}");
        }
    }
    let without = plot(&["benchmarks/trigger-h200.json", "--without", "batch", "--series", "idle"]);
    assert_eq!(without.count("rect", SECOND), 0);
    assert!(!without.texts().iter().any(|text| text.contains("batch") || text.contains("busy")));
}

#[test]
fn files_share_axes_and_the_legend_tells_them_apart() {
    let [a, b] = ["memop", "kernel"].map(|via| format!("benchmarks/pingpong-h200x2-{via}.json"));
    let texts = |args: &[&str]| plot(&[&[a.as_str(), b.as_str()], args].concat());
    let svg = texts(&[]);
    for name in ["floor", "memop: stream", "kernel: stream"] {
        assert!(svg.texts().contains(&name), "{:?}", svg.texts());
    }
    let svg =
        texts(&["--label", "one", "--label", "two", "--title", "A <title> & more", "--size", "700x400"]);
    for name in ["one: stream", "two: stream", "A <title> & more"] {
        assert!(svg.texts().contains(&name), "{:?}", svg.texts());
    }
    assert_eq!((svg.elements[0].get("width"), svg.elements[0].get("height")), ("700", "400"));
    let (log, linear) = (texts(&["--log"]), texts(&["--linear"]));
    assert!(linear.texts().contains(&"0") && !log.texts().contains(&"0"), "{:?}", log.texts());
}

#[test]
fn messages_are_drawn_in_lanes() {
    let file = Scratch::new("plot-timeline");
    let message = |rank: u64, seq: u64, at: f64| {
        json!({"rank": rank, "seq": seq, "enqueue": at, "trigger": at + 1.0, "fetched": at + 1.5,
               "completed": at + 2.5, "released": at + 3.0})
    };
    let mut messages = vec![message(0, 1, 10.0), message(1, 1, 13.0), message(0, 2, 16.0)];
    messages.push(json!({"rank": 1, "seq": 2, "enqueue": 19.0, "trigger": 19.5, "completed": null}));
    write(&file, &json!({"unit": "us", "messages": messages}));
    let svg = plot(&[path(&file)]);
    for text in ["rank 0", "rank 1", "1: 3 us", "2: 3 us", "2: 0.5 us", "fetched, under way"] {
        assert!(svg.texts().contains(&text), "{text}: {:?}", svg.texts());
    }
    // The last one was never fetched, nor completed; one more of each is in the legend.
    let colors = [FIRST, SECOND, "#009E73", "#CC79A7"];
    assert_eq!(colors.map(|color| svg.count("rect", color)), [5, 4, 4, 4]);
    let many: Vec<_> =
        (0..100).map(|seq| message(0, seq, 2.0 * f64::from(u32::try_from(seq).unwrap()))).collect();
    write(&file, &json!({"unit": "us", "messages": many}));
    let svg = plot(&[path(&file)]);
    let cut = |text: &&str| text.contains("first 16 messages") && text.contains("of 100");
    assert!(svg.texts().iter().any(cut), "{:?}", svg.texts());
}

#[test]
fn names_cannot_break_a_picture_or_a_page() {
    let nasty = "</text><script>alert(\"1\")</script>&amp;'\u{1}\u{7f} ü";
    let mut json = benchmark("trigger-h200.json");
    for row in json["rows"].as_array_mut().unwrap() {
        let name = format!("{nasty} {}", row["variant"].as_str().unwrap());
        row["variant"] = name.into();
    }
    json["gpu"] = nasty.into();
    json["machine"]["commit"] = "{{body}}".into();
    let file = Scratch::new("plot-nasty");
    write(&file, &json);
    let svg = plot(&[path(&file), "--title", nasty]);
    assert!(svg.elements.iter().all(|element| element.name != "script"));
    assert!(svg.texts().join(" ").contains("<script>alert(\"1\")</script>&amp;'"), "{:?}", svg.texts());
    let page = Scratch::new("plot-nasty-page");
    succeeds(tool(&["report", path(&file), "--title", nasty, "-o", path(&page)]));
    let page = elements(&std::fs::read_to_string(page.path()).unwrap());
    assert!(page.elements.iter().all(|element| element.name != "script"));
    assert_eq!(page.elements.iter().filter(|element| element.name == "h2").count(), 1);
}

#[test]
fn what_cannot_be_drawn_is_told_and_nothing_is_written() {
    let file = Scratch::new("plot-bad");
    let output = Scratch::new("plot-none");
    let refuse = |text: &str, args: &[&str], expected: &[&str]| {
        std::fs::write(file.path(), text).unwrap();
        let error = fails(tool(&[&["plot", path(&file), "-o", path(&output)], args].concat()));
        for expected in expected {
            assert!(error.contains(expected), "{text} {args:?}: {error}");
        }
        assert!(!output.path().exists(), "{text} {args:?}");
    };
    refuse("{", &[], &["not JSON", "plot-bad"]);
    refuse("", &[], &["not JSON"]);
    refuse("[]", &[], &["it lacks", "results"]);
    refuse("{\"name\": 1}", &[], &["it lacks", "`series`"]);
    refuse("{\"results\": []}", &[], &["empty"]);
    refuse("{\"results\": 1}", &[], &["`results` is not a list"]);
    refuse("{\"results\": [{\"mode\": \"cpu\"}]}", &[], &["it lacks `results[0].half_rtt_us`"]);
    refuse("{\"messages\": []}", &[], &["it lacks `unit`"]);
    refuse("{\"unit\": \"us\", \"messages\": []}", &[], &["empty"]);
    refuse("{\"unit\": \"us\", \"messages\": [{\"rank\": 0, \"seq\": 1}]}", &[], &["`messages[0].enqueue`"]);
    let whole = benchmark("pingpong-h200x2-memop.json");
    let edited = |edit: fn(&mut Value)| {
        let mut json = whole.clone();
        edit(&mut json);
        json.to_string()
    };
    let text = edited(|json| json["results"][1]["half_rtt_us"]["p50"] = Value::Null);
    refuse(&text, &[], &["it lacks `results[1].half_rtt_us.p50`"]);
    let text = edited(|json| json["results"][2]["bytes"] = (-1).into());
    refuse(&text, &[], &["`results[2].bytes` is not"]);
    let text = edited(|json| json["results"][2]["bytes"] = 8.into());
    refuse(&text, &[], &["half round trip, stream, 8` occurs twice"]);
    let text = edited(|json| json["results"][2]["half_rtt_us"]["p50"] = 0.into());
    refuse(&text, &["--log"], &["--log", "above 0"]);
    let (memop, copy) = (whole.to_string(), "benchmarks/copy-h200-16-cores.json");
    refuse(&memop, &["--group", "wake"], &["no group `wake`", "`half round trip`"]);
    refuse(&memop, &["--series", "nobody"], &["nobody"]);
    refuse(&memop, &["--size", "100x100"], &["too small", "needs"]);
    refuse(&memop, &["--label", "a", "--label", "b"], &["2 times --label for 1 files"]);
    refuse(&memop, &[copy, "--group", "to GPU"], &["no group"]);
    refuse(&memop, &["benchmarks/trigger-h200.json"], &["do not go on one axis"]);
    refuse(&benchmark("trigger-h200.json").to_string(), &["--kind", "bandwidth"], &["names of tests"]);
    refuse(&memop, &["/no/such/file.json"], &["/no/such/file.json", "No such file"]);
    std::fs::write(file.path(), &memop).unwrap();
    let nowhere = "/proc/no/such/folder/out.svg";
    for tool in [tool(&["plot", path(&file), "-o", nowhere]), tool(&["report", path(&file), "-o", nowhere])] {
        assert!(fails(tool).contains(nowhere));
    }
}

#[test]
fn the_report_has_everything_and_needs_nothing() {
    let page = Scratch::new("report");
    let files: Vec<_> = kept().into_iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let args: Vec<_> = files.iter().map(String::as_str).collect();
    succeeds(tool(&[&["report"], &args[..], &["-o", path(&page)]].concat()));
    let text = std::fs::read_to_string(page.path()).unwrap();
    let (html, all) = (elements(&text), text.as_str());
    for element in &html.elements {
        assert!(!["script", "link", "img", "iframe"].contains(&element.name.as_str()), "{element:?}");
        let loads = |(name, _): &(String, String)| name == "src" || name.ends_with("href") || name == "style";
        assert!(!element.attributes.iter().any(loads), "{element:?}");
    }
    assert!(!all.contains("url(") && !all.contains("@import"));
    let texts = html.texts();
    for file in &files {
        let json = read(Path::new(file));
        for fact in ["cpu", "commit", "kernel", "rustc"] {
            let fact = json["machine"][fact].as_str().unwrap();
            assert!(texts.iter().any(|text| text.contains(fact)), "{file}: {fact}");
        }
    }
    let svgs = html.elements.iter().filter(|element| element.name == "svg").count();
    let tables = html.elements.iter().filter(|element| element.get_or("class", "") == "figures").count();
    assert!(svgs == tables && svgs >= files.len(), "{svgs} {tables}");
    // A figure of each kind.
    for figure in
        ["bare word", "cuStreamSynchronize", "wait for a receive", "take a message that is there", "3,559"]
    {
        assert!(texts.contains(&figure), "{figure}");
    }
    assert!(
        all.contains("only the last with a barrier, idle GPU: cuStreamBatchMemOp"),
        "what failed is told"
    );
    // A reader of dark pages gets other colours for all that pictures have in black and white.
    for color in ["#FFFFFF", "#222222", "#5F5F5F", "#D6D6D6", "#EEEEEE"] {
        assert!(all.contains(&format!("=\"{color}\"]")) && all.contains(&format!("=\"{color}\"")), "{color}");
    }
}

#[test]
fn pictures_of_the_documents_are_as_their_commands_draw_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures");
    let text = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let mut drawn = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("    gdasync ")) {
        // Words, or words between quotes.
        let pieces = line.split('"').enumerate();
        let args: Vec<&str> = pieces
            .flat_map(|(i, piece)| if i % 2 == 1 { vec![piece] } else { piece.split_whitespace().collect() })
            .collect();
        let (output, args) = args.split_last().unwrap();
        let (dash, args) = args.split_last().unwrap();
        assert_eq!(*dash, "-o", "{line}");
        let svg = Scratch::new("picture");
        succeeds(tool(&[args, &["-o", path(&svg)]].concat()));
        let (new, kept) = (std::fs::read(svg.path()).unwrap(), std::fs::read(output_path(output)).unwrap());
        assert!(new == kept, "{output} is not what this draws: gdasync {line}");
        drawn.insert(output_path(output));
    }
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let pictures: BTreeSet<_> =
        files.filter(|path| path.extension().is_some_and(|end| end == "svg")).collect();
    assert_eq!(drawn, pictures, "a picture without its command, or a command without its picture");
}

fn output_path(output: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(output)
}

/// A copy of the results in `name` with the medians of mode `stream` multiplied.
fn scaled(scratch: &str, name: &str, factor: f64) -> Scratch {
    let mut json = benchmark(name);
    for row in json["results"].as_array_mut().unwrap().iter_mut().filter(|row| row["mode"] == "stream") {
        for key in ["min", "p50", "p99"] {
            let value = row["half_rtt_us"][key].as_f64().unwrap();
            row["half_rtt_us"][key] = (value * factor).into();
        }
    }
    let file = Scratch::new(scratch);
    write(&file, &json);
    file
}

/// Exit status and output of a comparison.
fn compare(a: &str, b: &str, args: &[&str]) -> (i32, String, String) {
    let (output, out, err) = run(tool(&[&["bench", "--compare", a, b], args].concat()));
    (output.status.code().unwrap(), out, err)
}

#[test]
fn comparisons_tell_what_is_worse() {
    let name = "pingpong-h200x2-memop.json";
    let original = format!("benchmarks/{name}");
    let [slower, little, faster] =
        [("slower", 1.5), ("little", 1.08), ("faster", 0.6)].map(|(file, factor)| scaled(file, name, factor));
    for (other, args, status, worse, better) in [
        (original.as_str(), &["--fail"][..], 0, 0, 0),
        (path(&slower), &["--fail"], 4, 2, 0),
        (path(&slower), &[], 0, 2, 0),
        (path(&faster), &["--fail"], 0, 0, 2),
        (path(&little), &["--fail"], 0, 0, 0),
        (path(&little), &["--fail", "--threshold", "5"], 4, 1, 0),
        (path(&slower), &["--fail", "--threshold", "60"], 0, 0, 0),
    ] {
        let (code, out, err) = compare(&original, other, args);
        assert_eq!(code, status, "{other} {args:?}: {out}\n{err}");
        assert!(out.contains(&format!("12 figures, {worse} worse, {better} better")), "{args:?}: {out}");
        assert_eq!(out.matches("WORSE").count(), worse, "{out}");
        let (code, out, _) = compare(&original, other, &[args, &["--json"]].concat());
        assert_eq!(code, status);
        let json: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&json["worse"], &json["better"]), (&worse.into(), &better.into()), "{json}");
        assert_eq!(json["rows"].as_array().unwrap().len(), 12);
    }
    let (_, out, _) = compare(&original, path(&slower), &[]);
    assert!(out.contains("1.50") && out.contains("4 KiB") && out.contains("half round trip, us"), "{out}");
    // The other way round what was slower is faster.
    assert_eq!(compare(path(&slower), &original, &["--fail"]).0, 0);
}

#[test]
fn comparisons_of_what_is_not_alike_are_refused_or_told() {
    let (a, b) = ("benchmarks/mp-2-cores.json", "benchmarks/trigger-h200.json");
    let (code, _, err) = compare(a, b, &[]);
    assert!(code == 1 && err.contains("`bench mp`") && err.contains("`bench trigger`"), "{code} {err}");
    let (code, _, err) = compare(a, "/no/such/file.json", &["--fail"]);
    assert!(code == 1 && err.contains("/no/such/file.json"), "{code} {err}");
    // Nothing in common, and something.
    let file = Scratch::new("compare-modes");
    let mut json = benchmark("mp-2-cores.json");
    json["lines"].as_array_mut().unwrap().retain(|line| line["mode"] == "sync" && line["bytes"] == 8);
    json["calls"] = json!([]);
    write(&file, &json);
    let (code, out, _) = compare(a, path(&file), &["--fail"]);
    assert!(code == 0 && out.contains("1 figures, 0 worse"), "{code} {out}");
    for only in ["half round trip, sync, 1048576", "half round trip, async", "calls with 8 bytes, mp"] {
        assert!(out.contains(&format!("only in A: {only}\n")), "{only}: {out}");
    }
    json["lines"][0]["mode"] = "other".into();
    write(&file, &json);
    let (code, _, err) = compare(a, path(&file), &[]);
    assert!(
        code == 1 && err.contains("no figure in common") && err.contains("half round trip, other"),
        "{code} {err}"
    );
    // Facts that differ are told.
    let mut json = benchmark("mp-2-cores.json");
    json["machine"]["cpus"] = 64.into();
    write(&file, &json);
    let (_, out, _) = compare(a, path(&file), &[]);
    assert!(out.contains("machine: A 2 x AMD EPYC; B 64 x AMD EPYC"), "{out}");
    for args in [
        &["--compare", a][..],
        &["--compare", a, a, a],
        &["--fail"],
        &["--json"],
        &["--compare", a, a, "--threshold", "-1"],
        &["--compare", a, a, "--threshold", "NaN"],
        &["--compare", a, a, "hca"],
    ] {
        let (output, out, err) = run(tool(&[&["bench"], args].concat()));
        assert_eq!(output.status.code(), Some(2), "{args:?}: {out}\n{err}");
    }
    let nowhere = "/proc/no/such/folder/out.json";
    let (code, _, err) = compare(a, a, &["--json", nowhere]);
    assert!(code == 1 && err.contains(nowhere), "{code} {err}");
}

#[test]
fn what_benchmarks_write_now_is_drawn_with_its_command() {
    let json = Scratch::new("plot-register");
    succeeds(tool(&["bench", "register", "--calls", "2000", "--bytes", "4096", "--json", path(&json)]));
    let svg = plot(&[path(&json)]);
    let rows = json.json()["results"].as_array().unwrap().len();
    assert!(svg.texts().contains(&"host memory"), "{:?}", svg.texts());
    assert_eq!(svg.count("rect", FIRST), rows + 1);
    let page = Scratch::new("plot-register-page");
    succeeds(tool(&["report", path(&json), "-o", path(&page)]));
    let page = elements(&std::fs::read_to_string(page.path()).unwrap());
    let command = "gdasync bench register --calls 2000 --bytes 4096 --json";
    assert!(page.texts().iter().any(|text| text.starts_with(command)), "{:?}", page.texts());
    assert_eq!(compare(path(&json), path(&json), &["--fail"]).0, 0);
}
