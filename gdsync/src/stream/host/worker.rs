//! The thread of a host engine: runs operations with the meanings of CUDA's stream memory operations.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::shared::{Shared, breathe};
use crate::error::Error;
use crate::stream::op::{Op, Source};

/// The shortest sleep of a wait without a source.
const NAP_MIN: Duration = Duration::from_micros(20);

/// The longest sleep of a wait without a source, see [`nap`].
const NAP_MAX: Duration = Duration::from_millis(20);

/// The longest sleep in a source. A failure makes sources wake their sleepers; this is for those that do not.
const PARK_MAX: Duration = Duration::from_millis(10);

impl Shared {
    /// The life of the thread: until the engine failed and all that was pending is dropped.
    pub(super) fn work(&self) {
        while let Some(ops) = self.next() {
            self.run(ops);
            self.retire();
        }
    }

    /// Runs a submission, and drops what is left of it when the engine fails.
    fn run(&self, ops: Vec<Op>) {
        let mut ops = ops.into_iter().enumerate();
        while !self.failed()
            && let Some((position, op)) = ops.next()
        {
            self.advance(position);
            self.guarded(|| self.step(op));
        }
        // In this order: a failure that found these sources is seen, and one that comes later finds none.
        let sources = self.take_running();
        if self.failed() {
            self.await_release();
        }
        self.guarded(|| drop(ops));
        self.guarded(|| drop(sources));
    }

    /// Calls foreign code. A panic in it fails the engine, but does not end the thread, which others wait for.
    fn guarded(&self, f: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(f)) {
            let message = message_of(panic.as_ref());
            self.fail(Error::HostFnPanicked { stream: self.config.name.clone(), message });
        }
    }

    fn step(&self, op: Op) {
        match op {
            Op::Write32 { at, value } => {
                // The default of stream writes (no CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER).
                fence(Ordering::SeqCst);
                at.store(value);
            }
            Op::Write64 { at, value } => {
                fence(Ordering::SeqCst);
                at.store(value);
            }
            Op::Wait32 { ref at, value, cond, ref source } => self.wait(&op, source.as_deref(), || {
                let word = at.load();
                if cond.holds32(word, value) { Ok(()) } else { Err(word.into()) }
            }),
            Op::Wait64 { ref at, value, cond, ref source } => self.wait(&op, source.as_deref(), || {
                let word = at.load();
                if cond.holds64(word, value) { Ok(()) } else { Err(word) }
            }),
            Op::Barrier => fence(Ordering::SeqCst),
            Op::Signal(source) => source.signal(),
            Op::HostFn(f) => f(),
        }
    }

    /// Holds the stream until `look` is satisfied, which else returns the value of the word. Fails the engine at
    /// the wait limit.
    fn wait(&self, op: &Op, source: Option<&dyn Source>, look: impl Fn() -> Result<(), u64>) {
        if look().is_ok() {
            return;
        }
        let start = Instant::now();
        while !self.released() {
            let helped = source.is_some_and(|source| source.progress());
            let Err(word) = look() else {
                return;
            };
            let waited = start.elapsed();
            let left = self.config.wait_limit.saturating_sub(waited);
            if left.is_zero() {
                let what = match source {
                    Some(source) => source.describe(),
                    None => format!("{op:?} (the word is {word:#x})"),
                };
                let (stream, after) = (self.config.name.clone(), self.config.wait_limit);
                return self.fail(Error::StreamWait { stream, what, after });
            }
            // While the device has work, more of it is better than any pause.
            if helped || breathe(waited, self.config.spin) {
                continue;
            }
            match source {
                Some(source) => source.park(&|| self.released() || look().is_ok(), PARK_MAX.min(left)),
                None => self.nap(nap(waited).min(left)),
            }
        }
    }
}

/// How long a wait that nobody will wake sleeps, after it waited for so long.
///
/// Nobody, because the word of a wait without a source may be stored to by anyone: a plain store wakes no thread. So
/// a store is noticed late by an eighth of the time it took to come, by 20 ms at most, but by up to 20 us if it comes
/// before 160 us; and to this the kernel adds its own delay (timer slack, usually 50 us).
///
/// The upper bound pays for long waits. A look costs 4 to 8 us of CPU time (a timer, two context switches, cold
/// caches), so 50 looks a second are 0.02 to 0.04 % of a core, and the 65 looks of the first 160 ms another
/// 0.3 to 0.5 ms. Eight streams that wait for a second use 0.3 to 0.7 % of a core; with 5 ms it was 1.3 %.
fn nap(waited: Duration) -> Duration {
    (waited / 8).clamp(NAP_MIN, NAP_MAX)
}

/// What a panic said.
fn message_of(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "(no message)".to_owned(),
    }
}
