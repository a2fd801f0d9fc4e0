//! The examples on GPUs, where there is one.

use std::time::Duration;

use cudarc::driver::{result, sys};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Cond, CudaStreamConfig, Stream, Via};
use gdasync::results::Report;

use super::common::{command, fails, results, succeeds};

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
fn missing_gpu_is_named() {
    match gpus() {
        Ok(count) => {
            let line = format!("pingpong --stream cuda --sizes 8 --iters 2 --device {count}");
            assert!(fails(command(&line)).contains("finding the GPU"));
        }
        Err(reason) => {
            for option in ["--stream cuda", "--payload gpu", "--placement gpu"] {
                let error = fails(command(&format!("pingpong --sizes 8 --iters 2 {option}")));
                assert!(error.contains(&reason), "{option}: {error}");
            }
        }
    }
}

#[track_caller]
fn pingpong(options: &str, points: usize) {
    let (json, _) = results(&format!("pingpong --iters 37 {options}"));
    let report: Report = serde_json::from_value(json).unwrap();
    assert!(!report.options["place"]["gpus"].as_array().unwrap().is_empty());
    let all = report.series.iter().filter(|one| one.group == "half round trip").flat_map(|one| &one.points);
    assert_eq!(all.inspect(|point| assert!(point.p50 > 0.0, "{point:?}")).count(), points, "{options}");
}

const PLACES: [(&str, &str); 5] =
    [("host", "host"), ("gpu", "host"), ("host", "gpu"), ("gpu", "gpu"), ("near", "gpu")];

#[test]
fn gpu_streams_play_ping_pong() {
    if no_gpu() {
        return;
    }
    for via in ["memop", "kernel"] {
        for (payload, placement) in PLACES {
            let place = format!("--stream cuda --via {via} --payload {payload} --placement {placement}");
            pingpong(&format!("{place} --sizes 1,8,5003,300000 --modes stream,graph,sync,cpu"), 4 * 4);
            pingpong(&format!("{place} --sizes 1,5003 --no-kernels"), 2 * 3);
            pingpong(&format!("{place} --sizes 8 --kernel-us 50 --ahead 37 --modes stream,graph"), 2);
        }
    }
    // The stream is a thread, but payload or queues are on the GPU.
    for (payload, placement) in PLACES.into_iter().skip(1) {
        pingpong(&format!("--payload {payload} --placement {placement} --sizes 1,5003"), 3 * 2);
    }
    pingpong("--payload near --placement host --sizes 1,5003", 3 * 2);
    for mode in ["graph", "initiate"] {
        let line = format!("pingpong --stream cuda --via kernel --sizes 8 --iters 10 --modes {mode}");
        let error = fails(command(&format!("{line} --wrong-bytes")));
        assert!(error.contains("wrong data"), "{mode}: {error}");
    }
}

/// A kernel waits and sends by itself: launches that do not divide the iterations, one that has all, one of each; with work, which
/// makes two steps of an iteration, and without.
#[test]
fn gpu_kernels_play_ping_pong_by_themselves() {
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
        let place = format!("--stream cuda --via kernel --payload {payload} --placement {placement}");
        for each in [1, 10, 200] {
            pingpong(&format!("{place} --sizes 1,8,5003,300000 --modes initiate --ahead {each}"), 4);
        }
        pingpong(&format!("{place} --sizes 8,70000 --kernel-us 50 --ahead 10 --modes initiate,sync"), 2 * 2);
    }
}

/// Kernels compute the bits that the CPU computes, and halo rows arrive in time.
#[test]
fn gpu_streams_solve_in_blocks() {
    if no_gpu() {
        return;
    }
    for via in ["memop", "kernel"] {
        for (payload, placement) in [("host", "host"), ("gpu", "host"), ("gpu", "gpu")] {
            for (mode, ranks) in [("stream", 1), ("stream", 2), ("stream", 3), ("graph", 3), ("sync", 2)] {
                let sizes = format!("--nx 1100 --ny 65 --iters 60 --ahead 25 --mode {mode} --ranks {ranks}");
                let place = format!("--stream cuda --via {via} --payload {payload} --placement {placement}");
                let out = succeeds(command(&format!("jacobi2d {sizes} {place}")));
                assert!(out.contains(" at most 0e0, 0 cells"), "{out}");
            }
        }
    }
    let error = fails(command("jacobi2d --stream cuda --payload gpu --nx 40 --ny 40 --iters 20 --lose 3"));
    assert!(error.contains("not that of one process"), "{error}");
}

/// What another stream does behind a batch of a capture, the next batch may wait for: the two are not one kernel.
#[test]
fn gpu_graphs_keep_forks() {
    if no_gpu() {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let wait_limit = Duration::from_secs(5);
    let config = CudaStreamConfig { via: Via::Kernel, wait_limit, ..CudaStreamConfig::default() };
    let stream = Stream::cuda(&gpu, config).unwrap();
    let words = Memory::alloc(64).unwrap();
    let [first, second] = [0, 8].map(|at| words.word64(at).unwrap());
    let _current = gpu.enter().unwrap();
    let raw = stream.raw().unwrap() as sys::CUstream;
    let other = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    let [forked, joined] =
        [(); 2].map(|()| result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap());
    let follow = |event, from, to| {
        let no_flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: an event and a stream of the current context.
        unsafe { result::event::record(event, from) }.unwrap();
        // SAFETY: another stream of that context, and the event.
        unsafe { result::stream::wait_event(to, event, no_flags) }.unwrap();
    };
    let graph = stream.capture(|stream| {
        stream.write_value64(&first, 1)?;
        follow(forked, raw, other);
        let at = words.gpu_addr(&gpu)? + 8;
        // SAFETY: a word that is mapped for the GPU, and outlives the graph.
        unsafe { result::memset_d8_async(at, 1, 1, other) }.unwrap();
        stream.wait_value64(&second, 1, Cond::Geq)?;
        stream.write_value64(&first, 2)?;
        follow(joined, other, raw);
        stream.write_value64(&first, 3)
    });
    let graph = graph.unwrap();
    for _ in 0..5 {
        words.write(0, &[0; 64]).unwrap();
        graph.launch(&stream).unwrap();
        stream.synchronize(2 * wait_limit).unwrap();
        assert_eq!((first.load(), second.load()), (3, 1));
    }
    for event in [forked, joined] {
        // SAFETY: nothing uses it any more.
        unsafe { result::event::destroy(event) }.unwrap();
    }
    // SAFETY: nothing uses it any more.
    unsafe { result::stream::destroy(other) }.unwrap();
}
