//! What the CPU posts to a queue pair, and what it learns of it.

use std::time::Duration;

use super::Qp;
use crate::nvtx::DOMAIN;
use crate::verbs::completion::Completion;
use crate::verbs::wr::{RecvWr, SendWr, Wc};
use gdsync_device::error::{Error, Result};

impl Qp {
    /// Posts sends and rings the doorbell. All or none are posted. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list;
    /// The error that broke the queue pair; [`Error::WrongState`]; [`Error::QueueFull`]; [`Error::WorkRequest`];
    /// [`Error::Busy`] or [`Error::OutOfOrder`] while requests prepared for a stream are outstanding.
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<Completion> {
        Ok(self.send.end.completion(self.send_all(wrs)?))
    }

    /// As [`Qp::post_send`], for who has a [`Completion`] to renew with its index.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn post_send_index(&self, wrs: &[SendWr<'_>]) -> Result<u64> {
        self.send_all(wrs)
    }

    #[inline(always)]
    fn send_all(&self, wrs: &[SendWr<'_>]) -> Result<u64> {
        let _range = DOMAIN.range(c"post_send");
        let range = self.send.post(wrs)?;
        let last = range.end.checked_sub(1).filter(|_| !range.is_empty());
        last.ok_or_else(|| Error::invalid("sends to post", 0, "at least one"))
    }

    /// Posts receives. Those before the first error stay posted. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list;
    /// The error that broke the queue pair; [`Error::WrongState`]; [`Error::QueueFull`]; [`Error::WorkRequest`].
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<Completion> {
        Ok(self.recv.end.completion(self.receive_all(wrs)?))
    }

    /// As [`Qp::post_recv`], for who has a [`Completion`] to renew with its index.
    ///
    /// # Errors
    /// As [`Qp::post_recv`].
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn post_recv_index(&self, wrs: &[RecvWr<'_>]) -> Result<u64> {
        self.receive_all(wrs)
    }

    #[inline(always)]
    fn receive_all(&self, wrs: &[RecvWr<'_>]) -> Result<u64> {
        let _range = DOMAIN.range(c"post_recv");
        let last = self.recv.post(wrs)?;
        last.ok_or_else(|| Error::invalid("receives to post", 0, "at least one"))
    }

    /// The completion of a send that was just made.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn send_completion(&self, index: u64) -> Completion {
        self.send.end.completion(index)
    }

    /// The completion of a receive that was just posted.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn recv_completion(&self, index: u64) -> Completion {
        self.recv.end.completion(index)
    }

    /// Takes the next send completion, if it is there: see [`Cq::poll`](crate::verbs::Cq::poll).
    pub fn poll_send(&self) -> Option<Wc> {
        self.send.end.cq.poll()
    }

    /// Takes the next receive completion, if it is there: see [`Cq::poll`](crate::verbs::Cq::poll).
    pub fn poll_recv(&self) -> Option<Wc> {
        self.recv.end.cq.poll()
    }

    /// Blocks until all sends are complete that were posted, or that a stream was handed. Those that are only prepared, by
    /// [`Qp::prepare_send`] or in a batch, are not waited for.
    ///
    /// # Errors
    /// The root cause of the first failure of the queue pair; [`Error::Deadline`] after `timeout`.
    pub fn wait_all_sends(&self, timeout: Duration) -> Result<()> {
        let end = &self.send.end;
        let last = || end.tracker.posted().saturating_sub(1);
        end.cq.wait_until(
            timeout,
            "waiting for all sends",
            || end.awaits(last()),
            || {
                end.cq.reap();
                let is_done = || end.tracker.lock().is_idle() || end.qp.check_known().is_err();
                is_done() || (end.qp.provider.progress() && is_done())
            },
        )?;
        self.check()
    }
}
