//! The connection of a queue pair on iWARP, as the queue pair sees it.
//!
//! The device goes to RTS by itself when the connection is made. Until then sends wait in the ring. The side that was asked must not
//! send before the other one has, so the first message each way is a greeting: empty, and for the library alone.

use rdma_core_sys::verbs::{ibv_wc, ibv_wc_status};

use super::device::DeviceQp;
use super::qp::{Env, ProxyQp};
use super::tag::Tag;
use super::translate::{Buffers, Request};
use crate::error::{Error, Result};
use crate::rdma::cm::Offer;
use crate::verbs::{QpAddress, QpAttr, QpState};

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
    /// Greetings that the device has.
    outstanding: usize,
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
        std::mem::take(self).outstanding
    }
}

impl ProxyQp {
    /// Whether the device takes sends.
    pub(super) fn is_linked(&self) -> bool {
        self.link.as_ref().is_none_or(Link::can_send)
    }

    /// A transition to INIT, RTR or RTS that was checked.
    pub(super) fn step(&mut self, attr: &QpAttr, env: &mut Env<'_>) -> Result<()> {
        let to = attr.state.unwrap_or(self.state);
        let Some(link) = &mut self.link else {
            return self.device.modify(self.psn, self.state, attr);
        };
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
            self.greeting(env);
        }
        Ok(())
    }

    fn tag_of_greeting(&self, is_receive: bool) -> Tag {
        Tag { index: self.index, generation: self.generation, is_receive, number: 0, is_greeting: true }
    }

    /// The device has one more.
    fn greeting(&mut self, env: &Env<'_>) {
        env.given(1);
        if let Some(link) = &mut self.link {
            link.outstanding += 1;
        }
    }

    /// The connection is made.
    pub(super) fn linked(&mut self, is_active: bool, env: &mut Env<'_>) {
        if self.state == QpState::ERR {
            return;
        }
        if let Some(link) = &mut self.link {
            (link.is_made, link.is_active) = (true, is_active);
        }
        self.greet(env);
    }

    /// A greeting came back from the device.
    pub(super) fn greeted(&mut self, tag: Tag, wc: &ibv_wc, env: &mut Env<'_>) {
        let Some(link) = &mut self.link else { return };
        link.outstanding -= 1;
        // Where it failed, so does all that follows.
        if tag.is_receive && wc.status == ibv_wc_status::IBV_WC_SUCCESS && self.state != QpState::ERR {
            link.is_greeted = true;
            if !link.is_active {
                self.greet(env);
            }
        }
    }

    /// Greets the peer, and then sends what has waited.
    fn greet(&mut self, env: &mut Env<'_>) {
        if !self.is_linked() {
            return;
        }
        let tag = self.tag_of_greeting(false);
        if let Err(errno) = self.device.send(&mut Request::empty(), tag.to_wr_id()) {
            let cause: Error = self.device.refused("ibv_post_send", errno);
            return self.fail(Some(cause), env);
        }
        self.greeting(env);
        self.advance(env);
    }
}
