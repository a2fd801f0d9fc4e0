//! What has become of a copy.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::memory::Word32;

const QUEUED: u32 = 0;
const RUNNING: u32 = 1;
const DONE: u32 = 2;
const FAILED: u32 = 3;

/// What has become of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It will begin, or is under way.
    Pending,
    /// The bytes are in place.
    Done,
    /// It did not happen and will not happen; some of the bytes may have moved.
    Failed,
}

/// A copy that was asked for. Clones are of the same copy.
#[derive(Clone, Debug, Default)]
pub struct Ticket(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: AtomicU32,
    /// A word that the engine writes behind the copy, and what it holds from then on.
    word: OnceLock<(Word32, u32)>,
    failure: OnceLock<String>,
}

impl Ticket {
    /// A copy that has failed before it began.
    pub fn failed(reason: impl Into<String>) -> Self {
        let ticket = Self::default();
        ticket.fail(reason);
        ticket
    }

    /// Begins the copy; false if it was given up before.
    #[must_use]
    pub fn begin(&self) -> bool {
        self.0.state.compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The copy is over when this word, which is written in order of ascending numbers, has come to `value`.
    pub fn done_at(&self, word: Word32, value: u32) {
        let _ = self.0.word.set((word, value));
    }

    /// The copy is over.
    pub fn done(&self) {
        self.0.state.store(DONE, Ordering::Release);
    }

    /// The copy has failed.
    pub fn fail(&self, reason: impl Into<String>) {
        let _ = self.0.failure.set(reason.into());
        self.0.state.store(FAILED, Ordering::Release);
    }

    /// Gives the copy up if it has not begun: nobody waits for it any more.
    pub fn cancel(&self) {
        let given_up = self.0.state.compare_exchange(QUEUED, FAILED, Ordering::AcqRel, Ordering::Acquire);
        if given_up.is_ok() {
            let _ = self.0.failure.set("it was given up before it began".into());
        }
    }

    /// What has become of it. Never calls CUDA.
    pub fn status(&self) -> Status {
        match self.0.state.load(Ordering::Acquire) {
            DONE => Status::Done,
            FAILED => Status::Failed,
            _ => match self.0.word.get() {
                Some((word, value)) if word.load().wrapping_sub(*value).cast_signed() >= 0 => Status::Done,
                _ => Status::Pending,
            },
        }
    }

    /// Whether it is over, one way or the other.
    pub fn is_over(&self) -> bool {
        self.status() != Status::Pending
    }

    /// Whether it cannot be over before `other` is: it is the same, or comes behind it in the same engine.
    pub fn is_behind(&self, other: &Self) -> bool {
        let word = |ticket: &'_ Self| {
            ticket.0.word.get().map(|(word, value)| (ptr::from_ref(word.atomic()), *value))
        };
        Arc::ptr_eq(&self.0, &other.0)
            || word(self).zip(word(other)).is_some_and(|((own, value), (others, before))| {
                own == others && value.wrapping_sub(before).cast_signed() >= 0
            })
    }

    /// Why it failed.
    pub fn failure(&self) -> Option<&str> {
        self.0.failure.get().map(String::as_str)
    }

    /// Waits until it is over, or for the deadline. Returns whether it is over.
    pub fn wait(&self, deadline: Instant) -> bool {
        while !self.is_over() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn a_word_ends_the_copies_up_to_its_number_and_wraps() {
        let word = Memory::alloc(4).unwrap().word32(0).unwrap();
        word.store(u32::MAX - 1);
        let tickets: Vec<_> = [u32::MAX, 0, 1]
            .map(|value| {
                let ticket = Ticket::default();
                assert!(ticket.begin());
                ticket.done_at(word.clone(), value);
                ticket
            })
            .into();
        for over in 0..=3 {
            word.store((u32::MAX - 1).wrapping_add(over));
            let seen = tickets.iter().filter(|ticket| ticket.status() == Status::Done).count();
            assert_eq!(seen, over as usize);
        }
    }

    #[test]
    fn what_has_begun_is_not_given_up() {
        let (begun, waiting) = (Ticket::default(), Ticket::default());
        assert!(begun.begin());
        begun.cancel();
        waiting.cancel();
        assert_eq!((begun.status(), waiting.status()), (Status::Pending, Status::Failed));
        assert!(!waiting.begin());
        assert!(!begun.wait(Instant::now()));
        assert!(waiting.wait(Instant::now()) && waiting.failure().is_some());
    }
}
