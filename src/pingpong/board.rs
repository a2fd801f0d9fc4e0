//! The buffers of a rank, and what is in them.

use std::ops::Range;

use crate::measure::Pattern;
use gdsync::memory::Memory;
use mp::{Communicator, Registration};

use crate::lane::{Placed, Result};

/// The buffers of a rank for messages of one size: a slot to send from, two to receive into by turns.
#[derive(Clone, Debug)]
pub(super) struct Board {
    pub(super) rank: u64,
    /// It sends what nobody expects.
    pub(super) lies: bool,
    pub(super) bytes: usize,
    pub(super) outgoing: Registration,
    pub(super) incoming: Registration,
}

impl Board {
    pub(super) fn new(comm: &Communicator, placed: &Placed, bytes: usize, wrong_bytes: bool) -> Result<Self> {
        let outgoing = comm.register(&placed.outgoing(stride(bytes))?)?;
        let incoming = comm.register(&placed.incoming(2 * stride(bytes))?)?;
        let lies = wrong_bytes && comm.rank() == 1;
        Ok(Self { rank: comm.rank() as u64, lies, bytes, outgoing, incoming })
    }

    fn slot(&self, slot: usize) -> Range<usize> {
        let start = slot * stride(self.bytes);
        start..start + self.bytes
    }

    /// Where messages leave.
    pub(super) fn send_slot(&self) -> Range<usize> {
        self.slot(0)
    }

    /// Where message `n` arrives.
    pub(super) fn receive_slot(&self, n: u64) -> Range<usize> {
        self.slot(usize::from(n % 2 == 1))
    }

    /// That of both slots that receive.
    fn received(&self) -> &Memory {
        self.incoming.memory()
    }

    /// What this rank sends as message `n`.
    pub(super) fn ours(&self, n: u64) -> Pattern {
        Pattern::new(self.rank, if self.lies { !n } else { n })
    }

    /// What this rank receives as message `n`.
    pub(super) fn theirs(&self, n: u64) -> Pattern {
        Pattern::new(1 - self.rank, n)
    }

    /// Before iteration `n`: the message to send.
    fn fill(&self, n: u64) -> gdsync::Result<()> {
        self.ours(n).fill(self.outgoing.memory(), self.send_slot().start, self.bytes)
    }

    /// Makes sure that message `n` is not yet where it is to arrive.
    fn spoil(&self, n: u64, at: Range<usize>) -> gdsync::Result<()> {
        self.theirs(n).spoil(self.received(), at.start, self.bytes)
    }

    fn arrived(&self, n: u64, at: Range<usize>) -> gdsync::Result<bool> {
        self.theirs(n).check(self.received(), at.start, self.bytes)
    }

    /// Before the first iteration.
    pub(super) fn prepare(&self) -> gdsync::Result<()> {
        self.fill(0)?;
        self.spoil(0, self.receive_slot(0))?;
        self.spoil(1, self.receive_slot(1))?;
        self.flush()
    }

    fn flush(&self) -> gdsync::Result<()> {
        self.outgoing.memory().flush()?;
        self.received().flush()
    }

    /// After iteration `n`: looks at what arrived, and prepares the next two. False for wrong data.
    pub(super) fn turn(&self, n: u64) -> gdsync::Result<bool> {
        let right = self.arrived(n, self.receive_slot(n))?;
        self.spoil(n + 2, self.receive_slot(n + 2))?;
        self.fill(n + 1)?;
        Ok(right)
    }

    /// Before a window whose messages are all the same, number `n`; both slots receive.
    pub(super) fn prepare_window(&self, n: u64) -> gdsync::Result<()> {
        self.fill(n)?;
        self.spoil(n, self.slot(0))?;
        self.spoil(n, self.slot(1))?;
        self.flush()
    }

    /// After such a window: the number of slots with wrong data.
    pub(super) fn wrong_of_window(&self, n: u64, used: usize) -> gdsync::Result<u64> {
        (0..used).try_fold(0, |wrong, slot| Ok(wrong + u64::from(!self.arrived(n, self.slot(1 - slot))?)))
    }

    /// Where a message of such a window arrives: the last has a slot for itself.
    pub(super) fn window_slot(&self, is_last: bool) -> Range<usize> {
        self.slot(usize::from(is_last))
    }
}

/// Slots start on cache lines.
fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}
