//! Credits: how a sender knows that a receive is posted.
//!
//! For each peer a rank has a word that the peer writes: how many receives the peer has posted for it so far, modulo 2^32.
//! Message number `n` to that peer, counted from 1, may leave when the word is at least `n`. A stream waits for that before it
//! rings the doorbell: its message never meets a missing receive, which would cost a retry. Announcing the same number again
//! does no harm, and shows whether the peer is alive.
//!
//! Only streams read the word; beside it the peer finds whether streams of this rank send to it. If none do, only the watchdog
//! announces receives, about a millisecond later, and calls that leave a wait to a stream. From the first such send on, and where
//! there is no watchdog, a rank announces some receives as it posts them, see [`is_due`], and the rest with its next wait.
//!
//! The words are written through queue pairs of their own: in the queue of the messages the CPU would have to wait for sends
//! that belong to a stream. Receives that a stream posts are announced by the stream, right behind, in the queue that the CPU uses as
//! long as none of those is pending: so the word never goes back. Whether the peer is alive, and whether streams send to it, goes
//! through another queue pair, which only the CPU uses.
//!
//! Ranks of a host whose GPUs share tables ([`Places`](crate::places::Places)) have the word in these: announcing is a store, done at once. A
//! stream stores it right before it posts the receive, as whoever posts the next one looks at that. That a connection has ended such a
//! rank learns by its next question.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use gdsync::memory::{Memory, Word32};
use gdsync::recorder::{NamedWords, Purpose, Traffic};
use gdsync::stream::{Batch, Cond};
use gdsync::verbs::{Access, Completion, Qp, QpAttr, QpState, RemoteAddr, SendWr, Sge};
use gdsync_device::Condvar;
use gdsync_device::fork_guard::ForkGuard;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::wait::Deadline;

/// Bytes per rank in the table: a cache line, as each has another writer.
const ENTRY: usize = 64;
/// Offset, behind the word, of a word that is not 0 when streams of the peer send to this rank, or it has aborted.
const WANTED: usize = 4;
/// Bits of that word: streams send; a failed collective ends the connection.
const WANTS: u32 = 1;
const ABORTS: u32 = 2;
/// Offset of the note of an abort, which is written with the second word: the header of the call that has failed.
const NOTE: usize = 8;
pub(crate) const NOTE_BYTES: usize = 24;
/// The longest write to the table.
pub(crate) const INLINE: usize = NOTE + NOTE_BYTES - WANTED;

/// Bytes behind the entries, which the other ranks read: the calls of collectives.
pub(crate) const CALLS_BYTES: usize = 256;

/// Questions whether the peer is alive that can be under way.
pub(crate) const PROBES: usize = 16;

/// How long the queue may be taken by announcements of another stream.
const ROOM: Duration = Duration::from_secs(5);

/// How far ahead of all messages the word of a lost rank is set, so that nothing waits for it any more.
pub(crate) const OPEN: u32 = 1 << 30;

/// The memory for the words of `size` ranks.
pub(crate) fn table(size: usize) -> gdsync::Result<Memory> {
    Memory::alloc(calls_offset(size) + CALLS_BYTES)
}

/// The offset of the word of `rank` in the table.
pub(crate) fn offset(rank: usize) -> usize {
    rank * ENTRY
}

/// The offset of the calls of collectives.
pub(crate) fn calls_offset(size: usize) -> usize {
    size * ENTRY
}

/// A count modulo 2^32.
#[expect(clippy::cast_possible_truncation, reason = "counts on the wire wrap")]
pub(crate) fn low32(count: u64) -> u32 {
    count as u32
}

/// The number of the receive at this index of its queue, from 1 and modulo 2^32.
pub(crate) fn number_of(index: u64) -> u32 {
    low32(index).wrapping_add(1)
}

/// Set while credit updates are pending, to be sent by the watchdog or by the next wait.
#[derive(Debug)]
pub(crate) struct CreditFlag {
    /// A thread asks silent ranks whether they are alive.
    pub(crate) has_watchdog: bool,
    is_pending: AtomicBool,
    /// The watchdog polls, or there is none: no wake-up is needed.
    is_polling: AtomicBool,
    stop: Mutex<bool>,
    changed: Condvar,
}

impl CreditFlag {
    pub(crate) fn new(has_watchdog: bool) -> Self {
        let [is_pending, is_polling] = [false, !has_watchdog].map(AtomicBool::new);
        Self { has_watchdog, is_pending, is_polling, stop: Mutex::new(false), changed: Condvar::new() }
    }

    /// Sets it, and wakes the watchdog if it sleeps. Whoever clears it sees what was written before with
    /// [`Ordering::SeqCst`].
    pub(crate) fn set(&self) {
        if !self.is_pending.load(Ordering::SeqCst) {
            self.is_pending.store(true, Ordering::SeqCst);
        }
        if !self.is_polling.load(Ordering::SeqCst) && !self.is_polling.swap(true, Ordering::SeqCst) {
            // The lock: the watchdog is asleep, or looks at `is_polling` before it sleeps.
            drop(self.stop.lock());
            self.changed.notify_one();
        }
    }

    /// Clears it, and returns whether it was set.
    pub(crate) fn take(&self) -> bool {
        let is_set = self.is_pending.load(Ordering::SeqCst);
        if is_set {
            self.is_pending.store(false, Ordering::SeqCst);
        }
        is_set
    }

    pub(crate) fn is_polling(&self) -> bool {
        self.is_polling.load(Ordering::SeqCst)
    }

    /// The watchdog is about to sleep.
    pub(crate) fn stop_polling(&self) {
        self.is_polling.store(false, Ordering::SeqCst);
    }

    /// Whether the watchdog is to end; locked, for [`CreditFlag::sleep`].
    pub(crate) fn lock(&self) -> MutexGuard<'_, bool> {
        self.stop.lock()
    }

    /// The watchdog sleeps until it is woken, at most so long.
    pub(crate) fn sleep(&self, stop: &mut MutexGuard<'_, bool>, limit: Duration) {
        self.changed.wait_for(stop, limit);
    }

    /// Ends the watchdog.
    pub(crate) fn stop(&self) {
        *self.stop.lock() = true;
        self.changed.notify_one();
    }
}

/// Which send of a queue is which message.
///
/// Each send of the queue is a message, and their numbers follow its indices, except for one-sided operations. There are hardly any.
#[derive(Debug, Default)]
struct Numbers {
    /// The newest message.
    latest: AtomicU32,
    /// Whether any index is no message.
    any_skipped: AtomicBool,
    skipped: Mutex<Skipped>,
    /// Sends of the queue.
    depth: u64,
}

/// Indices that are no messages.
#[derive(Debug, Default)]
struct Skipped {
    /// In order.
    indices: VecDeque<u64>,
    /// How many there were before these.
    before: u64,
}

impl Numbers {
    fn new(depth: usize) -> Self {
        Self { depth: depth as u64, ..Self::default() }
    }

    /// The number, from 1, of the message that was just posted at this index, the last of the queue.
    #[inline]
    fn next(&self, index: u64) -> u32 {
        let mut skipped = 0;
        if self.any_skipped.load(Ordering::Acquire) {
            skipped = self.skipped.lock().before(index, self.depth);
            self.any_skipped.store(skipped > 0, Ordering::Release);
        }
        self.number(index, skipped)
    }

    /// No message is at this index.
    fn skip(&self, index: u64) {
        let mut all = self.skipped.lock();
        self.any_skipped.store(true, Ordering::Release);
        all.forget_old(index, self.depth);
        all.indices.push_back(index);
    }

    /// The number of the message at this index, which was posted.
    fn of(&self, index: u64) -> u32 {
        low32((index + 1).wrapping_sub(self.skipped.lock().before(index, self.depth)))
    }

    fn number(&self, index: u64, skipped: u64) -> u32 {
        let number = low32((index + 1).wrapping_sub(skipped));
        self.latest.store(number, Ordering::Relaxed);
        number
    }
}

impl Skipped {
    /// Only counts the indices further back than the queue is deep: these are not posted any more.
    fn forget_old(&mut self, index: u64, depth: u64) {
        while self.indices.pop_front_if(|first| *first + depth < index).is_some() {
            self.before += 1;
        }
    }

    /// How many are before this index of a queue of `depth` sends.
    fn before(&mut self, index: u64, depth: u64) -> u64 {
        self.forget_old(index, depth);
        self.before + self.indices.partition_point(|&other| other < index) as u64
    }
}

/// Both directions of the credits between this rank and a peer.
#[derive(Debug)]
pub(crate) struct Credits {
    /// Receives the peer has posted for us.
    ready: Word32,
    /// Whether its streams send to us.
    wanted: Word32,
    note: Memory,
    /// Whether ours send to it, and whether a failed collective ends the connection.
    wants: AtomicBool,
    aborts: AtomicBool,
    /// Announcing is a store, or there is no watchdog to do it later.
    is_prompt: bool,
    numbers: Numbers,
    /// Receives posted for the peer. This and the next two are modulo 2^32.
    posted: AtomicU32,
    /// Those of them that were announced to it.
    announced: AtomicU32,
    /// Messages that have come from it, as far as anybody has looked.
    arrived: AtomicU32,
    last: Mutex<Announcement>,
    /// Nothing is announced any more.
    has_ended: AtomicBool,
    fork_guard: ForkGuard,
    pub(crate) flag: Arc<CreditFlag>,
    route: CreditRoute,
    /// Tells errors and recordings what `ready` is.
    _name: NamedWords,
}

/// How receives are announced to the peer.
#[derive(Debug)]
pub(crate) enum CreditRoute {
    /// It is this rank: the word is our own.
    Own,
    /// By a store to shared memory, or a write to its table; whether it is alive is asked through another queue pair.
    Remote { qp: Qp, probe: Qp, word: RemoteAddr, shared: Option<Word32> },
}

impl CreditRoute {
    fn is_store(&self) -> bool {
        matches!(self, Self::Own | Self::Remote { shared: Some(_), .. })
    }
}

/// The last announcement, and the last question whether the peer is alive.
#[derive(Debug)]
struct Announcement {
    /// By the CPU.
    written: Option<Completion>,
    asked: Option<Completion>,
    /// One was made since `looked`, when [`Credits::tend`] was last called.
    is_new: bool,
    looked: Instant,
}

/// Receives that the peer may still use with which it need not wait soon.
const ENOUGH: u32 = 8;

/// Whether receives must be announced now. The peer still has those that were announced and not filled. While these are more than
/// those held back, or, once they are enough, more than a third of them, the peer need not wait. So single receives are announced at
/// once, and many in a row are announced a few times.
fn is_due(posted: u32, announced: u32, arrived: u32) -> bool {
    let held_back = posted.wrapping_sub(announced);
    // Sends of the CPU do not wait for credits: more may have come than was announced.
    let left = announced.wrapping_sub(arrived);
    left >= OPEN || held_back >= if left < ENOUGH { left } else { left.saturating_mul(3) }
}

impl Credits {
    /// Over the entry of `rank` in the table, for a queue of `depth` sends. `ready` is the word of the peer in shared memory, if any.
    pub(crate) fn new(
        table: &Memory,
        rank: usize,
        (depth, traffic): (usize, Traffic),
        (route, ready): (CreditRoute, Option<Word32>),
        flag: Arc<CreditFlag>,
    ) -> gdsync::Result<Self> {
        let ready = ready.map_or_else(|| table.word32(offset(rank)), Ok)?;
        let wanted = table.word32(offset(rank) + WANTED)?;
        let note = table.slice(offset(rank) + NOTE, NOTE_BYTES)?;
        let number = u32::try_from(rank).unwrap_or(u32::MAX);
        let purpose = match traffic {
            Traffic::Collectives => Purpose::Collectives { rank: number },
            _ => Purpose::Receives { rank: number },
        };
        let name = NamedWords::new(ready.addr(), 4, purpose);
        let last =
            Mutex::new(Announcement { written: None, asked: None, is_new: true, looked: Instant::now() });
        let [posted, announced, arrived] = [0; 3].map(AtomicU32::new);
        let is_prompt = route.is_store() || !flag.has_watchdog;
        let (wants, aborts, has_ended, fork_guard) = Default::default();
        Ok(Self {
            ready,
            wanted,
            note,
            wants,
            aborts,
            is_prompt,
            numbers: Numbers::new(depth),
            posted,
            announced,
            arrived,
            last,
            has_ended,
            fork_guard,
            flag,
            route,
            _name: name,
        })
    }

    /// Whether receives are announced before the watchdog does it.
    fn is_eager(&self) -> bool {
        self.is_prompt || self.wanted.load() != 0
    }

    /// A receive was posted at this index of the queue: announces it, or sets the flag for it.
    pub(crate) fn grant(&self, index: u64) {
        let posted = number_of(index);
        // Before the flag is read: whoever clears it sees this.
        self.posted.store(posted, Ordering::SeqCst);
        let [mut announced, arrived] =
            [&self.announced, &self.arrived].map(|count| count.load(Ordering::Relaxed));
        if is_ahead(announced, low32(index)) {
            // By a batch that was dropped: this receive was never announced.
            let _last = self.last.lock();
            announced = low32(index);
            self.announced.store(announced, Ordering::Relaxed);
        }
        if self.route.is_store() || self.is_eager() && is_due(posted, announced, arrived) {
            self.announce(&mut self.last.lock());
        } else {
            self.flag.set();
        }
    }

    /// The message of the receive at this index is here; so are those before it.
    pub(crate) fn arrived(&self, index: u64) {
        let arrived = number_of(index);
        // Two threads may store in any order; the next message corrects it.
        self.arrived.store(arrived, Ordering::Relaxed);
    }

    /// Receives that the peer has posted for this rank and announced, modulo 2^32.
    pub(crate) fn granted(&self) -> u32 {
        self.ready.load()
    }

    /// The number, from 1 and modulo 2^32, of a message that was posted to the queue.
    pub(crate) fn number_of(&self, index: u64) -> u32 {
        self.numbers.of(index)
    }

    /// Receives posted for the peer, modulo 2^32.
    pub(crate) fn posted(&self) -> u32 {
        self.posted.load(Ordering::SeqCst)
    }

    fn is_behind(&self) -> bool {
        is_ahead(self.posted.load(Ordering::SeqCst), self.announced.load(Ordering::Relaxed))
    }

    /// Announces receives that were held back, if there are any.
    pub(crate) fn catch_up(&self) {
        if self.is_behind() {
            self.announce(&mut self.last.lock());
        }
    }

    /// As [`Credits::catch_up`], unless that is left to the watchdog. Returns whether it is.
    pub(crate) fn catch_up_or_leave(&self) -> bool {
        let leaves = !self.is_eager() && self.is_behind();
        if !leaves {
            self.catch_up();
        }
        leaves
    }

    fn announce(&self, last: &mut Announcement) {
        // Others may have announced it since, or a stream will. A forked child has no shared memory.
        if !self.fork_guard.is_here() || self.has_ended.load(Ordering::Relaxed) || !self.is_behind() {
            return;
        }
        let posted = self.posted.load(Ordering::SeqCst);
        match &self.route {
            CreditRoute::Own => self.ready.store(posted),
            CreditRoute::Remote { shared: Some(word), .. } => word.store(posted),
            CreditRoute::Remote { qp, word, .. } => {
                last.is_new = true;
                let bytes = posted.to_le_bytes();
                match with_room(qp, || qp.post_send(&[SendWr::write_inline(*word, &bytes)])) {
                    Ok(written) => last.written = Some(written),
                    // The next look has them; the queue may be taken by a stream.
                    Err(_) => return self.flag.set(),
                }
            }
        }
        self.announced.store(posted, Ordering::Relaxed);
    }

    /// Whether the announcement of a stream, and one of the CPU before it, have room.
    ///
    /// # Errors
    /// [`gdsync::Error::QueueFull`].
    pub(crate) fn check_room(&self) -> gdsync::Result<()> {
        match &self.route {
            CreditRoute::Remote { qp, shared: None, .. } => {
                with_room(qp, || qp.wait_send_room(2, Duration::ZERO))
            }
            _ => Ok(()),
        }
    }

    /// Adds the announcement of a receive at this index to a batch.
    ///
    /// # Errors
    /// Why it could not be written; [`gdsync::Error::Deadline`] where another stream does not leave the queue.
    pub(crate) fn announce_in_batch(&self, batch: &mut Batch, index: u64) -> gdsync::Result<()> {
        let number = number_of(index);
        let deadline = Deadline::after(ROOM);
        let mut last = self.last.lock();
        // Those of the CPU must not wait for the stream.
        while self.is_behind() && !self.has_ended.load(Ordering::Relaxed) {
            self.announce(&mut last);
            if let CreditRoute::Remote { qp, .. } = &self.route {
                qp.check()?;
            }
            if deadline.is_over() {
                let what = "announcing the receives before that of the stream";
                let awaited = "another stream to announce its receives; let it get to them first";
                return Err(gdsync::Error::late(what, ROOM, awaited));
            }
            yield_now();
        }
        if let Some(written) = last.written.take() {
            // A stream gets the queue when it is empty.
            written.wait(deadline.remaining())?;
        }
        match &self.route {
            CreditRoute::Own => batch.write_value32(&self.ready, number),
            CreditRoute::Remote { shared: Some(word), .. } => batch.write_value32(word, number),
            CreditRoute::Remote { qp, word, .. } => {
                let bytes = number.to_le_bytes();
                let wr = [SendWr::write_inline(*word, &bytes)];
                _ = batch.post(with_room(qp, || qp.prepare_send(&wr))?);
                last.is_new = true;
            }
        }
        self.posted.store(number, Ordering::SeqCst);
        self.announced.store(number, Ordering::Relaxed);
        Ok(())
    }

    /// Asks the peer whether it is alive, and tells it whether streams send to it, with a note of an abort.
    fn ask(&self, last: &mut Announcement, note: &[u8]) {
        let CreditRoute::Remote { probe, word, .. } = &self.route else { return };
        if self.has_ended.load(Ordering::Relaxed) {
            return;
        }
        let bit = |is_set: &AtomicBool, bit| if is_set.load(Ordering::Relaxed) { bit } else { 0 };
        let mut bytes: SmallVec<[u8; INLINE]> =
            SmallVec::from_slice(&(bit(&self.wants, WANTS) | bit(&self.aborts, ABORTS)).to_le_bytes());
        bytes.extend_from_slice(note);
        let word = RemoteAddr { addr: word.addr + WANTED as u64, ..*word };
        if let Ok(asked) = with_room(probe, || probe.post_send(&[SendWr::write_inline(word, &bytes)])) {
            (last.asked, last.is_new) = (Some(asked), true);
        }
    }

    /// Tells the peer, before [`Credits::end`], that a failed collective ends the connection, and which. Returns the write.
    pub(crate) fn tell_abort(&self, note: &[u8; NOTE_BYTES]) -> Option<Completion> {
        self.aborts.store(true, Ordering::Relaxed);
        let mut last = self.last.lock();
        self.ask(&mut last, note);
        last.asked.clone()
    }

    /// Whether the peer has said so.
    pub(crate) fn is_aborted(&self) -> bool {
        self.wanted.load() & ABORTS != 0
    }

    /// What the peer has said of it.
    pub(crate) fn abort_note(&self) -> Option<[u8; NOTE_BYTES]> {
        let mut note = [0; NOTE_BYTES];
        (self.is_aborted() && self.note.read(0, &mut note).is_ok()).then_some(note)
    }

    /// Starts to read the calls of collectives in the table of the peer, where this rank is `rank` of `size`; `None` where that is
    /// not possible now.
    pub(crate) fn read_calls(&self, rank: usize, size: usize, into: Sge) -> Option<Completion> {
        let CreditRoute::Remote { probe, word, .. } = &self.route else { return None };
        if self.has_ended.load(Ordering::Relaxed) {
            return None;
        }
        let from = RemoteAddr { addr: word.addr + (calls_offset(size) - offset(rank)) as u64, ..*word };
        with_room(probe, || probe.post_send(&[SendWr::read(from, &[into])])).ok()
    }

    /// Announces what is held back, and asks after `pause` whether the peer is alive.
    ///
    /// # Errors
    /// Why the write failed; [`gdsync::Error::GivenUpByPeer`] or [`gdsync::Error::Aborted`] where it has [ended](Self::end) the
    /// connection.
    pub(crate) fn tend(&self, pause: Duration) -> gdsync::Result<()> {
        if let CreditRoute::Remote { qp, probe, .. } = &self.route {
            let mut last = self.last.lock();
            qp.check().and_then(|()| probe.check()).map_err(|error| match error {
                // Each write is valid as long as the peer takes any.
                gdsync::Error::Completion(refused) if refused.is_refusal() => match self.is_aborted() {
                    true => aborted_by_peer(),
                    false => gdsync::Error::GivenUpByPeer,
                },
                other => other,
            })?;
            if last.is_new {
                (last.is_new, last.looked) = (false, Instant::now());
            }
            let is_answered = last.asked.as_ref().is_none_or(|asked| !matches!(asked.status(), Ok(None)));
            if is_answered && last.looked.elapsed() >= pause {
                self.ask(&mut last, &[]);
            }
            self.announce(&mut last);
        }
        Ok(())
    }

    /// Counts the message that the CPU has just posted at this index, the last of the queue.
    #[inline]
    pub(crate) fn count(&self, index: u64) {
        self.numbers.next(index);
    }

    /// As [`Credits::count`], of a message of a stream, before which so many sends were cancelled: its number, and the word that the stream must wait for until it has this value,
    /// unless the receive is posted already.
    pub(crate) fn next(&self, index: u64, gaps: u64) -> (u32, Option<&Word32>) {
        let number = self.numbers.next(index).wrapping_sub(low32(gaps));
        if !self.wants.load(Ordering::Relaxed) && !self.wants.swap(true, Ordering::Relaxed) {
            // The peer announces its receives at once from here on.
            self.ask(&mut self.last.lock(), &[]);
        }
        (number, (!Cond::Geq.holds32(self.ready.load(), number)).then_some(&self.ready))
    }

    /// A one-sided operation is at this index.
    pub(crate) fn skip(&self, index: u64) {
        self.numbers.skip(index);
    }

    /// Releases streams that wait for the peer, which is lost, and refuses its writes: so it learns that it is, with its next
    /// announcement. A queue pair in ERR would not answer, and the peer would need all its retries to notice.
    pub(crate) fn end(&self, error: &gdsync::Error) {
        self.has_ended.store(true, Ordering::Relaxed);
        if let CreditRoute::Remote { qp, probe, .. } = &self.route {
            let refuse = QpAttr::to(QpState::RTS).access(Access::empty());
            for qp in [qp, probe] {
                // The queue pair has failed already.
                if qp.modify(&refuse).is_err() {
                    qp.stop(error);
                }
            }
        }
        self.ready.store(self.numbers.latest.load(Ordering::Relaxed).wrapping_add(OPEN));
    }
}

/// The error of a connection that a failed collective of the peer has ended.
pub(crate) fn aborted_by_peer() -> gdsync::Error {
    let why = "a call of several ranks has failed at the other rank; see its error there";
    gdsync::Error::Aborted { why: why.to_owned() }
}

/// Whether one count is ahead of another, modulo 2^32.
fn is_ahead(count: u32, other: u32) -> bool {
    (1..OPEN).contains(&count.wrapping_sub(other))
}

/// Takes completions if the queue is full, and tries again.
fn with_room<T>(qp: &Qp, post: impl Fn() -> gdsync::Result<T>) -> gdsync::Result<T> {
    post().or_else(|error| match error {
        gdsync::Error::QueueFull { .. } => {
            qp.send_cq().drain();
            post()
        }
        other => Err(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// While receives are held back, those left to the peer are not much fewer.
    #[test]
    fn receives_are_announced_before_the_peer_waits() {
        for start in [0_u32, u32::MAX - 20] {
            for run in 1..40 {
                let (mut posted, mut announced, mut arrived, mut told) = (start, start, start, 0);
                for step in 0..400 {
                    // Several receives, then as many messages, some of which are noticed.
                    if step % (2 * run) < run {
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
                    // Later messages are noticed by a call, which catches up.
                    if step % (2 * run) < run {
                        assert!(held_back == 0 || held_back < left.max(1) * 3, "{held_back}, {left}");
                        assert!(held_back == 0 || left >= ENOUGH || held_back < left, "{held_back}, {left}");
                    }
                }
                assert!(told > 0);
            }
        }
    }

    #[test]
    fn single_receives_are_announced_at_once_and_many_in_a_row_rarely() {
        for n in [0, 1, u32::MAX] {
            assert!(is_due(n.wrapping_add(1), n, n));
            assert!(is_due(n.wrapping_add(2), n.wrapping_add(1), n), "two alternate");
        }
        // More may have come than was announced, also where the count wraps.
        assert!(is_due(8, 3, 5) && is_due(2, u32::MAX - 3, u32::MAX));
        let mut announced = 0;
        let is_told = |posted: &u32| {
            let is_due = is_due(*posted, announced, 0);
            announced = if is_due { *posted } else { announced };
            is_due
        };
        assert_eq!((1..=64).filter(is_told).collect::<Vec<_>>(), [1, 2, 4, 8, 32]);
    }

    #[test]
    fn one_sided_operations_are_no_messages() {
        let numbers = Numbers::new(8);
        assert_eq!([0, 1].map(|index| numbers.next(index)), [1, 2]);
        (2..5).for_each(|index| numbers.skip(index));
        assert_eq!([5, 6].map(|index| numbers.next(index)), [3, 4]);
        assert_eq!(numbers.next(6), 4, "6 was taken back");
        assert_eq!(numbers.latest.load(Ordering::Relaxed), 4);
        assert_eq!([1, 5].map(|index| numbers.of(index)), [2, 3]);
    }

    #[test]
    fn counts_wrap_and_memory_is_bounded() {
        let numbers = Numbers::new(8);
        let start = u64::from(u32::MAX) - 500;
        // All before were messages.
        let mut messages = u32::MAX - 500;
        for index in start..start + 1000 {
            if index % 3 > 0 {
                messages = messages.wrapping_add(1);
                assert_eq!(numbers.next(index), messages);
            } else {
                numbers.skip(index);
            }
            assert!(numbers.skipped.lock().indices.len() <= 4);
        }
        assert_eq!(numbers.next(start + 1000), messages.wrapping_add(1));
        // One-sided operations, without a message between.
        (start + 1001..start + 2000).for_each(|index| numbers.skip(index));
        assert!(numbers.skipped.lock().indices.len() <= 10);
        assert_eq!(numbers.next(start + 2000), messages.wrapping_add(2));
    }
}
