//! A queue pair of the software HCA: rings, state and doorbell.

pub(crate) mod datagram;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod staging;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::keys::Keys;
use super::links::Links;
use crate::async_event::{AsyncEvent, AsyncEventQueue};
use crate::config::CmaPolicy;
use crate::keys::PendingFlush;
use crate::peers::{Peers, Reach};
use crate::srq::Srqs;
use crate::wire::Peer;
use gdsync_device::copy_engine::{CopyEngine, Ticket};
use gdsync_device::engine::{Cqs, Rings};
use gdsync_device::error::{Error, Result};
use gdsync_device::{Access, Faults, HcaStats, Health, QpAddress, QpAttr, QpState, random_psn};
use mlx5_ring::{Cqe, CqeOpcode, Opcode, Syndrome};

use datagram::Datagrams;
use requester::Requester;
use responder::Responder;
use staging::{ReceiveStaging, Stage};

/// Index of no link: that of a card's queue pair which is not linked yet.
pub(crate) const UNLINKED: usize = usize::MAX;

/// Bytes of a cross-memory attach per step: 20 to 50 us under the HCA's lock.
const PIECE: usize = 512 << 10;

/// State shared by all queue pairs, borrowed while one of them works.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) keys: &'a Keys,
    pub(crate) cqs: &'a mut Cqs,
    pub(crate) srqs: &'a mut Srqs,
    pub(crate) peers: &'a mut Peers,
    pub(crate) links: &'a mut Links,
    pub(crate) faults: &'a mut Faults,
    pub(crate) stats: &'a mut HcaStats,
    pub(crate) async_events: &'a mut AsyncEventQueue,
    pub(crate) pending_flush: &'a mut PendingFlush,
    pub(crate) copy_engine: &'a dyn CopyEngine,
    /// Minimum payload for references to GPU memory.
    pub(crate) by_reference: usize,
    /// Time limit of a copy.
    pub(crate) copy_limit: Duration,
    /// Which host payloads the peer reads.
    pub(crate) cma: CmaPolicy,
    /// Start of the newest message of several packets or copy, here or at a peer.
    pub(crate) copied: &'a mut Option<Instant>,
    pub(crate) strict: bool,
}

impl Env<'_> {
    /// What copies, and within which time.
    fn copies(&self) -> (&dyn CopyEngine, Duration) {
        (self.copy_engine, self.copy_limit)
    }
}

#[derive(Debug)]
pub(crate) struct SoftQp {
    pub(crate) rings: Rings,
    /// User index, written into every CQE.
    pub(crate) uidx: u32,
    /// Shared receive queue, in place of the ring for receives.
    pub(crate) srqn: Option<u32>,
    /// Sends and receives datagrams, in place of messages of a connection.
    pub(crate) datagrams: Option<Box<Datagrams>>,
    /// Sticky error shared with the verbs layer, for failures without a CQE.
    pub(crate) health: Arc<Health>,
    pub(crate) psn: u32,
    pub(crate) state: QpState,
    pub(crate) access: Access,
    pub(crate) remote: Option<QpAddress>,
    /// The HCA of `remote`.
    pub(crate) peer: Option<Peer>,
    /// Index of the link to the remote HCA.
    pub(crate) link: usize,
    pub(crate) req: Requester,
    pub(crate) resp: Responder,
    /// Payload of sends, staged out of GPU memory.
    pub(super) sends: Stage,
    /// READ responses, staged out of GPU memory.
    pub(super) responses: Stage,
    /// Payload staged into memory that is not mapped.
    pub(super) receive_staging: ReceiveStaging,
    /// Packets sent, for the fault plan.
    pub(crate) packets: u64,
    /// Whether the core lists it as active.
    pub(crate) active: bool,
}

impl SoftQp {
    /// Reads the doorbell and advances the fetch target.
    pub(crate) fn take_doorbell(&mut self, env: &mut Env<'_>) {
        if self.rings.is_rung() {
            // The prefetch overlaps with reading the WQE.
            env.links.expect(self.link);
        }
        match self.rings.take_doorbell(self.req.head(), self.state, env.strict, env.stats) {
            Ok(Some(target)) => self.req.extend(target),
            Ok(None) => {}
            Err(syndrome) => self.fail(syndrome, env),
        }
        match self.state {
            QpState::ERR => self.flush(env),
            QpState::SQE => self.flush_sends(env),
            _ => {}
        }
    }

    /// Sets the error of the oldest outstanding send, completes what is due, and goes to ERR.
    pub(crate) fn fail(&mut self, syndrome: Syndrome, env: &mut Env<'_>) {
        self.req.fail_front(syndrome);
        self.complete_finished(env);
        if self.state != QpState::ERR {
            self.go_error(env);
        }
    }

    /// Goes to ERR because the peer died.
    pub(crate) fn lose_peer(&mut self, env: &mut Env<'_>) {
        if !self.req.has_pending() {
            self.health.record(Error::PeerGone { qpn: self.rings.qpn });
        }
        self.fail(Syndrome::RETRY_EXC_ERR, env);
    }

    /// Goes to ERR: stops the transport and flushes all posted requests.
    pub(crate) fn go_error(&mut self, env: &mut Env<'_>) {
        self.enter_error();
        self.resp.cancel();
        self.flush(env);
    }

    fn enter_error(&mut self) {
        self.state = QpState::ERR;
        self.health.request_receive_calls();
    }

    /// Flushes receives, and sends up to the doorbell record (as a card does, not up to the doorbell).
    ///
    /// A flushed buffer belongs to the application again. So references are withdrawn first, and copies into receives
    /// must be over.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        self.revoke(env);
        if self.withdraw(env) && !self.receive_staging.is_busy() {
            self.flush_sends(env);
        }
        if !self.resp.is_copying() {
            self.flush_receives(env);
        }
    }

    /// Resumes a delayed flush in ERR. Returns whether it ended.
    pub(crate) fn resume_flush(&mut self, env: &mut Env<'_>) -> bool {
        if !self.is_flushing() {
            return false;
        }
        self.flush(env);
        !self.is_flushing()
    }

    /// Whether a flush in ERR waits for room on the link, or for copies.
    pub(crate) fn is_flushing(&self) -> bool {
        self.state == QpState::ERR && (self.req.has_pending() || self.resp.grants.any())
    }

    /// Whether this queue pair waits for copies.
    pub(crate) fn is_copying(&self) -> bool {
        self.resp.is_copying() || self.is_fetching() || self.awaits_engines()
    }

    /// Whether it waits for copy engines, which do not report completion.
    pub(crate) fn awaits_engines(&self) -> bool {
        self.resp.awaits_engines()
            || self.sends.is_waiting()
            || self.responses.is_waiting()
            || self.receive_staging.is_busy()
    }

    /// Copies in progress into a region.
    pub(crate) fn copies_on(&self, key: u32) -> impl Iterator<Item = Ticket> {
        self.resp.copies_on(key).chain(self.receive_staging.copies(Some(key)))
    }

    /// Whether it is connected over this link, or still processes payload from it.
    pub(super) fn uses(&self, link: usize) -> bool {
        self.remote.is_some() && self.link == link || self.resp.has_copy_from(link)
    }

    /// Prepares a reset: sends due responses, withdraws references and stops receiving. Returns the copies in progress,
    /// or `None` while the link has no room.
    pub(crate) fn quiesce(&mut self, env: &mut Env<'_>) -> Option<Vec<Ticket>> {
        self.send_responses(env);
        let mut copies = self.resp.close();
        copies.extend(self.receive_staging.copies(None));
        (self.withdraw(env) & self.revoke(env)).then_some(copies)
    }

    pub(super) fn flush_sends(&mut self, env: &mut Env<'_>) {
        while let Some((index, opcode, syndrome)) = self.req.flush_pending() {
            self.complete_send(index, opcode, Some(syndrome), 0, env);
        }
        let end = self.rings.flush_end(self.req.head());
        while self.req.head() < end && end - self.req.head() <= self.rings.blocks() {
            let wqe = self.rings.fetch(self.req.head());
            self.req.skip(wqe.blocks());
            self.rings.qp_trace.skipped();
            self.complete_send(wqe.ctrl.index, wqe.ctrl.opcode, Some(Syndrome::WR_FLUSH_ERR), 0, env);
        }
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) {
        let flushed = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome::WR_FLUSH_ERR, ..Cqe::default() };
        for counter in self.resp.stop() {
            self.complete_recv(flushed, counter, env);
        }
        if self.srqn.is_some() {
            // What is left in a shared queue is for others.
            if self.resp.ends() {
                env.async_events.raise(AsyncEvent::QpLastWqeReached(self.rings.qpn));
            }
            return;
        }
        let tail = self.resp.tail();
        let end = self.rings.recv_record(tail);
        if end - tail <= self.rings.receives() {
            for _ in tail..end {
                let counter = self.resp.consume();
                self.complete_recv(flushed, counter, env);
            }
        }
    }

    /// Writes a requester CQE.
    pub(crate) fn complete_send(
        &mut self,
        index: u16,
        opcode: Opcode,
        syndrome: Option<Syndrome>,
        bytes: u32,
        env: &mut Env<'_>,
    ) {
        let cqe = Cqe {
            opcode: if syndrome.is_some() { CqeOpcode::REQ_ERR } else { CqeOpcode::REQ },
            qpn: self.rings.qpn,
            wqe_counter: index,
            send_opcode: opcode,
            byte_cnt: bytes,
            syndrome: syndrome.unwrap_or_default(),
            ..Cqe::default()
        };
        self.complete(self.rings.request.send_cqn, cqe, env);
    }

    /// Writes a responder CQE for the receive with this counter.
    pub(crate) fn complete_recv(&mut self, cqe: Cqe, counter: u16, env: &mut Env<'_>) {
        let cqe = Cqe { qpn: self.rings.qpn, wqe_counter: counter, ..cqe };
        self.complete(self.rings.request.recv_cqn, cqe, env);
    }

    /// Flushes received data, then writes a CQE.
    fn complete(&mut self, cqn: u32, mut cqe: Cqe, env: &mut Env<'_>) {
        let flushed = env.pending_flush.flush(env.keys);
        if let Err(error) = &flushed {
            tracing::error!(qpn = self.rings.qpn, %error, "software HCA: flush of received data failed; its GPU may not see it");
            cqe.syndrome = Syndrome::LOC_QP_OP_ERR;
            let is_send = matches!(cqe.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR);
            cqe.opcode = if is_send { CqeOpcode::REQ_ERR } else { CqeOpcode::RESP_ERR };
        }
        cqe.srqn_uidx = self.uidx;
        self.rings.qp_trace.completed(&cqe);
        if env.cqs.complete(cqn, cqe).is_err() {
            self.overrun(cqn, env);
        } else if flushed.is_err() && self.state != QpState::ERR {
            self.go_error(env);
        }
    }

    fn overrun(&mut self, cqn: u32, env: &mut Env<'_>) {
        if self.state != QpState::ERR {
            env.stats.cq_overruns += 1;
            env.async_events.raise(AsyncEvent::CqError(cqn));
            env.async_events.raise(AsyncEvent::QpFatal(self.rings.qpn));
            tracing::error!(
                qpn = self.rings.qpn,
                "completion queue overrun: the queue pair goes to ERR and completes nothing more"
            );
            self.enter_error();
        }
    }

    /// Applies a transition that the caller checked. `peer` is the HCA of `attr.remote`, and the link to it if there is one. Returns
    /// this side's first PSN.
    pub(crate) fn modify(
        &mut self,
        attr: &QpAttr,
        peer: Option<(Peer, Option<usize>)>,
        env: &mut Env<'_>,
    ) -> Result<u32> {
        let to = attr.state.unwrap_or(self.state);
        if self.state == QpState::ERR && !matches!(to, QpState::ERR | QpState::RESET) {
            let why = "the HCA moved it to ERR; reset it first".into();
            return Err(Error::Transition { qpn: self.rings.qpn, from: QpState::ERR, to, why });
        }
        // The peer may have died since, and the link's index may be reused.
        if let Some((peer, Some(link))) = peer
            && (env.links.is_down(link) || env.links.peer(link) != Some(peer))
        {
            return Err(Error::Peer { peer: peer.to_string(), why: "its process has ended".into() });
        }
        self.access = attr.access.unwrap_or(self.access);
        match attr.state {
            Some(QpState::RESET) => {
                // Completes late doorbells before the rings are cleared: "request n = completion n" must hold for later
                // requests.
                if self.state == QpState::ERR {
                    self.flush(env);
                }
                self.reset()?;
            }
            Some(QpState::ERR) => {
                // The application may change their bytes.
                self.resp.discard_reads();
                self.go_error(env);
            }
            Some(QpState::INIT) if env.strict => {
                env.cqs.check_initial(self.rings.request.send_cqn)?;
                env.cqs.check_initial(self.rings.request.recv_cqn)?;
            }
            _ => {}
        }
        if let (Some(remote), Some((peer, link))) = (attr.remote, peer) {
            (self.remote, self.peer) = (Some(remote), Some(peer));
            self.resp.expect(remote.psn);
            self.link = link.unwrap_or(UNLINKED);
            self.seek_link(env);
        }
        self.resp.configure(attr);
        self.req.configure(attr);
        self.state = to;
        Ok(self.psn)
    }

    /// Takes the link to the peer, or asks for one.
    pub(crate) fn seek_link(&mut self, env: &mut Env<'_>) {
        if let Some(remote) = self.remote.filter(|_| self.link == UNLINKED)
            && let Reach::Link(link) = env.peers.reach(remote.gid, env.links)
        {
            self.link = link;
        }
    }

    fn reset(&mut self) -> Result<()> {
        // A new PSN, so that late packets of this connection do not match the next.
        self.psn = random_psn()?;
        self.req = Requester::new(self.psn);
        self.resp = Responder::default();
        self.sends.forget();
        self.responses.forget();
        (self.remote, self.peer) = (None, None);
        self.rings.clear();
        self.health.end_receive_calls();
        Ok(())
    }
}
