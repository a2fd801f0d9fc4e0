//! What tests tell the driver, and what it tells them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    Outcome, capture, context, event, graph, handles, kernel, memory, queue, require, stream, table,
};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;

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

struct Fault {
    status: CudaStatus,
    /// Calls that succeed before.
    passes: u64,
    once: bool,
}

struct Settings {
    faults: BTreeMap<&'static str, Fault>,
    attributes: BTreeMap<(i32, u32), i32>,
    depth: usize,
    patience: Duration,
    frees_wait: bool,
    loses_io: bool,
    version: i32,
    calls: BTreeMap<&'static str, u64>,
}

impl Settings {
    const fn new() -> Self {
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

static SETTINGS: Mutex<Settings> = Mutex::new(Settings::new());
static MEMOPS: AtomicU64 = AtomicU64::new(0);
static BLOCKED: AtomicU64 = AtomicU64::new(0);
static STALLED: AtomicU64 = AtomicU64::new(0);
static MISPLACED: AtomicU64 = AtomicU64::new(0);
static STRAY: AtomicU64 = AtomicU64::new(0);

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

/// Copies of streams that wait for [`Control::hold_copies`].
struct Held {
    devices: Vec<i32>,
    count: usize,
}

static HELD: Mutex<Held> = Mutex::new(Held { devices: Vec::new(), count: 0 });
static LET_GO: Condvar = Condvar::new();

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

/// The driver in the hands of one test. Others of the process that take it wait until this is dropped; then calls fail no
/// more, settings are the usual ones, and contexts that failed work again,
/// and captures that were not ended are.
#[derive(Debug)]
#[must_use]
pub struct Control {
    _alone: MutexGuard<'static, ()>,
    /// Handles made since then are larger.
    first: Handle,
    retained: usize,
}

/// What was made since [`Control::take`] and is still there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alive {
    /// Streams, without default ones.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Modules.
    pub modules: usize,
    /// Graphs, also those that are being captured.
    pub graphs: usize,
    /// Executable graphs.
    pub execs: usize,
    /// Allocations of GPU memory.
    pub device_memory: usize,
    /// Allocations of pinned host memory.
    pub host_memory: usize,
    /// Registrations of host memory.
    pub registrations: usize,
    /// Primary contexts retained, less those released.
    pub retained: isize,
}

impl Control {
    /// Waits for the driver, and puts all settings and counters to what they were at first.
    pub fn take() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock();
        reset();
        Self { _alone: alone, first: handles::number(), retained: context::retained() }
    }

    /// From now on the entry point of this name (`cuMemAlloc`, without a version) fails with this status.
    ///
    /// # Panics
    /// For a name that the table lacks.
    pub fn fail(&self, name: &str, status: u32) {
        self.fault(name, Fault { status: CudaStatus(status), passes: 0, once: false });
    }

    /// The call of this entry point after `passes` more fails, and only that one.
    ///
    /// # Panics
    /// As [`fail`](Self::fail).
    pub fn fail_once(&self, name: &str, passes: u64, status: u32) {
        self.fault(name, Fault { status: CudaStatus(status), passes, once: true });
    }

    /// The entry point fails no more.
    pub fn mend(&self, name: &str) {
        SETTINGS.lock().faults.remove(name);
    }

    fn fault(&self, name: &str, fault: Fault) {
        let known = table::NAMES.iter().find(|known| **known == name);
        SETTINGS.lock().faults.insert(known.expect("a name in the table of entry points"), fault);
    }

    /// Sets an attribute of a device.
    pub fn attribute(&self, device: i32, number: u32, value: i32) {
        SETTINGS.lock().attributes.insert((device, number), value);
    }

    /// The driver's version, `1000 * major + 10 * minor`. Those before 13.0 take calls on streams from threads with a context only.
    pub fn version(&self, version: i32) {
        SETTINGS.lock().version = version;
    }

    /// So many submissions may be pending on a stream (1,024).
    pub fn depth(&self, submissions: usize) {
        SETTINGS.lock().depth = submissions;
    }

    /// Calls that block fail with 702 after so long (60 s). A test of what must not block makes this short.
    pub fn patience(&self, limit: Duration) {
        SETTINGS.lock().patience = limit;
    }

    /// Whether freeing and unregistering memory, and loading and unloading modules, waits for all work of the GPU, as seen on
    /// an H200 (so it is at first). Otherwise work that still needs freed memory fails.
    pub fn frees_wait(&self, wait: bool) {
        SETTINGS.lock().frees_wait = wait;
    }

    /// Whether what memory operations write to registers of devices gets lost, as where the bus lets nothing through from one
    /// device to another.
    pub fn loses_io(&self, lost: bool) {
        SETTINGS.lock().loses_io = lost;
    }

    /// Whether streams of a device stop at copies, which have begun then and do not end.
    pub fn hold_copies(&self, device: i32, held: bool) {
        let devices = &mut HELD.lock().devices;
        devices.retain(|known| *known != device);
        devices.extend(held.then_some(device));
        LET_GO.notify_all();
    }

    /// Copies that are held.
    pub fn held_copies(&self) -> usize {
        HELD.lock().count
    }

    /// Fails a context as if work in it had failed: with 719, for example.
    ///
    /// # Panics
    /// Where there is no such context.
    pub fn break_context(&self, handle: Handle, status: u32) {
        context::CONTEXTS.get(handle).expect("a live context").fail(CudaStatus(status));
    }

    /// Calls of the entry point of this name, also failed ones.
    pub fn calls(&self, name: &str) -> u64 {
        SETTINGS.lock().calls.get(name).copied().unwrap_or(0)
    }

    /// Stream memory operations executed; a wait when it is over.
    pub fn memops(&self) -> u64 {
        MEMOPS.load(Ordering::Relaxed)
    }

    /// Calls that found no room on their stream.
    pub fn blocked(&self) -> u64 {
        BLOCKED.load(Ordering::Relaxed)
    }

    /// Calls of memory and modules that had to wait for work.
    pub fn stalled(&self) -> u64 {
        STALLED.load(Ordering::Relaxed)
    }

    /// Calls in kernels and host functions.
    pub fn misplaced(&self) -> u64 {
        MISPLACED.load(Ordering::Relaxed)
    }

    /// Calls with handles that were no streams, or no more: with the real driver they may crash.
    pub fn stray(&self) -> u64 {
        STRAY.load(Ordering::Relaxed)
    }

    /// Threads of streams that run.
    pub fn threads(&self) -> usize {
        queue::threads()
    }

    /// What is left.
    pub fn alive(&self) -> Alive {
        let [device_memory, host_memory, registrations] = memory::since(self.first);
        Alive {
            streams: stream::STREAMS.since(self.first),
            events: event::EVENTS.since(self.first),
            modules: kernel::MODULES.since(self.first),
            graphs: graph::GRAPHS.since(self.first),
            execs: graph::EXECS.since(self.first),
            device_memory,
            host_memory,
            registrations,
            retained: context::retained().wrapping_sub(self.retained).cast_signed(),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        reset();
    }
}

fn reset() {
    *SETTINGS.lock() = Settings::new();
    MEMOPS.store(0, Ordering::Relaxed);
    BLOCKED.store(0, Ordering::Relaxed);
    STALLED.store(0, Ordering::Relaxed);
    MISPLACED.store(0, Ordering::Relaxed);
    STRAY.store(0, Ordering::Relaxed);
    HELD.lock().devices.clear();
    LET_GO.notify_all();
    capture::forget(|_| true);
    context::CONTEXTS.for_each(|context| context.mend());
}
