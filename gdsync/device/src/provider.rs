//! The device interface: queues in memory, keys and state changes, between verbs and whatever consumes the rings.
//!
//! Everything above [`Provider`] is the same for all devices. Everything below creates rings and consumes them.

use std::borrow::Cow;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use gdsync_shm::{self as protocol, SpinLock};
use mlx5_ring::AddressVector;
use rdma_core_sys::verbs::ibv_qp;

use super::address::{Gid, QpAddress};
use super::attr::{Access, MAX_RD_ATOMIC, QpAttr};
use crate::cuda::Gpu;
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;
use crate::memory::{Memory, Word64};
use crate::{CqEvent, DoorbellWatch, FaultPlan};

/// A completion queue as created by the device.
#[derive(Debug)]
pub struct CqParts {
    /// The completion queue number.
    pub cqn: u32,
    /// `64 << log_entries` bytes of CQEs, all in the initial state.
    pub ring: Memory,
    /// The 8-byte doorbell record.
    pub record: Memory,
    /// Raised after each completion.
    pub event: Arc<CqEvent>,
}

/// Parameters of a new queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpRequest {
    /// The protection domain.
    pub pdn: u32,
    /// The completion queue of sends.
    pub send_cqn: u32,
    /// The completion queue of receives.
    pub recv_cqn: u32,
    /// Log2 of the number of blocks of the send queue.
    pub log_sq: u32,
    /// Log2 of the number of entries of the receive queue.
    pub log_rq: u32,
    /// Bytes of a receive queue entry.
    pub rq_stride: usize,
    /// Maximum number of SGEs of a send, as requested; the ring may have room for more.
    pub max_send_sge: usize,
    /// Maximum inline bytes of a send, as requested.
    pub max_inline: usize,
    /// Q_Key of a datagram queue pair (UD); `None` for a connection (RC).
    pub qkey: Option<u32>,
}

/// A queue pair as created by the device, in state RESET.
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
    /// The first failure. A device that knows more than a CQE can say records it before it writes the CQE.
    pub health: Arc<Health>,
    /// Saves most calls of [`Provider::watch`]; `None` if the device needs none.
    pub doorbell_watch: Option<DoorbellWatch>,
}

/// The keys of a memory region.
#[derive(Clone, Copy, Debug)]
pub struct MrKeys {
    /// The local key.
    pub lkey: u32,
    /// The remote key.
    pub rkey: u32,
    /// The region is staged in host memory: peers cannot access the GPU memory by the remote key.
    pub is_staged: bool,
}

/// What a stream puts, in native byte order, where the immediate data of a SEND without any would be: it has put the payload into the
/// receive of the peer itself. A [software](Provider::is_software) device completes both without moving it.
pub const PLACED: u32 = u32::from_be_bytes(*b"put!");

/// What a device without datagram queue pairs says.
pub const NO_DATAGRAMS: Error = Error::Unsupported {
    what: "a datagram queue pair (UD) with its queues in host memory",
    by: "this device or path",
    fix: "use an mlx5 card that reads the rings itself (GDSYNC_PATH=direct), without OnGpu",
};

/// A device: creates rings, which something behind it consumes. Implement this to run the verbs and streams of `gdsync` on a device of
/// your own.
pub trait Provider: Send + Sync + fmt::Debug {
    /// What consumes the rings, for reports.
    fn description(&self) -> &str;
    /// What connects it to peers, for reports.
    fn wire(&self) -> &str;
    /// Whether it is simulated by software.
    fn is_software(&self) -> bool {
        false
    }
    /// Whether peers may be on other hosts.
    fn reaches_other_hosts(&self) -> bool {
        !self.is_software()
    }
    /// The GID of its port.
    fn gid(&self) -> Gid;
    /// The address of a queue pair of this device, for peers.
    fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        QpAddress::new(self.gid(), qpn, psn)
    }
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// Of the device, if it has no more.
    fn alloc_pd(&self) -> Result<u32>;
    /// Frees a protection domain.
    fn dealloc_pd(&self, pdn: u32);
    /// Registers memory.
    ///
    /// # Errors
    /// Of the device, if it refuses the memory or the rights.
    fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys>;
    /// Deregisters memory.
    fn dereg_mr(&self, keys: MrKeys);
    /// The path of a message of `len` bytes from `memory`, in the region with this key, through a queue pair.
    fn transfer_path(&self, qpn: u32, lkey: u32, memory: &Memory, len: usize) -> TransferPath;
    /// Sets the size in bytes from which copy engines of receivers fetch payload in GPU memory. Returns the previous size; `None` if
    /// the device has no such choice.
    fn set_by_reference(&self, _bytes: usize) -> Option<usize> {
        None
    }
    /// Sets which GPU memory is staged when registered. Returns the previous setting; `None` if the device has no such choice.
    fn stage(&self, _which: Staging) -> Option<Staging> {
        None
    }
    /// Creates a completion queue. `ring` tells which one of a queue pair it will be, if any, as it may lie in GPU memory.
    ///
    /// # Errors
    /// Of the device, if it has no more, or of the allocation.
    fn create_cq(&self, log_entries: u32, ring: OnGpu, places: &Places) -> Result<CqParts>;
    /// Destroys a completion queue.
    fn destroy_cq(&self, cqn: u32);
    /// Creates a queue pair in RESET.
    ///
    /// # Errors
    /// Of the device, if it has no more or refuses the sizes.
    fn create_qp(&self, request: &QpRequest, places: &Places) -> Result<QpParts>;
    /// Whether it has datagram queue pairs, whose queues lie in host memory.
    fn has_datagrams(&self) -> bool {
        false
    }
    /// The address of a queue pair for datagrams of a protection domain.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without datagrams; [`Error::Peer`] if the address cannot be reached from this port.
    fn datagram_address(&self, _pdn: u32, _to: &QpAddress, _qkey: u32) -> Result<AddressVector> {
        Err(NO_DATAGRAMS)
    }
    /// Changes the state of a queue pair. `attr` has passed [`QpAttr::check`]. Blocks at most `timeout`, to resolve the address of the
    /// peer. Returns the first packet sequence number of this side, which a reset changes.
    ///
    /// # Errors
    /// Of the device, if it refuses the transition, or the peer cannot be reached.
    fn modify_qp(&self, qpn: u32, attr: &QpAttr, timeout: Duration) -> Result<u32>;
    /// The queue pair of libibverbs behind a queue pair, if there is one.
    fn raw_qp(&self, _qpn: u32) -> Option<NonNull<ibv_qp>> {
        None
    }
    /// Destroys a queue pair.
    fn destroy_qp(&self, qpn: u32);
    /// Maximum number of outstanding READs and atomics of a queue pair, at most [`MAX_RD_ATOMIC`].
    fn rd_atomic(&self) -> u8 {
        MAX_RD_ATOMIC
    }
    /// Access that a queue pair of this device may grant to peers.
    fn rights(&self) -> Access {
        Access::all()
    }
    /// Whether received messages are written in ascending order of addresses, if known.
    fn writes_in_order(&self, _qpn: u32) -> Option<bool> {
        None
    }

    /// Whether a doorbell may be written before its record. Not on cards: they may read the record to recover a missed doorbell.
    fn record_may_lag(&self) -> bool;
    /// Whether the device reads the rings over the bus, as soon as anything writes a doorbell: then CPU writes to GPU memory must have
    /// arrived there before the doorbell.
    fn reads_by_itself(&self) -> bool {
        false
    }
    /// Called before a queue pair is created for this GPU. The device may call `probe` once, to test whether the GPU can ring.
    ///
    /// # Errors
    /// Of the probe.
    fn admit(&self, _gpu: &Gpu, _probe: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        Ok(())
    }
    /// A CPU thread has written the doorbell of this queue pair, or posted a receive where the device
    /// [wants calls](Health::request_receive_calls) for them. Nothing to do for a device that [reads](Provider::reads_by_itself)
    /// doorbells and writes completions itself; so for the next ones, up to [`Provider::sleep`].
    fn ring(&self, _qpn: u32) {}
    /// The doorbell of this queue pair will be written up to the producer index `pi` by something that cannot call
    /// [`Provider::ring`].
    fn watch(&self, _qpn: u32, _pi: u64) {}
    /// A GPU stream waits on this completion queue, which no thread polls meanwhile.
    fn attend(&self, _cqn: u32) {}
    /// Runs device work on the calling thread, if there is any and no other thread runs it. Returns whether anything was done.
    fn progress(&self) -> bool {
        false
    }
    /// Whether a copy of payload, or a long message, began a moment ago, here or at a peer. Then waiting threads do not sleep.
    fn has_copied_recently(&self) -> bool {
        false
    }
    /// The calling thread will not call [`Provider::progress`] for a while.
    fn end_polling(&self) {}
    /// Sleeps unless `ready`, until something arrives for the device, or for `timeout`; the thread runs it afterwards. May wake
    /// spuriously. Returns `false` at once if the device has no wake-ups.
    fn sleep(&self, _ready: &dyn Fn() -> bool, _timeout: Duration) -> bool {
        false
    }

    /// Injects faults.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) by devices other than the software HCA.
    fn inject(&self, plan: FaultPlan) -> Result<()> {
        plan.check()?;
        if plan == FaultPlan::default() {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: "a fault plan",
            by: "a device that is no software HCA",
            fix: "inject faults on soft0, or drop packets of the device's network (`tc qdisc add dev DEV root netem loss 1%`)",
        })
    }
    /// Counters of the device.
    fn stats(&self) -> HcaStats {
        HcaStats::default()
    }
}

bitflags::bitflags! {
    /// Parts of a queue pair in GPU memory; the rest is in host memory.
    ///
    /// | libgdsync | here |
    /// |---|---|
    /// | `GDS_CREATE_QP_WQ_ON_GPU` | [`OnGpu::SEND_QUEUE`] |
    /// | `GDS_CREATE_QP_TX_CQ_ON_GPU` | [`OnGpu::SEND_CQ`] |
    /// | `GDS_CREATE_QP_RX_CQ_ON_GPU` | [`OnGpu::RECV_CQ`] |
    /// | `GDS_CREATE_QP_WQ_DBREC_ON_GPU` | [`OnGpu::RECORDS`] |
    ///
    /// A GPU polls a completion queue in its own memory without using the bus. The CPU, and so the software HCA, writes there about as
    /// fast as to host memory, but each read takes a microsecond. Doorbells are registers of the card and stay there.
    ///
    /// Where mlx5 cards read the rings themselves, any of these creates the queue pair by DevX. That needs a dma-buf of GPU memory
    /// (Linux 6.1, rdma-core 43, the NVIDIA driver's open kernel modules) or nvidia-peermem; otherwise it is refused with the reason.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct OnGpu: u32 {
        /// The send queue. The software HCA and mlx5 cards can read it there. On cards the receive queue lies beside it.
        const SEND_QUEUE = 1;
        /// The completion queue of sends, unless it is shared.
        const SEND_CQ = 2;
        /// The completion queue of receives, unless it is shared.
        const RECV_CQ = 4;
        /// The doorbell records: producer indices of the queue pair and consumer indices of its own completion queues.
        const RECORDS = 8;
    }
}

/// The GPU that drives a queue pair, and which parts lie in its memory.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The GPU; `None` if only CPUs use the queue pair.
    pub gpu: Option<Gpu>,
    /// Parts in GPU memory.
    pub on_gpu: OnGpu,
}

impl Places {
    /// Allocates `len` zeroed bytes for `what`, in GPU memory or in host memory that the GPU can access.
    ///
    /// # Errors
    /// As [`Gpu::alloc`] and [`Memory::alloc`].
    pub fn alloc(&self, what: OnGpu, len: usize) -> Result<Memory> {
        let Some(gpu) = &self.gpu else { return Memory::alloc(len) };
        if !what.is_empty() && self.on_gpu.contains(what) {
            gpu.alloc_piece(len)
        } else {
            gpu.alloc_host_piece(len)
        }
    }
}

/// What moves payload out of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// The card reads host memory.
    Card,
    /// The card reads GPU memory: GPUDirect RDMA (GPUDirect v3).
    CardFromGpu,
    /// The CPU copies from host memory into memory shared with the peer.
    Cpu,
    /// The receiver's CPU copies from host memory to the destination, by cross-memory attach (`process_vm_readv`).
    Cma,
    /// The CPU copies from GPU memory, through a mapping, into memory shared with the peer.
    Mapping,
    /// A copy engine of the receiver's GPU fetches it over NVLink or PCIe; between processes by CUDA IPC (GPUDirect v2).
    PeerToPeer,
    /// A copy engine of this GPU copies to pinned host memory, from where the CPU copies in chunks or the card reads (GPUDirect v1).
    Staging,
}

/// Which GPU memory the CPU proxy stages in pinned host memory: see `Context::stage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Staging {
    /// Memory that the device refuses to register.
    #[default]
    Refused,
    /// All GPU memory.
    Always,
    /// None: registration fails if the device refuses it.
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

/// What moves payload out of a buffer, and why: see `Qp::transfer_path`. Displayed as `copied by the CPU: it is host memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPath {
    transport: Transport,
    reason: Cow<'static, str>,
}

impl TransferPath {
    /// A path with its reason.
    pub fn new(transport: Transport, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { transport, reason: reason.into() }
    }

    /// What moves the payload.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The reason.
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
    /// Number of doorbells taken.
    pub doorbells: u64,
    /// Number of send WQEs fetched.
    pub wqes: u64,
    /// Packets sent, including those that a fault plan drops or delays.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Packets that a fault plan dropped, duplicated, reordered or delayed.
    pub packets_faulted: u64,
    /// Packets that arrived again, or out of order.
    pub packets_discarded: u64,
    /// Times a sender went back to an earlier packet.
    pub retransmissions: u64,
    /// Messages whose payload a copy engine moved.
    pub by_reference: u64,
    /// Messages and READs whose payload the CPU read in the peer's process, by cross-memory attach.
    pub by_cma: u64,
    /// Messages that came without payload, as a stream of the peer had put it into the receive.
    pub placed: u64,
    /// References that this side could not follow, so the payload was sent.
    pub references_refused: u64,
    /// Messages that found no receive.
    pub rnr_naks: u64,
    /// Completion queues that overran.
    pub cq_overruns: u64,
    /// Violations of the ring formats, which a card may punish.
    pub violations: u64,
    /// The last violation.
    pub last_violation: Option<&'static str>,
}

impl HcaStats {
    /// Counts and logs a violation of the ring formats.
    pub fn violation(&mut self, what: &'static str) {
        self.violations += 1;
        self.last_violation = Some(what);
        tracing::warn!(what, "violation of the ring formats");
    }
}

/// Health of a queue pair: its first failure, returned by all later calls, and the process that it belongs to.
#[derive(Debug, Default)]
pub struct Health {
    broken: AtomicBool,
    /// Whether a request has completed with an error.
    has_failed_request: AtomicBool,
    /// The process that created the queue pair.
    pub fork_guard: ForkGuard,
    /// Whether the device wants a call for each receive.
    receive_calls: AtomicU32,
    error: SpinLock<Option<Error>>,
}

impl Health {
    /// Records a failure unless there is one. Any other failure replaces a flush.
    pub fn record(&self, error: Error) {
        let flush = |e: &Error| matches!(e, Error::Completion(c) if c.is_flush());
        if matches!(error, Error::Completion(_)) {
            self.has_failed_request.store(true, Ordering::Relaxed);
        }
        let mut slot = self.error.lock();
        if slot.as_ref().is_none_or(|known| flush(known) && !flush(&error)) {
            *slot = Some(error);
        }
        self.broken.store(true, Ordering::Release);
    }

    /// Whether the queue pair has failed, or belongs to another process.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire) || !self.fork_guard.is_here()
    }

    /// Checks that the queue pair has not failed.
    ///
    /// # Errors
    /// The recorded failure; [`Error::OtherProcess`] in a forked child.
    pub fn check(&self) -> Result<()> {
        if !self.is_broken() {
            return Ok(());
        }
        self.fork_guard.check()?;
        self.error.lock().clone().map_or(Ok(()), Err)
    }

    /// Checks that no request has failed. A peer that went when all were complete is no failure of theirs.
    ///
    /// # Errors
    /// As [`Health::check`].
    pub fn check_requests(&self) -> Result<()> {
        let is_complete = || !self.has_failed_request.load(Ordering::Relaxed);
        self.check().or_else(|error| match error {
            Error::PeerGone { .. } if is_complete() => Ok(()),
            error => Err(error),
        })
    }

    /// Device: from now on [`Provider::ring`] is called for posted receives, which nothing else tells a device that flushes them or
    /// passes them on. Receives posted before are in the doorbell record.
    pub fn request_receive_calls(&self) {
        protocol::request_calls(&self.receive_calls);
    }

    /// Device: after a reset, receives wait in the ring for messages.
    pub fn end_receive_calls(&self) {
        self.receive_calls.store(0, Ordering::Relaxed);
    }

    /// Whether to call [`Provider::ring`] for receives that were just posted.
    #[inline]
    pub fn wants_receive_calls(&self) -> bool {
        protocol::wants_calls(&self.receive_calls)
    }

    /// Clears the failure, for a reset.
    pub fn clear(&self) {
        *self.error.lock() = None;
        self.has_failed_request.store(false, Ordering::Relaxed);
        self.broken.store(false, Ordering::Release);
    }
}
