//! The connection to one rank: the queue pair of the messages, the credits beside it, and whether the rank is there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdsync::stream::{Batch, Cond, PreparedSend};
use gdsync::verbs::{Completion, Qp, SendWr, Sge};

use crate::credit::Credits;

/// How long a rank may be silent before a wait asks whether it is there.
pub(crate) const SILENCE: Duration = Duration::from_millis(250);

/// One queue pair, or for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rank: usize,
    pub(crate) send: Qp,
    pub(crate) recv: Qp,
    /// Messages that can be under way in each direction.
    pub(crate) depth: usize,
    pub(crate) credits: Credits,
    ended: AtomicBool,
}

impl Link {
    pub(crate) fn new(rank: usize, send: Qp, recv: Qp, depth: usize, credits: Credits) -> Self {
        Self { rank, send, recv, depth, credits, ended: AtomicBool::new(false) }
    }

    /// Whether the rank can be reached, as far as is known.
    ///
    /// # Errors
    /// What ended the connection first.
    pub(crate) fn check(&self) -> gdsync::Result<()> {
        self.send.check()?;
        self.recv.check()
    }

    /// Adds a message to a batch.
    pub(crate) fn send_in_batch(&self, batch: &mut Batch, sges: &[Sge]) -> gdsync::Result<Completion> {
        Ok(self.post_in_batch(batch, self.send.prepare_send(&[SendWr::send(sges)])?))
    }

    /// Adds a message that was prepared to a batch, behind the wait for its receive if that is not posted yet.
    pub(crate) fn post_in_batch(&self, batch: &mut Batch, send: PreparedSend) -> Completion {
        if let Some((word, number)) = self.credits.number(&send.completion(), self.depth) {
            batch.wait_value32(word, number, Cond::Geq);
        }
        batch.post(send)
    }

    /// Asks whether the rank is still there, if it has been silent: a receive alone would never learn it.
    pub(crate) fn tend(&self) {
        let there = self.check().and_then(|()| self.credits.tend(SILENCE));
        if let Err(error) = there {
            self.fail(&error);
        }
    }

    /// Ends the connection: all that is under way ends with this error, unless it has one of its own.
    pub(crate) fn fail(&self, error: &gdsync::Error) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        self.send.stop(error);
        self.recv.stop(error);
        self.credits.end(error);
    }
}
