//! Copy engines that move payload for a device.
//!
//! The CPU copies to and from host memory, and into mappings of GPU memory. Reading GPU memory is slow for the CPU, or impossible. Such
//! copies go to a [`CopyEngine`]: the device starts one under its lock, without waiting, and polls the [`Ticket`].

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, ptr};

use gdsync_shm::back_off;

use crate::address::Gid;
use crate::cuda::Gpu;
use crate::memory::{Memory, Word32};

/// Threads poll this long after a copy or a message of several packets began (300 MB over NVLink, 50 MB over PCIe), so that its end,
/// the response and the next copy are noticed at once. Waking a thread takes 10 to 40 us, and a message may need three in turn.
pub const FRESH: Duration = Duration::from_millis(1);

/// How long a copy engine may end no copy before a device gives the copy up: far longer than any copy takes, so it is a GPU that hangs, or
/// a stream that holds up all. The proxy has this limit, the software HCA may have another one.
pub const COPY_LIMIT: Duration = Duration::from_secs(10);

/// Moves payload. Copies may overlap and end in any order, but copies that write the same bytes run in the order of their start.
pub trait CopyEngine: Send + Sync + fmt::Debug {
    /// Prepares for memory on this GPU. May block.
    fn adopt(&self, gpu: &Gpu);

    /// A handle with which peers open this memory; `None` if they cannot. May block.
    fn export(&self, memory: &Memory) -> Option<Handle>;

    /// Whether payload is read from this memory through staging memory, because CPU reads are slow or impossible.
    fn stages(&self, memory: &Memory) -> bool;

    /// Starts a copy. Never blocks. Keeps the parts until the copy is over.
    fn start(&self, parts: Vec<Part>) -> Ticket;

    /// Closes memory of a process that is gone.
    fn forget(&self, process: ProcessId);
}

/// One contiguous piece of a copy.
#[derive(Debug)]
pub struct Part {
    /// Source.
    pub from: Source,
    /// Destination.
    pub to: Memory,
    /// Offset in the destination.
    pub at: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Source of a copy.
#[derive(Clone, Debug)]
pub enum Source {
    /// Memory of this process, and an offset in it.
    Here(Memory, usize),
    /// Memory of another process.
    Peer {
        /// The process.
        process: ProcessId,
        /// The allocation.
        handle: Handle,
        /// Offset from [`Handle::offset`].
        at: u64,
    },
}

impl Source {
    /// The source `len` bytes further.
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

/// Identifies a process among all that ever run on this machine.
pub type ProcessId = [u8; 16];

/// Random identifier of this process, which peers read to verify the PID.
pub fn nonce() -> &'static [u8; 16] {
    static NONCE: OnceLock<[u8; 16]> = OnceLock::new();
    // All zero without random numbers; then no HCA opens, so the value is never used.
    NONCE.get_or_init(|| Gid::random().map_or([0; 16], |gid| gid.0))
}

/// Identifier of this process. It includes the PID, so a forked child differs.
pub fn this_process() -> ProcessId {
    let mut id = *nonce();
    id[..4].copy_from_slice(&std::process::id().to_le_bytes());
    id
}

/// Handle with which another process opens memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// `CUipcMemHandle` of the allocation; zero if other processes cannot open it.
    pub ipc: [u8; 64],
    /// Number of the allocation; a later allocation at the same address has another one.
    pub buffer: u64,
    /// Offset of the memory in its allocation.
    pub offset: u64,
}

const QUEUED: u32 = 0;
const RUNNING: u32 = 1;
const DONE: u32 = 2;
const FAILED: u32 = 3;

/// State of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Not over yet.
    Pending,
    /// The bytes are in place.
    Done,
    /// Failed; some of the bytes may have moved.
    Failed,
}

/// A copy that was started. Clones refer to the same copy.
#[derive(Clone, Debug, Default)]
pub struct Ticket(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: AtomicU32,
    /// The word that the engine writes behind the copy, and its value then.
    word: OnceLock<(Word32, u32)>,
    failure: OnceLock<String>,
}

impl Ticket {
    /// A copy that failed before it began.
    pub fn failed(reason: impl Into<String>) -> Self {
        let ticket = Self::default();
        ticket.fail(reason);
        ticket
    }

    /// Begins the copy. Returns false if it was cancelled.
    #[must_use]
    pub fn begin(&self) -> bool {
        self.0.state.compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The copy is over when this word, which only grows (cyclically), has reached `value`.
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

    /// Cancels the copy if it has not begun.
    pub fn cancel(&self) {
        let given_up = self.0.state.compare_exchange(QUEUED, FAILED, Ordering::AcqRel, Ordering::Acquire);
        if given_up.is_ok() {
            let _ = self.0.failure.set("it was given up before it began".into());
        }
    }

    /// The state of the copy. Never calls CUDA.
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

    /// Whether it is done or failed.
    pub fn is_over(&self) -> bool {
        self.status() != Status::Pending
    }

    /// Whether it ends no earlier than `other`: it is the same, or later in the same engine.
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

    /// Waits until it is over or the deadline has passed. Returns whether it is over.
    pub fn wait(&self, deadline: Instant) -> bool {
        let start = Instant::now();
        while !self.is_over() {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            back_off(now - start, deadline - now);
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
