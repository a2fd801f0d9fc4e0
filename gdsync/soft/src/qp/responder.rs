//! Responder of a queue pair: orders and checks requests, places their payload, sends responses.

mod check;
mod cma;
mod copies;
mod messages;
mod reads;

use std::collections::VecDeque;
use std::time::Instant;

use smallvec::SmallVec;

use self::copies::Copies;
use super::requester::Reason;
use super::{Env, SoftQp};
use crate::async_event::AsyncEvent;
use crate::links::Body;
use crate::packet::{self, Header, PacketOp, SEGMENT, ahead};
use crate::wire::Piece;
use gdsync_device::{QpAttr, QpState};
use mlx5_ring::{Cqe, CqeOpcode, DataSeg, Syndrome, low16};

/// Responses queued for the link; a READ counts once. Further requests are dropped as if lost. More than a peer that
/// takes responses has in flight.
const MOST_ANSWERS: usize = 256;
/// Atomic results kept for repeated requests. More than a peer may have outstanding (16).
const REPLAYS: usize = 32;

#[derive(Debug, Default)]
pub(crate) struct Responder {
    /// First PSN of the connection.
    first: u32,
    /// Next PSN.
    expected: u32,
    /// Receives consumed.
    tail: u64,
    /// Receives posted, as last read from the doorbell record.
    posted: u64,
    /// The message being received, if it has several packets.
    current: Option<Current>,
    answers: VecDeque<Answer>,
    /// A gap was reported and is not filled.
    gap: bool,
    replays: VecDeque<(u32, u64)>,
    rnr_timer: u8,
    max_reads: usize,
    copies: Copies,
}

#[derive(Debug)]
struct Current {
    /// Counter of the receive; `None` for a WRITE.
    counter: Option<u16>,
    sges: SmallVec<[DataSeg; 4]>,
    received: usize,
}

/// A response, sent in order.
#[derive(Clone, Copy, Debug)]
enum Answer {
    Ack(u32),
    Nak {
        psn: u32,
        code: u8,
        arg: u32,
    },
    /// `done` bytes were sent before.
    Read {
        psn: u32,
        rkey: u32,
        addr: u64,
        left: usize,
        done: usize,
    },
    Atomic {
        psn: u32,
        value: u64,
    },
    /// The message of this packet is still being copied.
    Copying(u32),
}

impl Answer {
    fn psn(&self) -> u32 {
        match *self {
            Self::Ack(psn) | Self::Copying(psn) => psn,
            Self::Nak { psn, .. } | Self::Read { psn, .. } | Self::Atomic { psn, .. } => psn,
        }
    }
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    /// No receive is posted.
    NotReady,
    /// The payload cannot be copied by reference.
    Reference(Reason),
    /// Error of the requester; the queue pair goes to ERR.
    Remote(Syndrome),
    /// The receive failed: syndrome of its CQE, and of the NAK.
    Receive { counter: u16, local: Syndrome, remote: Syndrome },
}

impl Refusal {
    /// The receive it consumes.
    fn counter(&self) -> Option<u16> {
        match *self {
            Self::Receive { counter, .. } => Some(counter),
            Self::NotReady | Self::Reference(_) | Self::Remote(_) => None,
        }
    }

    /// Whether it ends the queue pair.
    fn is_final(&self) -> bool {
        matches!(self, Self::Receive { .. } | Self::Remote(_))
    }
}

impl Responder {
    pub(crate) fn expect(&mut self, psn: u32) {
        (self.first, self.expected) = (psn, psn);
    }

    pub(crate) fn configure(&mut self, attr: &QpAttr) {
        self.rnr_timer = attr.min_rnr_timer.unwrap_or(self.rnr_timer);
        self.max_reads = attr.max_dest_rd_atomic.map_or(self.max_reads, usize::from);
    }

    /// Number of responses, copies and replay entries held for the peer, for tests.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.answers.len() + self.copies.len() + self.replays.len()
    }

    /// Next PSN, for tests.
    #[cfg(test)]
    pub(crate) fn expected_psn(&self) -> u32 {
        self.expected
    }

    pub(crate) fn tail(&self) -> u64 {
        self.tail
    }

    /// Consumes the next receive and returns its counter.
    pub(crate) fn consume(&mut self) -> u16 {
        let counter = low16(self.tail);
        self.tail += 1;
        counter
    }

    /// Enters ERR: returns the consumed receives to flush. Queued responses still go out.
    pub(crate) fn stop(&mut self) -> Vec<u16> {
        let mut counters = self.take_abandoned();
        counters.extend(self.current.take().and_then(|current| current.counter));
        counters
    }

    pub(crate) fn is_active(&self) -> bool {
        !self.answers.is_empty() || self.is_copying()
    }

    /// Queues a NAK unless the same one is queued.
    fn nak(&mut self, psn: u32, code: u8, arg: u32) {
        let same = |a: &Answer| matches!(a, Answer::Nak { psn: p, code: c, .. } if (*p, *c) == (psn, code));
        if !self.answers.iter().any(same) {
            self.answers.push_back(Answer::Nak { psn, code, arg });
        }
    }

    /// Whether the number of queued READ and atomic responses is below the agreed limit.
    fn has_room_for_read(&self) -> bool {
        let waits = |a: &&Answer| matches!(a, Answer::Read { .. } | Answer::Atomic { .. });
        self.answers.iter().filter(waits).count() < self.max_reads.max(1)
    }

    fn ack(&mut self, through: u32) {
        let ack = Answer::Ack(through);
        match self.answers.back_mut() {
            Some(last @ Answer::Ack(_)) => *last = ack,
            _ => self.answers.push_back(ack),
        }
    }
}

impl SoftQp {
    /// Handles a request. Its response leaves with the next step, because replies by the application go first.
    pub(crate) fn requested(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        if !matches!(self.state, QpState::RTR | QpState::RTS) {
            env.stats.packets_discarded += 1;
            return;
        }
        if header.op == PacketOp::WITHDRAW {
            return self.resp.withdrawn(header.psn);
        }
        if self.resp.answers.len() >= MOST_ANSWERS {
            env.stats.packets_discarded += 1;
            return;
        }
        let distance = ahead(header.psn, self.resp.expected);
        if distance > 0 {
            env.stats.packets_discarded += 1;
            if !std::mem::replace(&mut self.resp.gap, true) {
                self.resp.nak(self.resp.expected, packet::NAK_SEQUENCE, 0);
            }
        } else if distance < 0 {
            env.stats.packets_discarded += 1;
            self.repeated(header, body, env);
        } else if self.resp.must_wait(header) || !self.receive_staging.has_room() {
            env.stats.packets_discarded += 1;
        } else {
            self.resp.gap = false;
            let done = self.check_request(header, body).and_then(|()| self.execute(header, body, env));
            match done {
                Ok(packets) => self.resp.expected = self.resp.expected.wrapping_add(packets),
                Err(refusal) if refusal.is_final() && self.resp.is_copying() => {
                    self.resp.refuse_later(header, refusal);
                }
                Err(refusal) => self.refuse(header.psn, &refusal, env),
            }
        }
    }

    fn refuse(&mut self, psn: u32, refusal: &Refusal, env: &mut Env<'_>) {
        match *refusal {
            Refusal::NotReady => {
                env.stats.rnr_naks += 1;
                self.resp.nak(psn, packet::NAK_RNR, u32::from(self.resp.rnr_timer));
            }
            Refusal::Reference(reason) => {
                env.stats.references_refused += 1;
                self.resp.nak(psn, packet::NAK_REFERENCE, reason.0);
            }
            Refusal::Remote(syndrome) => {
                self.resp.nak(psn, syndrome.0, 0);
                env.async_events.raise(AsyncEvent::of_refusal(self.rings.qpn, syndrome));
                self.go_error(env);
            }
            Refusal::Receive { counter, local, remote } => {
                self.resp.nak(psn, remote.0, 0);
                let cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: local, ..Cqe::default() };
                self.complete_recv(cqe, counter, env);
                self.go_error(env);
            }
        }
    }

    /// A repeated request: its response was lost, or the packet was duplicated.
    fn repeated(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        match header.op {
            PacketOp::READ => {
                let read = check::sizes(header, body.len()).and_then(|()| self.read(header, body, env));
                if let Err(refusal) = read {
                    self.refuse(header.psn, &refusal, env);
                }
            }
            PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => {
                let same = |a: &Answer| matches!(a, Answer::Atomic { psn, .. } if *psn == header.psn);
                if !self.resp.answers.iter().any(same)
                    && let Some(&(psn, value)) = self.resp.replays.iter().find(|(psn, _)| *psn == header.psn)
                {
                    self.resp.answers.push_back(Answer::Atomic { psn, value });
                }
            }
            _ if self.resp.is_copied(header.psn) => {
                let same = |a: &Answer| matches!(a, Answer::Copying(psn) if *psn == header.psn);
                if !self.resp.answers.iter().any(same) {
                    self.resp.answers.push_front(Answer::Copying(header.psn));
                }
            }
            _ => self.resp.ack(self.resp.arrived()),
        }
    }

    /// Executes a request. Returns the number of PSNs it used.
    fn execute(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Result<u32, Refusal> {
        if header.flags & (packet::FIRST | packet::LAST) == packet::FIRST {
            *env.copied = Some(Instant::now());
        }
        match header.op {
            PacketOp::SEND | PacketOp::WRITE if header.flags & packet::REFERENCE != 0 => {
                return self.referred(header, body, env);
            }
            PacketOp::SEND => self.receive(header, body, env)?,
            PacketOp::WRITE => self.written(header, body, env)?,
            PacketOp::READ => return self.read(header, body, env),
            PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => self.atomic(header, body, env)?,
            _ => return Err(Refusal::Remote(Syndrome::REM_INV_REQ_ERR)),
        }
        Ok(1)
    }

    /// Sends due responses while the link has room. Returns whether any were sent.
    pub(crate) fn answer(&mut self, env: &mut Env<'_>) -> bool {
        let Some(remote) = self.remote else { return false };
        let mut any = false;
        while let Some(&answer) = self.resp.answers.front() {
            if self.resp.is_early(&answer) {
                break;
            }
            let mut header = Header::new(PacketOp::ACK, remote.qpn, self.rings.qpn, 0);
            let mut ext = [0; 8];
            let mut words = 0;
            let mut found = None;
            let mut rest = None;
            match answer {
                Answer::Ack(psn) => header.psn = psn,
                Answer::Copying(psn) => (header.op, header.psn) = (PacketOp::COPYING, psn),
                Answer::Nak { psn, code, arg } => {
                    (header.op, header.psn, header.code, header.len) = (PacketOp::NAK, psn, code, arg);
                }
                Answer::Atomic { psn, value } => {
                    (header.op, header.psn) = (PacketOp::ATOMIC_RESPONSE, psn);
                    ext = value.to_le_bytes();
                    words = 8;
                }
                Answer::Read { psn, rkey, addr, left, done } => {
                    (header.op, header.psn) = (PacketOp::READ_RESPONSE, psn);
                    let len = left.min(SEGMENT);
                    match self.look_up(&answer, env) {
                        Ok(Some((memory, offset))) => found = Some((memory, offset, len)),
                        // Being staged from a GPU.
                        Ok(None) => break,
                        Err(syndrome) => {
                            self.resp.answers.pop_front();
                            self.refuse(psn, &Refusal::Remote(syndrome), env);
                            continue;
                        }
                    }
                    let (psn, addr) = (psn.wrapping_add(1), addr + len as u64);
                    let (left, done) = (left - len, done + len);
                    rest = (left > 0).then_some(Answer::Read { psn, rkey, addr, left, done });
                }
            }
            let link = self.link;
            let piece =
                found.as_ref().map(|(memory, offset, len)| Piece { memory, offset: *offset, len: *len });
            if !env.links.send(
                link,
                &header,
                &ext[..words],
                piece.as_slice(),
                self.packets,
                env.faults,
                env.stats,
            ) {
                break;
            }
            self.packets += 1;
            any = true;
            match rest {
                Some(rest) => self.resp.answers[0] = rest,
                None => drop(self.resp.answers.pop_front()),
            }
        }
        any
    }
}
