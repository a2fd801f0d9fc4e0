//! READ responses by reference: the requester copies the bytes from this process.
//!
//! A grant is checked like a READ of bytes: key, right, range. When a region is deregistered or the queue pair ends, all
//! grants are revoked by a packet before the memory is the application's again; the requester completes a READ only
//! after it has received everything sent before the end of its copy.

use std::collections::VecDeque;

use super::Response;
use crate::packet::{PacketOp, Reference};
use crate::qp::{Env, SoftQp};
use gdsync_device::{Access, QpState};

/// Regions remembered: more than a peer may have READs outstanding.
const MAX: usize = 256;

/// Regions that the peer may be reading by reference, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Grants(VecDeque<u32>);

impl Grants {
    /// Whether the peer may be reading any region.
    pub(crate) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether the peer may be reading this region.
    pub(crate) fn contains(&self, key: u32) -> bool {
        self.0.contains(&key)
    }

    pub(super) fn add(&mut self, key: u32) {
        if self.0.back() == Some(&key) {
            return;
        }
        self.0.retain(|known| *known != key);
        if self.0.len() == MAX {
            // Its READs are over: the peer was granted as many others since.
            self.0.pop_front();
        }
        self.0.push_back(key);
    }
}

impl SoftQp {
    /// The reference that answers a READ, if the requester takes one and the memory is suited; else bytes are sent, which
    /// also reports errors.
    pub(super) fn grant(&self, response: &Response, env: &Env<'_>) -> Option<Reference> {
        let &Response::Read { rkey, addr, left, done: 0, by_reference: true, .. } = response else {
            return None;
        };
        let is_near = env.links.takes_references(self.link);
        if !is_near || !matches!(self.state, QpState::RTR | QpState::RTS) || self.resp.is_closed() {
            return None;
        }
        // Memory that copy engines read is staged.
        let is_suited =
            env.cma.threshold().is_some_and(|least| left >= least) && env.keys.export(rkey).is_none();
        let place = env.keys.remote(rkey, self.rings.request.pdn, addr, left, Access::REMOTE_READ);
        let (memory, offset) = place.ok().filter(|_| is_suited)?;
        memory.host_addr(offset).map(Reference::to_host)
    }

    /// Revokes the peer's references. Returns false while the link has no room.
    pub(crate) fn revoke(&mut self, env: &mut Env<'_>) -> bool {
        let is_done = !self.resp.grants.any() || self.take_back(PacketOp::REVOKE, env);
        if is_done {
            self.resp.grants.0.clear();
        }
        is_done
    }
}
