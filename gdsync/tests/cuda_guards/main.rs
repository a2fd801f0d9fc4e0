//! What a stream of a GPU survives: a driver that refuses, a GPU that is lost, misuse. On the simulated driver.

#[path = "../common/capture.rs"]
mod capture;
#[path = "../common/mod.rs"]
mod common;
mod driver;
mod misuse;
#[path = "../cuda/simulated.rs"]
mod simulated;

use std::time::{Duration, Instant};

use common::PATIENCE;
use gdsync::cuda::Gpu;
use gdsync::stream::{CudaStreamConfig, Stream, Via};
use gdsync_testkit::driver::Control;

const WAYS: [Via; 2] = [Via::MemOp, Via::Kernel];

/// The driver for one test, and a GPU.
fn rig() -> (Control, Gpu) {
    (Control::take(), simulated::gpu(0).unwrap())
}

fn stream(gpu: &Gpu, via: Via, wait_limit: Duration) -> Stream {
    let config = CudaStreamConfig { via, wait_limit, ..CudaStreamConfig::default() };
    Stream::cuda(gpu, config).unwrap()
}

/// Waits for what comes soon.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
