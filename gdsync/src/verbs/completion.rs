//! What came of one work request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::end::QueueEnd;
use super::wr::Wc;
use crate::nvtx::DOMAIN;
use gdsync_device::error::{Error, Result};

/// The completion of one work request: there or not yet. Looking at it takes nothing away from
/// [`poll`](super::Cq::poll) or from a stream that waits.
///
/// It can be asked for until the queue has gone once round; a later question about a success is answered with
/// [`Error::Forgotten`].
#[derive(Clone)]
pub struct Completion {
    pub(crate) end: Arc<QueueEnd>,
    pub(crate) n: u64,
    /// Resets of the queue before the request was made.
    pub(crate) life: usize,
}

/// A work request that was handed to a stream: what it is known by, for nothing. To keep it takes a [`Submitted::completion`].
#[derive(Clone)]
pub struct Submitted<'q> {
    end: &'q Arc<QueueEnd>,
    n: u64,
    life: usize,
}

impl<'q> Submitted<'q> {
    #[inline(always)]
    pub(crate) fn new(end: &'q Arc<QueueEnd>, n: u64) -> Self {
        Self { end, n, life: end.tracker.life() }
    }

    /// As [`Completion::index`].
    #[inline]
    pub fn index(&self) -> u64 {
        self.n
    }

    /// Its completion, which holds on to the queue pair.
    #[inline]
    pub fn completion(&self) -> Completion {
        Completion { end: self.end.clone(), n: self.n, life: self.life }
    }
}

impl fmt::Debug for Submitted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "work request {} of the {:?}", self.n, self.end)
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "completion {} of the {:?}", self.n, self.end)
    }
}

impl Completion {
    /// The number of the work request in its queue, from 0. One that is taken back gives it to the next.
    #[inline]
    pub fn index(&self) -> u64 {
        self.n
    }

    /// Becomes that of another request of the queue, which was just made: the hold on the queue pair need not be counted again.
    #[doc(hidden)] // for messaging layers of this workspace
    #[inline]
    pub fn renew(&mut self, index: u64) {
        (self.n, self.life) = (index, self.end.tracker.life());
    }

    /// Bytes of a success that was seen before, as it is mostly when somebody asks: what [`Completion::status`] says, in fewer words.
    #[doc(hidden)] // for messaging layers of this workspace
    #[inline]
    pub fn known_len(&self) -> Option<u32> {
        self.end.tracker.known_len(self.n, self.life)
    }

    /// The completion, or `None` while it has not arrived.
    ///
    /// # Errors
    /// The failure of this work request; what broke the queue pair before it could complete; [`Error::Forgotten`];
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
            None => self.end.qp.check().map(|()| None),
        }
    }

    /// Whether the request was taken back, as by dropping its batch, and none took its place: it will never complete.
    pub fn is_taken_back(&self) -> bool {
        self.n >= self.end.tracker.posted()
    }

    /// Refuses a request that a reset has swept away: its number was given again.
    pub(crate) fn check_life(&self) -> Result<()> {
        match self.end.tracker.is_lost(self.n, self.life) {
            true => Err(Error::Reset { qpn: self.end.qp.qpn }),
            false => Ok(()),
        }
    }

    /// Blocks until it has arrived. Takes nothing: see [`Cq::drain`](super::Cq::drain).
    ///
    /// # Errors
    /// As [`Completion::status`]; [`Error::TakenBack`] as soon as it [is](Completion::is_taken_back); [`Error::Deadline`] after
    /// `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Wc> {
        let _range = DOMAIN.range(c"wait");
        let mut found = None;
        let awaited = || self.end.awaits(self.n);
        self.end.cq.wait_until(timeout, "waiting for a completion", awaited, || {
            found = self.status().transpose();
            if found.is_none() && self.end.qp.provider.progress() {
                found = self.status().transpose();
            }
            if found.is_none() && self.is_taken_back() {
                // Once more: a reset between the two questions takes its requests back, too.
                let taken_back = || Error::TakenBack { qpn: self.end.qp.qpn };
                found = Some(self.status().and_then(|wc| wc.ok_or_else(taken_back)));
            }
            found.is_some()
        })?;
        found.expect("wait_until returns Ok only when there is a status")
    }
}
