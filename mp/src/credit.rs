//! Credits: how a sender knows that a receive is posted.
//!
//! Each rank has a word per peer, in memory that the peer writes: how many receives the peer has posted for it so far,
//! modulo 2^32. Message number `n` to that peer, counted from 1, may leave when the word is at least `n`: a stream waits for
//! that before it rings, so that what it sends never meets a missing receive, which costs a retry. Announcing the same number
//! again does no harm, and shows whether the peer is still there.
//!
//! The words are written through queue pairs of their own: in the queue of the messages a write of the CPU would have to
//! wait for sends that belong to a stream.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gdsync::memory::{Memory, Word32};
use gdsync::mlx5::RemoteAddr;
use gdsync::stream::Cond;
use gdsync::verbs::{Completion, Qp, SendWr};
use parking_lot::Mutex;

/// Bytes per word: a cache line, as each has a writer of its own.
const SLOT: usize = 64;

/// How far ahead of all messages the word of a rank that failed is set, so that nothing waits for it any more.
const OPEN: u32 = 1 << 30;

/// The memory for the words of `size` ranks.
pub(crate) fn table(size: usize) -> gdsync::Result<Memory> {
    Memory::alloc(size * SLOT)
}

/// Where the word of `rank` is in the table, in bytes.
pub(crate) fn place(rank: usize) -> usize {
    rank * SLOT
}

/// Both directions of the credits between this rank and a peer.
#[derive(Debug)]
pub(crate) struct Credits {
    /// Receives the peer has posted for us.
    ready: Word32,
    numbers: Mutex<Numbers>,
    announced: Mutex<Announced>,
    way: Way,
}

/// How the peer is told.
#[derive(Debug)]
pub(crate) enum Way {
    /// It is this rank: the word is our own.
    Own,
    /// By a write to its table.
    Remote { qp: Qp, word: RemoteAddr },
}

/// What we have told the peer.
#[derive(Debug)]
struct Announced {
    /// Receives posted for it.
    posted: u32,
    /// The queue was full when it should have been told.
    behind: bool,
    last: Option<Completion>,
    when: Instant,
}

/// Which send of the queue is which message. A send that is taken back gives its place in the queue, and so its number, to
/// the next one.
#[derive(Debug, Default)]
struct Numbers {
    /// The message before all of `sends`.
    base: u32,
    /// Places in the queue of the messages that follow.
    sends: VecDeque<u64>,
}

impl Numbers {
    /// The number of the message that would be sent next.
    fn next(&self) -> u32 {
        let after = u32::try_from(self.sends.len()).expect("bounded by the depth");
        self.base.wrapping_add(after).wrapping_add(1)
    }

    /// The number of the message at this place, which is the last one now.
    fn assign(&mut self, place: u64, depth: usize) -> u32 {
        while self.sends.back().is_some_and(|&last| last >= place) {
            self.sends.pop_back();
        }
        // What is further back than the queue is deep was sent.
        while self.sends.len() > depth {
            self.sends.pop_front();
            self.base = self.base.wrapping_add(1);
        }
        let number = self.next();
        self.sends.push_back(place);
        number
    }
}

impl Credits {
    pub(crate) fn new(ready: Word32, way: Way) -> Self {
        let announced = Announced { posted: 0, behind: false, last: None, when: Instant::now() };
        Self { ready, numbers: Mutex::default(), announced: Mutex::new(announced), way }
    }

    /// Tells the peer of one more receive.
    pub(crate) fn grant(&self) {
        let mut announced = self.announced.lock();
        announced.posted = announced.posted.wrapping_add(1);
        self.announce(&mut announced);
    }

    fn announce(&self, announced: &mut Announced) {
        match &self.way {
            Way::Own => self.ready.store(announced.posted),
            Way::Remote { qp, word } => {
                let bytes = announced.posted.to_le_bytes();
                let post = || qp.post_send(&[SendWr::write_inline(*word, &bytes)]);
                let posted = post().or_else(|error| match error {
                    gdsync::Error::QueueFull { .. } => {
                        while qp.poll_send().is_some() {}
                        post()
                    }
                    other => Err(other),
                });
                announced.behind = posted.is_err();
                if let Ok(completion) = posted {
                    announced.last = Some(completion);
                }
                announced.when = Instant::now();
            }
        }
    }

    /// Announces again what was not, or nothing for `pause`, so that a peer that is gone is noticed.
    ///
    /// # Errors
    /// Why the peer could not be told.
    pub(crate) fn tend(&self, pause: Duration) -> gdsync::Result<()> {
        let mut announced = self.announced.lock();
        if let Way::Remote { qp, .. } = &self.way {
            qp.check()?;
            let told = announced.last.as_ref().is_none_or(|last| !matches!(last.status(), Ok(None)));
            if announced.behind || told && announced.when.elapsed() >= pause {
                self.announce(&mut announced);
            }
        }
        Ok(())
    }

    /// Numbers the message that was just put into a queue of `depth` sends. The word and value that it must wait for,
    /// unless it may leave at once.
    pub(crate) fn number(&self, message: &Completion, depth: usize) -> Option<(&Word32, u32)> {
        let number = self.numbers.lock().assign(message.index(), depth);
        (!Cond::Geq.holds32(self.ready.load(), number)).then_some((&self.ready, number))
    }

    /// Lets everything go that waits for the peer, which is lost, and tells it no more: so it learns that it is.
    pub(crate) fn end(&self, error: &gdsync::Error) {
        if let Way::Remote { qp, .. } = &self.way {
            qp.stop(error);
        }
        self.ready.store(self.numbers.lock().next().wrapping_add(OPEN));
    }
}

#[cfg(test)]
mod tests {
    use super::Numbers;

    #[test]
    fn messages_are_counted_and_other_sends_are_not() {
        let mut numbers = Numbers::default();
        // Places 2 and 3 are no messages.
        for (place, number) in [(0, 1), (1, 2), (4, 3), (5, 4)] {
            assert_eq!(numbers.next(), number);
            assert_eq!(numbers.assign(place, 8), number);
        }
    }

    #[test]
    fn what_is_taken_back_gives_its_number_away() {
        let mut numbers = Numbers::default();
        for place in 0..5 {
            numbers.assign(place, 8);
        }
        assert_eq!(numbers.assign(3, 8), 4, "3 and 4 were taken back");
        assert_eq!(numbers.assign(4, 8), 5);
        assert_eq!(numbers.assign(0, 8), 1);
    }

    #[test]
    fn the_count_goes_round_and_memory_does_not_grow() {
        let mut numbers = Numbers { base: u32::MAX - 5, ..Numbers::default() };
        for place in 0..1000_u64 {
            let expected = (u32::MAX - 4).wrapping_add(u32::try_from(place).unwrap());
            assert_eq!(numbers.assign(place, 8), expected);
            assert!(numbers.sends.len() <= 9);
        }
    }
}
