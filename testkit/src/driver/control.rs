//! A test's control of the driver.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::{Mutex, MutexGuard};

use super::settings::{BLOCKED, Fault, HELD, LET_GO, MEMOPS, MISPLACED, SETTINGS, STALLED, STRAY, Settings};
use super::{context, handles, kernel, objects, queue, region, stream, table};

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
        Self { _alone: alone, first: handles::number(), retained: context::retained() }
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

    /// Whether freeing and unregistering memory, and loading and unloading modules, waits for all work of the GPU, as seen on
    /// an H200 (so it is at first). Otherwise work that still needs freed memory fails.
    pub fn frees_wait(&self, wait: bool) {
        SETTINGS.lock().frees_wait = wait;
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
        handles::CONTEXTS.get(handle).expect("a live context").fail(CudaStatus(status));
    }

    /// The number of calls of an entry point, including failed ones.
    pub fn calls(&self, name: &str) -> u64 {
        SETTINGS.lock().calls.get(name).copied().unwrap_or(0)
    }

    /// Executed stream memory operations; a wait counts at its end.
    pub fn memops(&self) -> u64 {
        MEMOPS.load(Ordering::Relaxed)
    }

    /// Calls that blocked because their stream was full.
    pub fn blocked(&self) -> u64 {
        BLOCKED.load(Ordering::Relaxed)
    }

    /// Memory and module calls that waited for work.
    pub fn stalled(&self) -> u64 {
        STALLED.load(Ordering::Relaxed)
    }

    /// Calls by kernels and host functions.
    pub fn misplaced(&self) -> u64 {
        MISPLACED.load(Ordering::Relaxed)
    }

    /// Calls with an invalid or destroyed stream, which may crash in the real driver.
    pub fn stray(&self) -> u64 {
        STRAY.load(Ordering::Relaxed)
    }

    /// Running threads of streams.
    pub fn threads(&self) -> usize {
        queue::threads()
    }

    /// Objects that are alive.
    pub fn alive(&self) -> Alive {
        let [device_memory, host_memory, registrations] = region::since(self.first);
        Alive {
            streams: stream::STREAMS.since(self.first),
            events: objects::EVENTS.since(self.first),
            modules: kernel::MODULES.since(self.first),
            graphs: stream::GRAPHS.since(self.first),
            execs: objects::EXECS.since(self.first),
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
    stream::forget_captures(|_| true);
    handles::CONTEXTS.for_each(|context| context.mend());
}
