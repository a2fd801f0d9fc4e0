//! Where the slots of one direction are in shared memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use gdsync::memory::Memory;
use gdsync::protocol::shm_fifo::Slots;

/// Slots of a direction, and pages: a message that does not fit into its slot is in the page that follows from its number.
const SLOTS: usize = 256;
const LONG: usize = 64;
/// Bytes of a slot: its header, and a short message in the same cache line.
const LINE: usize = 64;
const HEADER: usize = 8;
/// Bytes of the longest message: a page.
pub(crate) const LONGEST: usize = 4096;

// Each on a line of its own: what both write, what the sender writes, what the receiver writes.
const WORD: usize = 0;
const BEGUN: usize = 64;
const RUN: usize = 68;
const RESUMED: usize = 128;
const TAKEN: usize = 136;
const FIRST: usize = 256;
const PAGES: usize = 20480;

/// Bytes of a direction: whole pages.
pub(super) const BYTES: usize = PAGES + LONG * LONGEST;

const _: () = assert!(FIRST + SLOTS * LINE <= PAGES && SLOTS.is_power_of_two() && PAGES.is_multiple_of(4096));

/// The slots from one rank to another.
#[derive(Clone, Debug)]
pub(super) struct Region(pub(super) Memory);

impl Region {
    /// Where a message of this length is in the memory.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the number of slots")]
    pub(super) fn body(number: u64, len: usize) -> usize {
        match len <= LINE - HEADER {
            true => FIRST + (number % SLOTS as u64) as usize * LINE + HEADER,
            false => PAGES + (number % LONG as u64) as usize * LONGEST,
        }
    }

    /// How many messages can be there with one of this length.
    #[inline]
    pub(super) fn room(len: usize) -> u64 {
        (if len <= LINE - HEADER { SLOTS } else { LONG }) as u64
    }

    /// How many messages in a row the sender could have sent through slots.
    pub(super) fn run(&self) -> u32 {
        self.word32(RUN).load(Ordering::Relaxed)
    }

    pub(super) fn set_run(&self, run: u32) {
        self.word32(RUN).store(run, Ordering::Relaxed);
    }

    #[inline]
    fn word32(&self, offset: usize) -> &AtomicU32 {
        self.0.atomic32(offset).expect("the words are aligned and inside")
    }

    #[inline]
    fn word64(&self, offset: usize) -> &AtomicU64 {
        self.0.atomic64(offset).expect("the words are aligned and inside")
    }
}

impl Slots for Region {
    type W32 = AtomicU32;
    type W64 = AtomicU64;

    fn count(&self) -> u64 {
        SLOTS as u64
    }

    #[inline]
    fn word(&self) -> &AtomicU64 {
        self.word64(WORD)
    }

    #[inline]
    fn begun(&self) -> &AtomicU32 {
        self.word32(BEGUN)
    }

    #[inline]
    fn resumed(&self) -> &AtomicU32 {
        self.word32(RESUMED)
    }

    #[inline]
    fn taken(&self) -> &AtomicU64 {
        self.word64(TAKEN)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the number of slots")]
    fn header(&self, slot: u64) -> &AtomicU64 {
        self.word64(FIRST + slot as usize * LINE)
    }
}

#[cfg(test)]
mod tests {
    use gdsync::protocol::shm_fifo::{Receiver, Sender};

    use super::*;

    #[test]
    fn a_sender_survives_what_no_receiver_writes() {
        for taken in [2, u64::MAX / 2, u64::MAX - 300] {
            let region = Region(Memory::alloc(BYTES).unwrap());
            let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
            sender.count(&region, 0);
            receiver.open(&region, 0);
            assert_eq!(sender.claim(&region, 1, 1), Some(0));
            region.taken().store(taken, Ordering::Relaxed);
            assert_eq!(sender.claim(&region, 1, 1), None, "{taken}");
            assert_eq!(receiver.close(&region), 1);
        }
    }
}
