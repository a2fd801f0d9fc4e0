//! REMOVE

use std::collections::VecDeque;

use super::copy::Copy;
use super::qp::{Env, ProxyQp};
use super::shadow::{Pieces, Shadows};
use super::translate::{Inline, Request};
use gdsync_device::error::{Error, Result};
use gdsync_device::{HcaStats, QpState};
use mlx5_ring::{Cqe, CqeOpcode, DecodedOp, Syndrome};

/// Sends staged ahead, so that copies overlap the device's transfers.
const AHEAD: usize = 16;

/// Staged messages of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// Block after the last send examined for staging.
    looked: u64,
    /// Staged sends by their first block, in order.
    outgoing: VecDeque<(u64, Copy)>,
    /// Staged receives at the device by counter, in order.
    expected: VecDeque<(u16, Pieces)>,
    /// Returned receives, from the first whose data is not in place.
    pub(super) arrivals: VecDeque<Arrival>,
    /// Abandoned copies that still run; a flush waits for them.
    ending: Vec<Copy>,
    /// Copies that timed out.
    stuck_copies: Vec<Copy>,
}

/// A returned receive.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) cqe: Cqe,
    pub(super) counter: u16,
    pub(super) receive_staging: Option<Copy>,
}

impl Arrival {
    /// One that the device returned empty.
    pub(super) fn flushed(counter: u16) -> Self {
        let cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome::WR_FLUSH_ERR, ..Cqe::default() };
        Self { cqe, counter, receive_staging: None }
    }

    fn has_landed(&self) -> bool {
        self.receive_staging.as_ref().is_none_or(Copy::is_over)
    }
}

/// Response data of a READ or atomic in a shadow.
#[derive(Debug)]
pub(super) enum ReceiveStaging {
    Expected(Pieces),
    Begun(Copy),
}

impl ReceiveStaging {
    pub(super) fn of(pieces: Pieces) -> Option<Box<Self>> {
        (!pieces.is_empty()).then(|| Box::new(Self::Expected(pieces)))
    }

    /// Starts to copy the first `bytes` bytes from the shadow.
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

    /// Whether it is over, also because the request failed.
    pub(super) fn is_over(&self) -> bool {
        self.copy().is_none_or(Copy::is_over)
    }
}

/// Staging state of a send's payload.
pub(super) enum Brought {
    InPlace,
    NotYet,
    Failed(Error),
}

impl Staged {
    /// Whether the data of all returned receives is in place.
    pub(super) fn has_landed(&self) -> bool {
        self.arrivals.is_empty()
    }

    /// Whether no copy reads memory of sends.
    pub(super) fn has_left(&self) -> bool {
        self.outgoing.is_empty() && self.ending.is_empty()
    }

    /// State of the send at this block, the next one.
    pub(super) fn brought(&self, head: u64, device: &str) -> Brought {
        match self.outgoing.front() {
            Some((at, copy)) if *at == head && copy.is_over() => {
                copy.failure(device).map_or(Brought::InPlace, Brought::Failed)
            }
            _ => Brought::NotYet,
        }
    }

    /// Discards staged sends that were not posted. Returns the error of a copy that timed out.
    pub(super) fn bring_no_more(&mut self, device: &str) -> Option<Error> {
        self.outgoing.iter().for_each(|(_, copy)| copy.give_up());
        self.ending.extend(self.outgoing.drain(..).map(|(_, copy)| copy));
        self.ending.retain(|copy| !copy.has_ended());
        let known = self.stuck_copies.len();
        self.stuck_copies.extend(self.ending.extract_if(.., |copy| copy.is_over()));
        self.stuck_copies.get(known)?.failure(device)
    }

    /// Why a finished copy failed.
    pub(super) fn failure(&mut self, copy: &Copy, device: &str) -> Option<Error> {
        if copy.is_stuck() {
            self.stuck_copies.push(copy.clone());
        }
        copy.failure(device)
    }

    /// Checks that no copy accesses the application's memory.
    ///
    /// # Errors
    /// [`Error::Device`] if an abandoned copy still may.
    pub(super) fn check(&self, device: &str) -> Result<()> {
        let stuck_copies = self.stuck_copies.iter().find(|copy| !copy.has_ended());
        stuck_copies.and_then(|copy| copy.failure(device)).map_or(Ok(()), Err)
    }

    /// Records a receive posted to the device.
    pub(super) fn expect(&mut self, counter: u16, pieces: Pieces) {
        if !pieces.is_empty() {
            self.expected.push_back((counter, pieces));
        }
    }

    /// Starts to copy the data of a returned receive, if it is staged.
    pub(super) fn landing_of(&mut self, counter: u16, cqe: &Cqe, shadows: &mut Shadows) -> Option<Copy> {
        let (_, pieces) = self.expected.pop_front_if(|(expected, _)| *expected == counter)?;
        // A WRITE with immediate data puts nothing into the receive's buffers.
        let has_come = !cqe.opcode.is_error() && cqe.opcode != CqeOpcode::RESP_WR_IMM;
        has_come.then(|| shadows.land(&pieces, cqe.byte_cnt))
    }
}

impl ProxyQp {
    /// Whether it waits for copies, which report no completion.
    pub(super) fn waits_for_copies(&self) -> bool {
        let Staged { outgoing, ending, .. } = &self.staged;
        let may_send = self.state == QpState::RTS && self.in_device < self.device.granted.sends;
        !self.staged.has_landed()
            || !ending.is_empty()
            || self.sends.front().is_some_and(|sent| sent.outcome.is_some())
            || may_send && outgoing.front().is_some_and(|(at, _)| *at == self.head)
    }

    /// Starts to stage payload of rung sends, from the next one on.
    pub(super) fn bring(&mut self, env: &mut Env<'_>) {
        let head = self.head;
        while self.staged.outgoing.pop_front_if(|(at, _)| *at < head).is_some() {}
        self.staged.looked = self.staged.looked.max(head);
        while self.staged.looked < self.target && self.staged.outgoing.len() < AHEAD {
            let at = self.staged.looked;
            let wqe = self.rings.fetch(at);
            // It may send what an earlier READ has yet to return.
            if wqe.ctrl.fence() && (at > head || !self.sends.is_empty()) {
                return;
            }
            // Its error is reported in its turn.
            let op = self.rings.inspect(&wqe, at, false, &mut HcaStats::default());
            if let Ok(op @ (DecodedOp::Send { .. } | DecodedOp::Write { .. })) = op
                && let Some(mut request) = Request::of(&op, &wqe, Inline::Now)
            {
                // If refused now, it is retried or reported in its turn.
                let redirected = env.shadows.redirect(request.buffers_mut(), self.device.open().name());
                let Ok(pieces) = redirected else { return };
                if !pieces.is_empty() {
                    self.staged.outgoing.push_back((at, env.shadows.bring(&pieces)));
                }
            }
            self.staged.looked += wqe.blocks();
        }
    }

    /// Continues what waited for finished copies.
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
