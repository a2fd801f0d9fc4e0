//! The software HCA as a card to the stand-in of rdma-core's libraries: rings and records are memory of its application.

use std::sync::Arc;
use std::time::Duration;

use super::async_event::AsyncEvents;
use super::config::SoftHcaConfig;
use super::soft::SoftHca;
use crate::qp::requester::Requester;
use gdsync_device::engine::{ProgressEngine as _, QpTrace, Rings};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64};
use gdsync_device::{Access, Gid, HcaStats, MrKeys, Provider as _, QpAttr, QpRequest, QpState};
use gdsync_device::{CqEvent, GpuNudge};
use mlx5_ring::{CQE_SIZE, EMPTY};

/// A card.
#[derive(Debug)]
pub struct Card(SoftHca);

/// A queue pair in the memory of an application.
#[derive(Clone, Debug)]
pub struct CardQp {
    /// Its protection domain.
    pub pdn: u32,
    /// The completion queue of sends.
    pub send_cqn: u32,
    /// The completion queue of receives.
    pub recv_cqn: u32,
    /// The send queue: a power of two of basic blocks.
    pub sq: Memory,
    /// The receive queue: a power of two of entries.
    pub rq: Memory,
    /// Bytes of an entry of the receive queue.
    pub rq_stride: usize,
    /// The doorbell record, 8 bytes.
    pub record: Memory,
    /// The doorbell. Nobody else writes there.
    pub doorbell: Word64,
    /// In ERR the card flushes only the sends that a doorbell named, and not those that the record tells.
    pub flushes_by_doorbell: bool,
}

impl Card {
    /// Starts a card that tells `alarms` of asynchronous events.
    ///
    /// # Errors
    /// As [`Context::soft`](crate::verbs::Context::soft).
    pub fn start(config: &SoftHcaConfig, async_events: Arc<dyn AsyncEvents>) -> Result<Self> {
        SoftHca::start_with(config, Some(async_events)).map(Self)
    }

    /// Its address.
    pub fn gid(&self) -> Gid {
        self.0.gid()
    }

    /// A protection domain.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are too many.
    pub fn alloc_pd(&self) -> Result<u32> {
        self.0.alloc_pd()
    }

    /// Registers memory, whose first byte work requests call `iova`. Returns its key.
    ///
    /// # Errors
    /// None so far.
    pub fn register(&self, pdn: u32, memory: &Memory, iova: u64, access: Access) -> Result<u32> {
        let keys = self.0.reg_mr(pdn, &memory.called(iova), access)?;
        Ok(keys.lkey)
    }

    /// Ends a registration.
    pub fn deregister(&self, key: u32) {
        self.0.dereg_mr(MrKeys { lkey: key, rkey: key, is_staged: false });
    }

    /// Takes a completion queue into service: a power of two of CQEs, in the state that the application gave them. `kicks`
    /// is called after each completion. Returns its number.
    pub fn create_cq(
        &self,
        ring: Memory,
        record: Memory,
        ignore_overrun: bool,
        nudges: Option<Arc<dyn GpuNudge>>,
    ) -> u32 {
        let log = (ring.len() / CQE_SIZE).ilog2();
        let event = Arc::<CqEvent>::default();
        if nudges.is_some() {
            event.attend(u64::MAX, nudges.as_ref());
        }
        self.0.shared.with(|core| {
            let cqn = core.cqs.create(ring, record, event, log, ignore_overrun);
            core.cqs.read_by_owner(cqn, false);
            cqn
        })
    }

    /// The application reads this completion queue itself, and may look at the owner bit alone: no CQE may look written
    /// before it is.
    pub fn read_by_owner(&self, cqn: u32) {
        self.0.shared.with(|core| core.cqs.read_by_owner(cqn, true));
    }

    /// Whether the completions of flushed requests do not say of which request they are.
    pub fn hide_flush_counters(&self, hide: bool) {
        self.0.shared.with(|core| core.cqs.hide_flush_counters = hide);
    }

    /// Looks at the doorbell of a queue pair, which was just written.
    pub fn ring(&self, qpn: u32) {
        self.0.ring(qpn);
    }

    /// Ends a completion queue.
    pub fn destroy_cq(&self, cqn: u32) {
        self.0.destroy_cq(cqn);
    }

    /// Takes a queue pair into service. Returns its number.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are too many.
    pub fn create_qp(&self, qp: CardQp) -> Result<u32> {
        let CardQp { pdn, send_cqn, recv_cqn, sq, rq, rq_stride, record, doorbell, flushes_by_doorbell } = qp;
        let (log_sq, log_rq) = ((sq.len() / mlx5_ring::BB).ilog2(), (rq.len() / rq_stride).ilog2());
        let request =
            QpRequest { pdn, send_cqn, recv_cqn, log_sq, log_rq, rq_stride, max_send_sge: 1, max_inline: 0 };
        doorbell.store(EMPTY);
        // Its numbers are those of another owner.
        let qp_trace = QpTrace::default();
        let named = flushes_by_doorbell.then_some(0);
        let rings = Rings { qpn: 0, request, sq, rq, record, doorbell, qp_trace, named };
        let (qpn, _) = self.0.add_qp(rings, Arc::default())?;
        Ok(qpn)
    }

    /// Changes a queue pair, as a driver does that has checked the step; `psn` is the first packet sequence number of its
    /// sends, when it becomes ready to send. From then on its doorbell is looked at.
    ///
    /// # Errors
    /// When the card has put it into ERR meanwhile, or finds a completion queue that it cannot use, or not the peer.
    pub fn modify_qp(&self, qpn: u32, attr: &QpAttr, psn: Option<u32>, timeout: Duration) -> Result<()> {
        if let Some(psn) = psn {
            self.0.shared.with(|core| {
                core.with_qp(qpn, |qp, _| (qp.psn, qp.req) = (psn, Requester::new(psn)));
            });
        }
        self.0.modify_qp(qpn, attr, timeout)?;
        if attr.state == Some(QpState::RTS) {
            self.0.watch(qpn, u64::MAX);
        }
        Ok(())
    }

    /// The state of a queue pair, as the card knows it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number that no queue pair has.
    pub fn state(&self, qpn: u32) -> Result<QpState> {
        let state = self.0.shared.with(|core| core.with_qp(qpn, |qp, _| qp.state));
        state.ok_or_else(|| Error::invalid("QPN", qpn, "a queue pair of this HCA"))
    }

    /// Ends a queue pair. Its memory is the application's again.
    pub fn destroy_qp(&self, qpn: u32) {
        self.0.destroy_qp(qpn);
    }

    /// What it has counted.
    pub fn stats(&self) -> HcaStats {
        self.0.stats()
    }
}
