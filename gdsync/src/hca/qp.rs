//! A queue pair inside the software HCA: its rings, its state, its doorbell.

use super::cqs::Cqs;
use super::fault::Faults;
use super::gid::random_psn;
use super::inbound::Inbound;
use super::keys::Keys;
use super::landing::Landing;
use super::links::Links;
use super::requester::Requester;
use super::responder::Responder;
use super::staging::Stage;
use super::stats::HcaStats;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::memory::{Memory, Word64};
use crate::mlx5::{self, BB, Cqe, CqeOpcode, Ctrl, Opcode, Syndrome};
use crate::mover::{Mover, Ticket};
use crate::protocol;
use crate::verbs::provider::QpRequest;
use crate::verbs::{Access, QpAddress, QpAttr, QpState};

/// What the queue pairs share while one of them works.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) keys: &'a Keys,
    pub(crate) cqs: &'a mut Cqs,
    pub(crate) links: &'a mut Links,
    pub(crate) faults: &'a mut Faults,
    pub(crate) stats: &'a mut HcaStats,
    pub(crate) inbound: &'a mut Inbound,
    pub(crate) mover: &'a dyn Mover,
    /// Payload of so many bytes is left to copy engines.
    pub(crate) by_reference: usize,
    pub(crate) strict: bool,
}

#[derive(Debug)]
pub(crate) struct SoftQp {
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) request: QpRequest,
    pub(crate) state: QpState,
    pub(crate) access: Access,
    pub(crate) remote: Option<QpAddress>,
    /// The link to the remote HCA.
    pub(crate) link: usize,
    pub(crate) sq: Memory,
    pub(crate) rq: Memory,
    pub(crate) record: Memory,
    pub(crate) doorbell: Word64,
    pub(crate) req: Requester,
    pub(crate) resp: Responder,
    /// Payload of sends on its way out of GPU memory.
    pub(super) sends: Stage,
    /// Answers to READs, likewise.
    pub(super) answers: Stage,
    /// Payload on its way into memory that the CPU does not reach.
    pub(super) landing: Landing,
    /// Packets sent, for fault decisions.
    pub(crate) packets: u64,
    /// Listed as active in the core.
    pub(crate) active: bool,
}

/// A send WQE fetched from the ring.
#[derive(Debug)]
pub(crate) struct Wqe {
    pub(crate) ctrl: Ctrl,
    /// Its blocks, the last one padded. Almost every WQE has one or two.
    blocks: SmallVec<[u8; 2 * BB]>,
}

impl Wqe {
    /// The WQE's bytes, without the padding of its last block.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.blocks[..(usize::from(self.ctrl.ds) * 16).min(self.blocks.len())]
    }

    /// Blocks it occupies: at least one, so that a broken one can be passed over.
    pub(crate) fn blocks(&self) -> u64 {
        blocks(self.ctrl.ds)
    }
}

/// Blocks of a WQE with this many units of 16 bytes.
fn blocks(ds: u8) -> u64 {
    u64::from(ds.clamp(1, mlx5::MAX_DS)).div_ceil(4)
}

impl SoftQp {
    fn record(&self, word: usize) -> u16 {
        protocol::recorded(self.record.atomic32(word).expect("doorbell records are aligned"))
    }

    /// The send producer index of the doorbell record, at or after `from`.
    pub(crate) fn send_record(&self, from: u64) -> u64 {
        mlx5::extend16(from, self.record(mlx5::QP_DBREC_SEND))
    }

    /// The receive producer index of the doorbell record, at or after `from`.
    pub(crate) fn recv_record(&self, from: u64) -> u64 {
        mlx5::extend16(from, self.record(mlx5::QP_DBREC_RECV))
    }

    /// Basic blocks of the send queue.
    fn blocks(&self) -> u64 {
        1 << self.request.log_sq
    }

    /// Reads the send WQE that begins at block `index`, round the end of the ring if need be.
    pub(crate) fn fetch(&self, index: u64) -> Wqe {
        let mut blocks = SmallVec::new();
        let mut block = [0; BB];
        let mut read = |index: u64| {
            let at = usize::try_from(index & (self.blocks() - 1)).expect("a ring index fits") * BB;
            self.sq.read(at, &mut block).expect("blocks lie in the ring");
            blocks.extend_from_slice(&block);
            mlx5::decode_ctrl(block.first_chunk().expect("a block holds a control segment"))
        };
        let ctrl = read(index);
        for next in 1..self::blocks(ctrl.ds).min(self.blocks()) {
            read(index + next);
        }
        Wqe { ctrl, blocks }
    }

    /// Takes the doorbell and moves the fetch target.
    pub(crate) fn take_doorbell(&mut self, env: &mut Env<'_>) {
        if let Some(value) = protocol::take_doorbell(self.doorbell.atomic()) {
            env.stats.doorbells += 1;
            self.rung(mlx5::Doorbell::decode(value), env);
        }
        if self.state == QpState::ERR {
            self.flush(env);
        }
    }

    fn rung(&mut self, doorbell: mlx5::Doorbell, env: &mut Env<'_>) {
        if doorbell.qpn != self.qpn {
            env.stats.violation("a doorbell names another QP than the one whose register it was written to");
            return;
        }
        if self.state != QpState::RTS {
            // In ERR the doorbell record decides what is flushed; before RTS a card's behaviour is undefined.
            if self.state != QpState::ERR {
                env.stats.violation("a doorbell was rung before the QP was ready to send");
            }
            return;
        }
        let head = self.req.head();
        // Two forms are in use: the index of the last WQE with its opcode and size, or the next free index.
        let last_wqe = doorbell.opcode != Opcode::NOP || doorbell.ds != 0;
        let mut target = mlx5::extend16(head, doorbell.index);
        if last_wqe {
            // The last WQE can lie behind `head` when it was fetched on an earlier doorbell.
            if target - head >= self.blocks() {
                return;
            }
            target += blocks(doorbell.ds);
        }
        if target - head > self.blocks() {
            if !last_wqe {
                return;
            }
            env.stats.violation("a doorbell runs ahead of the ring");
            return;
        }
        // A card executes the work all the same, but an error that comes before the record will not flush it at once.
        let record = if env.strict { self.send_record(head) } else { target };
        if record < target || record - head > self.blocks() {
            env.stats.violation("a doorbell was rung before its doorbell record was written");
            self.fail(Syndrome::LOC_QP_OP_ERR, env);
            return;
        }
        self.req.extend(target);
    }

    /// Completes the oldest outstanding send, or all, with an error, and goes to ERR.
    pub(crate) fn fail(&mut self, syndrome: Syndrome, env: &mut Env<'_>) {
        self.req.fail_front(syndrome);
        self.retire(env);
        if self.state != QpState::ERR {
            self.go_error(env);
        }
    }

    /// Goes to ERR: no more network, everything posted is flushed.
    pub(crate) fn go_error(&mut self, env: &mut Env<'_>) {
        self.state = QpState::ERR;
        self.resp.cancel();
        self.flush(env);
    }

    /// Flushes sends up to the doorbell record (not the doorbell: as a card does), and receives.
    ///
    /// Not before the peer knows that references are void, and copies into receives are over: what is flushed is the
    /// application's again.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        if self.withdraw(env) && !self.landing.is_busy() {
            self.flush_sends(env);
        }
        if !self.resp.is_copying() {
            self.flush_receives(env);
        }
    }

    /// In ERR: goes on with a flush that had to wait. Returns whether it is over.
    pub(crate) fn leave(&mut self, env: &mut Env<'_>) -> bool {
        if self.state != QpState::ERR || !self.req.has_pending() {
            return false;
        }
        self.flush(env);
        !self.req.has_pending()
    }

    /// Whether copies are under way that this waits for.
    pub(crate) fn is_copying(&self) -> bool {
        self.resp.is_copying()
            || self.sends.is_waiting()
            || self.answers.is_waiting()
            || self.landing.is_busy()
    }

    /// The copies under way into a region.
    pub(crate) fn copies_on(&self, key: u32) -> impl Iterator<Item = Ticket> {
        self.resp.copies_on(key).chain(self.landing.copies(Some(key)))
    }

    /// Before a reset: takes references back, and takes no more. The copies that are still under way, or `None` while
    /// the link has no room.
    pub(crate) fn quiesce(&mut self, env: &mut Env<'_>) -> Option<Vec<Ticket>> {
        let mut copies = self.resp.close();
        copies.extend(self.landing.copies(None));
        self.withdraw(env).then_some(copies)
    }

    fn flush_sends(&mut self, env: &mut Env<'_>) {
        while let Some((index, opcode, syndrome)) = self.req.flush_pending() {
            self.complete_send(index, opcode, Some(syndrome), 0, env);
        }
        let end = self.send_record(self.req.head());
        while self.req.head() < end && end - self.req.head() <= self.blocks() {
            let wqe = self.fetch(self.req.head());
            self.req.skip(wqe.blocks());
            self.complete_send(wqe.ctrl.index, wqe.ctrl.opcode, Some(Syndrome::WR_FLUSH_ERR), 0, env);
        }
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) {
        let flushed = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome::WR_FLUSH_ERR, ..Cqe::default() };
        for counter in self.resp.stop() {
            self.complete_recv(flushed, counter, env);
        }
        let tail = self.resp.tail();
        let end = self.recv_record(tail);
        if end - tail <= 1 << self.request.log_rq {
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
            qpn: self.qpn,
            wqe_counter: index,
            send_opcode: opcode,
            byte_cnt: bytes,
            syndrome: syndrome.unwrap_or_default(),
            ..Cqe::default()
        };
        self.complete(self.request.send_cqn, cqe, env);
    }

    /// Writes a responder CQE for the receive with this counter.
    pub(crate) fn complete_recv(&mut self, cqe: Cqe, counter: u16, env: &mut Env<'_>) {
        let cqe = Cqe { qpn: self.qpn, wqe_counter: counter, ..cqe };
        self.complete(self.request.recv_cqn, cqe, env);
    }

    /// Writes a CQE, behind all data.
    fn complete(&mut self, cqn: u32, mut cqe: Cqe, env: &mut Env<'_>) {
        let flushed = env.inbound.flush(env.keys);
        if let Err(error) = &flushed {
            tracing::error!(qpn = self.qpn, %error, "software HCA: received data is not visible to its GPU");
            cqe.syndrome = Syndrome::LOC_QP_OP_ERR;
            let is_send = matches!(cqe.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR);
            cqe.opcode = if is_send { CqeOpcode::REQ_ERR } else { CqeOpcode::RESP_ERR };
        }
        if env.cqs.complete(cqn, cqe).is_err() {
            self.overrun(env);
        } else if flushed.is_err() && self.state != QpState::ERR {
            self.go_error(env);
        }
    }

    fn overrun(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::ERR {
            env.stats.cq_overruns += 1;
            tracing::error!(
                qpn = self.qpn,
                "completion queue overrun: the queue pair goes to ERR, nothing completes any more"
            );
            self.state = QpState::ERR;
        }
    }

    /// Applies a checked transition. `link` leads to the remote HCA when `attr` names one. Returns the first packet
    /// sequence number of this side.
    pub(crate) fn modify(&mut self, attr: &QpAttr, link: Option<usize>, env: &mut Env<'_>) -> Result<u32> {
        let to = attr.state.unwrap_or(self.state);
        if self.state == QpState::ERR && !matches!(to, QpState::ERR | QpState::RESET) {
            let why = "the HCA has put it into ERR meanwhile; only RESET leads out".into();
            return Err(Error::Transition { qpn: self.qpn, from: QpState::ERR, to, why });
        }
        if let Some(remote) = attr.remote.filter(|_| link.is_some_and(|link| env.links.is_down(link))) {
            return Err(Error::Peer { peer: remote.gid.to_string(), why: "its process has ended".into() });
        }
        self.access = attr.access.unwrap_or(self.access);
        match attr.state {
            Some(QpState::RESET) => {
                // What was exposed late has its completion before the queue is emptied: somebody may have given up waiting
                // for it and have put one of his own in its place, and the next one belongs behind it.
                if self.state == QpState::ERR {
                    self.flush(env);
                }
                self.reset()?;
            }
            Some(QpState::ERR) => self.go_error(env),
            Some(QpState::INIT) if env.strict => {
                env.cqs.check_initial(self.request.send_cqn)?;
                env.cqs.check_initial(self.request.recv_cqn)?;
            }
            _ => {}
        }
        if let Some(remote) = attr.remote {
            self.remote = Some(remote);
            self.resp.expect(remote.psn);
        }
        self.link = link.unwrap_or(self.link);
        self.resp.configure(attr);
        self.req.configure(attr);
        self.state = to;
        Ok(self.psn)
    }

    fn reset(&mut self) -> Result<()> {
        // Another one, so that a late packet of this connection is not taken for one of the next.
        self.psn = random_psn()?;
        self.req = Requester::new(self.psn);
        self.resp = Responder::default();
        self.sends.forget();
        self.answers.forget();
        self.remote = None;
        self.record.fill(0, 8, 0).expect("a doorbell record has 8 bytes");
        self.doorbell.store(mlx5::EMPTY);
        Ok(())
    }
}
