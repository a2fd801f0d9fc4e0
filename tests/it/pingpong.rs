//! The main job, run as its users run it.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use gdasync::results::{At, Point, Report};
use serde_json::Value;

use super::common::{Scratch, example, fails, run, succeeds};

fn pingpong(args: &[&str]) -> Command {
    let mut command = example("pingpong");
    command.args(args);
    command
}

/// Checks that the report has these modes and sizes, and positive times.
#[track_caller]
fn check(json: Value, modes: &[&str], sizes: &[u64]) -> Report {
    let report: Report = serde_json::from_value(json).unwrap();
    assert_eq!((&*report.device, &*report.wire), ("software HCA", "shared memory"));
    assert_eq!(report.options["stream"], "host");
    for group in
        [RTT, "whole iteration", "CPU time per message, posting thread", "CPU time per message, process"]
    {
        for mode in modes {
            let points = &report.find(group, mode).unwrap_or_else(|| panic!("{mode} in {report:?}")).points;
            assert!(
                points.iter().map(|point| point.x.clone()).eq(sizes.iter().copied().map(At::Number)),
                "{points:?}"
            );
            let is_right =
                |point: &Point| 0.0 < point.min && point.min <= point.p50 && point.p50 <= point.p99;
            assert!(points.iter().all(is_right), "{points:?}");
        }
    }
    let found: Vec<_> = report.series.iter().filter(|one| one.group == RTT).map(|one| &*one.name).collect();
    assert!(
        found.iter().all(|name| modes.contains(name) || ["cache line", "stream flags"].contains(name)),
        "{found:?}"
    );
    report
}

const RTT: &str = "half round trip";
const MODES: [&str; 3] = ["stream", "sync", "cpu"];

#[test]
fn all_modes_deliver_right_data() {
    let json = Scratch::new("all-modes");
    let path = json.path().to_str().unwrap();
    // Not a multiple of the window, and more than two of them.
    let out = succeeds(pingpong(&["--sizes", "1,8,5000", "--iters", "37", "--ahead", "10", "--json", path]));
    check(json.json(), &MODES, &[1, 8, 5000]);
    for word in ["software HCA", "stream", "sync", "cpu", "errors"] {
        assert!(out.contains(word), "{out}");
    }
}

/// Launches that do not divide the iterations, one that has all of them, and one of each; what they are of mode sync.
#[test]
fn graphs_deliver_right_data() {
    const MODES: [&str; 3] = ["stream", "graph", "sync"];
    for each in ["1", "10", "200"] {
        let json = Scratch::new(&format!("graph-{each}"));
        let path = json.path().to_str().unwrap();
        let args = ["--sizes", "1,8,5000", "--iters", "37", "--modes", "stream,sync", "--graph", each];
        succeeds(pingpong(&[&args[..], &["--json", path]].concat()));
        let report = check(json.json(), &MODES, &[1, 8, 5000]);
        assert_eq!(report.options["graph"].to_string(), each);
        let sync = report.find(RTT, "sync").unwrap();
        for mode in ["stream", "graph"] {
            let series = report.find(RTT, mode).unwrap();
            assert_eq!(series.baseline.as_deref(), Some("sync"));
            for point in &series.points {
                let ratio = point.p50 / sync.at(&point.x).unwrap().p50;
                assert!((point.ratio.unwrap() - ratio).abs() < 1e-9, "{point:?}");
            }
        }
    }
}

/// Work is part of a graph.
#[test]
fn work_precedes_each_send_of_a_graph() {
    let json = Scratch::new("graph-work");
    let path = json.path().to_str().unwrap();
    let args = ["--kernel-us", "3000", "--sizes", "8", "--iters", "3", "--modes", "graph", "--graph", "2"];
    succeeds(pingpong(&[&args[..], &["--json", path]].concat()));
    let report = check(json.json(), &["graph"], &[8]);
    let point = &report.find(RTT, "graph").unwrap().points[0];
    assert!(point.min >= 2990.0 && point.ratio.is_none(), "{point:?}");
}

#[test]
fn wrong_data_in_a_graph_is_an_error() {
    let error = fails(pingpong(&["--sizes", "8", "--iters", "10", "--modes", "graph", "--wrong-bytes"]));
    assert!(error.contains("wrong data"), "{error}");
}

/// Only sends and waits on the stream, and the flags that are the floor; windows that do not divide the iterations.
#[test]
fn unchecked_windows_and_floors_are_measured() {
    for ahead in ["1", "10", "200"] {
        let json = Scratch::new(&format!("bare-{ahead}"));
        let out = succeeds(pingpong(&[
            "--no-kernels",
            "--floor",
            "--sizes",
            "1,5000",
            "--iters",
            "37",
            "--ahead",
            ahead,
            "--json",
            json.path().to_str().unwrap(),
        ]));
        assert!(out.contains("mean of a window") && !out.contains("every message was checked"), "{out}");
        let report = check(json.json(), &MODES, &[1, 5000]);
        assert_eq!(report.options["no_kernels"], true);
        assert!(report.find(RTT, "stream flags").unwrap().points.iter().all(|point| point.min > 0.0));
        assert_eq!(report.find(RTT, "cpu").unwrap().baseline.as_deref(), Some("cache line"));
    }
}

/// Work before each send takes its time in every mode, on both sides.
#[test]
fn work_precedes_each_send() {
    let json = Scratch::new("work");
    let path = json.path().to_str().unwrap();
    succeeds(pingpong(&["--kernel-us", "3000", "--sizes", "8", "--iters", "3", "--json", path]));
    let report = check(json.json(), &MODES, &[8]);
    assert_eq!(report.options["work_us"], 3000);
    // Half of a round trip has the work of one rank. It spins, so it never takes less.
    assert!(MODES.iter().all(|mode| report.find(RTT, mode).unwrap().points[0].min >= 2990.0), "{report:?}");
}

#[test]
fn network_faults_do_not_corrupt_data() {
    let json = Scratch::new("faults");
    let mut command =
        pingpong(&["--sizes", "8,9000", "--iters", "10", "--json", json.path().to_str().unwrap()]);
    command.env("GDSYNC_FAULTS", "drop=0.02,seed=1");
    succeeds(command);
    check(json.json(), &MODES, &[8, 9000]);
}

#[test]
fn help_lists_every_option() {
    let help = succeeds(pingpong(&["--help"]));
    for word in [
        "--modes",
        "--graph",
        "--initiate",
        "--sizes",
        "--iters",
        "--ahead",
        "--stream",
        "--payload",
        "--placement",
        "--via",
        "--nudge",
        "--device",
        "--kernel-us",
        "--no-kernels",
        "--floor",
        "--timeout",
        "--budget",
        "--json",
        "--version",
        "Example:",
    ] {
        assert!(help.contains(word), "{word} in {help}");
    }
    assert!(succeeds(pingpong(&["--version"])).contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn errors_name_the_wrong_argument() {
    let quick: &[&str] = &["--sizes", "8", "--iters", "2", "--modes", "cpu"];
    let nowhere = "/proc/no/such/folder/results.json";
    for (args, expected) in [
        (&["--sizes", "0"][..], &["--sizes", "0 is not in"][..]),
        (&["--sizes", "8,1073741825"], &["--sizes", "1073741825"]),
        (&["--sizes", "eight"], &["--sizes", "eight"]),
        (&["--modes", "fast"], &["--modes", "fast", "stream, graph, initiate, sync, cpu"]),
        (&["--iters", "0"], &["--iters"]),
        (&["--graph", "0"], &["--graph"]),
        (&["--graph", "201"], &["--graph", "201"]),
        (&["--graph", "5", "--no-kernels"], &["--graph", "--no-kernels"]),
        (&["--initiate", "201"], &["--initiate", "201"]),
        (&["--initiate", "5"], &["--initiate", "--stream cuda --via kernel"]),
        (&["--modes", "initiate", "--no-kernels"], &["--initiate", "--no-kernels"]),
        (&["--ahead", "201"], &["--ahead", "201"]),
        (&["--timeout", "0"], &["--timeout"]),
        (&["--modes", "floor"], &["--modes", "floor"]),
        (&["--stream", "cuda", "--via", "magic"], &["--via", "magic", "memop, kernel or auto"]),
        (&["--stream", "cuda", "--nudge", "hard"], &["--nudge", "hard", "auto, on or off"]),
        (&["--via", "memop"], &["--via is for --stream cuda"]),
        (&["--nudge", "off"], &["--nudge is for --stream cuda"]),
        (&["--device", "0"], &["--device is for"]),
        (&["--payload", "device"], &["--payload", "device", "host, gpu, near"]),
        (&["--kernel-us", "5", "--no-kernels"], &["--kernel-us", "--no-kernels"]),
        (&["--timeout", "18446744073709551615"], &["--timeout"]),
        (&["--sideways"], &["--sideways"]),
        (&[quick, &["--json", nowhere]].concat(), &["--json", nowhere, "No such file"]),
    ] {
        let error = fails(pingpong(args));
        assert!(expected.iter().all(|word| error.contains(word)), "{args:?}: {error}");
    }
}

#[test]
fn errors_name_the_wrong_variable() {
    for (name, value, expected) in [
        ("GDSYNC_FAULTS", "nonsense", &["GDSYNC_FAULTS is 'nonsense'", "drop=P"][..]),
        ("GDSYNC_FAULTS", "seed=1,drop=2", &["GDSYNC_FAULTS is 'seed=1,drop=2'", "drop probability is 2"]),
        ("GDSYNC_STRICT", "maybe", &["GDSYNC_STRICT is 'maybe'", "0 or 1"]),
        ("GDSYNC_DEVICE", "mlx5_7", &["mlx5_7", "soft0", "GDSYNC_DEVICE"]),
        ("RANK", "0", &["WORLD_SIZE is not set"]),
    ] {
        let mut command = pingpong(&["--sizes", "8", "--iters", "2"]);
        command.env(name, value);
        let error = fails(command);
        assert!(expected.iter().all(|word| error.contains(word)), "{name}={value}: {error}");
    }
}

#[test]
fn empty_variables_count_as_unset() {
    let mut command = pingpong(&["--sizes", "8", "--iters", "2"]);
    for name in ["GDSYNC_FAULTS", "GDSYNC_STRICT", "GDSYNC_DEVICE", "RANK", "WORLD_SIZE"] {
        command.env(name, "");
    }
    succeeds(command);
}

#[test]
fn strict_mode_finds_no_violation() {
    let mut command = pingpong(&["--sizes", "8,5000", "--iters", "20"]);
    command.env("GDSYNC_STRICT", "1").env("GDSYNC_DEVICE", "soft0");
    succeeds(command);
}

/// A process of a job that a launcher starts.
fn rank(rank: usize, size: usize, port: u16, args: &[&str]) -> Command {
    let mut command = pingpong(&["--sizes", "8", "--iters", "20", "--timeout", "20"]);
    command.args(args).envs([("RANK", rank.to_string()), ("WORLD_SIZE", size.to_string())]);
    command.envs([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())]);
    command
}

/// A port nobody listens at.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn ranks_of_a_launcher_exchange_messages() {
    let (json, port) = (Scratch::new("launcher"), free_port());
    let other = rank(1, 2, port, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    succeeds(rank(0, 2, port, &["--json", json.path().to_str().unwrap()]));
    let other = other.wait_with_output().unwrap();
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stderr));
    assert_eq!(String::from_utf8_lossy(&other.stdout), "", "only rank 0 reports");
    check(json.json(), &MODES, &[8]);
}

#[test]
fn job_of_another_size_is_rejected() {
    let error = fails(rank(0, 1, free_port(), &[]));
    assert!(error.contains("2 ranks") && error.contains("this job has 1"), "{error}");
}

/// The peer must not be left waiting for a rank that gave up.
#[test]
fn failure_of_a_rank_ends_its_peer() {
    let port = free_port();
    let mut other = rank(1, 2, port, &[]);
    let other = other.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    fails(rank(0, 2, port, &["--json", "/proc/no/such/folder/results.json"]));
    let other = other.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(1), "{error}");
    assert!(error.contains("rank 0"), "{error}");
}

/// Results go to standard output and nothing else does.
#[test]
fn successful_run_writes_nothing_to_stderr() {
    let (_, out, err) = run(pingpong(&["--sizes", "8", "--iters", "5", "--modes", "cpu"]));
    assert!(err.is_empty(), "{err}");
    assert_eq!(out.lines().filter(|line| line.trim_start().starts_with("cpu ")).count(), 1, "{out}");
}
