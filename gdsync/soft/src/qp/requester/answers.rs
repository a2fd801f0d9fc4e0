//! REMOVE

use std::time::Instant;

use super::{Kind, rnr_pause};
use crate::links::Body;
use crate::packet::{self, Header, PacketOp, SEGMENT, ahead};
use crate::qp::receive_staging;
use crate::qp::{Env, SoftQp};
use gdsync_device::QpState;
use gdsync_device::copy_engine::Ticket;
use mlx5_ring::{self as mlx5, DataSeg, DecodedOp, Syndrome};

impl SoftQp {
    /// Handles a response of the peer.
    pub(crate) fn answered(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        if self.state != QpState::RTS {
            return;
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
                    self.missing(env);
                }
            }
            PacketOp::READ_RESPONSE => self.read_response(header, body, env),
            PacketOp::ATOMIC_RESPONSE => self.atomic_response(header, body, env),
            PacketOp::NAK => self.refused(header, env),
            PacketOp::COPYING => self.copying(psn),
            _ => env.stats.packets_discarded += 1,
        }
        self.retire(env);
    }

    pub(super) fn again(&mut self, env: &mut Env<'_>) {
        env.stats.retransmissions += 1;
        self.req.go_back();
    }

    /// Retransmits after a lost response. Later responses report the same gap; once is enough.
    pub(super) fn missing(&mut self, env: &mut Env<'_>) {
        if !std::mem::replace(&mut self.req.gap, true) {
            self.again(env);
        }
    }

    fn refused(&mut self, header: &Header, env: &mut Env<'_>) {
        let psn = header.psn;
        if ahead(psn, self.req.oldest_psn()) < 0 {
            // Already acknowledged.
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
            packet::NAK_REFERENCE => self.reference_refused(psn, header.len, env),
            syndrome => {
                let allowed = [Syndrome::REM_INV_REQ_ERR, Syndrome::REM_ACCESS_ERR, Syndrome::REM_OP_ERR];
                let known = allowed.into_iter().find(|known| known.0 == syndrome);
                self.fail_at(psn, known.unwrap_or(Syndrome::BAD_RESP_ERR));
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
                self.missing(env);
            }
            return;
        }
        // A READ response acknowledges everything before the READ.
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
            Ok(receive_staging) => {
                p.done += 1;
                p.sent = p.sent.max(p.done);
                p.land(receive_staging);
                self.req.moved();
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
        let mut receive_staging = Vec::new();
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
                body.copy_to(at, piece.memory, to, take);
                env.pending_flush.written(sge.lkey, piece.memory);
            } else {
                let (key, memory) = (sge.lkey, piece.memory.clone());
                receive_staging.push(receive_staging::Piece { from: at, key, memory, at: to, len: take });
            }
            offset = 0;
            at += take;
        }
        if at != body.len() {
            return Err(Syndrome::LOC_LEN_ERR);
        }
        if receive_staging.is_empty() {
            return Ok(None);
        }
        self.receive_staging
            .put(body, receive_staging, env.copy_engine)
            .map(Some)
            .map_err(|_| Syndrome::LOC_QP_OP_ERR)
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
            return self.missing(env);
        }
        let wqe = self.rings.fetch(begin);
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
            Ok(receive_staging) => {
                p.done = 1;
                p.land(receive_staging);
                self.req.moved();
            }
            Err(syndrome) => p.error = Some(syndrome),
        }
    }
}
