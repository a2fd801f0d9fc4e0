//! What a device backend gives to the verbs layer: queues in memory, keys, and state changes.
//!
//! Everything above this trait is the same for every device; everything below only makes rings and consumes them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdsync_shm::SpinLock;

use super::address::{Gid, QpAddress};
use super::attr::{Access, MAX_RD_ATOMIC, QpAttr};
use crate::cuda::Gpu;
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;
use crate::memory::{Memory, Word64};
use crate::{CqEvent, DoorbellWatch, FaultPlan};

/// A completion queue as the device made it.
#[derive(Debug)]
pub struct CqParts {
    /// The completion queue number.
    pub cqn: u32,
    /// `64 << log_entries` bytes of CQEs, all in the initial state.
    pub ring: Memory,
    /// The 8-byte doorbell record.
    pub record: Memory,
    /// Raised after completions were written.
    pub event: Arc<CqEvent>,
}

/// What a queue pair is made of.
#[derive(Clone, Copy, Debug)]
pub struct QpRequest {
    /// The protection domain.
    pub pdn: u32,
    /// The completion queue of sends.
    pub send_cqn: u32,
    /// The completion queue of receives.
    pub recv_cqn: u32,
    /// Log2 of the send queue's basic blocks.
    pub log_sq: u32,
    /// Log2 of the receive queue's entries.
    pub log_rq: u32,
    /// Bytes of a receive queue entry.
    pub rq_stride: usize,
    /// Buffers of the largest send that was asked for. The ring may have room for more.
    pub max_send_sge: usize,
    /// Bytes of the longest inline send that was asked for, likewise.
    pub max_inline: usize,
}

/// A queue pair as the device made it, in state RESET.
#[derive(Debug)]
pub struct QpParts {
    /// The queue pair number, 24 bits.
    pub qpn: u32,
    /// The first packet sequence number, 24 bits.
    pub psn: u32,
    /// The send queue.
    pub sq: Memory,
    /// The receive queue.
    pub rq: Memory,
    /// The 8-byte doorbell record: receive counter, send counter.
    pub record: Memory,
    /// The doorbell register.
    pub doorbell: Word64,
    /// What broke it. A device that knows more than a CQE can say records that before the CQE is written.
    pub health: Arc<Health>,
    /// What spares most calls of [`Provider::watch`], if the device needs any.
    pub doorbell_watch: Option<DoorbellWatch>,
}

/// The keys of a memory region.
#[derive(Clone, Copy, Debug)]
pub struct MrKeys {
    /// The local key.
    pub lkey: u32,
    /// The remote key.
    pub rkey: u32,
    /// They are of host memory in place of GPU memory: peers cannot name that.
    pub is_staged: bool,
}

/// A device: it makes rings, and something behind it reads them. Implement it to put the verbs and streams of `gdsync` over a device of your own.
pub trait Provider: Send + Sync + fmt::Debug {
    /// What consumes the rings, for reports.
    fn description(&self) -> &str;
    /// How bytes travel to a peer, for reports.
    fn wire(&self) -> &str;
    /// Whether no card is behind it.
    fn is_software(&self) -> bool {
        false
    }
    /// The GID of its port.
    fn gid(&self) -> Gid;
    /// Where a peer finds a queue pair of this device.
    fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        QpAddress::new(self.gid(), qpn, psn)
    }
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// Of the device, when there are too many.
    fn alloc_pd(&self) -> Result<u32>;
    /// Frees a protection domain.
    fn dealloc_pd(&self, pdn: u32);
    /// Registers memory.
    ///
    /// # Errors
    /// Of the device, when it does not take the memory or these rights.
    fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys>;
    /// Ends a registration.
    fn dereg_mr(&self, keys: MrKeys);
    /// How a message of `len` bytes of `memory`, in the region of this key, would leave by a queue pair.
    fn transfer_path(&self, qpn: u32, lkey: u32, memory: &Memory, len: usize) -> TransferPath;
    /// From so many bytes on, payload in GPU memory is left to copy engines of receivers. Returns from how many it was; `None`
    /// where there is no choice.
    fn leave_by_reference(&self, _bytes: usize) -> Option<usize> {
        None
    }
    /// Which GPU memory that is registered from now on is staged. Returns which it was; `None` where there is no choice.
    fn stage(&self, _which: Staging) -> Option<Staging> {
        None
    }
    /// `ring` says which completion queue of a queue pair it will be, if any: it may be in GPU memory.
    fn create_cq(&self, log_entries: u32, ring: OnGpu, places: &Places) -> Result<CqParts>;
    /// Destroys a completion queue.
    fn destroy_cq(&self, cqn: u32);
    /// Makes a queue pair in RESET.
    ///
    /// # Errors
    /// Of the device, when it has no room, or does not take the sizes.
    fn create_qp(&self, request: &QpRequest, places: &Places) -> Result<QpParts>;
    /// `attr` has passed [`QpAttr::check`]. Blocks at most `timeout`, for the address of the peer. Returns the
    /// first packet sequence number of this side, which a reset changes.
    fn modify_qp(&self, qpn: u32, attr: &QpAttr, timeout: Duration) -> Result<u32>;
    /// Destroys a queue pair.
    fn destroy_qp(&self, qpn: u32);
    /// READs and atomics that a queue pair may have outstanding, at most [`MAX_RD_ATOMIC`].
    fn rd_atomic(&self) -> u8 {
        MAX_RD_ATOMIC
    }
    /// What a queue pair of this device may let peers do.
    fn rights(&self) -> Access {
        Access::all()
    }
    /// Whether messages that a queue pair receives are written in order of their addresses, if the device tells.
    fn writes_in_order(&self, _qpn: u32) -> Option<bool> {
        None
    }

    /// Whether a doorbell may be written before its record. A card may look at the record to recover a doorbell that it
    /// missed, so there the record comes first.
    fn record_may_lag(&self) -> bool;
    /// Whether a card reads the rings over the bus, as soon as a doorbell is written by whomever: what the CPU wrote to GPU
    /// memory must have arrived there before.
    fn reads_by_itself(&self) -> bool {
        false
    }
    /// Before a queue pair is made for this GPU: has it probed whether it can ring, once.
    fn admit(&self, _gpu: &Gpu, _probe: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        Ok(())
    }
    /// A doorbell of this queue pair was written by a CPU thread.
    fn ring(&self, qpn: u32);
    /// A doorbell of this queue pair will be written by something that cannot call [`Provider::ring`], up to the
    /// producer index `pi`.
    fn watch(&self, qpn: u32, pi: u64);
    /// A stream of a GPU waits on this completion queue: nobody polls it, and what is done for it cannot wait.
    fn attend(&self, cqn: u32);
    /// Runs device work on the calling thread, if the device has such work and nobody else does it now.
    fn progress(&self) -> bool;
    /// Whether a copy of payload, or a long message, began a moment ago, here or at a peer.
    fn has_copied_recently(&self) -> bool {
        false
    }
    /// The calling thread will not call [`Provider::progress`] for a while.
    fn end_polling(&self);

    /// Injects faults.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) by devices other than the software HCA.
    fn inject(&self, plan: FaultPlan) -> Result<()>;
    /// Counters of the device.
    fn stats(&self) -> HcaStats;
}

bitflags::bitflags! {
    /// What of a queue pair is in GPU memory; the rest is in host memory.
    ///
    /// | libgdsync | here |
    /// |---|---|
    /// | `GDS_CREATE_QP_WQ_ON_GPU` | [`OnGpu::SEND_QUEUE`] |
    /// | `GDS_CREATE_QP_TX_CQ_ON_GPU` | [`OnGpu::SEND_CQ`] |
    /// | `GDS_CREATE_QP_RX_CQ_ON_GPU` | [`OnGpu::RECV_CQ`] |
    /// | `GDS_CREATE_QP_WQ_DBREC_ON_GPU` | [`OnGpu::RECORDS`] |
    ///
    /// A GPU looks at a completion queue in its own memory without using the bus. The CPU, and with it the software HCA,
    /// writes there about as quickly as to host memory, but every look takes it a microsecond. Doorbells are
    /// registers of the card and never move.
    ///
    /// Where mlx5 cards read the rings by themselves, any of these makes the queue pair by DevX, which needs a dma-buf of GPU
    /// memory for the card (Linux 6.1, rdma-core 43, the NVIDIA driver's open kernel modules) or nvidia-peermem: otherwise it is
    /// refused, with the reason.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct OnGpu: u32 {
        /// The send queue. The device must be able to read it there: the software HCA can, and so can mlx5 cards. There the
        /// receive queue lies beside it, in the same memory.
        const SEND_QUEUE = 1;
        /// The completion queue of sends, unless it is shared.
        const SEND_CQ = 2;
        /// The completion queue of receives, unless it is shared.
        const RECV_CQ = 4;
        /// The doorbell records: producer indices of the queue pair and consumer indices of its own completion queues.
        const RECORDS = 8;
    }
}

/// The GPU that drives a queue pair, and what is in its memory.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The GPU; `None` where only CPUs use the queue pair.
    pub gpu: Option<Gpu>,
    /// What is in its memory.
    pub on_gpu: OnGpu,
}

impl Places {
    /// `len` zeroed bytes for `what`, where they belong, and known to the GPU.
    pub fn alloc(&self, what: OnGpu, len: usize) -> Result<Memory> {
        let Some(gpu) = &self.gpu else { return Memory::alloc(len) };
        if !what.is_empty() && self.on_gpu.contains(what) { gpu.piece(len) } else { gpu.host_piece(len) }
    }
}

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

/// Counters of a software HCA since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HcaStats {
    /// Doorbells taken.
    pub doorbells: u64,
    /// Send WQEs fetched.
    pub wqes: u64,
    /// Packets sent, among them those that a fault plan dropped or holds back.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Packets that a fault plan dropped, duplicated, reordered or delayed.
    pub packets_faulted: u64,
    /// Packets that arrived again, or out of order.
    pub packets_discarded: u64,
    /// Times a sender went back to an earlier packet.
    pub retransmissions: u64,
    /// Messages received by reference: a copy engine moved their payload.
    pub by_reference: u64,
    /// Messages received by cross-memory attach: the CPU read their payload in the sender's process.
    pub by_cma: u64,
    /// References that could not be followed, so that the payload was sent after all.
    pub references_refused: u64,
    /// Messages that found no receive.
    pub rnr_naks: u64,
    /// Completion queues that overran.
    pub cq_overruns: u64,
    /// Things a card would punish.
    pub violations: u64,
    /// The last of them.
    pub last_violation: Option<&'static str>,
}

impl HcaStats {
    /// Counts and reports something a card would punish.
    pub fn violation(&mut self, what: &'static str) {
        self.violations += 1;
        self.last_violation = Some(what);
        tracing::warn!(what, "violation of the ring formats");
    }
}

/// Why a queue pair does no more work: the first failure, kept for every later call; or this is not its process.
#[derive(Debug, Default)]
pub struct Health {
    broken: AtomicBool,
    /// The process that made the queue pair.
    pub fork_guard: ForkGuard,
    error: SpinLock<Option<Error>>,
}

impl Health {
    /// Records a failure. A flush never replaces anything, and any cause replaces a flush.
    pub fn record(&self, error: Error) {
        let flush = |e: &Error| matches!(e, Error::Completion(c) if c.is_flush());
        let mut slot = self.error.lock();
        if slot.as_ref().is_none_or(|known| flush(known) && !flush(&error)) {
            *slot = Some(error);
        }
        self.broken.store(true, Ordering::Release);
    }

    /// Whether the queue pair does no more work, or belongs to another process.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire) || !self.fork_guard.is_here()
    }

    /// The failure, if there was one.
    pub fn check(&self) -> Result<()> {
        if !self.is_broken() {
            return Ok(());
        }
        self.fork_guard.check()?;
        self.error.lock().clone().map_or(Ok(()), Err)
    }

    /// Forgets the failure, for a reset.
    pub fn clear(&self) {
        *self.error.lock() = None;
        self.broken.store(false, Ordering::Release);
    }
}
