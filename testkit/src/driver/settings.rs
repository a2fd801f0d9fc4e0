//! What tests set for the driver, and what it counts for them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdrcopy::cuda::CudaStatus;
use parking_lot::{Condvar, Mutex};

use super::{Outcome, require};

/// Submissions that may be pending on a stream.
const DEPTH: usize = 1024;
/// Host functions among them, with other work between (measured on an H200, driver 580).
const HOST_FUNCTIONS: usize = 55;
/// How long a call may block.
const PATIENCE: Duration = Duration::from_secs(60);
/// CUDA 13.0.
const VERSION: i32 = 13_000;
/// Attributes from here on are newer than the driver.
const ATTRIBUTES_END: u32 = 161;
/// Attributes of a device that are not 0.
const ATTRIBUTES: [(u32, i32); 17] = [
    // Threads of a block, host memory mapped, SMs, concurrent kernels, unified addresses.
    (1, 1024),
    (19, 1),
    (16, 132),
    (31, 1),
    (41, 1),
    // Compute capability.
    (75, 9),
    (76, 0),
    // Priorities, registered memory by its address, host registration.
    (78, 1),
    (91, 1),
    (99, 1),
    // RDMA with VMM, RDMA, flush by the host, write ordering of the owner.
    (110, 1),
    (116, 1),
    (117, 1),
    (118, 100),
    // 64-bit memory operations, NOR waits, dma-buf.
    (122, 1),
    (123, 1),
    (124, 1),
];

pub(super) struct Fault {
    pub(super) status: CudaStatus,
    /// Calls that succeed before.
    pub(super) passes: u64,
    pub(super) once: bool,
}

pub(super) struct Settings {
    pub(super) faults: BTreeMap<&'static str, Fault>,
    pub(super) attributes: BTreeMap<(i32, u32), i32>,
    pub(super) depth: usize,
    pub(super) patience: Duration,
    pub(super) frees_wait: bool,
    pub(super) loses_io: bool,
    pub(super) version: i32,
    pub(super) calls: BTreeMap<&'static str, u64>,
}

impl Settings {
    pub(super) const fn new() -> Self {
        Self {
            faults: BTreeMap::new(),
            attributes: BTreeMap::new(),
            depth: DEPTH,
            patience: PATIENCE,
            frees_wait: true,
            loses_io: false,
            version: VERSION,
            calls: BTreeMap::new(),
        }
    }
}

pub(super) static SETTINGS: Mutex<Settings> = Mutex::new(Settings::new());
pub(super) static MEMOPS: AtomicU64 = AtomicU64::new(0);
pub(super) static BLOCKED: AtomicU64 = AtomicU64::new(0);
pub(super) static STALLED: AtomicU64 = AtomicU64::new(0);
pub(super) static MISPLACED: AtomicU64 = AtomicU64::new(0);
pub(super) static STRAY: AtomicU64 = AtomicU64::new(0);

/// Notes a call, which may be told to fail.
pub(super) fn enter(name: &'static str) -> Outcome {
    let mut settings = SETTINGS.lock();
    *settings.calls.entry(name).or_default() += 1;
    let Some(fault) = settings.faults.get_mut(name) else { return Ok(()) };
    if fault.passes > 0 {
        fault.passes -= 1;
        return Ok(());
    }
    let (status, once) = (fault.status, fault.once);
    if once {
        settings.faults.remove(name);
    }
    Err(status)
}

/// The driver's version.
pub(super) fn version() -> i32 {
    SETTINGS.lock().version
}

/// An attribute of a device.
pub(super) fn attribute(device: i32, number: u32) -> Outcome<i32> {
    require((1..ATTRIBUTES_END).contains(&number), CudaStatus::INVALID_VALUE)?;
    let told = SETTINGS.lock().attributes.get(&(device, number)).copied();
    let usual = || ATTRIBUTES.iter().find(|(known, _)| *known == number).map_or(0, |(_, value)| *value);
    Ok(told.unwrap_or_else(usual))
}

/// How many submissions, and host functions among them, a stream takes.
pub(super) fn limits() -> (usize, usize) {
    (SETTINGS.lock().depth, HOST_FUNCTIONS)
}

pub(super) fn patience() -> Duration {
    SETTINGS.lock().patience
}

/// A call found no room on its stream.
pub(super) fn blocked() {
    BLOCKED.fetch_add(1, Ordering::Relaxed);
}

/// Whether memory is freed, and modules come and go, only when the GPU is idle.
pub(super) fn frees_wait() -> bool {
    SETTINGS.lock().frees_wait
}

/// Whether memory operations that write to registers of devices do nothing.
pub(super) fn loses_io() -> bool {
    SETTINGS.lock().loses_io
}

/// Copies of streams that wait for `Control::hold_copies`.
pub(super) struct Held {
    pub(super) devices: Vec<i32>,
    pub(super) count: usize,
}

pub(super) static HELD: Mutex<Held> = Mutex::new(Held { devices: Vec::new(), count: 0 });
pub(super) static LET_GO: Condvar = Condvar::new();

/// A stream of this device has come to a copy.
pub(super) fn copying(device: i32) {
    let mut held = HELD.lock();
    held.count += 1;
    LET_GO.wait_while(&mut held, |held| held.devices.contains(&device));
    held.count -= 1;
}

/// A call has to wait for the GPU.
pub(super) fn stalled() {
    STALLED.fetch_add(1, Ordering::Relaxed);
}

/// A call was made where none may be made.
pub(super) fn misplaced() {
    MISPLACED.fetch_add(1, Ordering::Relaxed);
}

/// The handle of a stream was used that stands for nothing.
pub(super) fn stray() {
    STRAY.fetch_add(1, Ordering::Relaxed);
}

/// A memory operation was executed.
pub(super) fn executed() {
    MEMOPS.fetch_add(1, Ordering::Relaxed);
}
