//! Queue pairs: building, connecting, posting, and failing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::address::QpAddress;
use super::attr::{Access, QpAttr, QpState};
use super::carriage::Carriage;
use super::completion::Completion;
use super::cq::{Cq, CqInner};
use super::device::Pd;
use super::end::QueueEnd;
use super::mr::Mr;
use super::placement::{OnGpu, Places};
use super::provider::{Provider, QpParts, QpRequest};
use super::rq::RecvQueue;
use super::sq::{Most, SendQueue};
use super::track::{Health, Tracker};
use super::wr::{RecvWr, SendWr, Wc};
use crate::cuda::Gpu;
use crate::direct::probe;
use crate::error::{Error, Result};
use crate::mlx5;
use crate::nvtx::DOMAIN;
use crate::recorder::{By, Log, QpLog, Queue, Stage};
use crate::stream::Bell;

/// How long a transition may take to reach the peer.
const CONNECT: Duration = Duration::from_secs(10);

/// A reliable connected queue pair. Clones share it.
///
/// It is destroyed when the last clone is gone *and* no stream has work of it left.
#[derive(Clone)]
pub struct Qp {
    pub(crate) send: Arc<SendQueue>,
    pub(crate) recv: Arc<RecvQueue>,
}

/// What both queues need to know of their queue pair.
pub(crate) struct QpCore {
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) qpn: u32,
    psn: AtomicU32,
    /// The state, for a quick look; only changed under `modifying`.
    state: AtomicU8,
    modifying: Mutex<()>,
    health: Arc<Health>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    defaults: Connect,
    pub(crate) log: QpLog,
    _pd: Pd,
}

/// The attributes [`Qp::connect`] uses.
#[derive(Clone, Debug)]
struct Connect {
    access: Access,
    path_mtu: u32,
    /// As many as the device allows, where none are asked for.
    rd_atomic: Option<u8>,
    min_rnr_timer: u8,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
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
        self.provider.destroy_qp(self.qpn);
        self.send_cq.detach(self.qpn);
        self.recv_cq.detach(self.qpn);
    }
}

impl QpCore {
    #[inline(always)]
    fn state(&self) -> QpState {
        QpState(self.state.load(Ordering::Acquire))
    }

    #[inline(always)]
    pub(crate) fn is_broken(&self) -> bool {
        self.health.is_broken()
    }

    /// Whether requests can be posted to the send queue.
    #[inline(always)]
    pub(crate) fn is_ready_to_send(&self) -> bool {
        !self.health.is_broken() && self.state() == QpState::RTS
    }

    /// Refuses sends where they cannot work: broken, or in a state without that queue.
    #[inline(always)]
    pub(crate) fn check_send(&self) -> Result<()> {
        match self.is_ready_to_send() {
            true => Ok(()),
            false => self.check_state("post_send", &[QpState::RTS], "RTS"),
        }
    }

    /// The same for receives.
    pub(crate) fn check_recv(&self) -> Result<()> {
        self.check_state("post_recv", &[QpState::INIT, QpState::RTR, QpState::RTS], "INIT, RTR or RTS")
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

    /// The root cause of the first failure, if there was one.
    pub(crate) fn check(&self) -> Result<()> {
        self.send_cq.reap();
        self.recv_cq.reap();
        self.health.check()
    }

    /// As [`QpCore::check`], of what is known without a look at the completion queues.
    #[inline]
    pub(crate) fn check_known(&self) -> Result<()> {
        if self.health.is_broken() { self.check() } else { Ok(()) }
    }

    /// Puts the queue pair into the error state for a reason of ours.
    pub(crate) fn stop(&self, reason: &Error) {
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
    /// The queue pair number, 24 bits.
    pub fn qpn(&self) -> u32 {
        self.core().qpn
    }

    /// What the other side needs to connect to this queue pair. A reset changes it: late packets of the former
    /// connection must not be taken for those of the next.
    pub fn address(&self) -> QpAddress {
        let core = self.core();
        core.provider.address(core.qpn, core.psn.load(Ordering::Acquire))
    }

    /// The state: ERR also when the HCA has gone there by itself and a completion told so.
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

    /// Changes state and attributes.
    ///
    /// # Errors
    /// [`Error::Transition`] explains a step that is not allowed; [`Error::Peer`] when the other side cannot be reached;
    /// [`Error::Busy`] for RESET while a stream sends on this queue pair or waits for its completions, or a prepared
    /// send or wait is held.
    pub fn modify(&self, attr: &QpAttr) -> Result<()> {
        let core = self.core();
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
        let rtr = QpAttr::to(QpState::RTR).remote(remote).path_mtu(with.path_mtu);
        self.modify(&rtr.max_dest_rd_atomic(rd_atomic).min_rnr_timer(with.min_rnr_timer))?;
        let rts = QpAttr::to(QpState::RTS).timeout(with.timeout).retry_cnt(with.retry_cnt);
        self.modify(&rts.rnr_retry(with.rnr_retry).max_rd_atomic(rd_atomic))
    }

    /// Takes a fresh queue pair to INIT, where receives can be posted before the peer may send.
    ///
    /// # Errors
    /// As [`Qp::modify`].
    pub fn init(&self) -> Result<()> {
        self.modify(&QpAttr::to(QpState::INIT).access(self.core().defaults.access))
    }

    /// Posts sends and rings the doorbell. All or none are posted. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list;
    /// The error that broke the queue pair; [`Error::WrongState`]; [`Error::QueueFull`]; [`Error::WorkRequest`];
    /// [`Error::Busy`] or [`Error::OutOfOrder`] while requests prepared for a stream are outstanding.
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<Completion> {
        Ok(self.send.end.completion(self.send_all(wrs)?))
    }

    /// As [`Qp::post_send`], for who has a [`Completion`] to renew with its index.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn post_send_index(&self, wrs: &[SendWr<'_>]) -> Result<u64> {
        self.send_all(wrs)
    }

    #[inline(always)]
    fn send_all(&self, wrs: &[SendWr<'_>]) -> Result<u64> {
        let _range = DOMAIN.range(c"post_send");
        let range = self.send.post(wrs)?;
        let last = range.end.checked_sub(1).filter(|_| !range.is_empty());
        last.ok_or_else(|| Error::invalid("sends to post", 0, "at least one"))
    }

    /// Posts receives. Those before the first error stay posted. Returns the completion of the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list;
    /// The error that broke the queue pair; [`Error::WrongState`]; [`Error::QueueFull`]; [`Error::WorkRequest`].
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<Completion> {
        Ok(self.recv.end.completion(self.receive_all(wrs)?))
    }

    /// As [`Qp::post_recv`], for who has a [`Completion`] to renew with its index.
    ///
    /// # Errors
    /// As [`Qp::post_recv`].
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn post_recv_index(&self, wrs: &[RecvWr<'_>]) -> Result<u64> {
        self.receive_all(wrs)
    }

    #[inline(always)]
    fn receive_all(&self, wrs: &[RecvWr<'_>]) -> Result<u64> {
        let _range = DOMAIN.range(c"post_recv");
        let last = self.recv.post(wrs)?;
        last.ok_or_else(|| Error::invalid("receives to post", 0, "at least one"))
    }

    /// The completion of a send that was just made.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn send_completion(&self, index: u64) -> Completion {
        self.send.end.completion(index)
    }

    /// The completion of a receive that was just posted.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn recv_completion(&self, index: u64) -> Completion {
        self.recv.end.completion(index)
    }

    /// Takes the next send completion, if it is there: see [`Cq::poll`].
    pub fn poll_send(&self) -> Option<Wc> {
        self.send.end.cq.poll()
    }

    /// Takes the next receive completion, if it is there: see [`Cq::poll`].
    pub fn poll_recv(&self) -> Option<Wc> {
        self.recv.end.cq.poll()
    }

    /// Blocks until all sends are complete that were posted, or that a stream was handed. Those that are only prepared, by
    /// [`Qp::prepare_send`] or in a batch, are not waited for.
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
            || {
                end.cq.reap();
                let is_done = || end.tracker.lock().is_idle() || end.qp.check_known().is_err();
                is_done() || (end.qp.provider.progress() && is_done())
            },
        )?;
        self.check()
    }

    /// Whether the queue pair still works: the root cause of the first failure otherwise.
    ///
    /// # Errors
    /// That failure.
    pub fn check(&self) -> Result<()> {
        self.core().check()
    }

    /// Whether it is known to be broken, without a look at the completion queues: [`Qp::check`] says why.
    pub fn is_broken(&self) -> bool {
        self.core().is_broken()
    }

    /// Whether messages and RDMA WRITEs that it receives are written in order of their addresses, as the CPU sees it
    /// (`ibv_query_qp_data_in_order`). Only then can payload be polled in place of its completion. `None` where the
    /// device does not tell.
    pub fn writes_in_order(&self) -> Option<bool> {
        self.core().provider.writes_in_order(self.qpn())
    }

    /// How a message or RDMA WRITE of `len` bytes in one piece of this region would leave by this queue pair now, and why. A peer
    /// that cannot fetch says so at the first message, which is staged then. What is read from here by a peer leaves as it would,
    /// but for peer to peer: that is staged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a region of another device.
    pub fn carriage(&self, mr: &Mr, len: usize) -> Result<Carriage> {
        let core = self.core();
        if !mr.is_of(&core.provider) {
            return Err(Error::invalid(
                "the region",
                "one of another device",
                "one of the queue pair's device",
            ));
        }
        Ok(core.provider.carriage(core.qpn, mr.lkey(), mr.memory(), len))
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

    /// Whether a stream waits for completions of it, as far as is known.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn is_awaited(&self) -> bool {
        [&self.send.end, &self.recv.end].into_iter().any(|end| end.cq.is_awaited())
    }

    /// Sends that were taken back and that a doorbell has passed over since: they have places in the queue, and do nothing.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn send_gaps(&self) -> u64 {
        self.send.end.tracker.lock().gaps
    }

    /// Has the flight recorder name the ranks of this process and of the one at the other end.
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn name_ranks(&self, own: usize, peer: usize) {
        if let (Ok(own), Ok(peer)) = (own.try_into(), peer.try_into()) {
            self.core().log.name(own, peer);
        }
    }
}

/// Builds a [`Qp`]. Nothing the caller passes is changed.
#[derive(Clone, Debug)]
#[must_use]
pub struct QpBuilder {
    pd: Pd,
    send_cq: Option<Cq>,
    recv_cq: Option<Cq>,
    max_send_wr: usize,
    max_recv_wr: usize,
    max_send_sge: usize,
    max_recv_sge: u32,
    max_inline: usize,
    places: Places,
    connect: Connect,
}

macro_rules! builder {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $($field:ident).+,)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, value: $type) -> Self {
            self.$($field).+ = value;
            self
        }
    )*};
}

impl QpBuilder {
    pub(crate) fn new(pd: Pd) -> Self {
        let connect = Connect {
            access: Access::all(),
            path_mtu: 4096,
            rd_atomic: None,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 6,
        };
        Self {
            pd,
            send_cq: None,
            recv_cq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 64,
            places: Places::default(),
            connect,
        }
    }

    builder! {
        /// Sends that can be outstanding, 1 to 32768 (default 128).
        max_send_wr: usize => max_send_wr,
        /// Receives that can be outstanding, 1 to 32768 (default 128).
        max_recv_wr: usize => max_recv_wr,
        /// SGEs of a send, 1 to 30 (default 1). More fit if the queue is not full.
        max_send_sge: usize => max_send_sge,
        /// SGEs of a receive, 1 to 32 (default 1).
        max_recv_sge: u32 => max_recv_sge,
        /// Bytes of inline data, 0 to 512 (default 64).
        max_inline: usize => max_inline,
        /// What peers may do (default everything a region allows).
        access: Access => connect.access,
        /// Path MTU in bytes for [`Qp::connect`], at most (default 4096): see [`QpAttr::path_mtu`].
        path_mtu: u32 => connect.path_mtu,
        /// RNR timer code (default 12: 0.64 ms).
        min_rnr_timer: u8 => connect.min_rnr_timer,
        /// Acknowledge timeout, `4.096 us * 2^timeout` (default 14: 67 ms).
        timeout: u8 => connect.timeout,
        /// Retries after a timeout (default 7).
        retry_cnt: u8 => connect.retry_cnt,
        /// Retries after "receiver not ready", 7 for ever (default 6). Not on iWARP: a message without a receive ends the connection.
        rnr_retry: u8 => connect.rnr_retry,
    }

    /// READs and atomics outstanding each way, 0 to 16 (default 16, or what the device allows).
    pub fn rd_atomic(mut self, value: u8) -> Self {
        self.connect.rd_atomic = Some(value);
        self
    }

    /// Completes sends on a queue shared with others. Streams cannot wait on a shared queue.
    pub fn send_cq(mut self, cq: &Cq) -> Self {
        self.send_cq = Some(cq.clone());
        self
    }

    /// Completes receives on a queue shared with others. Streams cannot wait on a shared queue.
    pub fn recv_cq(mut self, cq: &Cq) -> Self {
        self.recv_cq = Some(cq.clone());
        self
    }

    /// Drives the queue pair from streams of this GPU, with `what` in its memory. Without this it can be driven too, but then
    /// its host memory is registered with CUDA by the first submission instead of here.
    pub fn on_gpu(mut self, gpu: &Gpu, what: OnGpu) -> Self {
        self.places = Places { gpu: Some(gpu.clone()), on_gpu: what };
        self
    }

    /// Creates the queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the value out of range; [`Error::Sys`] when memory is short; [`Error::Verbs`] and
    /// [`Error::Device`] where a card refuses, as it may queues in GPU memory: see [`OnGpu`].
    pub fn build(self) -> Result<Qp> {
        let check = |what, value: usize, range: std::ops::RangeInclusive<usize>, expected| {
            if range.contains(&value) { Ok(()) } else { Err(Error::invalid(what, value, expected)) }
        };
        check("max_send_wr", self.max_send_wr, 1..=32768, "1 to 32768")?;
        check("max_recv_wr", self.max_recv_wr, 1..=32768, "1 to 32768")?;
        check("max_send_sge", self.max_send_sge, 1..=30, "1 to 30")?;
        check("max_recv_sge", self.max_recv_sge as usize, 1..=32, "1 to 32")?;
        check("max_inline", self.max_inline, 0..=512, "0 to 512")?;

        // The largest request of each kind: control, remote address, then SGEs or inline data.
        let wqe = 32 + (16 * self.max_send_sge).max((4 + self.max_inline).next_multiple_of(16));
        let blocks = self.max_send_wr * wqe.div_ceil(mlx5::BB);
        let log_sq = blocks.next_power_of_two().trailing_zeros();
        if log_sq > 15 {
            return Err(Error::invalid(
                "send queue",
                blocks,
                "at most 32768 blocks of 64 bytes: fewer or smaller requests",
            ));
        }
        let log_rq = self.max_recv_wr.next_power_of_two().trailing_zeros();
        let rq_stride = mlx5::recv_stride(self.max_recv_sge);
        let provider = self.pd.provider().clone();
        let places = &self.places;
        if let Some(gpu) = &places.gpu {
            provider.admit(gpu, &mut || probe(&self.pd, gpu))?;
        }
        let recorder = Log::open()?.on(provider.gid());
        let own = |cq: Option<Cq>, log: u32, ring| {
            let create = || Cq::create(provider.clone(), 1 << log, ring, places, recorder.clone());
            cq.map_or_else(create, Ok)
        };
        let send_cq = own(self.send_cq, log_sq, OnGpu::SEND_CQ)?.0;
        let recv_cq = own(self.recv_cq, log_rq, OnGpu::RECV_CQ)?.0;
        let request = QpRequest {
            pdn: self.pd.pdn(),
            send_cqn: send_cq.cqn(),
            recv_cqn: recv_cq.cqn(),
            log_sq,
            log_rq,
            rq_stride,
            max_send_sge: self.max_send_sge,
            max_inline: self.max_inline,
        };
        let QpParts { qpn, psn, sq, rq, record, doorbell, health } = provider.create_qp(&request, places)?;
        let found = (recorder.clone(), provider.reads_by_itself());
        let log = QpLog::new(recorder, qpn, provider.address(qpn, psn).gid);
        let core = Arc::new(QpCore {
            provider,
            qpn,
            psn: AtomicU32::new(psn),
            state: AtomicU8::new(QpState::RESET.0),
            modifying: Mutex::new(()),
            health: health.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            defaults: self.connect,
            log,
            _pd: self.pd,
        });
        let send_tracker = Tracker::new(qpn, true, 1 << log_sq, health.clone(), found.clone());
        let recv_tracker = Tracker::new(qpn, false, 1 << log_rq, health, found);
        send_cq.attach(&send_tracker);
        recv_cq.attach(&recv_tracker);
        let record_may_lag = core.provider.record_may_lag();
        let (record_word, found) = (record.word32(mlx5::QP_DBREC_SEND)?, Default::default());
        let bell = Arc::new(Bell { record: record_word, doorbell, record_may_lag, found });
        let end = QueueEnd::new(core.clone(), send_cq, send_tracker, Some(bell.clone()));
        let most = Most { sges: self.max_send_sge, inline: self.max_inline };
        let send = SendQueue::new(end, sq, bell, most);
        let end = QueueEnd::new(core, recv_cq, recv_tracker, None);
        let recv = RecvQueue::new(end, rq, rq_stride, &record)?;
        Ok(Qp { send, recv })
    }
}
