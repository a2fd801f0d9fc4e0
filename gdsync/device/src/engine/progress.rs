//! What the software HCA and the proxy have in common: a state behind a lock, and *whoever has time* runs a step of it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gdsync_shm as protocol;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::GpuNudge;
use crate::Health;
use crate::copy_engine::FRESH;
use crate::doorbell_set::DoorbellSet;
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;
use crate::memory::Word64;

/// The state, and one step of its work.
pub trait Progress: Send + fmt::Debug + 'static {
    /// Doorbells, sends and answers. Returns whether anything was done.
    fn step(&mut self, doorbells: &DoorbellSet) -> bool;
    /// Takes the doorbell of a queue pair and does its work.
    fn ring(&mut self, index: usize, doorbells: &DoorbellSet);
    /// Looks at every doorbell, for those that nobody announced.
    fn look_at_all(&mut self);
    /// Runs the timers.
    fn tick(&mut self, now: Instant);
    /// Nothing has happened for a while: looks no more at doorbells that were rung as far as was announced, nor to queues that
    /// no stream waits on. Before that, the next send or wait of a stream is likely, and cheaper where nothing need be told.
    fn drop_idle_watches(&mut self, doorbells: &DoorbellSet);
    /// From now on doorbells that were announced are looked at only now and then, until the next is announced.
    fn unwatch_all(&self, doorbells: &DoorbellSet);
    /// Whether there is unfinished work that only steps carry on, or a running timer.
    fn is_active(&self) -> bool;
    /// Whether something came in.
    fn has_arrivals(&mut self) -> bool;
    /// Whether a doorbell may be written that nobody tells us of.
    fn is_watching(&self) -> bool;
    /// Whether copies are under way, whose end nobody announces.
    fn is_copying(&self) -> bool;
    /// Whether streams of GPUs wait.
    fn is_attended(&self) -> bool;
    /// When the next timer expires.
    fn next_timer(&self) -> Option<Instant>;
    /// The doorbells that may be written without notice, if they are others than at the last call.
    fn newly_watched(&mut self) -> Option<Vec<Word64>>;
    /// When a long message, or a copy of one, has begun, here or at a peer, if one has since the last call.
    fn take_copied(&mut self) -> Option<Instant> {
        None
    }
    /// The GPUs to be nudged, once the state is let go.
    fn take_nudges(&mut self) -> Vec<Arc<dyn GpuNudge>>;

    /// Whether there is work that nobody tells of, or somebody to serve who cannot help: doorbells to look at, copies under
    /// way, streams of GPUs that wait.
    fn must_poll(&self) -> bool {
        self.is_watching() || self.is_copying() || self.is_attended()
    }
}

/// Who has time, and who sleeps.
///
/// On lines of its own: who runs the state writes here at each step, and what lies beside it others read at each call.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ProgressState {
    /// The process that has the service thread, and what the state shares with peers.
    pub fork_guard: ForkGuard,
    /// Steps run by threads other than the service thread.
    pub caller_steps: AtomicU64,
    /// Unfinished work was seen when the state was last let go.
    busy: AtomicBool,
    /// There was work that nobody tells of when the state was last let go: see [`Progress::must_poll`].
    pub must_poll: AtomicBool,
    /// When a long message, or a copy of one, last began, here or at a peer.
    pub copied: RecentCopy,
    /// What the service thread does.
    pub thread: Mutex<ThreadState>,
    /// Signalled when that changes.
    pub changed: Condvar,
    /// A step panicked: the state is not to be trusted, and no step runs any more.
    failed: AtomicBool,
    /// Of the queue pairs that a panic breaks.
    healths: Mutex<Vec<Weak<Health>>>,
}

impl ProgressState {
    /// Breaks this queue pair when a step panics.
    ///
    /// # Errors
    /// [`Error::Panicked`] when one has.
    pub fn watch_health(&self, thread: &'static str, health: &Arc<Health>) -> Result<()> {
        let mut healths = self.healths.lock();
        // Only when it would grow, so that many queue pairs cost no more each.
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

/// Fails the engine when it is dropped: forgotten where nothing panicked.
struct OnPanic<'a>(&'a ProgressState, &'static str);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        self.0.fail(self.1);
    }
}

/// What the service thread is doing, as others need to know it.
#[derive(Debug, Default)]
pub struct ThreadState {
    /// It leaves the work to others, and looks again in a while.
    pub defers: bool,
    /// Others have left: it must look now.
    pub wanted: bool,
    /// It sleeps on the bell.
    pub asleep: bool,
}

/// An HCA that threads run when they have time, and a service thread when nobody else does.
pub trait ProgressEngine: Send + Sync + fmt::Debug + 'static {
    /// The state.
    type Core: Progress;
    /// Name of the service thread.
    const THREAD: &str;

    /// The state.
    fn core(&self) -> &Mutex<Self::Core>;
    /// The doorbells that were rung while the state was locked.
    fn doorbells(&self) -> &DoorbellSet;
    /// What threads share besides the state.
    fn progress_state(&self) -> &ProgressState;
    /// Before a step: takes in what other threads have prepared.
    fn accept(&self, _core: &mut Self::Core) {}
    /// Whether something came in that is seen without the lock.
    fn has_arrivals(&self) -> bool;
    /// Whether a look under the lock may find something that came in.
    fn may_have_arrivals(&self) -> bool {
        self.has_arrivals()
    }
    /// Sleeps unless `ready`, until rung, until something comes in, or for `timeout`. May return for no reason.
    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration);
    /// Wakes the sleeper.
    fn wake(&self);

    /// Lets the state go and acts on what others noted meanwhile.
    fn unlock(&self, core: MutexGuard<'_, Self::Core>) {
        let mut nudges = Vec::new();
        let mut note = |core: &mut Self::Core| {
            let state = self.progress_state();
            state.busy.store(core.is_active() || core.is_watching(), Ordering::Relaxed);
            state.must_poll.store(core.must_poll(), Ordering::Relaxed);
            core.take_copied().into_iter().for_each(|at| state.copied.note(at));
            nudges.append(&mut core.take_nudges());
        };
        let mut core = core;
        note(&mut core);
        self.doorbells().unlock(
            core,
            || self.core().try_lock(),
            |core| {
                self.accept(core);
                core.step(self.doorbells());
                note(core);
            },
        );
        // Without the lock: CUDA may take its time.
        nudges.iter().for_each(|nudger| nudger.nudge());
    }

    /// Runs a step, unless one has panicked. A panic breaks all queue pairs of the engine with [`Error::Panicked`], and goes no
    /// further: the caller may be a thread of the application. `None` then, and ever after.
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

    /// Runs `f` on the state, then serves the doorbells that were rung while it was locked.
    fn with<T>(&self, f: impl FnOnce(&mut Self::Core) -> T) -> T {
        let on_panic = OnPanic(self.progress_state(), Self::THREAD);
        let mut core = self.core().lock();
        let result = f(&mut core);
        self.unlock(core);
        std::mem::forget(on_panic);
        result
    }

    /// Runs a step if nobody else does. `None` when somebody does.
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

    /// Notes that a thread other than the service thread runs the HCA. That the count moves is all that matters, so two
    /// threads may overwrite each other's.
    fn count_caller_step(&self) {
        let caller_steps = &self.progress_state().caller_steps;
        caller_steps.store(caller_steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether something came in since a step that found nothing more to do; timers and copies excepted. `doorbells` are
    /// those watched.
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

    /// The caller stops running the HCA: the service thread takes over at once.
    fn take_over(&self) {
        if !self.progress_state().fork_guard.is_here() {
            return;
        }
        let mut thread = self.progress_state().thread.lock();
        // Also when it does not defer now: it may be just about to, for the sake of what the caller did before.
        thread.wanted = true;
        if thread.defers {
            self.progress_state().changed.notify_one();
        } else if thread.asleep {
            drop(thread);
            self.wake_if_unattended();
        }
    }

    /// A CPU thread has rung a doorbell: does its work, or leaves word to whoever runs the HCA.
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
                // Whoever holds the core looks at the notes after letting it go; if that was just before this one
                // was left, the core is free now.
                if let Some(core) = self.core().try_lock() {
                    self.unlock(core);
                }
            }
        });
        self.count_caller_step();
        self.wake_if_unattended();
    }

    /// A doorbell will be written by something that cannot tell, up to the producer index `pi`.
    fn watch_doorbell(&self, index: usize, pi: u64) {
        // Without the lock, which the service thread has most of the time.
        if self.doorbells().announce(index, pi) {
            self.progress_state().busy.store(true, Ordering::Relaxed);
            self.take_over();
        }
    }

    /// Streams of a GPU wait on this completion queue.
    fn attend_to(&self, cqn: u32) {
        self.doorbells().attend(cqn);
        self.progress_state().busy.store(true, Ordering::Relaxed);
        self.take_over();
    }

    /// Runs a step on the calling thread if it may find something to do, as far as can be seen without the lock.
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

/// When a copy last began. Read by anybody at any time; it grows stale by itself.
#[derive(Debug)]
pub struct RecentCopy {
    base: Instant,
    /// Nanoseconds from `base` to that moment, and one; 0 before the first copy.
    at: AtomicU64,
}

impl Default for RecentCopy {
    fn default() -> Self {
        Self { base: Instant::now(), at: AtomicU64::new(0) }
    }
}

impl RecentCopy {
    /// A copy began at this time.
    pub fn note(&self, at: Instant) {
        self.at.store(1 + self.nanoseconds(at), Ordering::Relaxed);
    }

    /// Whether that is less than [`FRESH`] ago.
    pub fn is_recent(&self) -> bool {
        self.when().is_some_and(|at| Instant::now() < at + FRESH)
    }

    /// When a copy last began; `None` before the first.
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
        recent_copy.note(Instant::now() + 1000 * FRESH);
        assert!(recent_copy.is_recent());
        recent_copy.note(recent_copy.base);
        while recent_copy.base.elapsed() < FRESH {
            std::thread::yield_now();
        }
        assert!(!recent_copy.is_recent());
    }
}
