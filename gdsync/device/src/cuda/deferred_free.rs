//! Gives memory back to CUDA while no stream waits.
//!
//! To unregister host memory or free GPU memory, CUDA waits for all work of the GPU, including streams that wait for something the calling
//! thread has yet to do. Other threads cannot register memory meanwhile (measured on an H200 with driver 580). So a thread, started on
//! demand, does it when the streams of this library have been idle for a moment, and submissions wait at a gate meanwhile. It does not
//! know the application's own streams.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::Condvar;
use gdrcopy::{GpuBuffer, Mapping};
use parking_lot::{Mutex, MutexGuard};

use super::Gpu;
use super::register::unregister;
use crate::error::{Error, Result};

/// Interval between two checks of the streams.
const INTERVAL: Duration = Duration::from_millis(25);
/// Number of checks in a row that must find them idle, without new submissions.
const QUIET: u32 = 4;
/// Maximum wait of a submission at the gate: streams of the application may block the free.
const GATE_LIMIT: Duration = Duration::from_millis(100);
/// Maximum wait of threads that need the memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// A stream, for [`watch_activity`].
pub trait Activity: Send + Sync {
    /// Number of submissions so far; `None` while any is pending. Takes the lock under which submissions check the [`gate`].
    fn idle_since(&self) -> Option<u64>;
}

/// The streams of this process, of all GPUs, because CUDA waits for all.
static STREAMS: Mutex<Vec<Weak<dyn Activity>>> = Mutex::new(Vec::new());

/// Submissions wait here while memory is given back.
static GATE: Gate = Gate {
    closed: AtomicBool::new(false),
    held_up: Mutex::new(0),
    opened: Condvar::new(),
    reaping: Mutex::new(()),
};

struct Gate {
    /// Changed under the lock of `held_up`.
    closed: AtomicBool,
    /// Submissions that wait, or have passed and are not queued yet. It is not closed while there are any.
    held_up: Mutex<usize>,
    opened: Condvar,
    /// Serialises the threads of all GPUs.
    reaping: Mutex<()>,
}

/// Keeps the gate closed until dropped.
struct Closed(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Gate {
    /// Closes the gate, unless a stream has work.
    fn close_if_idle(&'static self) -> Option<Closed> {
        let reaping = self.reaping.lock();
        let held_up = self.held_up.lock();
        if *held_up > 0 {
            return None;
        }
        self.closed.store(true, Ordering::Relaxed);
        drop(held_up);
        let closed = Closed(reaping);
        submitted().is_some().then_some(closed)
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        // Under the lock, or a submission that has just seen the gate closed would miss the notification.
        let guard = GATE.held_up.lock();
        GATE.closed.store(false, Ordering::Relaxed);
        drop(guard);
        GATE.opened.notify_all();
    }
}

/// The gate at which submissions wait while memory is given back. A stream that checks it under the lock that its [`Activity`] takes
/// sees it closed, or is seen busy.
pub mod gate {
    use super::{GATE, GATE_LIMIT, Ordering};

    /// Whether submissions have to wait at the gate.
    #[inline]
    pub fn is_closed() -> bool {
        GATE.closed.load(Ordering::Relaxed)
    }

    /// A submission that waited at the gate, to be dropped when it is queued.
    #[derive(Debug)]
    pub struct GateGuard(());

    impl Drop for GateGuard {
        fn drop(&mut self) {
            *GATE.held_up.lock() -= 1;
        }
    }

    /// Waits until the gate is open, or for a time limit.
    #[cold]
    pub fn wait() -> GateGuard {
        let mut held_up = GATE.held_up.lock();
        *held_up += 1;
        GATE.opened.wait_while_for(&mut held_up, |_| is_closed(), GATE_LIMIT);
        GateGuard(())
    }
}

/// Number of submissions of each stream; `None` if one has work.
fn submitted() -> Option<Vec<u64>> {
    let streams: Vec<_> = STREAMS.lock().iter().filter_map(Weak::upgrade).collect();
    streams.iter().map(|stream| stream.idle_since()).collect()
}

/// Registers a stream: no memory is given back while it has work.
pub fn watch_activity(stream: Weak<dyn Activity>) {
    let mut streams = STREAMS.lock();
    streams.retain(|known| known.strong_count() > 0);
    streams.push(stream);
}

/// Memory to be given back.
#[derive(Debug)]
pub enum DeferredFree {
    /// An allocation of another process, opened at this address.
    Ipc { addr: u64 },
    /// Registered pages at this address; `unmap` gives them back to the system too.
    Host { first: usize, len: usize, unmap: bool },
    /// Memory of the GPU.
    Gpu { _mapping: Mapping, _buffer: GpuBuffer },
}

impl DeferredFree {
    fn range(&self) -> Option<Range<usize>> {
        match *self {
            DeferredFree::Host { first, len, .. } => Some(first..first + len),
            DeferredFree::Gpu { .. } | DeferredFree::Ipc { .. } => None,
        }
    }

    fn give_back(self, gpu: &Gpu) -> Result<()> {
        let _current = gpu.enter()?;
        let (first, len, unmap) = match self {
            DeferredFree::Host { first, len, unmap } => (first, len, unmap),
            DeferredFree::Gpu { .. } => return Ok(()),
            DeferredFree::Ipc { addr } => {
                // SAFETY: opened in this context, closed once; no copy uses it.
                let closed = unsafe { gpu.api().ipc_close_mem_handle(addr) };
                return closed.map_err(Error::cuda("closing memory of another process"));
            }
        };
        unregister(gpu.api(), first)?;
        if unmap {
            // SAFETY: mapped by a `Memory` that is gone; nobody else knows the pages.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(first), len) };
        }
        Ok(())
    }
}

#[derive(Default)]
pub(super) struct DeferredFreeThread(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A thread waits, or memory was given back.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Gpu, DeferredFree)>,
    /// Pages that are still registered.
    leaving: Vec<Range<usize>>,
    /// Threads that wait for the queue to drain.
    waiting: usize,
    /// Memory is being given back.
    busy: bool,
    running: bool,
}

impl State {
    fn has_leaving(&self, pages: &Range<usize>) -> bool {
        self.leaving.iter().any(|old| old.start < pages.end && pages.start < old.end)
    }
}

impl DeferredFreeThread {
    /// Queues memory of `gpu`.
    pub(super) fn push(&self, gpu: Gpu, deferred: DeferredFree) {
        let mut state = self.0.state.lock();
        state.leaving.extend(deferred.range());
        state.queue.push_back((gpu, deferred));
        if std::mem::replace(&mut state.running, true) {
            return;
        }
        let shared = self.0.clone();
        let started = std::thread::Builder::new().name("gdsync-reaper".into()).spawn(move || shared.run());
        if let Err(error) = started {
            // The next call tries again.
            tracing::warn!(%error, "memory is not given back to CUDA for now: no thread");
            state.running = false;
        }
    }

    /// Waits until none of these pages is queued: a new registration would have no effect.
    ///
    /// # Errors
    /// [`Error::Deadline`].
    pub(super) fn wait_unregistered(&self, pages: &Range<usize>) -> Result<()> {
        let what = "giving back the former registration of this memory";
        self.0
            .wait_until(PATIENCE, |state| !state.has_leaving(pages))
            .then_some(())
            .ok_or_else(|| Error::late(what, PATIENCE, super::ALL_STREAMS))
    }

    /// Whether any of these pages is queued.
    pub(super) fn is_leaving(&self, pages: &Range<usize>) -> bool {
        self.0.state.lock().has_leaving(pages)
    }

    /// Waits until all is given back, because memory is exhausted. Returns whether anything was.
    pub(super) fn finish_any(&self) -> bool {
        let state = self.0.state.lock();
        let any = !state.queue.is_empty() || state.busy;
        drop(state);
        any && self.finish(PATIENCE)
    }

    /// Waits until all is given back. Returns false after `timeout`.
    pub(super) fn finish(&self, timeout: Duration) -> bool {
        self.0.wait_until(timeout, |state| state.queue.is_empty() && !state.busy)
    }
}

/// Tracks how long the streams have been idle.
#[derive(Default)]
struct Quiet {
    /// Number of checks in a row that found them idle.
    checks: u32,
    /// Number of submissions of each at the last check.
    submitted: Option<Vec<u64>>,
}

impl Quiet {
    fn check(&mut self) {
        let now = submitted();
        let same = self.submitted.is_none() || now == self.submitted;
        self.checks = if now.is_some() && same { self.checks + 1 } else { 0 };
        self.submitted = now;
    }
}

impl Shared {
    fn wait_until(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        if done(&state) {
            return true;
        }
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + PATIENCE);
        state.waiting += 1;
        self.changed.notify_all();
        while !done(&state) && !self.changed.wait_until(&mut state, deadline) {}
        state.waiting -= 1;
        done(&state)
    }

    fn run(&self) {
        let mut quiet = Quiet::default();
        loop {
            self.await_quiet(&mut quiet);
            let mut state = self.state.lock();
            let Some((gpu, deferred)) = state.queue.pop_front() else {
                state.running = false;
                return;
            };
            state.busy = true;
            drop(state);
            let Some(closed) = GATE.close_if_idle() else {
                let mut state = self.state.lock();
                state.busy = false;
                state.queue.push_front((gpu, deferred));
                // A thread may wait for this, but a stream has work.
                self.changed.wait_for(&mut state, INTERVAL);
                continue;
            };
            let range = deferred.range();
            match catch_unwind(AssertUnwindSafe(|| deferred.give_back(&gpu))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "memory was not given back to CUDA"),
                Err(_) => tracing::error!("memory was not given back to CUDA: the call panicked"),
            }
            drop(closed);
            let mut state = self.state.lock();
            state.busy = false;
            if let Some(at) = range.and_then(|range| state.leaving.iter().position(|known| *known == range)) {
                state.leaving.swap_remove(at);
            }
            drop(state);
            self.changed.notify_all();
            // Without the lock: the last handle of a GPU releases its context.
            drop(gpu);
        }
    }

    /// Waits until the streams have been idle for a while, or a thread waits.
    fn await_quiet(&self, quiet: &mut Quiet) {
        let mut state = self.state.lock();
        while state.waiting == 0 {
            // Unlocked, because the check may drop the last handle of a stream, which takes this lock.
            parking_lot::MutexGuard::unlocked(&mut state, || quiet.check());
            if quiet.checks >= QUIET || state.waiting > 0 {
                return;
            }
            self.changed.wait_for(&mut state, INTERVAL);
        }
    }
}
