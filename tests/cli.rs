//! The command-line tool.

mod common;

use common::{Scratch, fails, gdasync, positive, run, succeeds};

fn tool(args: &[&str]) -> std::process::Command {
    let mut command = gdasync();
    command.args(args);
    command
}

#[test]
fn help_and_version_say_what_there_is() {
    let help = succeeds(tool(&["--help"]));
    assert!(help.contains("bench") && help.contains("gdrcopy") && help.contains("Usage: gdasync"), "{help}");
    assert_eq!(succeeds(tool(&["--version"])), format!("gdasync {}\n", env!("CARGO_PKG_VERSION")));
    let help = succeeds(tool(&["bench", "--help"]));
    assert!(help.contains("hca") && help.contains("copy") && help.contains("trigger"), "{help}");
    let help = succeeds(tool(&["bench", "hca", "--help"]));
    for option in ["--rounds", "--timeout", "--json"] {
        assert!(help.contains(option), "{help}");
    }
    let help = succeeds(tool(&["bench", "mp", "--help"]));
    for option in ["--sizes", "--modes", "--iters", "--work-us", "--calls", "--timeout", "--json"] {
        assert!(help.contains(option), "{help}");
    }
    let help = succeeds(tool(&["bench", "trigger", "--help"]));
    for option in ["--device", "--rounds", "--busy", "--timeout", "--json"] {
        assert!(help.contains(option), "{help}");
    }
}

#[test]
fn a_folder_for_recordings_that_cannot_be_written_is_a_warning() {
    let nowhere = "/proc/no/such/folder";
    let mut command = tool(&["bench", "hca", "--rounds", "100"]);
    command.env("GDSYNC_RECORDER_DIR", nowhere).env("RUST_LOG", "warn");
    let (output, _, logged) = run(command);
    assert!(output.status.success() && logged.contains("nothing is recorded"), "{logged}");
}

#[test]
fn bad_arguments_are_named() {
    let nowhere = "/proc/no/such/folder/results.json";
    for (args, expected) in [
        (&[][..], "Usage"),
        (&["bench"], "Usage"),
        (&["bench", "gpu"], "gpu"),
        (&["bench", "hca", "--rounds", "99"], "--rounds"),
        (&["bench", "hca", "--timeout", "18446744073709551615"], "--timeout"),
        (&["bench", "hca", "--rounds", "100", "--json", nowhere], nowhere),
        (&["bench", "register", "--bytes", "1"], "--bytes"),
        (&["bench", "register", "--json", "-"], "name a file"),
        (&["bench", "register", "--json", nowhere], nowhere),
        (&["bench", "mp", "--sizes", "0"], "--sizes"),
        (&["bench", "mp", "--modes", "fast"], "sync-work"),
        (&["bench", "mp", "--calls", "0", "--sizes", "8", "--json", nowhere], nowhere),
        (&["bench", "stream", "--calls", "99"], "--calls"),
        (&["bench", "stream", "--json", nowhere], nowhere),
        (&["bench", "trigger", "--busy", "0,17"], "--busy"),
        (&["bench", "trigger", "--json", nowhere], nowhere),
    ] {
        let error = fails(tool(args));
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

#[test]
fn the_benchmark_writes_its_results() {
    let json = Scratch::new("bench-hca");
    let out = succeeds(tool(&["bench", "hca", "--rounds", "200", "--json", json.path().to_str().unwrap()]));
    assert!(out.contains("% of a core"), "{out}");
    let report = json.json();
    assert_eq!((&report["device"], &report["wire"]), (&"software HCA".into(), &"shared memory".into()));
    for fact in ["cpu", "kernel", "version", "commit", "rustc"] {
        assert!(report["machine"][fact].as_str().is_some_and(|fact| !fact.is_empty()), "{fact}: {report}");
    }
    positive(&report["machine"]["cpus"]);
    let rows = report["results"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 9, "{names:?}");
    for row in rows {
        assert!(names.contains(&row["baseline"].as_str().unwrap()), "{row}");
        positive(&row["ratio"]);
        let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&row["us"][name]));
        assert!(min <= p50 && p50 <= p99, "{row}");
    }
    let floors = rows.iter().filter(|row| row["baseline"] == row["name"]);
    assert!(floors.inspect(|row| assert_eq!(row["ratio"], 1.0)).count() == 2, "{names:?}");
}

#[test]
fn the_benchmark_of_the_registration_cache_writes_its_results() {
    let json = Scratch::new("bench-register");
    let path = json.path().to_str().unwrap();
    let out = succeeds(tool(&["bench", "register", "--calls", "2000", "--bytes", "4096", "--json", path]));
    assert!(out.contains("4 Ki bytes"), "{out}");
    let report = json.json();
    assert_eq!((&report["device"], &report["bytes"]), (&"software HCA".into(), &4096.into()));
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 6, "{rows:?}");
    for row in rows {
        assert_eq!(row["memory"], "host", "{row}");
        positive(&row["ratio"]);
        let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&row["us"][name]));
        assert!(min <= p50 && p50 <= p99, "{row}");
    }
    assert_eq!(rows[0]["ratio"], 1.0);
}

#[test]
fn the_benchmark_of_messages_writes_its_results() {
    let json = Scratch::new("bench-mp");
    let path = json.path().to_str().unwrap();
    // More iterations than a window has, and an odd one out.
    let options = [
        "bench",
        "mp",
        "--sizes",
        "1,5000",
        "--iters",
        "501",
        "--work-us",
        "5",
        "--calls",
        "3",
        "--json",
        path,
    ];
    let out = succeeds(tool(&options));
    assert!(out.contains("Async+Work") && out.contains("0 errors") && out.contains("mp adds ns"), "{out}");
    let report = json.json();
    let modes = ["sync", "sync-work", "async", "async-work", "tagged", "rate"];
    let asked = [1, 5000].into_iter().flat_map(|bytes| modes.map(|mode| (mode, bytes)));
    let lines = report["lines"].as_array().unwrap();
    let got = lines.iter().map(|line| (line["mode"].as_str().unwrap(), line["bytes"].as_u64().unwrap()));
    assert!(got.eq(asked), "{lines:?}");
    for line in lines {
        assert_eq!((&line["errors"], &line["iters"]), (&0.into(), &505.into()));
        let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&line["us"][name]));
        assert!(min <= p50 && p50 <= p99, "{line}");
        // It is work, not a sleep, so it never takes less; half a round trip has one of both ranks'.
        assert!(!line["mode"].as_str().unwrap().ends_with("work") || min > 4.9, "{line}");
    }
    let calls = report["calls"].as_array().unwrap();
    assert_eq!(calls.len(), 5, "{report}");
    for call in calls {
        positive(&call["mp_us"]["p50"]);
        positive(&call["gdsync_us"]["p50"]);
        assert!(call["overhead_ns"].is_number(), "{call}");
    }
}

#[test]
fn the_stream_benchmark_writes_its_results_or_says_that_it_needs_a_gpu() {
    let json = Scratch::new("bench-stream");
    let path = json.path().to_str().unwrap();
    let (output, out, err) = run(tool(&["bench", "stream", "--calls", "200", "--json", path]));
    if output.status.code() == Some(1) && err.contains("install the NVIDIA driver") {
        assert!(out.is_empty() && !err.contains("panicked"), "{out}\n{err}");
        println!("skipped: {err}");
        return;
    }
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    let report = json.json();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 6, "{rows:?}");
    for row in rows {
        for who in ["library_us", "driver_us"] {
            let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&row[who][name]));
            assert!(min <= p50 && p50 <= p99, "{row}");
        }
        assert!(row["library_ns"].is_number(), "{row}");
    }
    assert!(out.contains("wait for a receive"), "{out}");
}

#[test]
fn the_trigger_benchmark_writes_its_results_or_says_that_it_needs_a_gpu() {
    let json = Scratch::new("bench-trigger");
    let path = json.path().to_str().unwrap();
    let (output, out, err) =
        run(tool(&["bench", "trigger", "--rounds", "20", "--busy", "0,1", "--json", path]));
    if output.status.code() == Some(1) && err.contains("GPU memory cannot be mapped here") {
        assert!(out.is_empty() && !err.contains("panicked"), "{out}\n{err}");
        println!("skipped: {err}");
        return;
    }
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    let report = json.json();
    let rows = report["rows"].as_array().unwrap();
    for group in ["trigger", "wake", "enqueue", "register", "barrier"] {
        let rows: Vec<_> = rows.iter().filter(|row| row["group"] == group).collect();
        assert!(rows.iter().any(|row| row["failed"].is_null()), "{group}: {rows:?}");
        for row in rows.iter().filter(|row| row["failed"].is_null()) {
            let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&row[name]));
            assert!(min <= p50 && p50 <= p99 && positive(&row["n"]) >= 1.0, "{row}");
        }
    }
    assert!(out.contains("MemOp wait"), "{out}");
}
