//! Prepared sends, receives and waits that are not in a stream yet. Dropping one undoes it.

use std::mem;
use std::sync::Arc;

use super::op::{Cond, DoorbellValue, Op, Ops, Source};
use crate::verbs::cq::ClaimRange;
use crate::verbs::end::QueueEnd;
use crate::verbs::qp::QpCore;
use crate::verbs::rq::RecvQueue;
use crate::verbs::sq::{OfStream, QueueState, SendQueue, Template, Written};
use crate::verbs::stream_name;
use crate::verbs::track::Owner;
use crate::verbs::{Completion, Qp, RecvWr, SendWr};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::Stage;

/// Sends whose WQEs are written but not exposed.
///
/// Post them in prepare order per queue pair. Dropping one cancels its sends, or turns them into NOPs if later sends
/// were prepared after them.
///
/// It starts once:
///
/// ```compile_fail,E0382
/// use gdsync::stream::{Batch, PreparedSend};
///
/// fn twice(batch: &mut Batch, send: PreparedSend) {
///     batch.post(send);
///     batch.post(send); // moved above
/// }
/// ```
#[derive(Debug)]
#[must_use = "dropping it takes the sends back"]
pub struct PreparedSend {
    pub(super) queue: Arc<SendQueue>,
    pub(super) sends: Written,
    submitted: Option<QueueState>,
    /// Whether the flight recorder has the submission.
    is_recorded: bool,
    /// Index of its operation in its batch.
    pub(super) place: usize,
}

impl PreparedSend {
    /// No sends yet.
    pub(super) fn empty(queue: &Arc<SendQueue>) -> Self {
        let sends = Written::default();
        Self { queue: queue.clone(), sends, submitted: None, is_recorded: false, place: 0 }
    }

    /// Prepares sends, once. With a `stream`, also submits them to it.
    #[inline]
    pub(super) fn prepare(&mut self, wrs: &[SendWr<'_>], stream: Option<OfStream>) -> Result<()> {
        if wrs.is_empty() {
            return Err(Error::invalid("sends to prepare", 0, "at least one"));
        }
        self.is_recorded = self.queue.prepare(wrs, stream, (&mut self.sends, &mut self.submitted))?;
        Ok(())
    }

    /// Prepares recorded sends again.
    pub(super) fn again(queue: &Arc<SendQueue>, sends: &[Template]) -> Result<Self> {
        let mut again = Self::empty(queue);
        again.sends = queue.prepare_again(sends)?;
        Ok(again)
    }

    /// Submits it to a stream, unless it was submitted before.
    pub(super) fn submit(&mut self, stream: OfStream) -> Result<()> {
        if self.submitted.is_none() {
            self.submitted = Some(self.queue.submit(&self.sends, stream)?);
        }
        Ok(())
    }

    /// Undoes the submission, if there was one.
    pub(super) fn unsubmit(&mut self) {
        if let Some(before) = self.submitted.take() {
            self.queue.unsubmit(&self.sends, before);
            self.is_recorded = false;
        }
    }

    /// Adds its operation to `ops`, unless the last one, at or after index `part`, is a doorbell of the same queue.
    /// From now on the operation prevents a reset.
    #[inline]
    pub(super) fn add_op(&mut self, ops: &mut Ops, part: usize) {
        match ops.last() {
            Some(Op::Trigger(source, _)) if ops.len() > part && self.queue.end.is_source(source) => {}
            _ => ops.push(Op::Trigger(self.queue.end.source().clone(), DoorbellValue::default())),
        }
        self.place = ops.len() - 1;
    }

    /// Has its operation ring for it.
    pub(super) fn set_doorbell(&self, ops: &mut Ops) {
        if let Some(Op::Trigger(_, value)) = ops.get_mut(self.place) {
            *value = self.sends.doorbell_value();
        }
    }

    /// The completion of the last of these sends.
    pub fn completion(&self) -> Completion {
        self.queue.end.clone().completion(self.sends.range.end - 1)
    }

    /// Whether `next` is of the same queue.
    pub(super) fn is_same_queue(&self, next: &Self) -> bool {
        Arc::ptr_eq(&self.queue, &next.queue)
    }

    /// Whether `next` follows directly, so that one record covers both.
    pub(super) fn precedes(&self, next: &Self) -> bool {
        let is_next = self.is_same_queue(next) && self.sends.range.end == next.sends.range.start;
        is_next && self.is_recorded == next.is_recorded
    }

    /// Records a stage of the consecutive sends from this through `last`.
    pub(super) fn note_through(&self, last: &Self, stage: Stage, stream: u64) {
        if !(stage == Stage::Submitted && self.is_recorded) {
            self.queue.note(stage, self.sends.range.start..last.sends.range.end, stream);
        }
    }

    /// Notifies the device, unless it watches the doorbell, that a GPU stream will ring for it.
    pub(super) fn ensure_watched(&self) {
        self.queue.ensure_watched(self.sends.end);
    }
}

impl Drop for PreparedSend {
    fn drop(&mut self) {
        if self.submitted.is_none() && !self.sends.range.is_empty() {
            self.queue.cancel(&self.sends.range);
        }
    }
}

/// A receive that is written, and that a stream posts. Dropping it takes it back.
#[derive(Debug)]
pub(super) struct PreparedRecv {
    queue: Arc<RecvQueue>,
    /// Prevents a reset.
    source: Arc<dyn Source>,
    n: u64,
    /// The owner of the queue before the submission, if there was one.
    submitted: Option<Owner>,
}

impl PreparedRecv {
    pub(super) fn new(queue: &Arc<RecvQueue>, wr: &RecvWr<'_>) -> Result<Self> {
        let source = queue.end.source().clone();
        let n = queue.prepare(wr)?;
        Ok(Self { queue: queue.clone(), source, n, submitted: None })
    }

    pub(super) fn op(&self) -> Op {
        let (record, value) = self.queue.record_of(self.n);
        Op::PostRecv { source: self.source.clone(), record, value }
    }

    pub(super) fn completion(&self) -> Completion {
        self.queue.end.clone().completion(self.n)
    }

    pub(super) fn core(&self) -> &Arc<QpCore> {
        &self.queue.end.qp
    }

    /// Submits it to a stream, unless it was submitted before.
    pub(super) fn submit(&mut self, stream: OfStream) -> Result<()> {
        if self.submitted.is_none() {
            self.submitted = Some(self.queue.submit(self.n, stream)?);
        }
        Ok(())
    }

    /// Undoes the submission, if there was one.
    pub(super) fn unsubmit(&mut self) {
        if let Some(before) = self.submitted.take() {
            self.queue.unsubmit(self.n, before);
        }
    }
}

impl Drop for PreparedRecv {
    fn drop(&mut self) {
        if self.submitted.is_none() {
            self.queue.cancel(self.n);
        }
    }
}

/// A claim on completions of a queue, for a stream to wait for.
///
/// Post it in claim order per queue. Dropping it returns the completions to [`poll`](crate::verbs::Cq::poll).
#[derive(Debug)]
#[must_use = "dropping it gives the completion back"]
pub struct PreparedWait {
    /// The last completion of the claim, and the first.
    pub(super) claim: Completion,
    pub(super) first: u64,
    /// What was to be claimed; `None` until it is.
    pub(super) range: Option<ClaimRange>,
    submitted: bool,
    /// Index of its operation in its batch.
    pub(super) place: usize,
}

impl PreparedWait {
    /// A wait for completions of a queue.
    fn new(end: &Arc<QueueEnd>, range: ClaimRange) -> Result<Self> {
        let mut wait = Self::empty(end);
        match wait.claim(range, None)? {
            true => Ok(wait),
            false => Err(end.nothing_to_wait_for()),
        }
    }

    /// Claims nothing yet.
    pub(super) fn empty(end: &Arc<QueueEnd>) -> Self {
        Self { claim: end.clone().completion(0), first: 0, range: None, submitted: false, place: 0 }
    }

    /// Claims completions, once. With a `stream`, also submits the claim to it. Returns `false`, with nothing claimed, when
    /// the last one was claimed or taken before.
    #[inline]
    pub(super) fn claim(&mut self, range: ClaimRange, stream: Option<OfStream>) -> Result<bool> {
        let Completion { end, n, life } = &mut self.claim;
        let claimed = end.cq.claim(range, &end.tracker, stream);
        if let Ok(Some((first, last))) = claimed {
            (self.first, *n, *life) = (first, last, end.tracker.life());
            (self.range, self.submitted) = (Some(range), stream.is_some());
        }
        // The root cause first. Dropping the wait releases the claim.
        if let Err(error) = end.qp.check_known() {
            self.unsubmit();
            return Err(error);
        }
        claimed.map(|claimed| claimed.is_some())
    }

    /// The last completion of this wait.
    pub fn completion(&self) -> Completion {
        self.claim.clone()
    }

    pub(super) fn core(&self) -> &Arc<QpCore> {
        &self.claim.end.qp
    }

    /// Submits it to a stream, unless it was submitted before.
    pub(super) fn submit(&mut self, stream: OfStream) -> Result<()> {
        if !self.submitted {
            self.claim.end.cq.submit(self.claim.n, stream, &self.claim.end.tracker)?;
            self.submitted = true;
        }
        Ok(())
    }

    /// Undoes the submission, if there was one.
    pub(super) fn unsubmit(&mut self) {
        if mem::take(&mut self.submitted) {
            self.claim.end.cq.unsubmit(self.first, self.claim.n);
        }
    }

    pub(super) fn note(&self, stage: Stage, stream: u64) {
        self.claim.end.note_wait(stage, self.claim.n, stream);
    }

    /// Notifies the device, unless it attends already, that a GPU stream waits for it.
    pub(super) fn ensure_attended(&self, nudger: Option<&Arc<dyn GpuNudge>>) {
        self.claim.end.cq.ensure_attended(self.claim.n, nudger);
    }

    /// Whether it waits for one completion: all before it have arrived, or were claimed before.
    pub(super) fn is_for_one(&self) -> bool {
        let Completion { end, n, .. } = &self.claim;
        self.first == *n || end.cq.have_arrived(*n)
    }

    /// Adds its operation to `ops`. From now on the operation prevents a reset.
    #[inline]
    pub(super) fn add_op(&mut self, ops: &mut Ops) {
        self.place = ops.len();
        ops.push(Op::Await(self.claim.end.source().clone(), 0));
    }

    /// Has its operation wait for it.
    pub(super) fn set_awaited(&self, ops: &mut Ops) {
        if let Some(Op::Await(_, n)) = ops.get_mut(self.place) {
            *n = self.claim.n;
        }
    }
}

/// What a kernel writes to start prepared sends: the record, then the doorbell, with system-scope fences in between.
#[derive(Clone, Copy, Debug)]
pub struct SendWords {
    /// The doorbell record's address on the GPU.
    pub record: u64,
    /// Its new value, as the word holds it.
    pub record_value: u32,
    /// The doorbell's address on the GPU: eight bytes, write-only.
    pub doorbell: u64,
    /// What to write there.
    pub doorbell_value: u64,
}

/// What a kernel polls to wait for a completion, and writes afterwards.
#[derive(Clone, Copy, Debug)]
pub struct WaitWords {
    /// The address of the completion's word on the GPU.
    pub word: u64,
    /// The condition that the word must satisfy, with `value` as its operand.
    pub cond: Cond,
    /// The operand.
    pub value: u32,
    /// The address of the consumer index on the GPU.
    pub index: u64,
    /// What to write there once the condition holds: the completion can be taken then.
    pub index_value: u32,
}

/// Kernels as the user of a queue.
const KERNELS: OfStream = OfStream { id: stream_name::KERNELS, by_gpu: true };

impl PreparedSend {
    /// Hands the sends to a kernel of `gpu`, which must start them in prepare order. They count as submitted.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`], [`Error::Busy`]; [`Error::Cuda`] if the GPU does not reach the words; the error that broke the
    /// queue pair. The sends are taken back.
    pub fn words(mut self, gpu: &Gpu) -> Result<SendWords> {
        let queue = self.queue.clone();
        let (_, record, doorbell) = queue.places();
        let (record, doorbell) = (record.gpu_addr(gpu)?, doorbell.gpu_addr(gpu)?);
        self.submit(KERNELS)?;
        self.ensure_watched();
        let DoorbellValue { record: record_value, doorbell: doorbell_value } = self.sends.doorbell_value();
        Ok(SendWords { record, record_value, doorbell, doorbell_value })
    }
}

impl PreparedWait {
    /// Hands the wait to a kernel of `gpu`. It counts as submitted.
    ///
    /// # Errors
    /// Those of [`PreparedSend::words`]. The completion is given back.
    pub fn words(mut self, gpu: &Gpu) -> Result<WaitWords> {
        let claim = self.claim.clone();
        let arrival = claim.end.cq.arrival(claim.n);
        let (word, index) = (arrival.word_on(gpu)?.addr, arrival.index_on(gpu)?);
        self.submit(KERNELS)?;
        self.ensure_attended(None);
        Ok(WaitWords { word, cond: arrival.cond, value: arrival.value, index, index_value: arrival.passed })
    }
}

impl Drop for PreparedWait {
    fn drop(&mut self) {
        if !self.submitted && self.range.is_some() {
            self.claim.end.cq.release(self.first, self.claim.n);
        }
    }
}

impl Qp {
    /// Writes sends into the queue without ringing the doorbell. A stream rings it later.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list; [`Error::WrongState`]; [`Error::QueueFull`];
    /// [`Error::WorkRequest`]; the error that broke the queue pair.
    pub fn prepare_send(&self, wrs: &[SendWr<'_>]) -> Result<PreparedSend> {
        let mut prepared = PreparedSend::empty(&self.send);
        prepared.prepare(wrs, None)?;
        Ok(prepared)
    }

    /// Claims the next send completion for a stream.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`] when every posted or prepared send is already claimed or polled;
    /// [`Error::Unsupported`] on a shared completion queue; the error that broke the queue pair.
    pub fn prepare_wait_send(&self) -> Result<PreparedWait> {
        PreparedWait::new(&self.send.end, ClaimRange::Next(1))
    }

    /// Claims the completions up to that of one request of this queue pair, for a stream.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`] when it is claimed or taken already; [`Error::Unsupported`] on a shared completion queue;
    /// [`Error::Reset`]; the error that broke the queue pair.
    pub fn prepare_wait(&self, completion: &Completion) -> Result<PreparedWait> {
        completion.check_life()?;
        PreparedWait::new(&completion.end, ClaimRange::Through(completion.n))
    }

    /// Claims the next receive completion for a stream.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue; the error that broke the queue
    /// pair.
    pub fn prepare_wait_recv(&self) -> Result<PreparedWait> {
        PreparedWait::new(&self.recv.end, ClaimRange::Next(1))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use super::OfStream;
    use crate::verbs::{Context, SendWr};
    use gdsync_soft::SoftHcaConfig;

    #[test]
    fn a_consumer_index_that_goes_back_frees_nothing() {
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let qp = pd.build_qp().build().unwrap();
        qp.connect(qp.address()).unwrap();
        let sends: Vec<_> = (0..3).map(|_| qp.post_send(&[SendWr::nop()]).unwrap()).collect();
        sends[2].wait(Duration::from_secs(60)).unwrap();
        let await_by_kernel = |n: usize| {
            qp.prepare_wait(&sends[n]).unwrap().submit(OfStream { id: 1, by_gpu: false }).unwrap();
        };
        let signal = |index| {
            let record = qp.send.end.cq.parts().record.atomic32(0).unwrap();
            record.store(mlx5_ring::cq_ci_record(index), Ordering::Release);
        };
        let is_taken = |n: usize| sends[n].take().unwrap().is_some();
        [0, 1].into_iter().for_each(await_by_kernel);
        assert!(!is_taken(0));
        signal(2);
        assert!(is_taken(0) && is_taken(1));
        await_by_kernel(2);
        signal(1);
        assert!(!is_taken(2), "no kernel has passed it");
        signal(3);
        assert!(is_taken(2));
    }
}
