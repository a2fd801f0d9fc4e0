//! The watchdog of a CUDA engine: keeps the deadlines of waits, releases failed streams, and drops completed
//! submissions.
//!
//! It reads the words of the waits. The first wait that is neither satisfied nor known to be passed holds the stream.
//! It makes no driver calls until the end: a [`DriverTask`] does.

use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gdrcopy::cuda::CudaStatus;
use parking_lot::MutexGuard;
use smallvec::SmallVec;

use super::shared::{Shared, State, Submission, SubmitGuard};
use crate::stream::op::{Arrival, Op, Queued};
use crate::verbs::source::is_beyond;
use gdsync_device::cuda::kernel_exec::GivenUp;
use gdsync_device::cuda::{DriverTask, WaitingStream};
use gdsync_device::error::Error;
use gdsync_device::recorder::{By, Hold};

/// Interval between checks of a held stream: short for a young wait.
const CHECK_MIN: Duration = Duration::from_millis(1);
const CHECK_MAX: Duration = Duration::from_millis(5);
/// Time that it keeps polling an idle stream before it sleeps. Waking it costs the caller microseconds.
const LINGER: Duration = Duration::from_secs(1);
/// Interval between checks of a failed stream that is being released.
const RELEASE_CHECK: Duration = Duration::from_micros(200);
/// Minimum time for a stopped queue to complete a wait by itself.
const FLUSH_TIME: Duration = Duration::from_millis(2);
/// Time limit for the GPU to release a stream that failed and was dropped.
const PATIENCE: Duration = Duration::from_secs(5);

/// `CUDA_ERROR_STREAM_CAPTURE_*`.
const CAPTURES: RangeInclusive<u32> = 900..=908;

/// A wait: the number of its submission, and its index there.
pub(super) type WaitIndex = (u64, usize);

/// What the watchdog has found so far.
struct Watch<'a> {
    of: &'a Shared,
    /// The wait that holds the stream, and since when.
    held: Option<(WaitIndex, Instant)>,
    /// The same, for the flight recorder.
    recorded: Option<(WaitIndex, Hold)>,
    /// Channel pressure, measured while the stream is held: other streams may be the cause.
    pressure: Option<WaitingStream<'a>>,
    /// Since when the stream has been idle, the engine dropped with the stream failed, and the waits released.
    idle: Option<Instant>,
    closed: Option<Instant>,
    released: Option<Instant>,
}

impl Watch<'_> {
    /// Waits for work.
    fn rest(&mut self, mut state: MutexGuard<'_, State>) {
        (self.held, self.recorded, self.pressure) = (None, None, None);
        let lingers = self.idle.get_or_insert_with(Instant::now).elapsed() < LINGER;
        state.asleep = !lingers;
        match lingers {
            true => _ = self.of.work.wait_for(&mut state, self.of.max_check_interval()),
            false => self.of.work.wait(&mut state),
        }
        state.asleep = false;
    }

    /// Checks a stream that is not idle, and waits until the next check is due.
    fn check(&mut self, mut state: MutexGuard<'_, State>) {
        let (of, now) = (self.of, Instant::now());
        let begun = state.begun.take();
        let view = QueueView(&state);
        self.find_holder(&view, begun, now);
        if let Some((place, _)) = self.held.filter(|(place, _)| view.is_void(*place)) {
            view.force(place, Duration::ZERO, Duration::ZERO);
        }
        let failed = of.failed();
        let broken = state.refused.clone().or_else(|| self.lost(&view)).filter(|_| !failed);
        let pause = self.pause(failed, now);
        self.sample_pressure(failed, now);
        let late = self.held.filter(|(_, since)| now - *since >= of.config.wait_limit);
        let what = late.map(|(place, _)| view.describe(place, self.pressure.as_ref()));
        if failed && of.released.load(Ordering::Acquire) {
            let released = *self.released.get_or_insert(now);
            if let Some((place, since)) = self.held {
                view.force(place, now - released, now - since.max(released));
            }
        }
        state.held = self.held;
        // With no known holder, or with one whose word may have changed since it was passed, only a mark shows the
        // progress.
        if failed || self.held.is_none_or(|(_, since)| now - since >= of.max_check_interval()) {
            of.ask(&mut state, failed || self.held.is_none());
        }
        if !failed && what.is_none() && broken.is_none() {
            of.work.wait_for(&mut state, pause);
        }
        // Cloned only now: a queue pair cannot be reset while a clone exists.
        let awaited = self.held.and_then(|(place, _)| match &*QueueView(&state).wait_at(place)? {
            Op::Await(source, _) if !of.failed() => Some(source.clone()),
            _ => None,
        });
        drop(state);
        if let Some(source) = awaited {
            source.remind();
        }
        if failed {
            std::thread::sleep(pause);
        } else if let Some(error) = broken {
            of.fail(error);
        } else if let Some(what) = of.given_up().or(what) {
            let (stream, after) = (of.config.name.clone(), of.config.wait_limit);
            of.fail(Error::StreamWait { stream, what, after });
            self.held = None;
        }
    }

    /// Finds the wait that holds the stream. `begun` is a submission whose waits may have begun, and when.
    fn find_holder(&mut self, view: &QueueView<'_>, begun: Option<(u64, Instant)>, now: Instant) {
        let of = self.of;
        let holder = view.holder();
        let since = |place| {
            // Not earlier than the last due check: a watchdog that was delayed must not see an expired deadline at
            // once.
            let begun = begun.filter(|(first, _)| view.is_first(place, *first));
            begun.map_or(now, |(_, begun)| begun.max(now - CHECK_MAX.min(of.config.wait_limit / 2)))
        };
        self.held = holder.map(|place| {
            self.held.filter(|(known, _)| *known == place).unwrap_or_else(|| (place, since(place)))
        });
        self.recorded = holder.and_then(|place| match self.recorded.take() {
            Some(known) if known.0 == place => Some(known),
            // The previous one ends first.
            before => {
                drop(before);
                let awaited = view.wait_at(place)?.awaited()?;
                Some((place, of.log.hold(of.log.stamp(), awaited, By::CudaStream)))
            }
        });
    }

    /// Why the wait that holds the stream will not be satisfied.
    fn lost(&self, view: &QueueView<'_>) -> Option<Error> {
        match &*view.wait_at(self.held?.0)? {
            Op::Await(source, _) => source.lost(),
            Op::Message(message) => message.end().qp.broken_by(),
            _ => None,
        }
    }

    /// Time until the next check.
    fn pause(&self, failed: bool, now: Instant) -> Duration {
        match self.held {
            _ if failed => RELEASE_CHECK,
            Some((_, since)) => {
                let waited = now - since;
                let left = self.of.config.wait_limit.saturating_sub(waited);
                (waited / 8).clamp(CHECK_MIN, CHECK_MAX).min(left.max(RELEASE_CHECK))
            }
            None => self.of.max_check_interval(),
        }
    }

    /// Measures channel pressure while a memory operation holds the stream: waiting kernels do not hold a channel.
    fn sample_pressure(&mut self, failed: bool, now: Instant) {
        let is_long = |(_, since): (WaitIndex, Instant)| now - since >= CHECK_MAX;
        let measures = !failed && !self.of.by_kernel() && self.held.is_some_and(is_long);
        let known = self.pressure.take().filter(|_| measures);
        self.pressure = known.or_else(|| measures.then(|| self.of.gpu.channel_pressure().join()));
        self.pressure.iter_mut().for_each(WaitingStream::sample);
    }
}

impl Shared {
    /// The main loop: until the engine is dropped and the GPU has released all queued work.
    pub(super) fn watch(&self) {
        let mut watch = Watch {
            of: self,
            held: None,
            recorded: None,
            pressure: None,
            idle: None,
            closed: None,
            released: None,
        };
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
                watch.rest(state);
                continue;
            }
            watch.idle = None;
            if closing && self.failed() && watch.closed.get_or_insert_with(Instant::now).elapsed() > PATIENCE
            {
                drop(state);
                tracing::error!(
                    stream = self.config.name,
                    "the GPU did not release a stream that failed and was dropped: its memory stays allocated"
                );
                // Leaks the queue and the words that the GPU may still access.
                std::mem::forget(self.own.upgrade());
                break;
            }
            watch.check(state);
        }
        self.destroy();
    }

    /// As [`Engine::holder`](crate::stream::engine::Engine::holder).
    pub(super) fn holder(&self) -> Option<(String, Duration)> {
        let state = self.lock();
        let view = QueueView(&state);
        let place = view.holder()?;
        let known = state.held.filter(|(known, _)| *known == place);
        let waited = known.map_or(Duration::ZERO, |(_, since)| since.elapsed());
        Some((view.describe(place, None), self.config.wait_limit.saturating_sub(waited)))
    }

    /// Interval between checks of a stream without a known holder: short enough to find one, and request a mark, before
    /// its deadline.
    fn max_check_interval(&self) -> Duration {
        (self.config.wait_limit / 2).clamp(CHECK_MIN, CHECK_MAX)
    }

    /// Schedules a driver task that marks the stream and, with `query`, queries it.
    fn ask(&self, state: &mut State, query: bool) {
        if self.is_given_back.load(Ordering::Acquire) {
            return;
        }
        state.query = query;
        if !std::mem::replace(&mut state.asking, true) {
            let driver_task: Weak<Self> = self.own.clone();
            self.gpu.driver_task(driver_task);
        }
    }

    /// Queries CUDA whether the stream is done, in case no mark can show it: the driver refused it, or the GPU is lost.
    /// Returns the error that the stream died of.
    fn query_stream(&self, guard: &SubmitGuard) -> Option<Error> {
        // A query would invalidate a capture.
        let answer = match self.gpu.within(|_| self.is_captured()) {
            Ok(captured) if captured || guard.capture.is_some() => return None,
            // SAFETY: a stream of this context.
            Ok(_) => self.gpu.within(|api| unsafe { api.stream_query(self.stream) }),
            Err(error) => Err(error),
        };
        if answer.as_ref().is_err_and(is_inconclusive) {
            return None;
        }
        // An error must be reported before the end, also that of a kernel that has given up.
        if self.failed() || answer.is_ok() && self.status.given_up().is_none() {
            self.ended.store(self.submitted(), Ordering::Release);
        }
        answer.err().map(Error::cuda("running the stream"))
    }

    /// The wait that a kernel gave up on, unless the stream has failed already.
    fn given_up(&self) -> Option<String> {
        if self.failed() || !self.by_kernel() {
            return None;
        }
        let GivenUp { submission, word } = self.status.given_up()?;
        let state = self.lock();
        let is_it = |known: &&Submission| {
            known.seq == submission
                || known.launched.as_ref().is_some_and(|(instance, _)| instance.tag() == submission)
        };
        let found = state.queue.iter().find(is_it);
        let waits = || found.into_iter().flat_map(waits_of).filter(|(_, wait)| self.is_at(wait, word));
        // It may have come for others before.
        let wait =
            waits().find(|(_, wait)| !is_satisfied(wait, &mut Indices::new())).or_else(|| waits().next());
        Some(wait.map_or_else(|| format!("the word at {word:#x}"), |(_, wait)| wait.describe()))
    }

    /// Whether a wait polls the word at this GPU address.
    fn is_at(&self, wait: &Op, word: u64) -> bool {
        let addr = match wait {
            Op::Wait32 { at, .. } => at.memory().gpu_addr(&self.gpu),
            Op::Await(source, n) => source.arrival(*n).word_on(&self.gpu).map(|place| place.addr),
            _ => match wait.wait64() {
                Some((at, ..)) => at.memory().gpu_addr(&self.gpu),
                None => return false,
            },
        };
        addr.is_ok_and(|addr| addr == word)
    }
}

impl DriverTask for Shared {
    fn run(&self) {
        if self.is_given_back.load(Ordering::Acquire) {
            return;
        }
        // The lock's holder may be waiting for another driver task: the watchdog retries.
        let Some(mut held) = self.submit_lock.try_lock() else {
            self.lock().asking = false;
            return;
        };
        self.mark_locked(&mut held.guard);
        let query = self.lock().query;
        let died = query.then(|| self.query_stream(&held.guard)).flatten();
        self.submit_lock.unlock(held, |state| self.mark_locked(&mut state.guard));
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
                    "the watchdog panicked twice: waits of this stream may never be released"
                );
            }
        }
    }
}

/// Whether the error means only that CUDA cannot answer now: work is pending, or a capture is in progress.
pub(super) fn is_inconclusive(error: &gdrcopy::Error) -> bool {
    let gdrcopy::Error::Cuda { status, .. } = error else { return false };
    *status == CudaStatus::NOT_READY || CAPTURES.contains(&status.0)
}

/// The waits of a submission, with their indices.
fn waits_of(submission: &Submission) -> impl Iterator<Item = (usize, Queued<'_>)> {
    let is_wait = |op: &Op| matches!(op, Op::Wait32 { .. } | Op::Await(..)) || op.wait64().is_some();
    submission.all().enumerate().filter(move |(_, op)| is_wait(op))
}

/// Consumer indices read in this pass, by address: a read takes a microsecond in GPU memory.
type Indices = SmallVec<[(u64, u32); 4]>;

fn is_satisfied(wait: &Op, indices: &mut Indices) -> bool {
    match wait {
        Op::Wait32 { at, value, cond, .. } => cond.holds32(at.load(), *value),
        Op::Await(source, n) => {
            let arrival = source.arrival(*n);
            is_known_passed(&arrival, indices) || arrival.check().is_ok() || is_passed(&arrival, indices)
        }
        _ => wait.wait64().is_none_or(|(at, value, cond)| cond.holds64(at.load(), value)),
    }
}

/// Whether the stream has passed a completion, by the index read before.
fn is_known_passed(arrival: &Arrival<'_>, indices: &mut Indices) -> bool {
    let addr = arrival.index.addr();
    match indices.iter().find(|(known, _)| *known == addr) {
        Some((_, index)) => is_beyond(*index, arrival.passed),
        None => is_passed(arrival, indices),
    }
}

/// Reads the index again: the slot may have been reused since.
fn is_passed(arrival: &Arrival<'_>, indices: &mut Indices) -> bool {
    let (addr, index) = (arrival.index.addr(), arrival.index.load());
    indices.retain(|(known, _)| *known != addr);
    indices.push((addr, index));
    is_beyond(index, arrival.passed)
}

/// The locked queue.
struct QueueView<'a>(&'a State);

impl<'a> QueueView<'a> {
    /// The wait that holds the stream, as far as known.
    fn holder(&self) -> Option<WaitIndex> {
        let mut indices = Indices::new();
        self.0.queue.iter().find_map(|known| {
            let holds = waits_of(known).find(|(_, wait)| !is_satisfied(wait, &mut indices));
            holds.map(|(place, _)| (known.seq, place))
        })
    }

    /// Whether `place` is the first wait of submission `seq`, and `seq` is the oldest.
    fn is_first(&self, (of, place): WaitIndex, seq: u64) -> bool {
        let oldest = self.0.queue.front().filter(|known| of == seq && known.seq == seq);
        oldest.and_then(|known| waits_of(known).next()).is_some_and(|(at, _)| at == place)
    }

    fn wait_at(&self, (seq, place): WaitIndex) -> Option<Queued<'a>> {
        self.0.queue.iter().find(|known| known.seq == seq)?.all().nth(place)
    }

    /// Whether it is a wait for a credit of a queue pair that has broken.
    fn is_void(&self, place: WaitIndex) -> bool {
        matches!(self.wait_at(place).as_deref(), Some(Op::Wait32 { of: Some(end), .. }) if end.qp.broken_by().is_some())
    }

    fn describe(&self, place: WaitIndex, pressure: Option<&WaitingStream<'_>>) -> String {
        let what = self.wait_at(place).map_or_else(|| "a word".to_owned(), |wait| wait.describe());
        match pressure.and_then(WaitingStream::advice) {
            Some(advice) => format!("{what} ({advice})"),
            None => what,
        }
    }

    /// Satisfies a wait that has held a failed stream for `held`, and whose queues were stopped `stopped` ago, or a void one. A
    /// stopped queue completes by itself unless it is late.
    fn force(&self, place: WaitIndex, stopped: Duration, held: Duration) {
        match self.wait_at(place).as_deref().unwrap_or(&Op::Barrier) {
            Op::Await(source, n) if held >= FLUSH_TIME && stopped >= source.flush_time() => {
                source.release(*n);
            }
            // The device may be asleep: the stream cannot notify it of doorbells.
            Op::Await(source, _) => source.wake(),
            Op::Wait32 { at, value, cond, .. } => {
                if let Some(word) = cond.satisfy32(at.load(), *value) {
                    at.store(word);
                }
            }
            other => {
                if let Some((at, value, cond)) = other.wait64()
                    && let Some(word) = cond.satisfy64(at.load(), value)
                {
                    at.store(word);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use gdsync_soft::SoftHcaConfig;
    use gdsync_testkit::driver;
    use smallvec::smallvec;

    use super::*;
    use crate::stream::cuda::CudaEngine;
    use crate::stream::engine::Engine as _;
    use crate::stream::{CudaStreamConfig, Source, SubmitGuard};
    use crate::verbs::{Context, RecvWr};
    use gdsync_device::cuda::Gpu;

    /// A queue whose `lost`, which only the watchdog calls, panics once.
    #[derive(Debug)]
    struct PanicsOnce(Arc<dyn Source>, AtomicBool);

    impl Source for PanicsOnce {
        fn progress(&self) -> bool {
            self.0.progress()
        }

        fn signal(&self) {
            self.0.signal();
        }

        fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
            self.0.park(ready, timeout);
        }

        fn queue_pair(&self) -> usize {
            self.0.queue_pair()
        }

        fn fail(&self, reason: &Error) {
            self.0.fail(reason);
        }

        fn arrival(&self, n: u64) -> Arrival<'_> {
            self.0.arrival(n)
        }

        fn lost(&self) -> Option<Error> {
            assert!(self.1.swap(true, Ordering::Relaxed), "for the test");
            None
        }

        fn release(&self, n: u64) {
            self.0.release(n);
        }

        fn describe(&self, n: u64) -> String {
            self.0.describe(n)
        }
    }

    #[test]
    fn panic_of_the_watchdog_fails_the_stream_and_releases_it() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        a.post_recv(&[RecvWr::new(&[])]).unwrap();
        let engine = CudaEngine::start(&gpu, CudaStreamConfig::default(), Arc::default()).unwrap();
        let source = Arc::new(PanicsOnce(a.recv.end.source().clone(), AtomicBool::new(false)));
        let seq = engine.submit(&mut SubmitGuard::default(), &mut smallvec![Op::Await(source, 0)]).unwrap();
        assert!(engine.wait_completed(seq, Instant::now() + Duration::from_secs(20)), "the stream hangs");
        let error = engine.error();
        assert!(matches!(error, Some(Error::Panicked { thread: "gdsync-watchdog" })), "{error:?}");
        assert!(a.is_broken());
    }
}
