//! Fetches WQEs and cuts messages into packets.

use std::ops::Range;
use std::time::Instant;

use smallvec::SmallVec;

use super::{Kind, Pending};
use crate::packet::{self, Header, PacketOp, ahead, segments};
use crate::qp::staging::Staged;
use crate::qp::{Env, SoftQp, UNLINKED};
use crate::wire::Piece;
use gdsync_device::engine::Wqe;
use gdsync_device::memory::Memory;
use gdsync_device::{PLACED, QpState};
use mlx5_ring::{
    self as mlx5, DataSeg, DecodedOp, DecodedPayload, MAX_MESSAGE, MaskedAtomic, MaskedOp, Opcode,
    PayloadPart, RemoteAddr, Syndrome,
};

/// Sends in progress; further WQEs stay in the ring.
const MAX_PENDING: usize = 256;
/// Packets in flight.
const WINDOW: i32 = 64;

/// Result of admitting a WQE.
enum Admit {
    /// Ready to send.
    Ready(DecodedOp),
    /// Completes with an error.
    Failed,
    /// Must wait for READs or atomics in progress, or for another completion queue.
    Stall,
}

impl SoftQp {
    /// Sends and completes what is possible. Returns whether anything happened.
    pub(crate) fn advance(&mut self, env: &mut Env<'_>) -> bool {
        if self.state != QpState::RTS || self.req.rnr_until.is_some() {
            return false;
        }
        if self.datagrams.is_some() {
            return self.advance_datagrams(env);
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
                // Checked when first sent, but the application may have overwritten the WQE since.
                wqe = self.rings.fetch(self.req.pending[i].begin);
                op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).unwrap_or(DecodedOp::Nop);
            } else if self.req.head < self.req.target && i < MAX_PENDING {
                wqe = self.rings.fetch(self.req.head);
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
            if !self.req.may_begin(i) || self.link == UNLINKED {
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
        self.complete_finished(env) || worked
    }

    /// Checks a fetched WQE and adds it to the pending sends.
    fn admit(&mut self, wqe: &Wqe, env: &mut Env<'_>) -> Admit {
        let (op, kind, len, error) = match self.inspect(wqe, env) {
            Ok((op, kind, len)) => (op, kind, len, None),
            Err(syndrome) => (DecodedOp::Nop, Kind::Message, 0, Some(syndrome)),
        };
        let reads = self.req.reads;
        let is_read = matches!(kind, Kind::Read | Kind::Atomic);
        let fetch = self.fetch_for(&op, wqe, len, env);
        let is_behind = fetch.is_none() && self.is_behind_fetch(kind);
        let is_early =
            matches!(op, DecodedOp::Wait { cqn, index } if env.cqs.has_completed(cqn, index) == Some(false));
        if (is_read && reads >= self.req.max_reads.max(1))
            || (wqe.ctrl.fence() && reads > 0)
            || is_behind
            || is_early
        {
            return Admit::Stall;
        }
        env.stats.wqes += 1;
        self.rings.qp_trace.fetched(self.rings.qpn, len);
        let placed = wqe.ctrl.opcode == Opcode::SEND && wqe.ctrl.imm == PLACED.to_ne_bytes() && len > 0;
        let packets = match kind {
            Kind::Nop => 0,
            _ if placed => 1,
            _ => segments(len, env.links.segment(self.link)),
        };
        let referred = if placed { None } else { self.reference_for(&op, wqe, len, env) };
        if packets > 1 {
            *env.copied = Some(Instant::now());
        }
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
            placed,
            referred,
            reference_sent: false,
            fetch,
            copies: Vec::new(),
            error: error.or(env.faults.next_send()),
        };
        let failed = pending.error.is_some();
        self.req.push(pending, wqe.blocks());
        if failed { Admit::Failed } else { Admit::Ready(op) }
    }

    /// Operation and bytes of a WQE, or the error it completes with.
    fn inspect(&self, wqe: &Wqe, env: &mut Env<'_>) -> Result<(DecodedOp, Kind, usize), Syndrome> {
        let op = self.rings.inspect(wqe, self.req.head, env.strict, env.stats)?;
        let (kind, len) = match &op {
            DecodedOp::Nop => (Kind::Nop, 0),
            DecodedOp::Send { payload, .. } | DecodedOp::Write { payload, .. } => {
                (Kind::Message, payload.total_bytes())
            }
            DecodedOp::Read { sges, .. } => {
                for sge in sges.iter(wqe.as_bytes()) {
                    self.local(&sge, true, env)?;
                }
                (Kind::Read, sges.total_bytes() as usize)
            }
            DecodedOp::CompareSwap { result, .. }
            | DecodedOp::FetchAdd { result, .. }
            | DecodedOp::MaskedAtomic { result, .. } => {
                self.local(result, true, env)?;
                (Kind::Atomic, result.len as usize)
            }
            &DecodedOp::Wait { cqn, index } => {
                env.cqs.has_completed(cqn, index).ok_or(Syndrome::LOC_QP_OP_ERR)?;
                (Kind::Nop, 0)
            }
        };
        // The application writes WQEs itself and may exceed the maximum.
        if len > MAX_MESSAGE as usize {
            return Err(Syndrome::LOC_LEN_ERR);
        }
        Ok((op, kind, len))
    }

    pub(crate) fn local<'k>(&self, sge: &DataSeg, write: bool, env: &Env<'k>) -> Result<Piece<'k>, Syndrome> {
        let len = sge.len as usize;
        let (memory, offset) = env.keys.local(sge.lkey, self.rings.request.pdn, sge.addr, len, write)?;
        Ok(Piece { memory, offset, len })
    }

    /// Sends packets of pending send `i`. Returns whether all are out.
    fn transmit(&mut self, i: usize, wqe: &Wqe, op: &DecodedOp, env: &mut Env<'_>) -> bool {
        let Some(remote) = self.remote else { return false };
        if self.req.pending[i].referred.is_some()
            && let Some(sent) = self.send_reference(i, wqe, op, env)
        {
            return sent;
        }
        while self.req.pending[i].sent < self.req.pending[i].packets {
            match self.send_packet(i, remote.qpn, wqe, op, env) {
                Ok(Some(psns)) => {
                    self.packets += 1;
                    self.req.note_sent(i, self.req.pending[i].sent + psns);
                }
                Ok(None) => return false,
                Err(syndrome) => {
                    self.req.pending[i].error = Some(syndrome);
                    return false;
                }
            }
        }
        true
    }

    /// Sends the next packet of pending send `i`. Returns the PSNs it takes; `None` if it must wait.
    fn send_packet(
        &mut self,
        i: usize,
        to: u32,
        wqe: &Wqe,
        op: &DecodedOp,
        env: &mut Env<'_>,
    ) -> Result<Option<u32>, Syndrome> {
        let bytes = wqe.as_bytes();
        let Pending { psn, packets, sent, len, placed, .. } = self.req.pending[i];
        let psn = psn.wrapping_add(sent);
        if ahead(psn, self.req.oldest_psn()) >= WINDOW {
            return Ok(None);
        }
        let segment = env.links.segment(self.link);
        let offset = sent as usize * segment;
        let size = if placed { len } else { segment.min(len - offset) };
        let mut header = Header::new(PacketOp::SEND, to, self.rings.qpn, psn);
        let flag = |is: bool, flag| if is { flag } else { 0 };
        header.flags = flag(sent == 0, packet::FIRST)
            | flag(sent + 1 == packets, packet::LAST)
            | flag(wqe.ctrl.solicited(), packet::SOLICITED);
        if let DecodedOp::Send { imm: Some(imm), .. } | DecodedOp::Write { imm: Some(imm), .. } = op {
            header.flags |= packet::IMM;
            header.imm = *imm;
        }
        let mut psns = 1;
        let mut ext: SmallVec<[u8; 96]> = SmallVec::new();
        let staged;
        let mut pieces: SmallVec<[Piece<'_>; 4]> = SmallVec::new();
        match op {
            // The WQE was overwritten.
            DecodedOp::Nop | DecodedOp::Wait { .. } => return Err(Syndrome::LOC_QP_OP_ERR),
            DecodedOp::Send { payload, .. } => {
                self.gather(payload, bytes, offset, size, &mut ext, &mut pieces, env)?;
            }
            DecodedOp::Write { remote, payload, .. } => {
                (header.op, header.rkey) = (PacketOp::WRITE, remote.rkey);
                ext.extend_from_slice(&remote.addr.wrapping_add(offset as u64).to_le_bytes());
                self.gather(payload, bytes, offset, size, &mut ext, &mut pieces, env)?;
            }
            DecodedOp::Read { remote, .. } => {
                (header.op, header.rkey) = (PacketOp::READ, remote.rkey);
                header.len = u32::try_from(len - offset).expect("messages are at most 1 GiB");
                header.flags |= flag(self.req.pending[i].fetch.is_some(), packet::REFERENCE);
                ext.extend_from_slice(&remote.addr.wrapping_add(offset as u64).to_le_bytes());
                psns = packets - sent;
            }
            DecodedOp::CompareSwap { remote, compare, swap, .. } => {
                let [compare, swap, all] = [*compare, *swap, u64::MAX];
                let op = MaskedOp::CompareSwap { compare, swap, compare_mask: all, swap_mask: all };
                atomic(&mut header, &mut ext, *remote, MaskedAtomic { size: 8, op });
            }
            DecodedOp::FetchAdd { remote, add, .. } => {
                let op = MaskedOp::FetchAdd { add: *add, boundary: 0 };
                atomic(&mut header, &mut ext, *remote, MaskedAtomic { size: 8, op });
            }
            DecodedOp::MaskedAtomic { remote, atomic: op, .. } => {
                atomic(&mut header, &mut ext, *remote, *op);
            }
        }
        if placed {
            // They were gathered to check them.
            header.flags |= packet::PLACED;
            ext.clear();
            pieces.clear();
        }
        if pieces.iter().any(|piece| Self::is_staged(piece.memory, len, env)) {
            match self.stage(i, op, bytes, offset, env) {
                Ok(Some((memory, offset))) => {
                    staged = memory;
                    pieces.clear();
                    pieces.push(Piece { memory: &staged, offset, len: size });
                }
                Ok(None) => return Ok(None),
                // Fall back to CPU reads, though slow.
                Err(_) if pieces.iter().all(|piece| piece.memory.is_mapped()) => {}
                Err(syndrome) => return Err(syndrome),
            }
        }
        if header.op == PacketOp::SEND || header.op == PacketOp::WRITE {
            header.len = u32::try_from(size).expect("messages are at most 1 GiB");
        }
        let sent = env.links.send(self.link, &header, &ext, &pieces, self.packets, env.faults, env.stats)?;
        Ok(sent.then_some(psns))
    }

    /// Staged bytes of a packet of pending send `i`; `None` while they are being copied.
    fn stage(
        &mut self,
        i: usize,
        op: &DecodedOp,
        wqe: &[u8],
        offset: usize,
        env: &Env<'_>,
    ) -> Result<Option<(Memory, usize)>, Syndrome> {
        let Some(payload @ DecodedPayload::Sges(_)) = op.payload() else {
            return Err(Syndrome::LOC_QP_OP_ERR);
        };
        let (psn, total) = (self.req.pending[i].psn, self.req.pending[i].len);
        let mut stage = std::mem::take(&mut self.sends);
        let gather = |at, len| {
            let (mut inline, mut pieces) = (SmallVec::new(), SmallVec::new());
            self.gather(payload, wqe, at, len, &mut inline, &mut pieces, env)?;
            Ok(pieces.iter().map(|piece| (piece.memory.clone(), piece.offset, piece.len)).collect())
        };
        let staged = stage.stage(psn, total, offset, gather, env.copies());
        self.sends = stage;
        match staged? {
            Staged::Ready(memory, at) => Ok(Some((memory, at))),
            Staged::Pending => Ok(None),
            Staged::Failed(syndrome) => Err(syndrome),
        }
    }

    /// Collects `len` bytes of a payload at `offset`: inline bytes into `ext`, SGEs into `pieces`.
    #[expect(clippy::too_many_arguments, reason = "two outputs, two inputs, one range, one environment")]
    pub(in crate::qp) fn gather<'k>(
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
                    self.gather_sge(&sge, &mut offset, &mut len, pieces, env)?;
                }
            }
            DecodedPayload::Mixed(list) => {
                for part in list.iter(wqe) {
                    if len == 0 {
                        break;
                    }
                    match part {
                        PayloadPart::Inline(bytes) => {
                            let Some(part) = take_part(bytes.len(), &mut offset, &mut len) else { continue };
                            // Inline bytes are sent before pieces, so pieces ahead of them become inline.
                            for piece in pieces.drain(..) {
                                let at = ext.len();
                                ext.resize(at + piece.len, 0);
                                let read = piece.memory.read(piece.offset, &mut ext[at..]);
                                read.map_err(|_| Syndrome::LOC_PROT_ERR)?;
                            }
                            ext.extend_from_slice(&bytes[part]);
                        }
                        PayloadPart::Sge(sge) => {
                            self.gather_sge(&sge, &mut offset, &mut len, pieces, env)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Collects what a packet takes of an SGE.
    fn gather_sge<'k>(
        &self,
        sge: &DataSeg,
        offset: &mut usize,
        len: &mut usize,
        pieces: &mut SmallVec<[Piece<'k>; 4]>,
        env: &Env<'k>,
    ) -> Result<(), Syndrome> {
        // A card checks the whole SGE, even if this packet takes only a part.
        let piece = self.local(sge, false, env)?;
        if let Some(part) = take_part(piece.len, offset, len) {
            pieces.push(Piece { offset: piece.offset + part.start, len: part.len(), ..piece });
        }
        Ok(())
    }
}

/// Fills in the packet of an atomic operation.
fn atomic(header: &mut Header, ext: &mut SmallVec<[u8; 96]>, remote: RemoteAddr, atomic: MaskedAtomic) {
    (header.rkey, header.len) = (remote.rkey, atomic.size.into());
    let (op, operands) = match atomic.op {
        MaskedOp::CompareSwap { compare, swap, compare_mask, swap_mask } => {
            (PacketOp::COMPARE_SWAP, [compare, swap, compare_mask, swap_mask])
        }
        MaskedOp::FetchAdd { add, boundary } => (PacketOp::FETCH_ADD, [add, boundary, 0, 0]),
    };
    header.op = op;
    [remote.addr].iter().chain(&operands).for_each(|word| ext.extend_from_slice(&word.to_le_bytes()));
}

/// The range that a packet takes of the next `size` bytes of a payload: it begins `offset` bytes on and has `len` bytes
/// left.
fn take_part(size: usize, offset: &mut usize, len: &mut usize) -> Option<Range<usize>> {
    if *offset >= size {
        *offset -= size;
        return None;
    }
    let begin = std::mem::take(offset);
    let take = (size - begin).min(*len);
    *len -= take;
    Some(begin..begin + take)
}
