//! Wakes threads and GPUs that wait for completions of a queue.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::Condvar;
use gdsync_shm::{doorbell_watch, event_count, sleep_time};
use parking_lot::Mutex;

/// Event of a completion queue, raised after every completion: wakes sleeping threads of this process, and knows the GPU whose
/// streams wait on the queue. Without sleepers it costs a fence and a load.
#[derive(Debug, Default)]
pub struct CqEvent {
    nudger: OnceLock<Arc<dyn GpuNudge>>,
    waits: Waits,
    sleepers: AtomicU32,
    sequence: AtomicU32,
    lock: Mutex<()>,
    raised: Condvar,
    /// The device raises no events: sleepers poll.
    is_silent: bool,
}

/// Watch of the waits of GPU streams (see `gdsync_shm::doorbell_watch`), on a cache line that the device rarely reads.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Waits {
    /// Streams wait for completions before this number.
    until: AtomicU64,
    /// The device attends to the queue.
    attended: AtomicU32,
}

/// Sleep between two polls of a queue whose device raises no events.
const SLEEPS: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(1);

impl CqEvent {
    /// For a device that raises no events.
    pub fn silent() -> Self {
        Self { is_silent: true, ..Self::default() }
    }

    /// Sleeps unless `ready`, until raised or for `timeout`. May wake spuriously.
    pub fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        if self.is_silent {
            let start = Instant::now();
            while !ready() && start.elapsed() < timeout {
                std::thread::sleep(sleep_time(start.elapsed(), SLEEPS).min(timeout));
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

    /// Announces that GPU streams wait for completions before number `until`; `nudger` wakes their GPU. Returns whether the caller
    /// must call [`Provider::attend`](crate::Provider::attend).
    pub fn attend(&self, until: u64, nudger: Option<&Arc<dyn GpuNudge>>) -> bool {
        if let Some(nudger) = nudger {
            self.nudger.get_or_init(|| nudger.clone());
        }
        doorbell_watch::request(&self.waits.until, &self.waits.attended, until)
    }

    /// Announces waits for completions before number `until`. The caller holds the lock of the queue.
    #[inline]
    pub fn publish_wait(&self, until: u64) {
        doorbell_watch::publish(&self.waits.until, until);
    }

    /// Whether the device attends to the queue, and has a nudger if `is_to_nudge`. To be called without the lock.
    #[inline]
    pub fn is_attended(&self, is_to_nudge: bool) -> bool {
        doorbell_watch::is_watched(&self.waits.attended) && (!is_to_nudge || self.nudger.get().is_some())
    }

    /// Takes back the wait before `until`, unless there is a later one; waits before `before` stay.
    pub fn withdraw(&self, until: u64, before: u64) {
        doorbell_watch::withdraw(&self.waits.until, until, before);
    }

    /// Device: whether it may stop attending to the queue after `produced` completions. If so, the next wait notifies it.
    pub fn may_unwatch(&self, produced: u64) -> bool {
        !doorbell_watch::must_poll(&self.waits.until, &self.waits.attended, produced)
    }

    /// The nudger to call after completion `n` was written, if a stream waits for it. `until` caches how far streams wait.
    pub fn nudger(&self, n: u64, until: &mut u64) -> Option<&Arc<dyn GpuNudge>> {
        let nudger = self.nudger.get()?;
        if n >= *until {
            *until = self.waits.until.load(Ordering::SeqCst);
        }
        (n < *until).then_some(nudger)
    }

    /// Wakes sleepers after a completion was written.
    pub fn raise(&self) {
        if event_count::notify(&self.sleepers, &self.sequence) {
            // Waits for sleepers that have read the sequence and not slept yet.
            drop(self.lock.lock());
            self.raised.notify_all();
        }
    }
}

/// Makes a GPU look at what its streams wait for.
pub trait GpuNudge: Send + Sync + fmt::Debug {
    /// Called after a completion was written, without locks.
    fn nudge(&self);
}
