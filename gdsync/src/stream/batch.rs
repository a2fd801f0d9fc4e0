//! Batches: sends, waits and word operations that go to a stream in one submission, in order.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, mem, ptr, thread};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::deadline;
use super::execute::{Runner, Unsatisfied, execute, message_of};
use super::op::{Cond, Op, Ops};
use super::order::Follows;
use super::prepared::{PreparedRecv, PreparedSend, PreparedWait};
use crate::verbs::cq::ClaimRange;
use crate::verbs::end::QueueEnd;
use crate::verbs::qp::QpCore;
use crate::verbs::sq::OfStream;
use crate::verbs::stream_name;
use crate::verbs::{Completion, Qp, RecvWr, SendWr};
use gdsync_device::GpuNudge;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word32, Word64};
use gdsync_device::recorder::{By, Log, Stage};

/// Sends, or waits, that a batch stores inline.
const INLINE_OPS: usize = 2;

/// Operations collected for one [`submit`](super::Stream::submit).
///
/// Sends are written to their queues when added. Dropping an unsubmitted batch cancels them.
#[derive(Debug, Default)]
#[must_use = "a batch does nothing until it is submitted"]
pub struct Batch {
    pub(super) ops: Ops,
    pub(super) sends: SmallVec<[PreparedSend; INLINE_OPS]>,
    pub(super) waits: SmallVec<[PreparedWait; INLINE_OPS]>,
    /// What cannot be repeated in a graph, and what to use instead.
    pub(super) only_once: Option<(&'static str, &'static str)>,
    /// Boxed, so that most batches are cheap to make and drop.
    pub(super) rare: Option<Box<RareState>>,
    /// What it follows beside queues.
    pub(super) follows: Option<Follows>,
    /// The stream that the batch is for, if known: its parts are submitted to it as they are added.
    pub(super) stream: Option<OfStream>,
    /// Operations before this index belong to an earlier part, whose doorbells must not cover later sends.
    pub(super) part: usize,
}

/// Rarely used state, boxed to keep [`Batch`] small.
#[derive(Debug, Default)]
pub(super) struct RareState {
    /// Completions that a wait before this index must cover; checked once the stream is known.
    pub(super) covered: Vec<(usize, Completion)>,
    /// The repeatable host functions, by index.
    pub(super) repeatable: Vec<(usize, Repeatable)>,
    /// Queue pairs whose failure the stream reports.
    pub(super) reported: Vec<Arc<QpCore>>,
    /// Receives that the stream posts.
    pub(super) receives: Vec<PreparedRecv>,
    /// Hooks to call before each launch of a graph that contains this batch.
    pub(super) before: Vec<Arc<dyn Replenish>>,
}

/// A hook that runs before each launch of a graph, for example to post the receives that the launch waits for.
pub trait Replenish: Any + fmt::Debug + Send + Sync {
    /// Called before each launch, even one that is then refused.
    ///
    /// # Errors
    /// On an error nothing is launched.
    fn replenish(&self) -> Result<()>;

    /// Called after each launch that was accepted.
    fn launched(&self) {}

    /// Whether it does what an earlier hook of the same graph does: then it is not called. By default if it is that one.
    fn is(&self, earlier: &dyn Replenish) -> bool {
        ptr::addr_eq(self, earlier)
    }
}

/// Adds a hook, unless an earlier one does the same.
pub(super) fn add_hook(hooks: &mut Vec<Arc<dyn Replenish>>, hook: Arc<dyn Replenish>) {
    if !hooks.iter().any(|earlier| hook.is(&**earlier)) {
        hooks.push(hook);
    }
}

/// A host function that can be called repeatedly.
#[derive(Clone)]
pub(super) struct Repeatable(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Repeatable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HOSTFN, repeatable")
    }
}

impl Batch {
    /// Submits the sends and waits to `stream` in their queues, all or none. Those of a known stream were, as they were
    /// added.
    pub(super) fn mark(&mut self, stream: OfStream) -> Result<()> {
        let mut parts = || {
            let mut receives = self.rare.iter_mut().flat_map(|rare| &mut rare.receives);
            receives.try_for_each(|receive| receive.submit(stream))?;
            if self.stream.is_none() {
                self.sends.iter_mut().try_for_each(|send| send.submit(stream))?;
                self.waits.iter_mut().try_for_each(|wait| wait.submit(stream))?;
            }
            let covers = |(_, c): &(_, Completion)| c.end.cq.covers(c.n, stream.id, &c.end.tracker);
            self.covered().iter().try_for_each(covers)
        };
        parts().map_err(|error| {
            self.unmark();
            match error {
                // The caller may not know which of its queue pairs it is.
                Error::OutOfOrder { qpn, .. } => match self.cores().find(|core| core.qpn == qpn) {
                    Some(core) => core.name_rank(error),
                    None => error,
                },
                other => other,
            }
        })
    }

    /// Undoes [`Batch::mark`], including a partial one.
    pub(super) fn unmark(&mut self) {
        let receives = self.rare.iter_mut().flat_map(|rare| rare.receives.iter_mut().rev());
        receives.for_each(PreparedRecv::unsubmit);
        self.waits.iter_mut().rev().for_each(PreparedWait::unsubmit);
        self.sends.iter_mut().rev().for_each(PreparedSend::unsubmit);
    }

    /// Records one stage for its sends and one for its waits.
    pub(super) fn note(&self, of_sends: Stage, of_waits: Stage, stream: u64) {
        for coalesced in self.sends.chunk_by(PreparedSend::precedes) {
            if let [first, ..] = coalesced {
                first.note_through(coalesced.last().unwrap_or(first), of_sends, stream);
            }
        }
        self.waits.iter().for_each(|wait| wait.note(of_waits, stream));
    }

    /// Notifies the device of the doorbells and waits of a GPU stream, after the submit lock has been released.
    #[inline]
    pub(super) fn notify(&self, nudger: Option<&Arc<dyn GpuNudge>>) {
        for (at, send) in self.sends.iter().enumerate() {
            // The last doorbell of a queue covers the earlier ones.
            if self.sends.get(at + 1).is_none_or(|next| !send.is_same_queue(next)) {
                send.ensure_watched();
            }
        }
        self.waits.iter().for_each(|wait| wait.ensure_attended(nudger));
    }

    /// Undoes the marks after the engine has refused the batch.
    pub(super) fn refuse(&mut self, stream: u64) {
        self.note(Stage::Refused, Stage::Refused, stream);
        self.unmark();
    }

    /// Of each operation, whether the launches of a graph differ in it.
    pub(super) fn anew(&self) -> Vec<bool> {
        let is_anew =
            |op: &Op| matches!(op, Op::Trigger(..) | Op::Await(..) | Op::HostFn(_) | Op::Message(_));
        self.ops.iter().map(is_anew).collect()
    }

    fn covered(&self) -> &[(usize, Completion)] {
        self.rare.as_ref().map_or(&[], |rare| &rare.covered)
    }

    pub(super) fn rare(&mut self) -> &mut RareState {
        self.rare.get_or_insert_default()
    }

    /// The queue pairs that the batch uses.
    #[inline]
    pub(super) fn cores(&self) -> impl Iterator<Item = &Arc<QpCore>> {
        let sends = self.sends.iter().map(|send| &send.queue.end.qp);
        sends
            .chain(self.waits.iter().map(PreparedWait::core))
            .chain(self.rare.iter().flat_map(|rare| rare.receives.iter().map(PreparedRecv::core)))
            .chain(self.covered().iter().map(|(_, c)| &c.end.qp))
            .chain(self.follows.iter().flat_map(|follows| follows.cores()))
            .chain(self.rare.iter().flat_map(|rare| &rare.reported))
    }

    /// Clears the batch after the engine has taken its operations.
    #[inline]
    pub(super) fn hand_over(&mut self) {
        self.sends.clear();
        self.waits.clear();
        self.rare = None;
        self.only_once = None;
        self.follows = None;
    }

    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of collected operations.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a send. One doorbell starts consecutive sends of a queue pair.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::WrongState`], [`Error::QueueFull`], [`Error::WorkRequest`],
    /// [`Error::Busy`], [`Error::OutOfOrder`]; the error that broke the queue pair.
    pub fn send(&mut self, qp: &Qp, wr: &SendWr<'_>) -> Result<Completion> {
        self.sends(qp, std::slice::from_ref(wr))
    }

    /// Adds several sends that one doorbell starts. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::WrongState`], [`Error::QueueFull`], [`Error::WorkRequest`],
    /// [`Error::Busy`], [`Error::OutOfOrder`]; the error that broke the queue pair.
    pub fn sends(&mut self, qp: &Qp, wrs: &[SendWr<'_>]) -> Result<Completion> {
        // References are taken before the ring is written: copies and atomics behind its stores wait for its lines.
        let (ops, end) = (self.ops.len(), qp.send.end.clone());
        self.sends.push(PreparedSend::empty(&qp.send));
        let send = self.sends.last_mut().expect("pushed above");
        send.add_op(&mut self.ops, self.part);
        if let Err(error) = send.prepare(wrs, self.stream) {
            self.sends.pop();
            self.ops.truncate(ops);
            return Err(error);
        }
        send.set_doorbell(&mut self.ops);
        Ok(end.completion(send.sends.range.end - 1))
    }

    /// Adds a receive: it is written to the queue now, and the stream posts it. No message is received into it before. Waits of
    /// the batch may be for the returned completion.
    ///
    /// Until the stream has got there, the CPU and other streams cannot post receives to `qp`. Graphs and kernel steps refuse it:
    /// post receives before each launch, see [`Batch::before_launches`].
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::WorkRequest`], [`Error::WrongState`]; at submission [`Error::Busy`] and
    /// [`Error::OutOfOrder`]; the error that broke the queue pair.
    pub fn post_recv(&mut self, qp: &Qp, wr: &RecvWr<'_>) -> Result<Completion> {
        self.announce_recv(qp, wr, |_, _| Ok(()))
    }

    /// As [`Batch::post_recv`], behind what `announce` adds for the receive at an index of the queue. So a receive that is posted next, by a
    /// stream or the CPU, is announced behind this one.
    ///
    /// # Errors
    /// Those of [`Batch::post_recv`] and of `announce`, which takes the receive back.
    pub fn announce_recv(
        &mut self,
        qp: &Qp,
        wr: &RecvWr<'_>,
        announce: impl FnOnce(&mut Self, u64) -> Result<()>,
    ) -> Result<Completion> {
        let receive = PreparedRecv::new(&qp.recv, wr)?;
        let completion = receive.completion();
        announce(self, completion.index())?;
        self.ops.push(receive.op());
        self.rare().receives.push(receive);
        self.only_once(
            "a receive that a stream posts",
            "post receives before each launch: Batch::before_launches",
        );
        Ok(completion)
    }

    /// Adds sends prepared earlier.
    pub fn post(&mut self, mut send: PreparedSend) -> Completion {
        send.add_op(&mut self.ops, self.part);
        send.set_doorbell(&mut self.ops);
        let completion = send.completion();
        self.sends.push(send);
        completion
    }

    /// Adds a wait prepared earlier.
    pub fn post_wait(&mut self, mut wait: PreparedWait) -> Completion {
        wait.add_op(&mut self.ops);
        wait.set_awaited(&mut self.ops);
        let completion = wait.completion();
        self.waits.push(wait);
        completion
    }

    /// Adds a wait for completions of a queue; `None` when the last one was claimed or taken before.
    pub(super) fn claim(&mut self, end: &Arc<QueueEnd>, range: ClaimRange) -> Result<Option<&PreparedWait>> {
        self.waits.push(PreparedWait::empty(end));
        let wait = self.waits.last_mut().expect("pushed above");
        wait.add_op(&mut self.ops);
        let claimed = wait.claim(range, self.stream);
        if !matches!(claimed, Ok(true)) {
            self.waits.pop();
            self.ops.pop();
            return claimed.map(|_| None);
        }
        wait.set_awaited(&mut self.ops);
        Ok(self.waits.last())
    }

    /// Adds a wait for completions of a queue, of which there must be some.
    pub(super) fn wait_some(&mut self, end: &Arc<QueueEnd>, range: ClaimRange) -> Result<Completion> {
        self.claim(end, range)?.map(PreparedWait::completion).ok_or_else(|| end.nothing_to_wait_for())
    }

    /// Waits for the next send completion of `qp`.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue; the error that broke the queue
    /// pair.
    pub fn wait_send(&mut self, qp: &Qp) -> Result<Completion> {
        self.wait_some(&qp.send.end, ClaimRange::Next(1))
    }

    /// Waits for all sends of `qp` posted or prepared so far. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue; the error that broke the queue
    /// pair.
    pub fn wait_all_sends(&mut self, qp: &Qp) -> Result<Completion> {
        self.wait_some(&qp.send.end, ClaimRange::All)
    }

    /// Waits for the next receive completion of `qp`.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue, and at submission where the
    /// GPU may not see payload that a card writes to its memory: see
    /// [`Capabilities::flush`](gdsync_device::cuda::Capabilities::flush); the error that broke the queue pair.
    pub fn wait_recv(&mut self, qp: &Qp) -> Result<Completion> {
        self.wait_some(&qp.recv.end, ClaimRange::Next(1))
    }

    /// Waits for one work request, and thereby for all earlier ones of its queue. Adds nothing if it was polled, or if
    /// an earlier wait of the same stream covers it.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue; [`Error::Reset`]; at
    /// submission [`Error::Busy`] when another stream waits for it; the error that broke the queue pair.
    pub fn wait(&mut self, completion: &Completion) -> Result<()> {
        completion.check_life()?;
        if self.claim(&completion.end, ClaimRange::Through(completion.n))?.is_none() {
            self.cover(completion);
        }
        Ok(())
    }

    /// Requires an earlier wait of the stream to cover `completion`.
    pub(super) fn cover(&mut self, completion: &Completion) {
        let place = self.len();
        self.rare().covered.push((place, completion.clone()));
    }

    /// Waits until a 32-bit word satisfies a condition.
    pub fn wait_value32(&mut self, word: &Word32, value: u32, cond: Cond) {
        self.ops.push(Op::Wait32 { at: word.clone(), value, cond, of: None });
    }

    /// Waits until the peer of a queue pair has raised a word to `value` ([`Cond::Geq`]), or the queue pair has broken: for credits,
    /// before a send that fails then. The word may be overwritten in that case.
    pub fn wait_credit(&mut self, qp: &Qp, word: &Word32, value: u32) {
        let of = Some(qp.send.end.clone());
        self.ops.push(Op::Wait32 { at: word.clone(), value, cond: Cond::Geq, of });
    }

    /// Waits until a 64-bit word satisfies a condition.
    pub fn wait_value64(&mut self, word: &Word64, value: u64, cond: Cond) {
        self.ops.push(Op::Wait64 { at: word.clone(), value, cond });
    }

    /// Writes a 32-bit word, after everything before it in the stream.
    pub fn write_value32(&mut self, word: &Word32, value: u32) {
        self.ops.push(Op::Write32 { at: word.clone(), value });
    }

    /// Writes a 64-bit word, after everything before it in the stream.
    pub fn write_value64(&mut self, word: &Word64, value: u64) {
        self.ops.push(Op::Write64 { at: word.clone(), value });
    }

    /// Writes a few bytes, copied now, as one word write per 4 bytes. For control structures, not payload.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] unless address and length are multiples of 4.
    pub fn write_memory(&mut self, memory: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(Error::invalid("bytes to write", bytes.len(), "a multiple of 4"));
        }
        memory.slice(offset, bytes.len())?;
        let ops = words.iter().enumerate().map(|(i, word)| {
            let at = memory.word32(offset + 4 * i)?;
            Ok(Op::Write32 { at, value: u32::from_ne_bytes(*word) })
        });
        let ops = ops.collect::<Result<Vec<_>>>()?;
        self.ops.extend(ops);
        Ok(())
    }

    /// A system-scope memory barrier: orders everything before it before everything after it.
    pub fn barrier(&mut self) {
        self.ops.push(Op::Barrier);
    }

    /// Makes inbound writes to GPU memory visible to later operations, once the stream has waited for their completion.
    /// Waits for completions do this where [`Capabilities::flush`](gdsync_device::cuda::Capabilities::flush) requires
    /// it; use this after waits on plain words. The submission is refused where a stream cannot flush.
    pub fn flush(&mut self) {
        self.ops.push(Op::Flush);
    }

    /// Runs a function on the CPU in stream order, after all earlier operations. The stream continues when it returns.
    ///
    /// It must not wait for its own stream. A CUDA stream holds at most 24 pending ones.
    ///
    /// It runs on another thread, later: it owns what it uses.
    ///
    /// ```compile_fail,E0373
    /// # use gdsync::stream::Batch;
    /// fn count(batch: &mut Batch) {
    ///     let mut count = 0;
    ///     batch.host_fn(|| count += 1); // borrows from this function
    /// }
    /// ```
    pub fn host_fn(&mut self, f: impl FnOnce() + Send + 'static) {
        self.ops.push(Op::HostFn(Mutex::new(Box::new(f))));
    }

    /// Like [`Batch::host_fn`], for a function that a graph calls in each launch. Host streams only: in CUDA graphs,
    /// use a kernel.
    pub fn repeatable_host_fn(&mut self, f: impl Fn() + Send + Sync + 'static) {
        self.repeat(Repeatable(Arc::new(f)));
    }

    pub(super) fn repeat(&mut self, f: Repeatable) {
        let place = self.len();
        self.rare().repeatable.push((place, f.clone()));
        self.host_fn(move || f.0());
    }

    /// Has graphs that contain this batch call `hook` before each launch, once for all batches. Messaging layers post
    /// the receives there that a launch waits for.
    pub fn before_launches(&mut self, hook: &Arc<dyn Replenish>) {
        add_hook(&mut self.rare().before, hook.clone());
    }

    /// Has [`Stream::synchronize`](super::Stream::synchronize) report a failure of `qp` as if the batch had used it: for messaging
    /// layers that complete a message of it by a host function.
    pub fn report(&mut self, qp: &Qp) {
        self.rare().reported.push(qp.core().clone());
    }

    /// Refuses the batch in graphs and kernel steps with [`Error::Unsupported`]: `what` would be wrong when repeated, such
    /// as a wait for one message. `fix` says what to do instead.
    pub fn only_once(&mut self, what: &'static str, fix: &'static str) {
        self.only_once = Some((what, fix));
    }
}

/// The CPU while it runs a batch.
const CPU: OfStream = OfStream { id: stream_name::CPU, by_gpu: false };

/// Spin time of a wait before it sleeps; equals the default of host streams.
const SPIN: Duration = Duration::from_micros(50);

impl Batch {
    /// Runs the batch on the calling thread, in order, and empties it. Waits run device work, then sleep.
    ///
    /// No stream and no other thread's `run` may be using its queues.
    ///
    /// # Errors
    /// The batch is left unchanged when a queue refuses it, with the errors of [`submit`](super::Stream::submit).
    /// [`Error::Deadline`] after `timeout`: the queue pairs of the batch are stopped, and the rest is dropped. After a
    /// complete run, the root cause of the first broken queue pair: data that the batch waited for has *not* arrived
    /// then.
    ///
    /// # Panics
    /// Resumes the panic of a host function, after stopping the queue pairs of the batch.
    pub fn run(&mut self, timeout: Duration) -> Result<()> {
        self.ops.iter().try_for_each(Op::check_on_cpu)?;
        if let Some(follows) = &self.follows {
            follows.check()?;
        }
        self.mark(CPU)?;
        let cores: Vec<_> = self.cores().cloned().collect();
        let ops = mem::take(&mut self.ops);
        // Nothing that follows behind it begins before its end.
        let _turn = self.follows.take();
        self.hand_over();
        let runner = Caller { deadline: deadline(timeout), log: Log::current() };
        let all = || ops.into_iter().try_for_each(|op| execute(op, &runner));
        let outcome = catch_unwind(AssertUnwindSafe(all));
        let failure = match &outcome {
            Ok(Ok(())) => {
                return cores.iter().try_for_each(|core| core.check_requests());
            }
            Ok(Err(Unsatisfied::Lost(error))) => error.clone(),
            Ok(Err(Unsatisfied::Late(what))) => Error::late("running a batch", timeout, what.as_str()),
            Err(panic) => Error::HostFnPanicked {
                stream: "the caller of Batch::run".into(),
                message: message_of(panic.as_ref()),
            },
        };
        cores.iter().for_each(|core| core.stop(&failure));
        match outcome {
            Err(panic) => resume_unwind(panic),
            Ok(_) => Err(failure),
        }
    }
}

/// The calling thread.
struct Caller {
    deadline: Instant,
    log: Log,
}

impl Runner for Caller {
    fn failed(&self) -> bool {
        false
    }

    fn released(&self) -> bool {
        false
    }

    fn left(&self, _waited: Duration) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn log(&self) -> (&Log, By) {
        (&self.log, By::Cpu)
    }

    fn spin(&self) -> Duration {
        SPIN
    }

    fn sleep(&self, time: Duration) {
        thread::sleep(time);
    }
}
