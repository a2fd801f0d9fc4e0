//! A queue pair of the proxy: mlx5 rings on one side, a queue pair of the device on the other.
//!
//! Sends go to the device in ring order, as many as it takes; the rest waits in the ring. Each requests a completion
//! there, and its CQE is written after those of all earlier sends.
//!
//! On an error, the device's queue pair goes to ERR and returns its requests. Only then are the rings flushed, so that
//! CQEs stay in order and the device does not use a flushed buffer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdma_core_sys::verbs::{ibv_wc, ibv_wc_status};

use super::device::DeviceQp;
use super::staging::{Arrival, ResponseCopy, Shadows, Staged, StagedState};
use super::translate::{
    Buffers, Failure, Inline, Request, Tag, in_ring, inline_bytes, is_unnamed, outcome, received, sge,
};
use crate::Region;
use gdsync_device::engine::{Cqs, Rings, Wqe};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{HcaStats, Health, QpAttr, QpState, random_psn};
use mlx5_ring::{Cqe, CqeOpcode, DecodedOp, DecodedPayload, Opcode, Syndrome, low16};

/// How long a device in ERR may take to return its requests.
pub(super) const DRAIN: Duration = Duration::from_secs(2);

/// State shared by all queue pairs, borrowed while one of them works.
#[derive(Debug)]
pub(super) struct Env<'a> {
    pub(super) cqs: &'a mut Cqs,
    pub(super) stats: &'a mut HcaStats,
    /// GPU memory that the device writes and that needs a flush.
    pub(super) unseen: &'a [(u32, Memory)],
    pub(super) shadows: &'a mut Shadows,
    /// Requests at the device.
    pub(super) outstanding: &'a AtomicUsize,
    pub(super) strict: bool,
}

impl Env<'_> {
    pub(super) fn add_outstanding(&self, count: usize) {
        // Written under the lock only.
        self.outstanding.store(self.outstanding.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    fn sub_outstanding(&self, count: usize) {
        self.outstanding
            .store(self.outstanding.load(Ordering::Relaxed).saturating_sub(count), Ordering::Relaxed);
    }

    /// Flushes data that the device wrote.
    fn flush_unseen(&self) -> Result<()> {
        self.unseen.iter().map(|(_, memory)| memory.flush()).fold(Ok(()), Result::and)
    }
}

/// A send between fetch and CQE.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) index: u16,
    pub(super) opcode: Opcode,
    /// Bytes that a READ or atomic returns.
    pub(super) bytes: u32,
    /// Success writes a CQE.
    pub(super) completes: bool,
    /// Result from the device.
    pub(super) outcome: Option<std::result::Result<(), Failure>>,
    /// Error with more detail than the syndrome.
    pub(super) cause: Option<Error>,
    /// Data still to be copied from staging.
    pub(super) response_copy: Option<Box<ResponseCopy>>,
}

impl Sent {
    /// Result, once nothing is left to do.
    fn ended(&self) -> Option<std::result::Result<(), Failure>> {
        self.outcome.filter(|_| self.response_copy.as_ref().is_none_or(|copy| copy.is_over()))
    }
}

#[derive(Debug)]
pub(super) struct ProxyQp {
    // First field: destroyed before its memory is deregistered.
    pub(super) device: DeviceQp,
    /// Its completion queue of the device, and the entries reserved there.
    pub(super) room: (usize, u32),
    /// The registered send queue, if the device reads inline data there.
    pub(super) ring_region: Option<Region>,
    pub(super) rings: Rings,
    pub(super) index: usize,
    pub(super) generation: u16,
    pub(super) state: QpState,
    pub(super) psn: u32,
    pub(super) health: Arc<Health>,
    /// Next block to fetch, and the end of the rung ones.
    pub(super) head: u64,
    pub(super) target: u64,
    pub(super) sends: VecDeque<Sent>,
    /// Number of the first pending send.
    pub(super) first: u32,
    /// Sends at the device.
    pub(super) in_device: u32,
    /// Receives taken from the ring, and returned ones.
    pub(super) taken: u64,
    pub(super) received: u64,
    /// Deadline in ERR for the device to return its requests.
    pub(super) deadline: Option<Instant>,
    /// Whether the core knows the deadline.
    pub(super) is_draining: bool,
    /// Being destroyed: nothing more is reported.
    pub(super) is_ending: bool,
    pub(super) staged: Staged,
}

impl ProxyQp {
    /// A queue pair in RESET.
    pub(super) fn new(
        device: DeviceQp,
        room: (usize, u32),
        rings: Rings,
        ring_region: Option<Region>,
        psn: u32,
        health: Arc<Health>,
        (index, generation): (usize, u16),
    ) -> Self {
        Self {
            device,
            room,
            ring_region,
            rings,
            index,
            generation,
            state: QpState::RESET,
            psn,
            health,
            head: 0,
            target: 0,
            sends: VecDeque::new(),
            first: 0,
            in_device: 0,
            taken: 0,
            received: 0,
            deadline: None,
            is_draining: false,
            is_ending: false,
            staged: Staged::default(),
        }
    }

    /// Reads the doorbell and the doorbell record.
    pub(super) fn take_doorbell(&mut self, env: &mut Env<'_>) {
        match self.rings.take_doorbell(self.head, self.state, env.strict, env.stats) {
            Ok(Some(target)) => self.target = self.target.max(target),
            Ok(None) => {}
            Err(_) => return self.fail(None, env),
        }
        self.take_receives(env);
        self.advance(env);
        if self.state == QpState::ERR {
            self.flush(env);
        }
    }

    pub(super) fn tag(&self, is_receive: bool, number: u32) -> u64 {
        let Self { index, generation, .. } = *self;
        Tag { index, generation, is_receive, number }.to_wr_id()
    }

    /// Handles a completion of the device.
    pub(super) fn completed(&mut self, tag: Tag, wc: &ibv_wc, env: &mut Env<'_>) {
        env.sub_outstanding(1);
        if tag.is_receive {
            return self.received(wc, env);
        }
        self.in_device = self.in_device.saturating_sub(1);
        let at = tag.number.wrapping_sub(self.first) as usize;
        if let Some(sent) = self.sends.get_mut(at) {
            sent.outcome = Some(outcome(wc));
            sent.cause = error_detail(wc, self.state, &self.device);
            if let (Some(Ok(())), Some(copy)) = (sent.outcome, &mut sent.response_copy) {
                copy.begin(sent.bytes, env.shadows);
            }
        }
        self.complete_finished(env);
        self.advance(env);
    }

    fn received(&mut self, wc: &ibv_wc, env: &mut Env<'_>) {
        let counter = low16(self.received);
        self.received += 1;
        let cqe = received(wc);
        if let Some(cause) = error_detail(wc, self.state, &self.device) {
            self.record_error(cause);
        }
        let copy = self.staged.copy_for(counter, &cqe, env.shadows);
        if copy.is_none() && self.staged.is_in_place() {
            self.arrived(cqe, counter, env);
        } else {
            self.staged.arrivals.push_back(Arrival { cqe, counter, copy });
        }
    }

    /// Handles a receive whose data is in place.
    pub(super) fn arrived(&mut self, mut cqe: Cqe, counter: u16, env: &mut Env<'_>) {
        if !cqe.opcode.is_error()
            && let Err(error) = env.flush_unseen()
        {
            self.record_error(error);
            let syndrome = Syndrome::LOC_QP_OP_ERR;
            cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome, ..Cqe::default() };
        }
        self.complete_recv(cqe, counter, env);
        if cqe.opcode.is_error() && self.state != QpState::ERR {
            self.enter_error();
            self.complete_finished(env);
        } else if self.state == QpState::ERR {
            self.flush(env);
        } else {
            self.take_receives(env);
        }
    }

    /// Writes the CQEs of finished sends in order.
    pub(super) fn complete_finished(&mut self, env: &mut Env<'_>) {
        while let Some(mut outcome) = self.sends.front().and_then(Sent::ended) {
            let sent = self.sends.pop_front().expect("it was just looked at");
            self.first = self.first.wrapping_add(1);
            if let Some(copy) = sent.response_copy.as_ref().and_then(|copy| copy.copy())
                && let Some(error) = self.staged.failure(copy, self.device.open().name())
            {
                self.record_error(error);
                outcome = outcome.and(Err(Failure::REFUSED));
            }
            if self.state == QpState::ERR && sent.opcode == Opcode::NOP && outcome.is_ok() {
                outcome = Err(Failure::FLUSHED);
            }
            if outcome.is_ok()
                && sent.bytes > 0
                && let Err(error) = env.flush_unseen()
            {
                self.record_error(error);
                outcome = Err(Failure::REFUSED);
            }
            if let Some(cause) = sent.cause {
                self.record_error(cause);
            }
            if outcome.is_err() || sent.completes {
                self.complete_send(sent.index, sent.opcode, outcome, sent.bytes, env);
            }
            if outcome.is_err() && self.state != QpState::ERR {
                self.enter_error();
            }
        }
        if self.state == QpState::ERR {
            self.flush(env);
        }
    }

    /// Goes to ERR because of `cause` and flushes.
    pub(super) fn fail(&mut self, cause: Option<Error>, env: &mut Env<'_>) {
        if let Some(cause) = cause {
            self.record_error(cause);
        }
        if self.state != QpState::ERR {
            self.enter_error();
        }
        self.complete_finished(env);
    }

    /// Records the error, before a CQE reports it.
    pub(super) fn record_error(&self, cause: Error) {
        let qpn = self.rings.qpn;
        tracing::warn!(qpn, %cause, "a queue pair fails");
        self.health.record(Error::QpStopped { qpn, reason: Arc::new(cause) });
    }

    fn enter_error(&mut self) {
        if let Err(error) = self.device.modify(self.psn, self.state, &QpAttr::to(QpState::ERR)) {
            tracing::debug!(qpn = self.rings.qpn, %error, "the device does not stop a queue pair");
        }
        self.state = QpState::ERR;
        self.deadline = Some(Instant::now() + DRAIN);
    }

    /// Whether the device has none of its requests.
    fn is_returned(&self) -> bool {
        self.in_device == 0 && self.received == self.taken
    }

    /// In ERR: whether neither the device nor a copy engine uses its memory.
    pub(super) fn is_idle(&self) -> bool {
        self.is_returned() && self.sends.is_empty() && self.staged.is_in_place() && self.staged.has_left()
    }

    /// In ERR: flushes what the device has not seen, after it returned its requests and copies have ended. Sends are
    /// flushed up to the doorbell record, not the doorbell, as by a card.
    fn flush(&mut self, env: &mut Env<'_>) {
        if let Some(error) = self.staged.discard_staged(self.device.open().name()) {
            self.record_error(error);
        }
        if self.sends.is_empty() && self.staged.has_left() {
            let end = self.rings.send_record(self.head);
            while self.head < end && end - self.head <= self.rings.blocks() {
                let wqe = self.rings.fetch(self.head);
                self.head += wqe.blocks();
                self.rings.qp_trace.skipped();
                self.complete_send(wqe.ctrl.index, wqe.ctrl.opcode, Err(Failure::FLUSHED), 0, env);
            }
            self.target = self.target.max(self.head);
        }
        if self.received == self.taken && self.staged.is_in_place() {
            let end = self.rings.recv_record(self.taken);
            if end - self.taken <= self.rings.receives() {
                while self.taken < end {
                    self.flush_receive(env);
                    self.taken += 1;
                }
            }
        }
        if self.is_returned() {
            self.deadline = None;
        }
    }

    fn flush_receive(&mut self, env: &mut Env<'_>) {
        let flushed = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome::WR_FLUSH_ERR, ..Cqe::default() };
        let counter = low16(self.received);
        self.received += 1;
        self.complete_recv(flushed, counter, env);
    }

    /// Checks the deadline: resets a device queue pair that does not return its requests.
    pub(super) fn tick(&mut self, now: Instant, env: &mut Env<'_>) {
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            tracing::warn!(qpn = self.rings.qpn, "the device kept requests of a queue pair in ERR");
            self.force(env);
        }
    }

    /// In ERR: reclaims the requests from the device and flushes them.
    pub(super) fn force(&mut self, env: &mut Env<'_>) {
        if self.is_returned() {
            return;
        }
        if let Err(error) = self.reset_device() {
            tracing::debug!(qpn = self.rings.qpn, %error, "the device does not reset a queue pair");
        }
        self.forget_requests(env);
        for sent in &mut self.sends {
            sent.outcome.get_or_insert(Err(Failure::FLUSHED));
        }
        while self.received < self.taken {
            if self.staged.is_in_place() {
                self.flush_receive(env);
            } else {
                self.staged.arrivals.push_back(Arrival::flushed(low16(self.received)));
                self.received += 1;
            }
        }
        self.complete_finished(env);
    }

    /// Stops waiting for requests of this connection at the device.
    fn forget_requests(&mut self, env: &Env<'_>) {
        let receives = usize::try_from(self.taken - self.received).expect("fewer than the ring holds");
        env.sub_outstanding(self.in_device as usize + receives);
        self.in_device = 0;
        self.generation = self.generation.wrapping_add(1);
    }

    /// Prepares the destruction: stops waiting for requests at the device.
    pub(super) fn end(&mut self, env: &Env<'_>) {
        self.forget_requests(env);
    }

    /// Writes a requester CQE.
    fn complete_send(
        &mut self,
        index: u16,
        opcode: Opcode,
        outcome: std::result::Result<(), Failure>,
        bytes: u32,
        env: &mut Env<'_>,
    ) {
        let cqe = Cqe { qpn: self.rings.qpn, wqe_counter: index, send_opcode: opcode, ..Cqe::default() };
        let cqe = match outcome {
            Ok(()) => Cqe { opcode: CqeOpcode::REQ, byte_cnt: bytes, ..cqe },
            Err(Failure { syndrome, vendor }) => Cqe { opcode: CqeOpcode::REQ_ERR, syndrome, vendor, ..cqe },
        };
        if self.is_ending {
            return;
        }
        self.rings.qp_trace.completed(&cqe);
        // Queues that ignore overrun always have room.
        let _ = env.cqs.complete(self.rings.request.send_cqn, cqe);
    }

    /// Writes a responder CQE for the receive with this counter.
    fn complete_recv(&mut self, cqe: Cqe, counter: u16, env: &mut Env<'_>) {
        if self.is_ending {
            return;
        }
        let cqe = Cqe { qpn: self.rings.qpn, wqe_counter: counter, ..cqe };
        self.rings.qp_trace.completed(&cqe);
        let _ = env.cqs.complete(self.rings.request.recv_cqn, cqe);
    }

    /// Applies a checked transition. Returns this side's first PSN.
    pub(super) fn modify(&mut self, attr: &QpAttr, env: &mut Env<'_>) -> Result<u32> {
        let to = attr.state.unwrap_or(self.state);
        match to {
            QpState::ERR => self.fail(None, env),
            QpState::RESET => self.reset(env)?,
            _ if self.state == QpState::ERR => {
                let why = "the device moved it to ERR; reset it first".into();
                return Err(Error::Transition { qpn: self.rings.qpn, from: QpState::ERR, to, why });
            }
            _ => {
                if to == QpState::INIT && env.strict {
                    env.cqs.check_initial(self.rings.request.send_cqn)?;
                    env.cqs.check_initial(self.rings.request.recv_cqn)?;
                }
                self.device.modify(self.psn, self.state, attr)?;
                self.state = to;
                self.take_receives(env);
            }
        }
        Ok(self.psn)
    }

    fn reset_device(&self) -> Result<()> {
        self.device.modify(self.psn, self.state, &QpAttr::to(QpState::RESET))
    }

    fn reset(&mut self, env: &mut Env<'_>) -> Result<()> {
        if self.state == QpState::ERR {
            self.force(env);
            // Completes late doorbells before the rings are cleared.
            self.flush(env);
        }
        self.staged.check(self.device.open().name())?;
        let psn = random_psn()?;
        self.reset_device()?;
        self.forget_requests(env);
        self.rings.clear();
        self.sends.clear();
        self.staged = Staged::default();
        // A new PSN, so that late packets of this connection do not match the next.
        self.psn = psn;
        (self.head, self.target, self.first) = (0, 0, 0);
        (self.taken, self.received) = (0, 0);
        self.deadline = None;
        self.state = QpState::RESET;
        Ok(())
    }
}

/// Detail in a status that its CQE lacks.
fn error_detail(wc: &ibv_wc, state: QpState, device: &DeviceQp) -> Option<Error> {
    let is_flush = wc.status == ibv_wc_status::IBV_WC_WR_FLUSH_ERR && state != QpState::ERR;
    let why = if is_unnamed(wc) {
        let status = wc.status.name().map_or_else(|| format!("status {}", wc.status.0), str::to_owned);
        format!("it completed a request with {status}, vendor code {:#x}: check `dmesg`", wc.vendor_err)
    } else if is_flush {
        // Soft-RoCE reports a wrong lkey this way.
        "it flushed a request without reporting an earlier failure: check lkey, range and rights of the buffers of the oldest \
         request, and what the peer asked for"
            .into()
    } else {
        return None;
    };
    Some(Error::Device { device: device.open().name().to_owned(), why })
}

/// Result of posting a WQE.
enum Posted {
    /// Posted; it returns this many bytes, which may then be copied from staging.
    InDevice(u32, Option<Box<ResponseCopy>>),
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
                self.complete_finished(env);
                if self.state != QpState::RTS {
                    return;
                }
                self.stage(env);
            }
            let wqe = self.rings.fetch(self.head);
            let mut sent = Sent {
                index: wqe.ctrl.index,
                opcode: wqe.ctrl.opcode,
                bytes: 0,
                completes: wqe.ctrl.always_completes(),
                outcome: None,
                cause: None,
                response_copy: None,
            };
            match self.post(&wqe, env) {
                Posted::InDevice(bytes, copy) => {
                    self.in_device += 1;
                    env.add_outstanding(1);
                    sent.bytes = bytes;
                    sent.response_copy = copy;
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
        self.complete_finished(env);
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
        let is_foreign = matches!(op, DecodedOp::MaskedAtomic { .. } | DecodedOp::Wait { .. })
            || matches!(op.payload(), Some(DecodedPayload::Mixed(_)));
        if is_foreign {
            // Only other programs write such WQEs.
            return Posted::Failed(Failure { syndrome: Syndrome::LOC_QP_OP_ERR, vendor: 0 }, None);
        }
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
            return refused(Error::invalid("the number of buffers of a send", request.buffers(), expected));
        }
        let number = self.first.wrapping_add(u32::try_from(self.sends.len()).expect("fewer than blocks"));
        let pieces = match env.shadows.redirect(request.buffers_mut(), self.device.open().name()) {
            Ok(pieces) => pieces,
            Err(cause) => return refused(cause),
        };
        let mut copy = None;
        if bytes > 0 {
            copy = ResponseCopy::of(pieces);
        } else if !pieces.is_empty() {
            match self.staged.staged_state(self.head, self.device.open().name()) {
                StagedState::InPlace => {}
                StagedState::NotYet => return Posted::NotNow,
                StagedState::Failed(cause) => return refused(cause),
            }
        }
        match self.device.send(&mut request, self.tag(false, number)) {
            Ok(()) => Posted::InDevice(bytes, copy),
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

    /// Whether the doorbell record has receives that the device would take.
    pub(super) fn has_new_receives(&self) -> bool {
        let is_able = matches!(self.state, QpState::INIT | QpState::RTR | QpState::RTS);
        let has_room = self.taken - self.received < u64::from(self.device.granted.receives);
        is_able && has_room && self.rings.recv_record(self.taken) != self.taken
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
                    env.add_outstanding(1);
                    self.staged.expect(low16(self.taken), staged);
                }
                Err(errno) if self.taken > self.received && is_full(errno) => return,
                Err(errno) => return self.fail(Some(self.device.refused("ibv_post_recv", errno)), env),
            }
            self.taken += 1;
        }
    }
}
