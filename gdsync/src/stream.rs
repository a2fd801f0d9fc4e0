//! Streams: queues of memory operations that run in order, on a host thread or on a GPU.
//!
//! # Graphs
//!
//! Submissions within [`Stream::capture`] are recorded, not run. Each [`Graph::launch`] runs them all as one submission
//! with new work requests. Eager work on the same queue pair may run between launches.
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
//!     // On a CUDA stream, kernels and copies launched on `stream.raw()` here are captured too.
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
mod inbox;
mod op;
mod order;
mod peer;
mod place;
mod prepared;
mod record;
mod steps;

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

pub use batch::Batch;
pub use batch::Replenish;
pub(crate) use cuda::SubmitGuard;
pub use cuda::{CudaStreamConfig, Nudge, Via, calibrate};
use engine::Engine;
use graph::within_capture;
pub use graph::{Capture, Graph, Launch};
pub use host::HostStreamConfig;
pub use inbox::{FreePlaces, Inbox, PeerInbox};
pub use op::Cond;
pub(crate) use op::{Arrival, DoorbellValue, Op, Ops, SendDoorbell, Source};
use order::Follows;
pub use order::{StreamOrder, Ticket};
pub use peer::PeerSignal;
pub use place::{OpenMemory, Placement, ReceiveLine};
pub use prepared::{PreparedSend, PreparedWait, SendWords, WaitWords};
pub use steps::{DEVICE_HEADER, KernelSteps};

use crate::nvtx::DOMAIN;
use crate::verbs::end::QueueEnd;
use crate::verbs::qp::QpCore;
use crate::verbs::room::RoomWait;
use crate::verbs::sq::OfStream;
use crate::verbs::stream_name::StreamName;
use crate::verbs::{Completion, Qp, RecvWr, SendWr};
use cuda::CudaEngine;
use gdsync_device::GpuNudge;
use gdsync_device::cuda::{Gpu, RawStream};
use gdsync_device::error::{Error, Result, rounded, stream_label};
use gdsync_device::memory::{Word32, Word64};
use gdsync_device::recorder::Stage;
use gdsync_shm::pending_flag;
use host::HostEngine;
use record::Recording;

/// A stream. Clones share it.
///
/// # Room
/// A stream holds a bounded number of submissions, and a queue pair a bounded number of requests. Calls that enqueue wait for room, as
/// those of CUDA do: up to the stream's wait limit, or as [`Stream::with_timeout`] says. Then they fail with [`Error::StreamFull`] or
/// [`Error::QueueFull`], and have enqueued nothing. Calls of a [`Qp`] itself and of a [`Batch`], which writes to queue pairs before a
/// stream gets it, do not wait, as those of verbs: [`Qp::wait_send_room`] does.
///
/// # Dropping
/// As with `cudaStreamDestroy`, the last clone may be dropped at any time: the stream finishes the work that it has, which
/// stays allocated until then, and its waits keep their limit. Nobody sees a failure then but the queue pairs that it used
/// ([`Qp::check`](crate::verbs::Qp::check)) and the log; call [`Stream::synchronize`] to see it, and [`Stream::abort`] to end
/// the work early. A panic that drops a stream aborts it. A process that ends takes its streams along.
#[derive(Clone)]
pub struct Stream(Arc<Inner>, Duration);

struct Inner {
    number: StreamName,
    name: String,
    engine: Arc<dyn Engine>,
    /// Cached from the engine.
    signals: bool,
    nudger: Option<Arc<dyn GpuNudge>>,
    submit_lock: Arc<SubmitLock>,
}

type Used = Vec<(Arc<QpCore>, u64)>;

#[derive(Default)]
struct State {
    /// Queue pairs used since their last check, with the last submission that used each.
    used: Used,
    /// Set while the stream is being captured: submissions go here.
    recording: Option<Recording>,
    /// State of a CUDA engine.
    guard: SubmitGuard,
}

/// The submit lock of a stream, until it is dropped.
struct StateGuard<'a> {
    inner: &'a Inner,
    /// `Some` until the drop.
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

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            self.inner.submit_lock.unlock(state, |state| self.inner.engine.mark(&mut state.guard));
        }
    }
}

impl Inner {
    #[inline]
    fn lock(&self) -> StateGuard<'_> {
        StateGuard { inner: self, state: Some(self.submit_lock.lock()) }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} {})", self.0.engine.kind(), stream_label(&self.0.name))
    }
}

/// Records that a submission uses a queue pair, mostly the one used last.
#[inline]
fn note_use(used: &mut Used, core: &Arc<QpCore>, seq: u64) {
    match used.iter_mut().rfind(|(known, _)| Arc::ptr_eq(known, core)) {
        Some((_, last)) => *last = seq,
        None => used.push((core.clone(), seq)),
    }
}

/// The end of `timeout`. A timeout beyond the clock's range never ends.
fn deadline(timeout: Duration) -> Instant {
    const MAX_TIMEOUT: Duration = Duration::from_secs(1 << 32);
    let now = Instant::now();
    now.checked_add(timeout.min(MAX_TIMEOUT)).unwrap_or(now)
}

/// The state of a stream.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StreamStatus {
    /// Number of submissions not yet completed.
    pub pending: u64,
    /// The error that failed the stream.
    pub error: Option<Error>,
}

impl Stream {
    /// A stream that a host thread runs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a configuration out of range; [`Error::Sys`] when the thread cannot be created.
    pub fn host(mut config: HostStreamConfig) -> Result<Self> {
        let number = StreamName::new(&mut config.name);
        let (name, limit) = (config.name.clone(), config.wait_limit);
        Ok(Self::with(number, name, limit, HostEngine::start(config)?, Arc::default()))
    }

    /// A new CUDA stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a configuration out of range; [`Error::Cuda`]; [`Error::Sys`] when the watchdog
    /// thread cannot be created.
    pub fn cuda(gpu: &Gpu, mut config: CudaStreamConfig) -> Result<Self> {
        let number = StreamName::new(&mut config.name);
        let (name, limit) = (config.name.clone(), config.wait_limit);
        let submit_lock = Arc::<SubmitLock>::default();
        let engine = CudaEngine::start(gpu, config, submit_lock.clone())?;
        Ok(Self::with(number, name, limit, engine, submit_lock))
    }

    /// A CUDA stream of the application. Its own work, such as kernels and copies, and submissions here run in the
    /// order in which they are queued. The legacy default stream is allowed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Cuda`], [`Error::Sys`], see [`Stream::cuda`]; [`Error::Unsupported`] for
    /// the per-thread default stream.
    ///
    /// # Safety
    /// `stream` must belong to the context of `gpu` and outlive the result and its clones, of which a host function must not drop
    /// the last. It is not destroyed here. It may be destroyed before work that was submitted here is done.
    pub unsafe fn cuda_from_raw(gpu: &Gpu, stream: RawStream, mut config: CudaStreamConfig) -> Result<Self> {
        let number = StreamName::new(&mut config.name);
        let (name, limit) = (config.name.clone(), config.wait_limit);
        let submit_lock = Arc::<SubmitLock>::default();
        let engine = CudaEngine::from_raw(gpu, stream, config, submit_lock.clone())?;
        Ok(Self::with(number, name, limit, engine, submit_lock))
    }

    fn with(
        number: StreamName,
        name: String,
        timeout: Duration,
        engine: Arc<dyn Engine>,
        submit_lock: Arc<SubmitLock>,
    ) -> Self {
        let (signals, nudger) = (engine.signals(), engine.nudger().cloned());
        Self(Arc::new(Inner { number, name, engine, signals, nudger, submit_lock }), timeout)
    }

    /// The same stream, whose calls wait up to `timeout` for [room](Stream#room). With zero a call that finds a queue full fails at
    /// once.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self(self.0.clone(), timeout)
    }

    /// The `CUstream`, to launch kernels on; `None` for a host stream. Capture it with [`Stream::capture`]. While the
    /// application captures it by other means, submissions are refused, unless [`CudaStreamConfig::captured_by_others`]
    /// is `false`.
    ///
    /// A kernel launched with the attribute for programmatic stream serialization waits (`cudaGridDependencySynchronize`) before
    /// it uses what the stream has received, as CUDA demands: kernels of this library let the next one start.
    pub fn raw(&self) -> Option<RawStream> {
        self.0.engine.raw()
    }

    /// Its number in this process: clones have the same, other streams have others.
    #[inline]
    pub fn id(&self) -> u64 {
        self.0.number.id()
    }

    /// The engine in one word: "host" or "cuda".
    pub fn kind(&self) -> &'static str {
        self.0.engine.kind()
    }

    /// Submits a batch, all or nothing, and empties it. Waits for [room](Stream#room), but not for the work.
    ///
    /// # Errors
    /// The batch is left unchanged. [`Error::StreamFull`], [`Error::OutOfOrder`], [`Error::Busy`]; the error that broke
    /// a queue pair of the batch or failed the stream.
    pub fn submit(&self, batch: &mut Batch) -> Result<()> {
        self.with_room(None, |_| self.submit_now(batch))
    }

    fn submit_now(&self, batch: &mut Batch) -> Result<()> {
        let mut state = self.state()?;
        self.submit_locked(&mut state, batch)?;
        drop(state);
        self.notify(batch);
        batch.hand_over();
        Ok(())
    }

    fn submit_locked(&self, state: &mut State, batch: &mut Batch) -> Result<()> {
        let _range = DOMAIN.range(c"submit");
        let State { used, recording, guard } = state;
        let Some(recording) = recording else {
            return self.put(used, batch, |batch| self.0.engine.submit(guard, &mut batch.ops)).map(drop);
        };
        record::check(batch)?;
        let hooks = batch.hooks()?;
        batch.expect_numbers();
        let anew = batch.anew();
        match &mut recording.steps {
            None => self.0.engine.record(guard, &batch.ops, &anew)?,
            Some(steps) => steps.push(self.0.engine.record_step(&batch.ops, &anew)?),
        }
        recording.add(batch, hooks, &anew);
        Ok(())
    }

    /// Refuses `what`, which a graph cannot repeat, while the stream is being captured: see [`Batch::only_once`].
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn refuse_in_capture(&self, what: &'static str, fix: &'static str) -> Result<()> {
        if self.state()?.recording.is_some() { Err(record::once(what, fix)) } else { Ok(()) }
    }

    /// Takes the submit lock. Refused in a call from which streams must not be used.
    #[inline]
    fn state(&self) -> Result<StateGuard<'_>> {
        if ReentrancyCheck::any() {
            self.check_reentrancy()?;
        }
        Ok(self.0.lock())
    }

    /// Refuses a call within a function that is called under the submit lock, or a host function.
    #[cold]
    fn check_reentrancy(&self) -> Result<()> {
        steps::refuse_in_launch()?;
        self.0.engine.check_reentrancy()
    }

    /// Claims the batch's queues for this stream, passes the batch to the engine, and records its queue pairs. Returns
    /// the submission's number.
    fn put(
        &self,
        used: &mut Used,
        batch: &mut Batch,
        submit: impl FnOnce(&mut Batch) -> Result<u64>,
    ) -> Result<u64> {
        batch.mark(self.of_stream())?;
        let begun = batch.follows.as_mut().map_or(Ok(()), |follows| follows.begin(self.id()));
        begun.inspect_err(|_| batch.unmark())?;
        // Recorded first, because the engine may run it at once.
        batch.note(Stage::Submitted, Stage::WaitSubmitted, self.id());
        batch.set_numbers();
        let seq = match submit(batch) {
            Ok(seq) => seq,
            Err(error) => {
                batch.refuse(self.id());
                batch.follows.iter().for_each(Follows::refuse);
                return Err(error);
            }
        };
        if let Some(follows) = &mut batch.follows {
            follows.submitted(self.id(), seq, self.0.engine.progress());
        }
        batch.cores().for_each(|core| note_use(used, core, seq));
        Ok(seq)
    }

    /// Notifies the device of a submitted batch. The submit lock has been released.
    #[inline]
    fn notify(&self, batch: &Batch) {
        if !self.0.signals {
            batch.notify(self.0.nudger.as_ref());
        }
    }

    /// Waits for [room](Stream#room) for a batch of `ops` operations, `host_fns` of them host functions. Another thread may take the
    /// room afterwards.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; the error that failed the stream.
    pub fn wait_room(&self, ops: usize, host_fns: usize) -> Result<()> {
        self.with_room(None, |_| self.0.engine.check_room(&mut self.state()?.guard, ops, host_fns))
    }

    /// Retries `attempt`, which submits nothing if it fails, while the stream or the queue `end` is full. An attempt may name another
    /// queue.
    #[inline]
    fn with_room<'e, T>(
        &self,
        mut end: Option<&'e QueueEnd>,
        mut attempt: impl FnMut(&mut Option<&'e QueueEnd>) -> Result<T>,
    ) -> Result<T> {
        match attempt(&mut end) {
            Err(Error::StreamFull { .. } | Error::QueueFull { .. }) if !self.1.is_zero() => {
                self.retry(end, attempt)
            }
            other => other,
        }
    }

    #[cold]
    fn retry<'e, T>(
        &self,
        mut end: Option<&'e QueueEnd>,
        mut attempt: impl FnMut(&mut Option<&'e QueueEnd>) -> Result<T>,
    ) -> Result<T> {
        let (deadline, waiting) = (deadline(self.1), RoomWait::new(self.1));
        loop {
            let is_last = waiting.is_over();
            match (attempt(&mut end), end) {
                (Err(Error::StreamFull { .. }), _)
                    if Instant::now() < deadline && self.may_wait() && self.0.engine.wait_room(deadline) => {}
                (Err(Error::QueueFull { .. }), Some(end)) if !is_last && self.may_wait() => {
                    waiting.pause(end)
                }
                (other, _) => return other,
            }
        }
    }

    /// Whether the stream goes on while this thread waits: not in a host function of it.
    fn may_wait(&self) -> bool {
        self.0.engine.check_wait().is_ok()
    }

    fn of_stream(&self) -> OfStream {
        OfStream { id: self.id(), by_gpu: !self.0.signals }
    }

    /// Submits a batch of one operation, which `add` fills, for the queue `end` if any. Waits for room.
    fn submit_one<T>(
        &self,
        end: Option<&QueueEnd>,
        mut add: impl FnMut(&mut Batch) -> Result<T>,
    ) -> Result<T> {
        // Filled again for each attempt, so that it does not stay prepared meanwhile, ahead of other threads.
        self.with_room(end, |_| {
            let mut batch = Batch::new();
            let mut state = self.state()?;
            batch.stream = state.recording.is_none().then(|| self.of_stream());
            // Not taken apart: a copy behind the ring's stores would wait for its lines.
            let added = add(&mut batch);
            if added.is_ok() {
                self.submit_locked(&mut state, &mut batch)?;
                drop(state);
                self.notify(&batch);
            }
            added
        })
    }

    /// Like [`Stream::submit_one`], for an `add` that cannot fail, and is called once.
    fn submit_with(&self, add: impl FnOnce(&mut Batch)) -> Result<()> {
        // Dropped after the submit lock: dropping a host function runs foreign code.
        let mut batch = Batch::new();
        add(&mut batch);
        self.submit(&mut batch)
    }

    /// Holds the stream until a work request has completed: see [`Batch::wait`]. A prepared request may be posted
    /// later, on any stream. If it is dropped instead, the wait is for the request that reuses its number, or runs into
    /// the wait limit.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`], [`Error::Unsupported`], [`Error::Reset`], [`Error::StreamFull`],
    /// [`Error::OutOfOrder`], [`Error::Busy`]; the error that broke the queue pair or failed the stream.
    pub fn wait(&self, completion: &Completion) -> Result<()> {
        self.submit_one(None, |batch| batch.wait(completion))
    }

    /// Holds the stream until a word satisfies a condition.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::InvalidArgument`] or [`Error::Cuda`] for memory or conditions that the engine
    /// refuses; the error that failed the stream.
    pub fn wait_value32(&self, word: &Word32, value: u32, cond: Cond) -> Result<()> {
        self.submit_with(|batch| batch.wait_value32(word, value, cond))
    }

    /// Holds the stream until a word satisfies a condition.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::InvalidArgument`] or [`Error::Cuda`] for memory or conditions that the engine
    /// refuses; the error that failed the stream.
    pub fn wait_value64(&self, word: &Word64, value: u64, cond: Cond) -> Result<()> {
        self.submit_with(|batch| batch.wait_value64(word, value, cond))
    }

    /// Writes a word in stream order.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::InvalidArgument`] or [`Error::Cuda`] for memory or conditions that the engine
    /// refuses; the error that failed the stream.
    pub fn write_value32(&self, word: &Word32, value: u32) -> Result<()> {
        self.submit_with(|batch| batch.write_value32(word, value))
    }

    /// Writes a word in stream order.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::InvalidArgument`] or [`Error::Cuda`] for memory or conditions that the engine
    /// refuses; the error that failed the stream.
    pub fn write_value64(&self, word: &Word64, value: u64) -> Result<()> {
        self.submit_with(|batch| batch.write_value64(word, value))
    }

    /// Runs a function on the CPU in stream order: see [`Batch::host_fn`].
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::InvalidArgument`] or [`Error::Cuda`] for memory or conditions that the engine
    /// refuses; the error that failed the stream.
    pub fn host_fn(&self, f: impl FnOnce() + Send + 'static) -> Result<()> {
        self.submit_with(|batch| batch.host_fn(f))
    }

    /// Blocks until all earlier submissions have run. Then reports the first failure of the stream, or of a queue pair
    /// used since the last call. A stream that has failed runs to its end when the GPU has room for its kernels;
    /// [`Stream::query`] tells the failure before.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout` (the work continues); [`Error::Unsupported`] while the stream is being captured (what is
    /// captured has not run), and within a host function of the stream, which would wait for itself; the stream's error; the root
    /// cause of the first broken queue pair, but not a peer that went when all requests were complete. After such an error the stream
    /// has run to its end *without* receiving what it waited for.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let _range = DOMAIN.range(c"synchronize");
        steps::refuse_in_launch()?;
        self.0.engine.check_wait()?;
        let deadline = deadline(timeout);
        let late = || self.late("synchronizing", timeout);
        let lock = || -> Result<_> {
            // Its holder may be blocked in the driver.
            let patience = Instant::now() + Duration::from_millis(1);
            let state = self.0.submit_lock.try_lock_until(deadline.max(patience)).ok_or_else(late)?;
            Ok(StateGuard { inner: &self.0, state: Some(state) })
        };
        if lock()?.recording.is_some() {
            return Err(within_capture("synchronizing"));
        }
        let seq = self.0.engine.submitted();
        if !self.0.engine.wait_completed(seq, deadline) {
            return Err(late());
        }
        let mut state = lock()?;
        let cores: Vec<_> = state.used.iter().map(|(core, _)| core.clone()).collect();
        // Later submissions, perhaps of another thread, are checked by the next call.
        state.used.retain(|(_, last)| *last > seq);
        drop(state);
        if let Some(error) = self.0.engine.error() {
            return Err(error);
        }
        cores.iter().try_for_each(|core| core.check_requests())
    }

    /// No longer reports failures of `qp` from earlier submissions, for which [`Stream::synchronize`] keeps it.
    pub fn forget(&self, qp: &Qp) {
        self.0.lock().used.retain(|(core, _)| !Arc::ptr_eq(core, qp.core()));
    }

    /// The error of a call on the stream that ends before the stream's work: what holds the stream.
    fn late(&self, call: &str, timeout: Duration) -> Error {
        let awaited = match self.0.engine.holder() {
            Some((wait, left)) => format!("{wait}; the stream's wait limit ends that in {}", rounded(left)),
            None => format!(
                "{} submission(s), but for no message or word now; see whether a host function or a kernel takes long",
                self.query().pending
            ),
        };
        let awaited = format!("{awaited}; `gdasync trace {}` shows more", std::process::id());
        Error::late(format!("{call} {}", stream_label(&self.0.name)), timeout, awaited)
    }

    /// Returns the stream's state. Does not block.
    pub fn query(&self) -> StreamStatus {
        let engine = &self.0.engine;
        // `completed` first: others may submit meanwhile.
        let completed = engine.completed();
        StreamStatus { pending: engine.submitted() - completed, error: engine.error() }
    }

    /// Aborts all pending work at once: stops the queue pairs it uses and releases the waits. Nothing more runs.
    pub fn abort(&self) {
        self.0.engine.fail(Error::StreamAborted { stream: self.0.name.clone() });
    }
}

impl Stream {
    /// Sends in stream order.
    ///
    /// # Errors
    /// [`Error::WrongState`], [`Error::QueueFull`], [`Error::WorkRequest`], [`Error::OutOfOrder`], [`Error::Busy`],
    /// [`Error::StreamFull`]; the error that broke the queue pair or failed the stream.
    pub fn send(&self, qp: &Qp, wr: &SendWr<'_>) -> Result<Completion> {
        self.submit_one(Some(&qp.send.end), |batch| batch.send(qp, wr))
    }

    /// Posts a receive in stream order: see [`Batch::post_recv`].
    ///
    /// # Errors
    /// [`Error::WrongState`], [`Error::QueueFull`], [`Error::WorkRequest`], [`Error::OutOfOrder`], [`Error::Busy`],
    /// [`Error::StreamFull`]; [`Error::Unsupported`] in a capture; the error that broke the queue pair or failed the stream.
    pub fn post_recv(&self, qp: &Qp, wr: &RecvWr<'_>) -> Result<Completion> {
        self.submit_one(Some(&qp.recv.end), |batch| batch.post_recv(qp, wr))
    }

    /// Holds the stream until the next send completion of `qp`.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`], [`Error::Unsupported`] on a shared completion queue, [`Error::OutOfOrder`],
    /// [`Error::Busy`], [`Error::StreamFull`]; the error that broke the queue pair or failed the stream.
    pub fn wait_send(&self, qp: &Qp) -> Result<Completion> {
        self.submit_one(None, |batch| batch.wait_send(qp))
    }

    /// Holds the stream until the next receive completion of `qp`.
    ///
    /// # Errors
    /// Those of [`Stream::wait_send`]; [`Error::Unsupported`] also where the GPU may not see payload that a card
    /// writes.
    pub fn wait_recv(&self, qp: &Qp) -> Result<Completion> {
        self.submit_one(None, |batch| batch.wait_recv(qp))
    }
}

/// The submit lock of a stream, shared with its engine. Held from the check of a batch until the engine has queued it,
/// because a concurrent submission in between would ring doorbells out of order. Requested work, such as a mark, that
/// finds the lock taken is left to its holder.
#[derive(Default)]
struct SubmitLock {
    state: Mutex<State>,
    /// Work was requested while the lock was taken.
    requested: AtomicU32,
}

impl SubmitLock {
    /// Takes the lock. Release it by [`SubmitLock::unlock`].
    #[inline]
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Takes the lock if it is free.
    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// Takes the lock, waiting until the deadline.
    fn try_lock_until(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock_until(deadline)
    }

    /// Releases the lock, and runs `requested` if others requested it meanwhile.
    #[inline]
    fn unlock<'a>(&'a self, mut guard: MutexGuard<'a, State>, requested: impl Fn(&mut State)) {
        let work = |state: &mut MutexGuard<'a, State>| {
            if pending_flag::take(&self.requested) {
                requested(state);
            }
        };
        work(&mut guard);
        pending_flag::unlock(&self.requested, guard, || self.try_lock(), work);
    }

    /// Has `requested` run, by this thread or by the lock's holder.
    fn request(&self, requested: impl Fn(&mut State)) {
        pending_flag::set(&self.requested);
        if let Some(guard) = self.try_lock() {
            self.unlock(guard, requested);
        }
    }
}

thread_local! {
    static WITHIN: Cell<u8> = const { Cell::new(0) };
}

/// A call from the library into the application, during which streams must not be used.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum ReentrancyCheck {
    /// A function that is called under the submit lock: it launches a kernel with steps.
    Launch = 1,
    /// A host function, called by CUDA.
    HostFn = 2,
}

impl ReentrancyCheck {
    /// Whether the thread is in any such call.
    #[inline]
    fn any() -> bool {
        WITHIN.get() != 0
    }

    /// Whether the thread is in this call.
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
