//! What the handle and the thread of a host engine share: the queue, the counters and the failure.
//!
//! No foreign code (sources, host functions, drops of what operations hold) ever runs under the lock, so all of it
//! may call back into the engine.
//!
//! A failure has two steps. Once the error is set, nothing is accepted and no further operation starts. Once the
//! sources are told, `released` is set: only then does the thread leave the wait it is in, and drop the rest.

use std::collections::VecDeque;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::HostStreamConfig;
use crate::stream::op::{Ops, Source};
use crate::stream::sources::{Use, sources_of};
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::Log;
use gdsync_shm::Backoff;

/// How long a caller spins for a completion or for room before it sleeps: a short submission takes less.
const CALLER_SPIN: Duration = Duration::from_micros(10);

struct Submission {
    ops: Ops,
    sources: Vec<Use>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Submission>,
    /// The smallest count of completed submissions that a sleeping caller waits for: those before wake nobody.
    awaited: Option<u64>,
    /// The sources of the submission that the thread took: a failure must reach them too.
    running: Vec<Use>,
}

pub(super) struct Shared {
    pub(super) config: HostStreamConfig,
    pub(super) log: Log,
    state: Mutex<State>,
    /// Wakes the thread when it ran dry.
    work: Condvar,
    /// Wakes the thread out of the sleep of a wait.
    release: Condvar,
    /// Wakes callers that wait for completions or room.
    done: Condvar,
    // All of these change under the lock only, but for `position`.
    submitted: AtomicU64,
    completed: AtomicU64,
    error: OnceLock<Error>,
    released: AtomicBool,
    /// Index of the operation that runs.
    position: AtomicUsize,
}

impl Shared {
    pub(super) fn new(config: HostStreamConfig, log: Log) -> Self {
        Self {
            config,
            log,
            state: Mutex::default(),
            work: Condvar::new(),
            release: Condvar::new(),
            done: Condvar::new(),
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            error: OnceLock::new(),
            released: AtomicBool::new(false),
            position: AtomicUsize::new(0),
        }
    }

    pub(super) fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    pub(super) fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    pub(super) fn failed(&self) -> bool {
        self.error.get().is_some()
    }

    pub(super) fn released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    pub(super) fn has_room(&self) -> bool {
        // In this order: a submission that completes in between must not look like room for minus one.
        let completed = self.completed();
        self.submitted() - completed < self.config.depth as u64
    }

    /// Refuses what a submission would be refused for.
    pub(super) fn ask_room(&self) -> Result<()> {
        match self.error() {
            Some(error) => Err(error),
            None if self.has_room() => Ok(()),
            None => Err(Error::StreamFull { stream: self.config.name.clone(), depth: self.config.depth }),
        }
    }

    pub(super) fn submit(&self, ops: &mut Ops) -> Result<u64> {
        let sources = sources_of(ops);
        let mut state = self.state.lock();
        self.ask_room()?;
        state.queue.push_back(Submission { ops: mem::take(ops), sources });
        let seq = self.submitted() + 1;
        self.submitted.store(seq, Ordering::Release);
        drop(state);
        self.work.notify_one();
        Ok(seq)
    }

    /// Blocks a caller until `done`, which must depend on counters and error only, or until the deadline.
    pub(super) fn block_until(
        &self,
        deadline: Instant,
        done: impl Fn() -> bool,
        count: impl Fn() -> u64,
    ) -> bool {
        let start = Instant::now();
        let backoff = Backoff::since(start, CALLER_SPIN.min(deadline.saturating_duration_since(start)));
        while !done() {
            if !backoff.spin() {
                return self.sleep_until(deadline, done, count);
            }
        }
        true
    }

    /// The second half of [`Shared::block_until`].
    fn sleep_until(&self, deadline: Instant, done: impl Fn() -> bool, count: impl Fn() -> u64) -> bool {
        let mut state = self.state.lock();
        while !done() {
            state.awaited = Some(state.awaited.map_or(count(), |other| other.min(count())));
            if self.done.wait_until(&mut state, deadline).timed_out() {
                return done();
            }
        }
        true
    }

    /// For the thread: the next submission, run or dropped with [`Shared::retire`] to follow. `None`: it is over.
    pub(super) fn next(&self) -> Option<Ops> {
        let backoff = Backoff::new(self.config.spin);
        while self.submitted() == self.completed() && !self.failed() && backoff.spin() {}
        let mut state = self.state.lock();
        loop {
            if let Some(Submission { ops, sources }) = state.queue.pop_front() {
                state.running = sources;
                self.position.store(0, Ordering::Relaxed);
                return Some(ops);
            }
            if self.failed() {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    /// For the thread: which operation of the submission it starts.
    pub(super) fn advance(&self, position: usize) {
        // Read under the lock that `next` reset it under. A failure that reads an older position tells a source
        // whose operation was pending just before: as if it had come earlier.
        self.position.store(position, Ordering::Relaxed);
    }

    /// For the thread: the sources of the submission that it ran. A later failure does not concern them.
    pub(super) fn take_running(&self) -> Vec<Use> {
        mem::take(&mut self.state.lock().running)
    }

    /// For the thread: the submission is over.
    pub(super) fn retire(&self) {
        let mut state = self.state.lock();
        let completed = self.completed() + 1;
        self.completed.store(completed, Ordering::Release);
        let is_awaited = state.awaited.take_if(|count| *count <= completed).is_some();
        drop(state);
        if is_awaited {
            self.done.notify_all();
        }
    }

    /// For the thread: sleeps for `nap`, or until released.
    pub(super) fn nap(&self, nap: Duration) {
        let mut state = self.state.lock();
        if !self.released() {
            self.release.wait_for(&mut state, nap);
        }
    }

    /// For the thread, once the engine failed: sleeps until all sources are told.
    pub(super) fn await_release(&self) {
        let mut state = self.state.lock();
        while !self.released() {
            self.release.wait(&mut state);
        }
    }

    pub(super) fn fail(&self, error: Error) {
        let state = self.state.lock();
        if self.error.set(error.clone()).is_err() {
            return;
        }
        let position = self.position.load(Ordering::Relaxed);
        let running = state.running.iter().filter(|(last, _)| *last >= position);
        let queued = state.queue.iter().flat_map(|submission| &submission.sources);
        let mut sources: Vec<Arc<dyn Source>> = Vec::new();
        for (_, source) in running.chain(queued) {
            if !sources.iter().any(|known| Arc::ptr_eq(known, source)) {
                sources.push(source.clone());
            }
        }
        drop(state);
        tracing::debug!(stream = self.config.name, %error, "stream failed");
        for source in &sources {
            // Whatever happens here, the others must be told and the thread released.
            if catch_unwind(AssertUnwindSafe(|| source.fail(&error))).is_err() {
                tracing::error!(stream = self.config.name, ?source, "a source panicked while it was stopped");
            }
        }
        let state = self.state.lock();
        self.released.store(true, Ordering::Release);
        drop(state);
        self.release.notify_all();
        self.work.notify_all();
        self.done.notify_all();
    }
}
