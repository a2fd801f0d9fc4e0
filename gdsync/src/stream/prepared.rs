//! Sends and waits that are ready, but in no stream yet. Dropping one does no harm.

use std::ops::Range;
use std::sync::Arc;

use super::op::Source;
use crate::error::{Error, Result};
use crate::verbs::Qp;
use crate::verbs::Wc;
use crate::verbs::cq::CqInner;
use crate::verbs::qp::QpCore;
use crate::verbs::sq::SendQueue;
use crate::verbs::track::{Owner, Tracker};
use crate::verbs::SendWr;

/// Sends whose WQEs are written, waiting for their doorbell.
///
/// Must be posted in prepare order per queue pair. Dropped before that, it is taken back, or turned into a NOP if
/// later sends were prepared behind it.
#[derive(Debug)]
#[must_use = "dropping it takes the sends back"]
pub struct PreparedSend {
    pub(super) queue: Arc<SendQueue>,
    range: Range<u64>,
    submitted: Option<Owner>,
}

impl PreparedSend {
    pub(super) fn submit(&mut self, stream: u64) -> Result<()> {
        self.submitted = Some(self.queue.submit(&self.range, stream)?);
        Ok(())
    }

    pub(super) fn unsubmit(&mut self) {
        if let Some(before) = self.submitted.take() {
            self.queue.unsubmit(&self.range, before);
        }
    }

    pub(super) fn trigger_ops(&self, ops: &mut Vec<super::Op>) {
        self.queue.trigger_ops(&self.range, ops);
    }

    pub(super) fn watch(&self) {
        self.queue.watch(&self.range);
    }
}

impl Drop for PreparedSend {
    fn drop(&mut self) {
        if self.submitted.is_none() {
            self.queue.cancel(&self.range);
        }
    }
}

/// A claim on the next completion of a queue, for a stream to wait for.
///
/// Must be posted in claim order per queue. Dropped before that, it gives the completion back to
/// [`poll`](crate::verbs::Cq::poll).
#[derive(Debug)]
#[must_use = "dropping it gives the completion back"]
pub struct PreparedWait {
    claim: Completion,
    tracker: Arc<Tracker>,
    source: Arc<dyn Source>,
    submitted: bool,
}

impl PreparedWait {
    /// The completion this wait is for.
    pub fn completion(&self) -> Completion {
        self.claim.clone()
    }

    pub(super) fn core(&self) -> &Arc<QpCore> {
        &self.claim.core
    }

    pub(super) fn submit(&mut self, stream: u64) -> Result<()> {
        self.claim.cq.submit(self.claim.n, stream, &self.tracker)?;
        self.submitted = true;
        Ok(())
    }

    pub(super) fn unsubmit(&mut self) {
        if std::mem::take(&mut self.submitted) {
            self.claim.cq.unsubmit(self.claim.n);
        }
    }

    pub(super) fn wait_ops(&self, ops: &mut Vec<super::Op>) {
        self.claim.cq.wait_ops(self.claim.n, self.source.clone(), ops);
    }
}

impl Drop for PreparedWait {
    fn drop(&mut self) {
        if !self.submitted {
            self.claim.cq.release(self.claim.n);
        }
    }
}

/// A completion that a stream waits for: what came of it.
#[derive(Clone, Debug)]
pub struct Completion {
    cq: Arc<CqInner>,
    core: Arc<QpCore>,
    n: u64,
}

impl Completion {
    /// `None` while it has not arrived. The queue remembers it until its slot is used again: after that only
    /// failures are known, and a success is reported as [`Error::Forgotten`].
    ///
    /// # Errors
    /// The failure of this work request, or what broke the queue pair before it could complete.
    pub fn status(&self) -> Result<Option<Wc>> {
        match self.cq.completion(self.n) {
            Some(Some(wc)) => Ok(Some(wc.ok()?)),
            Some(None) => self.core.check().and(Err(Error::Forgotten { qpn: self.core.qpn })),
            None => self.core.check().map(|()| None),
        }
    }
}

impl Qp {
    /// Writes sends into the queue without ringing the doorbell: a stream will.
    ///
    /// # Errors
    /// As [`Qp::post_send`], and [`Error::InvalidArgument`] for an empty list.
    pub fn prepare_send(&self, wrs: &[SendWr<'_>]) -> Result<PreparedSend> {
        if wrs.is_empty() {
            return Err(Error::invalid("sends to prepare", 0, "at least one"));
        }
        let range = self.send.prepare(wrs)?;
        Ok(PreparedSend { queue: self.send.clone(), range, submitted: None })
    }

    /// Claims the next send completion for a stream.
    ///
    /// # Errors
    /// [`Error::NothingToWaitFor`] when every posted or prepared send is claimed or polled already;
    /// [`Error::Unsupported`] on a shared completion queue; the error that broke the queue pair.
    pub fn prepare_wait_send(&self) -> Result<PreparedWait> {
        let queue = &self.send;
        self.claim(&queue.cq, &queue.tracker, queue.clone(), None)
    }

    /// Claims the completions of all sends posted or prepared so far, for a stream to wait for with one operation.
    ///
    /// # Errors
    /// As [`Qp::prepare_wait_send`].
    pub fn prepare_wait_all_sends(&self) -> Result<PreparedWait> {
        let queue = &self.send;
        let last = queue.tracker.posted().checked_sub(1);
        self.claim(&queue.cq, &queue.tracker, queue.clone(), last)
    }

    /// Claims the next receive completion for a stream.
    ///
    /// # Errors
    /// As [`Qp::prepare_wait_send`], for receives.
    pub fn prepare_wait_recv(&self) -> Result<PreparedWait> {
        let queue = &self.recv;
        self.claim(&queue.cq, &queue.tracker, queue.clone(), None)
    }

    fn claim(
        &self,
        cq: &Arc<CqInner>,
        tracker: &Arc<Tracker>,
        source: Arc<dyn Source>,
        upto: Option<u64>,
    ) -> Result<PreparedWait> {
        self.check()?;
        let n = cq.claim(upto, tracker)?;
        let claim = Completion { cq: cq.clone(), core: self.core().clone(), n };
        Ok(PreparedWait { claim, tracker: tracker.clone(), source, submitted: false })
    }
}
