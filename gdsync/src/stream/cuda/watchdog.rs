//! The watchdog of a CUDA engine: keeps the deadlines of waits, releases a stream that has failed, and takes back what
//! the GPU has finished with.
//!
//! It looks at the words that waits look at. The first wait that is neither satisfied nor known to be passed is the one
//! that holds the stream. It never calls the driver itself until all is over: an [`DriverTask`] does.

use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gdrcopy::cuda::CudaStatus;
use smallvec::SmallVec;

use super::shared::{Shared, State, Submission, SubmitGuard};
use crate::stream::op::{Arrival, Op};
use gdsync_device::cuda::kernel_exec::GivenUp;
use gdsync_device::cuda::{DriverTask, Standing};
use gdsync_device::error::Error;
use gdsync_device::recorder::{Awaited, By, Hold};
use mlx5_ring as mlx5;

/// Between two looks at a stream that is held; more while a wait is young, so that it is not seen late.
const LOOK_MIN: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_millis(5);
/// How long it looks at a stream that has nothing to do before it must be woken, which costs the caller microseconds.
const LINGER: Duration = Duration::from_secs(1);
/// Between two looks at a stream that has failed and is being released.
const RELEASE_LOOK: Duration = Duration::from_micros(200);
/// How long a stopped queue has at least to complete a wait by itself.
const FLUSH_TIME: Duration = Duration::from_millis(2);
/// How long a dropped stream has to let go.
const PATIENCE: Duration = Duration::from_secs(5);

/// `CUDA_ERROR_STREAM_CAPTURE_*`.
const CAPTURES: RangeInclusive<u32> = 900..=908;

/// A wait, by the first number of its submission and its place there; those that only count there are behind its last operation.
type Place = (u64, usize);

impl Shared {
    /// The life of the watchdog: until the engine is dropped and the GPU has let go of what was queued.
    pub(super) fn watch(&self) {
        // The wait that holds the stream, and since when it was seen to.
        let mut held: Option<(Place, Instant)> = None;
        // The same, to the flight recorder.
        let mut noted: Option<(Place, Hold)> = None;
        let mut closed: Option<Instant> = None;
        let mut released: Option<Instant> = None;
        // While it has been held for a while: others may be why.
        let mut standing: Option<Standing<'_>> = None;
        // Since when there has been nothing to do.
        let mut dry: Option<Instant> = None;
        loop {
            let mut state = self.lock();
            let done = self.retire(&mut state);
            if !done.is_empty() {
                drop(state);
                drop(done);
                continue;
            }
            let closing = self.closing.load(Ordering::Acquire);
            if state.queue.is_empty() {
                if closing {
                    break;
                }
                (held, noted, standing) = (None, None, None);
                let lingers = dry.get_or_insert_with(Instant::now).elapsed() < LINGER;
                state.asleep = !lingers;
                match lingers {
                    true => _ = self.work.wait_for(&mut state, self.longest_look()),
                    false => self.work.wait(&mut state),
                }
                state.asleep = false;
                continue;
            }
            dry = None;
            let now = Instant::now();
            if closing && now - *closed.get_or_insert(now) > PATIENCE {
                drop(state);
                tracing::error!(
                    stream = self.config.name,
                    "the GPU did not let go of a dropped stream: its memory stays allocated"
                );
                // With the queue and the words that the GPU may still write.
                std::mem::forget(self.own.upgrade());
                break;
            }
            let begun = state.begun.take();
            let seen = Seen { state: &state, behind: self.behind.load(Ordering::Acquire) };
            let holder = seen.holder();
            let since = |place| {
                // Not earlier than it should have looked: where it could not, the deadline is not over at first sight.
                let begun = begun.filter(|(first, _)| seen.is_first(place, *first));
                begun.map_or(now, |(_, begun)| begun.max(now - LOOK_MAX.min(self.config.wait_limit / 2)))
            };
            held = holder.map(|place| {
                held.filter(|(known, _)| *known == place).unwrap_or_else(|| (place, since(place)))
            });
            noted = holder.and_then(|place| match noted.take() {
                Some(known) if known.0 == place => Some(known),
                // The one before ends first.
                before => {
                    drop(before);
                    let awaited = seen.wait_at(place)?.awaited()?;
                    Some((place, self.log.hold(self.log.stamp(), awaited, By::CudaStream)))
                }
            });
            let failed = self.failed();
            let lost = || match held.and_then(|(place, _)| seen.wait_at(place))?.op {
                Op::Await(source, _) => source.lost(),
                _ => None,
            };
            let broken = state.refused.clone().or_else(lost).filter(|_| !failed);
            let pause = match held {
                _ if failed => RELEASE_LOOK,
                Some((_, since)) => {
                    let waited = now - since;
                    let left = self.config.wait_limit.saturating_sub(waited);
                    (waited / 8).clamp(LOOK_MIN, LOOK_MAX).min(left.max(RELEASE_LOOK))
                }
                None => self.longest_look(),
            };
            // Kernels that wait hold no channel.
            standing = match held {
                Some((_, since)) if !failed && !self.by_kernel() && now - since >= LOOK_MAX => {
                    Some(standing.unwrap_or_else(|| self.gpu.channel_pressure().join()))
                }
                _ => None,
            };
            standing.iter_mut().for_each(Standing::look);
            let late = held.filter(|(_, since)| now - *since >= self.config.wait_limit);
            let what = late.map(|(place, _)| seen.describe(place, standing.as_ref()));
            if failed && self.released.load(Ordering::Acquire) {
                let released = *released.get_or_insert(now);
                if let Some((place, since)) = held {
                    seen.force(place, now - released, now - since.max(released));
                }
            }
            // Where nothing holds it that we know of, or what seems to was passed and the word has changed since, a mark tells
            // when it is through.
            if failed || held.is_none_or(|(_, since)| now - since >= self.longest_look()) {
                self.ask(&mut state, failed || held.is_none());
            }
            if !failed && what.is_none() && broken.is_none() {
                self.work.wait_for(&mut state, pause);
            }
            drop(state);
            if failed {
                std::thread::sleep(pause);
            } else if let Some(error) = broken {
                self.fail(error);
            } else if let Some(what) = self.given_up().or(what) {
                let (stream, after) = (self.config.name.clone(), self.config.wait_limit);
                self.fail(Error::StreamWait { stream, what, after });
                held = None;
            }
        }
        self.destroy();
    }

    /// Between two looks at a stream that no wait is seen to hold: the next is seen, and a mark asked for, before its deadline.
    fn longest_look(&self) -> Duration {
        (self.config.wait_limit / 2).clamp(LOOK_MIN, LOOK_MAX)
    }

    /// Has the driver take a mark, and asked how the stream is, unless it is being asked.
    fn ask(&self, state: &mut State, query: bool) {
        state.query = query;
        if !std::mem::replace(&mut state.asking, true) {
            let driver_task: Weak<Self> = self.own.clone();
            self.gpu.driver_task(driver_task);
        }
    }

    /// Asks CUDA whether all is over, which no mark may tell: the driver refused it, or the GPU is lost. Returns what it
    /// died of.
    fn find_out(&self, guard: &SubmitGuard) -> Option<Error> {
        // To ask would spoil a capture.
        let answer = match self.gpu.within(|_| self.is_captured()) {
            Ok(captured) if captured || guard.capture.is_some() => return None,
            // SAFETY: a stream of this context.
            Ok(_) => self.gpu.within(|api| unsafe { api.stream_query(self.stream) }),
            Err(error) => Err(error),
        };
        if answer.as_ref().is_err_and(tells_nothing) {
            return None;
        }
        // What it died of is told first.
        if answer.is_ok() || self.failed() {
            self.ended.store(self.submitted(), Ordering::Release);
        }
        answer.err().map(Error::cuda("running the stream"))
    }

    /// What a kernel waited for in vain, unless that is known already.
    fn given_up(&self) -> Option<String> {
        if self.failed() || !self.by_kernel() {
            return None;
        }
        let GivenUp { submission, word } = self.status.given_up()?;
        let state = self.lock();
        let seen = Seen { state: &state, behind: self.behind.load(Ordering::Acquire) };
        // What is behind the last one belongs to it.
        let found = seen.submissions().take_while(|(known, _)| known.first <= submission).last();
        let wait = found.and_then(|known| waits_of(known).find(|(_, wait)| self.is_at(*wait, word)));
        Some(wait.map_or_else(|| format!("the word at {word:#x}"), |(_, wait)| what_of(wait.op)))
    }

    /// Whether a wait looks at the word at this address of the GPU.
    fn is_at(&self, wait: Wait<'_>, word: u64) -> bool {
        let addr = match wait.op {
            Op::Wait32 { at, .. } => at.memory().gpu_addr(&self.gpu),
            Op::Wait64 { at, .. } => at.memory().gpu_addr(&self.gpu),
            Op::Await(source, n) => source.arrival(n + wait.on).word_on(&self.gpu).map(|place| place.addr),
            _ => return false,
        };
        addr.is_ok_and(|addr| addr == word)
    }
}

impl DriverTask for Shared {
    fn run(&self) {
        // Who has the turn may wait for what other errands bring about: the watchdog asks again.
        let Some(mut held) = self.submit_lock.try_take() else {
            self.lock().asking = false;
            return;
        };
        self.mark_in_turn(&mut held.guard);
        let query = self.lock().query;
        let died = query.then(|| self.find_out(&held.guard)).flatten();
        self.submit_lock.end(held, |state| self.mark_in_turn(&mut state.guard));
        let mut state = self.lock();
        state.asking = false;
        if died.is_some() {
            state.refused = died;
            self.work.notify_one();
        }
    }

    fn panicked(&self) {
        self.lock().asking = false;
        self.fail(Error::Panicked { thread: "gdsync-driver" });
    }
}

impl Shared {
    /// Watches until the engine is dropped. A panic fails the stream; then its waits are released as after any failure.
    pub(super) fn watch_guarded(&self) {
        if catch_unwind(AssertUnwindSafe(|| self.watch())).is_err() {
            self.fail(Error::Panicked { thread: "gdsync-watchdog" });
            if catch_unwind(AssertUnwindSafe(|| self.watch())).is_err() {
                tracing::error!(
                    stream = self.config.name,
                    "the watchdog panicked twice: waits of this stream may stay"
                );
            }
        }
    }
}

/// Whether CUDA cannot tell now: work is pending, or somebody captures.
pub(super) fn tells_nothing(error: &gdrcopy::Error) -> bool {
    let gdrcopy::Error::Cuda { status, .. } = error else { return false };
    *status == CudaStatus::NOT_READY || CAPTURES.contains(&status.0)
}

/// A wait: an operation, or of one for a completion the same for one so many further on.
#[derive(Clone, Copy)]
struct Wait<'a> {
    op: &'a Op,
    on: u64,
}

impl Wait<'_> {
    /// What it waits for, to the flight recorder.
    fn awaited(self) -> Option<Awaited> {
        match self.op {
            Op::Await(source, n) => source.awaited(n + self.on),
            op => op.awaited(),
        }
    }
}

/// The waits of a submission, which has so many behind its last operation, and their places.
fn waits_of((submission, more): (&Submission, u64)) -> impl Iterator<Item = (usize, Wait<'_>)> {
    let is_wait = |op: &Op| matches!(op, Op::Wait32 { .. } | Op::Wait64 { .. } | Op::Await(..));
    let ops = submission.ops.iter().enumerate().filter(move |(_, op)| is_wait(op));
    let behind =
        submission.ops.last().into_iter().flat_map(move |op| (1..=more).map(move |on| Wait { op, on }));
    ops.map(|(place, op)| (place, Wait { op, on: 0 })).chain((submission.ops.len()..).zip(behind))
}

/// Consumer indices by address, as they were found last: in GPU memory each look takes a microsecond.
type Indices = SmallVec<[(u64, u32); 4]>;

fn is_satisfied(wait: Wait<'_>, indices: &mut Indices) -> bool {
    match wait.op {
        Op::Wait32 { at, value, cond, .. } => cond.holds32(at.load(), *value),
        Op::Wait64 { at, value, cond, .. } => cond.holds64(at.load(), *value),
        Op::Await(source, n) => {
            let arrival = source.arrival(n + wait.on);
            is_known_passed(&arrival, indices) || arrival.look().is_ok() || is_passed(&arrival, indices)
        }
        _ => true,
    }
}

/// Whether the stream has moved the consumer index beyond a completion, as far as is known.
fn is_known_passed(arrival: &Arrival<'_>, indices: &mut Indices) -> bool {
    let addr = arrival.index.addr();
    match indices.iter().find(|(known, _)| *known == addr) {
        Some((_, index)) => is_beyond(*index, arrival.passed),
        None => is_passed(arrival, indices),
    }
}

/// Looks whether it has by now: the slot may have been used again since.
fn is_passed(arrival: &Arrival<'_>, indices: &mut Indices) -> bool {
    let (addr, index) = (arrival.index.addr(), arrival.index.load());
    indices.retain(|(known, _)| *known != addr);
    indices.push((addr, index));
    is_beyond(index, arrival.passed)
}

fn is_beyond(index: u32, passed: u32) -> bool {
    let [index, passed] = [index, passed].map(mlx5::record_to_u24);
    index.wrapping_sub(passed) & 0xff_ffff < 1 << 23
}

/// What is queued, with the waits that are behind the last submission and not counted there.
struct Seen<'a> {
    state: &'a State,
    behind: u64,
}

impl<'a> Seen<'a> {
    /// Each with the waits that are behind its last operation.
    fn submissions(&self) -> impl Iterator<Item = (&'a Submission, u64)> {
        let (last, behind) = (self.state.queue.len().wrapping_sub(1), self.behind);
        let more = move |(at, known): (usize, &'a Submission)| {
            (known, if at == last { known.more + behind } else { known.more })
        };
        self.state.queue.iter().enumerate().map(more)
    }

    /// The wait that holds the stream, as far as can be seen.
    fn holder(&self) -> Option<Place> {
        let mut indices = Indices::new();
        self.submissions().find_map(|known| {
            let holds = waits_of(known).find(|(_, wait)| !is_satisfied(*wait, &mut indices));
            holds.map(|(place, _)| (known.0.first, place))
        })
    }

    /// Whether this is the first wait of submission `seq`, and that is the oldest.
    fn is_first(&self, (first, place): Place, seq: u64) -> bool {
        let oldest = self.submissions().next().filter(|(known, _)| first == seq && known.first == seq);
        oldest.and_then(|known| waits_of(known).next()).is_some_and(|(at, _)| at == place)
    }

    fn wait_at(&self, (first, place): Place) -> Option<Wait<'a>> {
        let known = self.submissions().find(|(known, _)| known.first == first)?;
        waits_of(known).find(|(at, _)| *at == place).map(|(_, wait)| wait)
    }

    fn describe(&self, place: Place, standing: Option<&Standing<'_>>) -> String {
        let what = self.wait_at(place).map_or_else(|| "a word".to_owned(), |wait| what_of(wait.op));
        match standing.and_then(Standing::advice) {
            Some(advice) => format!("{what} ({advice})"),
            None => what,
        }
    }

    /// Satisfies a wait that has held a failed stream for so long, whose queues were stopped so long ago. A stopped queue completes
    /// everything by itself, unless it is late.
    fn force(&self, place: Place, stopped: Duration, held: Duration) {
        let Some(Wait { op, on }) = self.wait_at(place) else { return };
        match op {
            Op::Await(source, n) if held >= FLUSH_TIME && stopped >= source.flush_time() => {
                source.release(n + on);
            }
            // The device may be asleep, as nobody could tell it what the stream has rung since.
            Op::Await(source, _) => source.wake(),
            Op::Wait32 { at, value, cond } => {
                if let Some(word) = cond.satisfy32(at.load(), *value) {
                    at.store(word);
                }
            }
            Op::Wait64 { at, value, cond, .. } => {
                if let Some(word) = cond.satisfy64(at.load(), *value) {
                    at.store(word);
                }
            }
            _ => {}
        }
    }
}

fn what_of(op: &Op) -> String {
    match op {
        Op::Await(source, _) => source.describe(),
        Op::Wait32 { at, .. } => format!("{op:?} (the word is {:#x})", at.load()),
        Op::Wait64 { at, .. } => format!("{op:?} (the word is {:#x})", at.load()),
        _ => format!("{op:?}"),
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::super::shared::Entry;
    use super::*;
    use crate::verbs::{Context, RecvWr, SendWr};
    use gdsync_soft::SoftHcaConfig;

    #[test]
    fn waits_behind_the_last_submission_are_seen() {
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        a.post_recv(&[RecvWr { wr_id: 0, sges: &[] }; 3]).unwrap();
        b.post_send(&[SendWr::send(&[])]).unwrap();
        b.wait_all_sends(PATIENCE).unwrap();
        let mut state = State::default();
        let first = smallvec![Op::Await(a.recv.end.source().clone(), 0)];
        state.queue.push_back(Submission::new(Entry { seq: 5, calls: 1, host_fns: 0 }, first, None));
        let holder = |behind| Seen { state: &state, behind }.holder();
        assert_eq!([0, 1, 2].map(holder), [None, Some((5, 1)), Some((5, 1))]);
        let seen = Seen { state: &state, behind: 2 };
        assert_eq!([1, 2].map(|place| seen.wait_at((5, place)).unwrap().on), [1, 2]);
        assert!(seen.wait_at((5, 3)).is_none());
        // Only the first wait of all can have begun to hold the stream when it was queued.
        assert!(seen.is_first((5, 0), 5) && !seen.is_first((5, 0), 6));
        assert!(!seen.is_first((5, 1), 5) && !seen.is_first((6, 0), 6));
    }
}
