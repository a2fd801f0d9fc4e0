//! REMOVE

use super::outcome::Failure;
use super::qp::{Env, ProxyQp, Sent};
use super::staged::{Brought, ReceiveStaging};
use super::translate::{Buffers, Inline, Request, in_ring, inline_bytes, sge};
use gdsync_device::QpState;
use gdsync_device::engine::Wqe;
use gdsync_device::error::Error;
use mlx5_ring::{DecodedOp, Opcode, low16};

/// Result of posting a WQE.
enum Posted {
    /// Posted; it returns this many bytes, which may then be copied from staging.
    InDevice(u32, Option<Box<ReceiveStaging>>),
    /// Done: there was nothing to post.
    Done,
    /// The device is full, or the payload is not staged yet.
    NotNow,
    Failed(Failure, Option<Error>),
}

/// Whether `errno` means a full queue.
fn is_full(errno: i32) -> bool {
    matches!(errno, libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS | libc::ENOSPC | libc::EOVERFLOW)
}

impl ProxyQp {
    /// Posts rung WQEs while the device takes them.
    pub(super) fn advance(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::RTS || self.head >= self.target {
            return;
        }
        while self.head < self.target && self.in_device < self.device.granted.sends && !self.is_failing() {
            if !env.shadows.is_empty() {
                // Completed READs no longer delay a send with a fence.
                self.retire(env);
                if self.state != QpState::RTS {
                    return;
                }
                self.bring(env);
            }
            let wqe = self.rings.fetch(self.head);
            let mut sent = Sent {
                index: wqe.ctrl.index,
                opcode: wqe.ctrl.opcode,
                bytes: 0,
                completes: wqe.ctrl.always_completes(),
                outcome: None,
                cause: None,
                receive_staging: None,
            };
            match self.post(&wqe, env) {
                Posted::InDevice(bytes, receive_staging) => {
                    self.in_device += 1;
                    env.given(1);
                    sent.bytes = bytes;
                    sent.receive_staging = receive_staging;
                }
                Posted::Done => sent.outcome = Some(Ok(())),
                Posted::NotNow => break,
                Posted::Failed(failure, cause) => {
                    sent.outcome = Some(Err(failure));
                    sent.cause = cause;
                }
            }
            env.stats.wqes += 1;
            self.rings.qp_trace.fetched(self.rings.qpn, sent.bytes as usize);
            self.head += wqe.blocks();
            self.sends.push_back(sent);
        }
        self.retire(env);
    }

    /// Whether a send was refused and earlier ones are outstanding.
    fn is_failing(&self) -> bool {
        self.sends.back().is_some_and(|sent| matches!(sent.outcome, Some(Err(_))))
    }

    fn post(&self, wqe: &Wqe, env: &mut Env<'_>) -> Posted {
        let refused = |cause| Posted::Failed(Failure::REFUSED, Some(cause));
        let granted = &self.device.granted;
        let op = match self.rings.inspect(wqe, self.head, env.strict, env.stats) {
            Ok(op) => op,
            Err(syndrome) => return Posted::Failed(Failure { syndrome, vendor: 0 }, None),
        };
        let bytes = match &op {
            DecodedOp::Read { sges, .. } => sges.total_bytes(),
            DecodedOp::CompareSwap { .. } | DecodedOp::FetchAdd { .. } => 8,
            _ => 0,
        };
        let inline = match (inline_bytes(&op), &self.ring_region) {
            (Some(range), _) if range.len() <= granted.inline => Inline::Now,
            (Some(range), Some(region)) => {
                Inline::Later(in_ring(&self.rings, self.head, range, region.lkey()))
            }
            (Some(range), None) => {
                let expected = "at most QpBuilder::max_inline";
                return refused(Error::invalid("inline data", range.len(), expected));
            }
            (None, _) => Inline::Now,
        };
        let Some(mut request) = Request::of(&op, wqe, inline) else { return Posted::Done };
        if request.buffers() > granted.send_sge {
            let expected = "at most QpBuilder::max_send_sge";
            return refused(Error::invalid("buffers of a send", request.buffers(), expected));
        }
        let number = self.first.wrapping_add(u32::try_from(self.sends.len()).expect("fewer than blocks"));
        let pieces = match env.shadows.redirect(request.buffers_mut(), self.device.open().name()) {
            Ok(pieces) => pieces,
            Err(cause) => return refused(cause),
        };
        let mut receive_staging = None;
        if bytes > 0 {
            receive_staging = ReceiveStaging::of(pieces);
        } else if !pieces.is_empty() {
            match self.staged.brought(self.head, self.device.open().name()) {
                Brought::InPlace => {}
                Brought::NotYet => return Posted::NotNow,
                Brought::Failed(cause) => return refused(cause),
            }
        }
        match self.device.send(&mut request, self.tag(false, number)) {
            Ok(()) => Posted::InDevice(bytes, receive_staging),
            Err(errno) if self.in_device > 0 && is_full(errno) => Posted::NotNow,
            Err(errno) => refused(self.refusal(wqe.ctrl.opcode, errno)),
        }
    }

    /// Error for an operation that the device refuses.
    fn refusal(&self, opcode: Opcode, errno: i32) -> Error {
        let fix = match opcode {
            Opcode::ATOMIC_CS | Opcode::ATOMIC_FA => {
                "the device may have no atomics: see `atomic_cap` of `ibv_devinfo -v`"
            }
            _ => return self.device.refused("ibv_post_send", errno),
        };
        match self.device.refused("ibv_post_send", errno) {
            Error::Verbs { call, subject, source, .. } => {
                Error::Verbs { call, subject: format!("{opcode} on {subject}"), source, advice: fix.into() }
            }
            other => other,
        }
    }

    /// Posts receives up to the doorbell record while the device takes them.
    pub(super) fn take_receives(&mut self, env: &mut Env<'_>) {
        if !matches!(self.state, QpState::INIT | QpState::RTR | QpState::RTS) {
            return;
        }
        let end = self.rings.recv_record(self.taken);
        if end - self.received > self.rings.receives() {
            env.stats.violation("the receive record runs ahead of the ring");
            return;
        }
        let granted = self.device.granted;
        while self.taken < end && self.taken - self.received < u64::from(granted.receives) {
            let wqe = self.rings.receive(self.taken);
            // Some cards read an empty SGE as 2^31 bytes.
            let mut buffers: Buffers = wqe.into_iter().filter(|seg| seg.len > 0).map(sge).collect();
            if buffers.len() > granted.recv_sge {
                let expected = "at most QpBuilder::max_recv_sge";
                return self.fail(Some(Error::invalid("buffers of a receive", buffers.len(), expected)), env);
            }
            let staged = match env.shadows.redirect(&mut buffers, self.device.open().name()) {
                Ok(staged) => staged,
                Err(cause) => return self.fail(Some(cause), env),
            };
            let number = self.taken & u64::from(u32::MAX);
            let wr_id = self.tag(true, u32::try_from(number).expect("masked"));
            match self.device.receive(&mut buffers, wr_id) {
                Ok(()) => {
                    env.given(1);
                    self.staged.expect(low16(self.taken), staged);
                }
                Err(errno) if self.taken > self.received && is_full(errno) => return,
                Err(errno) => return self.fail(Some(self.device.refused("ibv_post_recv", errno)), env),
            }
            self.taken += 1;
        }
    }
}
