//! Shared-memory FIFO for messages between two ranks that also have a queue pair. One word decides which of the two a
//! message takes, so that both sides number messages alike.
//!
//! ```text
//! word   [open][broken][phase: 14 bits][count: 48 bits]
//! ```
//!
//! *Open*: messages take slots. The sender claims slot `count` by a compare-exchange that increments the count, then
//! fills it. *Closed*: messages take the queue pair. Either side closes by one atomic AND; the returned count is the
//! number of the first message that takes the queue pair. Neither side waits.
//!
//! *Only the receiver opens*, behind the `resumed` receives that it has posted on the queue pair. The sender uses slots
//! once it has sent as many messages there, and the receiver takes nothing from a slot before those receives complete.
//! The sender stores `begun`, fences, and reads the word; the receiver writes the word, fences, and reads `begun` (both
//! fences [`SeqCst`]). So if one message too many was begun, the sender sees the FIFO open, or the receiver sees the
//! message, and closes.
//!
//! A slot's header holds its message's number and length, or that the sender closed. A waiting receiver need not read
//! the word, which would take its cache line from the sender.

use std::hint::spin_loop;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::{Atom32, Atom64};

const OPEN: u64 = 1 << 63;
const BROKEN: u64 = 1 << 62;
const PHASE: u64 = 1 << 48;
const PHASES: u64 = BROKEN - PHASE;
const COUNT: u64 = PHASE - 1;

/// Length that marks a close by the sender.
const CLOSED: u32 = u32::MAX;

/// Whether a receive is posted for each message begun; both count modulo 2^32.
#[inline]
fn has_receives(posted: u32, begun: u32) -> bool {
    posted.wrapping_sub(begun) < 1 << 31
}

/// The shared words; initially zero, which means closed.
pub trait Slots {
    /// 32-bit word.
    type W32: Atom32;
    /// 64-bit word.
    type W64: Atom64;
    /// Number of slots: a power of two.
    fn count(&self) -> u64;
    /// The word with the state and the count.
    fn word(&self) -> &Self::W64;
    /// Messages that the sender began on the queue pair, modulo 2^32. Includes ones it gave up.
    fn begun(&self) -> &Self::W32;
    /// Receives posted on the queue pair when the receiver opened, modulo 2^32.
    fn resumed(&self) -> &Self::W32;
    /// Slots that the receiver has taken.
    fn taken(&self) -> &Self::W64;
    /// Header of a slot.
    fn header(&self, slot: u64) -> &Self::W64;
}

fn header_of<S: Slots>(slots: &S, number: u64) -> &S::W64 {
    slots.header(number & (slots.count() - 1))
}

/// Header of a filled slot.
#[expect(clippy::cast_possible_truncation, reason = "messages that share a slot differ in these bits")]
fn filled(number: u64, len: u32) -> u64 {
    u64::from((number as u32).wrapping_add(1)) << 32 | u64::from(len)
}

/// Sender's state.
#[derive(Debug, Default)]
pub struct Sender {
    /// Phase in which it sends, if any.
    phase: Option<u64>,
    /// Messages begun on the queue pair.
    begun: u32,
    /// `begun` may be too high.
    is_uncertain: bool,
    /// Slots taken by the receiver, as last read.
    taken: u64,
}

impl Sender {
    /// Claims the slot of the next message, to be filled and [published](Self::publish). `None` if the message takes
    /// the queue pair: the FIFO is closed, or `room` messages (at most the number of slots) are still not taken after
    /// `polls` polls.
    #[inline]
    pub fn claim<S: Slots>(&mut self, slots: &S, room: u64, polls: u32) -> Option<u64> {
        loop {
            let word = slots.word().load(Acquire);
            let (phase, number) = (word & PHASES, word & COUNT);
            if word & OPEN == 0 || self.phase != Some(phase) && !self.enter(slots, phase) {
                return None;
            }
            // `taken` comes from the peer: no value may break this.
            if number.wrapping_sub(self.taken) >= room && !self.waits_for_room(slots, number, room, polls) {
                return None;
            }
            if slots.word().compare_exchange(word, word.wrapping_add(1), AcqRel, Relaxed).is_ok() {
                return Some(number);
            }
            // Closed meanwhile, and possibly opened again.
        }
    }

    /// Whether this phase's messages take slots.
    #[cold]
    fn enter<S: Slots>(&mut self, slots: &S, phase: u64) -> bool {
        let resumed = slots.resumed().load(Relaxed);
        if !self.is_uncertain && self.begun == resumed {
            self.phase = Some(phase);
            return true;
        }
        if self.is_uncertain || !has_receives(resumed, self.begun) {
            self.close(slots);
        }
        false
    }

    /// Polls for room; closes if there is none.
    #[cold]
    fn waits_for_room<S: Slots>(&mut self, slots: &S, number: u64, room: u64, polls: u32) -> bool {
        for _ in 0..polls {
            self.taken = slots.taken().load(Acquire);
            if number.wrapping_sub(self.taken) < room {
                return true;
            }
            spin_loop();
        }
        self.close(slots);
        false
    }

    /// Publishes a filled slot.
    #[inline]
    pub fn publish<S: Slots>(&self, slots: &S, number: u64, len: u32) {
        header_of(slots, number).store(filled(number, len), Release);
    }

    #[cold]
    fn close<S: Slots>(&mut self, slots: &S) {
        self.phase = None;
        let word = slots.word().fetch_and(!OPEN, AcqRel);
        let number = word & COUNT;
        // Otherwise the slot is still in use.
        if word & OPEN != 0 && number.wrapping_sub(self.taken) < slots.count() {
            header_of(slots, number).store(filled(number, CLOSED), Release);
        }
    }

    /// To be called before a message takes the queue pair. The result is for [`Sender::undo`].
    pub fn begin<S: Slots>(&mut self, slots: &S) -> bool {
        self.begun = self.begun.wrapping_add(1);
        slots.begun().store(self.begun, Release);
        S::W64::fence(SeqCst);
        if slots.word().load(Acquire) & OPEN != 0 && !has_receives(slots.resumed().load(Relaxed), self.begun)
        {
            self.close(slots);
        }
        self.phase = None;
        std::mem::replace(&mut self.is_uncertain, true)
    }

    /// The begun message was not sent.
    pub fn undo<S: Slots>(&mut self, slots: &S, was_uncertain: bool) {
        self.is_uncertain = was_uncertain;
        self.begun = self.begun.wrapping_sub(1);
        slots.begun().store(self.begun, Release);
    }

    /// The begun message was sent as the `sent`th on the queue pair, modulo 2^32.
    pub fn count<S: Slots>(&mut self, slots: &S, sent: u32) {
        (self.begun, self.is_uncertain) = (sent, false);
        slots.begun().store(sent, Release);
    }

    /// Whether the receiver has refused further messages.
    pub fn is_broken<S: Slots>(slots: &S) -> bool {
        slots.word().load(Acquire) & BROKEN != 0
    }
}

/// Closes without a [`Receiver`], which notices in [`check_closed`](Receiver::check_closed).
pub fn close<S: Slots>(slots: &S) {
    slots.word().fetch_and(!OPEN, AcqRel);
}

/// Content of the next slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Empty.
    Nothing,
    /// The sender closed; see [`Receiver::check_closed`].
    Closed,
    /// A message of this many bytes.
    Message(u32),
}

/// Content of slot `number`, without a [`Receiver`]; a hint.
#[inline]
pub fn peek<S: Slots>(slots: &S, number: u64) -> Next {
    let header = header_of(slots, number).load(Acquire);
    if header >> 32 != filled(number, 0) >> 32 {
        return Next::Nothing;
    }
    match u32::try_from(header & u64::from(u32::MAX)) {
        Ok(len) if len != CLOSED => Next::Message(len),
        _ => Next::Closed,
    }
}

/// Receiver's state.
#[derive(Debug)]
pub struct Receiver {
    next: u64,
    /// Value of `taken` that the sender can see.
    published: u64,
    phase: u64,
    /// Number of the first message without a slot, once it is known that the FIFO is closed.
    end: Option<u64>,
}

impl Default for Receiver {
    fn default() -> Self {
        Self { next: 0, published: 0, phase: 0, end: Some(0) }
    }
}

impl Receiver {
    /// Number of the next message.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Number of the first message that takes the queue pair, once known.
    #[inline]
    pub fn end(&self) -> Option<u64> {
        self.end
    }

    /// Content of the next slot.
    #[inline]
    pub fn peek<S: Slots>(&self, slots: &S) -> Next {
        peek(slots, self.next)
    }

    /// Frees the slot of the next message, which was copied out. Updates `taken` in batches.
    #[inline]
    pub fn take<S: Slots>(&mut self, slots: &S) {
        self.next += 1;
        if self.next - self.published >= (slots.count() / 16).max(1) {
            self.published = self.next;
            slots.taken().store(self.next, Release);
        }
    }

    /// Checks whether the FIFO is closed.
    pub fn check_closed<S: Slots>(&mut self, slots: &S) {
        if self.end.is_none() {
            let word = slots.word().load(Acquire);
            if word & OPEN == 0 {
                self.end = Some(word & COUNT);
            }
        }
    }

    /// Closes. Returns the number of the first message that takes the queue pair.
    pub fn close<S: Slots>(&mut self, slots: &S) -> u64 {
        let close = || slots.word().fetch_and(!OPEN, AcqRel) & COUNT;
        *self.end.get_or_insert_with(close)
    }

    /// Opens behind `posted` receives (all ever posted on the queue pair, modulo 2^32), if all slot messages were taken
    /// and no more than `posted` were begun there. The sender may close at once: see [`Receiver::end`]. Nothing may be
    /// taken from slots before those receives complete.
    pub fn open<S: Slots>(&mut self, slots: &S, posted: u32) {
        if self.end != Some(self.next) || !has_receives(posted, slots.begun().load(Acquire)) {
            return;
        }
        slots.resumed().store(posted, Relaxed);
        self.phase = (self.phase + PHASE) & PHASES;
        self.end = None;
        slots.word().store(OPEN | self.phase | self.next, Release);
        S::W64::fence(SeqCst);
        if !has_receives(posted, slots.begun().load(Acquire)) {
            self.close(slots);
        }
    }

    /// Closes for good and tells the sender that nothing more is received.
    pub fn refuse<S: Slots>(&mut self, slots: &S) {
        // In one exchange: a sender that sees the FIFO closed also sees why.
        loop {
            let word = slots.word().load(Acquire);
            if slots.word().compare_exchange(word, (word & !OPEN) | BROKEN, AcqRel, Relaxed).is_ok() {
                self.end.get_or_insert(word & COUNT);
                return;
            }
        }
    }
}
