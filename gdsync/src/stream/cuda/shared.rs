//! What the handle and the watchdog of a CUDA engine share: the queue, the counters and the failure.
//!
//! How far the GPU is, the CPU learns from a word that the stream writes now and then: a *mark* with the number of the
//! submission. Marks are written every few submissions, when somebody waits, and when the stream falls idle; so most
//! submissions do not pay for one.
//!
//! There are two locks. Who calls the driver for the stream has its *turn* ([`SubmitLock`]), and may have to wait there: in the driver, one
//! thread that frees memory, say, holds up all others until every stream of the process is done. So nothing that keeps
//! deadlines ever waits for the turn: what it needs is in the *state*, whose lock is held for moments only, and in
//! [`Shared::behind`]. No foreign code (the driver, host functions, drops of what operations hold) runs under that one;
//! sources are looked at there, released and woken, which waits for nobody.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use gdrcopy::cuda::raw::Api;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::coalesced::CoalescedRun;
use super::graph::{self, Captured};
use super::instance::{Instance, Pool};
use super::nudger::Nudger;
use super::plan::{self, Calls, Runs};
use super::watchdog::tells_nothing;
use super::{CudaStreamConfig, Nudge, PER_THREAD, Via};
use crate::stream::execute::message_of;
use crate::stream::op::{Op, Ops, Source, sources_of};
use crate::stream::{ReentrancyCheck, SubmitLock};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::kernel_exec::{Head, KernelExecutor, KernelOp, StatusBlock};
use gdsync_device::cuda::{Activity, DriverTask, Gpu, RawStream, gate};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Word64;
use gdsync_device::recorder::{By, Log};
use gdsync_shm::{Backoff, nap};

/// Calls between two marks.
pub(super) const MARK_EVERY: usize = 16;
/// Host functions that may be pending. A channel of the GPU takes 55 that have other work between them, then the driver blocks
/// the caller and whoever else calls it; two streams may share a channel.
const MAX_HOST_FNS: usize = 24;
/// Calls of one submission: of 1,020 that a channel takes.
const MAX_CALLS: usize = 512;
/// Both, in words.
const MOST: &str = "at most 512 calls, and 24 host functions";
/// From this version of CUDA on, memory operations, launches and questions on a stream that was made are taken from any thread,
/// whatever context it has, and mean the stream's: seen with 13.0, with none, another one of the GPU, and another GPU's.
const ANYWHERE: i32 = 13_000;

pub(super) struct Shared {
    pub(super) config: CudaStreamConfig,
    pub(super) log: Log,
    pub(super) gpu: Gpu,
    pub(super) stream: RawStream,
    owned: bool,
    /// Whether the driver takes calls on the stream only from a thread that has its context.
    pub(super) needs_context: bool,
    /// The application knows the stream, and may be capturing it.
    shown: AtomicBool,
    pub(super) kernel_exec: Option<Arc<KernelExecutor>>,
    pub(super) nudger: Option<Arc<dyn GpuNudge>>,
    pub(super) status: StatusBlock,
    /// What all programs of kernels begin with.
    head: Head,
    /// The mark, and the one of kernels that ran after the stream failed.
    mark: Word64,
    mark_after: Word64,
    /// The GPU's address of the mark.
    mark_addr: u64,
    /// Waits of a row that are behind the last submission and not counted there yet. Only who has the turn writes it.
    pub(super) behind: AtomicU64,
    pub(super) submit_lock: Arc<SubmitLock>,
    state: Mutex<State>,
    /// For the watchdog: there is something to watch, where it sleeps for long, or an end to come to.
    pub(super) work: Condvar,
    pub(super) submitted: AtomicU64,
    /// Submissions up to here are over, as CUDA says: no mark tells.
    pub(super) ended: AtomicU64,
    error: OnceLock<Error>,
    /// All sources were told of the error: waits may be released by force.
    pub(super) released: AtomicBool,
    pub(super) closing: AtomicBool,
    /// Lots of retired submissions that are being dropped.
    pub(super) retiring: AtomicUsize,
    pub(super) own: Weak<Shared>,
}

/// What only those need who call the driver, and therefore have the turn of the stream.
#[derive(Debug, Default)]
pub struct SubmitGuard {
    /// Calls since the last mark, and the submission that it names.
    pub(super) unmarked: usize,
    pub(super) marked: u64,
    /// What has been captured so far, while the stream is.
    pub(super) capture: Option<Captured>,
    pub(super) coalesced: CoalescedRun,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) queue: VecDeque<Submission>,
    /// The last submission that found nothing queued before it, and when, until the watchdog looks: what it waits for first holds
    /// the stream since then.
    pub(super) begun: Option<(u64, Instant)>,
    /// Calls and host functions pending.
    pub(super) calls: usize,
    pub(super) host_fns: usize,
    /// Calls and host functions that there was no room for.
    pub(super) wanted: (usize, usize),
    /// Of a graph or steps that had no instance free.
    pub(super) wanted_pool: Option<Weak<Pool>>,
    /// Why the driver took no mark, or runs the stream no more: it is asked for no more marks.
    pub(super) refused: Option<Error>,
    /// The driver is to be asked how the stream is, and somebody is about to.
    pub(super) query: bool,
    pub(super) asking: bool,
    /// The watchdog sleeps until there is work.
    pub(super) asleep: bool,
}

/// What the GPU has not been seen to complete. It keeps everything alive that the GPU may touch.
pub(super) struct Submission {
    /// Its number; of several that it stands for, the first one's and the last one's.
    pub(super) first: u64,
    pub(super) seq: u64,
    pub(super) ops: Ops,
    /// Waits behind its last operation, which is one, for the completions that follow its own.
    pub(super) more: u64,
    pub(super) calls: usize,
    pub(super) host_fns: usize,
    /// What it is a launch of.
    pub(super) instance: Option<Arc<Instance>>,
}

/// What a submission is in the queue.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) seq: u64,
    pub(super) calls: usize,
    pub(super) host_fns: usize,
}

impl Submission {
    #[inline(always)]
    pub(super) fn new(
        Entry { seq, calls, host_fns }: Entry,
        ops: Ops,
        instance: Option<Arc<Instance>>,
    ) -> Self {
        Self { first: seq, seq, ops, more: 0, calls, host_fns, instance }
    }

    /// Whether all that it does is to ring for this source.
    #[inline]
    pub(super) fn triggers_only(&self, source: &Arc<dyn Source>) -> bool {
        match &self.ops[..] {
            [Op::Trigger(known, _)] => Arc::ptr_eq(known, source) && self.instance.is_none(),
            _ => false,
        }
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
        let kernel_exec = (via == Via::Kernel).then(|| gpu.kernel_exec()).transpose()?;
        let nudges = match config.nudge {
            Nudge::Auto => kernel_exec.is_none(),
            chosen => chosen == Nudge::On,
        };
        let nudger = if nudges { Some(Nudger::of(gpu)? as Arc<dyn GpuNudge>) } else { None };
        let status = StatusBlock::new(gpu)?;
        let limit_ns = u64::try_from(config.wait_limit.as_nanos()).unwrap_or(u64::MAX);
        let head = Head { status: status.addr(), limit_ns, submission: 0, count: 0 };
        let marks = gpu.host_piece(16)?;
        let (mark, mark_after, mark_addr) = (marks.word64(0)?, marks.word64(8)?, marks.gpu_addr(gpu)?);
        let log = Log::open()?;
        Ok(Arc::new_cyclic(|own| Self {
            shown: (!owned && config.captured_by_others).into(),
            config,
            log,
            gpu: gpu.clone(),
            stream,
            owned,
            needs_context: stream <= PER_THREAD || gpu.capabilities().driver_version < ANYWHERE,
            kernel_exec,
            nudger,
            status,
            head,
            mark,
            mark_after,
            mark_addr,
            behind: AtomicU64::new(0),
            submit_lock,
            state: Mutex::default(),
            work: Condvar::new(),
            submitted: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            error: OnceLock::new(),
            released: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            retiring: AtomicUsize::new(0),
            own: own.clone(),
        }))
    }

    #[inline(always)]
    pub(super) fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// As far as the last mark tells, or CUDA.
    pub(super) fn completed(&self) -> u64 {
        let mark = self.mark.load().max(self.ended.load(Ordering::Acquire));
        // Before that it may not be known yet why kernels stopped short.
        if self.released.load(Ordering::Acquire) { mark.max(self.mark_after.load()) } else { mark }
    }

    pub(super) fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    #[inline]
    pub(super) fn failed(&self) -> bool {
        self.error.get().is_some()
    }

    /// The error of a stream that has failed.
    #[cold]
    #[inline(never)]
    pub(super) fn why_failed(&self) -> Error {
        self.error().unwrap_or_else(|| Error::StreamAborted { stream: self.config.name.clone() })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn full(&self, state: &State, calls: usize, host_fns: usize) -> bool {
        let fits = |pending, more, most| pending == 0 || pending + more <= most;
        !(fits(state.calls, calls, self.config.depth) && fits(state.host_fns, host_fns, MAX_HOST_FNS))
    }

    pub(super) fn submit(&self, guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.mark_before_registering(guard, ops);
        let mut calls = Calls::new(self.by_kernel());
        calls.add(&self.gpu, ops)?;
        let put =
            |queue: &mut VecDeque<_>, entry| queue.push_back(Submission::new(entry, mem::take(ops), None));
        self.accept(guard, |guard, done| self.submit_in_turn((guard, done), &mut calls, put))
    }

    /// Memory that CUDA does not know yet may have to wait until all streams are seen to be dry: marks this one, as nobody else can
    /// as long as this thread has the turn.
    #[inline]
    pub(super) fn mark_before_registering(&self, guard: &mut SubmitGuard, ops: &[Op]) {
        if !ops.iter().all(Op::is_found) {
            self.mark_in_turn(guard);
        }
    }

    /// Accepts a submission unless the stream has failed. `put` queues it and returns its number; the context is current then.
    #[inline(always)]
    pub(super) fn accept<'s>(
        &'s self,
        guard: &mut SubmitGuard,
        put: impl FnOnce(&mut SubmitGuard, &mut CompletedSubmissions<'s>) -> Result<u64>,
    ) -> Result<u64> {
        if self.failed() {
            return Err(self.why_failed());
        }
        let mut done = CompletedSubmissions::nothing();
        let _joined = self.gpu.join().map_err(not_joined)?;
        put(guard, &mut done)
    }

    /// Submission `seq` was issued: what the driver said to it.
    #[inline(always)]
    pub(super) fn issued(&self, seq: u64, answer: gdrcopy::Result<()>) -> u64 {
        if let Err(error) = answer {
            self.not_issued(error);
        }
        seq
    }

    /// Some of it may be on its way, so it counts as submitted; it is not known what of it will happen.
    #[cold]
    fn not_issued(&self, error: gdrcopy::Error) {
        self.fail(Error::cuda("submitting to the stream")(error));
    }

    /// The application gets to know the stream.
    pub(super) fn show(&self) {
        self.shown.fetch_or(self.config.captured_by_others, Ordering::Relaxed);
    }

    /// Whether the application captures the stream, so that what is queued now would not run. The context must be current, if the driver
    /// needs that.
    #[inline(always)]
    pub(super) fn is_captured_by_others(&self, guard: &SubmitGuard) -> bool {
        let may_be = self.shown.load(Ordering::Relaxed) && guard.capture.is_none();
        may_be && self.is_captured().unwrap_or_else(|error| tells_nothing(&error))
    }

    #[inline(always)]
    pub(super) fn submit_in_turn<'s>(
        &'s self,
        (guard, done): (&mut SubmitGuard, &mut CompletedSubmissions<'s>),
        calls: &mut impl Runs,
        put: impl FnOnce(&mut VecDeque<Submission>, Entry),
    ) -> Result<u64> {
        if self.is_captured_by_others(guard) {
            return Err(graph::within_another());
        }
        let seq = self.submitted() + 1;
        let marks = guard.unmarked + 1 >= MARK_EVERY;
        if marks {
            calls.mark(self.mark_of(seq));
        }
        let (count, host_fns) = calls.count();
        if host_fns > MAX_HOST_FNS || count > MAX_CALLS {
            let value = format!("{count} calls into the driver, {host_fns} of them for host functions");
            return Err(Error::invalid("batch", value, MOST));
        }
        self.enqueue(guard, done, (count, host_fns), put)?;
        guard.unmarked = if marks { 0 } else { guard.unmarked + count };
        guard.marked = if marks { seq } else { guard.marked };
        let answer = self.issue(seq, calls);
        Ok(self.issued(seq, answer))
    }

    /// Queues a submission that is about to be issued, unless there is no room for it: the watchdog must know of it while
    /// the driver takes it. Its number is the next one. `put` adds it to the queue, which is locked, with its operations.
    #[inline(always)]
    pub(super) fn enqueue<'s>(
        &'s self,
        guard: &mut SubmitGuard,
        done: &mut CompletedSubmissions<'s>,
        (calls, host_fns): (usize, usize),
        put: impl FnOnce(&mut VecDeque<Submission>, Entry),
    ) -> Result<()> {
        let mut state = self.lock();
        // Under the lock, which the reaper takes after it has closed the gate: it sees the submission, or is seen here. And before
        // the watchdog sees it: the time at the gate is none of its waits'.
        let mut _held_up = None;
        if gate::is_closed() {
            drop(state);
            _held_up = Some(gate::wait());
            state = self.lock();
        }
        // Who fails the stream says so first, and then sees under this lock what is queued: nothing is queued unseen.
        if let Some(error) = self.error.get() {
            return Err(error.clone());
        }
        self.end_row(guard, &mut state);
        let is_full = self.full(&state, calls, host_fns);
        // Now and then by this thread, which has the counts of references; else the watchdog does it.
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
        put(&mut state.queue, Entry { seq, calls, host_fns });
        guard.coalesced = CoalescedRun::of(self.config.depth.saturating_sub(state.calls));
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.work.notify_one();
        }
        Ok(())
    }

    /// As [`Shared::enqueue`], of a launch.
    pub(super) fn enqueue_launch<'s>(
        &'s self,
        guard: &mut SubmitGuard,
        done: &mut CompletedSubmissions<'s>,
        ops: &mut Ops,
        calls: usize,
        instance: &Arc<Instance>,
    ) -> Result<()> {
        self.enqueue(guard, done, (calls, 0), |queue, entry| {
            queue.push_back(Submission::new(entry, mem::take(ops), Some(instance.clone())));
        })
    }

    /// There is no room for so many calls and host functions: somebody may wait for it.
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

    /// Sees to it that the room that comes is seen.
    fn is_full(&self, guard: &mut SubmitGuard) -> Error {
        self.mark_in_turn(guard);
        Error::StreamFull { stream: self.config.name.clone(), depth: self.config.depth }
    }

    /// An instance whose former launches are over.
    pub(super) fn instance(&self, guard: &mut SubmitGuard, pool: &Arc<Pool>) -> Result<Arc<Instance>> {
        if let Some(free) = pool.free() {
            return Ok(free);
        }
        let mut state = self.lock();
        let done = self.retire(&mut state);
        (state.wanted, state.wanted_pool) = ((0, 0), Some(Arc::downgrade(pool)));
        drop(state);
        drop(done);
        pool.free().ok_or_else(|| self.is_full(guard))
    }

    /// The mark behind a submission.
    pub(super) fn mark_of(&self, seq: u64) -> KernelOp {
        KernelOp::mark(self.mark_addr, seq)
    }

    /// Makes the calls of a submission. The context must be current.
    #[inline(always)]
    fn issue(&self, seq: u64, calls: &mut impl Runs) -> gdrcopy::Result<()> {
        calls.make(|ops| self.run(seq, ops), |place| self.launch_host_fn(seq, place))
    }

    /// What tells a kernel about its submission.
    pub(super) fn head(&self, submission: u64) -> Head {
        Head { submission, ..self.head }
    }

    /// Has the GPU run operations by one call. The context must be current.
    pub(super) fn run(&self, seq: u64, ops: &[KernelOp]) -> gdrcopy::Result<()> {
        let api = self.gpu.api();
        if let Some(kernel_exec) = self.kernel_exec.as_ref().filter(|_| plan::fits_kernel(ops)) {
            return kernel_exec.launch(api, self.stream, self.head(seq), ops);
        }
        plan::with_memops(ops, |count, memops| {
            // SAFETY: so many operations on words that the submission keeps alive, known to the GPU.
            unsafe { api.stream_batch_mem_op(self.stream, count, memops, 0) }
        })
    }

    #[cold]
    fn launch_host_fn(&self, seq: u64, place: usize) -> gdrcopy::Result<()> {
        let f = self.take_host_fn(seq, place);
        f.map_or(Ok(()), |f| queue_host_fn(self.gpu.api(), self.stream, f, self.own.clone()))
    }

    /// Takes a host function out of a submission in the queue.
    fn take_host_fn(&self, seq: u64, place: usize) -> Option<Box<dyn FnOnce() + Send>> {
        let mut state = self.lock();
        let submission = state.queue.back_mut().filter(|last| last.seq == seq)?;
        match mem::replace(&mut submission.ops[place], Op::Barrier) {
            Op::HostFn(f) => Some(f),
            other => {
                submission.ops[place] = other;
                None
            }
        }
    }

    /// Puts a mark behind all that was submitted, if there is none; leaves it to whoever has the turn.
    pub(super) fn put_mark(&self) {
        if in_host_fn() {
            return;
        }
        self.submit_lock.want(|state| self.mark_in_turn(&mut state.guard));
    }

    /// Puts the mark. It is one more call of the last submission.
    pub(super) fn mark_in_turn(&self, guard: &mut SubmitGuard) {
        let seq = self.submitted();
        if guard.marked == seq {
            return;
        }
        {
            let mut state = self.lock();
            self.end_row(guard, &mut state);
            if state.refused.is_some() {
                return;
            }
        }
        if let Err(error) = self.gpu.within(|_| self.mark_now(guard, seq)) {
            // The watchdog fails the stream.
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
        self.run(seq, &[self.mark_of(seq)])
    }

    /// Fails the stream: stops every queue that pending operations use, then lets the watchdog release the waits.
    pub(super) fn fail(&self, error: Error) {
        if self.error.set(error.clone()).is_err() {
            return;
        }
        tracing::debug!(stream = self.config.name, %error, "stream failed");
        self.status.fail();
        let completed = self.completed();
        let mut sources: Vec<Arc<dyn Source>> = Vec::new();
        for submission in self.lock().queue.iter().filter(|submission| submission.seq > completed) {
            for (_, source) in sources_of(&submission.ops) {
                if !sources.iter().any(|known| Arc::ptr_eq(known, &source)) {
                    sources.push(source);
                }
            }
        }
        for source in &sources {
            // Whatever happens here, the others must be told and the stream released.
            if catch_unwind(AssertUnwindSafe(|| source.fail(&error))).is_err() {
                tracing::error!(stream = self.config.name, ?source, "a source panicked while it was stopped");
            }
        }
        self.released.store(true, Ordering::Release);
        self.work.notify_one();
    }

    /// Whether kernels run the operations, which keep deadlines by themselves.
    pub(super) fn by_kernel(&self) -> bool {
        self.kernel_exec.is_some()
    }

    /// Gives the stream back, to CUDA if it is ours. What it still runs, CUDA lets end.
    pub(super) fn destroy(&self) {
        let driver_task: Weak<dyn DriverTask> = self.own.clone();
        self.gpu.end_driver_task(&driver_task);
        if !self.owned {
            return;
        }
        let done = self.gpu.enter().and_then(|_current| {
            // SAFETY: made for this engine, destroyed once.
            unsafe { self.gpu.api().stream_destroy(self.stream) }.map_err(Error::cuda("destroying a stream"))
        });
        if let Err(error) = done {
            tracing::debug!(stream = self.config.name, %error, "stream not destroyed");
        }
    }
}

#[cold]
#[inline(never)]
pub(super) fn not_joined(error: gdrcopy::Error) -> Error {
    Error::cuda("entering the context")(error)
}

impl Activity for Shared {
    fn idle_since(&self) -> Option<u64> {
        // See `Shared::enqueue`.
        let _state = self.lock();
        let submitted = self.submitted();
        (self.completed() >= submitted).then_some(submitted)
    }
}

/// Submissions that are over, on their way to be dropped.
#[must_use = "to be dropped without the lock"]
pub(super) struct CompletedSubmissions<'s> {
    submissions: Vec<Submission>,
    /// Unless it is empty; dropped last.
    _counted: Option<Counted<'s>>,
}

/// It counts until it is dropped.
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
    if let (more @ 1.., Some(Op::Await(source, n))) = (submission.more, submission.ops.last()) {
        (1..=more).for_each(|on| source.passed(n + on, By::CudaStream));
    }
}

impl Shared {
    /// Takes out of the queue what the GPU has completed; to be dropped without the lock.
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
        CompletedSubmissions { submissions, _counted: Some(Counted::new(&self.retiring)) }
    }

    /// Whether nothing is held any more for what the GPU has completed.
    pub(super) fn has_let_go(&self) -> bool {
        let mut state = self.lock();
        let done = self.retire(&mut state);
        drop(state);
        drop(done);
        self.retiring.load(Ordering::Acquire) == 0
    }
}

/// How long a caller spins for a completion before it sleeps.
const CALLER_SPIN: Duration = Duration::from_micros(20);
/// The shortest sleep of a caller for whom a late look costs nothing.
const IDLE_NAP: Duration = Duration::from_micros(50);
/// The longest sleep of a caller between two looks.
const CALLER_NAP: Duration = Duration::from_millis(1);

impl Shared {
    /// Blocks a caller until a submission is over, or the deadline. What made it end early is known by then.
    pub(super) fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        // With work behind it nothing is lost by a late look.
        let spin = if seq < self.submitted() { Duration::ZERO } else { CALLER_SPIN };
        if !self.block(deadline, spin, || self.completed() >= seq) {
            return false;
        }
        // Another thread may still be telling the sources, or be about to let go what was held: memory and queue pairs.
        let is_recorded = || !self.failed() || self.released.load(Ordering::Acquire);
        self.block_until(deadline, || is_recorded() && self.has_let_go())
    }

    /// Blocks a caller until `done`, or the deadline.
    pub(super) fn block_until(&self, deadline: Instant, done: impl Fn() -> bool) -> bool {
        self.block(deadline, CALLER_SPIN, done)
    }

    /// As [`Shared::block_until`]; it spins for `spin` before it sleeps, and sleeps shorter if it does.
    fn block(&self, deadline: Instant, spin: Duration, done: impl Fn() -> bool) -> bool {
        let least = if spin.is_zero() { IDLE_NAP } else { CALLER_SPIN };
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
                // The end of a stream that has failed is near, however long it was held.
                let most = if self.failed() { IDLE_NAP } else { CALLER_NAP };
                std::thread::sleep(nap(waited, least..=most).min(deadline - now));
            }
        }
    }

    /// Refuses what a submission of so many operations and host functions would be refused for.
    pub(super) fn ask_room(&self, guard: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()> {
        if self.failed() {
            return Err(self.why_failed());
        }
        // More than it takes in all, by this count: then it must be dry, and need not be dryer.
        let calls = plan::most_calls(ops, host_fns, self.by_kernel()).min(self.config.depth);
        let mut state = self.lock();
        self.end_row(guard, &mut state);
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

    /// The last handle is gone.
    pub(super) fn close(&self) {
        if self.completed() < self.submitted() {
            self.put_mark();
            // Most streams are synchronized before they are dropped; then this finds them done.
            if !self.block_until(Instant::now() + CALLER_NAP, || self.completed() >= self.submitted()) {
                self.fail(Error::StreamAborted { stream: self.config.name.clone() });
            }
        }
        let _state = self.lock();
        self.closing.store(true, Ordering::Release);
        self.work.notify_one();
    }
}

/// A host function on its way through the driver.
struct HostFn {
    f: Box<dyn FnOnce() + Send>,
    shared: Weak<Shared>,
}

/// Whether the calling thread runs a host function, where CUDA may not be called and nothing may be waited for.
pub(super) fn in_host_fn() -> bool {
    ReentrancyCheck::HostFn.is_here()
}

/// Refuses a call that needs CUDA within a host function.
pub(super) fn refuse_in_host_fn() -> Result<()> {
    match in_host_fn() {
        false => Ok(()),
        true => Err(Error::Unsupported {
            what: "the use of a stream of a GPU within a host function",
            by: "CUDA, which must not be called there",
            fix: "leave it to another thread",
        }),
    }
}

/// Queues a function on a stream of the current context.
fn queue_host_fn(
    api: &Api,
    stream: RawStream,
    f: Box<dyn FnOnce() + Send>,
    shared: Weak<Shared>,
) -> gdrcopy::Result<()> {
    let data = Box::into_raw(Box::new(HostFn { f, shared }));
    // SAFETY: the function takes the box over, once.
    let launched = unsafe { api.launch_host_func(stream, run_host_fn, data.cast()) };
    if launched.is_err() {
        // SAFETY: the driver did not take it.
        drop(unsafe { Box::from_raw(data) });
    }
    launched
}

/// Runs a host function in stream order, unless the stream has failed.
extern "C" fn run_host_fn(data: *mut c_void) {
    // SAFETY: made by `launch` from a box, and handed to the driver once.
    let HostFn { f, shared } = *unsafe { Box::from_raw(data.cast::<HostFn>()) };
    let shared = shared.upgrade();
    ReentrancyCheck::HostFn.begin();
    let run = shared.as_ref().is_some_and(|shared| !shared.failed());
    // Also the drop of a function that is not run is foreign code.
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
    fn the_words_for_the_limits_are_the_limits() {
        assert_eq!(MOST, format!("at most {MAX_CALLS} calls, and {MAX_HOST_FNS} host functions"));
    }
}
