//! A test's control of the driver: what it sets, and what is counted for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{Outcome, context, memory, objects, require, stream, table};

/// Exclusive control of the driver by one test; another test that takes it waits. The drop ends all faults and captures, resets the
/// settings, and clears the sticky errors of contexts.
#[derive(Debug)]
#[must_use]
pub struct Control {
    _alone: MutexGuard<'static, ()>,
    /// Handles made since then are larger.
    first: Handle,
    retained: usize,
}

/// Objects made since [`Control::take`] that are alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alive {
    /// Streams, except default ones.
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
    /// Memory of `cuMemCreate`, and reservations of addresses.
    pub virtual_memory: usize,
    /// Allocations of pinned host memory.
    pub host_memory: usize,
    /// Registrations of host memory.
    pub registrations: usize,
    /// Primary contexts retained, less those released.
    pub retained: isize,
}

impl Control {
    /// Waits for the driver, and resets all settings and counters.
    pub fn take() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock();
        reset();
        Self { _alone: alone, first: context::number(), retained: context::retained() }
    }

    /// From now on the entry point of this name (`cuMemAlloc`, without a version) fails with this status.
    ///
    /// # Panics
    /// If the table has no such name.
    pub fn fail(&self, name: &str, status: u32) {
        self.fault(name, Fault { status: CudaStatus(status), passes: 0, once: false });
    }

    /// Makes one call of this entry point fail, after `passes` calls that succeed.
    ///
    /// # Panics
    /// As [`fail`](Self::fail).
    pub fn fail_once(&self, name: &str, passes: u64, status: u32) {
        self.fault(name, Fault { status: CudaStatus(status), passes, once: true });
    }

    /// Ends the fault of an entry point.
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

    /// Sets an attribute of the link between the GPUs: `CUdevice_P2PAttribute`.
    pub fn p2p_attribute(&self, number: u32, value: i32) {
        SETTINGS.lock().p2p_attributes.insert(number, value);
    }

    /// The driver's version, `1000 * major + 10 * minor`. Before 13.0, calls on streams need a current context.
    pub fn version(&self, version: i32) {
        SETTINGS.lock().version = version;
    }

    /// Sets how many submissions may be pending on a stream (default 1,024).
    pub fn depth(&self, submissions: usize) {
        SETTINGS.lock().depth = submissions;
    }

    /// Sets how long a call may block before it fails with 702 (default 60 s).
    pub fn patience(&self, limit: Duration) {
        SETTINGS.lock().patience = limit;
    }

    /// Whether writes of memory operations to device registers are lost, as on a bus without peer-to-peer.
    pub fn loses_io(&self, lost: bool) {
        SETTINGS.lock().loses_io = lost;
    }

    /// Whether copies on streams of a device begin but do not end.
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

    /// Sets the sticky error of a context, for example 719.
    ///
    /// # Panics
    /// If there is no such context.
    pub fn break_context(&self, handle: Handle, status: u32) {
        context::CONTEXTS.get(handle).expect("a live context").fail(CudaStatus(status));
    }

    /// The number of calls of an entry point, including failed ones.
    pub fn calls(&self, name: &str) -> u64 {
        SETTINGS.lock().calls.get(name).copied().unwrap_or(0)
    }

    /// Executed stream memory operations; a wait counts at its end.
    pub fn memops(&self) -> u64 {
        COUNTERS.memops.load(Ordering::Relaxed)
    }

    /// Calls that blocked because their stream was full.
    pub fn blocked(&self) -> u64 {
        COUNTERS.blocked.load(Ordering::Relaxed)
    }

    /// Memory and module calls that waited for work.
    pub fn stalled(&self) -> u64 {
        COUNTERS.stalled.load(Ordering::Relaxed)
    }

    /// Calls by kernels and host functions.
    pub fn misplaced(&self) -> u64 {
        COUNTERS.misplaced.load(Ordering::Relaxed)
    }

    /// Calls with an invalid or destroyed stream, which may crash in the real driver.
    pub fn stray(&self) -> u64 {
        COUNTERS.stray.load(Ordering::Relaxed)
    }

    /// Objects that are alive.
    pub fn alive(&self) -> Alive {
        let [device_memory, host_memory, registrations] = memory::since(self.first);
        Alive {
            streams: stream::STREAMS.since(self.first),
            events: objects::EVENTS.since(self.first),
            modules: objects::MODULES.since(self.first),
            graphs: stream::GRAPHS.since(self.first),
            execs: objects::EXECS.since(self.first),
            device_memory,
            virtual_memory: memory::virtual_since(self.first),
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
    let Counters { memops, blocked, stalled, misplaced, stray } = &COUNTERS;
    for counter in [memops, blocked, stalled, misplaced, stray] {
        counter.store(0, Ordering::Relaxed);
    }
    HELD.lock().devices.clear();
    LET_GO.notify_all();
    stream::forget_captures(|_| true);
    context::CONTEXTS.for_each(|context| context.mend());
}

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
    pub(super) p2p_attributes: BTreeMap<u32, i32>,
    pub(super) depth: usize,
    pub(super) patience: Duration,
    pub(super) loses_io: bool,
    pub(super) version: i32,
    pub(super) calls: BTreeMap<&'static str, u64>,
}

impl Settings {
    pub(super) const fn new() -> Self {
        Self {
            faults: BTreeMap::new(),
            attributes: BTreeMap::new(),
            p2p_attributes: BTreeMap::new(),
            depth: DEPTH,
            patience: PATIENCE,
            loses_io: false,
            version: VERSION,
            calls: BTreeMap::new(),
        }
    }
}

pub(super) static SETTINGS: Mutex<Settings> = Mutex::new(Settings::new());

/// What is counted for tests.
pub(super) struct Counters {
    pub(super) memops: AtomicU64,
    pub(super) blocked: AtomicU64,
    pub(super) stalled: AtomicU64,
    pub(super) misplaced: AtomicU64,
    pub(super) stray: AtomicU64,
}

pub(super) static COUNTERS: Counters = Counters {
    memops: AtomicU64::new(0),
    blocked: AtomicU64::new(0),
    stalled: AtomicU64::new(0),
    misplaced: AtomicU64::new(0),
    stray: AtomicU64::new(0),
};

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Counts a call, which may be told to fail.
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

/// An attribute of a device.
pub(super) fn attribute(device: i32, number: u32) -> Outcome<i32> {
    require((1..ATTRIBUTES_END).contains(&number), CudaStatus::INVALID_VALUE)?;
    let told = SETTINGS.lock().attributes.get(&(device, number)).copied();
    let usual = || ATTRIBUTES.iter().find(|(known, _)| *known == number).map_or(0, |(_, value)| *value);
    Ok(told.unwrap_or_else(usual))
}

/// An attribute of the link between the GPUs: all that it can, and the best rank, 0.
pub(super) fn p2p_attribute(number: u32) -> i32 {
    let told = SETTINGS.lock().p2p_attributes.get(&number).copied();
    told.unwrap_or_else(|| (number != 1).into())
}

/// How many submissions, and host functions among them, a stream takes.
pub(super) fn limits() -> (usize, usize) {
    (SETTINGS.lock().depth, HOST_FUNCTIONS)
}

pub(super) fn patience() -> Duration {
    SETTINGS.lock().patience
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
