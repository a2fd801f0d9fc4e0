//! Credits: how a sender knows that a receive is posted.
//!
//! Each rank has a word per peer, in memory that the peer writes: how many receives the peer has posted for it so far,
//! modulo 2^32. Message number `n` to that peer, counted from 1, may leave when the word is at least `n`: a stream waits for
//! that before it rings, so that what it sends never meets a missing receive, which costs a retry. Announcing the same number
//! again does no harm, and shows whether the peer is still there.
//!
//! Only streams look at the word: beside it the peer finds whether streams of this rank send to it. As long as none do, only the
//! watching thread announces receives, about a millisecond later, and a call that leaves a wait to a stream: see [`Alarm`].
//! From the first on, a rank announces sooner: rows of receives now and then, see [`is_due`], and those that were held back with
//! the next call that waits. So does one that no thread watches.
//!
//! The words are written through queue pairs of their own: in the queue of the messages a write of the CPU would have to
//! wait for sends that belong to a stream.

mod numbers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gdsync::memory::{Memory, Word32};
use gdsync::mlx5::{RemoteAddr, Syndrome};
use gdsync::stream::Cond;
use gdsync::verbs::{Access, Completion, Qp, QpAttr, QpState, SendWr};
use parking_lot::Mutex;

use crate::watch::Alarm;
use numbers::Numbers;
pub(crate) use numbers::low32;

/// Bytes per word and what is beside it: a cache line, as each has a writer of its own.
const SLOT: usize = 64;

/// Behind the word: not 0 when streams of the peer send to this rank. Both are written by one write.
const WANTED: usize = 4;
/// Bytes of both.
pub(crate) const BYTES: usize = 8;

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
    /// Whether its streams send to us.
    wanted: Word32,
    /// Whether ours send to it.
    wants: AtomicBool,
    /// It costs nothing to tell the peer, or no thread would do it later.
    is_prompt: bool,
    numbers: Numbers,
    /// Receives posted for the peer. This and the next two are modulo 2^32.
    posted: AtomicU32,
    /// Of these, those that it was told of.
    announced: AtomicU32,
    /// Messages that have come from it, as far as anybody has looked.
    arrived: AtomicU32,
    last: Mutex<Announcement>,
    /// Nothing is announced any more.
    has_ended: AtomicBool,
    alarm: Arc<Alarm>,
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

/// The last one.
#[derive(Debug)]
struct Announcement {
    written: Option<Completion>,
    /// It was since somebody last looked, which was then.
    is_new: bool,
    looked: Instant,
}

/// Receives that the peer may still use, with which it has time.
const ENOUGH: u32 = 8;

/// Whether the peer must be told of receives now. The receives that it knows of and that no message has filled are those it
/// may still use: as long as these are more than what it does not know of, or, once they are enough, more than a third of
/// that, it need not wait yet. So one that waits for each receive is told at once, and of a row of them it is told a few times.
fn is_due(posted: u32, announced: u32, arrived: u32) -> bool {
    let held_back = posted.wrapping_sub(announced);
    // Sends of the CPU do not wait until they are told: more may have come than was announced.
    let left = announced.wrapping_sub(arrived);
    left >= OPEN || held_back >= if left < ENOUGH { left } else { left.saturating_mul(3) }
}

impl Credits {
    /// With what `rank` writes in the table.
    pub(crate) fn new(table: &Memory, rank: usize, way: Way, alarm: Arc<Alarm>) -> gdsync::Result<Self> {
        let ready = table.word32(place(rank))?;
        let wanted = table.word32(place(rank) + WANTED)?;
        let last = Mutex::new(Announcement { written: None, is_new: true, looked: Instant::now() });
        let [posted, announced, arrived] = [0; 3].map(AtomicU32::new);
        let is_prompt = matches!(way, Way::Own) || !alarm.is_watched();
        let (wants, has_ended, numbers) = Default::default();
        Ok(Self {
            ready,
            wanted,
            wants,
            is_prompt,
            numbers,
            posted,
            announced,
            arrived,
            last,
            has_ended,
            alarm,
            way,
        })
    }

    /// Whether the peer is told before the watching thread looks.
    fn is_eager(&self) -> bool {
        self.is_prompt || self.wanted.load() != 0
    }

    /// The peer has one more receive, the newest, at this place of its queue: tells it, or sees to it that it is told soon.
    pub(crate) fn grant(&self, place: u64) {
        let posted = low32(place).wrapping_add(1);
        // Before it looks at the alarm: whoever has switched that off sees this.
        self.posted.store(posted, Ordering::SeqCst);
        let [announced, arrived] =
            [&self.announced, &self.arrived].map(|count| count.load(Ordering::Relaxed));
        if self.is_eager() && is_due(posted, announced, arrived) {
            self.announce(&mut self.last.lock());
        } else {
            self.alarm.ring();
        }
    }

    /// The message of the receive at this place is here; so are those before it.
    pub(crate) fn arrived(&self, place: u64) {
        let arrived = low32(place).wrapping_add(1);
        // Two threads may come in any order; the next message puts it right.
        self.arrived.store(arrived, Ordering::Relaxed);
    }

    /// Receives posted for the peer, modulo 2^32.
    pub(crate) fn posted(&self) -> u32 {
        self.posted.load(Ordering::SeqCst)
    }

    /// Has the watching thread look soon.
    pub(crate) fn ring(&self) {
        self.alarm.ring();
    }

    fn is_behind(&self) -> bool {
        self.posted.load(Ordering::SeqCst) != self.announced.load(Ordering::Relaxed)
    }

    /// Tells the peer of the receives that were held back, if there are any.
    pub(crate) fn catch_up(&self) {
        if self.is_behind() {
            self.announce(&mut self.last.lock());
        }
    }

    /// As [`Credits::catch_up`], where the watching thread need not do it. Returns whether it must.
    pub(crate) fn catch_up_or_leave(&self) -> bool {
        let leaves = !self.is_eager() && self.is_behind();
        if !leaves {
            self.catch_up();
        }
        leaves
    }

    fn announce(&self, last: &mut Announcement) {
        if self.has_ended.load(Ordering::Relaxed) {
            return;
        }
        let posted = self.posted.load(Ordering::SeqCst);
        match &self.way {
            Way::Own => self.ready.store(posted),
            Way::Remote { qp, word } => {
                last.is_new = true;
                let wants = u32::from(self.wants.load(Ordering::Relaxed));
                let bytes = (u64::from(wants) << 32 | u64::from(posted)).to_le_bytes();
                let post = || qp.post_send(&[SendWr::write_inline(*word, &bytes)]);
                let written = post().or_else(|error| match error {
                    gdsync::Error::QueueFull { .. } => {
                        qp.send_cq().drain();
                        post()
                    }
                    other => Err(other),
                });
                // Otherwise later.
                let Ok(written) = written else { return };
                last.written = Some(written);
            }
        }
        self.announced.store(posted, Ordering::Relaxed);
    }

    /// Announces again what was not, or nothing for `pause`, so that a peer that is gone is noticed.
    ///
    /// # Errors
    /// Why the peer could not be told, which is [`gdsync::Error::GivenUpByPeer`] where it has [ended](Self::end) the connection.
    pub(crate) fn tend(&self, pause: Duration) -> gdsync::Result<()> {
        if let Way::Remote { qp, .. } = &self.way {
            let mut last = self.last.lock();
            qp.check()
                .map_err(|error| if is_refusal(&error) { gdsync::Error::GivenUpByPeer } else { error })?;
            if last.is_new {
                (last.is_new, last.looked) = (false, Instant::now());
            }
            let told = last.written.as_ref().is_none_or(|last| !matches!(last.status(), Ok(None)));
            if self.is_behind() || told && last.looked.elapsed() >= pause {
                self.announce(&mut last);
            }
        }
        Ok(())
    }

    /// Counts the message that was just put at this place, the last of a queue of `depth` sends, and waits for nothing.
    #[inline]
    pub(crate) fn count(&self, place: u64, depth: usize) {
        self.numbers.next(place, depth);
    }

    /// As [`Credits::count`]: the word and value that a stream must wait for before it sends it, unless it may leave at once.
    pub(crate) fn next(&self, place: u64, depth: usize) -> Option<(&Word32, u32)> {
        self.wait_for(self.numbers.next(place, depth))
    }

    /// A message was put at this place that does not count before it is posted.
    pub(crate) fn prepare(&self, place: u64) {
        self.numbers.prepare(place);
    }

    /// As [`Credits::next`], for a message that was prepared and is posted now.
    pub(crate) fn post(&self, place: u64, depth: usize) -> Option<(&Word32, u32)> {
        self.wait_for(self.numbers.post(place, depth))
    }

    fn wait_for(&self, number: u32) -> Option<(&Word32, u32)> {
        if !self.wants.load(Ordering::Relaxed) && !self.wants.swap(true, Ordering::Relaxed) {
            self.ask();
        }
        (!Cond::Geq.holds32(self.ready.load(), number)).then_some((&self.ready, number))
    }

    /// Has the peer announce its receives at once from here on.
    #[cold]
    fn ask(&self) {
        if let Way::Remote { .. } = &self.way {
            self.announce(&mut self.last.lock());
        }
    }

    /// Lets everything go that waits for the peer, which is lost, and takes no more from it: so it learns that it is, when it
    /// announces the next time. A queue pair in ERR would not answer, and it would take the peer all its retries to give up.
    pub(crate) fn end(&self, error: &gdsync::Error) {
        self.has_ended.store(true, Ordering::Relaxed);
        if let Way::Remote { qp, .. } = &self.way {
            let refuse = QpAttr::to(QpState::RTS).access(Access::empty());
            // It has failed already, or its device has no such step.
            if qp.modify(&refuse).is_err() {
                qp.stop(error);
            }
        }
        self.ready.store(self.numbers.latest().wrapping_add(OPEN));
    }
}

/// Whether the peer has refused to be told: what is written is right as long as it takes anything.
fn is_refusal(error: &gdsync::Error) -> bool {
    let refusals = [Syndrome::REM_INV_REQ_ERR, Syndrome::REM_ACCESS_ERR];
    matches!(error, gdsync::Error::Completion(error) if refusals.contains(&error.syndrome))
}

#[cfg(test)]
mod tests {
    use super::{ENOUGH, is_due};

    /// What the peer may use is never much less than what it does not know of, unless nothing is held back.
    #[test]
    fn a_peer_that_may_have_to_wait_is_told() {
        for start in [0_u32, u32::MAX - 20] {
            for row in 1..40 {
                let (mut posted, mut announced, mut arrived, mut told) = (start, start, start, 0);
                for step in 0..400 {
                    // Rows of receives, then as many messages, of which a varying number is noticed.
                    if step % (2 * row) < row {
                        posted = posted.wrapping_add(1);
                        if is_due(posted, announced, arrived) {
                            announced = posted;
                            told += 1;
                        }
                    } else if arrived != posted && step % 3 > 0 {
                        arrived = arrived.wrapping_add(1);
                    }
                    let held_back = posted.wrapping_sub(announced);
                    let left = announced.wrapping_sub(arrived);
                    // Of messages that came since, this rank learns by a call, which catches up.
                    if step % (2 * row) < row {
                        assert!(held_back == 0 || held_back < left.max(1) * 3, "{held_back}, {left}");
                        assert!(held_back == 0 || left >= ENOUGH || held_back < left, "{held_back}, {left}");
                    }
                }
                assert!(told > 0);
            }
        }
    }

    #[test]
    fn one_receive_at_a_time_is_told_at_once() {
        for n in [0, 1, u32::MAX] {
            assert!(is_due(n.wrapping_add(1), n, n));
            assert!(is_due(n.wrapping_add(2), n.wrapping_add(1), n), "two take turns");
        }
    }

    #[test]
    fn a_row_is_told_a_few_times() {
        let mut announced = 0;
        let told: Vec<u32> = (1..=64)
            .filter(|&posted| {
                let due = is_due(posted, announced, 0);
                if due {
                    announced = posted;
                }
                due
            })
            .collect();
        assert_eq!(told, [1, 2, 4, 8, 32]);
    }

    #[test]
    fn more_may_have_come_than_was_announced() {
        assert!(is_due(8, 3, 5));
        assert!(is_due(2, u32::MAX - 3, u32::MAX), "also where the count goes round");
    }
}
