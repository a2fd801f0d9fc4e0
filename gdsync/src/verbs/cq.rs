//! Completion queues: the ring of CQEs, polled by the CPU or claimed by stream waits.
//!
//! Completion `n` is taken once: by [`Cq::poll`] on the CPU, or by a stream wait. Its slot is reused after it was
//! taken, decoded by the CPU (so that the root cause of an error is kept), and, if a stream waits for it, passed by
//! that stream.

mod flushed;
mod room;

use std::collections::VecDeque;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use self::flushed::FlushCqe;
use self::room::Room;
use super::source::{Arrival, is_beyond};
use super::sq::OfStream;
use super::stream_name;
use super::track::Tracker;
use super::wr::Wc;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::{Found, Word32};
use gdsync_device::recorder::{Awaited, By, Event, Hold, Log, NOTED_AFTER, Queue, Stage};
use gdsync_device::{CqParts, GpuNudge, OnGpu, Places, Provider, QpAttr, QpState};
use gdsync_shm::{Backoff, SpinLock, sleep_time};
use mlx5_ring::{self as mlx5, CQE_SIZE, Cqe, CqeOpcode, Syndrome};

/// A completion queue. Clones share it. It is destroyed when the last clone and its last queue pair are gone.
#[derive(Clone, Debug)]
pub struct Cq(pub(crate) Arc<CqInner>);

pub(crate) struct CqInner {
    provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    parts: CqParts,
    /// The consumer index in the doorbell record.
    consumed: Word32,
    /// GPU addresses of ring and consumer index.
    found: [Found; 2],
    log: u32,
    room: Room,
    recorder: Log,
    /// Flush CQEs written by the library, until the device writes its own. Lock order: after `state`.
    flushed: SpinLock<Vec<FlushCqe>>,
    /// Whether `flushed` has any.
    has_flushed: AtomicBool,
    /// `parking_lot`, not the spin lock: pollers contend and need fairness.
    state: Mutex<CqState>,
}

/// The limit of a move to ERR.
const STOP: Duration = Duration::from_secs(10);

/// The first send of a queue pair that fails; the next ones are flushed.
fn is_failed_send(cqe: &Cqe) -> bool {
    cqe.opcode == CqeOpcode::REQ_ERR && cqe.syndrome != Syndrome::WR_FLUSH_ERR
}

struct CqState {
    /// Number of completions decoded.
    reaped: u64,
    /// The next completion for `poll`.
    poll_next: u64,
    /// The next completion that a stream wait may claim.
    claim_next: u64,
    /// Slots of completions before this one are free.
    freed: u64,
    /// The consumer index as last read from the doorbell record.
    passed: u64,
    slots: Box<[Slot]>,
    /// Claims not yet submitted, oldest first: the first and last completion of each.
    unsubmitted: VecDeque<(u64, u64)>,
    /// Number of claims, prepared or submitted, that no stream has passed.
    in_stream: u64,
    /// The stream that last waited on this queue.
    stream: u64,
    queues: Vec<Arc<Tracker>>,
    /// Number of queues ever attached. With one, request `n` of the queue is completion `n`.
    attached: usize,
    /// Set while its queue is being reset: claims are refused.
    is_closed: bool,
}

/// The locked claims of a completion queue.
pub(crate) struct Claims<'a>(MutexGuard<'a, CqState>);

impl Claims<'_> {
    /// Whether there is a prepared, unsubmitted claim.
    pub(crate) fn has_prepared(&self) -> bool {
        !self.0.unsubmitted.is_empty()
    }

    /// Whether there are claims that no stream has passed.
    pub(crate) fn has_submitted(&self) -> bool {
        self.0.in_stream > 0
    }

    /// Refuses claims, or accepts them again.
    pub(crate) fn close(&mut self, is_closed: bool) {
        self.0.is_closed = is_closed;
    }
}

/// The state of one slot.
#[derive(Clone, Copy)]
enum Slot {
    /// Free, or its request is posted.
    Open,
    /// Decoded, for `poll`.
    Arrived(Decoded),
    /// Claimed by a stream wait, for this completion or for a later one. Keeps what is decoded, in case the claim is released.
    Claimed { is_last: bool, decoded: Option<Decoded> },
    /// Polled, or nothing to poll: of a cancelled request, or of a queue that is gone.
    Taken,
}

/// The number of a request, and its completion.
type Decoded = (u64, Wc);

impl fmt::Debug for CqInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CQ {:#x}", self.parts.cqn)
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        if self.fork_guard.may_end(&self.provider) {
            self.provider.destroy_cq(self.parts.cqn);
        }
    }
}

/// Claims between two reaps.
const CLAIM_BATCH: u64 = 16;

/// The completions that a claim takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClaimRange {
    /// The next `n`, at least one.
    Next(u64),
    /// All through number `n`.
    Through(u64),
    /// The completions of all requests posted so far.
    All,
}

impl Cq {
    pub(crate) fn create(
        provider: Arc<dyn Provider>,
        entries: usize,
        ring: OnGpu,
        places: &Places,
        recorder: Log,
    ) -> Result<Self> {
        if !(1..=1 << 22).contains(&entries) {
            return Err(Error::invalid("completion queue entries", entries, "1 to 4194304"));
        }
        let log = entries.next_power_of_two().trailing_zeros();
        let parts = provider.create_cq(log, ring, places)?;
        // The device may round up.
        let log = (parts.ring.len() / CQE_SIZE).trailing_zeros();
        let state = CqState {
            reaped: 0,
            poll_next: 0,
            claim_next: 0,
            freed: 0,
            passed: 0,
            slots: vec![Slot::Open; 1 << log].into(),
            unsubmitted: VecDeque::new(),
            in_stream: 0,
            stream: 0,
            queues: Vec::new(),
            attached: 0,
            is_closed: false,
        };
        Ok(Self(Arc::new(CqInner {
            provider,
            fork_guard: ForkGuard::default(),
            consumed: parts.record.word32(0)?,
            parts,
            found: Default::default(),
            log,
            room: Room::new(1 << log),
            recorder,
            flushed: SpinLock::default(),
            has_flushed: AtomicBool::new(false),
            state: Mutex::new(state),
        })))
    }

    /// The completion queue number.
    pub fn cqn(&self) -> u32 {
        self.0.parts.cqn
    }

    /// The number of CQEs that the ring holds.
    pub fn entries(&self) -> usize {
        1 << self.0.log
    }

    /// Takes the next arrived completion that no stream wait has claimed.
    ///
    /// Errors are completions too: see [`Wc::ok`].
    pub fn poll(&self) -> Option<Wc> {
        self.0.poll()
    }

    /// The number of completions that stream waits have claimed, arrived or not, or that were taken before those. Waits
    /// that are dropped instead of submitted give theirs back.
    pub fn claimed(&self) -> u64 {
        self.0.state.lock().claim_next
    }

    /// Takes all arrived completions that no stream wait has claimed, for callers that query each
    /// [`Completion`](super::Completion).
    pub fn drain(&self) {
        self.0.drain();
    }

    /// Blocks until it can take the next completion that no stream wait has claimed.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Wc> {
        let mut found = None;
        self.0.wait_until(
            timeout,
            "waiting for a completion",
            || self.0.awaits_next(),
            || self.0.describe_next(),
            || {
                found = self.poll();
                found.is_some()
            },
        )?;
        Ok(found.expect("wait_until returns Ok only when a completion was found"))
    }
}

impl CqState {
    /// Whether no stream other than `stream` waits on the queue.
    #[inline]
    fn is_free_for(&self, stream: u64) -> bool {
        self.stream == stream || self.in_stream == self.unsubmitted.len() as u64
    }
}

impl CqInner {
    /// The device's description of the queue.
    pub(crate) fn parts(&self) -> &CqParts {
        &self.parts
    }

    pub(crate) fn attach(&self, tracker: &Arc<Tracker>) {
        let mut state = self.state.lock();
        if state.attached > 0 {
            self.room.share();
            // A thread that has not seen the change holds its queue's lock: lock each once.
            state.queues.iter().for_each(|known| drop(known.lock()));
            // From now on, CQE numbers are not request numbers: decode skipped CQEs.
            state.queues.iter().for_each(|known| known.decode_all_skipped(|n| self.cqe(n)));
        }
        state.queues.push(tracker.clone());
        state.attached += 1;
    }

    pub(crate) fn detach(&self, qpn: u32) {
        self.reap();
        let mut state = self.state.lock();
        for queue in state.queues.extract_if(.., |q| q.qpn == qpn) {
            // Outstanding requests will never complete.
            self.room.free(queue.outstanding());
        }
        if state.queues.is_empty() {
            self.release_abandoned(&mut state);
            self.free(&mut state);
        }
    }

    pub(crate) fn cqn(&self) -> u32 {
        self.parts.cqn
    }

    /// The number of CQEs that the ring holds.
    pub(crate) fn capacity(&self) -> u64 {
        1 << self.log
    }

    fn index(&self, n: u64) -> usize {
        usize::try_from(n & (self.capacity() - 1)).expect("a ring index fits in memory")
    }

    pub(crate) fn poll(&self) -> Option<Wc> {
        if !self.fork_guard.is_here() {
            return None;
        }
        let found = self.take(&mut self.state.lock());
        if found.is_none() && self.provider.progress() {
            return self.take(&mut self.state.lock());
        }
        found
    }

    fn drain(&self) {
        if self.room.in_use() == 0 || !self.fork_guard.is_here() {
            return;
        }
        let take_all = || {
            let mut state = self.state.lock();
            while self.take(&mut state).is_some() {}
        };
        take_all();
        if self.provider.progress() {
            take_all();
        }
    }

    /// Whether `count` more completions have room.
    pub(crate) fn has_room(&self, count: u64) -> bool {
        self.room.in_use().saturating_add(count) <= self.capacity()
    }

    /// Reserves room for one completion of a queue that the caller has locked.
    #[inline]
    pub(crate) fn reserve(&self) -> bool {
        self.room.reserve()
    }

    /// Returns the reservations of `count` requests that are not posted; same condition as [`CqInner::reserve`].
    pub(crate) fn take_back(&self, count: u64) {
        self.room.take_back(count);
    }

    /// Decodes arrived completions and frees slots. No-op in a forked child, where a ring in GPU memory is not mapped.
    pub(crate) fn reap(&self) {
        if !self.fork_guard.is_here() {
            return;
        }
        let mut state = self.state.lock();
        self.reap_locked(&mut state);
        self.free(&mut state);
    }

    /// The word of completion `n` that holds the owner bit.
    fn last_word(&self, n: u64) -> &AtomicU32 {
        let offset = self.index(n) * CQE_SIZE + mlx5::CQE_OP_OWN_OFFSET;
        self.parts.ring.atomic32(offset).expect("CQE words lie in the ring, aligned")
    }

    fn has_arrived(&self, n: u64) -> bool {
        gdsync_shm::is_complete(self.last_word(n), n, self.log)
    }

    fn reap_locked(&self, state: &mut CqState) {
        // A completion without a reservation cannot arrive: `free` runs before its slot is reused.
        if self.has_arrived(state.reaped) {
            self.skip_passed(state);
        }
        while self.has_arrived(state.reaped) {
            let n = state.reaped;
            let at = self.index(n);
            let cqe = self.cqe(n);
            let queue = Tracker::find(&state.queues, &cqe);
            let completed = queue.and_then(|queue| queue.complete(&cqe));
            if queue.is_some_and(|queue| queue.is_of_datagrams()) && is_failed_send(&cqe) {
                self.end_receives(cqe.qpn);
            }
            let known = completed.and_then(|(number, wc, cancelled)| (!cancelled).then_some((number, wc)));
            match &mut state.slots[at] {
                Slot::Claimed { decoded, .. } => *decoded = known,
                slot => *slot = known.map_or(Slot::Taken, Slot::Arrived),
            }
            state.reaped += 1;
        }
    }

    /// Moves a queue pair to ERR whose datagram has failed. The device has stopped its sends only (SQE): receives, and what waits for
    /// them, would not end.
    #[cold]
    fn end_receives(&self, qpn: u32) {
        if let Err(error) = self.provider.modify_qp(qpn, &QpAttr::to(QpState::ERR), STOP) {
            tracing::error!(qpn, %error, "queue pair could not be stopped");
        }
    }

    /// The consumer index, which was `last` before. Kernels that signal out of order set it back, which must not count as a lap.
    fn passed(&self, last: u64) -> u64 {
        let passed = gdsync_shm::freed_slots(self.consumed.atomic(), last);
        if passed - last <= 2 * self.capacity() { passed } else { last }
    }

    fn free(&self, state: &mut CqState) {
        let before = state.freed;
        while state.freed < state.reaped {
            let at = self.index(state.freed);
            match state.slots[at] {
                Slot::Open | Slot::Arrived(_) => break,
                Slot::Taken => {}
                Slot::Claimed { is_last, .. } => {
                    if state.passed <= state.freed {
                        state.passed = self.passed(state.passed);
                    }
                    if state.passed <= state.freed {
                        break;
                    }
                    state.in_stream -= u64::from(is_last);
                }
            }
            state.slots[at] = Slot::Open;
            state.freed += 1;
        }
        let freed = state.freed - before;
        if freed > 0 {
            // A freed slot belongs to the next lap: completions taken by a stream are not polled.
            state.poll_next = state.poll_next.max(state.freed);
            state.claim_next = state.claim_next.max(state.freed);
            self.room.free(freed);
            // While a stream waits here, only the stream writes the consumer index.
            if state.in_stream == 0 && state.unsubmitted.is_empty() && state.passed < state.freed {
                state.passed = state.freed;
                gdsync_shm::free_slots(self.consumed.atomic(), state.freed);
                self.parts.record.fence();
            }
        }
    }

    fn take(&self, state: &mut CqState) -> Option<Wc> {
        self.reap_locked(state);
        let mut found = None;
        while found.is_none() && state.poll_next < state.reaped {
            let slot = &mut state.slots[self.index(state.poll_next)];
            state.poll_next += 1;
            if let Slot::Arrived(decoded) = *slot {
                *slot = Slot::Taken;
                found = Some(decoded);
            }
        }
        state.claim_next = state.claim_next.max(state.poll_next);
        self.free(state);
        let (number, wc) = found?;
        let queue = if wc.is_send() { Queue::Send } else { Queue::Receive };
        self.recorder.note(|| {
            let status = wc.syndrome.map_or(0, |syndrome| syndrome.0);
            let event = Event::of(Stage::Released, queue, By::Cpu, wc.qpn, number);
            Event { len: wc.byte_len, status, ..event }
        });
        Some(wc)
    }

    /// Takes completion `n`, unless it has not arrived or a stream wait holds it. Returns whether it is taken, now or before.
    pub(crate) fn take_number(&self, n: u64) -> bool {
        let take = || {
            let mut state = self.state.lock();
            self.reap_locked(&mut state);
            self.free(&mut state);
            if n >= state.reaped {
                return false;
            }
            if n >= state.freed {
                let at = self.index(n);
                match &mut state.slots[at] {
                    Slot::Claimed { .. } => return state.passed > n,
                    slot => *slot = Slot::Taken,
                }
                state.claim_next = state.claim_next.max(n + 1);
                self.free(&mut state);
            }
            true
        };
        take() || (self.provider.progress() && take())
    }

    /// Whether a claim reaps first. Reaping in batches costs less: CQEs come from another core's cache. A ring in GPU
    /// memory, with about a microsecond per read, is reaped only when necessary.
    #[inline]
    fn should_reap(&self, state: &CqState) -> bool {
        let unseen = state.claim_next.saturating_sub(state.reaped);
        (state.in_stream == 0 || unseen >= CLAIM_BATCH.min(self.capacity() / 2)) && self.parts.ring.is_host()
    }

    /// Claims completions for a stream wait. Returns the first and last number; `None` if the last was taken before.
    /// With a `stream`, also submits the claim to it, as [`CqInner::submit`] does.
    pub(crate) fn claim(
        &self,
        claim_range: ClaimRange,
        tracker: &Tracker,
        stream: Option<OfStream>,
    ) -> Result<Option<(u64, u64)>> {
        self.fork_guard.check()?;
        let mut state = self.state.lock();
        if state.attached != 1 {
            return Err(Error::Unsupported {
                what: "a stream wait on a completion queue that several queues share",
                by: "the CQE order, which is only known per queue",
                fix: "build the queue pair without send_cq and recv_cq, so that each queue gets its own",
            });
        }
        if self.should_reap(&state) {
            self.reap_locked(&mut state);
            self.free(&mut state);
        }
        let (posted, next) = tracker.next_from(state.claim_next);
        state.claim_next = next;
        let n = match claim_range {
            ClaimRange::Next(count) => state.claim_next + count - 1,
            ClaimRange::Through(n) => n,
            ClaimRange::All => posted.saturating_sub(1),
        };
        if n >= posted || state.is_closed {
            return Err(Error::NothingToWaitFor { queue: tracker.name(), qpn: tracker.qpn });
        }
        if n < state.claim_next {
            return Ok(None);
        }
        let first = state.claim_next;
        for m in first..=n {
            let slot = &mut state.slots[self.index(m)];
            let decoded = if let Slot::Arrived(decoded) = *slot { Some(decoded) } else { None };
            *slot = Slot::Claimed { is_last: m == n, decoded };
        }
        state.claim_next = n + 1;
        state.in_stream += 1;
        state.unsubmitted.push_back((first, n));
        if let Some(Err(error)) = stream.map(|stream| self.submit_locked(&mut state, n, stream, tracker)) {
            drop(state);
            self.release(first, n);
            return Err(error);
        }
        Ok(Some((first, n)))
    }

    /// Releases an unsubmitted claim: its completions can be polled or, if no later one is claimed, claimed again.
    /// No-op in a forked child.
    pub(crate) fn release(&self, first: u64, n: u64) {
        if !self.fork_guard.is_here() {
            return;
        }
        let mut state = self.state.lock();
        state.unsubmitted.retain(|&(_, m)| m != n);
        state.in_stream -= 1;
        for m in first..=n {
            let at = self.index(m);
            state.slots[at] = match state.slots[at] {
                Slot::Claimed { decoded: Some(decoded), .. } => Slot::Arrived(decoded),
                // Its request was cancelled.
                _ if m < state.reaped => Slot::Taken,
                _ => Slot::Open,
            };
        }
        state.poll_next = state.poll_next.min(first);
        while state.claim_next > state.poll_next.max(state.freed)
            && matches!(state.slots[self.index(state.claim_next - 1)], Slot::Open | Slot::Arrived(_))
        {
            state.claim_next -= 1;
        }
        drop(state);
        self.reap();
    }

    /// Submits claim `n` to `stream`, in claim order. Undone by [`CqInner::unsubmit`]. For a GPU's, publishes the watch
    /// limit too: call [`CqInner::ensure_attended`] after the unlock.
    pub(crate) fn submit(&self, n: u64, stream: OfStream, tracker: &Tracker) -> Result<()> {
        self.fork_guard.check()?;
        self.submit_locked(&mut self.state.lock(), n, stream, tracker)
    }

    fn submit_locked(&self, state: &mut CqState, n: u64, stream: OfStream, tracker: &Tracker) -> Result<()> {
        let (_, expected) =
            *state.unsubmitted.front().expect("the claim of a wait is listed until it is submitted");
        if expected != n {
            return Err(Error::OutOfOrder { qpn: tracker.qpn, expected, got: n });
        }
        if !state.is_free_for(stream.id) {
            // The other stream may have passed its claims by now.
            self.reap_locked(state);
            self.free(state);
        }
        // Its completions may still be to come: see `Batch::wait_or_arrival`.
        if !state.is_free_for(stream.id) && !self.has_passed_all(state) {
            let owner = stream_name::describe(state.stream);
            return Err(Error::Busy { queue: tracker.name(), qpn: tracker.qpn, owner });
        }
        state.stream = stream.id;
        state.unsubmitted.pop_front();
        if stream.by_gpu {
            self.parts.event.publish_wait(n + 1);
        }
        Ok(())
    }

    /// Whether all completions before `n` have arrived.
    pub(crate) fn have_arrived(&self, n: u64) -> bool {
        self.reap();
        self.state.lock().reaped >= n
    }

    /// Whether all completions before `n` have arrived, or are waited for: a wait that was dropped may have left some.
    pub(crate) fn is_next(&self, n: u64) -> bool {
        let state = self.state.lock();
        (state.reaped.max(state.freed)..n).all(|m| !matches!(state.slots[self.index(m)], Slot::Open))
    }

    /// Whether a stream has passed the completions of all requests before `n` of the only queue that completes here; some may still be to
    /// come. Takes no lock.
    pub(crate) fn is_passed_to(&self, n: u64) -> bool {
        self.room.is_own() && is_beyond(self.consumed.load(), mlx5::cq_ci_record(n))
    }

    /// Whether the stream that last waited here has passed all its claims.
    fn has_passed_all(&self, state: &mut CqState) -> bool {
        state.passed = self.passed(state.passed);
        let end = state.unsubmitted.front().map_or(state.claim_next, |&(first, _)| first);
        state.passed >= end
    }

    /// Checks that `stream` need not wait for completion `n`: it has arrived, a stream has passed a wait for it, or an earlier wait of
    /// the same stream covers it.
    pub(crate) fn covers(&self, n: u64, stream: u64, tracker: &Tracker) -> Result<()> {
        self.fork_guard.check()?;
        self.reap();
        let mut state = self.state.lock();
        let held = state.unsubmitted.front().is_some_and(|&(first, _)| first <= n);
        let is_passed = |state: &mut CqState| {
            state.passed = self.passed(state.passed);
            n < state.passed
        };
        if n < state.reaped || !held && (state.stream == stream || is_passed(&mut state)) {
            return Ok(());
        }
        let owner = if held {
            "a prepared wait for this completion that was neither posted nor dropped".into()
        } else {
            format!("{}, which waits for this completion", stream_name::describe(state.stream))
        };
        Err(Error::Busy { queue: tracker.name(), qpn: tracker.qpn, owner })
    }

    /// Undoes [`CqInner::submit`], including the watch limit.
    pub(crate) fn unsubmit(&self, first: u64, n: u64) {
        let mut state = self.state.lock();
        state.unsubmitted.push_front((first, n));
        self.parts.event.withdraw(n + 1, first);
    }

    /// The CQE of completion `n` and the consumer index after it.
    #[inline]
    pub(crate) fn arrival(&self, n: u64) -> Arrival<'_> {
        let (cond, value) = mlx5::wait_condition(n, self.log);
        let offset = self.index(n) * CQE_SIZE + mlx5::CQE_OP_OWN_OFFSET;
        let passed = mlx5::cq_ci_record(n + 1);
        let (memory, index, found) = (&self.parts.ring, &self.consumed, &self.found);
        Arrival { memory, offset, found, cond, value, index, passed }
    }

    /// Reaps, then returns the locked claims.
    pub(crate) fn claims(&self) -> Claims<'_> {
        let mut state = self.state.lock();
        self.reap_locked(&mut state);
        self.free(&mut state);
        Claims(state)
    }

    /// Whether there are claims that no stream has passed.
    pub(crate) fn is_awaited(&self) -> bool {
        self.reap();
        self.state.lock().in_stream > 0
    }

    /// Notifies the device that a GPU stream, which cannot run device work, waits for completion `n`, unless the device
    /// attends to it already. `nudger`, where used, wakes the GPU after the CQE is written. Call after an unlock that is
    /// an atomic read-modify-write.
    pub(crate) fn ensure_attended(&self, n: u64, nudger: Option<&Arc<dyn GpuNudge>>) {
        let event = &self.parts.event;
        if !event.is_attended(nudger.is_some()) && event.attend(n + 1, nudger) {
            self.provider.attend(self.parts.cqn);
        }
    }

    /// Reads the CQE of completion `n`, which has arrived and whose slot is not reusable yet.
    pub(crate) fn cqe(&self, n: u64) -> Cqe {
        if self.has_flushed.load(Ordering::Acquire)
            && let Some(cqe) = self.flush_cqe(n)
        {
            return cqe;
        }
        let mut bytes = [0; CQE_SIZE];
        self.parts.ring.read(self.index(n) * CQE_SIZE, &mut bytes).expect("CQEs lie in the ring");
        Cqe::decode(&bytes)
    }

    /// Retires completions that a stream has passed, if the last one is a success. After a failure all CQEs of a queue
    /// pair are errors, so a success implies that those before it succeeded. They are decoded on demand: reading a CQE
    /// takes a microsecond in GPU memory, and a cache miss elsewhere.
    fn skip_passed(&self, state: &mut CqState) {
        let [queue] = &*state.queues else { return };
        if state.in_stream == 0 || state.attached != 1 || !queue.may_skip(self.capacity()) {
            return;
        }
        state.passed = self.passed(state.passed);
        let is_claimed = |n: &u64| matches!(state.slots[self.index(*n)], Slot::Claimed { .. });
        let end = (state.reaped..state.passed).find(|n| !is_claimed(n)).unwrap_or(state.passed);
        if end < state.reaped + 2 || !self.has_arrived(end - 1) {
            return;
        }
        if queue.skip(state.reaped..end, &self.cqe(end - 1)) {
            state.reaped = end;
        }
    }
}

/// Polls this long amid bulk copies on cores that have other work, perhaps the peer: twice 1 MiB there and back.
const BUSY_POLL: Duration = Duration::from_micros(300);
/// Sleep between two checks of the queue, an eighth of the time waited; a completion wakes the sleeper earlier.
const PARKS: RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_millis(500);

impl CqInner {
    /// A wait for the next completion that `poll` takes, for the flight recorder.
    fn awaits_next(&self) -> Awaited {
        let state = self.state.lock();
        match &*state.queues {
            [queue] if state.attached == 1 => queue.awaits(state.poll_next),
            _ => Awaited {
                queue: Queue::Shared,
                device: self.recorder.device(),
                qpn: self.cqn(),
                number: state.poll_next,
                value: 0,
                posted: self.room.in_use() + state.freed,
                completed: state.reaped,
            },
        }
    }

    /// What [`Cq::wait`] waits for, and what to do.
    fn describe_next(&self) -> String {
        let state = self.state.lock();
        match &*state.queues {
            [queue] if state.attached == 1 => queue.describe(state.poll_next),
            _ => format!(
                "the next completion of CQ {:#x}, with {} of its {} queues' requests under way; see that the peers live",
                self.cqn(),
                self.room.in_use(),
                state.attached
            ),
        }
    }

    /// Waits until `ready`, a completion, or `timeout`: busy while bulk copies run, even if the cores have other work, because
    /// two threads would have to wake for each message; else asleep. Spurious returns are allowed.
    pub(crate) fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let start = Instant::now();
        let has_time = |waited| waited < timeout && (waited < BUSY_POLL || !gdsync_shm::cores_are_busy());
        while self.provider.has_copied_recently() && has_time(start.elapsed()) {
            if ready() {
                return;
            }
            self.provider.progress();
            gdsync_shm::yield_core();
        }
        self.provider.end_polling();
        self.parts.event.park(ready, timeout);
    }

    /// Waits until the next completion, or `timeout`. Spurious returns are allowed.
    pub(crate) fn park_for_next(&self, timeout: Duration) {
        let next = self.state.lock().reaped;
        self.park(&|| self.has_arrived(next), timeout);
    }

    /// Calls `done` until it is true: spins first, then sleeps between completions of this queue. `awaited` describes
    /// the wait for the flight recorder, `describe` for the error.
    pub(crate) fn wait_until(
        &self,
        timeout: Duration,
        what: &'static str,
        awaited: impl Fn() -> Awaited,
        describe: impl Fn() -> String,
        mut done: impl FnMut() -> bool,
    ) -> Result<()> {
        const SPIN: Duration = Duration::from_micros(50);
        let backoff = Backoff::new(SPIN);
        let mut rounds = 0u32;
        let since = self.recorder.stamp();
        let mut held = None;
        loop {
            if done() {
                return Ok(());
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            self.fork_guard.check()?;
            let waited = backoff.waited();
            if waited >= timeout {
                held.into_iter().for_each(Hold::give_up);
                return Err(Error::late(what, timeout, describe()));
            }
            if waited >= NOTED_AFTER {
                held.get_or_insert_with(|| self.recorder.hold(since, awaited(), By::Cpu));
            }
            if !backoff.spin_after(waited) {
                self.park_for_next(sleep_time(waited, PARKS).min(timeout - waited));
                // One look, then asleep again: each look may ask the system for packets.
                rounds = u32::MAX;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn reservations_are_limited_to_the_slots() {
        let room = Room::new(2);
        for is_shared in [false, true] {
            if is_shared {
                room.share();
            }
            assert_eq!([room.reserve(), room.reserve(), room.reserve()], [true, true, false]);
            room.take_back(1);
            assert_eq!((room.in_use(), room.reserve(), room.reserve()), (1, true, false));
            room.free(2);
            assert_eq!(room.in_use(), 0);
        }
    }

    /// No reservation is lost when a second queue attaches while the first reserves.
    #[test]
    fn no_reservation_is_lost_when_a_queue_becomes_shared() {
        const EACH: u64 = 20_000;
        let room = Room::new(u64::MAX);
        let first = Mutex::new(());
        std::thread::scope(|scope| {
            let one = scope.spawn(|| {
                for _ in 0..EACH {
                    let _held = first.lock();
                    assert!(room.reserve());
                }
            });
            let two = scope.spawn(|| {
                room.share();
                drop(first.lock());
                for _ in 0..EACH {
                    assert!(room.reserve());
                }
            });
            one.join().unwrap();
            two.join().unwrap();
        });
        assert_eq!(room.in_use(), 2 * EACH);
    }
}
