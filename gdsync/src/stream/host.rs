//! The host engine: a thread that runs stream operations in order, where there is no GPU to do it.
//!
//! [`HostEngine`] is the handle; `shared` is what handle and thread have in common (the queue, the counters,
//! the failure); `worker` is the thread. The thread owns no handle, so dropping the last one ends it.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use parking_lot::{Condvar, Mutex};

use super::cuda::SubmitGuard;
use super::engine::Engine;
use super::execute::{Runner, execute, message_of};
use super::op::{Op, Ops, Source, Use, sources_of};
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::recorder::{By, Log};
use gdsync_shm::Backoff;

/// How a stream that runs on a host thread behaves.
///
/// A wait first spins. One for a completion of our queues then sleeps until the queue wakes it. One for any other
/// word, to which a plain store wakes nobody, sleeps and looks in turns: it notices a store late by an eighth of the
/// time the store took to come (at least 20 us, at most 20 ms). An idle stream uses no CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStreamConfig {
    /// The stream's name in errors, and the end of its thread's name. Not empty, no NUL.
    pub name: String,
    /// How many submissions may be pending, the one that runs included. At least 1.
    pub depth: usize,
    /// How long a single wait may hold the stream before the stream fails. Not zero.
    pub wait_limit: Duration,
    /// How long the thread spins, for a word or for the next submission, before it sleeps.
    pub spin: Duration,
}

impl Default for HostStreamConfig {
    fn default() -> Self {
        Self {
            name: "stream".to_owned(),
            depth: 512,
            wait_limit: Duration::from_secs(30),
            spin: Duration::from_micros(50),
        }
    }
}

impl HostStreamConfig {
    fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.contains('\0') {
            return Err(Error::invalid(
                "stream name",
                format!("{:?}", self.name),
                "a non-empty name without NUL",
            ));
        }
        if self.depth == 0 {
            return Err(Error::invalid("stream depth", self.depth, "at least 1 submission"));
        }
        if self.wait_limit.is_zero() {
            return Err(Error::invalid("stream wait limit", "0", "a duration above 0"));
        }
        Ok(())
    }
}

/// A stream of operations on a thread of its own.
///
/// Dropping the last handle fails what is pending with [`Error::StreamAborted`] and joins the thread, which
/// ends after the host function it may be running. Dropped by that very host function, it is left to end.
pub(crate) struct HostEngine {
    fork_guard: ForkGuard,
    shared: Arc<Shared>,
    /// Always there until the drop.
    thread: Option<JoinHandle<()>>,
}

impl HostEngine {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a config that its fields forbid, [`Error::Sys`] when the system has no
    /// thread to give.
    pub(crate) fn start(config: HostStreamConfig) -> Result<Arc<Self>> {
        config.check()?;
        // The kernel shows the first 15 bytes of it; Rust cuts them.
        let name = format!("gdsync-stream-{}", config.name);
        let shared = Arc::new(Shared::new(config, Log::open()?));
        let worker = shared.clone();
        let thread = thread::Builder::new().name(name).spawn(move || worker.work()).map_err(|e| {
            Error::os("pthread_create", e, "raise the thread limit (ulimit -u) or use fewer streams")
        })?;
        Ok(Arc::new(Self { fork_guard: ForkGuard::default(), shared, thread: Some(thread) }))
    }
}

impl Engine for HostEngine {
    fn signals(&self) -> bool {
        true
    }

    fn kind(&self) -> &'static str {
        "host"
    }

    fn submit(&self, _guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        ops.iter().try_for_each(Op::check)?;
        self.shared.submit(ops)
    }

    fn record(&self, _guard: &mut SubmitGuard, ops: &[Op]) -> Result<()> {
        self.fork_guard.check()?;
        ops.iter().try_for_each(Op::check)
    }

    fn completed(&self) -> u64 {
        self.shared.completed()
    }

    fn submitted(&self) -> u64 {
        self.shared.submitted()
    }

    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        !self.fork_guard.is_here()
            || self.shared.block_until(deadline, || self.shared.completed() >= seq, || seq)
    }

    fn ask_room(&self, _guard: &mut SubmitGuard, _ops: usize, _host_fns: usize) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.ask_room()
    }

    /// A failed engine, or that of another process, has room: the submission that tries it learns the error.
    fn wait_room(&self, deadline: Instant) -> bool {
        let shared = &self.shared;
        !self.fork_guard.is_here()
            || shared.block_until(
                deadline,
                || shared.failed() || shared.has_room(),
                || shared.completed() + 1,
            )
    }

    fn fail(&self, error: Error) {
        if self.fork_guard.is_here() {
            self.shared.fail(error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.fork_guard.check().err().or_else(|| self.shared.error())
    }
}

impl Drop for HostEngine {
    fn drop(&mut self) {
        // The thread is not in a forked child, where its hold on what is pending stays.
        let Some(thread) = self.fork_guard.take_thread(&mut self.thread) else { return };
        self.shared.fail(Error::StreamAborted { stream: self.shared.config.name.clone() });
        if thread.thread().id() != thread::current().id() {
            // The thread catches panics; should one escape, there is nobody to tell.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for HostEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEngine")
            .field("name", &self.shared.config.name)
            .field("submitted", &self.submitted())
            .field("completed", &self.completed())
            .field("error", &self.error())
            .finish()
    }
}

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

struct Shared {
    config: HostStreamConfig,
    log: Log,
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
    fn new(config: HostStreamConfig, log: Log) -> Self {
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

    fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    fn failed(&self) -> bool {
        self.error.get().is_some()
    }

    fn released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    fn has_room(&self) -> bool {
        // In this order: a submission that completes in between must not look like room for minus one.
        let completed = self.completed();
        self.submitted() - completed < self.config.depth as u64
    }

    /// Refuses what a submission would be refused for.
    fn ask_room(&self) -> Result<()> {
        match self.error() {
            Some(error) => Err(error),
            None if self.has_room() => Ok(()),
            None => Err(Error::StreamFull { stream: self.config.name.clone(), depth: self.config.depth }),
        }
    }

    fn submit(&self, ops: &mut Ops) -> Result<u64> {
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
    fn block_until(&self, deadline: Instant, done: impl Fn() -> bool, count: impl Fn() -> u64) -> bool {
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
    fn next(&self) -> Option<Ops> {
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
    fn advance(&self, position: usize) {
        // Read under the lock that `next` reset it under. A failure that reads an older position tells a source
        // whose operation was pending just before: as if it had come earlier.
        self.position.store(position, Ordering::Relaxed);
    }

    /// For the thread: the sources of the submission that it ran. A later failure does not concern them.
    fn take_running(&self) -> Vec<Use> {
        mem::take(&mut self.state.lock().running)
    }

    /// For the thread: the submission is over.
    fn retire(&self) {
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
    fn nap(&self, nap: Duration) {
        let mut state = self.state.lock();
        if !self.released() {
            self.release.wait_for(&mut state, nap);
        }
    }

    /// For the thread, once the engine failed: sleeps until all sources are told.
    fn await_release(&self) {
        let mut state = self.state.lock();
        while !self.released() {
            self.release.wait(&mut state);
        }
    }

    fn fail(&self, error: Error) {
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

impl Shared {
    /// The life of the thread: until the engine failed and all that was pending is dropped.
    fn work(&self) {
        let mut helped = None;
        while let Some(ops) = self.next() {
            self.run(ops, &mut helped);
            if self.completed() + 1 == self.submitted() {
                self.finish(&mut helped);
            }
            self.retire();
        }
    }

    /// A doorbell after a wait does what the device put off; where none comes soon, this does.
    fn finish(&self, helped: &mut Option<Arc<dyn Source>>) {
        if let Some(source) = helped.take() {
            self.guarded(|| source.finish());
        }
    }

    /// Runs a submission, and drops what is left of it when the engine fails.
    fn run(&self, ops: Ops, helped: &mut Option<Arc<dyn Source>>) {
        let mut ops = ops.into_iter().enumerate();
        while !self.failed()
            && let Some((position, op)) = ops.next()
        {
            self.advance(position);
            let source = match &op {
                Op::Await(source, _) => Some(source.clone()),
                Op::HostFn(_) | Op::Wait32 { .. } | Op::Wait64 { .. } => {
                    self.finish(helped);
                    None
                }
                Op::Trigger(..) => {
                    *helped = None;
                    None
                }
                _ => None,
            };
            self.guarded(|| self.step(op));
            *helped = source.or(helped.take());
        }
        // In this order: a failure that found these sources is seen, and one that comes later finds none.
        let sources = self.take_running();
        if self.failed() {
            self.await_release();
        }
        self.guarded(|| drop(ops));
        self.guarded(|| drop(sources));
    }

    /// Calls foreign code. A panic in it fails the engine, but does not end the thread, which others wait for.
    fn guarded(&self, f: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(f)) {
            let message = message_of(panic.as_ref());
            self.fail(Error::HostFnPanicked { stream: self.config.name.clone(), message });
        }
    }

    fn step(&self, op: Op) {
        if let Err(unsatisfied) = execute(op, self) {
            self.fail(unsatisfied.error(&self.config.name, self.config.wait_limit));
        }
    }
}

impl Runner for Shared {
    fn failed(&self) -> bool {
        self.failed()
    }

    fn released(&self) -> bool {
        self.released()
    }

    fn left(&self, waited: Duration) -> Duration {
        self.config.wait_limit.saturating_sub(waited)
    }

    fn log(&self) -> (&Log, By) {
        (&self.log, By::HostStream)
    }

    fn spin(&self) -> Duration {
        self.config.spin
    }

    fn nap(&self, nap: Duration) {
        self.nap(nap);
    }
}
