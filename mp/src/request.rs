//! Messages under way.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use gdsync::verbs::{Completion, Wc};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::link::{Link, SILENCE};
use crate::peer::Way;
use crate::window::Lane;

/// A message under way. Dropping it detaches: the message goes on, its resources come back by themselves.
#[derive(Clone, Debug)]
#[must_use = "a message nobody waits for may fail unnoticed"]
pub struct Request(pub(crate) Arc<Order>);

/// What a message is, and where it went.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) link: Arc<Link>,
    pub(crate) way: Way,
    /// The connection, if it is an operation of a window.
    pub(crate) lane: Option<Weak<Lane>>,
    pub(crate) operation: &'static str,
    pub(crate) completion: Completion,
    pub(crate) bytes: usize,
    /// What came of it, from before the queue forgets.
    pub(crate) kept: OnceLock<Status>,
}

/// A message that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The rank at the other end.
    pub rank: usize,
    /// Bytes sent or received.
    pub bytes: usize,
}

impl Request {
    /// The rank at the other end.
    pub fn rank(&self) -> usize {
        self.0.link.rank
    }

    /// Whether the message is complete; `None` while it is under way. A complete send may be overwritten.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed.
    pub fn test(&self) -> Result<Option<Status>> {
        let status = self.0.completion.status().map(|wc| wc.map(|wc| self.complete(&wc)));
        status.or_else(|error| self.recall(error).map(Some))
    }

    /// Blocks until the message is complete. Now and then it asks whether the other rank is still there.
    ///
    /// # Errors
    /// As [`Request::test`], and [`gdsync::Error::Deadline`] inside after `timeout`: the message goes on.
    pub fn wait(&self, timeout: Duration) -> Result<Status> {
        match self.test()? {
            Some(status) => Ok(status),
            None => {
                self.0.link.credits.catch_up();
                self.wait_long(timeout)
            }
        }
    }

    /// As [`Request::wait`], where it is not complete.
    pub(crate) fn wait_long(&self, timeout: Duration) -> Result<Status> {
        let deadline = Deadline::after(timeout);
        let status = loop {
            match self.0.completion.wait(deadline.remaining().min(SILENCE)) {
                Err(gdsync::Error::Deadline { .. }) if !deadline.is_over() => self.0.link.tend(),
                Err(gdsync::Error::Deadline { what, .. }) => {
                    break Err(gdsync::Error::Deadline { what, after: timeout });
                }
                other => break other,
            }
        };
        status.map(|wc| self.complete(&wc)).or_else(|error| self.recall(error))
    }

    /// Success that was kept, if the queue has only forgotten it.
    fn recall(&self, error: gdsync::Error) -> Result<Status> {
        match (&error, self.0.kept.get()) {
            (gdsync::Error::Forgotten { .. }, Some(status)) => Ok(*status),
            _ => Err(self.failed(error)),
        }
    }

    pub(crate) fn failed(&self, source: gdsync::Error) -> Error {
        let source = match source {
            // It went down with the connection: that has the reason.
            gdsync::Error::Completion(error) if error.is_flush() => {
                let known = match &self.0.lane {
                    Some(lane) => lane.upgrade().and_then(|lane| lane.ends.send.check().err()),
                    None => self.0.link.check().err(),
                };
                known.unwrap_or(error.into())
            }
            other => other,
        };
        Error::Message { rank: self.0.link.rank, operation: self.0.operation, source }
    }

    fn complete(&self, wc: &Wc) -> Status {
        let bytes = if wc.is_send() { self.0.bytes } else { wc.byte_len as usize };
        Status { rank: self.0.link.rank, bytes }
    }
}
