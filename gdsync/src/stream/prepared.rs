//! Prepared sends and waits that are not in a stream yet. Dropping one undoes it.

use std::mem;
use std::sync::Arc;

use super::op::{Op, Ops};
use crate::verbs::cq::ClaimRange;
use crate::verbs::end::{QueueEnd, ResetHold};
use crate::verbs::qp::QpCore;
use crate::verbs::sq::{OfStream, QueueState, SendQueue, Template, Written};
use crate::verbs::{Completion, Qp, SendWr};
use gdsync_device::GpuNudge;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::Stage;

/// Sends whose WQEs are written but not exposed.
///
/// Post them in prepare order per queue pair. Dropping one cancels its sends, or turns them into NOPs if later sends
/// were prepared after them.
#[derive(Debug)]
#[must_use = "dropping it takes the sends back"]
pub struct PreparedSend {
    pub(super) queue: Arc<SendQueue>,
    /// Prevents a reset until the stream holds a reference.
    _hold: ResetHold,
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
        let (sends, hold) = (Written::default(), queue.end.hold());
        Self { queue: queue.clone(), _hold: hold, sends, submitted: None, is_recorded: false, place: 0 }
    }

    /// Prepares sends, once. With a `stream`, also submits them to it.
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

    /// Adds its operation to `ops`. A doorbell of the same queue that is the last operation, at or after index `part`,
    /// is extended instead.
    pub(super) fn trigger_op(&mut self, ops: &mut Ops, part: usize) {
        let end = ops.len();
        self.place = end;
        match ops.last_mut() {
            Some(Op::Trigger(source, value)) if end > part && self.queue.end.is_source(source) => {
                *value = self.sends.doorbell_value();
                self.place = end - 1;
            }
            _ => ops.push(Op::Trigger(self.queue.end.source().clone(), self.sends.doorbell_value())),
        }
    }

    /// The completion of the last of these sends.
    pub fn completion(&self) -> Completion {
        self.queue.end.completion(self.sends.range.end - 1)
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

/// What a wait was created for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum WaitKind {
    /// The next completions.
    Next,
    /// The completions of all sends.
    All,
    /// The completions through a given one.
    Through,
}

/// A claim on completions of a queue, for a stream to wait for.
///
/// Post it in claim order per queue. Dropping it returns the completions to [`poll`](crate::verbs::Cq::poll).
#[derive(Debug)]
#[must_use = "dropping it gives the completion back"]
pub struct PreparedWait {
    pub(super) claim: Completion,
    /// Prevents a reset until the stream holds a reference.
    _hold: ResetHold,
    /// The first completion of the claim.
    pub(super) first: u64,
    pub(super) kind: WaitKind,
    submitted: bool,
    /// Index of its operation in its batch.
    pub(super) place: usize,
}

impl PreparedWait {
    /// A wait through `completion`; `None` when it was claimed or taken before.
    pub(super) fn through(completion: &Completion) -> Result<Option<Self>> {
        completion.check_life()?;
        Self::claim(&completion.end, ClaimRange::Through(completion.n), WaitKind::Through, None)
    }

    /// A wait for the next `count` completions of a queue. With a `stream`, also submitted to it.
    pub(super) fn next(end: &Arc<QueueEnd>, count: u64, stream: Option<OfStream>) -> Result<Self> {
        Self::some(end, ClaimRange::Next(count), WaitKind::Next, stream)
    }

    /// A wait for all completions of a queue.
    pub(super) fn all(end: &Arc<QueueEnd>) -> Result<Self> {
        Self::some(end, ClaimRange::All, WaitKind::All, None)
    }

    fn some(
        end: &Arc<QueueEnd>,
        claim_range: ClaimRange,
        kind: WaitKind,
        stream: Option<OfStream>,
    ) -> Result<Self> {
        let nothing = || Error::NothingToWaitFor { queue: end.tracker.name(), qpn: end.qp.qpn };
        Self::claim(end, claim_range, kind, stream)?.ok_or_else(nothing)
    }

    fn claim(
        end: &Arc<QueueEnd>,
        claim_range: ClaimRange,
        kind: WaitKind,
        stream: Option<OfStream>,
    ) -> Result<Option<Self>> {
        let hold = end.hold();
        let claimed = end.cq.claim(claim_range, &end.tracker, stream);
        let wait = claimed.map(|claimed| {
            let (first, n) = claimed?;
            let claim = end.completion(n);
            Some(Self { claim, _hold: hold, first, kind, submitted: stream.is_some(), place: 0 })
        });
        // The root cause first. Dropping the wait releases the claim.
        match (end.qp.check_known(), wait) {
            (Ok(()), wait) => wait,
            (Err(error), wait) => {
                wait.into_iter().flatten().for_each(|mut wait| wait.unsubmit());
                Err(error)
            }
        }
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

    pub(super) fn wait_op(&mut self, ops: &mut Ops) {
        self.place = ops.len();
        ops.push(Op::Await(self.claim.end.source().clone(), self.claim.n));
    }
}

impl Drop for PreparedWait {
    fn drop(&mut self) {
        if !self.submitted {
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
        PreparedWait::next(&self.send.end, 1, None)
    }

    /// Claims the completions of all sends posted or prepared so far, for a stream to wait for with one operation.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue; the error that broke the queue
    /// pair.
    pub fn prepare_wait_all_sends(&self) -> Result<PreparedWait> {
        PreparedWait::all(&self.send.end)
    }

    /// Claims the next receive completion for a stream.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`]; [`Error::Unsupported`] on a shared completion queue; the error that broke the queue
    /// pair.
    pub fn prepare_wait_recv(&self) -> Result<PreparedWait> {
        PreparedWait::next(&self.recv.end, 1, None)
    }
}
