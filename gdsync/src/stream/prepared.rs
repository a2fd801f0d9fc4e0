//! Prepared sends and waits that are not in a stream yet. Dropping one undoes it.

use std::mem;
use std::sync::Arc;

use super::op::{Arrival, DoorbellValue, Op, Ops, SendDoorbell, Source};
use crate::verbs::cq::ClaimRange;
use crate::verbs::end::{QueueEnd, ResetHold};
use crate::verbs::qp::QpCore;
use crate::verbs::sq::{Prepared, QueueState, SendQueue, Template, Written};
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
    /// Whether the watch limit covers them.
    has_watch_limit: bool,
    /// Whether each send has its own completion.
    has_own_completions: bool,
    /// Index of its operation in its batch.
    pub(super) place: usize,
}

impl PreparedSend {
    /// Prepares sends. With a `stream`, also submits them to it.
    #[inline]
    pub(super) fn new(qp: &Qp, wrs: &[SendWr<'_>], stream: Option<u64>) -> Result<Self> {
        // Fast path: one short send.
        if let ([wr], None) = (wrs, stream)
            && let Some(sends) = qp.send.prepare_short(wr, |_| true)
        {
            let prepared = Prepared { sends, before: None, is_recorded: false };
            return Ok(Self::of(&qp.send, prepared, qp.send.end.hold()));
        }
        if wrs.is_empty() {
            return Err(Error::invalid("sends to prepare", 0, "at least one"));
        }
        let hold = qp.send.end.hold();
        qp.send.prepare(wrs, stream).map(|prepared| Self::of(&qp.send, prepared, hold))
    }

    /// Wraps prepared sends. `hold` was taken before they were submitted to a stream.
    pub(super) fn of(
        queue: &Arc<SendQueue>,
        Prepared { sends, before, is_recorded }: Prepared,
        hold: ResetHold,
    ) -> Self {
        let has_own_completions = sends.range.end - sends.range.start == 1;
        Self {
            queue: queue.clone(),
            _hold: hold,
            sends,
            submitted: before,
            is_recorded,
            has_watch_limit: false,
            has_own_completions,
            place: 0,
        }
    }

    /// Appends a send with its own completion. `None` where that is impossible, for example for another queue pair.
    pub(super) fn add(&mut self, qp: &Qp, wr: &SendWr<'_>) -> Result<Option<Completion>> {
        let may_grow =
            self.has_own_completions && self.submitted.is_none() && Arc::ptr_eq(&self.queue, &qp.send);
        let grows = may_grow && self.queue.prepare_behind(&mut self.sends, wr)?;
        Ok(grows.then(|| self.completion()))
    }

    /// Splits sends that have their own completions.
    pub(super) fn split(mut self) -> Vec<Self> {
        if !self.has_own_completions || self.sends.range.end - self.sends.range.start == 1 {
            return vec![self];
        }
        // Emptied, so that the drop cancels nothing.
        let numbers = mem::take(&mut self.sends.range);
        let one = |sends| {
            let prepared = Prepared { sends, before: self.submitted, is_recorded: self.is_recorded };
            let mut one = Self::of(&self.queue, prepared, self.queue.end.hold());
            one.place = self.place;
            one
        };
        self.queue.each(numbers).into_iter().map(one).collect()
    }

    /// Prepares recorded sends again.
    pub(super) fn again(queue: &Arc<SendQueue>, sends: &[Template], stream: Option<u64>) -> Result<Self> {
        let hold = queue.end.hold();
        queue.prepare_again(sends, stream).map(|prepared| Self::of(queue, prepared, hold))
    }

    /// Submits it to a stream, unless it was submitted before. `by_gpu`: the stream is a GPU's.
    #[inline]
    pub(super) fn submit(&mut self, stream: u64, by_gpu: bool) -> Result<()> {
        if self.submitted.is_none() {
            self.submitted = Some(self.queue.submit(&self.sends, stream, by_gpu)?);
            self.has_watch_limit = by_gpu;
        }
        Ok(())
    }

    /// Whether `next` is of the same queue.
    pub(super) fn is_same_queue(&self, next: &Self) -> bool {
        Arc::ptr_eq(&self.queue, &next.queue)
    }

    /// Undoes the submission after the engine has refused it.
    pub(super) fn refuse(mut self, stream: u64) {
        self.note_through(&self, Stage::Refused, stream);
        self.unsubmit();
    }

    pub(super) fn unsubmit(&mut self) {
        if let Some(before) = self.submitted.take() {
            self.queue.unsubmit(&self.sends, before);
            (self.is_recorded, self.has_watch_limit) = (false, false);
        }
    }

    /// The parts of its operation.
    #[inline]
    pub(super) fn trigger(&self) -> (&Arc<dyn Source>, &SendDoorbell, DoorbellValue) {
        (self.queue.end.source(), self.queue.send_doorbell(), self.sends.doorbell_value())
    }

    /// Adds its operation to `ops`. A doorbell of the same queue that is the last operation, at or after index `part`,
    /// is extended instead.
    #[inline]
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

    /// Updates its operation to expose all of its sends.
    #[inline]
    pub(super) fn extend_doorbell(&self, ops: &mut Ops) {
        if let Some(Op::Trigger(_, value)) = ops.get_mut(self.place) {
            *value = self.sends.doorbell_value();
        }
    }

    /// The completion of the last of these sends.
    pub fn completion(&self) -> Completion {
        self.queue.end.completion(self.sends.range.end - 1)
    }

    /// Whether `next` follows directly, so that one record covers both.
    pub(super) fn precedes(&self, next: &Self) -> bool {
        let is_next = self.is_same_queue(next) && self.sends.range.end == next.sends.range.start;
        is_next && self.is_recorded == next.is_recorded
    }

    /// Records a stage of the consecutive sends from this through `last`.
    pub(super) fn note_through(&self, last: &Self, stage: Stage, stream: u64) {
        if stage == Stage::Submitted && self.is_recorded {
            return;
        }
        self.queue.note(stage, self.sends.range.start..last.sends.range.end, stream);
    }

    /// Notifies the device that a GPU stream will ring for it.
    pub(super) fn watch(&self) {
        match self.has_watch_limit {
            true => self.queue.ensure_watched(self.sends.end),
            false => self.queue.watch(&self.sends),
        }
    }
}

impl Drop for PreparedSend {
    fn drop(&mut self) {
        if self.submitted.is_none() {
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
    /// Whether the watch limit covers it.
    has_watch_limit: bool,
    /// Index of its operation in its batch.
    pub(super) place: usize,
}

impl PreparedWait {
    /// Claims completions of a queue. Returns the first and last number.
    #[inline]
    fn claim(end: &QueueEnd, claim_range: ClaimRange, stream: Option<u64>) -> Result<(u64, u64)> {
        let nothing = || Error::NothingToWaitFor { queue: end.tracker.name(), qpn: end.qp.qpn };
        Self::claim_of(end, claim_range, stream)?.ok_or_else(nothing)
    }

    /// Claims the next completion of a queue and submits the claim to a stream. Returns its number.
    #[inline]
    pub(super) fn claim_next(end: &QueueEnd, stream: u64, by_gpu: bool) -> Result<u64> {
        match end.cq.claim_short(&end.tracker, stream, by_gpu) {
            Some(n) if !end.qp.is_broken() => Ok(n),
            claimed => Self::claim_any(end, claimed, (stream, by_gpu)),
        }
    }

    #[cold]
    #[inline(never)]
    fn claim_any(end: &QueueEnd, claimed: Option<u64>, (stream, by_gpu): (u64, bool)) -> Result<u64> {
        let Some(n) = claimed else {
            let (_, n) = Self::claim(end, ClaimRange::Next(1), Some(stream))?;
            if by_gpu {
                end.cq.set_attend_limit(n);
            }
            return Ok(n);
        };
        end.qp.check_known().inspect_err(|_| {
            end.cq.unsubmit(n, n);
            end.cq.release(n, n);
        })?;
        Ok(n)
    }

    /// Claims completions. Returns the first and last number; `None` when the last one was claimed or taken before.
    fn claim_of(end: &QueueEnd, claim_range: ClaimRange, stream: Option<u64>) -> Result<Option<(u64, u64)>> {
        let claimed = end.cq.claim(claim_range, &end.tracker, stream);
        if let Err(error) = end.qp.check_known() {
            if let Ok(Some((first, n))) = claimed {
                end.cq.release(first, n);
            }
            return Err(error);
        }
        claimed
    }

    /// Wraps a claim. With a `stream`, it was submitted to it.
    pub(super) fn of(
        (first, claim): (u64, Completion),
        hold: ResetHold,
        kind: WaitKind,
        stream: Option<u64>,
    ) -> Self {
        Self {
            claim,
            _hold: hold,
            first,
            kind,
            submitted: stream.is_some(),
            has_watch_limit: false,
            place: 0,
        }
    }

    /// A wait through `completion`; `None` when it was claimed or taken before. With a `stream`, also submitted to it.
    pub(super) fn through(completion: &Completion, stream: Option<u64>) -> Result<Option<Self>> {
        completion.check_life()?;
        let hold = completion.end.hold();
        let claim = Self::claim_of(&completion.end, ClaimRange::Through(completion.n), stream)?;
        Ok(claim.map(|(first, _)| Self::of((first, completion.clone()), hold, WaitKind::Through, stream)))
    }

    /// A wait for the next `count` completions of a queue. With a `stream`, also submitted to it.
    pub(super) fn next(end: &Arc<QueueEnd>, count: u64, stream: Option<u64>) -> Result<Self> {
        let hold = end.hold();
        let (first, n) = Self::claim(end, ClaimRange::Next(count), stream)?;
        Ok(Self::of((first, end.completion(n)), hold, WaitKind::Next, stream))
    }

    /// A wait for all completions of a queue. With a `stream`, also submitted to it.
    pub(super) fn all(end: &Arc<QueueEnd>, stream: Option<u64>) -> Result<Self> {
        let hold = end.hold();
        let (first, n) = Self::claim(end, ClaimRange::All, stream)?;
        Ok(Self::of((first, end.completion(n)), hold, WaitKind::All, stream))
    }

    /// The last completion of this wait.
    pub fn completion(&self) -> Completion {
        self.claim.clone()
    }

    pub(super) fn core(&self) -> &Arc<QpCore> {
        &self.claim.end.qp
    }

    /// Submits it to a stream, unless it was submitted before. `by_gpu`: the stream is a GPU's.
    pub(super) fn submit(&mut self, stream: u64, by_gpu: bool) -> Result<()> {
        if !self.submitted {
            self.claim.end.cq.submit(self.claim.n, (stream, by_gpu), &self.claim.end.tracker)?;
            (self.submitted, self.has_watch_limit) = (true, by_gpu);
        }
        Ok(())
    }

    pub(super) fn unsubmit(&mut self) {
        if mem::take(&mut self.submitted) {
            self.has_watch_limit = false;
            self.claim.end.cq.unsubmit(self.first, self.claim.n);
        }
    }

    pub(super) fn note(&self, stage: Stage, stream: u64) {
        self.claim.end.note_wait(stage, self.claim.n, stream);
    }

    /// Undoes the submission after the engine has refused it.
    pub(super) fn refuse(mut self, stream: u64) {
        self.note(Stage::Refused, stream);
        self.unsubmit();
    }

    /// Notifies the device that a GPU stream waits for it.
    pub(super) fn attend(&self, nudger: Option<&Arc<dyn GpuNudge>>) {
        match self.has_watch_limit {
            true => self.claim.end.cq.ensure_attended(self.claim.n, nudger),
            false => self.claim.end.cq.attend(self.claim.n, nudger),
        }
    }

    /// The parts of its operation.
    #[inline]
    pub(super) fn wait(&self) -> (&Arc<dyn Source>, Arrival<'_>, u64) {
        let Completion { end, n, .. } = &self.claim;
        (end.source(), end.cq.arrival(*n), *n)
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
        PreparedSend::new(self, wrs, None)
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
        PreparedWait::all(&self.send.end, None)
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
