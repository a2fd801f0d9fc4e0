//! Responder of a queue pair: orders and checks requests, places their payload, sends responses.

mod copies;
mod grants;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use smallvec::SmallVec;

use self::copies::Copies;
use self::grants::Grants;
use super::requester::Reason;
use super::staging::{self, Staged};
use super::{Env, SoftQp};
use crate::async_event::AsyncEvent;
use crate::packet::{self, Header, PacketOp, REFERENCE_BYTES, SEGMENT, ahead, segments};
use crate::srq::Sges;
use crate::wire::{Body, Piece};
use gdsync_device::copy_engine::Ticket;
use gdsync_device::memory::Memory;
use gdsync_device::{Access, QpAttr, QpState};
use mlx5_ring::{Cqe, CqeOpcode, MAX_MESSAGE, MaskedAtomic, MaskedOp, Syndrome, low16};

/// Responses queued for the link; a READ counts once. Further requests are dropped as if lost. More than a peer that
/// takes responses has in flight.
const MAX_RESPONSES: usize = 256;
/// Atomic results kept for duplicate requests. More than a peer may have outstanding (16).
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
    responses: VecDeque<Response>,
    /// A long message was completed: its acknowledgement does not wait for the next step.
    pub(crate) acks_now: bool,
    /// A gap was reported and is not filled.
    gap: bool,
    replays: VecDeque<Replay>,
    rnr_timer: u8,
    max_reads: usize,
    copies: Copies,
    pub(crate) grants: Grants,
    /// Receives of a shared receive queue that were taken for messages to be sent again.
    put_back: VecDeque<u16>,
    /// The end of a queue pair with a shared receive queue was reported.
    has_ended: bool,
}

#[derive(Debug)]
struct Current {
    /// Counter of the receive; `None` for a WRITE.
    counter: Option<u16>,
    sges: Sges,
    received: usize,
}

/// A response, sent in order.
#[derive(Clone, Copy, Debug)]
enum Response {
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
        /// The requester takes a reference.
        by_reference: bool,
    },
    Atomic(Replay),
    /// The message of this packet is still being copied.
    Copying(u32),
}

impl Response {
    fn psn(&self) -> u32 {
        match *self {
            Self::Ack(psn) | Self::Copying(psn) => psn,
            Self::Nak { psn, .. } | Self::Read { psn, .. } | Self::Atomic(Replay { psn, .. }) => psn,
        }
    }
}

/// The old value of a word that an atomic operation changed.
#[derive(Clone, Copy, Debug)]
struct Replay {
    psn: u32,
    value: u64,
    size: u8,
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
        self.responses.len() + self.copies.len() + self.replays.len()
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
        counters.extend(self.put_back.drain(..));
        counters
    }

    /// Notes that no receive will be consumed any more. Returns whether that is new.
    pub(crate) fn ends(&mut self) -> bool {
        !std::mem::replace(&mut self.has_ended, true)
    }

    pub(crate) fn is_active(&self) -> bool {
        !self.responses.is_empty() || self.is_copying()
    }

    /// Discards READ responses that were not sent.
    pub(crate) fn discard_reads(&mut self) {
        self.responses.retain(|response| !matches!(response, Response::Read { .. }));
    }

    /// Queues a NAK unless the same one is queued.
    fn nak(&mut self, psn: u32, code: u8, arg: u32) {
        let same =
            |a: &Response| matches!(a, Response::Nak { psn: p, code: c, .. } if (*p, *c) == (psn, code));
        if !self.responses.iter().any(same) {
            self.responses.push_back(Response::Nak { psn, code, arg });
        }
    }

    /// Whether the number of queued READ and atomic responses is below the agreed limit.
    fn has_room_for_read(&self) -> bool {
        let waits = |a: &&Response| matches!(a, Response::Read { .. } | Response::Atomic(_));
        self.responses.iter().filter(waits).count() < self.max_reads.max(1)
    }

    fn ack(&mut self, through: u32) {
        let ack = Response::Ack(through);
        match self.responses.back_mut() {
            Some(last @ Response::Ack(_)) => *last = ack,
            _ => self.responses.push_back(ack),
        }
    }
}

impl SoftQp {
    /// Handles a request. Its response leaves with the next step, because replies by the application go first; that of a long message
    /// leaves with this one, because the receiver may be busy with the message for long before it runs a step.
    pub(crate) fn handle_request(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        if !matches!(self.state, QpState::RTR | QpState::RTS) {
            env.stats.packets_discarded += 1;
            return;
        }
        if header.op == PacketOp::WITHDRAW {
            return self.resp.withdrawn(header.psn);
        }
        if self.resp.responses.len() >= MAX_RESPONSES {
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
            self.handle_duplicate(header, body, env);
        } else if self.resp.must_wait(header)
            || !self.receive_staging.has_room()
            || self.would_overtake(header, body, env)
        {
            env.stats.packets_discarded += 1;
        } else {
            self.resp.gap = false;
            let segment = env.links.segment(self.link);
            let done =
                self.check_request(header, body, segment).and_then(|()| self.execute(header, body, env));
            match done {
                Ok(packets) => self.resp.expected = self.resp.expected.wrapping_add(packets),
                Err(refusal) if refusal.is_final() && self.resp.is_copying() => {
                    self.resp.refuse_later(header, refusal);
                }
                Err(refusal) => self.refuse(header.psn, &refusal, env),
            }
        }
    }

    /// Whether a request would change memory before the payload of earlier ones, which a copy engine still copies, is in place: a
    /// signal must not be seen before its data. It is sent again then.
    fn would_overtake(&self, header: &Header, body: &Body<'_>, env: &Env<'_>) -> bool {
        if !self.receive_staging.is_busy() {
            return false;
        }
        let is_immediate = match header.op {
            PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => true,
            PacketOp::WRITE => body.word(0).is_some_and(|addr| {
                let pdn = self.rings.request.pdn;
                let target = env.keys.remote(header.rkey, pdn, addr, 1, Access::REMOTE_WRITE);
                target.is_ok_and(|(memory, _)| memory.is_mapped())
            }),
            _ => false,
        };
        is_immediate && !self.receive_staging.settle()
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

    /// A duplicate request: its response was lost, or the packet was duplicated.
    fn handle_duplicate(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        match header.op {
            PacketOp::READ => {
                let sizes = check_sizes(header, body.len(), env.links.segment(self.link));
                let read = sizes.and_then(|()| self.handle_read(header, body, env));
                if let Err(refusal) = read {
                    self.refuse(header.psn, &refusal, env);
                }
            }
            PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => {
                let same = |a: &Response| matches!(a, Response::Atomic(done) if done.psn == header.psn);
                if !self.resp.responses.iter().any(same)
                    && let Some(&done) = self.resp.replays.iter().find(|done| done.psn == header.psn)
                {
                    self.resp.responses.push_back(Response::Atomic(done));
                }
            }
            _ if self.resp.is_copied(header.psn) => {
                let same = |a: &Response| matches!(a, Response::Copying(psn) if *psn == header.psn);
                if !self.resp.responses.iter().any(same) {
                    self.resp.responses.push_front(Response::Copying(header.psn));
                }
            }
            _ => self.resp.ack(self.resp.arrived()),
        }
    }

    /// Executes a request. Returns the number of PSNs it used.
    fn execute(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Result<u32, Refusal> {
        // Keeps threads polling while a message of several packets arrives.
        if header.flags & (packet::FIRST | packet::LAST) == packet::FIRST {
            *env.copied = Some(Instant::now());
        }
        match header.op {
            PacketOp::SEND | PacketOp::WRITE if header.flags & packet::REFERENCE != 0 => {
                return self.handle_reference(header, body, env);
            }
            PacketOp::SEND => self.handle_send(header, body, env)?,
            PacketOp::WRITE => self.handle_write(header, body, env)?,
            PacketOp::READ => return self.handle_read(header, body, env),
            PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => self.handle_atomic(header, body, env)?,
            _ => return Err(INVALID),
        }
        Ok(1)
    }

    /// Sends due responses while the link has room. Returns whether any were sent.
    pub(crate) fn send_responses(&mut self, env: &mut Env<'_>) -> bool {
        let Some(remote) = self.remote else { return false };
        let mut any = false;
        while let Some(&response) = self.resp.responses.front() {
            if self.resp.is_early(&response) {
                break;
            }
            let mut header = Header::new(PacketOp::ACK, remote.qpn, self.rings.qpn, 0);
            let mut ext: SmallVec<[u8; 128]> = SmallVec::new();
            let mut granted = None;
            let mut found = None;
            let mut rest = None;
            match response {
                Response::Ack(psn) => header.psn = psn,
                Response::Copying(psn) => (header.op, header.psn) = (PacketOp::COPYING, psn),
                Response::Nak { psn, code, arg } => {
                    (header.op, header.psn, header.code, header.len) = (PacketOp::NAK, psn, code, arg);
                }
                Response::Atomic(Replay { psn, value, size }) => {
                    (header.op, header.psn) = (PacketOp::ATOMIC_RESPONSE, psn);
                    if size == 4 {
                        ext.extend_from_slice(&value.to_be_bytes()[4..]);
                    } else {
                        ext.extend_from_slice(&value.to_le_bytes());
                    }
                }
                Response::Read { psn, rkey, .. } if let Some(reference) = self.grant(&response, env) => {
                    (header.op, header.psn) = (PacketOp::READ_RESPONSE, psn);
                    header.flags = packet::REFERENCE;
                    ext.extend_from_slice(&reference.to_bytes());
                    granted = Some(rkey);
                }
                Response::Read { psn, rkey, addr, left, done, .. } => {
                    (header.op, header.psn) = (PacketOp::READ_RESPONSE, psn);
                    let len = left.min(env.links.segment(self.link));
                    let source = if left == 0 { None } else { Some(self.read_source(&response, env)) };
                    match source.transpose().map(Option::flatten) {
                        Ok(None) if left == 0 => {}
                        Ok(Some((memory, offset))) => found = Some((memory, offset, len)),
                        // Being staged from a GPU.
                        Ok(None) => break,
                        Err(syndrome) => {
                            self.resp.responses.pop_front();
                            self.refuse(psn, &Refusal::Remote(syndrome), env);
                            continue;
                        }
                    }
                    let (psn, addr) = (psn.wrapping_add(1), addr + len as u64);
                    let (left, done) = (left - len, done + len);
                    let by_reference = false;
                    rest = (left > 0).then_some(Response::Read { psn, rkey, addr, left, done, by_reference });
                }
            }
            let link = self.link;
            let piece =
                found.as_ref().map(|(memory, offset, len)| Piece { memory, offset: *offset, len: *len });
            match env.links.send(link, &header, &ext, piece.as_slice(), self.packets, env.faults, env.stats) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => {
                    self.resp.responses.pop_front();
                    self.refuse(header.psn, &Refusal::Remote(Syndrome::REM_OP_ERR), env);
                    continue;
                }
            }
            self.packets += 1;
            any = true;
            if let Some(key) = granted {
                self.resp.grants.add(key);
                *env.copied = Some(Instant::now());
            }
            match rest {
                Some(rest) => self.resp.responses[0] = rest,
                None => drop(self.resp.responses.pop_front()),
            }
        }
        any
    }
}

const INVALID: Refusal = Refusal::Remote(Syndrome::REM_INV_REQ_ERR);

fn require(is_fine: bool) -> Result<(), Refusal> {
    if is_fine { Ok(()) } else { Err(INVALID) }
}

/// Bytes of a request's extension header.
fn extension(op: PacketOp) -> Result<usize, Refusal> {
    match op {
        PacketOp::SEND => Ok(0),
        PacketOp::WRITE | PacketOp::READ => Ok(8),
        PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => Ok(40),
        _ => Err(INVALID),
    }
}

/// Bytes of payload in a body, or of its reference.
fn payload_len(header: &Header, body: usize) -> Result<usize, Refusal> {
    body.checked_sub(extension(header.op)?).ok_or(INVALID)
}

/// Checks the lengths in a packet.
fn check_sizes(header: &Header, body: usize, segment: usize) -> Result<(), Refusal> {
    let payload = payload_len(header, body)?;
    let ends = packet::FIRST | packet::LAST;
    let flags = header.flags & ends;
    let is_message = matches!(header.op, PacketOp::SEND | PacketOp::WRITE);
    let is_atomic = matches!(header.op, PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD);
    require(match flags {
        _ if is_atomic => payload == 0 && matches!(header.len, 4 | 8),
        _ if !is_message => payload == 0 && header.len <= MAX_MESSAGE,
        _ if header.flags & packet::REFERENCE != 0 => {
            flags == ends && payload == REFERENCE_BYTES && (1..=MAX_MESSAGE).contains(&header.len)
        }
        _ if header.flags & packet::PLACED != 0 => {
            let is_send = header.op == PacketOp::SEND && header.flags & packet::IMM == 0;
            is_send && flags == ends && payload == 0 && (1..=MAX_MESSAGE).contains(&header.len)
        }
        packet::LAST => (1..=segment).contains(&payload),
        // All packets but the last are full.
        _ if flags & packet::LAST == 0 => payload == segment,
        _ => payload <= segment,
    })
}

impl SoftQp {
    /// Checks the next request: its lengths, its place in the current message, and the message's length.
    ///
    /// All header fields of a request are checked here, before anything is done (InfiniBand architecture 9.7.4.1).
    /// Keys, rights and ranges are checked where memory is looked up.
    fn check_request(&self, header: &Header, body: &Body<'_>, segment: usize) -> Result<(), Refusal> {
        check_sizes(header, body.len(), segment)?;
        let is_message = matches!(header.op, PacketOp::SEND | PacketOp::WRITE);
        let is_first = !is_message || header.flags & packet::FIRST != 0;
        let Some(current) = &self.resp.current else { return require(is_first) };
        // Only a SEND has consumed its receive.
        let is_same = current.counter.is_some() == (header.op == PacketOp::SEND);
        let received = current.received + payload_len(header, body.len())?;
        require(!is_first && is_same && received <= MAX_MESSAGE as usize)
    }
}

impl SoftQp {
    fn handle_read(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Result<u32, Refusal> {
        self.allow(Access::REMOTE_READ)?;
        let addr = body.word(0).ok_or(INVALID)?;
        let left = header.len as usize;
        // A READ of no bytes needs no key, either.
        if left > 0 {
            let place = env.keys.remote(header.rkey, self.rings.request.pdn, addr, left, Access::REMOTE_READ);
            place.map_err(Refusal::Remote)?;
        }
        let segment = env.links.segment(self.link);
        let (psn, rkey, packets) = (header.psn, header.rkey, segments(left, segment));
        let by_reference = header.flags & packet::REFERENCE != 0;
        for response in &mut self.resp.responses {
            let Response::Read { psn: next, left: rest, done, .. } = *response else { continue };
            if next.wrapping_add(segments(rest, segment)) == psn.wrapping_add(packets) {
                // The same READ, requested again before its response is complete: one response is enough.
                if ahead(psn, next) < 0 || !by_reference {
                    // Bytes, once some were sent.
                    let by_reference = by_reference && done == 0;
                    *response = Response::Read { psn, rkey, addr, left, done: 0, by_reference };
                }
                return Ok(packets);
            }
        }
        if !self.resp.has_room_for_read() {
            return Err(INVALID);
        }
        self.resp.responses.push_back(Response::Read { psn, rkey, addr, left, done: 0, by_reference });
        Ok(packets)
    }

    fn handle_atomic(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Result<(), Refusal> {
        self.allow(Access::REMOTE_ATOMIC)?;
        let word = |i| body.word(i).ok_or(INVALID);
        let (addr, [a, b, c, d]) = (word(0)?, [word(1)?, word(2)?, word(3)?, word(4)?]);
        let op = if header.op == PacketOp::FETCH_ADD {
            MaskedOp::FetchAdd { add: a, boundary: b }
        } else {
            MaskedOp::CompareSwap { compare: a, swap: b, compare_mask: c, swap_mask: d }
        };
        // Checked: 4 or 8.
        let atomic = MaskedAtomic { size: if header.len == 4 { 4 } else { 8 }, op };
        let (size, len) = (atomic.size, usize::from(atomic.size));
        if !addr.is_multiple_of(size.into()) || !self.resp.has_room_for_read() {
            return Err(INVALID);
        }
        let (memory, offset) = env
            .keys
            .remote(header.rkey, self.rings.request.pdn, addr, len, Access::REMOTE_ATOMIC)
            .map_err(Refusal::Remote)?;
        // Payload in write-combining buffers goes first.
        memory.fence();
        // The CPU changes a word of a GPU by a load and a store: a locked instruction would lock the bus. Atomic operations of this HCA
        // exclude each other anyway.
        let value = if !memory.is_mapped() {
            let old = self.receive_staging.change(memory, offset, atomic, env.copy_engine);
            old.ok_or(Refusal::Remote(Syndrome::REM_OP_ERR))?
        } else if size == 4 {
            let word = memory.word32(offset).map_err(|_| INVALID)?;
            // Checked: the new value has as many bits.
            let new = |old: u32| u32::try_from(atomic.apply(old.into())).ok();
            match memory.is_host() {
                true => word.atomic().fetch_update(Ordering::AcqRel, Ordering::Acquire, new),
                false => Ok(word.load()).inspect(|&old| word.store(new(old).unwrap_or(old))),
            }
            .unwrap_or_else(|old| old)
            .into()
        } else {
            let word = memory.word64(offset).map_err(|_| INVALID)?;
            let new = |old| Some(atomic.apply(old));
            match memory.is_host() {
                true => word.atomic().fetch_update(Ordering::AcqRel, Ordering::Acquire, new),
                false => Ok(word.load()).inspect(|&old| word.store(atomic.apply(old))),
            }
            .unwrap_or_else(|old| old)
        };
        if self.resp.replays.len() == REPLAYS {
            self.resp.replays.pop_front();
        }
        let done = Replay { psn: header.psn, value, size };
        self.resp.replays.push_back(done);
        self.resp.responses.push_back(Response::Atomic(done));
        Ok(())
    }

    /// Next bytes of a READ response; `None` while they are being staged.
    fn read_source(
        &mut self,
        response: &Response,
        env: &Env<'_>,
    ) -> Result<Option<(Memory, usize)>, Syndrome> {
        let &Response::Read { psn, rkey, addr, left, done, .. } = response else {
            return Err(Syndrome::REM_OP_ERR);
        };
        // The region may have been deregistered since the request.
        let begin = addr - done as u64;
        let (memory, offset) =
            env.keys.remote(rkey, self.rings.request.pdn, begin, done + left, Access::REMOTE_READ)?;
        if !Self::is_staged(memory, done + left, env) {
            return Ok(Some((memory.clone(), offset + done)));
        }
        let first = psn.wrapping_sub(
            u32::try_from(done / env.links.segment(self.link)).expect("messages are at most 1 GiB"),
        );
        let gather = |at, len| Ok(vec![(memory.clone(), offset + at, len)]);
        match self.responses.stage(first, done + left, done, gather, env.copies()) {
            Ok(Staged::Ready(memory, at)) => Ok(Some((memory, at))),
            Ok(Staged::Pending) => Ok(None),
            Ok(Staged::Failed(_)) if memory.is_mapped() => Ok(Some((memory.clone(), offset + done))),
            _ => Err(Syndrome::REM_OP_ERR),
        }
    }
}

/// A received packet, or message by reference.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    header: Header,
    /// Number of its PSNs.
    packets: u32,
    /// Counter of the receive it completes.
    counter: Option<u16>,
    /// Bytes of the message so far.
    bytes: usize,
}

impl Arrival {
    fn of(header: &Header) -> Self {
        Self { header: *header, packets: 1, counter: None, bytes: 0 }
    }
}

impl SoftQp {
    pub(super) fn has_receive(&mut self, env: &mut Env<'_>) -> bool {
        if let Some(srqn) = self.srqn {
            return !self.resp.put_back.is_empty() || env.srqs.has_receive(srqn);
        }
        if self.resp.posted == self.resp.tail {
            self.resp.posted = self.rings.recv_record(self.resp.tail);
        }
        self.resp.posted > self.resp.tail
    }

    /// Consumes the next receive, which there must be. Returns its counter and scatter list.
    pub(super) fn take_receive(&mut self, env: &mut Env<'_>) -> (u16, Sges) {
        let Some(srqn) = self.srqn else {
            let sges = self.rings.receive(self.resp.tail);
            return (self.resp.consume(), sges);
        };
        let put_back = self.resp.put_back.pop_front();
        let taken = match put_back {
            Some(index) => env.srqs.read(srqn, index).map(|sges| (index, sges)),
            None => env.srqs.take(srqn, env.async_events),
        };
        // The program destroyed the queue: a receive without buffers.
        taken.unwrap_or_default()
    }

    fn handle_send(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Result<(), Refusal> {
        if header.flags & packet::FIRST != 0 {
            if !self.has_receive(env) {
                return Err(Refusal::NotReady);
            }
            let (counter, sges) = self.take_receive(env);
            if let Some(local) = env.faults.next_recv() {
                return Err(Refusal::Receive { counter, local, remote: Syndrome::REM_OP_ERR });
            }
            self.resp.current = Some(Current { counter: Some(counter), sges, received: 0 });
        }
        let taken = self.resp.current.take();
        // Checked: a packet that is not the first belongs to a SEND.
        let Some((mut current, counter)) = taken.and_then(|c| c.counter.map(|counter| (c, counter))) else {
            return Err(INVALID);
        };
        let capacity: usize = current.sges.iter().map(|s| s.len as usize).sum();
        let failed = |local, remote| Refusal::Receive { counter, local, remote };
        let is_placed = header.flags & packet::PLACED != 0;
        let len = if is_placed { header.len as usize } else { body.len() };
        if current.received + len > capacity {
            return Err(failed(Syndrome::LOC_LEN_ERR, Syndrome::REM_INV_REQ_ERR));
        }
        let copy = match is_placed {
            true => {
                current.sges.iter().try_for_each(|sge| self.local(sge, true, env).map(drop)).map(|()| None)
            }
            false => self.scatter(current.sges.iter().copied(), current.received, body, 0, env),
        };
        let copy = copy.map_err(|local| failed(local, Syndrome::REM_OP_ERR))?;
        env.stats.placed += u64::from(is_placed);
        current.received += len;
        let bytes = current.received;
        let is_last = header.flags & packet::LAST != 0;
        let complete = is_last.then_some(counter);
        if !is_last {
            self.resp.current = Some(current);
        }
        self.arrive(Arrival { counter: complete, bytes, ..Arrival::of(header) }, copy, env);
        Ok(())
    }

    /// Handles a packet whose bytes are in place or being copied.
    fn arrive(&mut self, arrival: Arrival, copy: Option<Ticket>, env: &mut Env<'_>) {
        if copy.is_none() && !self.resp.is_copying() {
            return self.complete_arrival(&arrival, env);
        }
        let in_place = || {
            let ticket = Ticket::default();
            ticket.done();
            ticket
        };
        self.resp.complete_later(arrival, copy.unwrap_or_else(in_place));
    }

    /// Completes the receive of a packet and acknowledges it.
    fn complete_arrival(&mut self, arrival: &Arrival, env: &mut Env<'_>) {
        let header = &arrival.header;
        if let Some(counter) = arrival.counter {
            let imm = header.flags & packet::IMM != 0;
            let opcode = match (header.op, imm) {
                (PacketOp::WRITE, _) => CqeOpcode::RESP_WR_IMM,
                (_, true) => CqeOpcode::RESP_SEND_IMM,
                _ => CqeOpcode::RESP_SEND,
            };
            let cqe = Cqe {
                opcode,
                byte_cnt: u32::try_from(arrival.bytes).expect("messages are at most 1 GiB"),
                imm: header.imm,
                solicited: header.flags & packet::SOLICITED != 0,
                ..Cqe::default()
            };
            self.complete_recv(cqe, counter, env);
        }
        // Acknowledges long messages on the way, so that the requester's window moves.
        if header.flags & packet::LAST != 0 || header.psn.is_multiple_of(8) {
            self.resp.ack(header.psn.wrapping_add(arrival.packets).wrapping_sub(1));
            self.resp.acks_now |= arrival.bytes > SEGMENT;
        }
    }

    fn allow(&self, access: Access) -> Result<(), Refusal> {
        require(self.access.contains(access))
    }

    fn handle_write(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Result<(), Refusal> {
        self.allow(Access::REMOTE_WRITE)?;
        let notify = header.flags & (packet::LAST | packet::IMM) == packet::LAST | packet::IMM;
        if notify && !self.has_receive(env) {
            return Err(Refusal::NotReady);
        }
        let addr = body.word(0).ok_or(INVALID)?;
        // Checked: the body holds the address.
        let len = body.len() - 8;
        let mut copy = None;
        // A WRITE of no bytes needs no key (InfiniBand architecture 9.7.5.2.4).
        if len > 0 {
            let (memory, at) = env
                .keys
                .remote(header.rkey, self.rings.request.pdn, addr, len, Access::REMOTE_WRITE)
                .map_err(Refusal::Remote)?;
            let refused = |_| Refusal::Remote(Syndrome::REM_OP_ERR);
            if memory.is_mapped() {
                body.copy_to(8, memory, at, len).map_err(refused)?;
                env.pending_flush.written(header.rkey, memory);
            } else {
                let piece = staging::Piece { from: 8, key: header.rkey, memory: memory.clone(), at, len };
                copy = Some(self.receive_staging.put(body, vec![piece], env.copies()).map_err(refused)?);
            }
        }
        let none = Current { counter: None, sges: SmallVec::new(), received: 0 };
        let mut current = self.resp.current.take().unwrap_or(none);
        // The CQE reports the length of the whole message.
        current.received += len;
        let bytes = current.received;
        let is_last = header.flags & packet::LAST != 0;
        let mut counter = None;
        if notify {
            let taken = match self.srqn {
                Some(_) => self.take_receive(env).0,
                None => self.resp.consume(),
            };
            if let Some(local) = env.faults.next_recv() {
                return Err(Refusal::Receive { counter: taken, local, remote: Syndrome::REM_OP_ERR });
            }
            counter = Some(taken);
        } else if !is_last {
            self.resp.current = Some(current);
        }
        self.arrive(Arrival { counter, bytes, ..Arrival::of(header) }, copy, env);
        Ok(())
    }
}
