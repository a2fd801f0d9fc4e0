//! `gdasync` and its benchmarks, run briefly: what they write, and that wrong data is an error.

use gdasync::gdsync::cuda::Gpu;
use gdasync::results::Report;

use super::common::{Scratch, check_series, command, fails, results, run};

/// A benchmark with options for a brief run, and the series that it must write: group, name, positions, whether it has ratios.
struct Brief {
    name: &'static str,
    args: &'static str,
    series: &'static [(&'static str, &'static str, &'static [u64], bool)],
}

const RTT: &str = "half round trip";
const THREAD: &str = "CPU time per message, posting thread";
const SIZES: &[u64] = &[8, 5000];

const LATENCY: Brief = Brief {
    name: "latency",
    args: "--sizes 8,5000 --iters 20 --ahead 7 --modes stream,graph,sync,cpu",
    series: &[
        (RTT, "cache line", SIZES, false),
        (RTT, "stream flags", SIZES, true),
        (RTT, "stream", SIZES, true),
        (RTT, "graph", SIZES, true),
        (RTT, "sync", SIZES, true),
        (RTT, "cpu", SIZES, true),
        (THREAD, "stream", SIZES, true),
        (THREAD, "sync", SIZES, false),
        ("CPU time per message, process", "graph", SIZES, true),
    ],
};

const BANDWIDTH: Brief = Brief {
    name: "bandwidth",
    args: "--sizes 64,5000 --iters 10 --outstanding 1,7 --messages 50",
    series: &[
        ("bandwidth", "memcpy", &[64, 5000], false),
        ("bandwidth", "host to host", &[64, 5000], true),
        ("message rate by bytes", "cpu", &[64], true),
        ("message rate by bytes", "stream", &[64], true),
        ("message rate by outstanding", "cpu", &[1, 7], true),
        ("message rate by outstanding", "stream", &[1, 7], true),
    ],
};

const MESSAGES: Brief = Brief {
    name: "messages",
    // More iterations than a window, and not a multiple of it.
    args: "--sizes 1,5000 --iters 501 --calls 3",
    series: &[
        (RTT, "sync", &[1, 5000], false),
        (RTT, "async", &[1, 5000], true),
        (RTT, "tagged", &[1, 5000], true),
        ("time per message", "rate", &[1, 5000], false),
    ],
};

const SCALE: Brief = Brief {
    name: "scale",
    args: "--qps 1,70 --ranks 2,3 --messages 20 --slices 2",
    series: &[
        ("latency by queue pairs", "cache line", &[1, 70], false),
        ("latency by queue pairs", "cpu", &[1, 70], true),
        ("message rate by queue pairs", "cpu", &[1, 70], true),
        ("latency by ranks", "cpu", &[2, 3], true),
        ("message rate by ranks", "cpu", &[2, 3], true),
    ],
};

/// Benchmarks whose ranks send to each other.
const ALL: [Brief; 4] = [LATENCY, BANDWIDTH, MESSAGES, SCALE];

/// The command line of a brief run.
fn line(brief: &Brief) -> String {
    format!("gdasync bench {} {}", brief.name, brief.args)
}

/// The report of a run, and what it printed.
#[track_caller]
fn report(brief: &Brief, more: &str) -> (Report, String) {
    let (json, out) = results(&format!("{} {more}", line(brief)));
    (serde_json::from_value(json).unwrap(), out)
}

#[track_caller]
fn check_all(brief: &Brief, report: &Report) {
    for &(group, name, places, has_ratios) in brief.series {
        let series = report.find(group, name).unwrap_or_else(|| panic!("{group}, {name} in {report:?}"));
        check_series(series, places, has_ratios);
    }
}

#[track_caller]
fn writes_everything(brief: &Brief) -> Report {
    let (report, out) = report(brief, "");
    assert_eq!((&*report.benchmark, &*report.device), (brief.name, "software HCA"));
    assert!(report.machine.cpus > 0 && report.options.is_object());
    let machine = &report.machine;
    assert!(
        [&machine.cpu, &machine.kernel, &machine.commit, &machine.rustc].iter().all(|fact| !fact.is_empty())
    );
    check_all(brief, &report);
    for (_, name, ..) in brief.series {
        assert!(out.contains(name), "{name} in {out}");
    }
    report
}

#[test]
fn latency_writes_all_series() {
    let report = writes_everything(&LATENCY);
    assert!(report.skipped.is_empty());
    assert_eq!(report.find(RTT, "stream").unwrap().baseline.as_deref(), Some("cache line"));
}

#[test]
fn latency_measures_the_recorder() {
    let brief = Brief { args: "--sizes 8 --iters 20 --modes cpu --recorder", ..LATENCY };
    let (recorded, _) = report(&brief, "");
    check_series(recorded.find(RTT, "cpu, recorder paused").unwrap(), &[8], true);
    let off = command(&format!("GDSYNC_RECORDER=off {}", line(&brief)));
    assert!(fails(off).contains("unset GDSYNC_RECORDER"));
}

/// Rows that need a GPU are measured or listed with a reason.
#[test]
fn bandwidth_writes_all_series() {
    let report = writes_everything(&BANDWIDTH);
    for row in ["GPU to GPU, shared pinned buffers", "GPU to GPU, direct", "peer to peer"] {
        match (report.find("bandwidth", row), report.skipped.iter().find(|skipped| skipped.name == row)) {
            (Some(series), None) => check_series(series, &[64, 5000], true),
            (None, Some(skipped)) => assert!(!skipped.reason.is_empty()),
            other => panic!("{row}: {other:?}"),
        }
    }
    if let Err(error) = Gpu::count() {
        let reason = error.to_string();
        assert!(report.skipped.iter().all(|skipped| skipped.reason == reason), "{:?}", report.skipped);
    }
}

#[test]
fn messages_writes_all_series() {
    let report = writes_everything(&MESSAGES);
    let calls = report.find("calls with 8 bytes", "mp").unwrap();
    assert!(calls.points.len() == 5 && calls.points.iter().all(|point| point.ratio.is_some()), "{calls:?}");
}

#[test]
fn scale_writes_all_series() {
    let report = writes_everything(&SCALE);
    for (group, first) in [("latency by queue pairs", "1 queue pairs"), ("message rate by ranks", "2 ranks")]
    {
        let series = report.find(group, "cpu").unwrap();
        assert_eq!((series.baseline.as_deref(), series.points[0].ratio), (Some(first), Some(1.0)));
    }
}

#[test]
fn copy_runs_on_plain_memory() {
    let brief = Brief { name: "copy", args: "--backend host --max-size 4096 --each-ms 1", series: &[] };
    let (report, out) = report(&brief, "");
    for (group, name) in [("to GPU", "planner"), ("from GPU", "CPU")] {
        assert!(report.find(group, name).is_some_and(|series| !series.points.is_empty()), "{group}: {out}");
    }
}

#[test]
fn stream_and_trigger_write_their_results_or_need_a_gpu() {
    let reason = "install the NVIDIA driver";
    for (args, groups) in [
        ("stream --calls 200", &["library, per operation, queues in host memory"][..]),
        ("trigger --rounds 20 --busy 0,1", &["trigger", "wake"]),
    ] {
        let json = Scratch::new("bench");
        let (output, out, err) = run(command(&format!("gdasync bench {args} --json {}", json.text())));
        if output.status.code() == Some(1) && err.contains(reason) {
            assert!(out.is_empty() && !err.contains("panicked"), "{out}\n{err}");
            println!("skipped: {err}");
            continue;
        }
        assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
        let report: Report = serde_json::from_value(json.json()).unwrap();
        for group in groups {
            let points = report
                .series
                .iter()
                .filter(|series| series.group == *group)
                .flat_map(|series| &series.points);
            assert!(
                points.map(|point| assert!(0.0 < point.min && point.min <= point.p99)).count() > 0,
                "{group}: {out}"
            );
        }
    }
}

#[test]
fn wrong_data_is_an_error() {
    for brief in &ALL {
        let error = fails(command(&format!("{} --wrong-bytes", line(brief))));
        assert!(error.contains("wrong data"), "{}: {error}", brief.name);
    }
}

#[test]
fn measurements_beyond_the_budget_are_listed() {
    let sizes = "1,2,3,4,5,6,7,8,9,10,11,12";
    let brief = Brief { args: "--sizes 1,2,3,4,5,6,7,8,9,10,11,12 --iters 300 --modes sync", ..LATENCY };
    let (report, out) = report(&brief, "--budget 1");
    let measured = &report.find(RTT, "sync").unwrap().points;
    assert!(!measured.is_empty(), "the first is always measured");
    assert_eq!(measured.len() + report.skipped.len(), sizes.split(',').count());
    for skipped in &report.skipped {
        assert!(skipped.reason.contains("--budget"), "{skipped:?}");
        assert!(out.contains(&skipped.name), "{out}");
    }
}

#[test]
fn unwritable_recorder_folder_is_a_warning() {
    let variables = "GDSYNC_RECORDER_DIR=/proc/no/such/folder RUST_LOG=warn";
    let (output, _, logged) =
        run(command(&format!("{variables} gdasync bench latency --sizes 8 --iters 10 --modes cpu")));
    assert!(output.status.success() && logged.contains("nothing is recorded"), "{logged}");
}

#[test]
fn misspelt_variables_are_warned_of() {
    let variables = "GDSYNC_DEVCE=soft0 MP_LOCL=queues RUST_LOG=warn";
    let (output, _, logged) =
        run(command(&format!("{variables} gdasync bench latency --sizes 8 --iters 10 --modes cpu")));
    assert!(output.status.success(), "{logged}");
    for name in "GDSYNC_DEVCE MP_LOCL".split(' ') {
        assert!(
            logged.contains(&format!("{name} is no variable of this library: correct its name")),
            "{logged}"
        );
    }
}

#[test]
fn benchmarks_run_on_cuda_streams() {
    if !Gpu::count().is_ok_and(|count| count > 0) {
        return eprintln!("skipped: CUDA shows no GPU");
    }
    for brief in [LATENCY, BANDWIDTH] {
        for more in ["--stream cuda", "--stream cuda --payload gpu --placement gpu"] {
            let (report, _) = report(&brief, more);
            assert_eq!(report.options["stream"], "cuda", "{}", brief.name);
            check_all(&brief, &report);
        }
    }
}
