//! Runs operations on a CPU thread, with the semantics of CUDA's stream memory operations.

use std::any::Any;
use std::ops::RangeInclusive;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::op::{Op, Source};
use crate::verbs::qp::QpCore;
use crate::verbs::writers::Writers;
use gdsync_device::error::Error;
use gdsync_device::memory::Memory;
use gdsync_device::recorder::{By, Hold, Log, NOTED_AFTER};
use gdsync_shm::{Backoff, sleep_time};

/// Bounds of the growing sleep of a wait for a word: see [`sleep_time`]. What arrives for a software HCA that may write the word
/// ends the sleep.
///
/// A plain store wakes no thread. So a store is noticed late by an eighth of the time waited, at least 20 us and at
/// most 20 ms, plus the kernel's timer slack (usually 50 us).
///
/// The upper bound limits the cost of long waits. A check costs 4 to 8 us of CPU time (a timer, two context switches,
/// cold caches): 50 checks a second are 0.02 to 0.04 % of a core, and the 65 checks of the first 160 ms another 0.3 to
/// 0.5 ms. Eight streams that wait for a second use 0.3 to 0.7 % of a core; with 5 ms it was 1.3 %.
const SLEEPS: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(20);

/// Spin time after something has arrived for the device.
const ARRIVAL_SPIN: Duration = Duration::from_micros(10);

/// Maximum sleep in a source, for sources that do not wake their sleepers on failure.
const PARK_MAX: Duration = Duration::from_millis(10);

/// Orders all accesses before a store to this kind of memory. A CPU fence alone does not order stores before stores to
/// card registers or GPU memory: on Arm these are outside of what `dmb ish` orders.
fn full_fence(memory: &Memory) {
    fence(Ordering::SeqCst);
    memory.fence();
}

/// Wait policy of the thread that runs operations.
pub(super) trait Runner {
    /// Whether the stream has failed: nothing more runs.
    fn failed(&self) -> bool;

    /// Whether waits must end unsatisfied.
    fn released(&self) -> bool;

    /// Remaining time of a wait that has taken `waited` so far.
    fn left(&self, waited: Duration) -> Duration;

    /// The log for waits, and the actor to record.
    fn log(&self) -> (&Log, By);

    /// Spin time of a wait before it sleeps.
    fn spin(&self) -> Duration;

    /// Sleeps for `time`, or until released.
    fn sleep(&self, time: Duration);

    /// A wait has held the stream since then; or, with `None`, holds it no more. Default: nobody asks.
    fn note_holder(&self, wait: Option<(&Op, Instant)>) {
        let _ = wait;
    }
}

/// Why a wait was not satisfied.
#[derive(Debug)]
pub(super) enum Unsatisfied {
    /// The wait limit expired. Describes the wait.
    Late(String),
    /// The completion can no longer arrive.
    Lost(Error),
}

impl Unsatisfied {
    /// The error of a stream with this name and wait limit.
    pub(super) fn error(self, stream: &str, limit: Duration) -> Error {
        match self {
            Self::Late(what) => Error::StreamWait { stream: stream.to_owned(), what, after: limit },
            Self::Lost(error) => error,
        }
    }
}

/// Runs one operation. A released wait ends as if satisfied.
pub(super) fn execute(op: Op, runner: &impl Runner) -> Result<(), Unsatisfied> {
    match op {
        Op::Write32 { at, value } => {
            // The default of stream writes (no CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER).
            full_fence(at.memory());
            at.store(value);
        }
        Op::Write64 { at, value } => {
            full_fence(at.memory());
            at.store(value);
        }
        Op::Tell { line, told } if !runner.failed() => {
            full_fence(line.memory());
            line.store(told);
        }
        Op::Wait32 { ref at, value, cond, ref of } => {
            let waited = wait(
                &op,
                || Waker::Word(Writers::of(at.addr()), of.as_ref().map(|end| &*end.qp)),
                runner,
                || cond.holds32(at.load(), value),
            );
            return match waited {
                // The send that needs the credit fails.
                Err(Unsatisfied::Lost(_)) => Ok(()),
                other => other,
            };
        }
        Op::Wait64 { ref at, value, cond } => {
            let waker = || Waker::Word(Writers::of(at.addr()), None);
            return wait(&op, waker, runner, || cond.holds64(at.load(), value));
        }
        // Copies between GPUs are refused at submission, and the device moves what is not placed.
        Op::Barrier
        | Op::Flush
        | Op::OrArrival { .. }
        | Op::UnlessPlaced
        | Op::Tell { .. }
        | Op::Peer(_)
        | Op::Message(_)
        | Op::Place(_) => fence(Ordering::SeqCst),
        Op::Trigger(source, value) => {
            fence(Ordering::SeqCst);
            source.send_doorbell().into_iter().for_each(|send_doorbell| send_doorbell.ring(value));
            source.signal();
        }
        Op::PostRecv { source, record, value } => {
            full_fence(record.memory());
            record.store(value);
            source.signal();
        }
        Op::Await(ref source, n) => {
            let arrival = source.arrival(n);
            wait(&op, || Waker::Queue(&**source), runner, || arrival.check().is_ok())?;
            if !runner.failed() {
                fence(Ordering::SeqCst);
                arrival.index.store(arrival.passed);
                source.passed(n, runner.log().1);
            }
        }
        Op::HostFn(f) => f.into_inner()(),
    }
    Ok(())
}

/// The device that may end a wait: the waiting thread runs its work.
enum Waker<'a> {
    /// The device of a queue.
    Queue(&'a dyn Source),
    /// The devices that may write the word, and the queue pair with whose peer the wait ends.
    Word(Writers, Option<&'a QpCore>),
}

impl Waker<'_> {
    /// Runs device work. Returns whether there was any.
    fn progress(&self) -> bool {
        match self {
            Self::Queue(source) => source.progress(),
            Self::Word(writers, _) => writers.progress(),
        }
    }

    /// The error after which nothing ends the wait.
    fn lost(&self) -> Option<Error> {
        match self {
            Self::Queue(source) => source.lost(),
            Self::Word(_, of) => of.and_then(QpCore::broken_by),
        }
    }

    /// Sleeps, `waited` after the start of the wait: until `ready`, or a while, at most for `left`. Returns whether an
    /// arrival may have ended the sleep.
    fn sleep(
        &mut self,
        runner: &impl Runner,
        ready: &dyn Fn() -> bool,
        waited: Duration,
        left: Duration,
    ) -> bool {
        let writers = match self {
            Self::Queue(source) => {
                source.park(ready, PARK_MAX.min(left));
                return false;
            }
            Self::Word(writers, _) => writers,
        };
        let sleep = sleep_time(waited, SLEEPS).min(left);
        let start = Instant::now();
        // Unlike a sleep of the runner, it does not end when the stream fails.
        let has_slept = writers.sleep(ready, sleep.min(PARK_MAX));
        if !has_slept {
            runner.sleep(sleep);
        }
        writers.refresh();
        has_slept && start.elapsed() < sleep.min(PARK_MAX)
    }
}

/// Waits until `check` is true.
fn wait<'a>(
    op: &Op,
    waker: impl FnOnce() -> Waker<'a>,
    runner: &impl Runner,
    check: impl Fn() -> bool,
) -> Result<(), Unsatisfied> {
    if check() {
        return Ok(());
    }
    let mut is_noted = false;
    let waited = wait_longer(op, waker, runner, check, &mut is_noted);
    if is_noted {
        runner.note_holder(None);
    }
    waited
}

/// The slow half of [`wait`]. Sets `is_noted` when it has named itself as the holder of the stream.
fn wait_longer<'a>(
    op: &Op,
    waker: impl FnOnce() -> Waker<'a>,
    runner: &impl Runner,
    check: impl Fn() -> bool,
    is_noted: &mut bool,
) -> Result<(), Unsatisfied> {
    let start = Instant::now();
    let backoff = Backoff::since(start, runner.spin());
    let mut spinning = backoff;
    let mut waker = waker();
    let (log, by) = runner.log();
    let since = log.stamp();
    let mut held = None;
    while !runner.released() {
        let helped = waker.progress();
        if check() {
            return Ok(());
        }
        let waited = backoff.waited();
        if !*is_noted && waited >= NOTED_AFTER {
            *is_noted = true;
            runner.note_holder(Some((op, start)));
            held = op.awaited().map(|awaited| log.hold(since, awaited, by));
        }
        let left = runner.left(waited);
        if left.is_zero() {
            held.into_iter().for_each(Hold::give_up);
            return Err(Unsatisfied::Late(op.describe()));
        }
        // While the device has work, running it beats pausing.
        if helped || spinning.spin() {
            continue;
        }
        if let Some(error) = waker.lost() {
            held.into_iter().for_each(Hold::give_up);
            return Err(Unsatisfied::Lost(error));
        }
        if waker.sleep(runner, &|| runner.released() || check(), waited, left) {
            // Another thread may be running the device, and write the word in a moment.
            spinning = Backoff::new(ARRIVAL_SPIN.min(runner.spin()));
        }
    }
    held.into_iter().for_each(Hold::give_up);
    Ok(())
}

/// The message of a panic.
pub(super) fn message_of(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "(no message)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::stream::{DoorbellValue, SendDoorbell};
    use gdsync_device::memory::fences;

    #[test]
    fn device_fences_precede_record_and_doorbell_of_a_card() {
        let record = Memory::alloc(8).unwrap().word32(4).unwrap();
        let page = Memory::alloc(4096).unwrap();
        let at = page.atomic64(0).unwrap().as_ptr().cast();
        // SAFETY: the page is there as long as its keeper.
        let page = unsafe { Memory::io(std::ptr::NonNull::new(at).unwrap(), 4096, Arc::new(page)) };
        let doorbell = page.word64(0x800).unwrap();
        let (record_may_lag, by_card, found) = (false, true, Default::default());
        let send_doorbell = SendDoorbell { record, doorbell, record_may_lag, by_card, found };
        // One before each store, and one that flushes the doorbell.
        assert_eq!(fences::during(|| send_doorbell.ring(DoorbellValue { record: 1, doorbell: 2 })), 3);
        assert_eq!((send_doorbell.record.load(), send_doorbell.doorbell.load()), (1, 2));
    }
}
