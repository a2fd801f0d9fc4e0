//! The benchmarks of messages, run briefly: what they write, and that wrong data does not pass.

mod common;

use std::process::Command;

use common::{Scratch, fails, gdasync, succeeds};
use gdasync::gdsync::cuda::Gpu;
use gdasync::measure::series::{Report, Series, Unit};

/// A benchmark, and what its brief run must have.
struct Brief {
    name: &'static str,
    args: &'static [&'static str],
    /// Curves with their places and whether they have ratios.
    curves: &'static [(&'static str, &'static [u64], bool)],
}

const PINGPONG: Brief = Brief {
    name: "pingpong",
    args: &["--sizes", "8,5000", "--iters", "20", "--ahead", "10", "--graph", "7"],
    curves: &[
        ("cache line", &[8, 5000], false),
        ("stream flags", &[8, 5000], true),
        ("stream", &[8, 5000], true),
        ("graph", &[8, 5000], true),
        ("sync", &[8, 5000], true),
        ("cpu", &[8, 5000], true),
    ],
};

const BANDWIDTH: Brief = Brief {
    name: "bandwidth",
    args: &["--sizes", "64,5000", "--iters", "10"],
    curves: &[("memcpy", &[64, 5000], false), ("host to host", &[64, 5000], true)],
};

const RATE: Brief = Brief {
    name: "rate",
    args: &["--sizes", "8,500", "--outstanding", "1,7", "--qps", "1,3", "--messages", "50", "--slices", "2"],
    curves: &[
        ("cpu, by bytes", &[8, 500], true),
        ("stream, by bytes", &[8, 500], true),
        ("floor, by bytes", &[8, 500], false),
        ("cpu, by outstanding", &[1, 7], true),
        ("stream, by outstanding", &[1, 7], true),
        ("floor, by outstanding", &[1, 7], false),
        ("cpu, by queue pairs", &[1, 3], true),
        ("stream, by queue pairs", &[1, 3], true),
        ("floor, by queue pairs", &[1, 3], false),
    ],
};

const OVERLAP: Brief = Brief {
    name: "overlap",
    args: &["--bytes", "5000", "--work-us", "5,50", "--ahead", "5", "--windows", "2"],
    curves: &[
        ("stream: compute", &[5, 50], false),
        ("stream: exchange", &[5, 50], false),
        ("stream: both", &[5, 50], true),
        ("stream: hidden", &[5, 50], false),
        ("cpu: compute", &[5, 50], false),
        ("cpu: exchange", &[5, 50], false),
        ("cpu: both", &[5, 50], true),
        ("cpu: hidden", &[5, 50], false),
        ("serial: compute", &[5, 50], false),
        ("serial: exchange", &[5, 50], false),
        ("serial: both", &[5, 50], true),
        ("serial: hidden", &[5, 50], false),
    ],
};

const CPU: Brief = Brief {
    name: "cpu",
    args: &["--sizes", "8,5000", "--iters", "20", "--ahead", "10", "--runs", "2", "--graph", "7"],
    curves: &[
        ("stream: application", &[8, 5000], true),
        ("stream: process", &[8, 5000], true),
        ("stream: service", &[8, 5000], false),
        ("graph: application", &[8, 5000], true),
        ("graph: process", &[8, 5000], true),
        ("graph: service", &[8, 5000], false),
        ("sync: application", &[8, 5000], true),
        ("sync: process", &[8, 5000], true),
        ("sync: service", &[8, 5000], false),
        ("cpu: application", &[8, 5000], true),
        ("cpu: process", &[8, 5000], true),
        ("cpu: service", &[8, 5000], false),
    ],
};

const SCALE: Brief = Brief {
    name: "scale",
    args: &["--qps", "1,70", "--ranks", "2,3", "--messages", "20", "--slices", "2"],
    curves: &[
        ("cache line, by queue pairs", &[1, 70], false),
        ("latency, by queue pairs", &[1, 70], true),
        ("rate, by queue pairs", &[1, 70], true),
        ("latency, by ranks", &[2, 3], true),
        ("rate, by ranks", &[2, 3], true),
    ],
};

const ALL: [Brief; 6] = [PINGPONG, BANDWIDTH, RATE, OVERLAP, CPU, SCALE];

fn bench(name: &str, args: &[&str]) -> Command {
    let mut command = gdasync();
    command.args(["bench", name]).args(args);
    command
}

/// Runs it; the report as others read it, and what was printed.
#[track_caller]
fn report(brief: &Brief, more: &[&str]) -> (Report, String) {
    let json = Scratch::new(&format!("bench-{}-{}", brief.name, more.concat().replace('/', "-")));
    let mut command = bench(brief.name, brief.args);
    command.args(more).args(["--json", json.path().to_str().unwrap()]);
    let out = succeeds(command);
    (serde_json::from_value(json.json()).unwrap(), out)
}

/// Values that say something, in the order that their unit has.
#[track_caller]
fn check(series: &Series, places: &[u64], has_ratios: bool) {
    let Series { name, unit, points, baseline, .. } = series;
    assert!(points.iter().map(|point| point.x).eq(places.iter().copied()), "{series:?}");
    for point in points {
        let values = [point.p50, point.p99, point.min];
        assert!(values.iter().all(|value| value.is_finite()), "{name}: {point:?}");
        match unit {
            // Messages may cost more beside work than without.
            Unit::Ratio => {}
            // The service thread may have had nothing to do.
            Unit::Micros if name.ends_with(": service") => {}
            Unit::Micros => {
                assert!(
                    0.0 < point.min && point.min <= point.p50 && point.p50 <= point.p99,
                    "{name}: {point:?}"
                );
            }
            Unit::PerSecond | Unit::GigabytesPerSecond => {
                assert!(
                    0.0 < point.min && point.min <= point.p99 && point.p99 <= point.p50,
                    "{name}: {point:?}"
                );
            }
        }
        if has_ratios {
            assert!(baseline.is_some() && point.ratio.is_some_and(|ratio| ratio > 0.0), "{name}: {point:?}");
        }
    }
}

#[track_caller]
fn has_everything(brief: &Brief) -> Report {
    let (report, out) = report(brief, &[]);
    assert_eq!((&*report.benchmark, &*report.device), (brief.name, "software HCA"));
    assert!(report.machine.cpus > 0 && report.options.is_object());
    for (name, places, has_ratios) in brief.curves {
        check(report.find(name).unwrap_or_else(|| panic!("{name} in {report:?}")), places, *has_ratios);
        assert!(out.contains(name), "{name} in {out}");
    }
    report
}

#[test]
fn pingpong_has_everything() {
    let report = has_everything(&PINGPONG);
    assert_eq!((report.series.len(), report.skipped.len()), (PINGPONG.curves.len(), 0));
    assert_eq!(report.find("stream").unwrap().baseline.as_deref(), Some("cache line"));
}

/// What needs a GPU is measured, or it is said why not.
#[test]
fn bandwidth_has_everything() {
    let report = has_everything(&BANDWIDTH);
    let rows = [
        "host to GPU, pageable",
        "host to GPU, pinned",
        "GPU to GPU, copies",
        "GPU to GPU, shared pinned buffers",
        "GPU to GPU, direct",
        "peer to peer",
    ];
    for row in rows {
        match (report.find(row), report.skipped.iter().find(|skipped| skipped.name == row)) {
            (Some(series), None) => check(series, &[64, 5000], true),
            (None, Some(skipped)) => assert!(!skipped.reason.is_empty()),
            other => panic!("{row}: {other:?}"),
        }
    }
    assert_eq!(report.series.len() + report.skipped.len(), BANDWIDTH.curves.len() + rows.len());
    if let Err(error) = Gpu::count() {
        let reason = error.to_string();
        assert!(report.skipped.iter().all(|skipped| skipped.reason == reason), "{:?}", report.skipped);
    }
}

#[test]
fn rate_has_everything() {
    let report = has_everything(&RATE);
    assert_eq!((report.series.len(), report.skipped.len()), (RATE.curves.len(), 0));
}

#[test]
fn overlap_has_everything() {
    let report = has_everything(&OVERLAP);
    assert_eq!((report.series.len(), report.skipped.len()), (OVERLAP.curves.len(), 0));
    for way in ["stream", "cpu", "serial"] {
        let curve = |part: &str| report.find(&format!("{way}: {part}")).unwrap();
        let (compute, exchange, both) = (curve("compute"), curve("exchange"), curve("both"));
        for hidden in &curve("hidden").points {
            let [compute, exchange, both] =
                [compute, exchange, both].map(|curve| curve.at(hidden.x).unwrap().p50);
            // It is work, not a sleep: it never takes less.
            assert!(compute >= 0.99 * hidden.x as f64, "{way}: {compute} us for {} us of work", hidden.x);
            let expected = 1.0 - (both - compute) / exchange;
            assert!((hidden.p50 - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{way}: {hidden:?}");
        }
    }
}

#[test]
fn cpu_has_everything() {
    let report = has_everything(&CPU);
    assert_eq!((report.series.len(), report.skipped.len()), (CPU.curves.len(), 0));
}

#[test]
fn scale_has_everything() {
    let report = has_everything(&SCALE);
    assert_eq!((report.series.len(), report.skipped.len()), (SCALE.curves.len(), 0));
    for (name, first) in [("latency, by queue pairs", "1 queue pairs"), ("rate, by ranks", "2 ranks")] {
        let curve = report.find(name).unwrap();
        assert_eq!((curve.baseline.as_deref(), curve.points[0].ratio), (Some(first), Some(1.0)));
    }
}

/// Figures of messages that did not arrive as they were sent mean nothing, and are not passed off as right.
#[test]
fn wrong_bytes_are_noticed() {
    for brief in &ALL {
        let mut command = bench(brief.name, brief.args);
        command.arg("--wrong-bytes");
        let error = fails(command);
        assert!(error.contains("wrong data"), "{}: {error}", brief.name);
    }
}

/// Whatever the time is enough for, nothing is missing without a word.
#[test]
fn what_the_budget_is_not_enough_for_is_told() {
    let sizes = "1,2,3,4,5,6,7,8,9,10,11,12";
    let brief = Brief {
        args: &["--sizes", "1,2,3,4,5,6,7,8,9,10,11,12", "--iters", "300", "--modes", "sync"],
        ..PINGPONG
    };
    let (report, out) = report(&brief, &["--budget", "1"]);
    let measured = &report.find("sync").unwrap().points;
    assert!(!measured.is_empty(), "the first is always measured");
    assert_eq!(measured.len() + report.skipped.len(), sizes.split(',').count());
    for skipped in &report.skipped {
        assert!(skipped.reason.contains("--budget"), "{skipped:?}");
        assert!(out.contains(&skipped.name), "{out}");
    }
}

#[test]
fn help_explains_the_numbers() {
    for brief in &ALL {
        let help = succeeds(bench(brief.name, &["--help"]));
        for word in ["What the numbers mean", "ratio", "--json", "--budget", "--timeout"] {
            assert!(help.contains(word), "{}: {word} in {help}", brief.name);
        }
    }
}

#[test]
fn bad_arguments_are_named() {
    let nowhere = "/proc/no/such/folder/results.json";
    for brief in &ALL {
        let error = fails(bench(brief.name, &[brief.args, &["--json", nowhere]].concat()));
        assert!(error.contains("--json") && error.contains(nowhere), "{}: {error}", brief.name);
    }
    for (name, args, expected) in [
        ("pingpong", &["--modes", "fast"][..], &["--modes", "stream, graph, initiate, sync, cpu"][..]),
        ("bandwidth", &["--sizes", "0"], &["--sizes", "0"]),
        ("bandwidth", &["--budget", "0"], &["--budget", "0"]),
        ("rate", &["--outstanding", "257"], &["--outstanding", "257"]),
        ("rate", &["--nudge", "off"], &["--nudge is for --stream cuda"]),
        ("overlap", &["--ahead", "1"], &["--ahead", "1"]),
        ("cpu", &["--runs", "0"], &["--runs", "0"]),
        ("cpu", &["--kernel-us", "5", "--no-kernels"], &["--kernel-us", "--no-kernels"]),
        ("scale", &["--ranks", "1"], &["--ranks", "1"]),
        ("scale", &["--part", "ranks"], &["--part is for processes"]),
        ("scale", &["--qps", "1025"], &["--qps", "1025"]),
    ] {
        let error = fails(bench(name, args));
        assert!(expected.iter().all(|word| error.contains(word)), "{name} {args:?}: {error}");
    }
}

/// It starts jobs of several sizes, which a launcher cannot.
#[test]
fn scale_wants_no_launcher() {
    let mut command = bench("scale", SCALE.args);
    command.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")]);
    assert!(fails(command).contains("without a launcher"));
}

/// With the streams, the messages and the queues on a GPU.
#[test]
fn streams_of_a_gpu_are_measured() {
    if !Gpu::count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: CUDA shows no GPU");
        return;
    }
    for brief in [PINGPONG, RATE, OVERLAP, CPU] {
        for more in
            [&["--stream", "cuda"][..], &["--stream", "cuda", "--payload", "gpu", "--placement", "gpu"]]
        {
            let (report, _) = report(&brief, more);
            assert_eq!(report.options["stream"], "cuda", "{}", brief.name);
            for (name, places, has_ratios) in brief.curves {
                check(report.find(name).unwrap(), places, *has_ratios);
            }
        }
    }
}
