//! The operations a stream runs, with the meanings of CUDA's stream memory operations
//! (`cuda.h`: `CUstreamBatchMemOpType`, `CUstreamWaitValue_flags`).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::memory::{Word32, Word64};

/// When a wait is satisfied, for the word `w` and the value `v` of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cond {
    /// `w - v >= 0` as a signed, cyclic comparison (`CU_STREAM_WAIT_VALUE_GEQ`).
    Geq,
    /// `w == v` (`CU_STREAM_WAIT_VALUE_EQ`).
    Eq,
    /// `(w & v) != 0` (`CU_STREAM_WAIT_VALUE_AND`).
    And,
    /// `!(w | v) != 0` (`CU_STREAM_WAIT_VALUE_NOR`).
    Nor,
}

impl Cond {
    /// Whether a 32-bit word satisfies the condition.
    pub fn holds32(self, word: u32, value: u32) -> bool {
        match self {
            Cond::Geq => word.wrapping_sub(value).cast_signed() >= 0,
            Cond::Eq => word == value,
            Cond::And => word & value != 0,
            Cond::Nor => !(word | value) != 0,
        }
    }

    /// Whether a 64-bit word satisfies the condition.
    pub fn holds64(self, word: u64, value: u64) -> bool {
        match self {
            Cond::Geq => word.wrapping_sub(value).cast_signed() >= 0,
            Cond::Eq => word == value,
            Cond::And => word & value != 0,
            Cond::Nor => !(word | value) != 0,
        }
    }
}

/// Who writes the word that a wait looks at, or consumes the doorbell that a write rings.
///
/// An engine whose thread runs on the CPU uses it to help and to sleep; a GPU engine cannot, and only
/// uses [`Source::fail`].
pub trait Source: Send + Sync + fmt::Debug {
    /// Runs some of the device's work on the calling thread. Returns whether anything was done.
    fn progress(&self) -> bool;

    /// Tells the device that a doorbell was written.
    fn signal(&self);

    /// Sleeps until `ready` may have become true, or for `timeout`. Spurious returns are allowed.
    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration);

    /// The stream gives up: stop the queue behind this source, so that nothing more leaves it and every
    /// completion it still owes arrives as an error. Idempotent.
    fn fail(&self, reason: &Error);

    /// What a wait on this source waits for, for error messages ("send completion 7 of QP 0x123").
    fn describe(&self) -> String;
}

/// One operation of a stream.
pub enum Op {
    /// Writes a 32-bit word after everything before it in the stream.
    Write32 {
        /// The word.
        at: Word32,
        /// Its new value.
        value: u32,
    },
    /// Writes a 64-bit word after everything before it in the stream.
    Write64 {
        /// The word.
        at: Word64,
        /// Its new value.
        value: u64,
    },
    /// Holds the stream until a 32-bit word satisfies a condition.
    Wait32 {
        /// The word.
        at: Word32,
        /// The operand of the condition.
        value: u32,
        /// The condition.
        cond: Cond,
        /// Who writes the word, if it is one of our queues.
        source: Option<Arc<dyn Source>>,
    },
    /// Holds the stream until a 64-bit word satisfies a condition.
    Wait64 {
        /// The word.
        at: Word64,
        /// The operand of the condition.
        value: u64,
        /// The condition.
        cond: Cond,
        /// Who writes the word, if it is one of our queues.
        source: Option<Arc<dyn Source>>,
    },
    /// Orders all memory accesses before it, of the whole system, before all after it.
    Barrier,
    /// Follows a doorbell write: tells the device, where the engine runs on the CPU and can.
    Signal(Arc<dyn Source>),
    /// Runs a function on the CPU, in stream order.
    HostFn(Box<dyn FnOnce() + Send>),
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Write32 { at, value } => write!(f, "WRITE32 [{:#x}] <- {value:#x}", at.addr()),
            Op::Write64 { at, value } => write!(f, "WRITE64 [{:#x}] <- {value:#x}", at.addr()),
            Op::Wait32 { at, value, cond, .. } => write!(f, "WAIT32 [{:#x}] {cond:?} {value:#x}", at.addr()),
            Op::Wait64 { at, value, cond, .. } => write!(f, "WAIT64 [{:#x}] {cond:?} {value:#x}", at.addr()),
            Op::Barrier => f.write_str("BARRIER"),
            Op::Signal(source) => write!(f, "SIGNAL {source:?}"),
            Op::HostFn(_) => f.write_str("HOSTFN"),
        }
    }
}
