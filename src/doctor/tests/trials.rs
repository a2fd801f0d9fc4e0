//! The trials on GPUs, run on the simulated driver.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, MemOp};
use gdsync_testkit::driver::{Control, api};

use super::super::areas::{Probe, Status};
use super::super::live::{CudaFacts, Reporter, attribute, explore};
use super::cases::Tree;
use super::{LONG, all, healthy, told};

fn explored(api: &Api, patience: Duration) -> CudaFacts {
    explore(api, &Reporter::to(std::io::sink()), patience)
}

/// What the probes of GPUs say of it, without that of BAR1, which the simulated machine has not.
fn judged(facts: CudaFacts) -> Vec<Probe> {
    let tree = Tree::healthy();
    let mut machine = healthy(&tree);
    machine.cuda = told(facts);
    all(&machine)
        .into_iter()
        .filter(|probe| probe.name.starts_with("gpu.") && probe.name != "gpu.bar1")
        .collect()
}

/// The probes that complain of GPU 0, and their words.
fn complaints(facts: CudaFacts) -> Vec<(&'static str, String)> {
    let probes = judged(facts).into_iter().filter(|probe| probe.status != Status::Ok);
    let of = probes.filter(|probe| probe.subject.as_deref().is_none_or(|subject| subject == "GPU 0"));
    of.map(|probe| (probe.name, probe.found)).collect()
}

/// What the simulated driver does not do.
fn no_dma_bufs(control: &Control) {
    (0..2).for_each(|device| control.attribute(device, attribute::DMA_BUF, 0));
}

#[test]
fn operations_are_run_and_captured() {
    let control = Control::take();
    no_dma_bufs(&control);
    let facts = explored(&api(), LONG);
    assert_eq!(facts.gpus.len(), 2);
    for gpu in &facts.gpus {
        assert!(gpu.memop.as_ref().unwrap().as_ref().unwrap().contains("a wait for the CPU and a write ran"));
        assert!(gpu.capture.as_ref().unwrap().as_ref().unwrap().contains("launched as a graph"));
    }
    // Two GPUs, each three operations eager and as a graph, and those of the stream itself.
    assert!(control.memops() >= 2 * 2 * 3);
    let names: Vec<_> = complaints(facts).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["gpu.dma_buf"]);
}

#[test]
fn failing_calls_are_reported_by_their_probes() {
    for (call, status, names) in [
        ("cuInit", 999, &["gpu.cuda"][..]),
        ("cuStreamBatchMemOp", 801, &["gpu.memop_run", "gpu.capture"]),
        ("cuStreamBeginCapture", 801, &["gpu.capture"]),
        ("cuGraphInstantiateWithFlags", 801, &["gpu.capture"]),
        ("cuMemHostRegister", 2, &["gpu.memop_run", "gpu.capture"]),
    ] {
        let control = Control::take();
        no_dma_bufs(&control);
        control.fail(call, status);
        let said = complaints(explored(&api(), LONG));
        let failed: Vec<_> =
            said.iter().filter(|(name, found)| *name != "gpu.dma_buf" && !found.contains("no GPU")).collect();
        assert_eq!(failed.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names, "{call}: {said:?}");
        assert!(failed.iter().any(|(_, found)| found.contains(call)), "{call}: {said:?}");
    }
}

/// `CUDA_ERROR_DEVICE_UNAVAILABLE`.
const UNAVAILABLE: u32 = 46;

#[test]
fn exclusive_gpu_is_awaited_and_not_called_broken() {
    let control = Control::take();
    no_dma_bufs(&control);
    (0..2).for_each(|device| control.attribute(device, attribute::COMPUTE_MODE, attribute::EXCLUSIVE));
    // The process before this one is still ending.
    control.fail_once("cuDevicePrimaryCtxRetain", 0, UNAVAILABLE);
    let names: Vec<_> = complaints(explored(&api(), LONG)).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["gpu.dma_buf"]);
    // Another process keeps it.
    control.fail("cuDevicePrimaryCtxRetain", UNAVAILABLE);
    let facts = explored(&api(), LONG);
    assert!(facts.gpus.iter().all(|gpu| gpu.is_taken), "{facts:?}");
    let said = judged(facts);
    let run: Vec<_> = said.iter().filter(|probe| probe.name == "gpu.memop_run").collect();
    assert!(run.len() == 2 && run.iter().all(|probe| probe.status == Status::Warn), "{run:#?}");
    assert!(said.iter().all(|probe| probe.status != Status::Fail), "{said:#?}");
}

/// Takes operations, and does nothing about them.
extern "C" fn silent(_stream: Handle, _count: u32, _ops: *mut MemOp, _flags: u32) -> u32 {
    0
}

/// Does all writes at once, whatever the waits before them say.
extern "C" fn hasty(_stream: Handle, count: u32, ops: *mut MemOp, _flags: u32) -> u32 {
    for at in 0..count as usize {
        // SAFETY: the caller passes so many operations.
        let place = unsafe { ops.add(at) };
        // SAFETY: the caller passes so many operations.
        let op = unsafe { place.read() };
        if op.operation == MemOp::WRITE_64 {
            let word = std::ptr::with_exposed_provenance::<AtomicU64>(usize::try_from(op.address).unwrap());
            // SAFETY: a word of memory that stays; addresses of the simulated GPU are those of the CPU.
            unsafe { &*word }.store(op.value, Ordering::Release);
        }
    }
    0
}

#[test]
fn operations_that_do_nothing_or_do_not_wait_are_noticed() {
    type Entry = unsafe extern "C" fn(Handle, u32, *mut MemOp, u32) -> u32;
    for (entry, patience, words) in [
        (silent as Entry, Duration::from_millis(20), "what a stream wrote did not show within 20ms"),
        (hasty as Entry, LONG, "passed a wait that was not satisfied"),
    ] {
        let control = Control::take();
        no_dma_bufs(&control);
        let said = complaints(explored(&Api { stream_batch_mem_op: Some(entry), ..api() }, patience));
        let run = said.iter().find(|(name, _)| *name == "gpu.memop_run");
        assert!(run.is_some_and(|(_, found)| found.contains(words)), "{said:?}");
        // A stream that is stuck is not used again.
        let capture = said.iter().find(|(name, _)| *name == "gpu.capture");
        assert!(capture.is_some_and(|(_, found)| found.contains("not tried")), "{said:?}");
    }
}

#[test]
fn attributes_are_those_of_the_driver() {
    let control = Control::take();
    no_dma_bufs(&control);
    control.attribute(0, attribute::WAIT_NOR, 0);
    let said = complaints(explored(&api(), LONG));
    assert!(said.iter().any(|(name, found)| *name == "gpu.memops" && found == "no NOR waits"), "{said:?}");
}
