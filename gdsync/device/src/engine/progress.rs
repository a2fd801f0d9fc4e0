//! The progress engine of devices that run on a CPU: a state behind a lock, stepped by any thread that calls, and by a service thread.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::Condvar;
use gdsync_shm as protocol;
use parking_lot::{Mutex, MutexGuard};

use crate::GpuNudge;
use crate::Health;
use crate::copy_engine::FRESH;
use crate::doorbell_set::DoorbellSet;
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;
use crate::memory::Word64;

/// The state of an engine, and its steps. `doorbells` is that of [`ProgressEngine::doorbells`].
pub trait Progress: Send + fmt::Debug + 'static {
    /// Runs a step: doorbells, sends and responses. Returns whether anything was done.
    fn step(&mut self, doorbells: &DoorbellSet) -> bool;
    /// Takes the doorbell of a queue pair and runs its sends.
    fn ring(&mut self, index: usize, doorbells: &DoorbellSet);
    /// Takes all doorbells, also those not watched.
    fn look_at_all(&mut self);
    /// Runs timers that have expired.
    fn tick(&mut self, now: Instant);
    /// Called when idle for a while: stops watching doorbells that were rung up to their watch limit, and queues that no stream waits on.
    /// Not earlier, because the next send or wait of a stream is cheaper while they are polled.
    fn drop_idle_watches(&mut self, doorbells: &DoorbellSet);
    /// Called before sleeping: the next doorbell watch must wake the engine.
    fn unwatch_all(&self, doorbells: &DoorbellSet);
    /// Whether there is unfinished work, or a running timer.
    fn is_active(&self) -> bool;
    /// Whether packets or completions have arrived.
    fn has_arrivals(&mut self) -> bool;
    /// Whether a doorbell is watched: it may be written without waking the engine.
    fn is_watching(&self) -> bool;
    /// Whether copies are under way, whose end must be polled for.
    fn is_copying(&self) -> bool;
    /// Whether streams of GPUs wait on a completion queue.
    fn is_attended(&self) -> bool;
    /// When the next timer expires.
    fn next_timer(&self) -> Option<Instant>;
    /// The watched doorbells, if they have changed since the last call.
    fn newly_watched(&mut self) -> Option<Vec<Word64>>;
    /// When the last long message or copy began, here or at a peer, if one has since the last call.
    fn take_copied(&mut self) -> Option<Instant> {
        None
    }
    /// The GPUs to nudge once the lock is released.
    fn take_nudges(&mut self) -> Vec<Arc<dyn GpuNudge>>;

    /// Maximum sleep of the service thread. Afterwards it checks all doorbells, also those not watched, and receives that streams have
    /// posted.
    fn longest_sleep(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// Maximum sleep of the service thread while it must poll.
    fn watch_sleep(&self) -> Duration {
        Duration::from_millis(5)
    }

    /// Whether the service thread must poll: doorbells are watched, copies are under way, or GPU streams wait, which cannot run steps.
    fn must_poll(&self) -> bool {
        self.is_watching() || self.is_copying() || self.is_attended()
    }
}

/// What threads share besides the state. Aligned, because it is written in each step and its neighbours are read in each call.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ProgressState {
    /// The process that has the service thread.
    pub fork_guard: ForkGuard,
    /// Steps run by threads other than the service thread.
    pub caller_steps: AtomicU64,
    /// There was unfinished work when the lock was last released.
    busy: AtomicBool,
    /// [`Progress::must_poll`] when the lock was last released.
    pub must_poll: AtomicBool,
    /// When the last long message or copy began, here or at a peer.
    pub copied: RecentCopy,
    /// What the service thread is doing.
    pub thread: Mutex<ThreadState>,
    /// Signalled when `thread.wanted` is set.
    pub changed: Condvar,
    /// A step panicked, so no step runs any more.
    failed: AtomicBool,
    /// Queue pairs that a panic breaks.
    healths: Mutex<Vec<Weak<Health>>>,
}

impl ProgressState {
    /// Breaks this queue pair when a step panics.
    ///
    /// # Errors
    /// [`Error::Panicked`] when one has.
    pub fn watch_health(&self, thread: &'static str, health: &Arc<Health>) -> Result<()> {
        let mut healths = self.healths.lock();
        // Only before it would grow: the cost per queue pair stays constant.
        if healths.len() == healths.capacity() {
            healths.retain(|health| health.strong_count() > 0);
        }
        healths.push(Arc::downgrade(health));
        drop(healths);
        if self.failed.load(Ordering::Acquire) { Err(Error::Panicked { thread }) } else { Ok(()) }
    }

    #[cold]
    fn fail(&self, thread: &'static str) {
        self.failed.store(true, Ordering::Release);
        for health in self.healths.lock().iter().filter_map(Weak::upgrade) {
            health.record(Error::Panicked { thread });
        }
    }
}

/// Fails the engine when dropped; forgotten unless something panicked.
struct OnPanic<'a>(&'a ProgressState, &'static str);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        self.0.fail(self.1);
    }
}

/// What the service thread is doing.
#[derive(Debug, Default)]
pub struct ThreadState {
    /// It leaves the steps to callers for a moment.
    pub defers: bool,
    /// Callers stopped running steps: it must take over at once.
    pub wanted: bool,
    /// It sleeps in [`ProgressEngine::sleep`].
    pub asleep: bool,
}

/// An engine that runs in the calling threads, and in a service thread while there are none.
pub trait ProgressEngine: Send + Sync + fmt::Debug + 'static {
    /// The state.
    type Core: Progress;
    /// Name of the service thread.
    const THREAD: &str;

    /// The state.
    fn core(&self) -> &Mutex<Self::Core>;
    /// Doorbells that were rung while the state was locked.
    fn doorbells(&self) -> &DoorbellSet;
    /// What threads share besides the state.
    fn progress_state(&self) -> &ProgressState;
    /// Called by the service thread when it starts.
    fn prepare_thread(&self) {}
    /// Called by the service thread when a step has panicked: peers must learn that none follows.
    fn close(&self) {}
    /// Called before a step: takes over what other threads have prepared.
    fn accept(&self, _core: &mut Self::Core) {}
    /// Whether arrivals can be seen without the lock.
    fn has_arrivals(&self) -> bool;
    /// Whether a step may find arrivals.
    fn may_have_arrivals(&self) -> bool {
        self.has_arrivals()
    }
    /// Sleeps unless `ready`, until woken, an arrival, or `timeout`. May wake spuriously.
    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration);
    /// Wakes the service thread from [`ProgressEngine::sleep`].
    fn wake(&self);

    /// Releases the lock, handles work that others queued meanwhile, and nudges GPUs.
    fn unlock(&self, core: MutexGuard<'_, Self::Core>) {
        let mut nudges = Vec::new();
        let mut publish = |core: &mut Self::Core| {
            let state = self.progress_state();
            state.busy.store(core.is_active() || core.is_watching(), Ordering::Relaxed);
            state.must_poll.store(core.must_poll(), Ordering::Relaxed);
            core.take_copied().into_iter().for_each(|at| state.copied.set(at));
            nudges.append(&mut core.take_nudges());
        };
        let mut core = core;
        publish(&mut core);
        self.doorbells().unlock(
            core,
            || self.core().try_lock(),
            |core| {
                self.accept(core);
                core.step(self.doorbells());
                publish(core);
            },
        );
        // Without the lock: CUDA may take its time.
        nudges.iter().for_each(|nudger| nudger.nudge());
    }

    /// Runs a step. A panic in it breaks all queue pairs of the engine with [`Error::Panicked`] and is not propagated, because the
    /// caller may be a thread of the application. Returns `None` from then on.
    fn guarded<T>(&self, step: impl FnOnce() -> T) -> Option<T> {
        if self.progress_state().failed.load(Ordering::Acquire) {
            return None;
        }
        let done = catch_unwind(AssertUnwindSafe(step));
        if done.is_err() {
            self.progress_state().fail(Self::THREAD);
        }
        done.ok()
    }

    /// Runs `f` on the state.
    fn with<T>(&self, f: impl FnOnce(&mut Self::Core) -> T) -> T {
        let on_panic = OnPanic(self.progress_state(), Self::THREAD);
        let mut core = self.core().lock();
        let result = f(&mut core);
        self.unlock(core);
        std::mem::forget(on_panic);
        result
    }

    /// Runs a step and returns whether it did anything; `None` if the lock is taken.
    fn try_step(&self) -> Option<bool> {
        let mut core = self.core().try_lock()?;
        let step = move || {
            self.accept(&mut core);
            let worked = core.step(self.doorbells());
            self.unlock(core);
            worked
        };
        Some(self.guarded(step).unwrap_or(false))
    }

    /// Counts a step of a calling thread. Increments may be lost: only that the count changes matters.
    fn count_caller_step(&self) {
        let caller_steps = &self.progress_state().caller_steps;
        caller_steps.store(caller_steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether there is work since the last step, except for timers and copies. `doorbells` are those polled.
    fn has_news(&self, doorbells: &[Word64]) -> bool {
        self.may_have_arrivals()
            || self.doorbells().seems_pending()
            || doorbells.iter().any(|doorbell| protocol::is_rung(doorbell.atomic()))
    }

    /// Wakes the service thread if it sleeps while there is unfinished work.
    fn wake_if_unattended(&self) {
        if self.progress_state().busy.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// The caller stops running steps: the service thread takes over at once.
    fn take_over(&self) {
        if !self.progress_state().fork_guard.is_here() {
            return;
        }
        let mut thread = self.progress_state().thread.lock();
        // Also if it does not defer now: it may be about to, because of earlier steps of the caller.
        thread.wanted = true;
        if thread.defers {
            self.progress_state().changed.notify_one();
        } else if thread.asleep {
            drop(thread);
            self.wake_if_unattended();
        }
    }

    /// The caller sleeps between two steps, until an arrival or `timeout`. The service thread takes over only unfinished work. Returns
    /// `false` in another process, where nothing arrives.
    fn sleep_between_steps(&self, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        let state = self.progress_state();
        if !state.fork_guard.is_here() {
            return false;
        }
        if state.busy.load(Ordering::Relaxed) {
            self.take_over();
        }
        self.sleep(&|| ready() || self.has_arrivals(), timeout);
        true
    }

    /// A CPU thread has rung a doorbell: runs its sends, or leaves them to the holder of the lock.
    fn ring_doorbell(&self, index: usize) {
        if !self.progress_state().fork_guard.is_here() {
            return;
        }
        self.guarded(|| match self.core().try_lock() {
            Some(mut core) => {
                core.ring(index, self.doorbells());
                self.unlock(core);
            }
            None => {
                self.doorbells().insert(index);
                // The holder checks the set after releasing the lock; if it did so before the insertion, the lock is free now.
                if let Some(core) = self.core().try_lock() {
                    self.unlock(core);
                }
            }
        });
        self.count_caller_step();
        self.wake_if_unattended();
    }

    /// Watches a doorbell, which may be written up to the producer index `pi` without waking the engine.
    fn watch_doorbell(&self, index: usize, pi: u64) {
        // Without the lock, which the service thread holds most of the time.
        if self.doorbells().announce(index, pi) {
            self.progress_state().busy.store(true, Ordering::Relaxed);
            self.take_over();
        }
    }

    /// GPU streams wait on this completion queue.
    fn attend_to(&self, cqn: u32) {
        self.doorbells().attend(cqn);
        self.progress_state().busy.store(true, Ordering::Relaxed);
        self.take_over();
    }

    /// Runs a step on the calling thread if there seems to be work.
    fn run_step(&self) -> bool {
        if !self.progress_state().fork_guard.is_here() {
            return false;
        }
        self.count_caller_step();
        let has_work = self.progress_state().busy.load(Ordering::Relaxed)
            || self.may_have_arrivals()
            || self.doorbells().seems_pending();
        has_work && self.try_step().unwrap_or(false)
    }
}

/// When the last copy of payload, or long message, began.
#[derive(Debug)]
pub struct RecentCopy {
    base: Instant,
    /// Nanoseconds from `base`, plus one; 0 before the first copy.
    at: AtomicU64,
}

impl Default for RecentCopy {
    fn default() -> Self {
        Self { base: Instant::now(), at: AtomicU64::new(0) }
    }
}

impl RecentCopy {
    /// A copy began at this time.
    pub fn set(&self, at: Instant) {
        self.at.store(1 + self.nanoseconds(at), Ordering::Relaxed);
    }

    /// Whether one began less than [`FRESH`] ago.
    pub fn is_recent(&self) -> bool {
        self.when().is_some_and(|at| Instant::now() < at + FRESH)
    }

    /// When the last copy began.
    pub fn when(&self) -> Option<Instant> {
        let at = self.at.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.base + Duration::from_nanos(at))
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.base).as_nanos()).unwrap_or(u64::MAX - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_recent_for_a_while() {
        let recent_copy = RecentCopy::default();
        assert!(!recent_copy.is_recent(), "there was none");
        // In the future, so that it is recent however slow this machine is.
        recent_copy.set(Instant::now() + 1000 * FRESH);
        assert!(recent_copy.is_recent());
        recent_copy.set(recent_copy.base);
        while recent_copy.base.elapsed() < FRESH {
            std::thread::yield_now();
        }
        assert!(!recent_copy.is_recent());
    }
}
