//! The real libibverbs and libmlx5, on the emulated card: the tests that need a device run again over it, by both routes.
//!
//! Left out is what the card does not have (DevX, GPU memory by dma-buf) and what only the software HCA of a process has
//! (injected faults).

use std::path::PathBuf;
use std::process::Command;

/// Modules that run on any device. The slow ones run as in the fast tier.
const MODULES: &[&str] = &[
    "batch_run::",
    "devices::",
    "errors::",
    "forks::",
    "graphs::",
    "interop::",
    "prepared::",
    "queues::",
    "raw_doorbells::",
    "room::",
    "stream_receives::",
    "streams::",
    "verbs::",
    "verbs_device::",
    "wraps::",
];

/// Tests of these modules that need the software HCA, and those that build programs.
const LEFT_OUT: &[&str] =
    &["errors::fault_plans_and_stream_configurations_are_checked", "errors::mistakes_are_refused"];

/// The library, which cargo has built beside this test.
fn library() -> PathBuf {
    let mut dir = std::env::current_exe().unwrap();
    while dir.pop() {
        let library = dir.join("libgdasync_card.so");
        if library.exists() {
            return library;
        }
    }
    panic!("cargo builds libgdasync_card.so with these tests");
}

fn passes(route: &str) {
    let loaded = [rdma_core_sys::Verbs::load().err(), rdma_core_sys::Mlx5::load().err()];
    if let Some(error) = loaded.into_iter().flatten().next() {
        println!("skipped: {error}");
        return;
    }
    // It counts what the whole process has.
    run(route, &["verbs_cycles::"]);
    run(route, MODULES);
}

fn run(route: &str, modules: &[&str]) {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(modules).args(LEFT_OUT.iter().flat_map(|test| ["--skip", test]));
    again.env("LD_PRELOAD", library()).env("GDSYNC_PATH", route).env("GDSYNC_TEST_DEVICE", "mlx5_0");
    let output = again.env("GDSYNC_TEST_TIER", "fast").output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && !out.contains("running 0 tests"), "{}\n{out}\n{err}", output.status);
}

#[test]
fn direct_route_passes_the_same_tests() {
    passes("direct");
}

#[test]
fn proxy_passes_the_same_tests() {
    passes("proxy");
}
