//! The examples on GPUs, where there is one.

use super::common::{Scratch, example, fails, succeeds};
use gdasync::gdsync::cuda::Gpu;
use gdasync::results::Report;

/// The number of GPUs, or why there is none.
fn gpus() -> Result<i32, String> {
    let count = Gpu::count().map_err(|error| error.to_string())?;
    if count > 0 { Ok(count) } else { Err("CUDA shows no GPU to this process".into()) }
}

/// Whether a test has to be skipped; it says so.
fn no_gpu() -> bool {
    gpus().inspect_err(|reason| eprintln!("skipped: {reason}")).is_err()
}

#[test]
fn without_a_gpu_the_reason_is_told() {
    let Err(reason) = gpus() else { return };
    for option in [["--stream", "cuda"], ["--payload", "gpu"], ["--placement", "gpu"]] {
        let mut command = example("pingpong");
        command.args(["--sizes", "8", "--iters", "2"]).args(option);
        let error = fails(command);
        assert!(error.contains(&reason), "{option:?}: {error}");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    if no_gpu() {
        return;
    }
    let count = gpus().unwrap();
    let mut command = example("pingpong");
    command.args(["--stream", "cuda", "--sizes", "8", "--iters", "2", "--device", &count.to_string()]);
    assert!(fails(command).contains("finding the GPU"));
}

#[track_caller]
fn runs(name: &str, args: &[&str], points: usize) {
    let json = Scratch::new(name);
    let mut command = example("pingpong");
    command.args(["--iters", "37", "--ahead", "10", "--json", json.path().to_str().unwrap()]).args(args);
    succeeds(command);
    let report: Report = serde_json::from_value(json.json()).unwrap();
    assert!(!report.options["place"]["gpus"].as_array().unwrap().is_empty());
    let all = report.series.iter().filter(|one| one.group == "half round trip").flat_map(|one| &one.points);
    assert_eq!(all.inspect(|point| assert!(point.p50 > 0.0, "{point:?}")).count(), points);
}

#[test]
fn streams_of_a_gpu_play_ping_pong() {
    if no_gpu() {
        return;
    }
    for via in ["memop", "kernel"] {
        for (payload, placement) in
            [("host", "host"), ("gpu", "host"), ("host", "gpu"), ("gpu", "gpu"), ("near", "gpu")]
        {
            let place = ["--stream", "cuda", "--via", via, "--payload", payload, "--placement", placement];
            let name = format!("cuda-{via}-{payload}-{placement}");
            let graph = ["--sizes", "1,8,5003,300000", "--graph", "10"];
            runs(&name, &[&place[..], &graph].concat(), 4 * 4);
            let bare = ["--sizes", "1,5003", "--no-kernels", "--floor"];
            runs(&name, &[&place[..], &bare].concat(), 2 * 2 + 3 * 2);
            let work = ["--sizes", "8", "--kernel-us", "50", "--graph", "37"];
            runs(&name, &[&place[..], &work].concat(), 4);
        }
    }
}

/// A kernel waits and sends by itself: launches that do not divide the iterations, one that has all, one of each; with work, which
/// makes two steps of an iteration, and without.
#[test]
fn kernels_play_ping_pong_by_themselves() {
    if no_gpu() {
        return;
    }
    for (payload, placement) in [
        ("host", "host"),
        ("gpu", "host"),
        ("host", "gpu"),
        ("gpu", "words"),
        ("gpu", "all"),
        ("near", "words"),
    ] {
        let place = ["--stream", "cuda", "--via", "kernel", "--payload", payload, "--placement", placement];
        let name = format!("initiate-{payload}-{placement}");
        for each in ["1", "10", "200"] {
            let sizes = ["--sizes", "1,8,5003,300000", "--modes", "initiate", "--initiate", each];
            runs(&name, &[&place[..], &sizes].concat(), 4);
        }
        let work = ["--sizes", "8,70000", "--kernel-us", "50", "--modes", "sync", "--initiate", "10"];
        runs(&name, &[&place[..], &work].concat(), 2 * 2);
    }
}

#[test]
fn wrong_bytes_of_launches_are_noticed() {
    if no_gpu() {
        return;
    }
    for mode in ["graph", "initiate"] {
        let mut command = example("pingpong");
        command.args(["--stream", "cuda", "--via", "kernel", "--sizes", "8", "--iters", "10"]);
        command.args(["--modes", mode, "--wrong-bytes"]);
        let error = fails(command);
        assert!(error.contains("wrong data"), "{mode}: {error}");
    }
}

/// The stream is a thread, but payload or queues are on the GPU.
#[test]
fn host_streams_use_memory_of_a_gpu() {
    if no_gpu() {
        return;
    }
    for (payload, placement) in [("gpu", "host"), ("host", "gpu"), ("gpu", "gpu"), ("near", "host")] {
        let place = ["--payload", payload, "--placement", placement, "--sizes", "1,5003"];
        runs(&format!("host-{payload}-{placement}"), &place, 3 * 2);
    }
}

/// Kernels compute the bits that the CPU computes, and halo rows arrive in time.
#[test]
fn streams_of_a_gpu_solve_in_blocks() {
    if no_gpu() {
        return;
    }
    for via in ["memop", "kernel"] {
        for (payload, placement) in [("host", "host"), ("gpu", "host"), ("gpu", "gpu")] {
            for (mode, ranks) in
                [("stream", "1"), ("stream", "2"), ("stream", "3"), ("graph", "3"), ("sync", "2")]
            {
                let mut command = example("jacobi2d");
                command.args(["--nx", "1100", "--ny", "65", "--iters", "60", "--ahead", "25"]);
                command.args(["--mode", mode, "--ranks", ranks, "--stream", "cuda", "--via", via]);
                command.args(["--payload", payload, "--placement", placement]);
                let out = succeeds(command);
                assert!(out.contains(" at most 0e0, 0 cells"), "{out}");
            }
        }
    }
}

#[test]
fn lost_halo_rows_are_noticed() {
    if no_gpu() {
        return;
    }
    let mut command = example("jacobi2d");
    command.args(["--stream", "cuda", "--payload", "gpu"]);
    command.args(["--nx", "40", "--ny", "40", "--iters", "20", "--lose", "3"]);
    let error = fails(command);
    assert!(error.contains("not that of one process"), "{error}");
}
