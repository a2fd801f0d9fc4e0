//! The connection of a queue pair on iWARP, as the queue pair sees it.
//!
//! The device goes to RTS by itself when the connection is made. Until then sends wait in the ring. The side that was asked must not
//! send before the other one has, so the first message each way is a greeting: empty, and for the library alone.

use rdma_core_sys::verbs::{ibv_wc, ibv_wc_status};

use super::device::{DeviceQp, limit};
use super::qp::{Env, ProxyQp};
use super::tag::Tag;
use super::translate::{Buffers, Request};
use crate::cm::Offer;
use gdsync_device::error::{Error, Result};
use gdsync_device::{QpAddress, QpAttr, QpState};
use mlx5_ring::Opcode;

/// Why a connection is not there any more, as far as one side can know.
pub(super) const GONE: &str = "the connection is closed: the peer reset or destroyed its queue pair, or is gone; or iWARP gave it up, \
     as it does for a message without a receive, a wrong key, range or right";

/// How far a connection is.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// The peer, and READs that it may have outstanding here, until a connection to it is begun.
    peer: Option<(QpAddress, u8)>,
    /// READs that this side may have outstanding.
    reads: u8,
    /// It was made, and by which side.
    is_made: bool,
    is_active: bool,
    /// The peer's greeting has come.
    is_greeted: bool,
    /// Greetings that the device has, as sends and as receives.
    sends: usize,
    receives: usize,
}

impl Link {
    fn can_send(&self) -> bool {
        self.is_made && (self.is_active || self.is_greeted)
    }

    /// What the connection manager is asked for, once.
    pub(super) fn take_wanted(&mut self, device: &DeviceQp) -> Option<(QpAddress, Offer)> {
        let (peer, reads) = self.peer.take()?;
        Some((peer, Offer { number: device.qpn(), reads: (reads, self.reads) }))
    }

    /// Greetings that the device has are not waited for any more. Returns how many.
    pub(super) fn clear(&mut self) -> usize {
        let Self { sends, receives, .. } = std::mem::take(self);
        sends + receives
    }
}

impl ProxyQp {
    /// Whether the device takes sends.
    pub(super) fn is_linked(&self) -> bool {
        self.link.as_ref().is_none_or(Link::can_send)
    }

    /// What iWARP does not do, where this asks for it.
    pub(super) fn lacks(&self, opcode: Opcode, request: &Request) -> Option<Error> {
        self.link.as_ref()?;
        let most = limit(self.device.open().attr().max_sge_rd).max(1) as usize;
        let (what, fix) = match opcode {
            Opcode::RDMA_WRITE_IMM | Opcode::SEND_IMM => {
                ("immediate data", "send it as bytes, or let a SEND follow the WRITE")
            }
            Opcode::ATOMIC_CS | Opcode::ATOMIC_FA => {
                ("an atomic operation", "let the owner of the memory do it, asked by a message")
            }
            Opcode::RDMA_READ if request.buffers() > most => {
                ("a READ into more than one buffer", "READ each buffer by itself")
            }
            _ => return None,
        };
        Some(Error::Unsupported { what, by: "iWARP", fix })
    }

    /// A transition to INIT, RTR or RTS that was checked.
    pub(super) fn step(&mut self, attr: &QpAttr, env: &mut Env<'_>) -> Result<()> {
        let to = attr.state.unwrap_or(self.state);
        let Some(link) = &mut self.link else {
            return self.device.modify(self.psn, self.state, attr);
        };
        if (self.state, to) == (QpState::RTS, QpState::RTS) && attr.access.is_some() {
            // There keys alone have rights.
            let (what, fix) = ("a change of a connected queue pair's rights", "end the connection");
            return Err(Error::Unsupported { what, by: "iWARP", fix });
        }
        if let Some(access) = attr.access {
            // Nothing else of a transition is the device's business.
            self.device.modify(self.psn, QpState::INIT, &QpAttr::to(QpState::INIT).access(access))?;
        }
        if let (Some(peer), Some(reads)) = (attr.remote, attr.max_dest_rd_atomic) {
            link.peer = Some((peer, reads));
        }
        if let Some(reads) = attr.max_rd_atomic {
            link.reads = reads;
        }
        if (self.state, to) == (QpState::RESET, QpState::INIT) {
            // The first receive, before those of the user.
            let tag = self.tag_of_greeting(true);
            let posted = self.device.receive(&mut Buffers::new(), tag.to_wr_id());
            posted.map_err(|errno| self.device.refused("ibv_post_recv", errno))?;
            env.given(1);
            link_of(self).receives += 1;
        }
        Ok(())
    }

    fn tag_of_greeting(&self, is_receive: bool) -> Tag {
        Tag { index: self.index, generation: self.generation, is_receive, number: 0, is_greeting: true }
    }

    /// The connection is made. Returns whether it is known that the peer knows.
    ///
    /// Called again and again until then: a kernel may miss the greeting if it arrives while the peer's connection becomes one, and sees
    /// it when anything else arrives.
    pub(super) fn linked(&mut self, is_active: bool, env: &mut Env<'_>) -> bool {
        let Some(link) = &mut self.link else { return true };
        if !link.is_made {
            (link.is_made, link.is_active) = (true, is_active);
            self.greet(&mut Request::empty(), env);
        } else if is_active && !link.is_greeted && link.sends == 0 {
            self.greet(&mut Request::empty_write(), env);
        }
        link_of(self).is_greeted
    }

    /// A greeting came back from the device.
    pub(super) fn greeted(&mut self, tag: Tag, wc: &ibv_wc, env: &mut Env<'_>) {
        let Some(link) = &mut self.link else { return };
        if !tag.is_receive {
            link.sends -= 1;
            return;
        }
        link.receives -= 1;
        // Where it failed, so does all that follows.
        if wc.status == ibv_wc_status::IBV_WC_SUCCESS && self.state != QpState::ERR {
            link.is_greeted = true;
            if !link.is_active {
                self.greet(&mut Request::empty(), env);
            }
        }
    }

    /// Greets the peer, and then sends what has waited.
    fn greet(&mut self, request: &mut Request, env: &mut Env<'_>) {
        if !self.is_linked() {
            return;
        }
        let tag = self.tag_of_greeting(false);
        if let Err(errno) = self.device.send(request, tag.to_wr_id()) {
            let cause: Error = self.device.refused("ibv_post_send", errno);
            return self.fail(Some(cause), env);
        }
        env.given(1);
        link_of(self).sends += 1;
        self.advance(env);
    }
}

fn link_of(qp: &mut ProxyQp) -> &mut Link {
    qp.link.as_mut().expect("a queue pair of iWARP has a link")
}
