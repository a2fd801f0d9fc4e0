//! The host engine: a thread that runs stream operations in order, without a GPU.
//!
//! [`HostEngine`] is the handle. [`Shared`] holds the queue, the counters and the failure. The thread owns no handle,
//! so dropping the last one ends it, after the pending work.
//!
//! No foreign code (sources, host functions, drops of what operations own) runs under the state lock, so all of it may
//! call back into the engine. Only [`Op::describe`] does, which calls nobody back.
//!
//! A failure has two steps. Once `error` is set, nothing is accepted and no operation starts. Once all sources are
//! stopped, `released` is set: then the thread leaves its wait and drops the rest.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use gdsync_device::Condvar;
use parking_lot::Mutex;

use super::cuda::SubmitGuard;
use super::engine::{Engine, Progress};
use super::execute::{Runner, execute, message_of};
use super::op::{Op, Ops, Source, Use, log_failure, sources_of, stop, to_stop};
use crate::verbs::writers::Writers;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::recorder::{By, Log};
use gdsync_shm::Backoff;

/// Configuration of a host stream.
///
/// A wait first spins, and meanwhile runs the device that it waits for: that of the queue, or those with a writable
/// region over the word. Then it sleeps. Completions wake it, and for a word what arrives for its software HCA. A plain
/// store wakes no thread, so sleeps and checks alternate: a wait notices a store of a CPU or a card late by an eighth of
/// the time waited (at least 20 us, at most 20 ms). An idle stream uses no CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStreamConfig {
    /// The stream's name in errors, and the suffix of its thread's name. No NUL. Empty, as by default, for its number.
    pub name: String,
    /// Maximum number of pending submissions, including the running one. At least 1.
    pub depth: usize,
    /// Time limit of a single wait, after which the stream fails. Not zero.
    pub wait_limit: Duration,
    /// Spin time of the thread, for a word or for the next submission, before it sleeps.
    pub spin: Duration,
}

impl Default for HostStreamConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            depth: 512,
            wait_limit: Duration::from_secs(30),
            spin: Duration::from_micros(50),
        }
    }
}

impl HostStreamConfig {
    fn check(&self) -> Result<()> {
        if self.name.contains('\0') {
            return Err(Error::invalid("stream name", format!("{:?}", self.name), "a name without NUL"));
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

/// Runs the operations of one stream on its own thread.
///
/// After the last handle is dropped, the thread finishes pending work and ends. The drop joins it if none is pending, or the
/// stream has failed, unless a host function drops the handle or is not over within [`PATIENCE`]. A panic that drops the handle
/// fails pending work.
pub(crate) struct HostEngine {
    fork_guard: ForkGuard,
    shared: Arc<Shared>,
    /// `Some` until the drop.
    thread: Option<JoinHandle<()>>,
}

impl HostEngine {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a bad configuration; [`Error::Sys`] when the thread cannot be created.
    pub(crate) fn start(config: HostStreamConfig) -> Result<Arc<Self>> {
        config.check()?;
        // The kernel keeps the first 15 bytes; Rust truncates.
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

    fn check_wait(&self) -> Result<()> {
        match self.thread.as_ref().is_some_and(|thread| thread.thread().id() == thread::current().id()) {
            false => Ok(()),
            true => Err(Error::Unsupported {
                what: "synchronizing a stream from a host function of this stream",
                by: "the stream, which would wait for itself",
                fix: "make the call on another thread",
            }),
        }
    }

    fn submit(&self, _guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        ops.iter().try_for_each(Op::check_on_cpu)?;
        self.shared.submit(ops)
    }

    fn record(&self, _guard: &mut SubmitGuard, ops: &[Op], _anew: &[bool]) -> Result<()> {
        self.fork_guard.check()?;
        ops.iter().try_for_each(Op::check_on_cpu)
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

    fn check_room(&self, _guard: &mut SubmitGuard, _ops: usize, _host_fns: usize) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.check_room()
    }

    /// A failed engine, or one of another process, has room: the next submission returns the error.
    fn wait_room(&self, deadline: Instant) -> bool {
        let shared = &self.shared;
        !self.fork_guard.is_here()
            || shared.block_until(
                deadline,
                || shared.failed() || shared.has_room(),
                || shared.completed() + 1,
            )
    }

    fn progress(&self) -> Arc<dyn Progress> {
        self.shared.clone()
    }

    fn holder(&self) -> Option<(String, Duration)> {
        let state = self.fork_guard.is_here().then(|| self.shared.state.lock())?;
        let (wait, since) = state.holder.as_ref()?;
        Some((wait.describe(), self.shared.config.wait_limit.saturating_sub(since.elapsed())))
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

impl Progress for Shared {
    fn completed(&self) -> u64 {
        self.completed()
    }

    fn is_done(&self, seq: u64) -> Result<bool> {
        match self.error() {
            Some(error) => Err(error),
            None => Ok(self.completed() >= seq),
        }
    }

    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        self.block_until(deadline, || self.completed() >= seq, || seq)
    }
}

impl Drop for HostEngine {
    fn drop(&mut self) {
        // A forked child has no such thread. Pending work stays allocated there.
        let Some(thread) = self.fork_guard.take_thread(&mut self.thread) else { return };
        if thread::panicking() {
            // What would satisfy its waits is probably being dropped too.
            self.shared.fail(Error::StreamAborted { stream: self.shared.config.name.clone() });
        }
        let is_over = self.shared.close();
        if is_over && thread.thread().id() != thread::current().id() {
            let shared = &self.shared;
            // A host function of a failed stream may wait for what the caller drops next.
            let is_done = || shared.completed() >= shared.submitted();
            if shared.block_until(Instant::now() + PATIENCE, is_done, || shared.submitted()) {
                // The thread catches panics. One that escapes cannot be reported here.
                let _ = thread.join();
            } else {
                tracing::error!(
                    stream = shared.config.name,
                    "a host function of a dropped stream still runs"
                );
            }
        }
    }
}

/// How long a drop waits for a host function of a failed stream.
const PATIENCE: Duration = Duration::from_secs(5);

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

/// Spin time of a caller, for a completion or for room, before it sleeps: longer than a short submission.
const CALLER_SPIN: Duration = Duration::from_micros(10);

/// What the last wait ran the device of.
enum Helped {
    Queue(Arc<dyn Source>),
    /// The word at this address.
    Word(u64),
}

struct Submission {
    ops: Ops,
    sources: Vec<Use>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Submission>,
    /// The smallest completion count that a sleeping caller waits for. Lower counts do not wake callers.
    awaited: Option<u64>,
    /// The sources of the running submission: a failure must stop them too.
    running: Vec<Use>,
    /// A copy of the wait that holds the stream, and since when.
    holder: Option<(Op, Instant)>,
}

struct Shared {
    config: HostStreamConfig,
    log: Log,
    state: Mutex<State>,
    /// Wakes the idle thread.
    work: Condvar,
    /// Wakes the thread from a sleep in a wait.
    release: Condvar,
    /// Wakes callers that wait for completions or room.
    done: Condvar,
    // All of these change only under the lock, except `position`.
    submitted: AtomicU64,
    completed: AtomicU64,
    error: OnceLock<Error>,
    released: AtomicBool,
    /// The last handle is gone.
    closing: AtomicBool,
    /// Index of the running operation.
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
            closing: AtomicBool::new(false),
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

    /// Whether the thread ends once the queue is empty.
    fn is_ending(&self) -> bool {
        self.failed() || self.closing.load(Ordering::Acquire)
    }

    /// Lets the thread end after the pending work. Returns whether it ends now.
    fn close(&self) -> bool {
        let state = self.state.lock();
        self.closing.store(true, Ordering::Release);
        let is_over = self.failed() || self.completed() == self.submitted();
        drop(state);
        self.work.notify_one();
        is_over
    }

    fn has_room(&self) -> bool {
        // `completed` first: a submission that completes in between must not make the difference negative.
        let completed = self.completed();
        self.submitted() - completed < self.config.depth as u64
    }

    /// Checks that a submission would be accepted.
    fn check_room(&self) -> Result<()> {
        match self.error() {
            Some(error) => Err(error),
            None if self.has_room() => Ok(()),
            None => Err(Error::StreamFull { stream: self.config.name.clone(), depth: self.config.depth }),
        }
    }

    fn submit(&self, ops: &mut Ops) -> Result<u64> {
        let sources = sources_of(&*ops);
        let mut state = self.state.lock();
        self.check_room()?;
        state.queue.push_back(Submission { ops: mem::take(ops), sources });
        let seq = self.submitted() + 1;
        self.submitted.store(seq, Ordering::Release);
        drop(state);
        self.work.notify_one();
        Ok(seq)
    }

    /// Blocks a caller until `done`, which must depend only on the counters and the error, or until the deadline.
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

    /// The sleeping half of [`Shared::block_until`].
    fn sleep_until(&self, deadline: Instant, done: impl Fn() -> bool, count: impl Fn() -> u64) -> bool {
        let mut state = self.state.lock();
        while !done() {
            state.awaited = Some(state.awaited.map_or(count(), |other| other.min(count())));
            if self.done.wait_until(&mut state, deadline) {
                return done();
            }
        }
        true
    }

    /// The next submission, for the thread. Call [`Shared::retire`] after running or dropping it. `None`: the engine is
    /// finished.
    fn next(&self) -> Option<Ops> {
        let backoff = Backoff::new(self.config.spin);
        while self.submitted() == self.completed() && !self.is_ending() && backoff.spin() {}
        let mut state = self.state.lock();
        loop {
            if let Some(Submission { ops, sources }) = state.queue.pop_front() {
                state.running = sources;
                self.position.store(0, Ordering::Relaxed);
                return Some(ops);
            }
            if self.is_ending() {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    /// Records which operation the thread starts.
    fn advance(&self, position: usize) {
        // `fail` reads it under the lock. An older value only makes a source whose operation has just ended count as
        // pending.
        self.position.store(position, Ordering::Relaxed);
    }

    /// Takes the sources of the submission that has run. A later failure does not affect them.
    fn take_running(&self) -> Vec<Use> {
        mem::take(&mut self.state.lock().running)
    }

    /// Counts the submission as completed.
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

    /// Sleeps for `time`, or until released.
    fn sleep(&self, time: Duration) {
        let mut state = self.state.lock();
        if !self.released() {
            self.release.wait_for(&mut state, time);
        }
    }

    /// Sleeps until all sources are stopped, after a failure.
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
        let sources = to_stop(running.chain(queued).map(|(_, source)| source.clone()));
        drop(state);
        log_failure(&self.config.name, self.closing.load(Ordering::Acquire), &error);
        stop(&self.config.name, sources, &error);
        let state = self.state.lock();
        self.released.store(true, Ordering::Release);
        drop(state);
        self.release.notify_all();
        self.work.notify_all();
        self.done.notify_all();
    }
}

impl Shared {
    /// The main loop of the thread: until the last handle is gone or the engine has failed, and no work is pending.
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

    /// Runs device work that a wait deferred, unless a doorbell follows and does it.
    fn finish(&self, helped: &mut Option<Helped>) {
        match helped.take() {
            Some(Helped::Queue(source)) => self.guarded(|| source.finish()),
            Some(Helped::Word(addr)) => self.guarded(|| _ = Writers::of(addr).progress()),
            None => {}
        }
    }

    /// Runs a submission, and drops the rest of it when the engine fails.
    fn run(&self, ops: Ops, helped: &mut Option<Helped>) {
        let mut ops = ops.into_iter().enumerate();
        while !self.failed()
            && let Some((position, op)) = ops.next()
        {
            self.advance(position);
            let next = match &op {
                Op::Await(source, _) => Some(Helped::Queue(source.clone())),
                Op::Wait32 { at, .. } => Some(Helped::Word(at.addr())),
                Op::Wait64 { at, .. } => Some(Helped::Word(at.addr())),
                _ => None,
            };
            match &op {
                Op::HostFn(_) | Op::Wait32 { .. } | Op::Wait64 { .. } => self.finish(helped),
                Op::Trigger(..) | Op::PostRecv { .. } => *helped = None,
                _ => {}
            }
            self.guarded(|| self.step(op));
            *helped = next.or(helped.take());
        }
        // Taken before the check: an earlier failure that stops these sources is seen here, a later one does not find
        // them.
        let sources = self.take_running();
        if self.failed() {
            self.await_release();
        }
        self.guarded(|| drop(ops));
        self.guarded(|| drop(sources));
    }

    /// Calls foreign code. A panic in it fails the engine, but does not end the thread.
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

    fn sleep(&self, time: Duration) {
        self.sleep(time);
    }

    fn note_holder(&self, wait: Option<(&Op, Instant)>) {
        // Waits can be copied. The operation outlives its copy, which must not keep a queue pair from a reset.
        self.state.lock().holder = wait.and_then(|(op, since)| Some((op.again()?, since)));
    }
}
