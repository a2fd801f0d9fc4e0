//! What the peer reads of this side's payload, and this side writes meanwhile: see [`offers`](crate::offers).
//!
//! All of it under the lock of the HCA: nobody deregisters the payload meanwhile, and the link stays.

use std::time::Instant;

use super::Pending;
use crate::links::Body;
use crate::offers::{OFFER, Offer};
use crate::packet::Header;
use crate::qp::{Env, SoftQp};
use mlx5_ring as mlx5;

impl SoftQp {
    /// The peer offers a part of a message.
    pub(super) fn offered(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) {
        if let Some(done) = self.help(header, body, env) {
            env.stats.pushed += u64::from(done);
            *env.copied = Some(Instant::now());
        }
    }

    /// Takes an offer, if it still stands and is about a message that is out. Returns whether its part is written.
    fn help(&self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> Option<bool> {
        let offer = Offer::from_bytes(&body.array::<OFFER>(0)?)?;
        let is_meant = |p: &&Pending| p.psn == header.psn && p.referred.is_some() && p.is_out();
        let p = self.req.pending.iter().find(is_meant)?;
        let (skip, len) = (usize::try_from(offer.skip).ok()?, header.len as usize);
        let wqe = self.rings.fetch(p.begin);
        let op = mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).ok()?;
        let piece = self.local(&Self::one_buffer(&op, &wqe)?, false, env).ok()?;
        // The application may have changed the request since, which it must not.
        if piece.len != p.len || skip.checked_add(len)? > p.len {
            return None;
        }
        let (process, to) = env.links.host_memory(body.link, &offer.to)?;
        let pause = env.faults.pause();
        env.links.offers(body.link)?.help(offer.number, || {
            std::thread::sleep(pause);
            piece.memory.push(piece.offset + skip, len, &process, to).is_ok()
        })
    }
}
