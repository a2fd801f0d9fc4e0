//! Messages whose payload is being copied: by reference, by cross-memory attach, or from receive staging.
//!
//! They complete in order, once their payload is in place. A reference is checked like payload: receive, length, keys.
//! While copies are in progress, only further references are accepted, and nothing after the oldest copy is
//! acknowledged. Packets in [receive staging](crate::qp::staging) wait here too, and later packets wait behind them.
//!
//! *Failed copy.* The responder asks for the payload itself. It returns the receives of this message and later ones to
//! the queue; none of them has completed. All their copies must be over first.
//!
//! *Withdrawn send.* Its bytes may have changed during the copy. So a message completes only after everything sent
//! before the end of its copy has been received: a WITHDRAW among it prevents the completion.
//!
//! *End of the queue pair.* Receives are flushed when copies into them are over. A copy that never ends (GPU busy or
//! broken) is abandoned after the copy limit; it may still happen, so its memory is kept. Reads by this CPU are never
//! abandoned.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{Arrival, INVALID, Refusal, Responder, Response};
use crate::links::Links;
use crate::packet::{self, Header, PacketOp, REFERENCE_BYTES, Reference, ahead, segments};
use crate::qp::requester::Reason;
use crate::qp::{Env, PIECE, SoftQp};
use crate::wire::Body;
use gdsync_device::copy_engine::{Part, Source, Status, Ticket};
use gdsync_device::memory::{Memory, Process};
use gdsync_device::{Access, QpState};
use mlx5_ring::{DataSeg, Syndrome};

/// Maximum queued packets: more than a peer has in flight.
const MAX_COPIES: usize = 80;

/// Messages being copied, in order.
#[derive(Debug, Default)]
pub(super) struct Copies {
    list: VecDeque<Message>,
    /// Receives of messages that will not complete.
    abandoned: Vec<u16>,
    /// Nothing is received until the queue pair is reset.
    closed: bool,
    /// The peer withdrew its references, so queued messages must not complete.
    withdrawn: bool,
}

impl Copies {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.list.len() + self.abandoned.len()
    }
}

#[derive(Debug)]
struct Message {
    arrival: Arrival,
    /// Link of a message by reference.
    link: Option<usize>,
    /// Keys of the regions that the copy writes to.
    keys: SmallVec<[u32; 2]>,
    ticket: Ticket,
    /// Cross-memory attach by this CPU.
    read: Option<CmaRead>,
    since: Instant,
    state: State,
}

#[derive(Debug)]
enum State {
    Copying,
    /// The copy ended when the link had this [`drained`](crate::links::Links::drained) count.
    Over(u64),
    /// The copy failed.
    Failed,
    /// The message will be refused in its turn.
    Refused(Refusal),
}

impl Message {
    fn is_reference(&self) -> bool {
        self.link.is_some()
    }

    /// Whether a message whose copy ended at `drained` can no longer be withdrawn.
    fn may_complete(&self, drained: u64, links: &Links) -> bool {
        self.link.is_none_or(|link| links.has_drained_since(link, drained))
    }

    fn is_over(&self) -> bool {
        !matches!(self.state, State::Copying)
    }

    /// Reads the next piece of a cross-memory attach.
    fn read_next(&mut self) {
        match self.read.as_mut().map(CmaRead::read_next) {
            Some(Ok(true)) => self.ticket.done(),
            Some(Ok(false)) | None => {}
            Some(Err(error)) => self.ticket.fail(format!("process_vm_readv failed: {error}")),
        }
    }
}

impl Arrival {
    /// How to refuse it, and its receive.
    fn refusal(&self, local: Syndrome) -> Refusal {
        let remote = Syndrome::REM_OP_ERR;
        match self.counter {
            Some(counter) => Refusal::Receive { counter, local, remote },
            None => Refusal::Remote(remote),
        }
    }
}

/// Source of a payload by reference.
enum Payload {
    /// Read by a copy engine.
    Engine(Source),
    /// Host memory of a process, from an address on.
    Host((Process, u64)),
}

/// Destination of a message's payload.
#[derive(Default)]
struct Destination {
    /// Memory, offset, length.
    places: SmallVec<[(Memory, usize, usize); 1]>,
    keys: SmallVec<[u32; 2]>,
}

impl Destination {
    fn add(&mut self, key: u32, memory: &Memory, offset: usize, len: usize) {
        self.places.push((memory.clone(), offset, len));
        self.keys.push(key);
    }
}

impl Responder {
    /// Whether copies are in progress.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copies.list.is_empty()
    }

    /// Whether copies other than cross-memory attach are in progress.
    pub(crate) fn awaits_engines(&self) -> bool {
        self.is_copying() && self.copies.list.iter().any(|m| m.read.is_none())
    }

    /// Whether a message from this link is being copied.
    pub(crate) fn has_copy_from(&self, link: usize) -> bool {
        self.copies.list.iter().any(|m| m.link == Some(link))
    }

    /// Whether a packet must be dropped now, to be sent again.
    pub(super) fn must_wait(&self, header: &Header) -> bool {
        let Copies { list, closed, .. } = &self.copies;
        let refuses = list.iter().any(|m| matches!(m.state, State::Failed | State::Refused(_)));
        let is_bytes = header.flags & packet::REFERENCE == 0;
        *closed || refuses || is_bytes && list.iter().any(Message::is_reference) || list.len() >= MAX_COPIES
    }

    /// Last PSN that is complete along with all before it.
    pub(super) fn arrived(&self) -> u32 {
        self.copies.list.front().map_or(self.expected, |m| m.arrival.header.psn).wrapping_sub(1)
    }

    /// Whether `psn` belongs to a message being copied or behind one.
    pub(super) fn is_copied(&self, psn: u32) -> bool {
        self.is_copying() && ahead(psn, self.arrived()) > 0
    }

    /// Whether a response would acknowledge a message being copied.
    pub(super) fn is_early(&self, response: &Response) -> bool {
        !matches!(response, Response::Copying(_)) && self.is_copied(response.psn())
    }

    /// Queues a refusal behind the copies in progress.
    pub(super) fn refuse_later(&mut self, header: &Header, refusal: Refusal) {
        let arrival = Arrival { counter: refusal.counter(), ..Arrival::of(header) };
        let (ticket, state) = (Ticket::failed("refused"), State::Refused(refusal));
        self.push(arrival, None, SmallVec::new(), ticket, None, state);
    }

    /// Queues a packet to complete in order after its copy.
    pub(super) fn complete_later(&mut self, arrival: Arrival, ticket: Ticket) {
        self.push(arrival, None, SmallVec::new(), ticket, None, State::Copying);
    }

    fn push(
        &mut self,
        arrival: Arrival,
        link: Option<usize>,
        keys: SmallVec<[u32; 2]>,
        ticket: Ticket,
        read: Option<CmaRead>,
        state: State,
    ) {
        self.copies.list.push_back(Message {
            arrival,
            link,
            keys,
            ticket,
            read,
            since: Instant::now(),
            state,
        });
    }

    /// Takes the receives of messages that will not complete.
    pub(super) fn take_abandoned(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.copies.abandoned)
    }

    /// Stops receiving, cancels copies that have not begun, and returns those that have.
    pub(crate) fn close(&mut self) -> Vec<Ticket> {
        self.copies.closed = true;
        self.cancel();
        self.copies.list.iter().filter(|m| !m.is_over()).map(|m| m.ticket.clone()).collect()
    }

    /// Whether nothing is received any more.
    pub(super) fn is_closed(&self) -> bool {
        self.copies.closed
    }

    pub(crate) fn cancel(&mut self) {
        self.copies.list.iter().for_each(|m| m.ticket.cancel());
    }

    /// Copies in progress into a region.
    pub(crate) fn copies_on(&self, key: u32) -> impl Iterator<Item = Ticket> {
        let on = self.copies.list.iter().filter(move |m| m.keys.contains(&key));
        on.map(|m| m.ticket.clone()).filter(|ticket| !ticket.is_over())
    }

    /// The peer withdrew its references of the connection whose first PSN is `first`.
    pub(super) fn withdrawn(&mut self, first: u32) {
        if first != self.first {
            return;
        }
        (self.copies.closed, self.copies.withdrawn) = (true, true);
        self.cancel();
    }

    /// Discards all messages.
    fn abandon(&mut self) {
        let Copies { list, abandoned, .. } = &mut self.copies;
        abandoned.extend(list.drain(..).filter_map(|m| m.arrival.counter));
    }

    /// Returns to the state before the first message and asks for its payload. `is_shared`: receives come from a shared
    /// receive queue, which does not take them back.
    fn go_back(&mut self, is_shared: bool) {
        let Some(first) = self.copies.list.front() else { return };
        let psn = first.arrival.header.psn;
        let (reason, is_host) = (first.ticket.failure(), first.read.is_some());
        let what = "software HCA: copy by reference failed; asking the peer to send the payload";
        if is_host {
            tracing::debug!(reason, "{what}")
        } else {
            tracing::warn!(reason, "{what}")
        }
        let taken = self.copies.list.iter().filter_map(|m| m.arrival.counter);
        if is_shared {
            let taken: Vec<_> = taken.collect();
            taken.into_iter().rev().for_each(|index| self.put_back.push_front(index));
        } else {
            self.tail -= taken.count() as u64;
        }
        self.expected = psn;
        self.gap = false;
        self.copies.list.clear();
        // Drops responses to later packets.
        self.responses.retain(|response| ahead(response.psn(), psn) < 0);
        self.responses.push_back(Response::Nak { psn, code: packet::NAK_REFERENCE, arg: Reason::FAILED.0 });
    }
}

impl SoftQp {
    /// Handles a message by reference. Returns the number of PSNs it used.
    pub(super) fn handle_reference(
        &mut self,
        header: &Header,
        body: &Body<'_>,
        env: &mut Env<'_>,
    ) -> Result<u32, Refusal> {
        let len = header.len as usize;
        let is_write = header.op == PacketOp::WRITE;
        let bytes = body.array::<REFERENCE_BYTES>(if is_write { 8 } else { 0 });
        let reference = bytes.map(|bytes| Reference::from_bytes(&bytes)).ok_or(INVALID)?;
        if is_write {
            self.allow(Access::REMOTE_WRITE)?;
        }
        let takes = !is_write || header.flags & packet::IMM != 0;
        if takes && !self.has_receive(env) {
            return Err(Refusal::NotReady);
        }
        let cannot_open = Refusal::Reference(Reason::CANNOT_OPEN);
        if !env.links.takes_references(body.link) {
            return Err(cannot_open);
        }
        let payload = if reference.is_to_host() {
            Payload::Host(env.links.host_memory(body.link, &reference).ok_or(cannot_open)?)
        } else {
            Payload::Engine(reference.source(0, len).ok_or(cannot_open)?)
        };
        let mut to = Destination::default();
        if is_write {
            let (addr, key) = (body.word(0).ok_or(INVALID)?, header.rkey);
            let place = env.keys.remote(key, self.rings.request.pdn, addr, len, Access::REMOTE_WRITE);
            let (memory, offset) = place.map_err(Refusal::Remote)?;
            to.add(key, memory, offset, len);
        }
        let mut counter = None;
        if takes {
            let (taken, sges) = self.take_receive(env);
            counter = Some(taken);
            let failed = |(local, remote)| Refusal::Receive { counter: taken, local, remote };
            if let Some(local) = env.faults.next_recv() {
                return Err(failed((local, Syndrome::REM_OP_ERR)));
            }
            if !is_write {
                self.spread(&sges, len, &mut to, env).map_err(failed)?;
            }
        }
        let (ticket, read) = match payload {
            Payload::Engine(source) => {
                let mut from = 0;
                let parts = to.places.into_iter().map(|(to, at, len)| {
                    let part = Part { from: source.skip(from), to, at, len };
                    from += len;
                    part
                });
                let ticket = env.copy_engine.start(parts.collect());
                env.links.note_process(body.link, reference.process());
                (ticket, None)
            }
            Payload::Host((process, from)) => {
                (Ticket::default(), Some(CmaRead::new(process, from, to.places)))
            }
        };
        *env.copied = Some(Instant::now());
        let packets = segments(len, env.links.segment(self.link));
        let arrival = Arrival { packets, counter, bytes: len, ..Arrival::of(header) };
        self.resp.push(arrival, Some(body.link), to.keys, ticket, read, State::Copying);
        Ok(packets)
    }

    /// Adds the SGEs of a receive for `len` bytes. The error holds the syndromes of the receive and of the requester.
    fn spread(
        &self,
        sges: &[DataSeg],
        len: usize,
        to: &mut Destination,
        env: &Env<'_>,
    ) -> Result<(), (Syndrome, Syndrome)> {
        let capacity: usize = sges.iter().map(|s| s.len as usize).sum();
        if len > capacity {
            return Err((Syndrome::LOC_LEN_ERR, Syndrome::REM_INV_REQ_ERR));
        }
        let mut left = len;
        for sge in sges {
            if left == 0 {
                break;
            }
            let piece = self.local(sge, true, env).map_err(|local| (local, Syndrome::REM_OP_ERR))?;
            let take = left.min(piece.len);
            if take > 0 {
                to.add(sge.lkey, piece.memory, piece.offset, take);
            }
            left -= take;
        }
        Ok(())
    }

    /// Advances cross-memory attach and records finished copies. Returns whether a read advanced.
    pub(crate) fn poll_copies(&mut self, env: &mut Env<'_>) -> bool {
        let fetched = self.step_fetch(env);
        // Asked at each step, and hardly ever true.
        if !self.resp.is_copying() {
            return fetched;
        }
        let any = self.step_cma() | fetched;
        for message in self.resp.copies.list.iter_mut().filter(|m| !m.is_over()) {
            message.state = match message.ticket.status() {
                Status::Pending => continue,
                Status::Done => State::Over(message.link.map_or(0, |link| env.links.drained(link))),
                Status::Failed => State::Failed,
            };
        }
        any
    }

    /// Reads a piece of the oldest cross-memory attach. One at a time, because two may write the same bytes.
    fn step_cma(&mut self) -> bool {
        let first = self.resp.copies.list.iter_mut().find(|m| m.read.is_some() && !m.ticket.is_over());
        first.map(Message::read_next).is_some()
    }

    /// Abandons copies that exceed their time limit.
    pub(crate) fn time_out_copies(&mut self, now: Instant, limit: Duration) {
        for message in self.resp.copies.list.iter_mut().filter(|m| m.read.is_none() && !m.is_over()) {
            if now.saturating_duration_since(message.since) < limit {
                continue;
            }
            tracing::error!(
                qpn = self.rings.qpn,
                ?limit,
                "a copy of payload timed out and may still happen: let fewer streams wait than \
                 CUDA_DEVICE_MAX_CONNECTIONS, and check the kernel log for Xid errors"
            );
            message.ticket.cancel();
            message.state = State::Refused(message.arrival.refusal(Syndrome::COPY_TIMEOUT));
        }
    }

    /// Completes finished messages in order. Returns whether there were any.
    pub(crate) fn complete_copies(&mut self, env: &mut Env<'_>) -> bool {
        if self.state == QpState::ERR || self.resp.copies.withdrawn {
            let over = self.resp.copies.list.iter().all(Message::is_over);
            if over {
                self.resp.abandon();
                if self.state == QpState::ERR {
                    self.flush(env);
                }
            }
            return over;
        }
        let mut any = false;
        while let Some(first) = self.resp.copies.list.front() {
            match &first.state {
                State::Over(seen) if first.may_complete(*seen, env.links) => {}
                State::Copying | State::Over(_) => break,
                State::Failed if !first.is_reference() => {
                    tracing::error!(
                        reason = first.ticket.failure(),
                        "software HCA: copy of received payload failed"
                    );
                    let (psn, refusal) =
                        (first.arrival.header.psn, first.arrival.refusal(Syndrome::LOC_QP_OP_ERR));
                    self.resp.copies.list.pop_front();
                    self.refuse(psn, &refusal, env);
                    return true;
                }
                State::Failed => {
                    let list = &self.resp.copies.list;
                    if self.resp.copies.closed || !list.iter().all(Message::is_over) {
                        break;
                    }
                    if list.iter().any(|m| !m.ticket.is_over()) {
                        // An abandoned copy could overwrite the payload when it is sent again.
                        self.refuse(first.arrival.header.psn, &Refusal::Remote(Syndrome::REM_OP_ERR), env);
                        return true;
                    }
                    env.stats.references_refused += 1;
                    self.resp.go_back(self.srqn.is_some());
                    return true;
                }
                State::Refused(_) => {}
            }
            any = true;
            let Some(message) = self.resp.copies.list.pop_front() else { break };
            if let State::Refused(refusal) = message.state {
                self.refuse(message.arrival.header.psn, &refusal, env);
                break;
            }
            env.stats.by_cma += u64::from(message.read.is_some());
            env.stats.by_reference += u64::from(message.is_reference() && message.read.is_none());
            self.complete_arrival(&message.arrival, env);
        }
        any
    }
}

/// A cross-memory attach read (`process_vm_readv`), a piece per HCA step.
///
/// Only the receiver copies, so a stopped or killed peer delays nothing, and the queue pair may be destroyed between
/// two pieces. [`Process`] verifies the peer's identity.
#[derive(Debug)]
pub(super) struct CmaRead {
    of: Process,
    /// Next source address.
    from: u64,
    /// Remaining destinations: memory, offset, length.
    to: SmallVec<[(Memory, usize, usize); 1]>,
}

impl CmaRead {
    pub(super) fn new(of: Process, from: u64, to: SmallVec<[(Memory, usize, usize); 1]>) -> Self {
        Self { of, from, to }
    }

    /// Reads the next piece. Returns whether it was the last.
    pub(super) fn read_next(&mut self) -> io::Result<bool> {
        let Some((memory, at, left)) = self.to.first_mut() else { return Ok(true) };
        let len = PIECE.min(*left);
        memory.read_from_process(*at, len, &self.of, self.from)?;
        self.from += len as u64;
        (*at, *left) = (*at + len, *left - len);
        if *left == 0 {
            self.to.remove(0);
        }
        Ok(self.to.is_empty())
    }
}
