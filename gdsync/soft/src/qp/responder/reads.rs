//! REMOVE

use std::sync::atomic::Ordering;

use super::{Answer, REPLAYS, Refusal};
use crate::links::Body;
use crate::packet::{Header, PacketOp, SEGMENT, ahead, segments};
use crate::qp::staging::Staged;
use crate::qp::{Env, SoftQp};
use gdsync_device::Access;
use gdsync_device::memory::Memory;
use mlx5_ring::Syndrome;

impl SoftQp {
    pub(super) fn read(
        &mut self,
        header: &Header,
        body: &Body<'_>,
        env: &mut Env<'_>,
    ) -> Result<u32, Refusal> {
        self.allow(Access::REMOTE_READ)?;
        let invalid = Refusal::Remote(Syndrome::REM_INV_REQ_ERR);
        let Some(addr) = body.word(0) else { return Err(invalid) };
        let left = header.len as usize;
        env.keys
            .remote(header.rkey, self.rings.request.pdn, addr, left, Access::REMOTE_READ)
            .map_err(Refusal::Remote)?;
        let (psn, rkey, packets) = (header.psn, header.rkey, segments(left));
        for answer in &mut self.resp.answers {
            let Answer::Read { psn: next, left: rest, .. } = *answer else { continue };
            if next.wrapping_add(segments(rest)) == psn.wrapping_add(packets) {
                // The same READ, requested again before its response is complete: one response is enough.
                if ahead(psn, next) < 0 {
                    *answer = Answer::Read { psn, rkey, addr, left, done: 0 };
                }
                return Ok(packets);
            }
        }
        if !self.resp.has_room_for_read() {
            return Err(invalid);
        }
        self.resp.answers.push_back(Answer::Read { psn, rkey, addr, left, done: 0 });
        Ok(packets)
    }

    pub(super) fn atomic(
        &mut self,
        header: &Header,
        body: &Body<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), Refusal> {
        self.allow(Access::REMOTE_ATOMIC)?;
        let invalid = || Refusal::Remote(Syndrome::REM_INV_REQ_ERR);
        let [addr, a, b] = [0, 1, 2].map(|i| body.word(i));
        let (addr, a, b) = (addr.ok_or_else(invalid)?, a.ok_or_else(invalid)?, b.ok_or_else(invalid)?);
        if !addr.is_multiple_of(8) || !self.resp.has_room_for_read() {
            return Err(invalid());
        }
        let (memory, offset) = env
            .keys
            .remote(header.rkey, self.rings.request.pdn, addr, 8, Access::REMOTE_ATOMIC)
            .map_err(Refusal::Remote)?;
        let word = memory.atomic64(offset).map_err(|_| invalid())?;
        let value = if header.op == PacketOp::FETCH_ADD {
            word.fetch_add(a, Ordering::AcqRel)
        } else {
            word.compare_exchange(a, b, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|old| old)
        };
        if self.resp.replays.len() == REPLAYS {
            self.resp.replays.pop_front();
        }
        self.resp.replays.push_back((header.psn, value));
        self.resp.answers.push_back(Answer::Atomic { psn: header.psn, value });
        Ok(())
    }

    /// Next bytes of a READ response; `None` while they are being staged.
    pub(super) fn look_up(
        &mut self,
        answer: &Answer,
        env: &Env<'_>,
    ) -> Result<Option<(Memory, usize)>, Syndrome> {
        let &Answer::Read { psn, rkey, addr, left, done } = answer else {
            return Err(Syndrome::REM_OP_ERR);
        };
        // The region may have been deregistered since the request.
        let begin = addr - done as u64;
        let (memory, offset) =
            env.keys.remote(rkey, self.rings.request.pdn, begin, done + left, Access::REMOTE_READ)?;
        if !Self::is_staged(memory, done + left, env) {
            return Ok(Some((memory.clone(), offset + done)));
        }
        let first = psn.wrapping_sub(u32::try_from(done / SEGMENT).expect("messages are at most 1 GiB"));
        let gather = |at, len| Ok(vec![(memory.clone(), offset + at, len)]);
        match self.answers.bring(first, done + left, done, gather, env.copy_engine) {
            Ok(Staged::Ready(memory, at)) => Ok(Some((memory, at))),
            Ok(Staged::OnTheirWay) => Ok(None),
            Ok(Staged::Failed) if memory.is_mapped() => Ok(Some((memory.clone(), offset + done))),
            _ => Err(Syndrome::REM_OP_ERR),
        }
    }
}
