//! Messages through slots of shared memory, for one sender and one receiver who have another, general way as well: a queue
//! pair. Which of the two a message takes is agreed on by one word, so that both sides number messages alike.
//!
//! ```text
//! word   [open][broken][phase: 14 bits][count: 48 bits]
//! ```
//!
//! *Open*: messages take slots. The sender claims slot `count` by a compare-exchange of the word for the next higher one, then
//! fills it. *Closed*: messages take the other way. Either side closes by one atomic operation, which tells it the count: the
//! messages below have or get slots, all later ones take the other way. Nobody waits for anybody.
//!
//! *Only the receiver opens*, for what comes behind the `resumed` receives that it has posted on the other way. The sender goes
//! on there until it has sent as many, and then takes slots; the receiver takes nothing out of a slot before those receives are
//! complete. The sender counts in `begun` what it begins to send the other way *before* it looks at the word, and the receiver
//! looks at `begun` *after* it has written the word, each with a fence of [`SeqCst`] between: of a message that is one too many either
//! the sender sees that slots are open, and closes, or the receiver sees that it was begun, and closes.
//!
//! A slot's header has the number of its message and the length, or that the sender has closed: a receiver that waits for the
//! next message need not look at the word, which would take its line from the sender.

use std::hint::spin_loop;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::{Atom32, Atom64};

const OPEN: u64 = 1 << 63;
const BROKEN: u64 = 1 << 62;
const PHASE: u64 = 1 << 48;
const PHASES: u64 = BROKEN - PHASE;
const COUNT: u64 = PHASE - 1;

/// In place of a length: the sender has closed.
const CLOSED: u32 = u32::MAX;

/// Whether a receive is posted for each of the messages that were begun; both numbers count modulo 2^32.
#[inline]
fn has_receives(posted: u32, begun: u32) -> bool {
    posted.wrapping_sub(begun) < 1 << 31
}

/// The words that both sides touch, zero at first: closed.
pub trait Slots {
    /// A word of 32 bits.
    type W32: Atom32;
    /// A word of 64 bits.
    type W64: Atom64;
    /// The number of slots: a power of two.
    fn count(&self) -> u64;
    /// What both sides agree by.
    fn word(&self) -> &Self::W64;
    /// What the sender has begun to send the other way, modulo 2^32; more where it gave some up.
    fn begun(&self) -> &Self::W32;
    /// What the receiver had posted the other way when it opened, modulo 2^32.
    fn resumed(&self) -> &Self::W32;
    /// Slots that the receiver has taken.
    fn taken(&self) -> &Self::W64;
    /// The header of a slot.
    fn header(&self, slot: u64) -> &Self::W64;
}

fn header_of<S: Slots>(slots: &S, number: u64) -> &S::W64 {
    slots.header(number & (slots.count() - 1))
}

/// The header of the slot with this message.
#[expect(clippy::cast_possible_truncation, reason = "messages that share a slot differ in these bits")]
fn filled(number: u64, len: u32) -> u64 {
    u64::from((number as u32).wrapping_add(1)) << 32 | u64::from(len)
}

/// The sender's side.
#[derive(Debug, Default)]
pub struct Sender {
    /// The phase that it sends in, if it does.
    phase: Option<u64>,
    /// Messages sent the other way.
    begun: u32,
    /// There may be fewer of them.
    is_uncertain: bool,
    /// Slots taken, as far as it has looked.
    taken: u64,
}

impl Sender {
    /// The number of the slot for the next message, to be filled and then [published](Self::publish); `None` where it has to
    /// take the other way, as when `room` messages before it are not taken yet, which are at most as many as slots, nor after
    /// so many `looks`.
    #[inline]
    pub fn claim<S: Slots>(&mut self, slots: &S, room: u64, looks: u32) -> Option<u64> {
        loop {
            let word = slots.word().load(Acquire);
            let (phase, number) = (word & PHASES, word & COUNT);
            if word & OPEN == 0 || self.phase != Some(phase) && !self.enter(slots, phase) {
                return None;
            }
            // The receiver writes what is taken: no value may do harm here.
            if number.wrapping_sub(self.taken) >= room && !self.waits_for_room(slots, number, room, looks) {
                return None;
            }
            if slots.word().compare_exchange(word, word.wrapping_add(1), AcqRel, Relaxed).is_ok() {
                return Some(number);
            }
            // Closed meanwhile, and perhaps opened again.
        }
    }

    /// Whether messages take slots in this phase from now on.
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

    /// Whether there is room after a moment; closes otherwise.
    #[cold]
    fn waits_for_room<S: Slots>(&mut self, slots: &S, number: u64, room: u64, looks: u32) -> bool {
        for _ in 0..looks {
            self.taken = slots.taken().load(Acquire);
            if number.wrapping_sub(self.taken) < room {
                return true;
            }
            spin_loop();
        }
        self.close(slots);
        false
    }

    /// The slot of this message is filled.
    #[inline]
    pub fn publish<S: Slots>(&self, slots: &S, number: u64, len: u32) {
        header_of(slots, number).store(filled(number, len), Release);
    }

    #[cold]
    fn close<S: Slots>(&mut self, slots: &S) {
        self.phase = None;
        let word = slots.word().fetch_and(!OPEN, AcqRel);
        let number = word & COUNT;
        // Otherwise it is still in use.
        if word & OPEN != 0 && number.wrapping_sub(self.taken) < slots.count() {
            header_of(slots, number).store(filled(number, CLOSED), Release);
        }
    }

    /// Before a message that takes the other way. Returns what [`Sender::undo`] takes.
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

    /// The message that was begun was not sent.
    pub fn undo<S: Slots>(&mut self, slots: &S, was_uncertain: bool) {
        self.is_uncertain = was_uncertain;
        self.begun = self.begun.wrapping_sub(1);
        slots.begun().store(self.begun, Release);
    }

    /// The message that was begun was sent, the `sent`th that took this way, modulo 2^32.
    pub fn count<S: Slots>(&mut self, slots: &S, sent: u32) {
        (self.begun, self.is_uncertain) = (sent, false);
        slots.begun().store(sent, Release);
    }

    /// Whether the receiver has said that it cannot go on.
    pub fn is_broken<S: Slots>(slots: &S) -> bool {
        slots.word().load(Acquire) & BROKEN != 0
    }
}

/// Closes, by whoever has no [`Receiver`]: it finds out when it [looks](Receiver::look).
pub fn close<S: Slots>(slots: &S) {
    slots.word().fetch_and(!OPEN, AcqRel);
}

/// What the next slot has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing yet.
    Nothing,
    /// The sender has closed: see [`Receiver::look`].
    Closed,
    /// A message of so many bytes.
    Message(u32),
}

/// What slot `number` has, for whoever has no [`Receiver`]; a hint.
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

/// The receiver's side.
#[derive(Debug)]
pub struct Receiver {
    next: u64,
    /// What it has told the sender that it has taken.
    told: u64,
    phase: u64,
    /// Where slots end: it has seen that they are closed.
    end: Option<u64>,
}

impl Default for Receiver {
    fn default() -> Self {
        Self { next: 0, told: 0, phase: 0, end: Some(0) }
    }
}

impl Receiver {
    /// The number of the message that is next.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The number of the first message that takes the other way, once that is known.
    #[inline]
    pub fn end(&self) -> Option<u64> {
        self.end
    }

    /// What the next slot has.
    #[inline]
    pub fn peek<S: Slots>(&self, slots: &S) -> Next {
        peek(slots, self.next)
    }

    /// The next message was copied out: its slot is free, which the sender is told a few at a time.
    #[inline]
    pub fn take<S: Slots>(&mut self, slots: &S) {
        self.next += 1;
        if self.next - self.told >= (slots.count() / 16).max(1) {
            self.told = self.next;
            slots.taken().store(self.next, Release);
        }
    }

    /// Looks whether slots are closed.
    pub fn look<S: Slots>(&mut self, slots: &S) {
        if self.end.is_none() {
            let word = slots.word().load(Acquire);
            if word & OPEN == 0 {
                self.end = Some(word & COUNT);
            }
        }
    }

    /// Closes, and returns the number of the first message that takes the other way.
    pub fn close<S: Slots>(&mut self, slots: &S) -> u64 {
        let close = || slots.word().fetch_and(!OPEN, AcqRel) & COUNT;
        *self.end.get_or_insert_with(close)
    }

    /// Opens behind the `posted` receives, modulo 2^32, that were ever posted on the other way, if all messages of slots are
    /// here and no more than those were begun there. Then [`Receiver::end`] says how far: the sender may have closed already.
    /// Nothing may be taken out of slots before those receives are complete.
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

    /// Closes for ever, and tells the sender that nothing more is received.
    pub fn refuse<S: Slots>(&mut self, slots: &S) {
        // At once: a sender that sees them closed sees why.
        loop {
            let word = slots.word().load(Acquire);
            if slots.word().compare_exchange(word, (word & !OPEN) | BROKEN, AcqRel, Relaxed).is_ok() {
                self.end.get_or_insert(word & COUNT);
                return;
            }
        }
    }
}
