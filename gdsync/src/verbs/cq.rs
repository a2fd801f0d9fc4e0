//! Completion queues: the ring of CQEs, and who takes which completion.
//!
//! Completion number `n` is taken once: by [`Cq::poll`] on the CPU, or by a wait on a stream. Its slot is reused
//! only when it was taken, decoded by the CPU (so that the root cause of an error is never lost), and, if a stream
//! waits on it, passed by that stream.

mod flushed;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use self::flushed::FlushCqe;
use super::source::Arrival;
use super::track::Tracker;
use super::wr::Wc;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::{Found, Word32};
use gdsync_device::recorder::{Awaited, By, Event, Hold, Log, NOTED_AFTER, Queue, Stage};
use gdsync_device::{CqParts, GpuNudge, OnGpu, Places, Provider};
use gdsync_shm::{Backoff, SpinLock, completion};
use mlx5_ring::{self as mlx5, CQE_SIZE, Cqe};

/// A completion queue. Clones share it; it is destroyed when the last clone and the last queue pair on it are gone.
#[derive(Clone, Debug)]
pub struct Cq(pub(crate) Arc<CqInner>);

pub(crate) struct CqInner {
    provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    parts: CqParts,
    /// The consumer index in the doorbell record.
    consumed: Word32,
    /// Where a GPU finds ring and consumer index.
    found: [Found; 2],
    log: u32,
    room: Room,
    recorder: Log,
    /// Completions that the library wrote in place of the device, until the device's come. Locked behind the state.
    lost: SpinLock<Vec<FlushCqe>>,
    /// Whether there are any.
    has_lost: AtomicBool,
    /// Not a brief lock: several threads may poll all the time, and it must not be left to chance who is next.
    state: Mutex<CqState>,
}

struct CqState {
    /// Completions decoded.
    reaped: u64,
    /// The next one `poll` looks at.
    poll_next: u64,
    /// The next one a stream wait may claim.
    claim_next: u64,
    /// All before are free for reuse.
    freed: u64,
    /// The consumer index last read from the doorbell record.
    passed: u64,
    slots: Box<[Slot]>,
    /// Claims given back after `poll` had gone past them.
    released: VecDeque<u64>,
    /// Claims not yet in a stream, oldest first: the first and the last completion of each.
    unsubmitted: VecDeque<(u64, u64)>,
    /// Claims submitted and not yet passed.
    in_stream: u64,
    /// The stream that waits on this queue.
    stream: u64,
    queues: Vec<Arc<Tracker>>,
    /// Queues that ever completed here. With one, request `n` of the queue is completion `n`.
    attached: usize,
    /// Its queue is being reset: nothing can be claimed.
    is_closed: bool,
}

/// A completion queue whose claims stay as they are while this lives: it has the lock.
pub(crate) struct Claims<'a>(MutexGuard<'a, CqState>);

impl Claims<'_> {
    /// Whether there is a claim that is in no stream.
    pub(crate) fn has_prepared(&self) -> bool {
        !self.0.unsubmitted.is_empty()
    }

    /// Whether claims of a stream have not been passed.
    pub(crate) fn has_submitted(&self) -> bool {
        self.0.in_stream > 0
    }

    /// Refuses claims from now on, or again takes them.
    pub(crate) fn close(&mut self, is_closed: bool) {
        self.0.is_closed = is_closed;
    }
}

#[derive(Clone, Copy)]
struct Slot {
    /// The completion, and the number of its request.
    wc: Option<(u64, Wc)>,
    taken: SlotOwner,
}

#[derive(Clone, Copy, PartialEq)]
enum SlotOwner {
    No,
    /// By a stream that waits for it.
    ByStream,
    /// By a stream that waits for a later one.
    Covered,
    Done,
}

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

/// Claims between two looks at what has arrived.
const LOT: u64 = 16;

/// Which completions a claim takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClaimRange {
    /// The next so many, at least one.
    Next(u64),
    /// All through this one.
    Through(u64),
    /// All of requests posted so far.
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
        // A device may give more.
        let log = (parts.ring.len() / CQE_SIZE).trailing_zeros();
        let slot = Slot { wc: None, taken: SlotOwner::No };
        let state = CqState {
            reaped: 0,
            poll_next: 0,
            claim_next: 0,
            freed: 0,
            passed: 0,
            slots: vec![slot; 1 << log].into(),
            released: VecDeque::new(),
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
            lost: SpinLock::default(),
            has_lost: AtomicBool::new(false),
            state: Mutex::new(state),
        })))
    }

    /// The completion queue number.
    pub fn cqn(&self) -> u32 {
        self.0.parts.cqn
    }

    /// Entries of the ring.
    pub fn entries(&self) -> usize {
        1 << self.0.log
    }

    /// Takes the next completion that no stream wait has claimed, if it is there.
    ///
    /// An error is a completion too: see [`Wc::ok`].
    pub fn poll(&self) -> Option<Wc> {
        self.0.poll()
    }

    /// Takes all completions that are there and that no stream wait has claimed, for those who ask each
    /// [`Completion`](super::Completion) what came of it.
    pub fn drain(&self) {
        self.0.drain();
    }

    /// Waits for the next completion that no stream wait has claimed.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Wc> {
        let mut found = None;
        self.0.wait_until(
            timeout,
            "waiting for a completion",
            || self.0.awaits_next(),
            || {
                found = self.poll();
                found.is_some()
            },
        )?;
        Ok(found.expect("wait_until returns Ok only when a completion was found"))
    }
}

impl CqState {
    /// Whether no other stream than this one waits on the queue.
    #[inline]
    fn is_free_for(&self, stream: u64) -> bool {
        self.stream == stream || self.in_stream == self.unsubmitted.len() as u64
    }
}

impl CqInner {
    /// The queue as the device made it.
    pub(crate) fn parts(&self) -> &CqParts {
        &self.parts
    }

    pub(crate) fn attach(&self, tracker: &Arc<Tracker>) {
        let mut state = self.state.lock();
        if state.attached > 0 {
            self.room.share();
            // Who has not seen that yet is done when its queue can be locked.
            state.queues.iter().for_each(|known| drop(known.lock()));
            // From here on the completions of one queue are not in a row.
            state.queues.iter().for_each(|known| known.look_at_all(|n| self.cqe(n)));
        }
        state.queues.push(tracker.clone());
        state.attached += 1;
    }

    pub(crate) fn detach(&self, qpn: u32) {
        self.reap();
        let mut state = self.state.lock();
        for queue in state.queues.extract_if(.., |q| q.qpn == qpn) {
            // What was outstanding will never complete.
            self.room.free(queue.outstanding());
        }
        if state.queues.is_empty() {
            self.abandon(&mut state);
            self.free(&mut state);
        }
    }

    pub(crate) fn cqn(&self) -> u32 {
        self.parts.cqn
    }

    /// Entries of the ring.
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
        if !self.fork_guard.is_here() {
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

    /// Sets room aside for the completion of one more work request, of a queue that the caller has locked.
    #[inline(always)]
    pub(crate) fn reserve(&self) -> bool {
        self.room.reserve()
    }

    /// Takes it back for requests that will not be made. As [`CqInner::reserve`].
    pub(crate) fn take_back(&self, count: u64) {
        self.room.take_back(count);
    }

    /// Decodes what has arrived and frees what can be reused. Nothing in a child, where a ring on a GPU is not mapped.
    pub(crate) fn reap(&self) {
        if !self.fork_guard.is_here() {
            return;
        }
        let mut state = self.state.lock();
        self.reap_locked(&mut state);
        self.free(&mut state);
    }

    /// The word of completion `n` with the owner bit.
    fn last_word(&self, n: u64) -> &AtomicU32 {
        let offset = self.index(n) * CQE_SIZE + mlx5::CQE_OP_OWN_OFFSET;
        self.parts.ring.atomic32(offset).expect("CQE words lie in the ring, aligned")
    }

    fn has_arrived(&self, n: u64) -> bool {
        completion::is_complete(self.last_word(n), n, self.log)
    }

    fn reap_locked(&self, state: &mut CqState) {
        // A completion not reserved cannot arrive: `free` runs before its slot is used again.
        if self.has_arrived(state.reaped) {
            self.skip_passed(state);
        }
        while self.has_arrived(state.reaped) {
            let n = state.reaped;
            let at = self.index(n);
            let cqe = self.cqe(n);
            let slot = &mut state.slots[at];
            slot.wc = None;
            match Tracker::find(&state.queues, &cqe).and_then(|queue| queue.complete(&cqe)) {
                Some((number, wc, false)) => slot.wc = Some((number, wc)),
                // Of a request that was given up after it was prepared, or of a queue that is gone.
                Some((_, _, true)) | None if slot.taken == SlotOwner::No => slot.taken = SlotOwner::Done,
                _ => {}
            }
            state.reaped += 1;
        }
    }

    fn free(&self, state: &mut CqState) {
        let before = state.freed;
        let record = self.consumed.atomic();
        while state.freed < state.reaped {
            let at = self.index(state.freed);
            match state.slots[at].taken {
                SlotOwner::No => break,
                SlotOwner::Done => {}
                taken @ (SlotOwner::ByStream | SlotOwner::Covered) => {
                    if state.passed <= state.freed {
                        state.passed = completion::passed(record, state.passed);
                    }
                    if state.passed <= state.freed {
                        break;
                    }
                    state.in_stream -= u64::from(taken == SlotOwner::ByStream);
                }
            }
            state.slots[at].taken = SlotOwner::No;
            state.freed += 1;
        }
        let freed = state.freed - before;
        if freed > 0 {
            // A freed slot belongs to the next lap: what a stream took is not polled again.
            state.poll_next = state.poll_next.max(state.freed);
            state.claim_next = state.claim_next.max(state.freed);
            self.room.free(freed);
            // While a stream waits here the consumer index is the stream's to write.
            if state.in_stream == 0 && state.unsubmitted.is_empty() && state.passed < state.freed {
                state.passed = state.freed;
                completion::pass(record, state.freed);
                self.parts.record.fence();
            }
        }
    }

    fn take(&self, state: &mut CqState) -> Option<Wc> {
        self.reap_locked(state);
        let mut found = None;
        while let Some(&n) = state.released.front() {
            if n >= state.reaped {
                break;
            }
            state.released.pop_front();
            let slot = &mut state.slots[self.index(n)];
            slot.taken = SlotOwner::Done;
            if slot.wc.is_some() {
                found = slot.wc;
                break;
            }
        }
        while found.is_none() && state.poll_next < state.reaped {
            let slot = &mut state.slots[self.index(state.poll_next)];
            state.poll_next += 1;
            if slot.taken == SlotOwner::No {
                slot.taken = SlotOwner::Done;
                found = slot.wc;
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

    /// Claims the next completion for a wait that is submitted to the stream whose waits are the last ones here: what most claims are.
    /// `None` if there is anything else to be done, and then nothing is. Where a GPU will wait, the device is to be told: by
    /// [`CqInner::ensure_attended`].
    #[inline(always)]
    pub(crate) fn claim_short(&self, tracker: &Tracker, stream: u64, by_gpu: bool) -> Option<u64> {
        let mut state = self.state.lock();
        let n = state.claim_next;
        let is_next = state.attached == 1 && state.stream == stream && state.unsubmitted.is_empty();
        if !is_next || state.is_closed || self.is_due(&state) || tracker.posted_without_gaps()? <= n {
            return None;
        }
        let at = self.index(n);
        state.slots.get_mut(at)?.taken = SlotOwner::ByStream;
        state.claim_next = n + 1;
        state.in_stream += 1;
        if by_gpu {
            self.parts.event.foresee(n + 1);
        }
        Some(n)
    }

    /// Whether a claim takes what has arrived. Not where each look takes a microsecond: what has arrived there is taken when it must
    /// be, all at once. Elsewhere in lots, too: the lines come from other cores, and several at a time are as quick as one.
    #[inline(always)]
    fn is_due(&self, state: &CqState) -> bool {
        let unseen = state.claim_next.saturating_sub(state.reaped);
        (state.in_stream == 0 || unseen >= LOT.min(self.capacity() / 2)) && self.parts.ring.is_host()
    }

    /// Claims completions of the queue for a stream wait: `None` when the last of them was taken before. Returns the
    /// first and the last completion claimed. With a `stream`, they are submitted to it, as by [`CqInner::submit`].
    pub(crate) fn claim(
        &self,
        claim_range: ClaimRange,
        tracker: &Tracker,
        stream: Option<u64>,
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
        if self.is_due(&state) {
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
        for covered in first..n {
            let at = self.index(covered);
            state.slots[at].taken = SlotOwner::Covered;
        }
        let at = self.index(n);
        state.slots[at].taken = SlotOwner::ByStream;
        state.claim_next = n + 1;
        let next = stream.filter(|&stream| state.unsubmitted.is_empty() && state.is_free_for(stream));
        state.in_stream += 1;
        if let Some(stream) = next {
            state.stream = stream;
            return Ok(Some((first, n)));
        }
        state.unsubmitted.push_back((first, n));
        if let Some(Err(error)) = stream.map(|stream| self.submit_locked(&mut state, n, stream, tracker)) {
            drop(state);
            self.release(first, n);
            return Err(error);
        }
        Ok(Some((first, n)))
    }

    /// Gives a claim back that never reached a stream: `poll` may take the completions, or a later claim those that
    /// nothing behind them is claimed of. In a child it is left.
    pub(crate) fn release(&self, first: u64, n: u64) {
        if !self.fork_guard.is_here() {
            return;
        }
        let mut state = self.state.lock();
        state.unsubmitted.retain(|&(_, m)| m != n);
        state.in_stream -= 1;
        for m in first..=n {
            let at = self.index(m);
            // Decoded, and nothing came of it: a request that was given up.
            let silent = m < state.reaped && state.slots[at].wc.is_none();
            state.slots[at].taken = if silent { SlotOwner::Done } else { SlotOwner::No };
            if m < state.poll_next && !silent {
                // Keep the slot until poll has handed it out.
                let order = state.released.partition_point(|&other| other < m);
                state.released.insert(order, m);
            }
        }
        while state.claim_next > state.poll_next.max(state.freed)
            && state.slots[self.index(state.claim_next - 1)].taken == SlotOwner::No
        {
            state.claim_next -= 1;
        }
        drop(state);
        self.reap();
    }

    /// Marks claim `n` as submitted to `stream`, in claim order. Undone by [`CqInner::unsubmit`]. Where a GPU will wait, the device is to
    /// be told: by [`CqInner::ensure_attended`].
    #[inline]
    pub(crate) fn submit(&self, n: u64, (stream, by_gpu): (u64, bool), tracker: &Tracker) -> Result<()> {
        self.fork_guard.check()?;
        let mut state = self.state.lock();
        self.submit_locked(&mut state, n, stream, tracker)?;
        if by_gpu {
            self.parts.event.foresee(n + 1);
        }
        Ok(())
    }

    #[inline]
    fn submit_locked(&self, state: &mut CqState, n: u64, stream: u64, tracker: &Tracker) -> Result<()> {
        let (_, expected) =
            *state.unsubmitted.front().expect("the claim of a wait is listed until it is submitted");
        if expected != n {
            return Err(Error::OutOfOrder { qpn: tracker.qpn, expected, got: n });
        }
        if !state.is_free_for(stream) {
            // Unless the other one is past that by now.
            self.reap_locked(state);
            self.free(state);
        }
        if !state.is_free_for(stream) {
            let owner = format!("stream {}", state.stream);
            return Err(Error::Busy { queue: tracker.name(), qpn: tracker.qpn, owner });
        }
        state.stream = stream;
        state.unsubmitted.pop_front();
        Ok(())
    }

    /// Whether `stream`, when it gets here, is past completion `n`, which it need not wait for: it is here, or an earlier
    /// wait of the same stream covers it.
    pub(crate) fn covers(&self, n: u64, stream: u64, tracker: &Tracker) -> Result<()> {
        self.fork_guard.check()?;
        self.reap();
        let state = self.state.lock();
        let held = state.unsubmitted.front().is_some_and(|&(first, _)| first <= n);
        if n < state.reaped || (state.stream == stream && !held) {
            return Ok(());
        }
        let owner = if held {
            "a prepared wait for this completion that was neither posted nor dropped".into()
        } else {
            format!("stream {}, which waits for this completion", state.stream)
        };
        Err(Error::Busy { queue: tracker.name(), qpn: tracker.qpn, owner })
    }

    /// Undoes [`CqInner::submit`], also of what was foreseen.
    pub(crate) fn unsubmit(&self, first: u64, n: u64) {
        let mut state = self.state.lock();
        state.unsubmitted.push_front((first, n));
        self.parts.event.withdraw(n + 1, first);
    }

    /// Where completion `n` arrives, and how it is passed.
    #[inline]
    pub(crate) fn arrival(&self, n: u64) -> Arrival<'_> {
        let (cond, value) = mlx5::wait_condition(n, self.log);
        let offset = self.index(n) * CQE_SIZE + mlx5::CQE_OP_OWN_OFFSET;
        let passed = mlx5::cq_ci_record(n + 1);
        let (memory, index, found) = (&self.parts.ring, &self.consumed, &self.found);
        Arrival { memory, offset, found, cond, value, index, passed }
    }

    /// Its claims, all that has arrived being noted.
    pub(crate) fn claims(&self) -> Claims<'_> {
        let mut state = self.state.lock();
        self.reap_locked(&mut state);
        self.free(&mut state);
        Claims(state)
    }

    /// Whether claims of a stream have not been passed.
    pub(crate) fn is_awaited(&self) -> bool {
        self.reap();
        self.state.lock().in_stream > 0
    }
}

/// The slots of a completion queue that may still be written or are not freed yet: never more than it has.
#[derive(Debug)]
pub(super) struct Room {
    slots: u64,
    /// One queue completes here, which is locked by who sets room aside: then that needs no locked instruction.
    is_own: AtomicBool,
    /// Set aside so far.
    reserved: AtomicU64,
    /// Given back since; changes under the lock of the completion queue.
    freed: AtomicU64,
}

impl Room {
    pub(super) fn new(slots: u64) -> Self {
        let (reserved, freed) = Default::default();
        Self { slots, is_own: AtomicBool::new(true), reserved, freed }
    }

    /// Several queues complete here. Who has not seen that when this returns holds the lock of the first one.
    pub(super) fn share(&self) {
        self.is_own.store(false, Ordering::Relaxed);
    }

    /// Slots set aside and not freed.
    pub(super) fn in_use(&self) -> u64 {
        let freed = self.freed.load(Ordering::Acquire);
        self.reserved.load(Ordering::Relaxed).saturating_sub(freed)
    }

    /// Sets a slot aside for a request of a queue that the caller has locked.
    #[inline(always)]
    pub(super) fn reserve(&self) -> bool {
        // Acquire: what was freed had been set aside before.
        let freed = self.freed.load(Ordering::Acquire);
        if !self.is_own.load(Ordering::Relaxed) {
            return self.reserve_shared(freed);
        }
        let reserved = self.reserved.load(Ordering::Relaxed);
        let fits = reserved - freed < self.slots;
        if fits {
            self.reserved.store(reserved + 1, Ordering::Relaxed);
        }
        fits
    }

    #[cold]
    fn reserve_shared(&self, freed: u64) -> bool {
        let more = |reserved: u64| (reserved - freed < self.slots).then_some(reserved + 1);
        self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Takes back what was set aside for requests that will not be made, of a queue that the caller has locked.
    pub(super) fn take_back(&self, count: u64) {
        if self.is_own.load(Ordering::Relaxed) {
            self.reserved.store(self.reserved.load(Ordering::Relaxed) - count, Ordering::Relaxed);
        } else {
            self.reserved.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Frees slots, under the lock of the completion queue.
    pub(super) fn free(&self, count: u64) {
        self.freed.store(self.freed.load(Ordering::Relaxed) + count, Ordering::Release);
    }
}

impl CqInner {
    /// A stream of a GPU waits for completion `n`. It cannot help the device, and where the device can do that, `kicker` wakes
    /// it when the completion was written.
    #[inline(never)]
    pub(crate) fn attend(&self, n: u64, nudger: Option<&Arc<dyn GpuNudge>>) {
        if self.parts.event.attend(n + 1, nudger) {
            self.provider.attend(self.parts.cqn);
        }
    }

    /// Foresees a claim that was made by [`CqInner::claim`].
    pub(crate) fn foresee(&self, n: u64) {
        self.parts.event.foresee_late(n + 1);
    }

    /// As [`CqInner::attend`], of a claim that was foreseen, when the caller has let a lock go since.
    #[inline(always)]
    pub(crate) fn ensure_attended(&self, n: u64, nudger: Option<&Arc<dyn GpuNudge>>) {
        if !self.parts.event.is_attended(nudger.is_some()) {
            self.attend(n, nudger);
        }
    }
}

impl CqInner {
    /// Reads completion `n`, which has arrived and whose slot cannot be used again now.
    pub(crate) fn cqe(&self, n: u64) -> Cqe {
        if self.has_lost.load(Ordering::Acquire)
            && let Some(cqe) = self.lost(n)
        {
            return cqe;
        }
        let mut bytes = [0; CQE_SIZE];
        self.parts.ring.read(self.index(n) * CQE_SIZE, &mut bytes).expect("CQEs lie in the ring");
        Cqe::decode(&bytes)
    }

    /// Takes note of completions that a stream has passed, if the last of them is a success. What they say is read when
    /// somebody asks.
    fn skip_passed(&self, state: &mut CqState) {
        let [queue] = &*state.queues else { return };
        if state.in_stream == 0 || state.attached != 1 || !queue.may_skip(self.capacity()) {
            return;
        }
        state.passed = completion::passed(self.consumed.atomic(), state.passed);
        let by_stream =
            |n: &u64| matches!(state.slots[self.index(*n)].taken, SlotOwner::ByStream | SlotOwner::Covered);
        let end = (state.reaped..state.passed).find(|n| !by_stream(n)).unwrap_or(state.passed);
        if end < state.reaped + 2 || !self.has_arrived(end - 1) {
            return;
        }
        if queue.skip(state.reaped..end, &self.cqe(end - 1)) {
            for n in state.reaped..end {
                state.slots[self.index(n)].wc = None;
            }
            state.reaped = end;
        }
    }
}

/// The longest rest between two looks at the queue; what is waited for wakes the sleeper long before.
const PARK: Duration = Duration::from_millis(5);

impl CqInner {
    /// A wait for the next completion to be polled.
    pub(super) fn awaits_next(&self) -> Awaited {
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

    /// Waits unless `ready`, until something completes or for `timeout`: asleep, or awake where large messages come and go. May
    /// return for no reason.
    pub(crate) fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let start = Instant::now();
        while self.provider.has_copied_lately() && start.elapsed() < timeout {
            if ready() {
                return;
            }
            self.provider.progress();
            std::thread::yield_now();
        }
        self.provider.leave();
        self.parts.event.park(ready, timeout);
    }

    /// Calls `done` until it is true: busy at first, then asleep between completions of this queue. `awaited` says what it waits
    /// for, to the flight recorder.
    pub(crate) fn wait_until(
        &self,
        timeout: Duration,
        what: &'static str,
        awaited: impl Fn() -> Awaited,
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
                return Err(Error::Deadline { what, after: timeout });
            }
            if waited >= NOTED_AFTER {
                held.get_or_insert_with(|| self.recorder.hold(since, awaited(), By::Cpu));
            }
            if !backoff.spin_after(waited) {
                let next = self.state.lock().reaped;
                let ready = || self.has_arrived(next);
                self.park(&ready, PARK.min(timeout - waited));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn there_is_as_much_room_as_slots() {
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

    /// Nothing is lost when a second queue comes along while the first one reserves.
    #[test]
    fn a_queue_that_is_shared_later_counts_on() {
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
