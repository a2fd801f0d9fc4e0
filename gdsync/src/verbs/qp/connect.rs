//! State transitions of queue pairs.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Qp, QpCore};
use crate::verbs::context::wait_until_gone;
use crate::verbs::cq::Claims;
use crate::verbs::end::QueueEnd;
use crate::verbs::track::Track;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::{By, Queue, Stage};
use gdsync_device::{Access, QpAddress, QpAttr, QpState};
use gdsync_shm::reset;
use rdma_core_sys::Verbs;
use rdma_core_sys::verbs::{ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state};

/// Time limit for a transition that contacts the peer.
const CONNECT: Duration = Duration::from_secs(10);

/// The attributes for [`Qp::connect`].
#[derive(Clone, Debug)]
pub(super) struct Connect {
    /// `None`: all that the device supports.
    pub(super) access: Option<Access>,
    pub(super) path_mtu: u32,
    /// `None`: the device limit.
    pub(super) rd_atomic: Option<u8>,
    pub(super) min_rnr_timer: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
}

impl Default for Connect {
    fn default() -> Self {
        Self {
            access: None,
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
    /// The attributes for RTR, without the peer's address.
    fn rtr(&self, rd_atomic: u8) -> QpAttr {
        let rtr = QpAttr::to(QpState::RTR).path_mtu(self.path_mtu);
        rtr.max_dest_rd_atomic(rd_atomic).min_rnr_timer(self.min_rnr_timer)
    }

    fn rts(&self, rd_atomic: u8) -> QpAttr {
        let rts = QpAttr::to(QpState::RTS).timeout(self.timeout).retry_cnt(self.retry_cnt);
        rts.rnr_retry(self.rnr_retry).max_rd_atomic(rd_atomic)
    }

    /// Refuses values that [`Qp::connect`] would fail with for any peer.
    pub(super) fn check(&self) -> Result<()> {
        let rd_atomic = self.rd_atomic.unwrap_or(0);
        self.rtr(rd_atomic).check_values()?;
        self.rts(rd_atomic).check_values()
    }
}

impl QpCore {
    /// Changes the device's queue pair.
    fn modify(&self, attr: &QpAttr) -> Result<()> {
        let psn = self.provider.modify_qp(self.qpn, attr, CONNECT)?;
        self.psn.store(psn, Ordering::Release);
        Ok(())
    }

    /// Moves the queue pair to ERR because of `reason`.
    pub(crate) fn stop(&self, reason: &Error) {
        if !self.health.fork_guard.is_here() {
            return;
        }
        // An earlier failure that is not yet reaped is the root cause.
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
    /// [`Error::Transition`] for a forbidden transition; [`Error::Peer`] when the peer cannot be reached;
    /// [`Error::Busy`] for RESET while a stream sends on this queue pair or waits for its completions, or a prepared
    /// send or wait is held.
    pub fn modify(&self, attr: &QpAttr) -> Result<()> {
        let core = self.core();
        core.health.fork_guard.check()?;
        // Held until the reset is complete, so that a later transition cannot enable posting in between.
        let modifying = core.modifying.lock();
        let from = if core.health.check().is_err() { QpState::ERR } else { core.state() };
        let to = attr.check(core.qpn, from, core.is_datagram)?;
        if to == QpState::RESET {
            self.reset(from, attr)?;
        } else {
            core.modify(attr)?;
            core.state.store(to.0, Ordering::Release);
        }
        drop(modifying);
        attr.remote.into_iter().for_each(|remote| core.log.connected(remote));
        Ok(())
    }

    /// Changes attributes of the queue pair of libibverbs behind it (see [`Qp::raw`]) as `ibv_modify_qp`, for programs that
    /// bring their own address vectors. To RESET as [`Qp::modify`] does.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is none; [`Error::Verbs`] if the device refuses; those of [`Qp::modify`].
    pub fn modify_raw(&self, attr: &ibv_qp_attr, mask: ibv_qp_attr_mask) -> Result<()> {
        let core = self.core();
        core.health.fork_guard.check()?;
        let raw = self.raw().ok_or(Error::Unsupported {
            what: "ibv_modify_qp",
            by: "a queue pair that libibverbs has not made",
            fix: "use Qp::modify",
        })?;
        let to = mask.contains(ibv_qp_attr_mask::IBV_QP_STATE).then_some(attr.qp_state);
        if to == Some(ibv_qp_state::IBV_QPS_RESET) {
            return self.modify(&QpAttr::to(QpState::RESET));
        }
        let _modifying = core.modifying.lock();
        let mut attr = *attr;
        // SAFETY: the queue pair lives until `core` is dropped.
        let errno = unsafe { Verbs::load()?.ibv_modify_qp(raw.as_ptr(), &raw mut attr, mask) };
        if errno != 0 {
            let advice = "compare the attributes with the manual page of ibv_modify_qp for this transition";
            return Err(Error::Verbs {
                call: "ibv_modify_qp",
                subject: format!("{self:?}"),
                source: Arc::new(std::io::Error::from_raw_os_error(errno)),
                advice: advice.into(),
            });
        }
        if let Some(to) = to.and_then(|to| u8::try_from(to.0).ok()) {
            core.state.store(to, Ordering::Release);
        }
        Ok(())
    }

    /// Resets the device's queue pair and discards posted requests. Posting and claiming are refused meanwhile.
    fn reset(&self, from: QpState, attr: &QpAttr) -> Result<()> {
        let core = self.core();
        let before = core.state();
        self.close()?;
        let reset = || {
            let [sends, receives] = [self.send.has_unexposed(), self.recv.has_unexposed()];
            if from == QpState::ERR && (sends || receives) {
                // The device may not have noticed the failure.
                core.modify(&QpAttr::to(QpState::ERR))?;
                sends.then(|| self.send.expose_abandoned());
                receives.then(|| self.recv.expose_abandoned());
            }
            if from == QpState::ERR && core.provider.reads_by_itself() {
                core.send_cq.wait_flushed()?;
                core.recv_cq.wait_flushed()?;
            }
            core.modify(attr)
        };
        if let Err(error) = reset() {
            core.state.store(before.0, Ordering::Release);
            for end in [&self.send.end, &self.recv.end] {
                end.cq.claims().close(false);
            }
            return Err(error);
        }
        self.send.reset();
        self.recv.reset();
        core.health.clear();
        Ok(())
    }

    /// Moves to RESET for posting and claiming threads, unless a stream or a prepared send or wait holds requests: see
    /// [`gdsync_shm::reset`].
    fn close(&self) -> Result<()> {
        let (core, send, recv) = (self.core(), &self.send.end, &self.recv.end);
        // In address order: another queue pair may use the two in swapped roles.
        let claims = match Arc::as_ptr(&send.cq).cmp(&Arc::as_ptr(&recv.cq)) {
            Less => (send.cq.claims(), Some(recv.cq.claims())),
            Equal => (send.cq.claims(), None),
            Greater => {
                let of_recv = recv.cq.claims();
                (send.cq.claims(), Some(of_recv))
            }
        };
        let locked = (claims, send.tracker.lock(), recv.tracker.lock());
        let find = |end: &QueueEnd, claims: &Claims<'_>, track: &Track| {
            let (queue, owner) = (end.tracker.name(), end.reset_blocker(claims, track)?.into());
            Some(Error::Busy { queue, qpn: core.qpn, owner })
        };
        reset::close(
            locked,
            |((claims, others), sends, receives)| {
                find(send, claims, sends).or_else(|| find(recv, others.as_ref().unwrap_or(claims), receives))
            },
            |((claims, others), ..)| {
                claims.close(true);
                others.iter_mut().for_each(|claims| claims.close(true));
                core.state.store(QpState::RESET.0, Ordering::Release);
            },
        )
    }

    /// Moves a fresh queue pair through INIT and RTR to RTS with the builder's attributes. Does not wait for the peer.
    ///
    /// # Errors
    /// [`Error::Transition`], [`Error::Peer`] or [`Error::Busy`], see [`Qp::modify`].
    pub fn connect(&self, remote: QpAddress) -> Result<()> {
        if self.state() == QpState::RESET {
            self.init()?;
        }
        let with = &self.core().defaults;
        let rd_atomic = with.rd_atomic.unwrap_or_else(|| self.core().provider.rd_atomic());
        self.modify(&with.rtr(rd_atomic).remote(remote))?;
        self.modify(&with.rts(rd_atomic))
    }

    /// Moves a fresh [datagram](super::QpBuilder::datagrams) queue pair through INIT and RTR to RTS.
    ///
    /// # Errors
    /// [`Error::Transition`] for a queue pair of connections, or one in another state.
    pub fn activate(&self) -> Result<()> {
        [QpState::INIT, QpState::RTR, QpState::RTS]
            .into_iter()
            .try_for_each(|to| self.modify(&QpAttr::to(to)))
    }

    /// Moves a fresh queue pair to INIT, where receives can be posted before the peer sends.
    ///
    /// # Errors
    /// [`Error::Transition`], [`Error::Peer`] or [`Error::Busy`], see [`Qp::modify`].
    pub fn init(&self) -> Result<()> {
        let access = self.core().defaults.access.unwrap_or_else(|| self.core().provider.rights());
        self.modify(&QpAttr::to(QpState::INIT).access(access))
    }

    /// Moves the queue pair to ERR: everything outstanding completes with a flush error.
    ///
    /// # Errors
    /// [`Error::Transition`] from the device.
    pub fn abort(&self) -> Result<()> {
        self.modify(&QpAttr::to(QpState::ERR))
    }

    /// Stops the queue pair, drops this handle, and blocks until the queue pair is destroyed: until no stream has work of it
    /// left. All other clones must be gone.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`; it is then destroyed when the stream has passed its work.
    pub fn destroy(self, timeout: Duration) -> Result<()> {
        let core = Arc::downgrade(self.core());
        if self.core().state() != QpState::RESET {
            self.stop(&Error::GivenUp);
        }
        drop(self);
        wait_until_gone(timeout, "destroying a queue pair", || core.strong_count() == 0)
    }

    /// Like [`Qp::abort`], for an external reason such as a lost peer. Outstanding requests, streams that wait for them
    /// and all later calls fail with [`Error::QpStopped`], which holds the reason, unless the queue pair failed before.
    pub fn stop(&self, reason: &Error) {
        self.core().stop(reason);
    }
}
