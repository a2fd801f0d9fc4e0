//! Send WQEs: what can be asked for, and the bytes it becomes.

use core::fmt;

use super::ctrl::{CE_ALWAYS, FM_FENCE_AND_INITIATOR_SMALL, SOLICITED, blocks};
use super::segment::{DataSeg, RemoteAddr, SEGMENT};

/// Bytes of a basic block, the unit of the send queue (`MLX5_SEND_WQE_BB`).
pub const BB: usize = 64;

/// Most bytes that a WQE can occupy in the ring: 16 blocks.
pub const MAX_WQE_BYTES: usize = 16 * BB;

/// Most segments of a WQE: the field has six bits.
pub const MAX_DS: u8 = 63;

/// Highest number of a queue pair: the field has 24 bits.
pub const MAX_QPN: u32 = 0x00ff_ffff;

/// The bytes that an operation sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Gathered from these buffers when the HCA executes the WQE. Empty ones are left out.
    Sges(&'a [DataSeg]),
    /// Copied into the WQE now. No bytes at all is the same as no buffers.
    Inline(&'a [u8]),
}

/// One operation of a send queue.
///
/// Immediate data is given as a number; the wire carries `imm.to_be_bytes()`, and the receiver gets the
/// same number back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp<'a> {
    /// Nothing, with a completion.
    Nop,
    /// Into the buffers of the peer's next receive WQE.
    Send {
        /// What is sent.
        payload: Payload<'a>,
        /// Immediate data for the receiver's completion.
        imm: Option<u32>,
    },
    /// Into the peer's memory. With immediate data it also takes and completes a receive WQE there.
    Write {
        /// Where to.
        remote: RemoteAddr,
        /// What is written.
        payload: Payload<'a>,
        /// Immediate data for the receiver's completion.
        imm: Option<u32>,
    },
    /// From the peer's memory.
    Read {
        /// Where from.
        remote: RemoteAddr,
        /// Where to; at least one byte.
        sges: &'a [DataSeg],
    },
    /// If the peer's 64-bit word equals `compare`, it becomes `swap`.
    CompareSwap {
        /// The word, 8-byte aligned.
        remote: RemoteAddr,
        /// The value expected there.
        compare: u64,
        /// The new value.
        swap: u64,
        /// Where the old value goes; 8 bytes.
        result: DataSeg,
    },
    /// Adds to the peer's 64-bit word.
    FetchAdd {
        /// The word, 8-byte aligned.
        remote: RemoteAddr,
        /// What is added.
        add: u64,
        /// Where the old value goes; 8 bytes.
        result: DataSeg,
    },
}

impl SendOp<'_> {
    /// Bytes that it moves; as many as fit in the number, of more.
    #[inline]
    pub fn payload_bytes(&self) -> u32 {
        let sum = |sges: &[DataSeg]| match sges {
            [one] => one.len,
            _ => sges.iter().fold(0u32, |sum, sge| sum.saturating_add(sge.len)),
        };
        match self {
            Self::Send { payload, .. } | Self::Write { payload, .. } => match payload {
                Payload::Sges(sges) => sum(sges),
                Payload::Inline(data) => u32::try_from(data.len()).unwrap_or(u32::MAX),
            },
            Self::Read { sges, .. } => sum(sges),
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => 8,
            Self::Nop => 0,
        }
    }

    /// Whether it brings payload from the peer.
    pub fn fetches(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }
}

/// Options of a send WQE. Every WQE asks for a CQE: a wait for one must never be in vain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WqeFlags {
    /// Wait for earlier reads and atomics of this queue.
    pub fence: bool,
    /// Raise an event at the receiver.
    pub solicited: bool,
}

impl WqeFlags {
    pub(super) const fn fm_ce_se(self) -> u8 {
        let fence = if self.fence { FM_FENCE_AND_INITIATOR_SMALL } else { 0 };
        let solicited = if self.solicited { SOLICITED } else { 0 };
        CE_ALWAYS | fence | solicited
    }
}

/// An encoded send WQE.
#[derive(Clone)]
pub struct WqeBytes {
    pub(super) bytes: [u8; MAX_WQE_BYTES],
    pub(super) ds: u8,
}

impl WqeBytes {
    /// The bytes of the WQE, `ds * 16` of them. What lies behind them in its last block does not matter.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.ds) * SEGMENT]
    }

    /// Length in 16-byte segments.
    pub const fn ds(&self) -> u8 {
        self.ds
    }

    /// Number of 64-byte blocks it occupies in the ring.
    pub const fn blocks(&self) -> u16 {
        blocks(self.ds)
    }

    /// The bytes that a doorbell for this WQE carries; see [`super::doorbell_word`].
    pub fn first8(&self) -> [u8; 8] {
        *self.bytes.first_chunk().expect("a WQE is longer than 8 bytes")
    }
}

impl fmt::Debug for WqeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WqeBytes({:02x?})", self.as_bytes())
    }
}
