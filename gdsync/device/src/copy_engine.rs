//! Engines that move payload, as the software HCA uses them.
//!
//! The CPU moves host memory, and what goes into a mapping of GPU memory. What comes out of GPU memory it moves slowly, and
//! some it does not reach. There the HCA leaves the bytes to a [`CopyEngine`]: it notes a copy under the HCA's lock, which takes
//! no time, and the HCA asks the [`Ticket`] until it is over.

mod ticket;

use std::fmt;
use std::time::Duration;

use crate::cuda::Gpu;
use crate::memory::Memory;

pub use ticket::{Status, Ticket};

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
