//! The main job, run as its users run it.

mod common;

use std::net::TcpListener;
use std::process::{Command, Stdio};

use common::{Scratch, example, fails, positive, run, succeeds};
use serde_json::Value;

fn pingpong(args: &[&str]) -> Command {
    let mut command = example("pingpong");
    command.args(args);
    command
}

/// Checks the results against what was asked for.
#[track_caller]
fn check(report: &Value, modes: &[&str], sizes: &[u64], iters: u64) {
    assert_eq!(report["device"], "software HCA");
    assert_eq!(report["stream"], "host");
    assert_eq!(report["wire"], "shared memory");
    assert_eq!(report["ranks"], 2);
    let results = report["results"].as_array().unwrap();
    let asked = modes.iter().flat_map(|mode| sizes.iter().map(move |size| (*mode, *size)));
    let got = results.iter().map(|line| (line["mode"].as_str().unwrap(), line["bytes"].as_u64().unwrap()));
    assert!(got.eq(asked), "{results:?}");
    for line in results {
        let fields: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
        let mut expected = FIELDS;
        expected.sort_unstable();
        assert_eq!(fields, expected);
        assert_eq!(line["errors"], 0);
        assert_eq!(line["iters"], iters);
        let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&line["half_rtt_us"][name]));
        assert!(min <= p50 && p50 <= p99, "{line}");
        for name in ["iteration_us", "cpu_us_per_msg", "process_cpu_us_per_msg"] {
            positive(&line[name]);
        }
    }
}

const FIELDS: [&str; 10] = [
    "mode",
    "bytes",
    "iters",
    "half_rtt_us",
    "iteration_us",
    "cpu_us_per_msg",
    "process_cpu_us_per_msg",
    "application_cpu_us_per_msg",
    "errors",
    "of_sync",
];

const MODES: [&str; 3] = ["stream", "sync", "cpu"];

#[test]
fn all_modes_deliver_right_bytes() {
    let json = Scratch::new("all-modes");
    let path = json.path().to_str().unwrap();
    // Not a multiple of the window, and more than two of them.
    let out = succeeds(pingpong(&["--sizes", "1,8,5000", "--iters", "37", "--ahead", "10", "--json", path]));
    check(&json.json(), &MODES, &[1, 8, 5000], 37);
    for word in ["software HCA", "2 ranks", "stream", "sync", "cpu", "errors"] {
        assert!(out.contains(word), "{out}");
    }
}

/// Launches that do not divide the iterations, one that has all of them, and one of each; what they are of mode sync.
#[test]
fn graphs_deliver_right_bytes() {
    const MODES: [&str; 3] = ["stream", "graph", "sync"];
    for each in ["1", "10", "200"] {
        let json = Scratch::new(&format!("graph-{each}"));
        let path = json.path().to_str().unwrap();
        let args = ["--sizes", "1,8,5000", "--iters", "37", "--modes", "stream,sync", "--graph", each];
        succeeds(pingpong(&[&args[..], &["--json", path]].concat()));
        let report = json.json();
        check(&report, &MODES, &[1, 8, 5000], 37);
        assert_eq!(report["settings"]["graph"].to_string(), each);
        let results = report["results"].as_array().unwrap();
        for line in results {
            let sync =
                results.iter().find(|of| of["mode"] == "sync" && of["bytes"] == line["bytes"]).unwrap();
            let ratio = positive(&line["half_rtt_us"]["p50"]) / positive(&sync["half_rtt_us"]["p50"]);
            assert!((positive(&line["of_sync"]["half_rtt"]) - ratio).abs() < 1e-9, "{line}");
            let ratio = positive(&line["cpu_us_per_msg"]) / positive(&sync["cpu_us_per_msg"]);
            assert!((positive(&line["of_sync"]["cpu"]) - ratio).abs() < 1e-9, "{line}");
        }
    }
}

/// Work is part of a graph.
#[test]
fn work_goes_before_each_send_of_a_graph() {
    let json = Scratch::new("graph-work");
    let path = json.path().to_str().unwrap();
    let args = ["--kernel-us", "3000", "--sizes", "8", "--iters", "3", "--modes", "graph", "--graph", "2"];
    succeeds(pingpong(&[&args[..], &["--json", path]].concat()));
    let report = json.json();
    check(&report, &["graph"], &[8], 3);
    let line = &report["results"][0];
    assert!(positive(&line["half_rtt_us"]["min"]) >= 2990.0, "{line}");
    assert!(line["of_sync"].is_null(), "{line}");
}

#[test]
fn wrong_bytes_of_a_graph_are_noticed() {
    let error = fails(pingpong(&["--sizes", "8", "--iters", "10", "--modes", "graph", "--wrong-bytes"]));
    assert!(error.contains("wrong data"), "{error}");
}

/// Only sends and waits on the stream, and the flags that are the floor; windows that do not divide the iterations.
#[test]
fn bare_windows_and_the_floor_are_measured() {
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
        let mut report = json.json();
        assert_eq!(report["settings"]["no_kernels"], true);
        let floor = report["results"].as_array_mut().unwrap().remove(0);
        assert_eq!((&floor["mode"], &floor["bytes"]), (&Value::from("floor"), &Value::from(4)));
        assert_eq!((&floor["iters"], &floor["errors"]), (&Value::from(37), &Value::from(0)));
        positive(&floor["half_rtt_us"]["min"]);
        check(&report, &MODES, &[1, 5000], 37);
    }
}

/// Work before each send takes its time in every mode, on both sides.
#[test]
fn work_goes_before_each_send() {
    let json = Scratch::new("work");
    let path = json.path().to_str().unwrap();
    succeeds(pingpong(&["--kernel-us", "3000", "--sizes", "8", "--iters", "3", "--json", path]));
    let report = json.json();
    check(&report, &MODES, &[8], 3);
    assert_eq!(report["settings"]["work_us"], 3000);
    for line in report["results"].as_array().unwrap() {
        // Half of a round trip has one of the two: it is work, not a sleep, so it never takes less.
        assert!(positive(&line["half_rtt_us"]["min"]) >= 2990.0, "{line}");
    }
}

#[test]
fn faults_of_the_network_cost_time_but_no_bytes() {
    let json = Scratch::new("faults");
    let mut command =
        pingpong(&["--sizes", "8,9000", "--iters", "10", "--json", json.path().to_str().unwrap()]);
    command.env("GDSYNC_FAULTS", "drop=0.02,seed=1");
    succeeds(command);
    check(&json.json(), &MODES, &[8, 9000], 10);
}

#[test]
fn help_mentions_every_option() {
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
        "--json",
        "--version",
        "Example:",
    ] {
        assert!(help.contains(word), "{word} in {help}");
    }
    assert!(succeeds(pingpong(&["--version"])).contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn bad_arguments_are_named() {
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
fn bad_variables_are_named() {
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
fn strict_rings_are_kept() {
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
fn ranks_of_a_launcher_play() {
    let (json, port) = (Scratch::new("launcher"), free_port());
    let other = rank(1, 2, port, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    succeeds(rank(0, 2, port, &["--json", json.path().to_str().unwrap()]));
    let other = other.wait_with_output().unwrap();
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stderr));
    assert_eq!(String::from_utf8_lossy(&other.stdout), "", "only rank 0 reports");
    check(&json.json(), &MODES, &[8], 20);
}

#[test]
fn a_job_of_another_size_is_refused() {
    let error = fails(rank(0, 1, free_port(), &[]));
    assert!(error.contains("2 ranks") && error.contains("this job has 1"), "{error}");
}

/// The peer must not be left waiting for a rank that gave up.
#[test]
fn a_rank_that_gives_up_takes_its_peer_along() {
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
fn a_quiet_run_writes_no_errors() {
    let (_, out, err) = run(pingpong(&["--sizes", "8", "--iters", "5", "--modes", "cpu"]));
    assert!(err.is_empty(), "{err}");
    assert_eq!(out.lines().filter(|line| line.trim_start().starts_with("cpu ")).count(), 1, "{out}");
}
