//! Waiting for room in the queues of a queue pair.

use std::ops::RangeInclusive;
use std::time::Duration;

use gdsync_device::error::{Error, Result};
use gdsync_shm::{Backoff, sleep_time};

use super::end::QueueEnd;
use super::qp::Qp;

/// Spin time before the first sleep.
const SPIN: Duration = Duration::from_micros(50);

/// Bounds of the growing sleep. A completion ends it, but a stream that moves on does not.
const SLEEPS: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(5);

/// A wait for room in queues.
pub(crate) struct RoomWait {
    backoff: Backoff,
    timeout: Duration,
}

impl RoomWait {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { backoff: Backoff::new(SPIN), timeout }
    }

    /// Whether its time is over. An attempt after `false` is still in time.
    pub(crate) fn is_over(&self) -> bool {
        self.backoff.waited() >= self.timeout
    }

    /// Pauses between two attempts: runs the device of the full queue, or sleeps.
    pub(crate) fn pause(&self, end: &QueueEnd) {
        let waited = self.backoff.waited();
        let helped = end.qp.provider.progress();
        end.cq.reap();
        if !helped && !self.backoff.spin_after(waited) {
            end.cq.park_for_next(sleep_time(waited, SLEEPS).min(self.timeout.saturating_sub(waited)));
        }
    }
}

/// Blocks until `check` finds room in the queue `end`.
fn wait_room(end: &QueueEnd, timeout: Duration, check: impl Fn() -> Result<()>) -> Result<()> {
    let waiting = RoomWait::new(timeout);
    loop {
        let is_last = waiting.is_over();
        end.cq.reap();
        match check() {
            Err(Error::QueueFull { .. }) if !is_last => waiting.pause(end),
            other => return other,
        }
    }
}

impl Qp {
    /// Blocks until there is room for `sends` requests in the send queue, and for their completions in its completion
    /// queue. Another thread may take the room afterwards.
    ///
    /// For loops that a stream runs: requests leave the send queue when they complete, and completions leave the completion
    /// queue when the stream has passed its wait for them. It takes no completions itself. A loop of the CPU takes one where
    /// the queue is full:
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use gdsync::verbs::{Qp, SendWr};
    /// # use gdsync::{Error, Result};
    /// fn send_all(qp: &Qp, wrs: &[SendWr<'_>]) -> Result<()> {
    ///     for wr in wrs {
    ///         loop {
    ///             match qp.post_send(std::slice::from_ref(wr)) {
    ///                 Err(Error::QueueFull { .. }) => drop(qp.send_cq().wait(Duration::from_secs(10))?.ok()?),
    ///                 posted => break drop(posted?),
    ///             }
    ///         }
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::QueueFull`] after `timeout`; [`Error::InvalidArgument`] for more than
    /// [`QpBuilder::max_send_wr`](super::QpBuilder::max_send_wr); the error that broke the queue pair.
    pub fn wait_send_room(&self, sends: usize, timeout: Duration) -> Result<()> {
        wait_room(&self.send.end, timeout, || self.send.check_room(sends))
    }

    /// Blocks until there is room for `receives` requests in the receive queue, and for their completions in its
    /// completion queue: see [`Qp::wait_send_room`].
    ///
    /// # Errors
    /// [`Error::QueueFull`] after `timeout`; [`Error::InvalidArgument`] for more than
    /// [`QpBuilder::max_recv_wr`](super::QpBuilder::max_recv_wr); the error that broke the queue pair.
    pub fn wait_recv_room(&self, receives: usize, timeout: Duration) -> Result<()> {
        wait_room(&self.recv.end, timeout, || self.recv.check_room(receives))
    }
}
