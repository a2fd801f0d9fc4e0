//! Send operations and their encoded WQEs.

use core::fmt;

use super::address_vector::AddressVector;
use super::ctrl::{CE_ALWAYS, FM_FENCE_AND_INITIATOR_SMALL, SOLICITED, blocks};
use super::segment::{DataSeg, RemoteAddr, SEGMENT};

/// Bytes of a basic block, the unit of the send queue (`MLX5_SEND_WQE_BB`).
pub const BB: usize = 64;

/// Maximum bytes of a WQE in the ring: 16 blocks.
pub const MAX_WQE_BYTES: usize = 16 * BB;

/// Maximum segments of a WQE: the field has six bits.
pub const MAX_DS: u8 = 63;

/// Highest QPN: the field has 24 bits.
pub const MAX_QPN: u32 = 0x00ff_ffff;

/// Payload of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Gathered from these buffers when the HCA executes the WQE. Empty ones are dropped.
    Sges(&'a [DataSeg]),
    /// Copied into the WQE. Zero bytes equal no buffers.
    Inline(&'a [u8]),
}

/// An operation of a send queue.
///
/// Immediate data is a number: the wire carries `imm.to_be_bytes()`, and the receiver gets the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp<'a> {
    /// NOP: only completes.
    Nop,
    /// Send: consumes a receive WQE of the peer.
    Send {
        /// Payload.
        payload: Payload<'a>,
        /// Immediate data for the receiver's CQE.
        imm: Option<u32>,
    },
    /// Send on a datagram queue pair.
    Datagram {
        /// The receiver.
        to: &'a AddressVector,
        /// Payload.
        payload: Payload<'a>,
        /// Immediate data for the receiver's CQE.
        imm: Option<u32>,
    },
    /// RDMA write. With immediate data it also consumes a receive WQE.
    Write {
        /// Destination.
        remote: RemoteAddr,
        /// Payload.
        payload: Payload<'a>,
        /// Immediate data for the receiver's CQE.
        imm: Option<u32>,
    },
    /// RDMA read.
    Read {
        /// Source.
        remote: RemoteAddr,
        /// Destination; at least one byte.
        sges: &'a [DataSeg],
    },
    /// Compare-and-swap of a remote 64-bit word.
    CompareSwap {
        /// The word, 8-byte aligned.
        remote: RemoteAddr,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
        /// Destination of the old value; 8 bytes.
        result: DataSeg,
    },
    /// Fetch-and-add of a remote 64-bit word.
    FetchAdd {
        /// The word, 8-byte aligned.
        remote: RemoteAddr,
        /// Addend.
        add: u64,
        /// Destination of the old value; 8 bytes.
        result: DataSeg,
    },
}

impl SendOp<'_> {
    /// Bytes transferred, saturating.
    #[inline]
    pub fn payload_bytes(&self) -> u32 {
        let sum = |sges: &[DataSeg]| match sges {
            [one] => one.len,
            _ => sges.iter().fold(0u32, |sum, sge| sum.saturating_add(sge.len)),
        };
        match self {
            Self::Send { payload, .. } | Self::Datagram { payload, .. } | Self::Write { payload, .. } => {
                match payload {
                    Payload::Sges(sges) => sum(sges),
                    Payload::Inline(data) => u32::try_from(data.len()).unwrap_or(u32::MAX),
                }
            }
            Self::Read { sges, .. } => sum(sges),
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => 8,
            Self::Nop => 0,
        }
    }

    /// Whether it returns payload from the peer.
    pub fn fetches(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }
}

/// Options of a send WQE. Every WQE requests a CQE, because streams wait for each one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WqeFlags {
    /// Wait for earlier reads and atomics.
    pub fence: bool,
    /// Raise a solicited event at the receiver.
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
    /// The `ds * 16` bytes of the WQE. The rest of its last block is ignored.
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

    /// First 8 bytes, which a doorbell carries; see [`super::doorbell_word`].
    pub fn first8(&self) -> [u8; 8] {
        *self.bytes.first_chunk().expect("a WQE is longer than 8 bytes")
    }
}

impl fmt::Debug for WqeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WqeBytes({:02x?})", self.as_bytes())
    }
}
