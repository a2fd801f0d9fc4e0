//! Messages under way.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use gdsync::verbs::Completion;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::link::{Link, SILENCE};
use crate::peer::Way;
use crate::slots::Receive;
use crate::window::Lane;

/// A message under way. Dropping it detaches: the message goes on, its resources come back by themselves.
#[derive(Clone, Debug)]
#[must_use = "a message nobody waits for may fail unnoticed"]
pub struct Request {
    pub(crate) link: Arc<Link>,
    pub(crate) part: Part,
}

/// Which way it takes.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// Through a queue pair.
    Posted(Arc<Order>),
    /// It was sent through a slot: complete with what was sent before it.
    Copied { bytes: usize, after: Option<Arc<Order>> },
    /// A receive of what comes through a slot, if slots do not close before.
    Kept(Arc<Receive>),
}

/// What a message of a queue pair is, and where it went.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) way: Way,
    /// The connection, if it is an operation of a window.
    pub(crate) lane: Option<Weak<Lane>>,
    pub(crate) operation: &'static str,
    pub(crate) completion: Completion,
    pub(crate) bytes: usize,
    /// How many bytes came of it, from before the queue forgets.
    pub(crate) kept: OnceLock<usize>,
}

/// A message that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The rank at the other end.
    pub rank: usize,
    /// Bytes sent or received.
    pub bytes: usize,
}

impl Order {
    /// Bytes sent or received, or `None` while it is under way.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match self.completion.status() {
            Ok(wc) => Ok(wc.map(|wc| if wc.is_send() { self.bytes } else { wc.byte_len as usize })),
            // Success that was kept, if the queue has only forgotten it.
            Err(gdsync::Error::Forgotten { .. }) if self.kept.get().is_some() => Ok(self.kept.get().copied()),
            Err(error) => Err(error),
        }
    }

    fn is_message(&self, way: Way) -> bool {
        self.lane.is_none() && self.way == way
    }
}

impl Request {
    /// The rank at the other end.
    pub fn rank(&self) -> usize {
        self.link.rank
    }

    /// Whether the message is complete; `None` while it is under way. A complete send may be overwritten.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed.
    pub fn test(&self) -> Result<Option<Status>> {
        let bytes = self.outcome().map_err(|error| self.failed(error))?;
        Ok(bytes.map(|bytes| self.status(bytes)))
    }

    fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match &self.part {
            Part::Posted(order) => {
                // What came before it through slots is complete before it.
                if order.is_message(Way::Recv) {
                    self.link.take();
                }
                order.outcome()
            }
            Part::Copied { bytes, after: None } => Ok(Some(*bytes)),
            Part::Copied { bytes, after: Some(before) } => Ok(before.outcome()?.map(|_| *bytes)),
            Part::Kept(receive) => {
                if !receive.is_known() {
                    self.link.take();
                }
                match receive.outcome()? {
                    None if receive.bound().is_none() => self.link.outcome_at_end(receive),
                    known => Ok(known),
                }
            }
        }
    }

    /// Blocks until the message is complete. Now and then it asks whether the other rank is still there.
    ///
    /// # Errors
    /// As [`Request::test`], and [`gdsync::Error::Deadline`] inside after `timeout`: the message goes on.
    pub fn wait(&self, timeout: Duration) -> Result<Status> {
        self.wait_and(timeout, || {
            self.link.credits.catch_up_or_leave();
        })
    }

    /// As [`Request::wait`], and calls `meanwhile` once unless it is complete.
    #[inline]
    pub(crate) fn wait_and(&self, timeout: Duration, meanwhile: impl FnOnce()) -> Result<Status> {
        let bytes = match (&self.part, &self.link.slots) {
            (Part::Copied { bytes, after: None }, _) => Ok(*bytes),
            (Part::Kept(receive), Some(slots)) => {
                let _range = crate::DOMAIN.range(c"wait");
                let waited = slots.wait(&self.link, receive, timeout, meanwhile);
                waited.and_then(|waited| self.wait_long(timeout, waited))
            }
            _ => match self.outcome() {
                Ok(None) => {
                    let _range = crate::DOMAIN.range(c"wait");
                    meanwhile();
                    self.wait_long(timeout, Duration::ZERO)
                }
                Ok(Some(bytes)) => Ok(bytes),
                Err(error) => Err(error),
            },
        };
        bytes.map(|bytes| self.status(bytes)).map_err(|error| self.failed(error))
    }

    /// Waits for the completion, if there is one, after `waited`.
    fn wait_long(&self, timeout: Duration, waited: Duration) -> gdsync::Result<usize> {
        if let Some(bytes) = self.outcome()? {
            return Ok(bytes);
        }
        let Some(completion) = self.completion() else {
            return Err(gdsync::Error::Deadline { what: "waiting for a message", after: timeout });
        };
        let deadline = Deadline::after(timeout.saturating_sub(waited));
        loop {
            match completion.wait(deadline.remaining().min(SILENCE)) {
                Err(gdsync::Error::Deadline { .. }) if !deadline.is_over() => self.link.tend(),
                Err(gdsync::Error::Deadline { what, .. }) => {
                    return Err(gdsync::Error::Deadline { what, after: timeout });
                }
                // It is known, or was forgotten and kept.
                _ => break,
            }
        }
        let pending = gdsync::Error::Deadline { what: "waiting for a completion", after: timeout };
        self.outcome()?.ok_or(pending)
    }

    fn completion(&self) -> Option<&Completion> {
        match &self.part {
            Part::Posted(order) | Part::Copied { after: Some(order), .. } => Some(&order.completion),
            Part::Copied { after: None, .. } => None,
            Part::Kept(receive) => receive.bound(),
        }
    }

    /// What a stream has to wait for; `None` where the message is complete.
    ///
    /// # Errors
    /// As [`Request::test`].
    pub(crate) fn for_stream(&self) -> Result<Option<&Completion>> {
        let receives = match &self.part {
            Part::Posted(order) => order.is_message(Way::Recv),
            Part::Copied { .. } => false,
            Part::Kept(_) => true,
        };
        if let (true, Some(slots)) = (receives, &self.link.slots) {
            slots.settle_for_stream(&self.link).map_err(|error| self.failed(error))?;
        }
        match &self.part {
            Part::Posted(_) => {}
            Part::Copied { .. } | Part::Kept(_) => {
                if self.test()?.is_some() {
                    return Ok(None);
                }
            }
        }
        Ok(self.completion())
    }

    pub(crate) fn failed(&self, source: gdsync::Error) -> Error {
        let source = match source {
            // It went down with the connection: that has the reason.
            gdsync::Error::Completion(error) if error.is_flush() => {
                let lane = match &self.part {
                    Part::Posted(order) => order.lane.as_ref(),
                    Part::Copied { .. } | Part::Kept(_) => None,
                };
                let known = match lane {
                    Some(lane) => lane.upgrade().and_then(|lane| lane.ends.send.check().err()),
                    None => self.link.check().err(),
                };
                known.unwrap_or(error.into())
            }
            other => other,
        };
        let operation = match &self.part {
            Part::Posted(order) => order.operation,
            Part::Copied { .. } => "send",
            Part::Kept(_) => "receive",
        };
        Error::Message { rank: self.link.rank, operation, source }
    }

    fn status(&self, bytes: usize) -> Status {
        Status { rank: self.link.rank, bytes }
    }
}
