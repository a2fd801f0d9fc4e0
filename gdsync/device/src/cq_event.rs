//! Wakes those who sleep until completions arrive on a queue.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gdsync_shm::{doorbell_watch, event_count, nap};
use parking_lot::{Condvar, Mutex};

/// A bell for the threads of one process, and for a GPU whose streams wait on the queue. Raised after every completion;
/// costs a fence and a load while nobody sleeps.
#[derive(Debug, Default)]
pub struct CqEvent {
    nudger: OnceLock<Arc<dyn GpuNudge>>,
    waits: Waits,
    sleepers: AtomicU32,
    sequence: AtomicU32,
    lock: Mutex<()>,
    raised: Condvar,
    /// Nobody raises it.
    is_silent: bool,
}

/// What streams of GPUs wait for. They write here at each wait, on lines that the device seldom looks at.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Waits {
    /// Completions before this one.
    until: AtomicU64,
    /// The device knows that.
    attended: AtomicU32,
}

/// The shortest and the longest sleep between two looks at a queue whose device raises nothing.
const NAPS: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(1);

impl CqEvent {
    /// For a device that writes completions and tells nobody.
    pub fn silent() -> Self {
        Self { is_silent: true, ..Self::default() }
    }

    /// Sleeps unless `ready`, until raised or for `timeout`. May return for no reason.
    pub fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        if self.is_silent {
            let start = Instant::now();
            while !ready() && start.elapsed() < timeout {
                std::thread::sleep(nap(start.elapsed(), NAPS).min(timeout));
            }
            return;
        }
        let ticket = event_count::announce(&self.sleepers, &self.sequence);
        if ready() {
            return;
        }
        let mut guard = self.lock.lock();
        if self.sequence.load(Ordering::Relaxed) == ticket {
            self.raised.wait_for(&mut guard, timeout);
        }
    }

    /// Streams of a GPU wait for completions before number `until`, and `nudger` wakes them. Returns whether the device
    /// must be told.
    pub fn attend(&self, until: u64, nudger: Option<&Arc<dyn GpuNudge>>) -> bool {
        if let Some(nudger) = nudger {
            self.nudger.get_or_init(|| nudger.clone());
        }
        doorbell_watch::request(&self.waits.until, &self.waits.attended, until)
    }

    /// Streams wait for completions before number `until`: said by who has the claims of the queue locked.
    #[inline(always)]
    pub fn publish_wait(&self, until: u64) {
        doorbell_watch::publish(&self.waits.until, until);
    }

    /// As [`CqEvent::publish_wait`], by who has let the lock go.
    pub fn publish_wait_unlocked(&self, until: u64) {
        self.waits.until.fetch_max(until, Ordering::SeqCst);
    }

    /// Whether the device attends to them, and nudges if it `is_to_nudge`, now that the caller has let a lock go.
    #[inline(always)]
    pub fn is_attended(&self, is_to_nudge: bool) -> bool {
        doorbell_watch::is_watched(&self.waits.attended) && (!is_to_nudge || self.nudger.get().is_some())
    }

    /// What was foreseen will not be waited for: only what is before it.
    pub fn withdraw(&self, until: u64, before: u64) {
        doorbell_watch::withdraw(&self.waits.until, until, before);
    }

    /// The device has written `produced` completions, and would rest. Returns whether it need not attend to the queue any more:
    /// it will be told when that changes.
    pub fn may_unwatch(&self, produced: u64) -> bool {
        !doorbell_watch::must_poll(&self.waits.until, &self.waits.attended, produced)
    }

    /// Who is to be nudged after completion `n` was written. `until` is what the device knows of the completions that streams
    /// wait for.
    pub fn nudger(&self, n: u64, until: &mut u64) -> Option<&Arc<dyn GpuNudge>> {
        let nudger = self.nudger.get()?;
        if n >= *until {
            *until = self.waits.until.load(Ordering::SeqCst);
        }
        (n < *until).then_some(nudger)
    }

    /// Tells sleepers that a completion was written.
    pub fn raise(&self) {
        if event_count::notify(&self.sleepers, &self.sequence) {
            // Taken and dropped, so that a sleeper between its look at the sequence and its wait is not missed.
            drop(self.lock.lock());
            self.raised.notify_all();
        }
    }
}

/// Prods a GPU to look at what its streams wait for.
pub trait GpuNudge: Send + Sync + fmt::Debug {
    /// Called after a completion was written, without locks.
    fn nudge(&self);
}
