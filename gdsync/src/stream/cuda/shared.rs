//! The state of a CUDA engine, shared by handle and watchdog: queue, counters, failure, waiting callers, host
//! functions.
//!
//! The CPU learns the GPU's progress from a word that the stream writes now and then: a *mark* with the submission's
//! number. Marks are written every few submissions, when a caller waits, and when the stream falls idle, so most
//! submissions do not pay for one.
//!
//! There are two locks. The *submit lock* ([`SubmitLock`]) is held while calling the driver for the stream, and may be
//! held for long: a thread that frees memory, for example, can block all others in the driver until every stream of the
//! process is done. So deadline keeping never takes the submit lock; its data is in the *state*, whose lock is held
//! only briefly. No foreign code (the driver, host functions, drops of what operations own)
//! runs under the state lock. Non-blocking calls to sources (query, release, wake) do.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use gdrcopy::cuda::raw::Api;
use gdsync_device::Condvar;
use parking_lot::{Mutex, MutexGuard};

use super::graph::{self, Captured};
use super::instance::{Instance, Pool};
use super::nudger::Nudger;
use super::plan::{self, ByKernel, Calls, EngineCopy};
use super::watchdog::{WaitIndex, is_inconclusive};
use super::{CudaStreamConfig, Nudge, PER_THREAD, Via};
use crate::stream::engine::Progress;
use crate::stream::execute::message_of;
use crate::stream::op::{Kept, Op, Ops, Queued, log_failure, merged, sources_of, stop, to_stop};
use crate::stream::{ReentrancyCheck, SubmitLock};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::kernel_exec::{Head, KernelExecutor, KernelOp, StatusBlock};
use gdsync_device::cuda::{Activity, DriverTask, Gpu, Joined, RawStream, gate};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Word64;
use gdsync_device::recorder::{By, Log};
use gdsync_shm::{Backoff, sleep_time};

/// Calls between two marks.
pub(super) const MARK_EVERY: usize = 16;
/// Maximum number of pending host functions. A hardware channel takes 55 with other work between them, then the driver
/// blocks all callers; two streams may share a channel.
const MAX_HOST_FNS: usize = 24;
/// Maximum calls of one submission, out of 1,020 that a channel takes.
const MAX_CALLS: usize = 512;
/// Both limits, as error text.
const LIMITS: &str = "at most 512 calls, and 24 host functions";
/// From this CUDA version on, the driver takes memory operations and launches for a created stream from a thread with
/// any or no current context. Verified with 13.0.
const ANYWHERE: i32 = 13_000;

pub(super) struct Shared {
    pub(super) config: CudaStreamConfig,
    pub(super) log: Log,
    pub(super) gpu: Gpu,
    pub(super) stream: RawStream,
    owned: bool,
    /// Whether memory operations and launches on the stream need its context to be current.
    needs_context: bool,
    /// Whether the application has the stream's handle, and may be capturing it.
    handle_exposed: AtomicBool,
    /// `None` on streams of memory operations if the kernels are not there.
    pub(super) kernel_exec: Option<Arc<KernelExecutor>>,
    pub(super) by_kernel: ByKernel,
    pub(super) nudger: Option<Arc<dyn GpuNudge>>,
    pub(super) status: StatusBlock,
    /// The header of all kernel programs.
    head: Head,
    /// The mark, and the mark written by kernels after the stream failed.
    mark: Word64,
    mark_after: Word64,
    /// The GPU address of `mark`.
    mark_addr: u64,
    pub(super) submit_lock: Arc<SubmitLock>,
    state: Mutex<State>,
    /// Wakes the watchdog: work, a failure, or the end.
    pub(super) work: Condvar,
    pub(super) submitted: AtomicU64,
    /// Submissions up to this one are over according to CUDA, without a mark.
    pub(super) ended: AtomicU64,
    error: OnceLock<Error>,
    /// All sources are stopped: waits may be released by force.
    pub(super) released: AtomicBool,
    pub(super) closing: AtomicBool,
    /// The application may destroy its stream: no call of the driver for it.
    pub(super) is_given_back: AtomicBool,
    /// Number of [`CompletedSubmissions`] being dropped.
    pub(super) dropping: AtomicUsize,
    pub(super) own: Weak<Shared>,
}

/// State guarded by the submit lock.
#[derive(Debug, Default)]
pub(crate) struct SubmitGuard {
    /// Calls since the last mark, and the last marked submission.
    pub(super) unmarked: usize,
    pub(super) marked: u64,
    /// Set while the stream is being captured.
    pub(super) capture: Option<Captured>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) queue: VecDeque<Submission>,
    /// The last submission that found the queue empty, and when, until the watchdog reads it: its first wait has held
    /// the stream since then.
    pub(super) begun: Option<(u64, Instant)>,
    /// The wait that holds the stream, and since when, as the watchdog has seen it last.
    pub(super) held: Option<(WaitIndex, Instant)>,
    /// Pending calls and host functions.
    pub(super) calls: usize,
    pub(super) host_fns: usize,
    /// Calls and host functions of the last submission refused for lack of room.
    pub(super) wanted: (usize, usize),
    /// The pool of the last launch refused for lack of a free instance.
    pub(super) wanted_pool: Option<Weak<Pool>>,
    /// Set if the driver refused a mark or the stream died: no more marks are attempted.
    pub(super) refused: Option<Error>,
    /// Whether a driver task should query the stream, and whether one is scheduled.
    pub(super) query: bool,
    pub(super) asking: bool,
    /// Whether the watchdog sleeps until there is work.
    pub(super) asleep: bool,
}

/// A submission that the GPU is not known to have completed. It keeps alive everything that the GPU may access.
pub(super) struct Submission {
    pub(super) seq: u64,
    pub(super) ops: Ops,
    pub(super) calls: usize,
    pub(super) host_fns: usize,
    /// The instance that it launches, and the operations of the graph.
    pub(super) launched: Option<(Arc<Instance>, Kept)>,
}

impl Submission {
    /// All operations, in order.
    pub(super) fn all(&self) -> impl Iterator<Item = Queued<'_>> {
        merged(self.launched.as_ref().map(|(_, kept)| kept), &self.ops)
    }
}

impl Shared {
    pub(super) fn new(
        gpu: &Gpu,
        (stream, owned): (RawStream, bool),
        config: CudaStreamConfig,
        submit_lock: Arc<SubmitLock>,
    ) -> Result<Arc<Self>> {
        let via = match config.via {
            Via::Auto => super::calibrate(gpu)?.via,
            chosen => chosen,
        };
        let needs_kernels = via == Via::Kernel || config.copies == Via::Kernel;
        let kernel_exec = if needs_kernels { Some(gpu.kernel_exec()?) } else { gpu.kernel_exec().ok() };
        let copies = config.copies != Via::MemOp && kernel_exec.is_some();
        let by_kernel = ByKernel { ops: via == Via::Kernel, copies };
        let nudges = match config.nudge {
            Nudge::Auto => !by_kernel.ops,
            chosen => chosen == Nudge::On,
        };
        let nudger = if nudges { Some(Nudger::of(gpu)? as Arc<dyn GpuNudge>) } else { None };
        let status = StatusBlock::new(gpu)?;
        let limit_ns = u64::try_from(config.wait_limit.as_nanos()).unwrap_or(u64::MAX);
        let head = Head { status: status.addr(), limit_ns, submission: 0, count: 0 };
        let marks = gpu.alloc_host_piece(16)?;
        let (mark, mark_after, mark_addr) = (marks.word64(0)?, marks.word64(8)?, marks.gpu_addr(gpu)?);
        let (log, is_given_back) = (Log::open()?, config.may_be_destroyed);
        Ok(Arc::new_cyclic(|own| Self {
            handle_exposed: (!owned && config.captured_by_others).into(),
            config,
            log,
            gpu: gpu.clone(),
            stream,
            owned,
            needs_context: stream <= PER_THREAD || gpu.capabilities().driver_version < ANYWHERE,
            kernel_exec,
            by_kernel,
            nudger,
            status,
            head,
            mark,
            mark_after,
            mark_addr,
            submit_lock,
            state: Mutex::default(),
            work: Condvar::new(),
            submitted: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            error: OnceLock::new(),
            released: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            is_given_back: is_given_back.into(),
            dropping: AtomicUsize::new(0),
            own: own.clone(),
        }))
    }

    #[inline]
    pub(super) fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// The number of completed submissions, by the last mark or CUDA.
    pub(super) fn completed(&self) -> u64 {
        let mark = self.mark.load().max(self.ended.load(Ordering::Acquire));
        // Until `released`, the reason why kernels stopped early may be unknown.
        if self.released.load(Ordering::Acquire) { mark.max(self.mark_after.load()) } else { mark }
    }

    pub(super) fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    #[inline]
    pub(super) fn failed(&self) -> bool {
        self.error.get().is_some()
    }

    /// The error of a failed stream.
    pub(super) fn why_failed(&self) -> Error {
        self.error().unwrap_or_else(|| Error::StreamAborted { stream: self.config.name.clone() })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn full(&self, state: &State, calls: usize, host_fns: usize) -> bool {
        let fits = |pending, more, limit| pending == 0 || pending + more <= limit;
        !(fits(state.calls, calls, self.config.depth) && fits(state.host_fns, host_fns, MAX_HOST_FNS))
    }

    pub(super) fn submit(&self, guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.mark_before_registering(guard, ops);
        let mut calls = Calls::new(self.by_kernel);
        calls.add(&self.gpu, ops, &[])?;
        let seq = self.submitted() + 1;
        let marks = self.config.may_be_destroyed || guard.unmarked + 1 >= MARK_EVERY;
        if marks {
            calls.mark(self.mark_of(seq));
        }
        let (count, host_fns) = calls.count();
        let mut done = CompletedSubmissions::nothing();
        let _joined = self.begin(guard, self.needs_context || calls.need_context())?;
        if host_fns > MAX_HOST_FNS || count > MAX_CALLS {
            let value = format!("{count} calls into the driver, {host_fns} of them for host functions");
            return Err(Error::invalid("batch", value, LIMITS));
        }
        self.enqueue(guard, &mut done, (count, host_fns), (ops, None))?;
        guard.unmarked = if marks { 0 } else { guard.unmarked + count };
        guard.marked = if marks { seq } else { guard.marked };
        let host_fn = |place| self.launch_host_fn(seq, place);
        let answer = calls.make(|ops| self.run(seq, ops, true), host_fn, |copy| self.copy(copy));
        Ok(self.issued(seq, answer))
    }

    /// Registering memory with CUDA may have to wait until all streams are known to be idle. Marks this stream first:
    /// no other thread can while this one holds the submit lock.
    #[inline]
    pub(super) fn mark_before_registering(&self, guard: &mut SubmitGuard, ops: &[Op]) {
        if !ops.iter().all(Op::is_found) {
            self.mark_locked(guard);
        }
    }

    /// Makes the context current, if the calls need it. Refused if the stream has failed or the application captures it.
    pub(super) fn begin(&self, guard: &SubmitGuard, needs_context: bool) -> Result<Option<Joined<'_>>> {
        if self.failed() {
            return Err(self.why_failed());
        }
        let join = || self.gpu.join().map_err(Error::cuda("entering the context"));
        let joined = needs_context.then(join).transpose()?;
        if self.is_captured_by_others(guard) {
            return Err(graph::within_another());
        }
        Ok(joined)
    }

    /// Handles the driver's answer to submission `seq`. If refused, it may have been queued partially, so it counts as
    /// submitted.
    pub(super) fn issued(&self, seq: u64, answer: gdrcopy::Result<()>) -> u64 {
        if let Err(error) = answer {
            self.fail(Error::cuda("submitting to the stream")(error));
        }
        seq
    }

    /// Records that the application gets the stream's handle.
    pub(super) fn expose_handle(&self) {
        self.handle_exposed.fetch_or(self.config.captured_by_others, Ordering::Relaxed);
    }

    /// Whether the application is capturing the stream, so that new work would not run. The context must be current, if
    /// the driver requires it.
    #[inline]
    pub(super) fn is_captured_by_others(&self, guard: &SubmitGuard) -> bool {
        let may_be = self.handle_exposed.load(Ordering::Relaxed) && guard.capture.is_none();
        may_be && self.is_captured().unwrap_or_else(|error| is_inconclusive(&error))
    }

    /// Queues a submission before it is issued, unless there is no room: the watchdog must see it while the driver
    /// takes it. Its number is the next one. Takes `ops` if it succeeds.
    #[inline]
    pub(super) fn enqueue<'s>(
        &'s self,
        guard: &mut SubmitGuard,
        done: &mut CompletedSubmissions<'s>,
        (calls, host_fns): (usize, usize),
        (ops, launched): (&mut Ops, Option<(Arc<Instance>, Kept)>),
    ) -> Result<()> {
        let mut state = self.lock();
        // Checked under the lock, which the reaper takes after closing the gate: either the reaper sees the submission,
        // or the gate is seen closed here. Waiting at the gate must precede the queueing, because the watchdog would
        // count it as wait time.
        let mut _held_up = None;
        if gate::is_closed() {
            drop(state);
            _held_up = Some(gate::wait());
            state = self.lock();
        }
        // `fail` sets the error first and then reads the queue under this lock: nothing is queued unseen.
        if let Some(error) = self.error.get() {
            return Err(error.clone());
        }
        let is_full = self.full(&state, calls, host_fns);
        // Sometimes on this thread, which has the reference counts cached; otherwise the watchdog does it.
        if is_full || guard.unmarked == 0 {
            *done = self.retire(&mut state);
        }
        if is_full && self.full(&state, calls, host_fns) {
            return Err(self.no_room(guard, state, (calls, host_fns)));
        }
        let seq = self.submitted() + 1;
        self.submitted.store(seq, Ordering::Release);
        state.calls += calls;
        state.host_fns += host_fns;
        if state.queue.is_empty() {
            state.begun = Some((seq, Instant::now()));
        }
        state.queue.push_back(Submission { seq, ops: mem::take(ops), calls, host_fns, launched });
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.work.notify_one();
        }
        Ok(())
    }

    /// Records the refused calls and host functions for [`Shared::has_room`]. Returns the error.
    #[cold]
    pub(super) fn no_room(
        &self,
        guard: &mut SubmitGuard,
        mut state: MutexGuard<'_, State>,
        wanted: (usize, usize),
    ) -> Error {
        (state.wanted, state.wanted_pool) = (wanted, None);
        drop(state);
        self.is_full(guard)
    }

    /// Marks the stream, so that new room is noticed. Returns the error.
    fn is_full(&self, guard: &mut SubmitGuard) -> Error {
        self.mark_locked(guard);
        Error::StreamFull { stream: self.config.name.clone(), depth: self.config.depth }
    }

    /// A free instance of the pool.
    pub(super) fn instance(
        &self,
        guard: &mut SubmitGuard,
        pool: &Arc<Pool>,
        (head, numbers): (&Head, &[u64]),
    ) -> Result<Arc<Instance>> {
        if let Some(free) = pool.free(head, numbers) {
            return Ok(free);
        }
        let mut state = self.lock();
        let done = self.retire(&mut state);
        (state.wanted, state.wanted_pool) = ((0, 0), Some(Arc::downgrade(pool)));
        drop(state);
        drop(done);
        pool.free(head, numbers).ok_or_else(|| self.is_full(guard))
    }

    /// The mark of a submission.
    pub(super) fn mark_of(&self, seq: u64) -> KernelOp {
        KernelOp::mark(self.mark_addr, seq)
    }

    /// The kernel header of a submission.
    pub(super) fn head(&self, submission: u64) -> Head {
        Head { submission, ..self.head }
    }

    /// Queues operations by one call. The context must be current. `follows`: see [`KernelExecutor::launch`].
    pub(super) fn run(&self, seq: u64, ops: &[KernelOp], follows: bool) -> gdrcopy::Result<()> {
        let api = self.gpu.api();
        let runs_by_kernel = plan::runs_by_kernel(ops, self.by_kernel.ops);
        if let Some(kernel_exec) = self.kernel_exec.as_ref().filter(|_| runs_by_kernel) {
            return kernel_exec.launch(api, self.stream, self.head(seq), ops, follows);
        }
        plan::with_memops(ops, |count, memops| {
            // SAFETY: there are `count` operations. Their words are mapped for the GPU, and the submission keeps them
            // alive.
            unsafe { api.stream_batch_mem_op(self.stream, count, memops, 0) }
        })
    }

    /// Queues a copy. The context must be current.
    pub(super) fn copy(&self, EngineCopy { to, from, len }: EngineCopy) -> gdrcopy::Result<()> {
        // SAFETY: both ranges were checked, and are mapped for the GPU; the submission, or the graph, keeps their memory.
        unsafe { self.gpu.api().memcpy_async(to, from, len, self.stream) }
    }

    #[cold]
    fn launch_host_fn(&self, seq: u64, place: usize) -> gdrcopy::Result<()> {
        let f = self.take_host_fn(seq, place);
        f.map_or(Ok(()), |f| queue_host_fn(self.gpu.api(), self.stream, f, self.own.clone()))
    }

    /// Takes a host function out of the queued submission.
    fn take_host_fn(&self, seq: u64, place: usize) -> Option<Box<dyn FnOnce() + Send>> {
        let mut state = self.lock();
        let submission = state.queue.back_mut().filter(|last| last.seq == seq)?;
        match mem::replace(&mut submission.ops[place], Op::Barrier) {
            Op::HostFn(f) => Some(f.into_inner()),
            other => {
                submission.ops[place] = other;
                None
            }
        }
    }

    /// Marks all that was submitted, unless marked; if the submit lock is taken, its holder does.
    pub(super) fn put_mark(&self) {
        if in_host_fn() {
            return;
        }
        self.submit_lock.request(|state| self.mark_locked(&mut state.guard));
    }

    /// Writes the mark, as one more call of the last submission.
    pub(super) fn mark_locked(&self, guard: &mut SubmitGuard) {
        let seq = self.submitted();
        if guard.marked == seq || self.lock().refused.is_some() {
            return;
        }
        if let Err(error) = self.gpu.within(|_| self.mark_now(guard, seq)) {
            // The watchdog then fails the stream.
            self.lock().refused = Some(Error::cuda("marking the stream")(error));
            self.work.notify_one();
        }
    }

    fn mark_now(&self, guard: &mut SubmitGuard, seq: u64) -> gdrcopy::Result<()> {
        if self.is_captured_by_others(guard) {
            return Ok(());
        }
        (guard.marked, guard.unmarked) = (seq, 0);
        {
            let mut state = self.lock();
            if let Some(last) = state.queue.back_mut() {
                last.calls += 1;
                state.calls += 1;
            }
        }
        self.run(seq, &[self.mark_of(seq)], true)
    }

    /// Fails the stream: stops every queue with pending operations, then lets the watchdog release the waits.
    pub(super) fn fail(&self, error: Error) {
        if self.error.set(error.clone()).is_err() {
            return;
        }
        log_failure(&self.config.name, self.closing.load(Ordering::Acquire), &error);
        // Before the kernels are told: then they end, and what they leave undone would count as completed.
        let completed = self.completed();
        let sources = {
            let state = self.lock();
            let pending = state.queue.iter().filter(|submission| submission.seq > completed);
            to_stop(pending.flat_map(|submission| sources_of(submission.all())).map(|(_, source)| source))
        };
        self.status.fail();
        stop(&self.config.name, sources, &error);
        self.released.store(true, Ordering::Release);
        self.work.notify_one();
    }

    /// Whether kernels run the operations. Kernels keep deadlines themselves.
    pub(super) fn by_kernel(&self) -> bool {
        self.by_kernel.ops
    }

    /// Destroys the stream, if it is ours. CUDA finishes what it still runs.
    pub(super) fn destroy(&self) {
        let driver_task: Weak<dyn DriverTask> = self.own.clone();
        self.gpu.end_driver_task(&driver_task);
        if !self.owned {
            return;
        }
        let done = self.gpu.enter().and_then(|_current| {
            // SAFETY: created for this engine and destroyed once.
            unsafe { self.gpu.api().stream_destroy(self.stream) }.map_err(Error::cuda("destroying a stream"))
        });
        if let Err(error) = done {
            tracing::debug!(stream = self.config.name, %error, "stream not destroyed");
        }
    }
}

impl Progress for Shared {
    fn completed(&self) -> u64 {
        self.completed()
    }

    fn is_done(&self, seq: u64) -> Result<bool> {
        match self.error() {
            // Kernels mark only what they have done.
            Some(error) if !self.by_kernel.ops || self.mark.load() < seq => Err(error),
            _ => Ok(self.completed() >= seq),
        }
    }

    fn ask(&self) {
        self.put_mark();
    }

    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        self.wait_completed(seq, deadline)
    }

    fn word(&self) -> Option<&Word64> {
        Some(&self.mark)
    }
}

impl Activity for Shared {
    fn idle_since(&self) -> Option<u64> {
        // Locked: see `Shared::enqueue`.
        let _state = self.lock();
        let submitted = self.submitted();
        (self.completed() >= submitted).then_some(submitted)
    }
}

/// Completed submissions, to be dropped without the state lock.
#[must_use = "to be dropped without the lock"]
pub(super) struct CompletedSubmissions<'s> {
    submissions: Vec<Submission>,
    /// `None` if empty. Dropped last.
    _counted: Option<Counted<'s>>,
}

/// Increments a counter until dropped.
struct Counted<'s>(&'s AtomicUsize);

impl<'s> Counted<'s> {
    fn new(count: &'s AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl CompletedSubmissions<'_> {
    pub(super) fn nothing() -> Self {
        Self { submissions: Vec::new(), _counted: None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.submissions.is_empty()
    }
}

/// Records that the stream has passed the waits of a submission.
fn note_passed(submission: &Submission) {
    for op in &submission.ops {
        if let Op::Await(source, n) = op {
            source.passed(*n, By::CudaStream);
        }
    }
}

impl Shared {
    /// Takes completed submissions out of the queue. Drop them without the lock.
    pub(super) fn retire(&self, state: &mut State) -> CompletedSubmissions<'_> {
        let completed = self.completed();
        if state.queue.front().is_none_or(|first| first.seq > completed) {
            return CompletedSubmissions::nothing();
        }
        let over = state.queue.partition_point(|submission| submission.seq <= completed);
        let submissions: Vec<_> = state.queue.drain(..over).collect();
        for submission in &submissions {
            note_passed(submission);
            state.calls -= submission.calls;
            state.host_fns -= submission.host_fns;
        }
        CompletedSubmissions { submissions, _counted: Some(Counted::new(&self.dropping)) }
    }

    /// Whether all completed submissions have been dropped.
    pub(super) fn all_dropped(&self) -> bool {
        let mut state = self.lock();
        let done = self.retire(&mut state);
        drop(state);
        drop(done);
        self.dropping.load(Ordering::Acquire) == 0
    }
}

/// Spin time of a caller for a completion, before it sleeps.
const CALLER_SPIN: Duration = Duration::from_micros(20);
/// Minimum sleep of a caller that loses nothing by a late check.
const IDLE_SLEEP: Duration = Duration::from_micros(50);
/// Maximum sleep of a caller between two checks.
const CALLER_SLEEP: Duration = Duration::from_millis(1);

impl Shared {
    /// Blocks until a submission is over, or the deadline. Its failure, if any, is known by then.
    pub(super) fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        // With later work queued, a late check costs nothing.
        let spin = if seq < self.submitted() { Duration::ZERO } else { CALLER_SPIN };
        if !self.block(deadline, spin, || self.completed() >= seq) {
            return false;
        }
        // Another thread may still be stopping sources, or dropping memory and queue pairs.
        let is_recorded = || !self.failed() || self.released.load(Ordering::Acquire);
        self.block_until(deadline, || is_recorded() && self.all_dropped())
    }

    /// Blocks until `done`, or the deadline.
    pub(super) fn block_until(&self, deadline: Instant, done: impl Fn() -> bool) -> bool {
        self.block(deadline, CALLER_SPIN, done)
    }

    /// Like [`Shared::block_until`], with a given spin time. A zero spin time also means longer sleeps.
    fn block(&self, deadline: Instant, spin: Duration, done: impl Fn() -> bool) -> bool {
        let shortest = if spin.is_zero() { IDLE_SLEEP } else { CALLER_SPIN };
        if done() {
            return true;
        }
        self.put_mark();
        let start = Instant::now();
        let backoff = Backoff::since(start, spin);
        loop {
            if done() {
                return true;
            }
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            let waited = now - start;
            if !backoff.spin_after(waited) {
                // A failed stream ends soon, however long it was held.
                let longest = if self.failed() { IDLE_SLEEP } else { CALLER_SLEEP };
                std::thread::sleep(sleep_time(waited, shortest..=longest).min(deadline - now));
            }
        }
    }

    /// Checks that a submission of `ops` operations and `host_fns` host functions would be accepted.
    pub(super) fn check_room(&self, guard: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()> {
        if self.failed() {
            return Err(self.why_failed());
        }
        // Capped at the depth: then the stream must be empty, which suffices.
        let calls = plan::max_calls(ops, host_fns, self.by_kernel()).min(self.config.depth);
        let mut state = self.lock();
        let done = self.retire(&mut state);
        if self.full(&state, calls, host_fns) {
            return Err(self.no_room(guard, state, (calls, host_fns)));
        }
        drop(state);
        drop(done);
        Ok(())
    }

    pub(super) fn has_room(&self) -> bool {
        let mut state = self.lock();
        let done = self.retire(&mut state);
        let (calls, host_fns) = state.wanted;
        let room = !self.full(&state, calls.max(1), host_fns);
        let pool = state.wanted_pool.clone();
        drop(state);
        drop(done);
        room && pool.and_then(|pool| pool.upgrade()).is_none_or(|pool| pool.is_free())
    }

    /// Lets the stream finish its work, after the last handle is dropped. Returns whether it is over, or has failed.
    pub(super) fn close(&self) -> bool {
        let is_done = || self.completed() >= self.submitted();
        // Most streams are synchronized before they are dropped, so this returns at once.
        let is_over = is_done() || self.block_until(Instant::now() + CALLER_SLEEP, is_done);
        // What would satisfy the waits is probably being dropped by a panic too. Without a mark behind the work, only calls
        // of the driver show its end, and these are not allowed after the application has destroyed its stream.
        if !is_over && (std::thread::panicking() || !self.owned && !self.is_marked()) {
            self.fail(Error::StreamAborted { stream: self.config.name.clone() });
        }
        let is_over = is_over || self.failed();
        self.is_given_back.store(self.config.may_be_destroyed || !self.owned && !is_over, Ordering::Release);
        if !self.owned && !is_over {
            let driver_task: Weak<dyn DriverTask> = self.own.clone();
            self.gpu.end_driver_task(&driver_task);
        }
        let _state = self.lock();
        self.closing.store(true, Ordering::Release);
        self.work.notify_one();
        is_over
    }

    /// Whether a mark follows all that was submitted.
    fn is_marked(&self) -> bool {
        let held = self.submit_lock.lock();
        let is_marked = held.guard.marked == self.submitted();
        self.submit_lock.unlock(held, |state| self.mark_locked(&mut state.guard));
        is_marked
    }
}

/// A host function queued in the driver.
struct HostFn {
    f: Box<dyn FnOnce() + Send>,
    shared: Weak<Shared>,
}

/// Whether the calling thread runs a host function, in which CUDA and blocking calls are forbidden.
pub(super) fn in_host_fn() -> bool {
    ReentrancyCheck::HostFn.is_here()
}

/// Refuses a call that needs CUDA within a host function.
pub(super) fn refuse_in_host_fn() -> Result<()> {
    match in_host_fn() {
        false => Ok(()),
        true => Err(Error::Unsupported {
            what: "the use of a stream of a GPU within a host function",
            by: "CUDA, which forbids calls from host functions",
            fix: "make the call on another thread",
        }),
    }
}

/// Queues a host function on a stream of the current context.
fn queue_host_fn(
    api: &Api,
    stream: RawStream,
    f: Box<dyn FnOnce() + Send>,
    shared: Weak<Shared>,
) -> gdrcopy::Result<()> {
    let data = Box::into_raw(Box::new(HostFn { f, shared }));
    // SAFETY: `run_host_fn` takes ownership of the box and is called once.
    let launched = unsafe { api.launch_host_func(stream, run_host_fn, data.cast()) };
    if launched.is_err() {
        // SAFETY: the call failed, so the driver does not run the function.
        drop(unsafe { Box::from_raw(data) });
    }
    launched
}

/// DriverCalls a host function in stream order, unless the stream has failed.
extern "C" fn run_host_fn(data: *mut c_void) {
    // SAFETY: `queue_host_fn` made it from a box and passed it to the driver once.
    let HostFn { f, shared } = *unsafe { Box::from_raw(data.cast::<HostFn>()) };
    let shared = shared.upgrade();
    ReentrancyCheck::HostFn.begin();
    let run = shared.as_ref().is_some_and(|shared| !shared.failed());
    // Dropping a function also runs foreign code.
    let outcome = catch_unwind(AssertUnwindSafe(|| if run { f() } else { drop(f) }));
    if let (Err(panic), Some(shared)) = (outcome, &shared) {
        let message = message_of(panic.as_ref());
        shared.fail(Error::HostFnPanicked { stream: shared.config.name.clone(), message });
    }
    drop(shared);
    ReentrancyCheck::HostFn.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_text_matches_the_constants() {
        assert_eq!(LIMITS, format!("at most {MAX_CALLS} calls, and {MAX_HOST_FNS} host functions"));
    }
}
