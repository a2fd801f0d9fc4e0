//! Queue pairs: state, health, posting and polling.

mod build;
mod connect;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub use self::build::QpBuilder;
use self::connect::Connect;
use super::completion::Completion;
use super::context::Pd;
use super::cq::{Cq, CqInner};
use super::mr::Mr;
use super::rq::RecvQueue;
use super::sq::SendQueue;
use super::wr::{RecvWr, SendWr, Wc};
use crate::nvtx::DOMAIN;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::{QpLog, Traffic};
use gdsync_device::{Health, Provider, QpAddress, QpState, TransferPath};
use rdma_core_sys::verbs::ibv_qp;

/// A reliable connected queue pair, or one of [datagrams](QpBuilder::datagrams). Clones share it.
///
/// It is destroyed when the last clone is dropped *and* no stream has work of it left.
#[derive(Clone)]
pub struct Qp {
    pub(crate) send: Arc<SendQueue>,
    pub(crate) recv: Arc<RecvQueue>,
}

/// The part of a queue pair that both queues share.
pub(crate) struct QpCore {
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) qpn: u32,
    psn: AtomicU32,
    /// The state, readable without a lock; written only under `modifying`.
    state: AtomicU8,
    modifying: Mutex<()>,
    pub(super) health: Arc<Health>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    defaults: Connect,
    pub(crate) is_datagram: bool,
    pub(crate) log: QpLog,
    pub(super) pd: Pd,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x} ({})", self.qpn(), self.state())
    }
}

impl fmt::Debug for QpCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x}", self.qpn)
    }
}

impl Drop for QpCore {
    fn drop(&mut self) {
        if self.health.fork_guard.may_end(&self.provider) {
            self.provider.destroy_qp(self.qpn);
            self.send_cq.detach(self.qpn);
            self.recv_cq.detach(self.qpn);
        }
    }
}

impl QpCore {
    #[inline]
    fn state(&self) -> QpState {
        QpState(self.state.load(Ordering::Acquire))
    }

    /// Whether this is the process that created it, not a forked child.
    pub(crate) fn is_here(&self) -> bool {
        self.health.fork_guard.is_here()
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.health.is_broken()
    }

    /// Whether requests can be posted to the send queue.
    #[inline]
    pub(crate) fn is_ready_to_send(&self) -> bool {
        !self.health.is_broken() && self.state() == QpState::RTS
    }

    /// Refuses sends on a broken queue pair or in a state other than RTS.
    #[inline]
    pub(crate) fn check_send(&self) -> Result<()> {
        match self.is_ready_to_send() {
            true => Ok(()),
            false => self.check_state("post_send", &[QpState::RTS], "RTS (Qp::connect)"),
        }
    }

    /// Refuses receives on a broken queue pair or in a state without a receive queue.
    pub(crate) fn check_recv(&self) -> Result<()> {
        self.check_state(
            "post_recv",
            &[QpState::INIT, QpState::RTR, QpState::RTS],
            "INIT, RTR or RTS (Qp::init or Qp::connect)",
        )
    }

    fn check_state(&self, what: &'static str, good: &[QpState], needs: &'static str) -> Result<()> {
        self.health.check()?;
        let state = self.state();
        if good.contains(&state) {
            Ok(())
        } else {
            Err(Error::WrongState { qpn: self.qpn, state, what, needs })
        }
    }

    /// Refuses a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.health.fork_guard.check()
    }

    /// Returns the root cause of the first failure, if there was one.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_process()?;
        self.send_cq.reap();
        self.recv_cq.reap();
        self.health.check()
    }

    /// The root cause if a request has failed, with the rank of the peer, for callers that do not know which queue pair it is.
    pub(crate) fn check_requests(&self) -> Result<()> {
        self.check_process()?;
        self.send_cq.reap();
        self.recv_cq.reap();
        self.health.check_requests().map_err(|error| self.name_rank(error))
    }

    /// The error of this queue pair, with the rank of the peer.
    pub(crate) fn name_rank(&self, error: Error) -> Error {
        let Some((rank, traffic)) = self.log.rank() else { return error };
        let reason = match (traffic, error) {
            // Each announcement is valid as long as the rank takes any.
            (Traffic::Announcements, Error::Completion(error)) if error.is_refusal() => Error::GivenUpByPeer,
            (_, error) => error,
        };
        Error::Rank { rank, reason: Arc::new(reason) }
    }

    /// Like [`QpCore::check`], without reaping the completion queues first.
    #[inline]
    pub(crate) fn check_known(&self) -> Result<()> {
        if self.health.is_broken() { self.check() } else { Ok(()) }
    }

    /// The error that has broken it, with the rank.
    pub(crate) fn broken_by(&self) -> Option<Error> {
        self.check().err().map(|error| self.name_rank(error))
    }
}

impl Qp {
    /// The queue pair number, 24 bits.
    pub fn qpn(&self) -> u32 {
        self.core().qpn
    }

    /// The queue pair of libibverbs behind it, on a card that reads the rings itself unless they are in GPU memory. Its state may
    /// be changed only by [`Qp::modify_raw`]; it must not be posted to, polled or destroyed.
    pub fn raw(&self) -> Option<NonNull<ibv_qp>> {
        self.core().provider.raw_qp(self.qpn())
    }

    /// The address that a peer needs to connect. A reset changes it, so that late packets of the old connection are not
    /// accepted by the next.
    pub fn address(&self) -> QpAddress {
        let core = self.core();
        core.provider.address(core.qpn, core.psn.load(Ordering::Acquire))
    }

    /// The state. ERR also when a completion shows that the HCA moved there by itself.
    pub fn state(&self) -> QpState {
        let state = self.core().state();
        if state != QpState::RESET && self.check().is_err() { QpState::ERR } else { state }
    }

    /// The completion queue of sends.
    pub fn send_cq(&self) -> Cq {
        Cq(self.send.end.cq.clone())
    }

    /// The completion queue of receives.
    pub fn recv_cq(&self) -> Cq {
        Cq(self.recv.end.cq.clone())
    }

    pub(crate) fn core(&self) -> &Arc<QpCore> {
        &self.send.end.qp
    }

    /// Checks that the queue pair works. Returns the root cause of the first failure otherwise.
    ///
    /// # Errors
    /// The error that broke the queue pair.
    pub fn check(&self) -> Result<()> {
        self.core().check()
    }

    /// Whether the queue pair is known to be broken, without reaping the completion queues. [`Qp::check`] returns the
    /// reason.
    pub fn is_broken(&self) -> bool {
        self.core().is_broken()
    }

    /// Whether received messages and RDMA WRITEs are written in address order, as the CPU sees it
    /// (`ibv_query_qp_data_in_order`). Only then can payload be polled instead of its completion. `None` if unknown.
    pub fn writes_in_order(&self) -> Option<bool> {
        self.core().provider.writes_in_order(self.qpn())
    }

    /// The path that a message or RDMA WRITE of `len` contiguous bytes of this region would take now, and why. Whether
    /// the peer can fetch is known only after the first message, which is staged then. READ responses take the same
    /// path, except that peer-to-peer ones are staged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a region of another device.
    pub fn transfer_path(&self, mr: &Mr, len: usize) -> Result<TransferPath> {
        let core = self.core();
        if !mr.is_of(&core.provider) {
            return Err(Error::invalid(
                "the region",
                "one of another device",
                "one of the queue pair's device",
            ));
        }
        Ok(core.provider.transfer_path(core.qpn, mr.lkey(), mr.memory(), len))
    }

    /// Whether a stream is known to wait for completions of this queue pair.
    pub fn is_awaited(&self) -> bool {
        [&self.send.end, &self.recv.end].into_iter().any(|end| end.cq.is_awaited())
    }

    /// Whether requests of this queue pair, or waits for them, are in a batch or a capture that no stream has got yet, or were
    /// prepared and not posted.
    pub fn has_unsubmitted(&self) -> bool {
        let mut ends = [&self.send.end, &self.recv.end].into_iter();
        ends.any(|end| !end.tracker.unsubmitted().is_empty() || end.cq.claims().has_prepared())
    }

    /// Number of sends so far, also of prepared ones. Cancelled ones do not count.
    pub fn sends(&self) -> u64 {
        let track = self.send.end.tracker.lock();
        track.posted - track.gaps
    }

    /// Number of cancelled sends that a doorbell has exposed since. They count as requests and send nothing: a layer
    /// that counts messages by the number of their request subtracts them.
    pub fn send_gaps(&self) -> u64 {
        self.send.end.tracker.lock().gaps
    }

    /// Sets the ranks of this process and of the peer, and what goes between them, for the flight recorder and for errors, which
    /// name these then ([`Error::Rank`] the rank alone).
    pub fn name_ranks(&self, own: usize, peer: usize, traffic: Traffic) {
        if let (Ok(own), Ok(peer)) = (own.try_into(), peer.try_into()) {
            self.core().log.name(own, peer, traffic);
        }
    }
}

impl Qp {
    /// Posts sends, all or none, and rings the doorbell. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list; [`Error::WrongState`]; [`Error::QueueFull`];
    /// [`Error::WorkRequest`]; [`Error::Busy`] or [`Error::OutOfOrder`] while requests prepared for a stream are
    /// outstanding; the error that broke the queue pair.
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<Completion> {
        let _range = DOMAIN.range(c"post_send");
        let range = self.send.post(wrs)?;
        match range.is_empty() {
            true => Err(Error::invalid("sends to post", 0, "at least one")),
            false => Ok(self.send.end.clone().completion(range.end - 1)),
        }
    }

    /// Posts receives. Those before the first error stay posted. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list; [`Error::WrongState`]; [`Error::QueueFull`];
    /// [`Error::WorkRequest`]; the error that broke the queue pair.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<Completion> {
        let _range = DOMAIN.range(c"post_recv");
        let last = self.recv.post(wrs)?;
        let last = last.ok_or_else(|| Error::invalid("receives to post", 0, "at least one"))?;
        Ok(self.recv.end.clone().completion(last))
    }

    /// Takes the next send completion, if it has arrived: see [`Cq::poll`](crate::verbs::Cq::poll).
    pub fn poll_send(&self) -> Option<Wc> {
        self.send.end.cq.poll()
    }

    /// Takes the next receive completion, if it has arrived: see [`Cq::poll`](crate::verbs::Cq::poll).
    pub fn poll_recv(&self) -> Option<Wc> {
        self.recv.end.cq.poll()
    }

    /// Blocks until all sends that were posted or submitted to a stream have completed. Does not wait for prepared ones
    /// ([`Qp::prepare_send`] or in a batch).
    ///
    /// # Errors
    /// The root cause of the first failure of the queue pair; [`Error::Deadline`] after `timeout`.
    pub fn wait_all_sends(&self, timeout: Duration) -> Result<()> {
        let end = &self.send.end;
        let last = || end.tracker.posted().saturating_sub(1);
        end.cq.wait_until(
            timeout,
            "waiting for all sends",
            || end.awaits(last()),
            || end.source().describe(last()),
            || {
                end.cq.reap();
                let is_done = || end.tracker.lock().is_idle() || end.qp.check_known().is_err();
                is_done() || (end.qp.provider.progress() && is_done())
            },
        )?;
        self.check()
    }
}
