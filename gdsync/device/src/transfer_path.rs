//! How payload leaves the memory that it is sent from.

use std::borrow::Cow;
use std::fmt;

/// What takes payload out of its buffer, on its way to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// The card reads host memory.
    Card,
    /// The card reads GPU memory: GPUDirect RDMA (GPUDirect v3).
    CardFromGpu,
    /// The CPU copies host memory into memory that it shares with the peer.
    Cpu,
    /// The receiver's CPU copies it from host memory to where it goes, by cross-memory attach (`process_vm_readv`).
    Cma,
    /// The CPU reads GPU memory through a mapping, and copies it into memory that it shares with the peer.
    Mapping,
    /// A copy engine of the receiver's GPU fetches it, over NVLink or PCIe, and between processes by CUDA IPC (GPUDirect v2).
    PeerToPeer,
    /// A copy engine of this GPU brings it to pinned host memory, from where the CPU copies it on in chunks, or the card reads it
    /// (GPUDirect v1).
    Staging,
}

/// Which GPU memory a device is given pinned host memory in place of, where a thread posts to it (the CPU proxy): see
/// `Context::stage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Staging {
    /// What the device refuses to register.
    #[default]
    Refused,
    /// All.
    Always,
    /// None: what the device refuses is refused.
    Never,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Card => "read from host memory by the card",
            Self::CardFromGpu => "read from GPU memory by the card (GPUDirect RDMA)",
            Self::Cpu => "copied by the CPU",
            Self::Cma => "copied to its place by the receiver's CPU",
            Self::Mapping => "read by the CPU through a mapping of GPU memory",
            Self::PeerToPeer => "fetched by a copy engine of the receiver's GPU (peer to peer)",
            Self::Staging => "staged in pinned host memory by a copy engine",
        })
    }
}

/// What takes payload out of a buffer, and why: see `Qp::transfer_path`. It is written as
/// `copied by the CPU: it is host memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPath {
    transport: Transport,
    reason: Cow<'static, str>,
}

impl TransferPath {
    /// Payload that leaves by this transport, and why.
    pub fn new(transport: Transport, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { transport, reason: reason.into() }
    }

    /// What takes it.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Why it is this one.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for TransferPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.transport, self.reason)
    }
}
