//! Requester of a queue pair: sends in flight, responses, retransmission, completion in order.

mod fetch;
mod refer;
mod transmit;

pub(crate) use refer::Reason;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use self::fetch::Fetch;
use self::refer::Referred;
use super::{Env, SoftQp, UNLINKED, staging};
use crate::packet::{self, Header, PacketOp, ahead};
use crate::wire::Body;
use gdsync_device::copy_engine::{Status, Ticket};
use gdsync_device::{QpAttr, QpState};
use mlx5_ring::{self as mlx5, DataSeg, DecodedOp, Opcode, Syndrome};

#[derive(Debug)]
pub(crate) struct Requester {
    /// Blocks before this one may be fetched.
    target: u64,
    /// Next block to fetch.
    head: u64,
    pending: VecDeque<Pending>,
    /// Index of the first pending send with unsent packets.
    unsent: usize,
    /// PSN of the next new message.
    next_psn: u32,
    /// PSN after the last packet ever sent.
    sent_psn: u32,
    /// READs and atomics in progress.
    reads: usize,
    max_reads: usize,
    timeout: Option<Duration>,
    retry_cnt: u8,
    rnr_retry: u8,
    retries: u8,
    rnr_retries: u8,
    /// A response is missing; retransmitted, and nothing new was received since.
    gap: bool,
    /// Retransmission deadline; set by the first `tick` with packets in flight.
    deadline: Option<Instant>,
    /// Receiver not ready: nothing is sent before this time.
    rnr_until: Option<Instant>,
    references: refer::References,
    /// The peer's memory cannot be read, so READs take bytes.
    cannot_fetch: bool,
}

/// A send between fetch and completion. Its WQE stays in the ring and is read again to retransmit.
#[derive(Debug)]
struct Pending {
    begin: u64,
    index: u16,
    opcode: Opcode,
    kind: Kind,
    completes: bool,
    len: usize,
    psn: u32,
    packets: u32,
    /// Packets sent; for a READ, requested.
    sent: u32,
    /// Packets acknowledged; for a READ, received.
    done: u32,
    /// The stream has put the payload into the receive.
    placed: bool,
    /// Region sent by reference.
    referred: Option<Referred>,
    /// The reference was sent at least once.
    reference_sent: bool,
    /// Progress of a READ by reference.
    fetch: Option<Fetch>,
    /// Copies of staged responses in progress.
    copies: Vec<Ticket>,
    error: Option<Syndrome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Nop,
    Message,
    Read,
    Atomic,
}

impl Pending {
    fn is_done(&self) -> bool {
        self.done == self.packets
    }

    fn needs_response(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Atomic)
    }

    /// Adds the copy of a staged response and drops finished ones.
    fn add_copy(&mut self, ticket: Option<Ticket>) {
        self.copies.extend(ticket);
        if self.copies.iter().any(|ticket| ticket.status() == Status::Failed) {
            self.error = Some(Syndrome::LOC_QP_OP_ERR);
        }
        self.copies.retain(|ticket| !ticket.is_over());
    }

    fn last_psn(&self) -> u32 {
        self.psn.wrapping_add(self.packets).wrapping_sub(1)
    }
}

impl Requester {
    pub(crate) fn new(psn: u32) -> Self {
        Self {
            target: 0,
            head: 0,
            pending: VecDeque::new(),
            unsent: 0,
            next_psn: psn,
            sent_psn: psn,
            reads: 0,
            max_reads: 0,
            timeout: None,
            retry_cnt: 0,
            rnr_retry: 0,
            retries: 0,
            rnr_retries: 0,
            gap: false,
            deadline: None,
            rnr_until: None,
            references: refer::References::default(),
            cannot_fetch: false,
        }
    }

    pub(crate) fn configure(&mut self, attr: &QpAttr) {
        if let Some(code) = attr.timeout {
            self.timeout = (code > 0).then(|| Duration::from_nanos(4096 << code));
        }
        if let Some(count) = attr.retry_cnt {
            (self.retry_cnt, self.retries) = (count, count);
        }
        if let Some(count) = attr.rnr_retry {
            (self.rnr_retry, self.rnr_retries) = (count, count);
        }
        self.max_reads = attr.max_rd_atomic.map_or(self.max_reads, usize::from);
    }

    /// PSN after the last packet ever sent, for tests.
    #[cfg(test)]
    pub(crate) fn sent_psn(&self) -> u32 {
        self.sent_psn
    }

    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// Allows fetching blocks up to `target`.
    pub(crate) fn extend(&mut self, target: u64) {
        self.target = self.target.max(target);
    }

    /// Whether there are WQEs to fetch.
    pub(super) fn has_unfetched(&self) -> bool {
        self.head < self.target
    }

    /// Whether it has work or waits for responses.
    pub(crate) fn is_active(&self) -> bool {
        !self.pending.is_empty() || self.has_unfetched()
    }

    /// Whether sends are outstanding.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Sets the error of the oldest outstanding send.
    pub(crate) fn fail_front(&mut self, syndrome: Syndrome) {
        if let Some(front) = self.pending.front_mut() {
            front.error = Some(syndrome);
        }
    }

    /// Removes the oldest outstanding send to be flushed, with its own error if it has one.
    pub(crate) fn flush_pending(&mut self) -> Option<(u16, Opcode, Syndrome)> {
        self.unsent = 0;
        let p = self.pending.pop_front()?;
        self.count_reference(&p, false);
        Some((p.index, p.opcode, p.error.unwrap_or(Syndrome::WR_FLUSH_ERR)))
    }

    /// Skips a WQE that was never fetched.
    pub(crate) fn skip(&mut self, blocks: u64) {
        self.head += blocks;
        self.target = self.target.max(self.head);
    }

    fn push(&mut self, pending: Pending, blocks: u64) {
        self.head += blocks;
        self.next_psn = self.next_psn.wrapping_add(pending.packets);
        self.reads += usize::from(pending.needs_response());
        self.count_reference(&pending, true);
        self.pending.push_back(pending);
    }

    /// Records that the packets of pending send `i` before `sent` were sent.
    fn note_sent(&mut self, i: usize, sent: u32) {
        let p = &mut self.pending[i];
        p.sent = sent;
        let behind = p.psn.wrapping_add(sent);
        if ahead(behind, self.sent_psn) > 0 {
            self.sent_psn = behind;
        }
    }

    /// Acknowledges all packets before `psn`. Returns true if a response before it was lost.
    fn acknowledge(&mut self, psn: u32) -> bool {
        for i in 0..self.pending.len() {
            let p = &mut self.pending[i];
            let through = ahead(psn, p.psn);
            if through <= 0 {
                break;
            }
            if p.needs_response() {
                if !p.is_done() && ahead(psn, p.last_psn()) > 0 {
                    return true;
                }
                continue;
            }
            let through = through.unsigned_abs().min(p.packets);
            if through > p.done {
                p.done = through;
                p.sent = p.sent.max(through);
                self.progressed();
            }
        }
        false
    }

    /// Progress by the peer: resets timers and retries.
    fn progressed(&mut self) {
        self.deadline = None;
        self.gap = false;
        self.retries = self.retry_cnt;
        self.rnr_retries = self.rnr_retry;
    }

    /// Go-back-N: sends all unacknowledged packets again.
    fn go_back(&mut self) {
        for p in self.pending.iter_mut().take(self.unsent + 1) {
            p.sent = p.done;
        }
        self.unsent = self.pending.iter().position(|p| !p.is_done()).unwrap_or(self.pending.len());
        self.deadline = None;
    }

    /// Outstanding send that packet `psn` belongs to.
    fn find(&mut self, psn: u32) -> Option<&mut Pending> {
        self.pending.iter_mut().find(|p| {
            let at = ahead(psn, p.psn);
            at >= 0 && at.unsigned_abs() < p.packets
        })
    }

    fn oldest_psn(&self) -> u32 {
        self.pending.iter().find(|p| !p.is_done()).map_or(self.next_psn, |p| p.psn.wrapping_add(p.done))
    }

    /// Whether the retransmission deadline has passed.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// When `tick` must run next.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.rnr_until.or(self.deadline)
    }
}

impl SoftQp {
    /// Completes finished sends in order. Returns whether there were any.
    pub(crate) fn complete_finished(&mut self, env: &mut Env<'_>) -> bool {
        let mut any = false;
        while let Some(p) = self.req.pending.front_mut() {
            if !p.copies.is_empty() {
                p.add_copy(None);
            }
            if p.error.is_none() && (!p.is_done() || !p.copies.is_empty() || p.fetch.is_some()) {
                break;
            }
            any = true;
            if p.error.is_some() {
                self.go_error(env);
                break;
            }
            let p = self.req.pending.pop_front().expect("front exists");
            self.req.unsent = self.req.unsent.saturating_sub(1);
            self.req.reads -= usize::from(p.needs_response());
            self.req.count_reference(&p, false);
            if p.completes {
                let bytes = if p.needs_response() { u32::try_from(p.len).expect("at most 1 GiB") } else { 0 };
                self.complete_send(p.index, p.opcode, None, bytes, env);
            }
        }
        any
    }

    /// Checks the timers.
    pub(crate) fn tick(&mut self, now: Instant, env: &mut Env<'_>) {
        self.time_out_copies(now, env.copy_limit);
        if self.state != QpState::RTS {
            return;
        }
        if let Some(until) = self.req.rnr_until {
            if now >= until {
                self.req.rnr_until = None;
                self.advance(env);
            }
            return;
        }
        // Without a link, packets are lost; a peer that takes none gets none of those that wait.
        let is_held = self.link == UNLINKED || env.links.is_stalled(self.link);
        let under_way = is_held && self.req.has_pending() || self.req.pending.iter().any(|p| p.sent > p.done);
        match self.req.deadline {
            _ if !under_way => self.req.deadline = None,
            None => self.req.deadline = self.req.timeout.map(|t| now + t),
            Some(deadline) if now >= deadline => {
                self.req.deadline = None;
                if self.awaits_processor(env) {
                    return;
                }
                if self.req.retries == 0 {
                    self.fail(Syndrome::RETRY_EXC_ERR, env);
                } else {
                    self.req.retries -= 1;
                    self.req.gap = false;
                    self.retransmit(env);
                    self.advance(env);
                }
            }
            Some(_) => {}
        }
    }
}

impl SoftQp {
    /// Whether packets wait for a peer whose HCA gets no time of a processor. A card needs none, so that is no timeout.
    fn awaits_processor(&self, env: &Env<'_>) -> bool {
        // Answers may wait on a link that the peer has already and that is being made here.
        let is_sought = self.remote.is_some_and(|remote| env.peers.is_sought(remote.gid));
        // A card also acknowledges for a process that is stopped.
        is_sought || env.links.awaits_processor(self.link, env.async_events.has_listener())
    }
}

/// Delay of an RNR timer code (InfiniBand architecture, table 45).
fn rnr_pause(code: u32) -> Duration {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * HUNDREDTHS_OF_MS[code as usize & 31]
}

impl SoftQp {
    /// Handles a response of the peer.
    pub(crate) fn handle_response(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        if self.state != QpState::RTS {
            return;
        }
        if header.op == PacketOp::REVOKE {
            return self.fetches_revoked(env);
        }
        let psn = header.psn;
        // The only range check of a response's PSN. Without it, sends that never left could complete.
        if ahead(psn, self.req.sent_psn) >= 0 {
            env.stats.packets_discarded += 1;
            return;
        }
        match header.op {
            PacketOp::ACK => {
                if self.req.acknowledge(psn.wrapping_add(1)) {
                    self.response_lost(env);
                }
            }
            PacketOp::READ_RESPONSE => self.read_response(header, body, env),
            PacketOp::ATOMIC_RESPONSE => self.atomic_response(header, body, env),
            PacketOp::NAK => self.handle_nak(header, env),
            PacketOp::COPYING => self.copying(psn),
            _ => env.stats.packets_discarded += 1,
        }
        self.complete_finished(env);
    }

    fn retransmit(&mut self, env: &mut Env<'_>) {
        env.stats.retransmissions += 1;
        self.req.go_back();
        self.seek_link(env);
    }

    /// Retransmits after a lost response. Later responses report the same gap; once is enough.
    fn response_lost(&mut self, env: &mut Env<'_>) {
        if !std::mem::replace(&mut self.req.gap, true) {
            self.retransmit(env);
        }
    }

    fn handle_nak(&mut self, header: &Header, env: &mut Env<'_>) {
        let psn = header.psn;
        if ahead(psn, self.req.oldest_psn()) < 0 {
            // Already acknowledged.
            env.stats.packets_discarded += 1;
            return;
        }
        self.req.acknowledge(psn);
        match header.code {
            packet::NAK_SEQUENCE => self.retransmit(env),
            packet::NAK_RNR => {
                if self.req.rnr_retries == 0 {
                    return self.fail_at(psn, Syndrome::RNR_RETRY_EXC_ERR);
                }
                if self.req.rnr_retry < 7 {
                    self.req.rnr_retries -= 1;
                }
                self.req.rnr_until = Some(Instant::now() + rnr_pause(header.len));
                self.retransmit(env);
            }
            packet::NAK_REFERENCE => self.reference_refused(psn, header.len, env),
            syndrome => {
                let allowed = [Syndrome::REM_INV_REQ_ERR, Syndrome::REM_ACCESS_ERR, Syndrome::REM_OP_ERR];
                let known = allowed.into_iter().find(|known| known.0 == syndrome);
                self.fail_at(self.first_revoked(psn), known.unwrap_or(Syndrome::BAD_RESP_ERR));
            }
        }
    }

    fn fail_at(&mut self, psn: u32, syndrome: Syndrome) {
        if let Some(p) = self.req.find(psn) {
            p.error = Some(syndrome);
        }
    }

    fn read_response(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        let has_room = self.receive_staging.has_room();
        let Some(p) = self.req.find(header.psn).filter(|p| p.kind == Kind::Read) else {
            env.stats.packets_discarded += 1;
            return;
        };
        let at = header.psn.wrapping_sub(p.psn);
        let (begin, len, psn) = (p.begin, p.len, p.psn);
        if !has_room {
            env.stats.packets_discarded += 1;
            return;
        }
        if at != p.done {
            env.stats.packets_discarded += 1;
            if at > p.done {
                self.response_lost(env);
            }
            return;
        }
        // Bytes behind READs by reference: those are in place first.
        while header.flags & packet::REFERENCE == 0 && self.step_fetch(env) {}
        // A READ response acknowledges everything before the READ.
        if self.req.acknowledge(psn) {
            return self.response_lost(env);
        }
        if header.flags & packet::REFERENCE != 0 {
            return self.granted(psn, body, env);
        }
        let segment = env.links.segment(self.link);
        let offset = at as usize * segment;
        let size = segment.min(len - offset);
        let result = if body.len() == size {
            self.scatter_read(begin, offset, body, env)
        } else {
            Err(Syndrome::BAD_RESP_ERR)
        };
        let p = self.req.find(header.psn).expect("found above");
        match result {
            Ok(copy) => {
                p.done += 1;
                p.sent = p.sent.max(p.done);
                p.fetch = None;
                p.add_copy(copy);
                self.req.progressed();
            }
            Err(syndrome) => p.error = Some(syndrome),
        }
    }

    fn scatter_read(
        &mut self,
        begin: u64,
        offset: usize,
        body: &Body<'_>,
        env: &mut Env<'_>,
    ) -> Result<Option<Ticket>, Syndrome> {
        let wqe = self.rings.fetch(begin);
        let op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).map_err(|e| e.syndrome())?;
        let DecodedOp::Read { sges, .. } = op else { return Err(Syndrome::LOC_QP_OP_ERR) };
        self.scatter(sges.iter(wqe.as_bytes()), offset, body, 0, env)
    }

    /// Copies a packet's body from `from` on to the SGEs, `offset` bytes into them. Returns a ticket if some of it is
    /// staged.
    pub(crate) fn scatter(
        &mut self,
        sges: impl Iterator<Item = DataSeg>,
        mut offset: usize,
        body: &Body<'_>,
        from: usize,
        env: &mut Env<'_>,
    ) -> Result<Option<Ticket>, Syndrome> {
        let mut at = from;
        let mut staged = Vec::new();
        for sge in sges {
            if at == body.len() {
                break;
            }
            let piece = self.local(&sge, true, env)?;
            if offset >= piece.len {
                offset -= piece.len;
                continue;
            }
            let take = (body.len() - at).min(piece.len - offset);
            let to = piece.offset + offset;
            if piece.memory.is_mapped() {
                body.copy_to(at, piece.memory, to, take).map_err(|_| Syndrome::LOC_PROT_ERR)?;
                env.pending_flush.written(sge.lkey, piece.memory);
            } else {
                let (key, memory) = (sge.lkey, piece.memory.clone());
                staged.push(staging::Piece { from: at, key, memory, at: to, len: take });
            }
            offset = 0;
            at += take;
        }
        if at != body.len() {
            return Err(Syndrome::LOC_LEN_ERR);
        }
        if staged.is_empty() {
            return Ok(None);
        }
        self.receive_staging.put(body, staged, env.copies()).map(Some).map_err(|_| Syndrome::LOC_QP_OP_ERR)
    }

    fn atomic_response(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        let Some(p) = self.req.find(header.psn).filter(|p| p.kind == Kind::Atomic && !p.is_done()) else {
            env.stats.packets_discarded += 1;
            return;
        };
        let (begin, psn) = (p.begin, p.psn);
        if !self.receive_staging.has_room() {
            env.stats.packets_discarded += 1;
            return;
        }
        if self.req.acknowledge(psn) {
            return self.response_lost(env);
        }
        let wqe = self.rings.fetch(begin);
        let result = match mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()) {
            Ok(
                DecodedOp::CompareSwap { result, .. }
                | DecodedOp::FetchAdd { result, .. }
                | DecodedOp::MaskedAtomic { result, .. },
            ) if body.len() == result.len as usize => self.scatter(std::iter::once(result), 0, body, 0, env),
            _ => Err(Syndrome::BAD_RESP_ERR),
        };
        let p = self.req.find(header.psn).expect("found above");
        match result {
            Ok(copy) => {
                p.done = 1;
                p.add_copy(copy);
                self.req.progressed();
            }
            Err(syndrome) => p.error = Some(syndrome),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_delays_match_the_specification() {
        assert_eq!(rnr_pause(0), Duration::from_micros(655_360));
        assert_eq!(rnr_pause(1), Duration::from_micros(10));
        assert_eq!(rnr_pause(12), Duration::from_micros(640));
        assert_eq!(rnr_pause(31), Duration::from_micros(491_520));
    }
}
