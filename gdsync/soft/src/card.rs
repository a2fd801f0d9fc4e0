//! The software HCA in the role of a card: rings and doorbell records are memory of the application.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::async_event::AsyncEvents;
use crate::config::SoftHcaConfig;
use crate::network::Network;
use crate::qp::datagram::Datagrams;
use crate::qp::requester::Requester;
use crate::soft::{Role, SoftHca};
use gdsync_device::engine::{DoorbellSource, ProgressEngine as _, QpTrace, Rings};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64};
use gdsync_device::{Access, Gid, HcaStats, MrKeys, Provider as _, QpAttr, QpRequest, QpState};
use gdsync_device::{CqEvent, GpuNudge};
use mlx5_ring::EMPTY;

/// A software HCA in the role of a card.
#[derive(Debug)]
pub struct Card(SoftHca);

/// Description of a queue pair whose rings the application allocated.
#[derive(Clone, Debug)]
pub struct CardQp {
    /// Protection domain number.
    pub pdn: u32,
    /// Completion queue number of sends.
    pub send_cqn: u32,
    /// Completion queue number of receives.
    pub recv_cqn: u32,
    /// Send queue: a power of two of basic blocks.
    pub sq: Memory,
    /// Receive queue: a power of two of entries.
    pub rq: Memory,
    /// Bytes per receive queue entry.
    pub rq_stride: usize,
    /// Doorbell record, 8 bytes.
    pub record: Memory,
    /// Where posted sends are found.
    pub doorbell: CardDoorbell,
    /// User index, written into every CQE of the queue pair (`srqn_uidx`).
    pub uidx: u32,
    /// What its packets are.
    pub transport: CardTransport,
    /// Shared receive queue; `rq` is not used then.
    pub srqn: Option<u32>,
    /// In ERR, flush only sends that a doorbell announced, not all that the doorbell record counts.
    pub flushes_by_doorbell: bool,
}

/// Description of a shared receive queue whose ring the application allocated and linked. A receive memory pool (RMP) is
/// one, too.
#[derive(Clone, Debug)]
pub struct CardSrq {
    /// Receive WQEs, each led by a link to the next one. The first is consumed first.
    pub ring: Memory,
    /// Bytes per WQE.
    pub stride: usize,
    /// Doorbell record: its first word counts the receives posted.
    pub record: Memory,
    /// WQEs are consumed in the order of the ring, a power of two of entries, and their links do not count.
    pub is_cyclic: bool,
}

/// Where a card finds the sends posted to a queue pair.
#[derive(Clone, Debug)]
pub enum CardDoorbell {
    /// In this doorbell register, which only the owner of the queue pair writes to.
    Register(Word64),
    /// In any of these doorbell registers, which other queue pairs may be rung by as well. The last doorbell written to one
    /// must not be of another queue pair while its own waits to be read.
    Shared([Word64; 4]),
    /// In the doorbell record: it is polled from the first transition on, continuously while there is work and at least
    /// once per millisecond otherwise.
    Record,
}

/// The transport of a queue pair.
#[derive(Clone, Debug)]
pub enum CardTransport {
    /// Reliable connection (RC).
    Connection,
    /// Datagrams (UD) of at most `mtu` bytes, 4096 at most. [`Card::set_qkey`] sets the Q_Key, which is 0 before. Payload
    /// lies in memory with a CPU mapping.
    Datagrams {
        /// Maximum payload in bytes.
        mtu: u32,
        /// The addresses of the network.
        network: Arc<dyn Network>,
    },
}

/// Description of a completion queue whose ring the application allocated and initialized.
#[derive(Clone, Debug)]
pub struct CardCq {
    /// A power of two of entries.
    pub ring: Memory,
    /// Bytes per entry: 64, or 128, of which the CQE is the second half.
    pub entry: usize,
    /// Doorbell record, 8 bytes.
    pub record: Memory,
    /// Keeps completing when the consumer counter says that the ring is full.
    pub ignore_overrun: bool,
    /// Called after each completion.
    pub nudges: Option<Arc<dyn GpuNudge>>,
    /// Completion channel: called once each time the program arms the queue by the second word of its record, when a
    /// completion that it asks for has arrived. The card writes what the word holds before the first time.
    pub channel: Option<Arc<dyn GpuNudge>>,
}

impl Card {
    /// Starts a card that reports asynchronous events to `async_events`.
    ///
    /// # Errors
    /// [`Error::Sys`] when a thread, socket or shared memory cannot be created; [`Error::InvalidArgument`] for an
    /// invalid fault plan.
    pub fn start(config: &SoftHcaConfig, async_events: Arc<dyn AsyncEvents>) -> Result<Self> {
        let _blocked = BlockedSignals::all();
        Memory::prepare_checked_copies()?;
        SoftHca::start_with(config, Some(async_events)).map(Self)
    }

    /// GID of the card.
    pub fn gid(&self) -> Gid {
        self.0.gid()
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] after 2^32 protection domains.
    pub fn alloc_pd(&self) -> Result<u32> {
        self.0.alloc_pd()
    }

    /// Registers memory under the virtual address `iova` and returns its key.
    ///
    /// # Errors
    /// [`Error::Verbs`] when [`SoftHcaConfig::max_regions`] are registered.
    pub fn register(&self, pdn: u32, memory: &Memory, iova: u64, access: Access) -> Result<u32> {
        self.0.register(pdn, memory, iova, access)
    }

    /// Replaces what a key stands for, as REREG_MR does. Nothing uses the old memory afterwards.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown key.
    pub fn reregister(&self, key: u32, pdn: u32, memory: &Memory, iova: u64, access: Access) -> Result<()> {
        self.0.replace_region(key, pdn, memory, iova, access)
    }

    /// Deregisters a key.
    pub fn deregister(&self, key: u32) {
        self.0.dereg_mr(MrKeys { lkey: key, rkey: key, is_staged: false });
    }

    /// Creates a completion queue and returns its number.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if it has a channel, and its record no second word.
    pub fn create_cq(&self, cq: CardCq) -> Result<u32> {
        let CardCq { ring, entry, record, ignore_overrun, nudges, channel } = cq;
        let log = (ring.len() / entry).ilog2();
        let event = Arc::<CqEvent>::default();
        if nudges.is_some() {
            event.attend(u64::MAX, nudges.as_ref());
        }
        self.0.shared.with(|core| {
            let cqn = core.cqs.create(ring, record, event, log, ignore_overrun);
            core.cqs.read_by_owner(cqn, false);
            channel.map_or(Ok(()), |channel| core.cqs.set_channel(cqn, channel))?;
            Ok(cqn)
        })
    }

    /// Goes on in another ring, whose CQEs are in the initial state; the last CQE in the old ring says so. The program has
    /// to copy from the old ring what it has not read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown number, or a queue that is overrun.
    pub fn resize_cq(&self, cqn: u32, ring: Memory) -> Result<()> {
        self.0.shared.with(|core| core.cqs.resize(cqn, ring))
    }

    /// Sets whether flush CQEs omit the WQE counter.
    pub fn hide_flush_counters(&self, hide: bool) {
        self.0.shared.with(|core| core.cqs.hide_flush_counters = hide);
    }

    /// Destroys a completion queue.
    pub fn destroy_cq(&self, cqn: u32) {
        self.0.destroy_cq(cqn);
    }

    /// Creates a shared receive queue and returns its number.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a ring without room for one WQE, or a record of less than 4 bytes.
    pub fn create_srq(&self, srq: CardSrq) -> Result<u32> {
        let CardSrq { ring, stride, record, is_cyclic } = srq;
        let srqn = self.0.shared.with(|core| core.srqs.create(ring, stride, record, is_cyclic));
        srqn.ok_or_else(|| {
            Error::invalid("stride of a shared receive queue", stride, "32 to the ring's length")
        })
    }

    /// Asks for [`AsyncEvent::SrqLimitReached`](crate::AsyncEvent::SrqLimitReached) once fewer than `limit` receives are
    /// left; 0 takes that back.
    pub fn set_srq_limit(&self, srqn: u32, limit: u32) {
        self.0.shared.with(|core| core.srqs.set_limit(srqn, limit, &mut core.async_events));
    }

    /// The limit whose event is still to come; 0 for none.
    pub fn srq_limit(&self, srqn: u32) -> u32 {
        self.0.shared.with(|core| core.srqs.limit(srqn))
    }

    /// Destroys a shared receive queue that no queue pair uses.
    pub fn destroy_srq(&self, srqn: u32) {
        self.0.shared.with(|core| core.srqs.destroy(srqn));
    }

    /// Creates a queue pair and returns its number. Rings of less than one entry are replaced.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] after 16384 queue pairs, [`Error::Sys`] without memory.
    pub fn create_qp(&self, qp: CardQp) -> Result<u32> {
        let CardQp { pdn, send_cqn, recv_cqn, record, .. } = qp;
        let rq_stride = qp.rq_stride.max(mlx5_ring::SEGMENT);
        let sq = at_least(qp.sq, mlx5_ring::BB)?;
        let rq = at_least(qp.rq, rq_stride)?;
        let (log_sq, log_rq) = ((sq.len() / mlx5_ring::BB).ilog2(), (rq.len() / rq_stride).ilog2());
        let request = QpRequest {
            pdn,
            send_cqn,
            recv_cqn,
            log_sq,
            log_rq,
            rq_stride,
            max_send_sge: 1,
            max_inline: 0,
            qkey: None,
        };
        let doorbell = match qp.doorbell {
            CardDoorbell::Register(register) => {
                register.store(EMPTY);
                DoorbellSource::Register(register)
            }
            CardDoorbell::Shared(registers) => DoorbellSource::Shared(registers),
            CardDoorbell::Record => DoorbellSource::Record(0),
        };
        // The application numbers its own requests, so they are not traced.
        let qp_trace = QpTrace::default();
        let datagrams = match qp.transport {
            CardTransport::Connection => None,
            CardTransport::Datagrams { mtu, network } => Some(Datagrams::new(mtu, network)),
        };
        let role = Role { uidx: qp.uidx, srqn: qp.srqn, datagrams };
        let named = qp.flushes_by_doorbell.then_some(0);
        let rings = Rings { qpn: 0, request, sq, rq, record, doorbell, qp_trace, named };
        let (qpn, _) = self.0.add_qp(rings, Arc::default(), role)?;
        Ok(qpn)
    }

    /// Applies a transition that the driver has checked. `psn` is the first send PSN, set on the way to RTS. In all states but
    /// RESET the doorbell is polled.
    ///
    /// # Errors
    /// [`Error::Transition`] when the queue pair is in ERR, [`Error::Deadline`] when copies into it do not end in time before a reset,
    /// [`Error::InvalidArgument`] for an unknown QPN or an invalid completion queue.
    pub fn modify_qp(&self, qpn: u32, attr: &QpAttr, psn: Option<u32>, timeout: Duration) -> Result<()> {
        if let Some(psn) = psn {
            self.0.shared.with(|core| {
                core.with_qp(qpn, |qp, _| (qp.psn, qp.req) = (psn, Requester::new(psn)));
            });
        }
        self.0.modify_qp(qpn, attr, timeout)?;
        if attr.state.is_some_and(|state| state != QpState::RESET) {
            self.0.watch(qpn, u64::MAX);
        }
        Ok(())
    }

    /// Sets the Q_Key of a datagram queue pair.
    pub fn set_qkey(&self, qpn: u32, qkey: u32) {
        self.0.shared.with(|core| {
            core.with_qp(qpn, |qp, _| qp.datagrams.iter_mut().for_each(|datagrams| datagrams.set_qkey(qkey)))
        });
    }

    /// State of a queue pair.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown QPN.
    pub fn state(&self, qpn: u32) -> Result<QpState> {
        let state = self.0.shared.with(|core| core.with_qp(qpn, |qp, _| qp.state));
        state.ok_or_else(|| Error::invalid("QPN", qpn, "a queue pair of this HCA"))
    }

    /// Destroys a queue pair. The card no longer uses its memory.
    pub fn destroy_qp(&self, qpn: u32) {
        self.0.destroy_qp(qpn);
    }

    /// Counters of the card.
    pub fn stats(&self) -> HcaStats {
        self.0.stats()
    }
}

/// A ring, or memory of `least` bytes if it has no entry: a queue that the program does not use.
fn at_least(ring: Memory, least: usize) -> Result<Memory> {
    if ring.len() < least { Memory::alloc(least) } else { Ok(ring) }
}

/// Blocks all signals of the calling thread until dropped. Threads that it starts meanwhile have them blocked: signals are
/// for those of the program.
#[derive(Debug)]
pub struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    /// Blocks all.
    pub fn all() -> Self {
        let mut all = MaybeUninit::uninit();
        // SAFETY: the set is valid for writes.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: `sigfillset` has initialized it.
        let all = unsafe { all.assume_init() };
        let mut before = all;
        // SAFETY: both sets are initialized and live.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        Self(before)
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is initialized and live.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests;
