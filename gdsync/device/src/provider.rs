//! What a device backend gives to the verbs layer: queues in memory, keys, and state changes.
//!
//! Everything above this trait is the same for every device; everything below only makes rings and consumes them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::address::QpAddress;
use super::attr::{Access, MAX_RD_ATOMIC, QpAttr};
use super::health::Health;
use super::placement::{OnGpu, Places};
use super::transfer_path::{Staging, TransferPath};
use crate::cuda::Gpu;
use crate::error::Result;
use crate::memory::{Memory, Word64};
use crate::{CqEvent, DoorbellWatch};
use crate::{FaultPlan, Gid, HcaStats};

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
