//! Engines that move payload, as the software HCA uses them.
//!
//! The CPU moves host memory, and what goes into a mapping of GPU memory. What comes out of GPU memory it moves slowly, and
//! some it does not reach. There the HCA leaves the bytes to a [`CopyEngine`]: it notes a copy under the HCA's lock, which takes
//! no time, and the HCA asks the [`Ticket`] until it is over.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, ptr};

use crate::cuda::Gpu;
use crate::memory::{Memory, Word32};

/// How long after a copy, or a message of several packets, began everybody who has a part in it stays awake: 300 MB over NVLink,
/// 50 MB over PCIe. So its end, the answer to it and the next copy are each noticed at once: a thread that sleeps takes 10 to
/// 40 us to wake, and up to three would have to be woken one after the other for each message.
pub const FRESH: Duration = Duration::from_millis(1);

/// Moves payload. Several copies may be under way at once and end in any order, but copies that write the same bytes happen
/// in the order in which they were started.
pub trait CopyEngine: Send + Sync + fmt::Debug {
    /// Makes ready for memory on this GPU. May take a while.
    fn adopt(&self, gpu: &Gpu);

    /// How peers find this memory, if its payload may be left to them by reference. May take a while.
    fn export(&self, memory: &Memory) -> Option<Handle>;

    /// Whether payload is read from this memory through staging memory, as the CPU is slow there or does not reach it.
    fn stages(&self, memory: &Memory) -> bool;

    /// Notes a copy, to begin at once. Never waits. The parts are kept until the copy is over.
    fn start(&self, parts: Vec<Part>) -> Ticket;

    /// Closes what it has opened of a process that is gone.
    fn forget(&self, process: ProcessId);
}

/// One contiguous piece of a copy.
#[derive(Debug)]
pub struct Part {
    /// Where the bytes are.
    pub from: Source,
    /// Where they go.
    pub to: Memory,
    /// First byte there.
    pub at: usize,
    /// Bytes.
    pub len: usize,
}

/// Where bytes are.
#[derive(Clone, Debug)]
pub enum Source {
    /// In this process: the memory, and the first byte in it.
    Here(Memory, usize),
    /// In another process.
    Peer {
        /// Whose.
        process: ProcessId,
        /// The allocation.
        handle: Handle,
        /// The first byte, counted from [`Handle::offset`].
        at: u64,
    },
}

impl Source {
    /// The bytes that begin so much later.
    #[must_use]
    pub fn skip(&self, len: usize) -> Self {
        match self {
            Self::Here(memory, at) => Self::Here(memory.clone(), at + len),
            Self::Peer { process, handle, at } => {
                Self::Peer { process: *process, handle: *handle, at: at + len as u64 }
            }
        }
    }
}

/// A process, among all that this machine ever runs.
pub type ProcessId = [u8; 16];

/// How another process opens memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// `CUipcMemHandle` of the allocation; all zero where other processes cannot open it.
    pub ipc: [u8; 64],
    /// The number of the allocation: another one at the same place has another number.
    pub buffer: u64,
    /// Where the memory begins in its allocation.
    pub offset: u64,
}

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
