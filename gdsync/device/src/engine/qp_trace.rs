//! What the flight recorder is told of a queue pair by whoever reads its rings: requests by the numbers that their owner gave them.
//!
//! The rings only have the low bits of these. But every request is fetched once, in order, and has one completion; those that a
//! reset swept away give their numbers to the next.

use crate::error::Result;
use crate::gid::Gid;
use crate::recorder::{By, Event, Log, Queue, Stage};
use mlx5_ring::{Cqe, CqeOpcode};

/// Records the stages of a queue pair's requests.
#[derive(Debug, Default)]
pub struct QpTrace {
    log: Log,
    /// Sends fetched.
    fetched: u64,
    /// Sends and receives completed.
    sent: u64,
    received: u64,
}

impl QpTrace {
    /// For a queue pair of the device at this address.
    pub fn new(gid: Gid) -> Result<Self> {
        Ok(Self { log: Log::open()?.on(gid), ..Self::default() })
    }

    /// The doorbell was found rung.
    #[inline]
    pub fn triggered(&self, qpn: u32) {
        self.log.note(|| Event::of(Stage::Triggered, Queue::Send, By::Hca, qpn, self.fetched));
    }

    /// A send was taken from the ring.
    #[inline]
    pub fn fetched(&mut self, qpn: u32, len: usize) {
        let event = || Event::of(Stage::Fetched, Queue::Send, By::Hca, qpn, self.fetched);
        self.log.note(|| Event { len: u32::try_from(len).unwrap_or(u32::MAX), ..event() });
        self.fetched += 1;
    }

    /// A send was passed over, to be flushed.
    pub fn skipped(&mut self) {
        self.fetched += 1;
    }

    /// A completion is about to be written.
    #[inline]
    pub fn completed(&mut self, cqe: &Cqe) {
        let is_send = matches!(cqe.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR);
        let (count, queue) =
            if is_send { (&mut self.sent, Queue::Send) } else { (&mut self.received, Queue::Receive) };
        let number = *count;
        *count += 1;
        self.log.note(|| {
            let status = if cqe.opcode.is_error() { cqe.syndrome.0 } else { 0 };
            let event = Event::of(Stage::Completed, queue, By::Hca, cqe.qpn, number);
            Event { len: cqe.byte_cnt, status, ..event }
        });
    }

    /// The queue pair was reset: what was fetched and not completed never will be.
    pub fn reset(&mut self) {
        self.fetched = self.sent;
    }
}
