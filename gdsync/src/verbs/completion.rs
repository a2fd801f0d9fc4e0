//! Handles to the completion of one work request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::end::QueueEnd;
use super::wr::{Sender, Wc};
use crate::nvtx::DOMAIN;
use gdsync_device::error::{Error, Result};

/// The completion of one work request, arrived or not. Queries do not consume it: [`poll`](super::Cq::poll) and stream
/// waits still get it.
///
/// The result is kept until the queue has wrapped once. Later queries return [`Error::Forgotten`].
#[derive(Clone)]
pub struct Completion {
    pub(crate) end: Arc<QueueEnd>,
    pub(crate) n: u64,
    /// The queue's reset count when the request was made.
    pub(crate) life: usize,
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "completion {} of the {:?}", self.n, self.end)
    }
}

impl Completion {
    /// Whether it is of the same work request.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.n == other.n && self.life == other.life && Arc::ptr_eq(&self.end, &other.end)
    }

    /// Whether a stream has passed a wait for it, or for a later one: then it arrives soon, if it has not. See
    /// [`Batch::wait_or_arrival`](crate::stream::Batch::wait_or_arrival).
    pub fn is_passed(&self) -> bool {
        self.end.cq.is_passed_to(self.n + 1)
    }

    /// The number of the work request in its queue, from 0. A cancelled request's number is reused by the next one.
    #[inline]
    pub fn index(&self) -> u64 {
        self.n
    }

    /// The completion, or `None` while it has not arrived.
    ///
    /// # Errors
    /// The failure of this work request; the error that broke the queue pair before it completed; [`Error::Forgotten`];
    /// [`Error::Reset`].
    pub fn status(&self) -> Result<Option<Wc>> {
        self.end.qp.check_process()?;
        self.check_life()?;
        let outcome = || self.end.tracker.outcome(self.n, || self.end.cq.cqe(self.n));
        let known = outcome().or_else(|| {
            self.end.cq.reap();
            outcome()
        });
        match known {
            Some(Some(wc)) => Ok(Some(wc.ok()?)),
            Some(None) => self.end.qp.check().and(Err(Error::Forgotten { qpn: self.end.qp.qpn })),
            None => self.end.qp.check().map(|()| None).or_else(|error| {
                // It may have arrived since, before the peer went.
                self.end.cq.reap();
                outcome().flatten().filter(|wc| wc.ok().is_ok()).map(Some).ok_or(error)
            }),
        }
    }

    /// Takes the completion as [`poll`](super::Cq::poll) does, successful or not, also after a stream has passed a wait for it.
    /// `None` while it has not arrived, and while a stream, or a prepared wait, holds it. For interfaces whose programs poll
    /// every completion in order.
    ///
    /// # Errors
    /// [`Error::Forgotten`]; [`Error::Reset`]; [`Error::OtherProcess`].
    pub fn take(&self) -> Result<Option<Wc>> {
        self.end.qp.check_process()?;
        self.check_life()?;
        if !self.end.cq.take_number(self.n) {
            return Ok(None);
        }
        let known = self.end.tracker.outcome(self.n, || self.end.cq.cqe(self.n)).flatten();
        known.map(Some).ok_or(Error::Forgotten { qpn: self.end.qp.qpn })
    }

    /// Who sent the datagram of a receive that has completed. `None` for others, and when the result is no longer known.
    ///
    /// # Errors
    /// Those of [`Completion::status`].
    pub fn sender(&self) -> Result<Option<Sender>> {
        let is_datagram = !self.end.tracker.is_send && self.end.qp.is_datagram;
        Ok(self.status()?.filter(|_| is_datagram).map(|_| self.end.tracker.sender(self.n)))
    }

    /// Whether the request was cancelled, for example by dropping its batch, and its number is not in use. It never
    /// completes.
    pub fn is_taken_back(&self) -> bool {
        self.n >= self.end.tracker.posted()
    }

    /// Whether the request is in a batch or a capture that no stream has got yet, or was prepared and not posted: nothing happens
    /// before.
    pub fn is_unsubmitted(&self) -> bool {
        self.end.tracker.unsubmitted().contains(&self.n)
    }

    /// Refuses a request that a reset has discarded. Its number may be in use again.
    pub(crate) fn check_life(&self) -> Result<()> {
        match self.end.tracker.is_lost(self.n, self.life) {
            true => Err(Error::Reset { qpn: self.end.qp.qpn }),
            false => Ok(()),
        }
    }

    /// Blocks until the completion arrives. Does not consume it: see [`Cq::drain`](super::Cq::drain).
    ///
    /// # Errors
    /// Those of [`Completion::status`]: the request's failure, the queue pair's error, [`Error::Forgotten`],
    /// [`Error::Reset`]. [`Error::TakenBack`] for a request that [was cancelled](Completion::is_taken_back);
    /// [`Error::Deadline`] after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Wc> {
        let _range = DOMAIN.range(c"wait");
        let mut found = None;
        // A device whose rings a thread reads is not told of receives that a GPU stream posts.
        let rings = self.end.tracker.is_of_stream();
        let (awaited, describe) = (|| self.end.awaits(self.n), || self.end.source().describe(self.n));
        self.end.cq.wait_until(timeout, "waiting for a completion", awaited, describe, || {
            found = self.status().transpose();
            if found.is_none() && rings {
                self.end.qp.provider.ring(self.end.qp.qpn);
            }
            if found.is_none() && self.end.qp.provider.progress() {
                found = self.status().transpose();
            }
            if found.is_none() && self.is_taken_back() {
                // Checked again: a reset between the two queries also cancels requests.
                let taken_back = || Error::TakenBack { qpn: self.end.qp.qpn };
                found = Some(self.status().and_then(|wc| wc.ok_or_else(taken_back)));
            }
            found.is_some()
        })?;
        found.expect("wait_until returns Ok only when there is a status")
    }
}
