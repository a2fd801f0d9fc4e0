//! Pictures: what is in them, and what is refused.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::common::{Scratch, fails, succeeds};
use super::{FIRST, SECOND, benchmark, kept, path, plot, read, tool, write};

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
    for text in [
        "rank 0",
        "rank 1",
        "1: 3 us",
        "2: 3 us",
        "2: 0.5 us",
        "enqueued, waits for its trigger",
        "triggered, not fetched yet",
        "fetched, under way",
        "completed, its release not seen by the CPU",
    ] {
        assert!(svg.texts().contains(&text), "{text}: {:?}", svg.texts());
    }
    // The last one was never fetched, nor completed; one more of each is in the legend.
    let colors = [FIRST, SECOND, "#009E73", "#CC79A7"];
    assert_eq!(colors.map(|color| svg.count("rect", color)), [5, 4, 4, 4]);
    // A part of them: the first of rank 0 without its first stage, that of rank 1 without its last.
    let part = plot(&[path(&file), "--from", "11.2", "--to", "15"]);
    assert_eq!(colors.map(|color| part.count("rect", color)), [2, 3, 3, 2], "{:?}", part.texts());
    assert!(part.texts().contains(&"time, us, from 11.2 on"), "{:?}", part.texts());
    let error = fails(tool(&["plot", path(&file), "--from", "50", "-o", "/dev/null"]));
    assert!(error.contains("between 50 and"), "{error}");
    let many: Vec<_> =
        (0..100).map(|seq| message(0, seq, 2.0 * f64::from(u32::try_from(seq).unwrap()))).collect();
    write(&file, &json!({"unit": "us", "messages": many}));
    let svg = plot(&[path(&file)]);
    let cut = |text: &&str| text.contains("first 16 messages") && text.contains("of 100");
    assert!(svg.texts().iter().any(cut), "{:?}", svg.texts());
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
    assert!(fails(tool(&["plot", path(&file), "-o", "a.PNG"])).contains("name it .svg"));
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
