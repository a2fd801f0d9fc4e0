//! A buffer of three slots for messages of one size: one to send from, two to receive into by turns.

use std::ops::Range;

use gdasync::gdsync::memory::Memory;
use gdasync::measure::Pattern;

use super::Result;

/// Where messages are in a buffer. Slots start on cache lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    bytes: usize,
    stride: usize,
}

impl Slots {
    /// For messages of so many bytes.
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, stride: bytes.next_multiple_of(64) }
    }

    /// The same places for smaller messages.
    pub(super) fn of(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// Bytes of the buffer.
    pub(super) fn len(self) -> usize {
        3 * self.stride
    }

    fn slot(self, slot: usize) -> Range<usize> {
        let start = slot * self.stride;
        start..start + self.bytes
    }

    /// Where messages leave.
    pub(super) fn sent(self) -> Range<usize> {
        self.slot(0)
    }

    /// Where message `n` arrives.
    pub(super) fn received(self, n: u64) -> Range<usize> {
        self.slot(1 + usize::from(n % 2 == 1))
    }

    /// Writes the message to send.
    pub(super) fn fill(self, memory: &Memory, ours: Pattern) -> Result<()> {
        Ok(ours.fill(memory, self.sent().start, self.bytes)?)
    }

    /// Before so many messages: makes sure that they are not yet where they arrive.
    pub(super) fn spoil(self, memory: &Memory, theirs: Pattern, messages: u64) -> Result<()> {
        for n in 0..messages.min(2) {
            theirs.spoil(memory, self.received(n).start, self.bytes)?;
        }
        Ok(())
    }

    /// After so many messages: how many slots have wrong data.
    pub(super) fn wrong(self, memory: &Memory, theirs: Pattern, messages: u64) -> Result<u64> {
        let mut wrong = 0;
        for n in 0..messages.min(2) {
            wrong += u64::from(!theirs.check(memory, self.received(n).start, self.bytes)?);
        }
        Ok(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_arrive_is_counted() {
        let (slots, theirs) = (Slots::new(1000).of(100), Pattern::new(1, 7));
        let memory = Memory::alloc(slots.len()).unwrap();
        slots.fill(&memory, Pattern::new(0, 7)).unwrap();
        slots.spoil(&memory, theirs, 5).unwrap();
        assert_eq!(
            (0..4).map(|n| slots.wrong(&memory, theirs, n).unwrap()).collect::<Vec<_>>(),
            [0, 1, 2, 2]
        );
        theirs.fill(&memory, slots.received(1).start, 100).unwrap();
        assert_eq!(slots.wrong(&memory, theirs, 5).unwrap(), 1);
        theirs.fill(&memory, slots.received(4).start, 100).unwrap();
        assert_eq!(slots.wrong(&memory, theirs, 5).unwrap(), 0);
        let ranges = [slots.sent(), slots.received(0), slots.received(1)];
        assert!(ranges.windows(2).all(|two| two[0].end <= two[1].start), "{ranges:?}");
        assert!(ranges[2].end <= slots.len());
    }
}
