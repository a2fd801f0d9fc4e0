//! How a queue pair gets from state to state.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Qp, QpCore};
use crate::error::{Error, Result};
use crate::recorder::{By, Queue, Stage};
use crate::verbs::address::QpAddress;
use crate::verbs::attr::{Access, QpAttr, QpState};

/// How long a transition may take to reach the peer.
const CONNECT: Duration = Duration::from_secs(10);

/// The attributes [`Qp::connect`] uses.
#[derive(Clone, Debug)]
pub(super) struct Connect {
    pub(super) access: Access,
    pub(super) path_mtu: u32,
    /// As many as the device allows, where none are asked for.
    pub(super) rd_atomic: Option<u8>,
    pub(super) min_rnr_timer: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
}

impl Default for Connect {
    fn default() -> Self {
        Self {
            access: Access::all(),
            path_mtu: 4096,
            rd_atomic: None,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 6,
        }
    }
}

impl Connect {
    /// The step to RTR, but for the other side.
    fn rtr(&self, rd_atomic: u8) -> QpAttr {
        let rtr = QpAttr::to(QpState::RTR).path_mtu(self.path_mtu);
        rtr.max_dest_rd_atomic(rd_atomic).min_rnr_timer(self.min_rnr_timer)
    }

    fn rts(&self, rd_atomic: u8) -> QpAttr {
        let rts = QpAttr::to(QpState::RTS).timeout(self.timeout).retry_cnt(self.retry_cnt);
        rts.rnr_retry(self.rnr_retry).max_rd_atomic(rd_atomic)
    }

    /// Refuses what [`Qp::connect`] would be refused for with any peer.
    pub(super) fn check(&self) -> Result<()> {
        let rd_atomic = self.rd_atomic.unwrap_or(0);
        self.rtr(rd_atomic).check_values()?;
        self.rts(rd_atomic).check_values()
    }
}

impl QpCore {
    /// Puts the queue pair into the error state for a reason of ours.
    pub(crate) fn stop(&self, reason: &Error) {
        if !self.health.home.is_here() {
            return;
        }
        // A failure that arrived before, but that nobody has looked at, is the root cause.
        self.send_cq.reap();
        self.recv_cq.reap();
        self.health.record(Error::QpStopped { qpn: self.qpn, reason: Arc::new(reason.clone()) });
        self.log.note(Stage::Stopped, Queue::None, By::Cpu, 0, 0);
        let _modifying = self.modifying.lock();
        if matches!(self.state(), QpState::RESET | QpState::ERR) {
            return;
        }
        match self.provider.modify_qp(self.qpn, &QpAttr::to(QpState::ERR), CONNECT) {
            Ok(_) => self.state.store(QpState::ERR.0, Ordering::Release),
            Err(error) => tracing::error!(qpn = self.qpn, %error, "queue pair could not be stopped"),
        }
    }
}

impl Qp {
    /// Changes state and attributes.
    ///
    /// # Errors
    /// [`Error::Transition`] explains a step that is not allowed; [`Error::Peer`] when the other side cannot be reached;
    /// [`Error::Busy`] for RESET while a stream sends on this queue pair or waits for its completions, or a prepared
    /// send or wait is held.
    pub fn modify(&self, attr: &QpAttr) -> Result<()> {
        let core = self.core();
        core.health.home.check()?;
        if attr.state == Some(QpState::RESET) {
            for end in [&self.send.end, &self.recv.end] {
                if let Some(owner) = end.owner() {
                    let queue = end.tracker.name();
                    return Err(Error::Busy { queue, qpn: core.qpn, owner: owner.into() });
                }
            }
        }
        let modifying = core.modifying.lock();
        let from = if core.health.check().is_err() { QpState::ERR } else { core.state() };
        let to = attr.check(core.qpn, from)?;
        if (from, to) == (QpState::ERR, QpState::RESET) && self.send.has_hidden() {
            // The device need not have found the failure by itself.
            core.provider.modify_qp(core.qpn, &QpAttr::to(QpState::ERR), CONNECT)?;
            self.send.show_hidden();
        }
        if (from, to) == (QpState::ERR, QpState::RESET) && core.provider.reads_by_itself() {
            core.send_cq.settle()?;
            core.recv_cq.settle()?;
        }
        let psn = core.provider.modify_qp(core.qpn, attr, CONNECT)?;
        core.psn.store(psn, Ordering::Release);
        core.state.store(to.0, Ordering::Release);
        drop(modifying);
        attr.remote.into_iter().for_each(|remote| core.log.connected(remote));
        if to == QpState::RESET {
            self.send.reset();
            self.recv.reset();
            core.health.clear();
        }
        Ok(())
    }

    /// Takes a fresh queue pair through INIT and RTR to RTS with the builder's attributes. Waits for nothing that the peer does; on
    /// iWARP, where both sides have 9 s to connect to each other, sends wait instead, and fail with what went wrong.
    ///
    /// # Errors
    /// As [`Qp::modify`].
    pub fn connect(&self, remote: QpAddress) -> Result<()> {
        if self.state() == QpState::RESET {
            self.init()?;
        }
        let with = &self.core().defaults;
        let rd_atomic = with.rd_atomic.unwrap_or_else(|| self.core().provider.rd_atomic());
        self.modify(&with.rtr(rd_atomic).remote(remote))?;
        self.modify(&with.rts(rd_atomic))
    }

    /// Takes a fresh queue pair to INIT, where receives can be posted before the peer may send.
    ///
    /// # Errors
    /// As [`Qp::modify`].
    pub fn init(&self) -> Result<()> {
        self.modify(&QpAttr::to(QpState::INIT).access(self.core().defaults.access))
    }

    /// Moves the queue pair to ERR: everything outstanding completes with a flush error.
    ///
    /// # Errors
    /// [`Error::Transition`] from the device.
    pub fn abort(&self) -> Result<()> {
        self.modify(&QpAttr::to(QpState::ERR))
    }

    /// As [`Qp::abort`], for a reason that the queue pair cannot know, such as a peer that was lost: what is outstanding,
    /// the streams that wait for it and all later calls end with [`Error::QpStopped`], which has the reason, unless the queue
    /// pair failed before.
    pub fn stop(&self, reason: &Error) {
        self.core().stop(reason);
    }
}
