//! The sending side of a queue pair: fetches WQEs, cuts messages into packets, retries, completes in order.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::links::Body;
use super::packet::{self, Header, PacketOp, SEGMENT, ahead, segments};
use super::qp::{Env, SoftQp, Wqe};
use super::wire::Piece;
use crate::mlx5::{self, DataSeg, DecodedOp, DecodedPayload, Opcode, Syndrome};
use crate::verbs::{QpAttr, QpState};

/// Sends in progress at once; more wait in the ring.
const MAX_PENDING: usize = 256;
/// Packets under way at once.
const WINDOW: i32 = 64;

#[derive(Debug)]
pub(crate) struct Requester {
    /// Blocks before this one may be fetched.
    target: u64,
    /// The next block to fetch.
    head: u64,
    pending: VecDeque<Pending>,
    /// The first of `pending` that has packets to send.
    unsent: usize,
    /// Sequence number of the next new message.
    next_psn: u32,
    /// READs and atomics in progress.
    reads: usize,
    max_reads: usize,
    timeout: Option<Duration>,
    retry_cnt: u8,
    rnr_retry: u8,
    retries: u8,
    rnr_retries: u8,
    /// Went back because an answer is missing, and nothing new was answered since.
    gap: bool,
    /// When to go back for want of an answer; set by the first `tick` that sees packets under way.
    deadline: Option<Instant>,
    /// The receiver was not ready: nothing is sent before.
    rnr_until: Option<Instant>,
}

/// A send between fetch and completion. Its WQE stays in the ring and is read again when packets are sent again.
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
    /// Packets sent; of a READ, asked for.
    sent: u32,
    /// Packets acknowledged; of a READ, received.
    done: u32,
    error: Option<Syndrome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Nop,
    Message,
    Read,
    Atomic,
}

/// What became of a fetch.
enum Admit {
    /// It may be sent.
    Ready(DecodedOp),
    /// It is to complete with an error.
    Failed,
    /// READs in progress must end first.
    Stall,
}

impl Pending {
    fn is_done(&self) -> bool {
        self.done == self.packets
    }

    fn needs_answer(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Atomic)
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

    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// A doorbell made blocks up to `target` visible.
    pub(crate) fn extend(&mut self, target: u64) {
        self.target = self.target.max(target);
    }

    /// Whether anything is to be done or waited for.
    pub(crate) fn is_active(&self) -> bool {
        !self.pending.is_empty() || self.head < self.target
    }

    /// The oldest outstanding send is to complete with an error.
    pub(crate) fn fail_front(&mut self, syndrome: Syndrome) {
        if let Some(front) = self.pending.front_mut() {
            front.error = Some(syndrome);
        }
    }

    /// Takes the oldest outstanding send off, to be flushed.
    pub(crate) fn flush_pending(&mut self) -> Option<(u16, Opcode)> {
        self.unsent = 0;
        self.pending.pop_front().map(|p| (p.index, p.opcode))
    }

    /// Passes over a WQE that was never fetched.
    pub(crate) fn skip(&mut self, blocks: u64) {
        self.head += blocks;
        self.target = self.target.max(self.head);
    }

    fn push(&mut self, pending: Pending, blocks: u64) {
        self.head += blocks;
        self.next_psn = self.next_psn.wrapping_add(pending.packets);
        self.reads += usize::from(pending.needs_answer());
        self.pending.push_back(pending);
    }

    /// Everything before `psn` has arrived. Returns whether something must be sent again: an answer that was lost.
    fn acknowledge(&mut self, psn: u32) -> bool {
        for i in 0..self.pending.len() {
            let p = &mut self.pending[i];
            let through = ahead(psn, p.psn);
            if through <= 0 {
                break;
            }
            if p.needs_answer() {
                if !p.is_done() && ahead(psn, p.last_psn()) > 0 {
                    return true;
                }
                continue;
            }
            let through = through.unsigned_abs().min(p.packets);
            if through > p.done {
                p.done = through;
                p.sent = p.sent.max(through);
                self.moved();
            }
        }
        false
    }

    /// The peer answered something new: timers and retries start afresh.
    fn moved(&mut self) {
        self.deadline = None;
        self.gap = false;
        self.retries = self.retry_cnt;
        self.rnr_retries = self.rnr_retry;
    }

    /// Sends everything not acknowledged again.
    fn go_back(&mut self) {
        for p in self.pending.iter_mut().take(self.unsent + 1) {
            p.sent = p.done;
        }
        self.unsent = self.pending.iter().position(|p| !p.is_done()).unwrap_or(self.pending.len());
        self.deadline = None;
    }

    /// The outstanding send that packet `psn` belongs to.
    fn find(&mut self, psn: u32) -> Option<&mut Pending> {
        self.pending.iter_mut().find(|p| {
            let at = ahead(psn, p.psn);
            at >= 0 && at.unsigned_abs() < p.packets
        })
    }

    fn oldest_psn(&self) -> u32 {
        self.pending.iter().find(|p| !p.is_done()).map_or(self.next_psn, |p| p.psn.wrapping_add(p.done))
    }

    /// When `tick` wants to be called next.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.rnr_until.or(self.deadline)
    }
}

impl SoftQp {
    /// Sends what may be sent and completes what is complete. Returns whether anything happened.
    pub(crate) fn advance(&mut self, env: &mut Env<'_>) -> bool {
        if self.state != QpState::RTS || self.req.rnr_until.is_some() {
            return false;
        }
        let mut worked = false;
        loop {
            let i = self.req.unsent;
            let wqe;
            let op;
            if i < self.req.pending.len() {
                if self.req.pending[i].error.is_some() {
                    break;
                }
                // Some of it was sent before. It was checked then, but a careless owner may have overwritten it.
                wqe = self.fetch(self.req.pending[i].begin);
                op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).unwrap_or(DecodedOp::Nop);
            } else if self.req.head < self.req.target && i < MAX_PENDING {
                wqe = self.fetch(self.req.head);
                match self.admit(&wqe, env) {
                    Admit::Ready(fresh) => op = fresh,
                    Admit::Failed => {
                        worked = true;
                        break;
                    }
                    Admit::Stall => break,
                }
                worked = true;
            } else {
                break;
            }
            let before = self.req.pending[i].sent;
            let complete = self.transmit(i, &wqe, &op, env);
            if let Some(p) = self.req.pending.get(i) {
                worked |= p.sent != before;
            }
            if !complete {
                break;
            }
            self.req.unsent += 1;
        }
        self.retire(env) || worked
    }

    /// Checks a fetched WQE and takes it into progress.
    fn admit(&mut self, wqe: &Wqe, env: &mut Env<'_>) -> Admit {
        let (op, kind, len, error) = match self.inspect(wqe, env) {
            Ok((op, kind, len)) => (op, kind, len, None),
            Err(syndrome) => (DecodedOp::Nop, Kind::Message, 0, Some(syndrome)),
        };
        let reads = self.req.reads;
        let is_read = matches!(kind, Kind::Read | Kind::Atomic);
        if (is_read && reads >= self.req.max_reads.max(1)) || (wqe.ctrl.fence() && reads > 0) {
            return Admit::Stall;
        }
        env.stats.wqes += 1;
        let packets = if kind == Kind::Nop { 0 } else { segments(len) };
        let pending = Pending {
            begin: self.req.head,
            index: wqe.ctrl.index,
            opcode: wqe.ctrl.opcode,
            kind,
            completes: wqe.ctrl.always_completes(),
            len,
            psn: self.req.next_psn,
            packets,
            sent: 0,
            done: 0,
            error: error.or(env.faults.next_send()),
        };
        let failed = pending.error.is_some();
        self.req.push(pending, wqe.blocks());
        if failed { Admit::Failed } else { Admit::Ready(op) }
    }

    /// What a WQE asks for and how many bytes it moves, or how it must fail.
    fn inspect(&self, wqe: &Wqe, env: &mut Env<'_>) -> Result<(DecodedOp, Kind, usize), Syndrome> {
        let stale = wqe.ctrl.index != super::low16(self.req.head) || wqe.ctrl.qpn != self.qpn;
        if stale {
            env.stats.violation("a doorbell exposed a WQE of another index or QP: it was not written yet");
            return Err(Syndrome::LOC_QP_OP_ERR);
        }
        if env.strict
            && let Some(what) = mlx5::strict_violations(&wqe.ctrl, wqe.as_bytes())
        {
            env.stats.violation(what);
            return Err(Syndrome::LOC_QP_OP_ERR);
        }
        let op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).map_err(|error| {
            tracing::debug!(qpn = self.qpn, %error, "software HCA: malformed WQE");
            error.syndrome()
        })?;
        let (kind, len) = match &op {
            DecodedOp::Nop => (Kind::Nop, 0),
            DecodedOp::Send { payload, .. } | DecodedOp::Write { payload, .. } => match payload {
                DecodedPayload::Inline(range) => (Kind::Message, range.len()),
                DecodedPayload::Sges(list) => (Kind::Message, list.total_bytes() as usize),
            },
            DecodedOp::Read { sges, .. } => {
                for sge in sges.iter(wqe.as_bytes()) {
                    self.local(&sge, true, env)?;
                }
                (Kind::Read, sges.total_bytes() as usize)
            }
            DecodedOp::CompareSwap { result, .. } | DecodedOp::FetchAdd { result, .. } => {
                self.local(result, true, env)?;
                (Kind::Atomic, 8)
            }
        };
        Ok((op, kind, len))
    }

    fn local<'k>(&self, sge: &DataSeg, write: bool, env: &Env<'k>) -> Result<Piece<'k>, Syndrome> {
        let len = sge.len as usize;
        let (memory, offset) = env.keys.local(sge.lkey, self.request.pdn, sge.addr, len, write)?;
        Ok(Piece { memory, offset, len })
    }

    /// Sends packets of pending send `i` until all are out (true) or no more can be sent now.
    fn transmit(&mut self, i: usize, wqe: &Wqe, op: &DecodedOp, env: &mut Env<'_>) -> bool {
        let bytes = wqe.as_bytes();
        let Some(remote) = self.remote else { return false };
        let p = &self.req.pending[i];
        let (len, begin, packets) = (p.len, p.psn, p.packets);
        let next = |p: &Pending| p.psn.wrapping_add(p.sent);
        while self.req.pending[i].sent < packets {
            let p = &self.req.pending[i];
            let psn = next(p);
            if ahead(psn, self.req.oldest_psn()) >= WINDOW {
                return false;
            }
            let offset = p.sent as usize * SEGMENT;
            let size = SEGMENT.min(len - offset);
            let is_last = p.sent + 1 == packets;
            let mut header = Header::new(PacketOp::SEND, remote.qpn, self.qpn, psn);
            header.flags =
                if p.sent == 0 { packet::FIRST } else { 0 } | if is_last { packet::LAST } else { 0 };
            header.flags |= if wqe.ctrl.solicited() { packet::SOLICITED } else { 0 };
            let mut ext: SmallVec<[u8; 96]> = SmallVec::new();
            let mut pieces: SmallVec<[Piece<'_>; 4]> = SmallVec::new();
            let mut immediate = |imm: Option<u32>| {
                if let Some(imm) = imm {
                    header.flags |= packet::IMM;
                    header.imm = imm;
                }
            };
            let mut step = 1;
            let gathered = match op {
                // A message that is no longer what it was.
                DecodedOp::Nop => Err(Syndrome::LOC_QP_OP_ERR),
                DecodedOp::Send { payload, imm } => {
                    immediate(*imm);
                    self.gather(payload, bytes, offset, size, &mut ext, &mut pieces, env)
                }
                DecodedOp::Write { remote, payload, imm } => {
                    immediate(*imm);
                    header.op = PacketOp::WRITE;
                    header.rkey = remote.rkey;
                    ext.extend_from_slice(&remote.addr.wrapping_add(offset as u64).to_le_bytes());
                    self.gather(payload, bytes, offset, size, &mut ext, &mut pieces, env)
                }
                DecodedOp::Read { remote, .. } => {
                    header.op = PacketOp::READ;
                    header.rkey = remote.rkey;
                    header.len = u32::try_from(len - offset).expect("messages are at most 1 GiB");
                    ext.extend_from_slice(&remote.addr.wrapping_add(offset as u64).to_le_bytes());
                    step = packets - p.sent;
                    Ok(())
                }
                DecodedOp::CompareSwap { remote, compare, swap, .. } => {
                    header.op = PacketOp::COMPARE_SWAP;
                    header.rkey = remote.rkey;
                    [remote.addr, *compare, *swap]
                        .iter()
                        .for_each(|w| ext.extend_from_slice(&w.to_le_bytes()));
                    Ok(())
                }
                DecodedOp::FetchAdd { remote, add, .. } => {
                    header.op = PacketOp::FETCH_ADD;
                    header.rkey = remote.rkey;
                    [remote.addr, *add, 0].iter().for_each(|w| ext.extend_from_slice(&w.to_le_bytes()));
                    Ok(())
                }
            };
            if let Err(syndrome) = gathered {
                self.req.pending[i].error = Some(syndrome);
                return false;
            }
            debug_assert!(ahead(psn, begin) >= 0);
            if header.op == PacketOp::SEND || header.op == PacketOp::WRITE {
                header.len = u32::try_from(size).expect("a packet is short");
            }
            let sent = env.links.send(self.link, &header, &ext, &pieces, self.packets, env.faults, env.stats);
            if !sent {
                return false;
            }
            self.packets += 1;
            self.req.pending[i].sent += step;
        }
        true
    }

    /// Collects `len` bytes of a payload from `offset` on: inline bytes into `ext`, others as pieces.
    #[expect(clippy::too_many_arguments, reason = "two outputs, two inputs, one range, one environment")]
    fn gather<'k>(
        &self,
        payload: &DecodedPayload,
        wqe: &[u8],
        mut offset: usize,
        mut len: usize,
        ext: &mut SmallVec<[u8; 96]>,
        pieces: &mut SmallVec<[Piece<'k>; 4]>,
        env: &Env<'k>,
    ) -> Result<(), Syndrome> {
        match payload {
            DecodedPayload::Inline(range) => {
                let data = wqe.get(range.clone()).and_then(|d| d.get(offset..offset + len));
                ext.extend_from_slice(data.ok_or(Syndrome::LOC_LEN_ERR)?);
            }
            DecodedPayload::Sges(list) => {
                for sge in list.iter(wqe) {
                    if len == 0 {
                        break;
                    }
                    // The whole SGE must be allowed, as a card checks it, also where only a part is sent now.
                    let piece = self.local(&sge, false, env)?;
                    if offset >= piece.len {
                        offset -= piece.len;
                        continue;
                    }
                    let take = len.min(piece.len - offset);
                    pieces.push(Piece { offset: piece.offset + offset, len: take, ..piece });
                    offset = 0;
                    len -= take;
                }
            }
        }
        Ok(())
    }

    /// Completes what is done, in order, up to the first send that is not. Returns whether there was any.
    pub(crate) fn retire(&mut self, env: &mut Env<'_>) -> bool {
        let mut any = false;
        while let Some(p) = self.req.pending.front() {
            if p.error.is_none() && !p.is_done() {
                break;
            }
            any = true;
            let p = self.req.pending.pop_front().expect("it was just looked at");
            self.req.unsent = self.req.unsent.saturating_sub(1);
            self.req.reads -= usize::from(p.needs_answer());
            if p.error.is_some() {
                self.complete_send(p.index, p.opcode, p.error, 0, env);
                self.go_error(env);
                break;
            }
            if p.completes {
                let bytes = if p.needs_answer() { u32::try_from(p.len).expect("at most 1 GiB") } else { 0 };
                self.complete_send(p.index, p.opcode, None, bytes, env);
            }
        }
        any
    }

    /// An answer of the peer to something this side sent.
    pub(crate) fn answered(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        if self.state != QpState::RTS {
            return;
        }
        let psn = header.psn;
        if ahead(psn, self.req.next_psn) > 0 {
            env.stats.packets_discarded += 1;
            return;
        }
        match header.op {
            PacketOp::ACK => {
                if self.req.acknowledge(psn.wrapping_add(1)) {
                    self.missing(env);
                }
            }
            PacketOp::READ_RESPONSE => self.read_response(header, body, env),
            PacketOp::ATOMIC_RESPONSE => self.atomic_response(header, body, env),
            PacketOp::NAK => self.refused(header, env),
            _ => env.stats.packets_discarded += 1,
        }
        self.retire(env);
    }

    fn again(&mut self, env: &mut Env<'_>) {
        env.stats.retransmissions += 1;
        self.req.go_back();
    }

    /// An answer before the one that came was lost. Those still behind it say so again: once is enough.
    fn missing(&mut self, env: &mut Env<'_>) {
        if !std::mem::replace(&mut self.req.gap, true) {
            self.again(env);
        }
    }

    fn refused(&mut self, header: &Header, env: &mut Env<'_>) {
        let psn = header.psn;
        if ahead(psn, self.req.oldest_psn()) < 0 {
            // About a packet that was acknowledged since.
            env.stats.packets_discarded += 1;
            return;
        }
        self.req.acknowledge(psn);
        match header.code {
            packet::NAK_SEQUENCE => self.again(env),
            packet::NAK_RNR => {
                if self.req.rnr_retries == 0 {
                    return self.fail_at(psn, Syndrome::RNR_RETRY_EXC_ERR);
                }
                if self.req.rnr_retry < 7 {
                    self.req.rnr_retries -= 1;
                }
                self.req.rnr_until = Some(Instant::now() + rnr_pause(header.len));
                self.again(env);
            }
            syndrome => self.fail_at(psn, Syndrome(syndrome)),
        }
    }

    fn fail_at(&mut self, psn: u32, syndrome: Syndrome) {
        if let Some(p) = self.req.find(psn) {
            p.error = Some(syndrome);
        }
    }

    fn read_response(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        let Some(p) = self.req.find(header.psn).filter(|p| p.kind == Kind::Read) else {
            env.stats.packets_discarded += 1;
            return;
        };
        let at = header.psn.wrapping_sub(p.psn);
        let (begin, len, psn) = (p.begin, p.len, p.psn);
        if at != p.done {
            env.stats.packets_discarded += 1;
            if at > p.done {
                self.missing(env);
            }
            return;
        }
        // A response to a READ says that everything before it has arrived.
        if self.req.acknowledge(psn) {
            return self.missing(env);
        }
        let offset = at as usize * SEGMENT;
        let size = SEGMENT.min(len - offset);
        let result = if body.len() == size {
            self.scatter_read(begin, offset, body, env)
        } else {
            Err(Syndrome::BAD_RESP_ERR)
        };
        let p = self.req.find(header.psn).expect("found above");
        match result {
            Ok(()) => {
                p.done += 1;
                p.sent = p.sent.max(p.done);
                self.req.moved();
            }
            Err(syndrome) => p.error = Some(syndrome),
        }
    }

    fn scatter_read(
        &self,
        begin: u64,
        offset: usize,
        body: &Body<'_>,
        env: &Env<'_>,
    ) -> Result<(), Syndrome> {
        let wqe = self.fetch(begin);
        let op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).map_err(|e| e.syndrome())?;
        let DecodedOp::Read { sges, .. } = op else { return Err(Syndrome::LOC_QP_OP_ERR) };
        self.scatter(sges.iter(wqe.as_bytes()), offset, body, 0, env)
    }

    /// Spreads a packet's body from `from` on over SGEs, skipping the first `offset` bytes of them.
    pub(crate) fn scatter(
        &self,
        sges: impl Iterator<Item = DataSeg>,
        mut offset: usize,
        body: &Body<'_>,
        from: usize,
        env: &Env<'_>,
    ) -> Result<(), Syndrome> {
        let mut at = from;
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
            body.copy_to(at, piece.memory, piece.offset + offset, take);
            offset = 0;
            at += take;
        }
        if at == body.len() { Ok(()) } else { Err(Syndrome::LOC_LEN_ERR) }
    }

    fn atomic_response(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        let Some(p) = self.req.find(header.psn).filter(|p| p.kind == Kind::Atomic && !p.is_done()) else {
            env.stats.packets_discarded += 1;
            return;
        };
        let (begin, psn) = (p.begin, p.psn);
        if self.req.acknowledge(psn) {
            return self.missing(env);
        }
        let wqe = self.fetch(begin);
        let result = match mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()) {
            Ok(DecodedOp::CompareSwap { result, .. } | DecodedOp::FetchAdd { result, .. })
                if body.len() == 8 =>
            {
                self.scatter(std::iter::once(result), 0, body, 0, env)
            }
            _ => Err(Syndrome::BAD_RESP_ERR),
        };
        let p = self.req.find(header.psn).expect("found above");
        match result {
            Ok(()) => {
                p.done = 1;
                self.req.moved();
            }
            Err(syndrome) => p.error = Some(syndrome),
        }
    }

    /// Looks at the timers.
    pub(crate) fn tick(&mut self, now: Instant, env: &mut Env<'_>) {
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
        let under_way = self.req.pending.iter().any(|p| p.sent > p.done);
        match self.req.deadline {
            _ if !under_way => self.req.deadline = None,
            None => self.req.deadline = self.req.timeout.map(|t| now + t),
            Some(deadline) if now >= deadline => {
                self.req.deadline = None;
                if self.req.retries == 0 {
                    self.fail(Syndrome::RETRY_EXC_ERR, env);
                } else {
                    self.req.retries -= 1;
                    self.req.gap = false;
                    self.again(env);
                    self.advance(env);
                }
            }
            Some(_) => {}
        }
    }
}

/// The pause that an RNR timer code asks for (InfiniBand architecture, table 45).
fn rnr_pause(code: u32) -> Duration {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * HUNDREDTHS_OF_MS[code as usize & 31]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_pauses_are_those_of_the_architecture() {
        assert_eq!(rnr_pause(0), Duration::from_micros(655_360));
        assert_eq!(rnr_pause(1), Duration::from_micros(10));
        assert_eq!(rnr_pause(12), Duration::from_micros(640));
        assert_eq!(rnr_pause(31), Duration::from_micros(491_520));
    }
}
