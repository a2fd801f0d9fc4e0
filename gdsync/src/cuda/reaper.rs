//! Gives memory back to CUDA without keeping anybody waiting.
//!
//! To take a registration back, or to free GPU memory, CUDA waits for everything that runs on the GPU, also for streams
//! that wait for something the calling thread has yet to do (seen on an H200 with driver 580; other threads may go on using
//! the GPU meanwhile). So a thread does it that nobody waits for. It is started when there is something to give back, and
//! ends when all is done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gdrcopy::{GpuBuffer, Mapping};
use parking_lot::{Condvar, Mutex};

use super::Gpu;
use super::register::unregister;
use crate::error::{Error, Result};

/// How long somebody waits who wants to register again what is being given back.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is given back.
pub(super) enum Doomed {
    /// Registered pages from this address on. `unmap` says that they go back to the system too.
    Host { first: usize, len: usize, unmap: bool },
    /// Memory of the GPU.
    Gpu { _mapping: Mapping, _buffer: GpuBuffer },
}

impl Doomed {
    fn range(&self) -> Option<Range<usize>> {
        match *self {
            Doomed::Host { first, len, .. } => Some(first..first + len),
            Doomed::Gpu { .. } => None,
        }
    }

    fn give_back(self, gpu: &Gpu) -> Result<()> {
        let Doomed::Host { first, len, unmap } = self else { return Ok(()) };
        let _current = gpu.enter()?;
        unregister(gpu.api(), first)?;
        if unmap {
            // SAFETY: mapped by a `Memory` that is gone; nobody else knows the pages.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(first), len) };
        }
        Ok(())
    }
}

#[derive(Default)]
pub(super) struct Reaper(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Gpu, Doomed)>,
    /// Pages that are still registered.
    leaving: Vec<Range<usize>>,
    running: bool,
}

impl Reaper {
    /// Gives memory of `gpu` back in time.
    pub(super) fn take(&self, gpu: Gpu, doomed: Doomed) {
        let mut state = self.0.state.lock();
        state.leaving.extend(doomed.range());
        state.queue.push_back((gpu, doomed));
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

    /// Waits until none of these pages is being given back any more: a new registration would not be one.
    pub(super) fn settle(&self, pages: &Range<usize>) -> Result<()> {
        let overlaps =
            |state: &State| state.leaving.iter().any(|old| old.start < pages.end && pages.start < old.end);
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.0.state.lock();
        while overlaps(&state) {
            if self.0.done.wait_until(&mut state, deadline).timed_out() {
                let what = "giving back the former registration of this memory";
                return Err(Error::Deadline { what, after: PATIENCE });
            }
        }
        Ok(())
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut state = self.state.lock();
            let Some((gpu, doomed)) = state.queue.pop_front() else {
                state.running = false;
                return;
            };
            drop(state);
            let range = doomed.range();
            if let Err(error) = doomed.give_back(&gpu) {
                tracing::debug!(%error, "memory was not given back to CUDA");
            }
            let mut state = self.state.lock();
            if let Some(at) = range.and_then(|range| state.leaving.iter().position(|known| *known == range)) {
                state.leaving.swap_remove(at);
            }
            drop(state);
            self.done.notify_all();
            // Perhaps the last one: its context goes with it.
            drop(gpu);
        }
    }
}
