//! The examples, run as their users run them, and their compiled kernels.

use std::path::Path;
use std::process::{Command, Stdio};

use gdasync::results::Report;
use gdsync_testkit::process::free_port;

use super::common::{Scratch, check_series, command, fails, positive, results, run, succeeds};

#[test]
fn small_examples_print_what_they_show() {
    for strict in ["", "GDSYNC_STRICT=1 "] {
        let out = succeeds(command(&format!("{strict}sendrecv")));
        let [hello, sent, received] = out.lines().collect::<Vec<_>>()[..] else { panic!("{out}") };
        assert_eq!(hello, "Bob's stream got: hello from Alice's");
        assert!(
            sent.starts_with("sent:     Some(Wc { wr_id: 2,") && sent.contains("syndrome: None"),
            "{out}"
        );
        assert!(received.starts_with("received: Some(Wc { wr_id: 1,"), "{out}");
        assert!(received.contains("byte_len: 18,") && received.contains("syndrome: None"), "{out}");
        let out = succeeds(command(&format!("{strict}putget")));
        assert_eq!(out.lines().collect::<Vec<_>>(), ["got back: PUT, THEN GOT BACK", "counter:  10"]);
        assert_eq!(succeeds(command(&format!("{strict}ring"))).trim(), "100 after 100 rounds, from rank 0");
    }
    let out = succeeds(command("mapping"));
    assert!(out.contains("the GPU has: written by the CPU"), "{out}");
    assert!(out.contains("a write of 64 bytes goes by CPU"), "{out}");
}

#[test]
fn producer_and_consumer_keep_pace() {
    // The slower of the two sets it, and in more turns than slots or blocks posted ahead.
    for (blocks, more) in [
        (150, "--bytes 5000"),
        (40, "--slots 1 --produce-us 100"),
        (40, "--slots 2 --consume-us 100 --bytes 1"),
    ] {
        let out = succeeds(command(&format!("producer_consumer --blocks {blocks} {more}")));
        assert!(out.contains(&format!("{blocks} blocks of")) && out.contains(", 0 wrong"), "{out}");
    }
}

const RTT: &str = "half round trip";
const MODES: &[&str] = &["stream", "sync", "cpu"];

/// Runs a ping-pong; its report has these modes and sizes, and positive times.
#[track_caller]
fn pingpong(line: &str, modes: &[&str], sizes: &[u64]) -> (Report, String) {
    let (json, out) = results(line);
    let report: Report = serde_json::from_value(json).unwrap();
    assert_eq!((&*report.device, &*report.wire), ("software HCA", "shared memory"));
    assert_eq!(report.options["stream"], "host");
    for group in [RTT, "CPU time per message, posting thread", "CPU time per message, process"] {
        for mode in modes {
            let series = report.find(group, mode).unwrap_or_else(|| panic!("{mode} in {report:?}"));
            check_series(series, sizes, false);
        }
    }
    let mut found = report.series.iter().filter(|one| one.group == RTT).map(|one| &*one.name);
    assert!(found.all(|name| modes.contains(&name) || ["cache line", "stream flags"].contains(&name)));
    (report, out)
}

/// Windows and launches that do not divide the iterations, one that has all of them, and one of each; lost packets; strict
/// rings; variables that are empty, which count as unset.
#[test]
fn pingpong_delivers_right_data() {
    let unset = "GDSYNC_FAULTS= GDSYNC_STRICT= GDSYNC_DEVICE= RANK= WORLD_SIZE=";
    for (line, modes, sizes) in [
        ("pingpong --sizes 1,8,5000 --iters 37 --ahead 10", MODES, &[1, 8, 5000][..]),
        (
            "pingpong --sizes 1,8,5000 --iters 37 --modes graph,sync --ahead 1",
            &["graph", "sync"],
            &[1, 8, 5000],
        ),
        (
            "pingpong --sizes 1,8,5000 --iters 37 --modes graph,sync --ahead 10",
            &["graph", "sync"],
            &[1, 8, 5000],
        ),
        (
            "pingpong --sizes 1 8 5000 --iters 37 --modes graph sync --ahead 200",
            &["graph", "sync"],
            &[1, 8, 5000],
        ),
        ("GDSYNC_FAULTS=drop=0.02,seed=1 pingpong --sizes 8,9000 --iters 10", MODES, &[8, 9000]),
        ("GDSYNC_STRICT=1 GDSYNC_DEVICE=soft0 pingpong --sizes 8,5000 --iters 20", MODES, &[8, 5000]),
        (&format!("{unset} pingpong --sizes 8 --iters 2"), MODES, &[8]),
    ] {
        let (report, out) = pingpong(line, modes, sizes);
        assert!(
            ["software HCA", "every message was checked", "half a round trip", "bytes"]
                .iter()
                .chain(modes)
                .all(|word| out.contains(word)),
            "{out}"
        );
        let sync = report.find(RTT, "sync").unwrap();
        for series in modes.iter().filter(|mode| **mode != "sync").map(|mode| report.find(RTT, mode).unwrap())
        {
            assert_eq!(series.baseline.as_deref(), Some("sync"));
            for point in &series.points {
                let ratio = point.p50 / sync.at(&point.x).unwrap().p50;
                assert!((point.ratio.unwrap() - ratio).abs() < 1e-9, "{point:?}");
            }
        }
    }
    for mode in ["stream", "graph", "cpu"] {
        let error = fails(command(&format!("pingpong --sizes 8 --iters 10 --modes {mode} --wrong-bytes")));
        assert!(error.contains("wrong data"), "{mode}: {error}");
    }
}

/// Only sends and waits on the stream, and the flags that are the floor; windows that do not divide the iterations.
#[test]
fn pingpong_measures_unchecked_windows_and_floors() {
    for ahead in [1, 10, 200] {
        let line = format!("gdasync bench latency --no-kernels --sizes 1,5000 --iters 37 --ahead {ahead}");
        let (report, out) = pingpong(&line, MODES, &[1, 5000]);
        assert!(out.contains("mean of a window") && !out.contains("every message was checked"), "{out}");
        assert_eq!(report.options["no_kernels"], true);
        assert!(report.find(RTT, "stream flags").unwrap().points.iter().all(|point| point.min > 0.0));
        assert_eq!(report.find(RTT, "cpu").unwrap().baseline.as_deref(), Some("cache line"));
    }
}

/// Work before each send takes its time in every mode, on both sides.
#[test]
fn work_precedes_each_send_of_a_pingpong() {
    for (more, modes) in [("", MODES), ("--modes graph --ahead 2", &["graph"][..])] {
        let (report, _) =
            pingpong(&format!("pingpong --kernel-us 3000 --sizes 8 --iters 3 {more}"), modes, &[8]);
        assert_eq!(report.options["work_us"], 3000);
        // Half of a round trip has the work of one rank. It spins, so it never takes less.
        assert!(
            modes.iter().all(|mode| report.find(RTT, mode).unwrap().points[0].min >= 2990.0),
            "{report:?}"
        );
    }
}

/// One table, what to see in it, and where the ranks run.
#[test]
fn pingpong_says_what_its_figures_mean() {
    let out = succeeds(command("pingpong --sizes 8 64 --iters 20"));
    let header = out.lines().find(|line| line.contains("stream us")).unwrap_or_else(|| panic!("{out}"));
    assert_eq!(header.split("  ").filter(|column| !column.trim().is_empty()).count(), 7, "{header}");
    for words in
        ["Mode stream, 8 bytes: ", " us of the posting CPU per message, instead of ", " in sync and "]
    {
        assert!(out.contains(words), "{words}: {out}");
    }
    assert!(out.contains("stands in for a GPU"), "{out}");
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert_eq!(out.contains("ranks have CPUs of their own: 0 on "), cpus > 1, "{out}");
    let out = succeeds(command("MP_BIND=0 pingpong --sizes 8 --iters 5 --modes cpu"));
    assert!(out.contains("ranks are not bound: they share CPUs ") && !out.contains("Mode stream"), "{out}");
}

/// Results go to standard output and nothing else does.
#[test]
fn successful_pingpong_writes_nothing_to_stderr() {
    let (_, out, err) = run(command("pingpong --sizes 8 --iters 5 --modes cpu"));
    assert!(err.is_empty(), "{err}");
    assert!(out.lines().any(|line| line.trim_start().starts_with("8 ")), "{out}");
}

/// A process of a job that a launcher starts.
fn rank(rank: usize, size: usize, port: u16, line: &str) -> Command {
    let launch = format!("RANK={rank} WORLD_SIZE={size} MASTER_ADDR=127.0.0.1 MASTER_PORT={port}");
    let mut command = command(&format!("{launch} {line}"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn ranks_of_a_launcher_exchange_messages_and_end_together() {
    const LINE: &str = "pingpong --sizes 8 --iters 20 --timeout 20";
    let (json, port) = (Scratch::new("launcher"), free_port());
    let other = rank(1, 2, port, LINE).spawn().unwrap();
    succeeds(rank(0, 2, port, &format!("{LINE} --json {}", json.text())));
    let other = other.wait_with_output().unwrap();
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stderr));
    assert_eq!(String::from_utf8_lossy(&other.stdout), "", "only rank 0 reports");
    assert_eq!(json.json()["options"]["stream"], "host");

    // The peer must not be left waiting for a rank that gave up.
    let port = free_port();
    let other = rank(1, 2, port, LINE).spawn().unwrap();
    fails(rank(0, 2, port, &format!("{LINE} --json /proc/no/such/folder/results.json")));
    let other = other.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(1), "{error}");
    assert!(error.contains("rank 0"), "{error}");

    // A launcher decides how many ranks there are.
    for (line, words) in
        [(LINE, ["needs 2", "this job has 1"]), ("jacobi2d --ranks 2", ["needs 2", "this job has 1"])]
    {
        let error = fails(rank(0, 1, free_port(), line));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

/// Any number of ranks, rows that do not divide evenly, windows that do not divide the iterations; lost packets; strict rings.
#[test]
fn jacobi_blocks_give_the_bits_of_the_whole() {
    for mode in ["stream", "graph", "sync"] {
        for (ranks, nx, ny) in [(1, 7, 5), (2, 33, 20), (3, 17, 10), (3, 5, 3), (5, 1, 9)] {
            let sizes = format!("--ranks {ranks} --nx {nx} --ny {ny} --iters 43 --ahead 8");
            let (report, out) = results(&format!("jacobi2d --mode {mode} {sizes}"));
            assert!(out.contains("difference to one process: at most 0e0, 0 cells"), "{out}");
            assert_eq!((&report["ranks"], &report["mode"]), (&ranks.into(), &mode.into()));
            assert_eq!(
                (&report["stream"], &report["halo_bytes"]),
                (&"host".into(), &(2 * (ranks - 1) * nx * 8).into())
            );
            assert_eq!((&report["iters"], &report["timed"]), (&43.into(), &39.into()));
            assert_eq!((&report["max_difference"], &report["different_cells"]), (&0.0.into(), &0.into()));
            positive(&report["iteration_us"]);
            positive(&report["cells_per_s"]);
        }
        succeeds(command(&format!(
            "GDSYNC_FAULTS=drop=0.02,seed=1 jacobi2d --ranks 2 --nx 700 --ny 8 --iters 20 --mode {mode}"
        )));
        for lost in [3, 19] {
            let sizes = "--ranks 3 --nx 9 --ny 9 --iters 20";
            let (output, out, err) = run(command(&format!("jacobi2d {sizes} --mode {mode} --lose {lost}")));
            // The rows of the last iteration are not used any more.
            if lost == 19 {
                assert!(output.status.success(), "{out}{err}");
                continue;
            }
            assert_eq!(output.status.code(), Some(1), "{out}{err}");
            assert!(err.contains("not that of one process"), "{err}");
            assert!(out.contains("difference to one process") && !out.contains(", 0 cells"), "{out}");
        }
    }
    succeeds(command("GDSYNC_STRICT=1 jacobi2d --ranks 2 --nx 50 --ny 50 --iters 20"));
    let (report, out) = results("jacobi2d --nx 8 --ny 8 --iters 5 --no-check");
    assert!(out.contains("not compared") && report.get("max_difference").is_none(), "{out}");
}

/// The compiled kernels are those of their sources, with the parameters that the programs pass.
#[test]
fn kernels_match_their_sources() {
    let read = |name: String| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    for (name, kernels) in [
        (
            "examples/kernels/pingpong",
            &[
                ("stamp", ".u64 stamp_param_0"),
                ("work", ".u64 work_param_0"),
                ("turn", ".align 8 .b8 turn_param_0[72]"),
                ("initiate", ".align 8 .b8 initiate_param_0[104]"),
            ][..],
        ),
        ("examples/kernels/jacobi2d", &[("relax", ".align 8 .b8 relax_param_0[48]")]),
        (
            "src/bench/trigger",
            &[
                ("await_gate", ".align 8 .b8 await_gate_param_0[32]"),
                ("store_word", ".u64 store_word_param_0"),
                ("spin", ".u64 spin_param_0"),
            ],
        ),
        (
            "src/tools/pplat",
            &[
                ("cpu_produces", ".align 8 .b8 cpu_produces_param_0[64]"),
                ("gpu_produces", ".align 8 .b8 gpu_produces_param_0[64]"),
            ],
        ),
    ] {
        let (source, ptx) = (read(format!("{name}.cu")), read(format!("{name}.ptx")));
        assert!(ptx.contains(".target sm_70") && ptx.contains(".version 8.0"));
        assert_eq!(ptx.matches(".visible .entry ").count(), kernels.len());
        for (kernel, parameter) in kernels {
            let name = format!(" {kernel}(");
            let is_kernel = |line: &str| line.contains("__global__ void ") && line.contains(&name);
            assert!(source.lines().any(is_kernel), "{kernel}");
            assert!(ptx.contains(&format!(".visible .entry {kernel}(\n\t.param {parameter}\n)")), "{kernel}");
        }
        // What a fused multiply-add rounds once, the CPU rounds twice.
        assert!(!name.ends_with("jacobi2d") || !ptx.contains("fma."));
    }
}
