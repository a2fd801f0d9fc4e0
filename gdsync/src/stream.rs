//! Streams: queues of memory operations that run in order, on a host thread or on a GPU.
//!
//! | libgdsync | here |
//! |---|---|
//! | `gds_stream_queue_send` | [`Stream::send`] |
//! | `gds_stream_wait_cq` | [`Stream::wait_send`], [`Stream::wait_recv`] |
//! | `gds_prepare_send`, `gds_stream_post_send(_all)` | [`Qp::prepare_send`], [`Batch::post`] |
//! | `gds_prepare_wait_cq`, `gds_stream_post_wait_cq(_all)` | [`Qp::prepare_wait_send`], [`Batch::post_wait`] |
//! | `gds_post_wait_cq` (give a wait back to the CPU) | dropping a [`PreparedWait`] |
//! | `gds_prepare_wait_value32`, `gds_prepare_write_value32` | [`Batch::wait_value32`], [`Batch::write_value32`], and 64 bit |
//! | `gds_prepare_write_memory` | [`Batch::write_memory`] |
//! | `gds_stream_post_descriptors` | [`Stream::submit`] |
//! | `gds_post_descriptors` | [`Batch::run`] |
//! | `gds_post_send`, `gds_post_recv` | [`Qp::post_send`], [`Qp::post_recv`] |
//! | `gds_create_qp`, `gds_destroy_qp` | [`Pd::build_qp`](crate::verbs::Pd::build_qp), dropping the [`Qp`] |
//! | `gds_alloc_mapped_memory` | [`Memory::alloc`](gdsync_device::memory::Memory::alloc) |
//! | `gds_query_param`, `GDS_API_VERSION` | [`VERSION`](crate::VERSION) |
//! | `GDS_CREATE_QP_*_ON_GPU` | [`QpBuilder::on_gpu`](crate::verbs::QpBuilder::on_gpu) |
//! | `GDS_WAIT_POST_FLUSH_REMOTE` | [`Batch::flush`]; waits for completions do it by themselves where needed |
//! | `gds_mlx5_get_send_info`, `gds_mlx5_get_wait_info`, `device.cuh` | [`Qp::for_kernels`]: kernels write requests themselves |
//! | none: libgdsync cannot be captured in CUDA graphs | [`Stream::capture`], [`Graph::launch`] |
//! | `gds_prepare_send`, and `device.cuh` to trigger it from a kernel | [`Stream::record_steps`], [`KernelSteps::launch`] |
//!
//! # Graphs
//!
//! What is submitted within [`Stream::capture`] is recorded, not run; each [`Graph::launch`] runs all of it with one
//! submission, with fresh work requests. Eager work on the same queue pair may stand between launches.
//!
//! ```
//! # use std::time::Duration;
//! # use gdsync::memory::Memory;
//! # use gdsync::stream::{Batch, HostStreamConfig, Stream};
//! # use gdsync::Device;
//! # use gdsync::verbs::{Access, SendWr};
//! # fn main() -> gdsync::Result<()> {
//! # let pd = Device::find(None)?.open()?.alloc_pd()?;
//! # let (a, b) = (pd.build_qp().build()?, pd.build_qp().build()?);
//! # a.connect(b.address())?;
//! # b.connect(a.address())?;
//! # let ours = pd.register(&Memory::alloc(64)?, Access::all())?;
//! # let theirs = pd.register(&Memory::alloc(64)?, Access::all())?;
//! let stream = Stream::host(HostStreamConfig::default())?;
//! let graph = stream.capture(|stream| {
//!     // On a CUDA stream, launch kernels and copies on `stream.raw()` here: they are captured, too.
//!     stream.send(&a, &SendWr::write(theirs.remote(0)?, &[ours.sge(0, 8)?]).id(7))?;
//!     stream.wait_send(&a).map(drop)
//! })?;
//! for round in 0..100u64 {
//!     stream.write_value64(&ours.memory().word64(0)?, round)?;
//!     let launch = graph.launch(&stream)?;
//!     stream.synchronize(Duration::from_secs(10))?;
//!     assert_eq!(theirs.memory().word64(0)?.load(), round);
//!     assert_eq!(launch.completions()[0].status()?.expect("it was waited for").wr_id, 7);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Qp`]: crate::verbs::Qp
//! [`Qp::prepare_send`]: crate::verbs::Qp::prepare_send
//! [`Qp::prepare_wait_send`]: crate::verbs::Qp::prepare_wait_send
//! [`Qp::post_send`]: crate::verbs::Qp::post_send
//! [`Qp::post_recv`]: crate::verbs::Qp::post_recv
//! [`Qp::for_kernels`]: crate::verbs::Qp::for_kernels

mod batch;
mod cuda;
mod engine;
mod execute;
mod graph;
mod host;
mod op;
mod prepared;
mod record;
mod steps;

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use parking_lot::{Mutex, MutexGuard};

pub use batch::Batch;
#[doc(hidden)]
pub use batch::Replenish;
#[doc(hidden)]
pub use cuda::{CudaStreamConfig, Nudge, SubmitGuard, Via, calibrate};
#[doc(hidden)] // until applications can bring an engine of their own
pub use engine::Engine;
#[doc(hidden)]
pub use graph::{Capture, Graph, Launch, Made};
pub use host::HostStreamConfig;
pub use op::Cond;
#[doc(hidden)]
pub use op::{Arrival, DoorbellValue, Op, Ops, SendDoorbell, Source};
pub use prepared::{PreparedSend, PreparedWait};
pub use steps::{DEVICE_HEADER, KernelSteps};

use crate::nvtx::DOMAIN;
use crate::verbs::end::QueueEnd;
use crate::verbs::qp::QpCore;
use crate::verbs::sq::{SendQueue, Sent};
use crate::verbs::{Completion, Qp, SendWr, Submitted};
use cuda::CudaEngine;
use gdsync_device::GpuNudge;
use gdsync_device::cuda::{Gpu, RawStream};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Word32, Word64};
use gdsync_device::recorder::Stage;
use gdsync_shm::{reset, submit_lock};
use host::HostEngine;
use prepared::Asked;
use record::Recording;

/// A stream. Clones share it. When the last one is dropped, pending work is aborted.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    id: u64,
    name: String,
    engine: Arc<dyn Engine>,
    /// What it says of itself.
    signals: bool,
    nudger: Option<Arc<dyn GpuNudge>>,
    submit_lock: Arc<SubmitLock>,
}

type Used = Vec<(Arc<QpCore>, u64)>;

#[derive(Default)]
struct State {
    /// Queue pairs used since they were last reported on, and by which submission last.
    used: Used,
    /// What is submitted goes here while the stream is being captured.
    recording: Option<Recording>,
    /// What the engine of a GPU keeps.
    guard: SubmitGuard,
}

/// The turn of a stream, until it is dropped.
struct StateGuard<'a> {
    inner: &'a Inner,
    /// Always there until the drop.
    state: Option<MutexGuard<'a, State>>,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect("held until the drop")
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("held until the drop")
    }
}

impl StateGuard<'_> {
    /// As to drop it, where it is called.
    #[inline(always)]
    fn end(mut self) {
        self.unlock();
        mem::forget(self);
    }

    #[inline(always)]
    fn unlock(&mut self) {
        if let Some(state) = self.state.take() {
            self.inner.submit_lock.end(state, |state| self.inner.engine.mark(&mut state.guard));
        }
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.unlock();
    }
}

impl Inner {
    #[inline(always)]
    fn lock(&self) -> StateGuard<'_> {
        StateGuard { inner: self, state: Some(self.submit_lock.take()) }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} '{}')", self.0.engine.kind(), self.0.name)
    }
}

/// Takes note that a submission uses a queue pair: mostly the one that was used last.
#[inline]
fn note_use(used: &mut Used, core: &Arc<QpCore>, seq: u64) {
    match used.last_mut() {
        Some((known, last)) if Arc::ptr_eq(known, core) => *last = seq,
        _ => note_other_use(used, core, seq),
    }
}

#[inline(never)]
fn note_other_use(used: &mut Used, core: &Arc<QpCore>, seq: u64) {
    match used.iter_mut().rfind(|(known, _)| Arc::ptr_eq(known, core)) {
        Some((_, last)) => *last = seq,
        None => used.push((core.clone(), seq)),
    }
}

/// When `timeout` is over. One that the clock cannot tell is for ever.
fn deadline(timeout: Duration) -> Instant {
    const AGES: Duration = Duration::from_secs(1 << 32);
    let now = Instant::now();
    now.checked_add(timeout.min(AGES)).unwrap_or(now)
}

/// What a stream is doing.
#[derive(Clone, Debug)]
pub struct StreamStatus {
    /// Submissions that have not run yet.
    pub pending: u64,
    /// Why the stream does no more work, if it failed.
    pub error: Option<Error>,
}

impl Stream {
    /// A stream run by a host thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a configuration out of range, [`Error::Sys`] when no thread can be had.
    pub fn host(config: HostStreamConfig) -> Result<Self> {
        let name = config.name.clone();
        Ok(Self::with(name, HostEngine::start(config)?, Arc::default()))
    }

    /// A stream of our own on a GPU.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a configuration out of range, [`Error::Cuda`], [`Error::Sys`] when no thread can be had
    /// for its watchdog.
    pub fn cuda(gpu: &Gpu, config: CudaStreamConfig) -> Result<Self> {
        let name = config.name.clone();
        let submit_lock = Arc::<SubmitLock>::default();
        Ok(Self::with(name, CudaEngine::start(gpu, config, submit_lock.clone())?, submit_lock))
    }

    /// A stream of the application: what it queues there itself, as kernels and copies, and what is queued here run in the
    /// order they are queued in. The legacy default stream may be lent, too.
    ///
    /// # Errors
    /// As [`Stream::cuda`]; [`Error::Unsupported`] for the default stream of a thread.
    ///
    /// # Safety
    /// `stream` must be a stream of the context of `gpu` that lives as long as the result and its clones. It is not
    /// destroyed here.
    pub unsafe fn cuda_lent(gpu: &Gpu, stream: RawStream, config: CudaStreamConfig) -> Result<Self> {
        let name = config.name.clone();
        let submit_lock = Arc::<SubmitLock>::default();
        Ok(Self::with(name, CudaEngine::lent(gpu, stream, config, submit_lock.clone())?, submit_lock))
    }

    fn with(name: String, engine: Arc<dyn Engine>, submit_lock: Arc<SubmitLock>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let (signals, nudger) = (engine.signals(), engine.nudger().cloned());
        Self(Arc::new(Inner { id, name, engine, signals, nudger, submit_lock }))
    }

    /// The `CUstream`, to launch kernels on; `None` for a host stream. To capture it, use
    /// [`Stream::capture`]: while the application captures it by itself, submissions are refused, unless it has promised
    /// ([`CudaStreamConfig::captured_by_others`]) that it never will.
    pub fn raw(&self) -> Option<RawStream> {
        self.0.engine.raw()
    }

    /// The engine in one word: "host" or "cuda".
    pub fn kind(&self) -> &'static str {
        self.0.engine.kind()
    }

    /// Queues a batch, all or nothing, and empties it. The caller goes on at once.
    ///
    /// # Errors
    /// Leaves the batch as it was, and returns [`Error::StreamFull`], [`Error::OutOfOrder`], [`Error::Busy`], the error
    /// that broke a queue pair of the batch, or the one that failed the stream.
    pub fn submit(&self, batch: &mut Batch) -> Result<()> {
        let mut state = self.state()?;
        let State { used, recording, guard } = &mut *state;
        self.submit_locked((used, guard), recording, batch)?;
        state.end();
        self.hand_over(batch);
        Ok(())
    }

    fn submit_locked(
        &self,
        (used, guard): (&mut Used, &mut SubmitGuard),
        recording: &mut Option<Recording>,
        batch: &mut Batch,
    ) -> Result<()> {
        let _range = DOMAIN.range(c"submit");
        let Some(recording) = recording else {
            return self
                .put((used, guard), batch, |batch, guard| batch.put(&*self.0.engine, guard))
                .map(drop);
        };
        record::check(batch)?;
        match &mut recording.sizes {
            None => self.0.engine.record(guard, batch.ops())?,
            Some(sizes) => sizes.push(self.0.engine.size_of_step(batch.ops())?),
        }
        recording.add(batch);
        Ok(())
    }

    /// Refuses `what`, which no graph can repeat, while the stream is being captured: see [`Batch::only_once`].
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn refuse_in_capture(&self, what: &'static str, fix: &'static str) -> Result<()> {
        if self.state()?.recording.is_some() { Err(record::once(what, fix)) } else { Ok(()) }
    }

    /// The state, unless the calling thread holds it already.
    #[inline(always)]
    fn state(&self) -> Result<StateGuard<'_>> {
        if ReentrancyCheck::any() {
            self.refuse_here()?;
        }
        Ok(self.0.lock())
    }

    /// Refuses a thread that must not use the stream where it is.
    #[cold]
    fn refuse_here(&self) -> Result<()> {
        steps::refuse()?;
        self.0.engine.refuse_here()
    }

    /// Marks a batch, has the engine take it, and takes note of its queue pairs. Returns the number of the submission.
    fn put(
        &self,
        (used, guard): (&mut Used, &mut SubmitGuard),
        batch: &mut Batch,
        submit: impl FnOnce(&mut Batch, &mut SubmitGuard) -> Result<u64>,
    ) -> Result<u64> {
        batch.mark(self.0.id, !self.0.signals)?;
        // Before the engine has it: it may run at once.
        batch.note(Stage::Submitted, Stage::WaitSubmitted, self.0.id);
        let seq = match submit(batch, guard) {
            Ok(seq) => seq,
            Err(error) => {
                batch.refuse(self.0.id);
                return Err(error);
            }
        };
        batch.cores().for_each(|core| note_use(used, core, seq));
        Ok(seq)
    }

    /// Lets go of a batch that the engine has, now that the turn was let go: the device is told of it.
    #[inline]
    fn hand_over(&self, batch: &mut Batch) {
        if !self.0.signals {
            batch.tell(self.0.nudger.as_ref());
        }
        batch.hand_over();
    }

    /// As [`Stream::submit`], but waits for room in a full stream.
    ///
    /// # Errors
    /// As [`Stream::submit`]; [`Error::StreamFull`] only after `timeout`.
    pub fn submit_within(&self, batch: &mut Batch, timeout: Duration) -> Result<()> {
        self.while_full(deadline(timeout), || self.submit(batch))
    }

    /// Waits for room for a batch of `ops` operations, `host_fns` of them host functions: for who must know before it posts what
    /// the batch needs. Another thread may take the room.
    ///
    /// # Errors
    /// [`Error::StreamFull`] after `timeout`, and the error that failed the stream.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn wait_room(&self, ops: usize, host_fns: usize, timeout: Duration) -> Result<()> {
        self.while_full(deadline(timeout), || self.0.engine.ask_room(&mut self.state()?.guard, ops, host_fns))
    }

    /// Tries again when there is room, until the deadline.
    fn while_full<T>(&self, deadline: Instant, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match attempt() {
                Err(Error::StreamFull { .. })
                    if Instant::now() < deadline && self.0.engine.wait_room(deadline) => {}
                other => return other,
            }
        }
    }

    /// Submits what `add` puts into a batch.
    fn one<T>(&self, add: impl FnOnce(&mut Batch) -> Result<T>) -> Result<T> {
        // Dropped after the turn: to drop a host function is to run foreign code.
        let mut batch = Batch::new();
        let mut state = self.state()?;
        let State { used, recording, guard } = &mut *state;
        let added = add(&mut batch)?;
        self.submit_locked((used, guard), recording, &mut batch)?;
        state.end();
        self.hand_over(&mut batch);
        Ok(added)
    }

    /// As [`Stream::one`], of what cannot be refused before it is submitted.
    fn only(&self, add: impl FnOnce(&mut Batch)) -> Result<()> {
        self.one(|batch| {
            add(batch);
            Ok(())
        })
    }

    /// Holds the stream until a work request has completed: see [`Batch::wait`]. One that was prepared may be posted later, by whatever
    /// stream; if it is dropped instead, the wait is for whichever send takes its number, and else runs into its limit.
    ///
    /// # Errors
    /// As [`Batch::wait`] and [`Stream::submit`].
    pub fn wait(&self, completion: &Completion) -> Result<()> {
        self.one(|batch| batch.wait(completion))
    }

    /// Holds the stream until a word satisfies a condition.
    ///
    /// # Errors
    /// As [`Stream::submit`].
    pub fn wait_value32(&self, word: &Word32, value: u32, cond: Cond) -> Result<()> {
        self.only(|batch| batch.wait_value32(word, value, cond))
    }

    /// Holds the stream until a word satisfies a condition.
    ///
    /// # Errors
    /// As [`Stream::submit`].
    pub fn wait_value64(&self, word: &Word64, value: u64, cond: Cond) -> Result<()> {
        self.only(|batch| batch.wait_value64(word, value, cond))
    }

    /// Writes a word in stream order.
    ///
    /// # Errors
    /// As [`Stream::submit`].
    pub fn write_value32(&self, word: &Word32, value: u32) -> Result<()> {
        self.only(|batch| batch.write_value32(word, value))
    }

    /// Writes a word in stream order.
    ///
    /// # Errors
    /// As [`Stream::submit`].
    pub fn write_value64(&self, word: &Word64, value: u64) -> Result<()> {
        self.only(|batch| batch.write_value64(word, value))
    }

    /// Runs a function on the CPU in stream order: see [`Batch::host_fn`].
    ///
    /// # Errors
    /// As [`Stream::submit`].
    pub fn host_fn(&self, f: impl FnOnce() + Send + 'static) -> Result<()> {
        self.only(|batch| batch.host_fn(f))
    }

    /// Blocks until everything submitted before has run, then reports the first failure of the stream or of a queue
    /// pair it used since the last call.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout` (the work goes on), the stream's error, or the root cause of the first
    /// broken queue pair. A stream that ran to its end after such an error has *not* received what it waited for.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let _range = DOMAIN.range(c"synchronize");
        steps::refuse()?;
        let (seq, deadline) = (self.0.engine.submitted(), deadline(timeout));
        let late = || Error::Deadline { what: "stream synchronize", after: timeout };
        if !self.0.engine.wait_completed(seq, deadline) {
            return Err(late());
        }
        // Who has the turn may have to wait in the driver.
        let patience = Instant::now() + Duration::from_millis(1);
        let state = self.0.submit_lock.take_until(deadline.max(patience)).ok_or_else(late)?;
        let mut state = StateGuard { inner: &self.0, state: Some(state) };
        let cores: Vec<_> = state.used.iter().map(|(core, _)| core.clone()).collect();
        // What was submitted meanwhile, perhaps by another thread, is looked at again by the call that waits for it.
        state.used.retain(|(_, last)| *last > seq);
        drop(state);
        if let Some(error) = self.0.engine.error() {
            return Err(error);
        }
        cores.iter().try_for_each(|core| core.check())
    }

    /// What the stream is doing, without waiting.
    pub fn query(&self) -> StreamStatus {
        let engine = &self.0.engine;
        // In this order: others may submit meanwhile.
        let completed = engine.completed();
        StreamStatus { pending: engine.submitted() - completed, error: engine.error() }
    }

    /// Gives up everything pending: the queue pairs it uses are stopped, waits are released, nothing more runs.
    pub fn abort(&self) {
        self.0.engine.fail(Error::StreamAborted { stream: self.0.name.clone() });
    }
}

impl Stream {
    /// Sends in stream order.
    ///
    /// # Errors
    /// As [`Batch::send`] and [`Stream::submit`].
    pub fn send<'q>(&self, qp: &'q Qp, wr: &SendWr<'_>) -> Result<Submitted<'q>> {
        // Each way by itself: what was sent stays in registers where it is short.
        let send = |state: &mut State| match qp.send.send_short(wr, self.0.id, !self.0.signals) {
            Some(sent) => self.trigger(state, &qp.send, sent),
            None => self.send_any(state, &qp.send, wr),
        };
        let tell = |end| qp.send.ensure_watched(end);
        self.single(&qp.send.end, send, tell, |batch| batch.send(qp, wr))
    }

    #[cold]
    #[inline(never)]
    fn send_any<'q>(
        &self,
        state: &mut State,
        queue: &'q Arc<SendQueue>,
        wr: &SendWr<'_>,
    ) -> Result<(Submitted<'q>, u64)> {
        let sent = queue.send_any(wr, self.0.id, !self.0.signals)?;
        self.trigger(state, queue, sent)
    }

    /// Returns what was submitted, and up to where it will be rung.
    #[inline(always)]
    fn trigger<'q>(
        &self,
        state: &mut State,
        queue: &'q Arc<SendQueue>,
        sent: Sent,
    ) -> Result<(Submitted<'q>, u64)> {
        if !sent.is_recorded {
            self.note_submitted(queue, sent.sends.range.start);
        }
        let (source, send_doorbell) = (queue.end.source(), queue.send_doorbell());
        match self.0.engine.trigger(&mut state.guard, source, send_doorbell, sent.sends.doorbell_value()) {
            Ok(seq) => note_use(&mut state.used, &queue.end.qp, seq),
            Err(error) => return Err(self.refuse_send(queue, sent, error)),
        }
        Ok((Submitted::new(&queue.end, sent.sends.range.start), sent.sends.end))
    }

    #[cold]
    #[inline(never)]
    fn note_submitted(&self, queue: &SendQueue, n: u64) {
        queue.note(Stage::Submitted, n..n + 1, self.0.id);
    }

    #[cold]
    #[inline(never)]
    fn refuse_send(&self, queue: &Arc<SendQueue>, sent: Sent, why: Error) -> Error {
        PreparedSend::of(queue, sent.prepared(), queue.end.hold()).refuse(self.0.id);
        why
    }

    #[cold]
    #[inline(never)]
    fn refuse_wait(&self, end: &Arc<QueueEnd>, n: u64, why: Error) -> Error {
        PreparedWait::of((n, end.completion(n)), end.hold(), Asked::Next, Some(self.0.id)).refuse(self.0.id);
        why
    }

    /// Holds the stream until the next send completion of `qp`.
    ///
    /// # Errors
    /// As [`Batch::wait_send`] and [`Stream::submit`].
    pub fn wait_send<'q>(&self, qp: &'q Qp) -> Result<Submitted<'q>> {
        self.wait_single(&qp.send.end, |batch| batch.wait_send(qp))
    }

    /// Holds the stream until the next receive completion of `qp`.
    ///
    /// # Errors
    /// As [`Batch::wait_recv`] and [`Stream::submit`].
    pub fn wait_recv<'q>(&self, qp: &'q Qp) -> Result<Submitted<'q>> {
        self.wait_single(&qp.recv.end, |batch| batch.wait_recv(qp))
    }

    #[inline(always)]
    fn wait_single<'q>(
        &self,
        end: &'q Arc<QueueEnd>,
        add: impl FnOnce(&mut Batch) -> Result<Completion>,
    ) -> Result<Submitted<'q>> {
        let tell = |n| end.cq.ensure_attended(n, self.0.nudger.as_ref());
        self.single(end, |state| self.wait_next(state, end), tell, add)
    }

    /// Returns what was submitted, and the completion that is waited for.
    #[inline(always)]
    fn wait_next<'q>(&self, state: &mut State, end: &'q Arc<QueueEnd>) -> Result<(Submitted<'q>, u64)> {
        let n = PreparedWait::claim_next(end, self.0.id, !self.0.signals)?;
        end.note_wait(Stage::WaitSubmitted, n, self.0.id);
        match self.0.engine.wait(&mut state.guard, end.source(), &end.cq.arrival(n), n) {
            Ok(seq) => note_use(&mut state.used, &end.qp, seq),
            Err(error) => return Err(self.refuse_wait(end, n, error)),
        }
        Ok((Submitted::new(end, n), n))
    }

    /// Does it by `put`, which says what the device foresees, and tells it by `tell` where a GPU does it; while the stream is being
    /// captured, in a batch.
    #[inline(always)]
    fn single<'q>(
        &self,
        end: &'q Arc<QueueEnd>,
        put: impl FnOnce(&mut State) -> Result<(Submitted<'q>, u64)>,
        tell: impl FnOnce(u64),
        add: impl FnOnce(&mut Batch) -> Result<Completion>,
    ) -> Result<Submitted<'q>> {
        let mut state = self.state()?;
        if state.recording.is_some() {
            return self.captured(state, add).map(|n| Submitted::new(end, n));
        }
        let _range = DOMAIN.range(c"submit");
        let done = reset::hand_over(end.hold(), || put(&mut state));
        state.end();
        let (submitted, foreseen) = done?;
        // The turn was let go.
        if !self.0.signals {
            tell(foreseen);
        }
        Ok(submitted)
    }

    #[cold]
    #[inline(never)]
    fn captured(
        &self,
        state: StateGuard<'_>,
        add: impl FnOnce(&mut Batch) -> Result<Completion>,
    ) -> Result<u64> {
        drop(state);
        self.one(add).map(|completion| completion.index())
    }
}

/// Whose turn it is. One for each stream, which its engine shares.
#[derive(Default)]
struct SubmitLock {
    state: Mutex<State>,
    /// Something is due that somebody wanted who did not have the turn.
    wanted: AtomicU32,
}

impl SubmitLock {
    /// Waits for the turn. It must be ended by [`SubmitLock::end`].
    #[inline(always)]
    fn take(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// As [`SubmitLock::take`], if nobody has it.
    fn try_take(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// As [`SubmitLock::take`], until the deadline.
    fn take_until(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock_until(deadline)
    }

    /// Ends a turn, and does what others wanted meanwhile.
    #[inline(always)]
    fn end<'a>(&'a self, guard: MutexGuard<'a, State>, wanted: impl Fn(&mut State)) {
        submit_lock::end(&self.wanted, guard, || self.try_take(), |state| wanted(state));
    }

    /// Wants something done, by this thread or by whoever has the turn.
    fn want(&self, wanted: impl Fn(&mut State)) {
        submit_lock::want(&self.wanted, || self.try_take(), |state| wanted(state));
    }
}

thread_local! {
    static WITHIN: Cell<u8> = const { Cell::new(0) };
}

/// A call out of the library.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum ReentrancyCheck {
    /// Of the function that launches a kernel with steps.
    Launch = 1,
    /// Of a host function, by CUDA.
    HostFn = 2,
}

impl ReentrancyCheck {
    /// Whether the thread is within any.
    #[inline(always)]
    fn any() -> bool {
        WITHIN.get() != 0
    }

    /// Whether it is within this one.
    #[inline]
    fn is_here(self) -> bool {
        WITHIN.get() & self as u8 != 0
    }

    fn begin(self) {
        WITHIN.set(WITHIN.get() | self as u8);
    }

    fn end(self) {
        WITHIN.set(WITHIN.get() & !(self as u8));
    }
}
