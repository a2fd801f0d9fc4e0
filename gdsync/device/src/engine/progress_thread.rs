//! The service thread of a progress engine: runs steps when no other thread does, and sleeps when there is no work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::progress::{Progress, ProgressEngine};
use crate::error::{Error, Result};
use crate::memory::Word64;

/// Polls for work this long before sleeping.
const SPIN: Duration = Duration::from_micros(20);
/// How often it checks whether other threads still run steps.
const DEFER: Duration = Duration::from_millis(1);
/// Polls this long for watched doorbells and for copies.
const WATCH_SPIN: Duration = Duration::from_millis(1);
/// Watches of doorbells and completion queues stay this long after the last work: meanwhile new work needs no new watch.
const LINGER: Duration = Duration::from_micros(100);
/// Polls for work between two looks at timers and clock.
const POLLS: u32 = 64;
/// After a sleep of this time it does not poll before the next one: a single packet, such as the question whether this process lives,
/// costs one wake-up. If another one follows at once, it polls again.
const IDLE: Duration = Duration::from_millis(10);

/// The service thread, joined on drop.
#[derive(Debug)]
pub struct ProgressThread<S: ProgressEngine> {
    shared: Arc<S>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<S: ProgressEngine> ProgressThread<S> {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::Sys`] if the system starts no thread.
    pub fn start(shared: Arc<S>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            shared: shared.clone(),
            stop: stop.clone(),
            caller_steps: 0,
            idle: None,
            slept: Duration::ZERO,
            doorbells: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name(S::THREAD.into())
            .spawn(move || worker.run())
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, stop, thread: Some(thread) })
    }
}

impl<S: ProgressEngine> Drop for ProgressThread<S> {
    fn drop(&mut self) {
        // In a forked child the thread does not exist.
        let fork_guard = self.shared.progress_state().fork_guard;
        let Some(thread) = fork_guard.take_thread(&mut self.thread) else { return };
        self.stop.store(true, Ordering::Release);
        self.shared.take_over();
        self.shared.wake();
        // The panic hook has reported a panic of the thread.
        let _ = thread.join();
    }
}

struct Worker<S> {
    shared: Arc<S>,
    stop: Arc<AtomicBool>,
    /// Steps of other threads, as last read.
    caller_steps: u64,
    /// Since when there has been no work.
    idle: Option<Instant>,
    /// How long it has slept, until it has polled.
    slept: Duration,
    /// The doorbells polled.
    doorbells: Vec<Word64>,
}

impl<S: ProgressEngine> Worker<S> {
    fn run(mut self) {
        let shared = self.shared.clone();
        shared.prepare_thread();
        while !self.stop.load(Ordering::Acquire) {
            // After a panic no step runs any more.
            if shared.guarded(|| self.step()).is_none() {
                return shared.close();
            }
        }
    }

    /// Runs a step, defers to other threads, or rests.
    fn step(&mut self) {
        let caller_steps = self.shared.progress_state().caller_steps.load(Ordering::Relaxed);
        // Other threads may have stopped running steps when a GPU writes a doorbell.
        if caller_steps != self.caller_steps
            && !self.shared.progress_state().must_poll.load(Ordering::Relaxed)
        {
            self.caller_steps = caller_steps;
            self.defer();
        } else if self.shared.try_step() == Some(true) {
            self.idle = None;
        } else if self.rest() {
            self.poll();
        }
    }

    /// Polls for work for a moment, without lock or clock.
    fn poll(&self) {
        for _ in 0..POLLS {
            if self.shared.has_news(&self.doorbells) {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Leaves the steps to other threads for a moment, without being woken for every packet.
    fn defer(&mut self) {
        let state = self.shared.progress_state();
        let mut thread = state.thread.lock();
        thread.defers = true;
        if !thread.wanted && !self.shared.doorbells().is_pending() && !self.stop.load(Ordering::Acquire) {
            state.changed.wait_for(&mut thread, DEFER);
        }
        thread.defers = false;
        if std::mem::take(&mut thread.wanted) {
            self.caller_steps = self.shared.progress_state().caller_steps.load(Ordering::Relaxed);
        }
        drop(thread);
        // Threads that poll completions neither run timers nor notice that a peer is gone.
        let mut core = self.shared.core().lock();
        self.shared.accept(&mut core);
        core.tick(Instant::now());
        self.shared.unlock(core);
        self.idle = None;
    }

    /// Without work: runs timers, polls a while, then sleeps. Returns whether to keep polling.
    fn rest(&mut self) -> bool {
        let now = Instant::now();
        let idle = now - *self.idle.get_or_insert(now);
        let mut core = self.shared.core().lock();
        // First, because a peer that is gone may have sent its last packets on a new link.
        self.shared.accept(&mut core);
        core.tick(now);
        if idle >= LINGER {
            core.drop_idle_watches(self.shared.doorbells());
        }
        let watching = core.is_watching() || core.is_copying();
        let copying = core.is_copying();
        let is_polling = core.must_poll() || self.shared.progress_state().copied.is_recent();
        if let Some(doorbells) = core.newly_watched() {
            self.doorbells = doorbells;
        }
        let (timer, watch_sleep, longest) = (core.next_timer(), core.watch_sleep(), core.longest_sleep());
        let active = core.is_active();
        let spin = match std::mem::take(&mut self.slept) {
            _ if is_polling => WATCH_SPIN,
            slept if slept >= IDLE => Duration::ZERO,
            _ => SPIN,
        };
        let is_awake = idle < spin && !gdsync_shm::cores_are_busy();
        if !is_awake {
            core.unwatch_all(self.shared.doorbells());
        }
        self.shared.unlock(core);
        if is_awake {
            if idle > SPIN / 2 {
                gdsync_shm::yield_core();
            }
            return is_polling && !copying;
        }
        let mut sleep = longest;
        if watching {
            sleep = gdsync_shm::sleep_time(idle, SPIN..=watch_sleep);
        }
        if active {
            // A link may be full, or a timer not be set yet.
            sleep = sleep
                .min(timer.map_or(DEFER, |t| t.saturating_duration_since(now)))
                .max(Duration::from_micros(5));
        }
        let shared = &self.shared;
        shared.progress_state().thread.lock().asleep = true;
        let started = Instant::now();
        let stop = &self.stop;
        let ready = || {
            let is_new = |mut core: MutexGuard<'_, S::Core>| {
                core.has_arrivals()
                    || (core.is_watching() || core.is_copying()) && !watching
                    || core.is_active() && !active
            };
            stop.load(Ordering::Acquire)
                || shared.has_arrivals()
                || shared.core().try_lock().is_none_or(is_new)
                // Last: a doorbell rung while the lock was held is in the set.
                || shared.doorbells().is_pending()
        };
        shared.sleep(&ready, sleep);
        shared.progress_state().thread.lock().asleep = false;
        self.slept = started.elapsed();
        if self.slept >= IDLE {
            // A thread that ran a step meanwhile is not taken for one that still does.
            self.caller_steps = shared.progress_state().caller_steps.load(Ordering::Relaxed);
        }
        if sleep == longest && self.slept >= longest {
            let mut core = shared.core().lock();
            core.look_at_all();
            shared.unlock(core);
        } else if !watching {
            self.idle = None;
        }
        false
    }
}
