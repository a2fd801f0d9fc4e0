//! Staging of GPU memory that the device cannot register.
//!
//! Pinned host memory of the same size, the shadow, is registered in its place. A copy engine copies payload to the
//! shadow before the device gets a request, and from it before a CQE reports received data. Copies of one message do
//! not overlap its time on the wire; those of successive messages do. Each runs on the engine of the memory's own GPU,
//! so copies of the same bytes are ordered.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::qp::{Env, ProxyQp};
use super::translate::{Buffers, Inline, Request};
use gdsync_device::copy_engine::{COPY_LIMIT, Part, Source, Status, Ticket};
use gdsync_device::cuda::Engine;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{HcaStats, QpState};
use gdsync_shm::back_off;
use mlx5_ring::{Cqe, CqeOpcode, DecodedOp, Syndrome};

/// Shadows of GPU memory, by key.
#[derive(Debug, Default)]
pub(super) struct Shadows {
    list: HashMap<u32, Arc<Shadow>>,
    /// All engines ever used: stopping one takes long, so it is not done under the lock.
    engines: Vec<Arc<Engine>>,
    /// Start of the newest copy that has not been reported.
    begun: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Shadow {
    gpu: Memory,
    host: Memory,
    engine: Arc<Engine>,
    /// Why it is needed.
    why: String,
    life: Mutex<Life>,
}

#[derive(Debug, Default)]
struct Life {
    /// Copies in progress, and some finished ones.
    copies: Vec<Copy>,
    /// Deregistered: no copy may start.
    is_over: bool,
}

/// A part of a message in memory with a shadow.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    shadow: Arc<Shadow>,
    at: usize,
    len: usize,
    /// Offset in the message.
    begin: usize,
}

/// The parts of one message.
pub(super) type Pieces = Vec<Piece>;

impl Shadow {
    pub(super) fn new(gpu: Memory, host: Memory, engine: Arc<Engine>, why: String) -> Self {
        Self { gpu, host, engine, why, life: Mutex::default() }
    }

    /// Waits until no copy accesses its memory. Returns one that times out.
    pub(super) fn wait_for_copies(&self) -> Option<Copy> {
        let copies = std::mem::take(&mut self.life.lock().copies);
        let start = Instant::now();
        while !copies.iter().all(Copy::is_over) {
            back_off(start.elapsed(), COPY_LIMIT);
        }
        copies.into_iter().find(|copy| !copy.has_ended())
    }
}

impl Shadows {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn add(&mut self, lkey: u32, shadow: Shadow) {
        if !self.engines.iter().any(|known| Arc::ptr_eq(known, &shadow.engine)) {
            self.engines.push(shadow.engine.clone());
        }
        self.list.insert(lkey, Arc::new(shadow));
    }

    /// Removes a shadow and cancels copies that have not begun. The caller waits for copies and drops it, without the
    /// lock.
    pub(super) fn remove(&mut self, lkey: u32) -> Option<Arc<Shadow>> {
        let shadow = self.list.remove(&lkey)?;
        let mut life = shadow.life.lock();
        life.is_over = true;
        life.copies.iter().for_each(Copy::cancel);
        drop(life);
        Some(shadow)
    }

    /// Why this key's memory has a shadow, if it has one.
    pub(super) fn why(&self, lkey: u32) -> Option<&str> {
        Some(&self.list.get(&lkey)?.why)
    }

    /// Replaces addresses in memory with a shadow, and returns those parts. Addresses outside of their region stay; the
    /// device refuses them.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if a copy is stuck: it could overwrite newer data.
    pub(super) fn redirect(&self, buffers: &mut Buffers, device: &str) -> Result<Pieces> {
        let mut begin = 0;
        let mut pieces = Pieces::new();
        for buffer in buffers {
            let len = buffer.length as usize;
            if let Some(shadow) = self.list.get(&buffer.lkey)
                && let Some(at) = offset(&shadow.gpu, buffer.addr, len)
            {
                let stuck_copies = shadow.life.lock().copies.iter().find(|copy| copy.is_stuck()).cloned();
                stuck_copies.and_then(|copy| copy.failure(device)).map_or(Ok(()), Err)?;
                buffer.addr = shadow.host.addr() + at as u64;
                pieces.push(Piece { shadow: shadow.clone(), at, len, begin });
            }
            begin += len;
        }
        Ok(pieces)
    }

    /// Starts to copy payload to the shadows.
    pub(super) fn stage(&mut self, pieces: &[Piece]) -> Copy {
        self.start(pieces, |Piece { shadow, at, len, .. }| {
            let from = Source::Here(shadow.gpu.clone(), *at);
            Part { from, to: shadow.host.clone(), at: *at, len: *len }
        })
    }

    /// Starts to copy the first `bytes` bytes of a message from the shadows.
    pub(super) fn copy_back(&mut self, pieces: &[Piece], bytes: u32) -> Copy {
        self.start(pieces, |Piece { shadow, at, len, begin }| {
            let from = Source::Here(shadow.host.clone(), *at);
            let len = *len.min(&(bytes as usize).saturating_sub(*begin));
            Part { from, to: shadow.gpu.clone(), at: *at, len }
        })
    }

    fn start(&mut self, pieces: &[Piece], part: impl Fn(&Piece) -> Part) -> Copy {
        self.begun = Some(Instant::now());
        if let Some(Piece { shadow, .. }) = pieces.iter().find(|piece| piece.shadow.life.lock().is_over) {
            return Copy::refused(&shadow.engine, "its region is registered no more");
        }
        let copy = Copy::start(pieces.iter().map(|piece| (piece.shadow.engine.clone(), part(piece))));
        for Piece { shadow, .. } in pieces {
            let copies = &mut shadow.life.lock().copies;
            copies.retain(|copy| !copy.has_ended());
            copies.push(copy.clone());
        }
        copy
    }

    /// Start of the newest copy since the last call.
    pub(super) fn take_begun(&mut self) -> Option<Instant> {
        self.begun.take()
    }
}

/// Offset of a range in a memory.
fn offset(memory: &Memory, addr: u64, len: usize) -> Option<usize> {
    let at = usize::try_from(addr.checked_sub(memory.addr())?).ok()?;
    (at.checked_add(len)? <= memory.len()).then_some(at)
}

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
    pub(super) copy: Option<Copy>,
}

impl Arrival {
    /// One that the device returned empty.
    pub(super) fn flushed(counter: u16) -> Self {
        let cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome::WR_FLUSH_ERR, ..Cqe::default() };
        Self { cqe, counter, copy: None }
    }

    fn is_in_place(&self) -> bool {
        self.copy.as_ref().is_none_or(Copy::is_over)
    }
}

/// Response data of a READ or atomic in a shadow.
#[derive(Debug)]
pub(super) enum ResponseCopy {
    Expected(Pieces),
    Begun(Copy),
}

impl ResponseCopy {
    pub(super) fn of(pieces: Pieces) -> Option<Box<Self>> {
        (!pieces.is_empty()).then(|| Box::new(Self::Expected(pieces)))
    }

    /// Starts to copy the first `bytes` bytes from the shadow.
    pub(super) fn begin(&mut self, bytes: u32, shadows: &mut Shadows) {
        if let Self::Expected(pieces) = self {
            *self = Self::Begun(shadows.copy_back(pieces, bytes));
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
pub(super) enum StagedState {
    InPlace,
    NotYet,
    Failed(Error),
}

impl Staged {
    /// Whether the data of all returned receives is in place.
    pub(super) fn is_in_place(&self) -> bool {
        self.arrivals.is_empty()
    }

    /// Whether no copy reads memory of sends.
    pub(super) fn has_left(&self) -> bool {
        self.outgoing.is_empty() && self.ending.is_empty()
    }

    /// State of the send at this block, the next one.
    pub(super) fn staged_state(&self, head: u64, device: &str) -> StagedState {
        match self.outgoing.front() {
            Some((at, copy)) if *at == head && copy.is_over() => {
                copy.failure(device).map_or(StagedState::InPlace, StagedState::Failed)
            }
            _ => StagedState::NotYet,
        }
    }

    /// Discards staged sends that were not posted. Returns the error of a copy that timed out.
    pub(super) fn discard_staged(&mut self, device: &str) -> Option<Error> {
        self.outgoing.iter().for_each(|(_, copy)| copy.cancel());
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
    pub(super) fn copy_for(&mut self, counter: u16, cqe: &Cqe, shadows: &mut Shadows) -> Option<Copy> {
        let (_, pieces) = self.expected.pop_front_if(|(expected, _)| *expected == counter)?;
        // A WRITE with immediate data puts nothing into the receive's buffers.
        let has_come = !cqe.opcode.is_error() && cqe.opcode != CqeOpcode::RESP_WR_IMM;
        has_come.then(|| shadows.copy_back(&pieces, cqe.byte_cnt))
    }
}

impl ProxyQp {
    /// Whether it waits for copies, which report no completion.
    pub(super) fn waits_for_copies(&self) -> bool {
        let Staged { outgoing, ending, .. } = &self.staged;
        let may_send = self.state == QpState::RTS && self.in_device < self.device.granted.sends;
        !self.staged.is_in_place()
            || !ending.is_empty()
            || self.sends.front().is_some_and(|sent| sent.outcome.is_some())
            || may_send && outgoing.front().is_some_and(|(at, _)| *at == self.head)
    }

    /// Starts to stage payload of rung sends, from the next one on.
    pub(super) fn stage(&mut self, env: &mut Env<'_>) {
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
                    self.staged.outgoing.push_back((at, env.shadows.stage(&pieces)));
                }
            }
            self.staged.looked += wqe.blocks();
        }
    }

    /// Continues what waited for finished copies.
    pub(super) fn copied(&mut self, env: &mut Env<'_>) {
        while let Some(Arrival { mut cqe, counter, copy }) =
            self.staged.arrivals.pop_front_if(|arrival| arrival.is_in_place())
        {
            let failure = copy.and_then(|copy| self.staged.failure(&copy, self.device.open().name()));
            if let Some(failure) = failure {
                self.record_error(failure);
                let syndrome = Syndrome::LOC_QP_OP_ERR;
                cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome, ..Cqe::default() };
            }
            self.arrived(cqe, counter, env);
        }
        self.complete_finished(env);
        self.advance(env);
    }
}

/// The copies of one message. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Copy(Arc<CopyState>);

#[derive(Debug)]
struct CopyState {
    /// One ticket per engine.
    jobs: SmallVec<[(Arc<Engine>, Ticket); 1]>,
    clock: Mutex<Clock>,
}

/// Detects that copies make no progress.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// Copies ended by the engines.
    ended: u32,
    /// Time of the last change.
    since: Instant,
    is_late: bool,
}

impl Clock {
    /// Updates with the number of ended copies. Returns whether the limit, which counts from the end of the copies before, is exceeded;
    /// this is final.
    fn look(&mut self, ended: u32, now: Instant) -> bool {
        if ended != self.ended {
            (self.ended, self.since) = (ended, now);
        }
        self.is_late |= now.saturating_duration_since(self.since) > COPY_LIMIT;
        self.is_late
    }
}

fn ended(jobs: &[(Arc<Engine>, Ticket)]) -> u32 {
    // Failed tickets say nothing of the others.
    let owing = jobs.iter().filter(|(_, ticket)| !ticket.is_over());
    owing.fold(0, |sum, (engine, _)| sum.wrapping_add(engine.ended()))
}

impl Copy {
    /// Starts each part on the engine of its source or destination GPU.
    pub(super) fn start(parts: impl Iterator<Item = (Arc<Engine>, Part)>) -> Self {
        let mut lists: SmallVec<[(Arc<Engine>, Vec<Part>); 1]> = SmallVec::new();
        for (engine, part) in parts.filter(|(_, part)| part.len > 0) {
            match lists.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &engine)) {
                Some((_, list)) => list.push(part),
                None => lists.push((engine, vec![part])),
            }
        }
        let start = |(engine, list): (Arc<Engine>, _)| {
            let ticket = engine.copy(list);
            (engine, ticket)
        };
        let jobs: SmallVec<_> = lists.into_iter().map(start).collect();
        let clock = Clock { ended: ended(&jobs), since: Instant::now(), is_late: false };
        Self(Arc::new(CopyState { jobs, clock: Mutex::new(clock) }))
    }

    /// A copy that failed from the start.
    pub(super) fn refused(engine: &Arc<Engine>, why: &str) -> Self {
        let clock = Clock { ended: 0, since: Instant::now(), is_late: false };
        let jobs = SmallVec::from([(engine.clone(), Ticket::failed(why))]);
        Self(Arc::new(CopyState { jobs, clock: Mutex::new(clock) }))
    }

    fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.0.jobs.iter().map(|(_, ticket)| ticket)
    }

    /// Whether the engines no longer access its memory.
    pub(super) fn has_ended(&self) -> bool {
        self.tickets().all(Ticket::is_over)
    }

    /// Whether it ended or exceeded its limit.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended() || self.0.clock.lock().look(ended(&self.0.jobs), Instant::now())
    }

    /// Whether it exceeded its limit and has not ended.
    pub(super) fn is_stuck(&self) -> bool {
        self.0.clock.lock().is_late && !self.has_ended()
    }

    /// Cancels copies that have not begun.
    pub(super) fn cancel(&self) {
        self.tickets().for_each(Ticket::cancel);
    }

    /// Why it failed, once it is over.
    pub(super) fn failure(&self, device: &str) -> Option<Error> {
        let ticket = self.tickets().find(|ticket| ticket.status() != Status::Done)?;
        let why = match ticket.status() {
            Status::Failed => ticket.failure().unwrap_or("its copy failed").to_owned(),
            _ => format!(
                "its GPU has ended no copy within {COPY_LIMIT:?}. Until it ends this one it may still write there: the memory is kept, \
                 requests and resets that concern it are refused. See `dmesg` (Xid) for what ails the GPU"
            ),
        };
        let why = format!("payload in GPU memory is staged in host memory, and cannot be: {why}");
        Some(Error::Device { device: device.to_owned(), why })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_in_queue_does_not_count_while_engine_progresses() {
        let begin = Instant::now();
        let mut clock = Clock { ended: 7, since: begin, is_late: false };
        let mut look = |ended, seconds| clock.look(ended, begin + Duration::from_secs(seconds));
        assert!((0..12).all(|n| !look(7 + n, 9 * u64::from(n))), "others before it end");
        assert!(!look(18, 109), "ten seconds since the last one was seen");
        assert!(look(18, 110));
        assert!(look(19, 111), "the result is final");
    }
}
