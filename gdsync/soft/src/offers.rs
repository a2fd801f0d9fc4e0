//! Offers to the sender of a long message to write a part of it to its place, while the receiver reads the rest.
//!
//! One word in each direction, in the shared memory of the link, says what became of the last offer:
//! [`protocol::offer`](gdsync_shm::offer).

use std::time::{Duration, Instant};

use super::reference::{REFERENCE, Reference};
use gdsync_device::memory::Word64;
use gdsync_shm::offer::{self, Outcome};

/// Bytes of an offer in a packet.
pub(super) const OFFER: usize = 16 + REFERENCE;

/// What one side of a link knows of offers.
#[derive(Debug)]
pub(crate) struct Offers {
    ours: Word64,
    theirs: Word64,
    /// Of the last offer.
    number: u64,
    /// The peer was at it when somebody last looked. What became of it must stay to be seen, also by another queue pair.
    is_out: bool,
    /// The peer cannot write here.
    refused: bool,
}

impl Offers {
    pub(super) fn new([ours, theirs]: [Word64; 2]) -> Self {
        Self { ours, theirs, number: 0, is_out: false, refused: false }
    }

    /// Makes an offer, if the peer may be able to take it. Whoever makes it must [`settle`](Self::settle).
    pub(super) fn make(&mut self) -> Option<u64> {
        let number = self.number + 1;
        if self.is_out || self.refused || !offer::make(self.ours.atomic(), number) {
            return None;
        }
        (self.number, self.is_out) = (number, true);
        Some(number)
    }

    /// Waits until the peer has claimed what was offered, so long at most.
    pub(super) fn await_claim(&self, number: u64, timeout: Duration) {
        let end = Instant::now() + timeout;
        while offer::is_open(self.ours.atomic(), number) && Instant::now() < end {
            std::thread::yield_now();
        }
    }

    /// Who does what was offered.
    pub(super) fn settle(&mut self, number: u64) -> Outcome {
        let outcome = offer::settle(self.ours.atomic(), number);
        self.is_out = outcome == Outcome::Theirs;
        if outcome == Outcome::Refused && !std::mem::replace(&mut self.refused, true) {
            tracing::debug!("software HCA: the peer cannot write memory of this process (process_vm_writev)");
        }
        outcome
    }

    /// Takes an offer of the peer and does it, if it still stands.
    pub(super) fn help(&self, number: u64, work: impl FnOnce() -> bool) -> Option<bool> {
        let word = self.theirs.atomic();
        if !offer::claim(word, number) {
            return None;
        }
        let done = work();
        offer::finish(word, number, done);
        Some(done)
    }
}

/// An offer, as a packet names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) number: u64,
    /// First byte of the message.
    pub(super) skip: u64,
    /// Where it goes.
    pub(super) to: Reference,
}

impl Offer {
    pub(super) fn to_bytes(self) -> [u8; OFFER] {
        let mut out = [0; OFFER];
        out[..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..16].copy_from_slice(&self.skip.to_le_bytes());
        out[16..].copy_from_slice(&self.to.to_bytes());
        out
    }

    pub(super) fn from_bytes(bytes: &[u8; OFFER]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (skip, to) = rest.split_first_chunk()?;
        let to = Reference::from_bytes(to.first_chunk()?);
        Some(Self { number: u64::from_le_bytes(*number), skip: u64::from_le_bytes(*skip), to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdsync_device::memory::Memory;

    #[test]
    fn offers_survive_the_wire() {
        let offer = Offer { number: 3, skip: 4, to: Reference::to_host(5) };
        assert_eq!(Offer::from_bytes(&offer.to_bytes()), Some(offer));
    }

    #[test]
    fn an_offer_is_taken_once_and_only_while_it_stands() {
        let memory = Memory::alloc(16).unwrap();
        let word = |at| memory.word64(at).unwrap();
        let mut receiver = Offers::new([word(0), word(8)]);
        let sender = Offers::new([word(8), word(0)]);
        let first = receiver.make().unwrap();
        assert_eq!(receiver.make(), None, "the first is not settled");
        assert_eq!(receiver.settle(first), Outcome::Ours);
        assert_eq!(sender.help(first, || true), None, "taken back");
        let second = receiver.make().unwrap();
        let seen = sender.help(second, || {
            assert_eq!(receiver.settle(second), Outcome::Theirs);
            assert_eq!(receiver.make(), None);
            true
        });
        assert_eq!(receiver.make(), None, "done, and nobody has seen it");
        assert_eq!((seen, receiver.settle(second)), (Some(true), Outcome::Done));
        assert_eq!(sender.help(second, || true), None, "a packet that came twice");
        let third = receiver.make().unwrap();
        assert_eq!(sender.help(third, || false), Some(false));
        assert_eq!(receiver.settle(third), Outcome::Refused);
        assert_eq!(receiver.make(), None, "the kernel will not change its mind");
    }
}
