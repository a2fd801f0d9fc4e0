//! Messages in memory that has a [shadow](super::shadow): before the device gets them, and after it has brought them.

use std::collections::VecDeque;

use super::copy::Copy;
use super::qp::{Env, ProxyQp};
use super::shadow::{Pieces, Shadows};
use super::translate::{Inline, Request};
use gdsync_device::error::{Error, Result};
use gdsync_device::{HcaStats, QpState};
use mlx5_ring::{Cqe, CqeOpcode, DecodedOp, Syndrome};

/// Sends whose payload is brought ahead of their turn: so a copy engine does not rest while the device sends.
const AHEAD: usize = 16;

/// What a queue pair has staged.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// The block behind the last send that was looked at.
    looked: u64,
    /// Sends whose payload is on its way to a shadow, or there: by their first block, in order.
    outgoing: VecDeque<(u64, Copy)>,
    /// Receives that the device has, by their counters, in order.
    expected: VecDeque<(u16, Pieces)>,
    /// Receives that came back, from the first on whose payload has yet to be copied.
    pub(super) arrivals: VecDeque<Arrival>,
    /// Nobody wants them any more, but they run: nothing is flushed before they have ended.
    ending: Vec<Copy>,
    /// They were waited for in vain.
    stuck_copies: Vec<Copy>,
}

/// A receive that came back.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) cqe: Cqe,
    pub(super) counter: u16,
    pub(super) receive_staging: Option<Copy>,
}

impl Arrival {
    /// The device gave it back empty.
    pub(super) fn flushed(counter: u16) -> Self {
        let cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome::WR_FLUSH_ERR, ..Cqe::default() };
        Self { cqe, counter, receive_staging: None }
    }

    fn has_landed(&self) -> bool {
        self.receive_staging.as_ref().is_none_or(Copy::is_over)
    }
}

/// What a READ or an atomic brings into a shadow.
#[derive(Debug)]
pub(super) enum ReceiveStaging {
    Expected(Pieces),
    Begun(Copy),
}

impl ReceiveStaging {
    pub(super) fn of(pieces: Pieces) -> Option<Box<Self>> {
        (!pieces.is_empty()).then(|| Box::new(Self::Expected(pieces)))
    }

    /// So many bytes are in the shadow.
    pub(super) fn begin(&mut self, bytes: u32, shadows: &mut Shadows) {
        if let Self::Expected(pieces) = self {
            *self = Self::Begun(shadows.land(pieces, bytes));
        }
    }

    pub(super) fn copy(&self) -> Option<&Copy> {
        match self {
            Self::Expected(_) => None,
            Self::Begun(copy) => Some(copy),
        }
    }

    /// Whether nothing is waited for any more; so it is where the request failed.
    pub(super) fn is_over(&self) -> bool {
        self.copy().is_none_or(Copy::is_over)
    }
}

/// Whether the payload of a send is in its shadow.
pub(super) enum Brought {
    InPlace,
    NotYet,
    Failed(Error),
}

impl Staged {
    /// Whether all receives that came back are in place.
    pub(super) fn has_landed(&self) -> bool {
        self.arrivals.is_empty()
    }

    /// Whether nothing is copied out of the memory of sends.
    pub(super) fn has_left(&self) -> bool {
        self.outgoing.is_empty() && self.ending.is_empty()
    }

    /// Whether the payload of the send at this block, which is the next, can be sent.
    pub(super) fn brought(&self, head: u64, device: &str) -> Brought {
        match self.outgoing.front() {
            Some((at, copy)) if *at == head && copy.is_over() => {
                copy.failure(device).map_or(Brought::InPlace, Brought::Failed)
            }
            _ => Brought::NotYet,
        }
    }

    /// Nothing that was not sent yet will be. Returns why what was on its way has not ended, once it is waited for no more.
    pub(super) fn bring_no_more(&mut self, device: &str) -> Option<Error> {
        self.outgoing.iter().for_each(|(_, copy)| copy.give_up());
        self.ending.extend(self.outgoing.drain(..).map(|(_, copy)| copy));
        self.ending.retain(|copy| !copy.has_ended());
        let known = self.stuck_copies.len();
        self.stuck_copies.extend(self.ending.extract_if(.., |copy| copy.is_over()));
        self.stuck_copies.get(known)?.failure(device)
    }

    /// Why the bytes of a copy that is over are not in place.
    pub(super) fn failure(&mut self, copy: &Copy, device: &str) -> Option<Error> {
        if copy.is_stuck() {
            self.stuck_copies.push(copy.clone());
        }
        copy.failure(device)
    }

    /// Whether the memory of all that was copied is its owner's again.
    ///
    /// # Errors
    /// [`Error::Device`] where it is not, although nobody waits for it any more.
    pub(super) fn check(&self, device: &str) -> Result<()> {
        let stuck_copies = self.stuck_copies.iter().find(|copy| !copy.has_ended());
        stuck_copies.and_then(|copy| copy.failure(device)).map_or(Ok(()), Err)
    }

    /// The device has the receive with this counter.
    pub(super) fn expect(&mut self, counter: u16, pieces: Pieces) {
        if !pieces.is_empty() {
            self.expected.push_back((counter, pieces));
        }
    }

    /// Begins to copy what the receive with this counter has brought, if that has to be.
    pub(super) fn landing_of(&mut self, counter: u16, cqe: &Cqe, shadows: &mut Shadows) -> Option<Copy> {
        let (_, pieces) = self.expected.pop_front_if(|(expected, _)| *expected == counter)?;
        // An immediate value of a WRITE takes a receive, and nothing comes into its buffers.
        let has_come = !cqe.opcode.is_error() && cqe.opcode != CqeOpcode::RESP_WR_IMM;
        has_come.then(|| shadows.land(&pieces, cqe.byte_cnt))
    }
}

impl ProxyQp {
    /// Whether it was held up by a copy, which may be over since: nobody tells of that.
    pub(super) fn waits_for_copies(&self) -> bool {
        let Staged { outgoing, ending, .. } = &self.staged;
        let may_send = self.state == QpState::RTS && self.in_device < self.device.granted.sends;
        !self.staged.has_landed()
            || !ending.is_empty()
            || self.sends.front().is_some_and(|sent| sent.outcome.is_some())
            || may_send && outgoing.front().is_some_and(|(at, _)| *at == self.head)
    }

    /// Begins to bring the payload of sends that were rung, from the next on.
    pub(super) fn bring(&mut self, env: &mut Env<'_>) {
        let head = self.head;
        while self.staged.outgoing.pop_front_if(|(at, _)| *at < head).is_some() {}
        self.staged.looked = self.staged.looked.max(head);
        while self.staged.looked < self.target && self.staged.outgoing.len() < AHEAD {
            let at = self.staged.looked;
            let wqe = self.rings.fetch(at);
            // It may send what a READ before it has yet to bring.
            if wqe.ctrl.fence() && (at > head || !self.sends.is_empty()) {
                return;
            }
            // What is wrong with it is told when it is its turn.
            let op = self.rings.inspect(&wqe, at, false, &mut HcaStats::default());
            if let Ok(op @ (DecodedOp::Send { .. } | DecodedOp::Write { .. })) = op
                && let Some(mut request) = Request::of(&op, &wqe, Inline::Now)
            {
                // Where that is refused now, it is looked at again, or told, when it is its turn.
                let redirected = env.shadows.redirect(request.buffers_mut(), self.device.open().name());
                let Ok(pieces) = redirected else { return };
                if !pieces.is_empty() {
                    self.staged.outgoing.push_back((at, env.shadows.bring(&pieces)));
                }
            }
            self.staged.looked += wqe.blocks();
        }
    }

    /// Goes on with what waited for copies, as far as these are over.
    pub(super) fn copied(&mut self, env: &mut Env<'_>) {
        while let Some(Arrival { mut cqe, counter, receive_staging }) =
            self.staged.arrivals.pop_front_if(|arrival| arrival.has_landed())
        {
            let failure =
                receive_staging.and_then(|copy| self.staged.failure(&copy, self.device.open().name()));
            if let Some(failure) = failure {
                self.blame(failure);
                let syndrome = Syndrome::LOC_QP_OP_ERR;
                cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome, ..Cqe::default() };
            }
            self.arrived(cqe, counter, env);
        }
        self.retire(env);
        self.advance(env);
    }
}
