//! Gives memory back to CUDA when no stream waits.
//!
//! To take a registration back, or to free GPU memory, CUDA waits for everything that runs on the GPU, also for streams
//! that wait for something the calling thread has yet to do; and while one thread waits for that, others cannot register
//! memory (seen on an H200 with driver 580). So a thread does it that nobody waits for, when the streams of this library have
//! been idle for a moment, and submissions wait meanwhile. Of the application's own streams it knows nothing. The thread is
//! started when there is something to give back, and ends when all is done.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gdrcopy::{GpuBuffer, Mapping};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Gpu;
use super::register::unregister;
use crate::error::{Error, Result};

/// Between two looks at the streams.
const LOOK: Duration = Duration::from_millis(25);
/// Looks in a row at which they must have been idle, with nothing new.
const QUIET: u32 = 4;
/// How long a submission waits at most: an application's streams may hold up what is given back.
const BRIEFLY: Duration = Duration::from_millis(100);
/// How long somebody waits who needs what is being given back.
const PATIENCE: Duration = Duration::from_secs(10);

/// A stream, as far as the reaper must know it.
pub trait Activity: Send + Sync {
    /// Submissions so far; `None` while any is pending. It takes the lock under which submissions look at the [`gate`].
    fn idle_since(&self) -> Option<u64>;
}

/// The streams of this process: CUDA waits for those of all GPUs.
static STREAMS: Mutex<Vec<Weak<dyn Activity>>> = Mutex::new(Vec::new());

/// Submissions wait at it while something is being given back.
static GATE: Gate = Gate {
    closed: AtomicBool::new(false),
    held_up: Mutex::new(0),
    opened: Condvar::new(),
    reaping: Mutex::new(()),
};

struct Gate {
    /// Changed under the lock of `held_up`.
    closed: AtomicBool,
    /// Submissions that wait, or were let through and are not queued yet: it is not closed again before them.
    held_up: Mutex<usize>,
    opened: Condvar,
    /// One gives back at a time: there is a reaper for each GPU.
    reaping: Mutex<()>,
}

/// The gate is closed until this is dropped.
struct Closed(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Gate {
    /// Nothing is submitted from here on; `None` when a stream has work.
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
        // Under the lock, or who has just seen the gate closed would miss the call.
        let guard = GATE.held_up.lock();
        GATE.closed.store(false, Ordering::Relaxed);
        drop(guard);
        GATE.opened.notify_all();
    }
}

/// Where submissions wait while something is being given back. Who looks at it under a lock that its [`Activity`] takes, too, sees
/// that it is closed, or is seen to be busy.
pub mod gate {
    use super::{BRIEFLY, GATE, Ordering};

    /// Whether submissions have to wait at the gate.
    #[inline]
    pub fn is_closed() -> bool {
        GATE.closed.load(Ordering::Relaxed)
    }

    /// A submission that was held up: to be dropped when it is queued.
    #[derive(Debug)]
    pub struct GateGuard(());

    impl Drop for GateGuard {
        fn drop(&mut self) {
            *GATE.held_up.lock() -= 1;
        }
    }

    /// Returns when it is open, or in a while.
    #[cold]
    pub fn wait() -> GateGuard {
        let mut held_up = GATE.held_up.lock();
        *held_up += 1;
        GATE.opened.wait_while_for(&mut held_up, |_| is_closed(), BRIEFLY);
        GateGuard(())
    }
}

/// The submissions so far of each stream; `None` when one has work.
fn submitted() -> Option<Vec<u64>> {
    let streams: Vec<_> = STREAMS.lock().iter().filter_map(Weak::upgrade).collect();
    streams.iter().map(|stream| stream.idle_since()).collect()
}

/// Nothing is given back while this stream has work.
pub fn mind(stream: Weak<dyn Activity>) {
    let mut streams = STREAMS.lock();
    streams.retain(|known| known.strong_count() > 0);
    streams.push(stream);
}

/// What is given back.
#[derive(Debug)]
pub enum DeferredFree {
    /// An allocation of another process, by its address here.
    Ipc { addr: u64 },
    /// Registered pages from this address on. `unmap` says that they go back to the system too.
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
    /// There is a reason to hurry, or something was given back.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Gpu, DeferredFree)>,
    /// Pages that are still registered.
    leaving: Vec<Range<usize>>,
    /// Threads that wait for what is in the queue.
    waiting: usize,
    /// Something is being given back at the moment.
    busy: bool,
    running: bool,
}

impl State {
    fn has_leaving(&self, pages: &Range<usize>) -> bool {
        self.leaving.iter().any(|old| old.start < pages.end && pages.start < old.end)
    }
}

impl DeferredFreeThread {
    /// Gives memory of `gpu` back in time.
    pub(super) fn take(&self, gpu: Gpu, deferred: DeferredFree) {
        let mut state = self.0.state.lock();
        state.leaving.extend(deferred.range());
        state.queue.push_back((gpu, deferred));
        if std::mem::replace(&mut state.running, true) {
            return;
        }
        let shared = self.0.clone();
        let started = std::thread::Builder::new().name("gdsync-reaper".into()).spawn(move || shared.run());
        if let Err(error) = started {
            // The next one tries again.
            tracing::warn!(%error, "memory is not given back to CUDA for now: no thread");
            state.running = false;
        }
    }

    /// Waits until none of these pages is left registered: a new registration would not be one.
    pub(super) fn settle(&self, pages: &Range<usize>) -> Result<()> {
        let what = "giving back the former registration of this memory";
        self.0
            .wait_until(PATIENCE, |state| !state.has_leaving(pages))
            .then_some(())
            .ok_or(Error::Deadline { what, after: PATIENCE })
    }

    /// Whether any of these pages is still registered, but not for long.
    pub(super) fn is_leaving(&self, pages: &Range<usize>) -> bool {
        self.0.state.lock().has_leaving(pages)
    }

    /// Waits until all is given back, as there is not enough. Returns whether there was anything.
    pub(super) fn hurry(&self) -> bool {
        let state = self.0.state.lock();
        let any = !state.queue.is_empty() || state.busy;
        drop(state);
        any && self.finish(PATIENCE)
    }

    /// Waits until all is given back. Returns whether it is.
    pub(super) fn finish(&self, timeout: Duration) -> bool {
        self.0.wait_until(timeout, |state| state.queue.is_empty() && !state.busy)
    }
}

/// How long the streams have been idle.
#[derive(Default)]
struct Quiet {
    /// Looks in a row that found them so.
    looks: u32,
    /// The submissions of each so far.
    submitted: Option<Vec<u64>>,
}

impl Quiet {
    fn look(&mut self) {
        let now = submitted();
        let same = self.submitted.is_none() || now == self.submitted;
        self.looks = if now.is_some() && same { self.looks + 1 } else { 0 };
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
        while !done(&state) && !self.changed.wait_until(&mut state, deadline).timed_out() {}
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
                // Somebody may wait, but a stream has work.
                self.changed.wait_for(&mut state, LOOK);
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
            // Perhaps the last one: its context goes with it.
            drop(gpu);
        }
    }

    /// Returns when the streams have been idle for a while, or at once when somebody waits.
    fn await_quiet(&self, quiet: &mut Quiet) {
        let mut state = self.state.lock();
        while state.waiting == 0 {
            // The last handle of a stream may be dropped here, and that wants this lock.
            parking_lot::MutexGuard::unlocked(&mut state, || quiet.look());
            if quiet.looks >= QUIET || state.waiting > 0 {
                return;
            }
            self.changed.wait_for(&mut state, LOOK);
        }
    }
}
