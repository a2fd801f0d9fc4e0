//! A test's control of the driver.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::{Mutex, MutexGuard};

use super::settings::{BLOCKED, Fault, HELD, LET_GO, MEMOPS, MISPLACED, SETTINGS, STALLED, STRAY, Settings};
use super::{context, handles, kernel, objects, queue, region, stream, table};

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
        handles::CONTEXTS.get(handle).expect("a live context").fail(CudaStatus(status));
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
