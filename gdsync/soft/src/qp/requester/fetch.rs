//! READs by reference: the response names the memory, and this CPU copies the bytes from the responder's process.
//!
//! The bytes are in place later than the response. So a READ or atomic that takes bytes waits until those ahead are
//! complete. If the kernel refuses the copy, or the responder revokes the reference, the READ is sent again.

use super::{Kind, Pending};
use crate::packet::{REFERENCE_BYTES, Reference, ahead};
use crate::qp::{Env, PIECE, SoftQp};
use crate::wire::{Body, Piece};
use gdsync_device::engine::Wqe;
use gdsync_device::memory::{Memory, Process};
use mlx5_ring::{self as mlx5, DecodedOp, Syndrome};

/// What a READ by reference waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fetch {
    /// The response, which may be a reference.
    Response,
    /// The rest of the copy from this address of a process, granted over this link.
    Copy { process: Process, from: u64, copied: usize, link: usize },
    /// A revocation sent before the end of the copy: the link had this [`drained`](crate::links::Links::drained) count.
    Drain { link: usize, seen: u64 },
}

impl Pending {
    /// Whether the response was a reference.
    fn is_granted(&self) -> bool {
        matches!(self.fetch, Some(Fetch::Copy { .. } | Fetch::Drain { .. }))
    }

    /// Forgets the response, and goes on with `fetch`.
    fn ask_again(&mut self, fetch: Option<Fetch>) {
        (self.fetch, self.sent, self.done) = (fetch, 0, 0);
    }
}

impl SoftQp {
    /// How a new READ begins if it takes a reference; `None` to take bytes.
    pub(super) fn fetch_for(&self, op: &DecodedOp, wqe: &Wqe, len: usize, env: &Env<'_>) -> Option<Fetch> {
        let DecodedOp::Read { sges, .. } = op else { return None };
        let is_long = env.cma.threshold().is_some_and(|least| len >= least.max(1));
        if !is_long || self.req.cannot_fetch || !env.links.takes_references(self.link) {
            return None;
        }
        let mut memories = sges.iter(wqe.as_bytes()).map(|sge| env.keys.memory(sge.lkey));
        memories.all(|memory| memory.is_some_and(Memory::is_host)).then_some(Fetch::Response)
    }

    /// Whether an operation of this kind that takes bytes must wait for READs by reference ahead.
    pub(super) fn is_behind_fetch(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Read | Kind::Atomic) && self.req.pending.iter().any(|p| p.fetch.is_some())
    }

    /// Whether bytes of READs are being copied.
    pub(crate) fn is_fetching(&self) -> bool {
        self.req.reads > 0 && self.req.pending.iter().any(Pending::is_granted)
    }

    /// Handles a reference in response to the READ with this first PSN.
    pub(super) fn granted(&mut self, psn: u32, body: &Body<'_>, env: &mut Env<'_>) {
        let Some(p) = self.req.find(psn).filter(|p| matches!(p.fetch, Some(Fetch::Response))) else {
            env.stats.packets_discarded += 1;
            return;
        };
        let bytes = body.array::<REFERENCE_BYTES>(0).filter(|_| body.len() == REFERENCE_BYTES);
        let Some(reference) = bytes.map(|bytes| Reference::from_bytes(&bytes)) else {
            p.error = Some(Syndrome::BAD_RESP_ERR);
            return;
        };
        if let Some((process, from)) = env.links.host_memory(body.link, &reference) {
            p.fetch = Some(Fetch::Copy { process, from, copied: 0, link: body.link });
            (p.sent, p.done) = (p.packets, p.packets);
        } else {
            self.req.cannot_fetch = true;
            tracing::debug!(qpn = self.rings.qpn, "the peer's memory cannot be read; READs take bytes");
            self.fetch_failed(psn, env);
        }
        self.req.progressed();
    }

    /// The READ with this first PSN and later ones take bytes.
    fn fetch_failed(&mut self, psn: u32, env: &mut Env<'_>) {
        env.stats.references_refused += 1;
        let later = self.req.pending.iter_mut().filter(|p| ahead(p.psn, psn) >= 0);
        later.filter(|p| p.fetch.is_some()).for_each(|p| p.ask_again(None));
        self.retransmit(env);
    }

    /// The responder revoked all references.
    pub(super) fn fetches_revoked(&mut self, env: &mut Env<'_>) {
        if self.is_fetching() {
            let granted = self.req.pending.iter_mut().filter(|p| p.is_granted());
            granted.for_each(|p| p.ask_again(Some(Fetch::Response)));
            self.retransmit(env);
        }
    }

    /// The PSN that fails when the responder refuses `psn`: it is in ERR then, and answers no READ again whose reference it
    /// revoked.
    pub(super) fn first_revoked(&self, psn: u32) -> u32 {
        let is_revoked = |p: &&Pending| p.fetch.is_some() && !p.is_done() && ahead(psn, p.psn) > 0;
        self.req.pending.iter().find(is_revoked).map_or(psn, |p| p.psn)
    }

    /// Copies a piece for the oldest READ by reference. Returns whether there was one.
    pub(crate) fn step_fetch(&mut self, env: &mut Env<'_>) -> bool {
        let is_next = |p: &Pending| matches!(p.fetch, Some(Fetch::Copy { .. })) && p.error.is_none();
        if self.req.reads == 0 {
            return false;
        }
        let Some(i) = self.req.pending.iter().position(is_next) else { return false };
        let (begin, len) = (self.req.pending[i].begin, self.req.pending[i].len);
        let Some(Fetch::Copy { process, from, copied, link }) = self.req.pending[i].fetch else {
            return false;
        };
        let place = self.fetch_place(begin, copied, env);
        let p = &mut self.req.pending[i];
        match place.map(|to| (to.len, to.memory.read_from_process(to.offset, to.len, &process, from))) {
            Ok((size, Ok(()))) => {
                let (copied, from) = (copied + size, from + size as u64);
                p.fetch = Some(if copied < len {
                    Fetch::Copy { process, from, copied, link }
                } else {
                    Fetch::Drain { link, seen: env.links.drained(link) }
                });
            }
            Ok((_, Err(error))) => {
                tracing::debug!(qpn = self.rings.qpn, %error, "a READ by reference failed; asking for the bytes");
                let psn = p.psn;
                self.fetch_failed(psn, env);
            }
            Err(syndrome) => p.error = Some(syndrome),
        }
        true
    }

    /// Where the next piece of a READ goes, after `offset` bytes.
    fn fetch_place<'k>(&self, begin: u64, mut offset: usize, env: &Env<'k>) -> Result<Piece<'k>, Syndrome> {
        let wqe = self.rings.fetch(begin);
        let op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).map_err(|e| e.syndrome())?;
        let DecodedOp::Read { sges, .. } = op else { return Err(Syndrome::LOC_QP_OP_ERR) };
        for sge in sges.iter(wqe.as_bytes()) {
            let piece = self.local(&sge, true, env)?;
            if offset < piece.len {
                let len = PIECE.min(piece.len - offset);
                return Ok(Piece { offset: piece.offset + offset, len, ..piece });
            }
            offset -= piece.len;
        }
        Err(Syndrome::LOC_LEN_ERR)
    }

    /// Completes READs that can no longer be revoked. Returns whether there were any.
    pub(crate) fn complete_fetches(&mut self, env: &mut Env<'_>) -> bool {
        let mut any = false;
        for p in &mut self.req.pending {
            if let Some(Fetch::Drain { link, seen }) = p.fetch
                && env.links.has_drained_since(link, seen)
            {
                p.fetch = None;
                env.stats.by_cma += 1;
                any = true;
            }
        }
        any && self.complete_finished(env)
    }
}
