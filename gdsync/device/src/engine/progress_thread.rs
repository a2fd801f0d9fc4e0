//! The service thread: runs the HCA when nobody else does, and sleeps when there is nothing to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::progress::{Progress, ProgressEngine};
use crate::error::{Error, Result};
use crate::memory::Word64;

/// How long it looks for work before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// How often it looks whether others still run the HCA.
const DEFER: Duration = Duration::from_millis(1);
/// How long it looks busily at doorbells that will be written without notice.
const WATCH_SPIN: Duration = Duration::from_millis(1);
/// How long it serves GPUs that have all they asked for: what they ask for next need not be announced so long.
const LINGER: Duration = Duration::from_micros(100);
/// Looks for work for GPUs between two at timers and clock.
const LOOKS: u32 = 64;
/// The longest it leaves such a doorbell alone.
const WATCH_NAP: Duration = Duration::from_millis(5);
/// The longest it sleeps at all: then doorbells are looked at that nobody announced.
const SLEEP: Duration = Duration::from_millis(100);

/// The thread. Dropping it ends it.
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
    /// [`Error::Sys`] where there is no thread.
    pub fn start(shared: Arc<S>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            shared: shared.clone(),
            stop: stop.clone(),
            caller_steps: 0,
            idle: None,
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
        // A forked child has no such thread, and the part of it that holds on to the state goes on doing so.
        let fork_guard = self.shared.progress_state().fork_guard;
        let Some(thread) = fork_guard.take_thread(&mut self.thread) else { return };
        self.stop.store(true, Ordering::Release);
        self.shared.take_over();
        self.shared.wake();
        // A panic there was reported by the panic hook; there is nobody to return it to.
        let _ = thread.join();
    }
}

struct Worker<S> {
    shared: Arc<S>,
    stop: Arc<AtomicBool>,
    /// The count of others' steps when last looked at.
    caller_steps: u64,
    /// Since when there has been nothing to do.
    idle: Option<Instant>,
    /// Those that are watched.
    doorbells: Vec<Word64>,
}

impl<S: ProgressEngine> Worker<S> {
    fn run(mut self) {
        let shared = self.shared.clone();
        // Ends after a panic: nobody runs the state any more.
        while !self.stop.load(Ordering::Acquire) && shared.guarded(|| self.turn()).is_some() {}
    }

    /// One look for work.
    fn turn(&mut self) {
        let caller_steps = self.shared.progress_state().caller_steps.load(Ordering::Relaxed);
        // What others do does not help a GPU: they may be gone when it writes a doorbell.
        if caller_steps != self.caller_steps
            && !self.shared.progress_state().must_poll.load(Ordering::Relaxed)
        {
            self.caller_steps = caller_steps;
            self.defer();
        } else if self.shared.try_step() == Some(true) {
            self.idle = None;
        } else if self.rest() {
            self.look_out();
        }
    }

    /// Looks for news for a moment, without lock or clock.
    fn look_out(&self) {
        for _ in 0..LOOKS {
            if self.shared.has_news(&self.doorbells) {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Others run the HCA: stays out of their way, without being rung for every packet.
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
        // Those who only look for completions neither run timers nor see that a peer is gone.
        let mut core = self.shared.core().lock();
        self.shared.accept(&mut core);
        core.tick(Instant::now());
        self.shared.unlock(core);
        self.idle = None;
    }

    /// There is nothing to do now. Returns whether it is worth while to look out for what may come any moment.
    fn rest(&mut self) -> bool {
        let now = Instant::now();
        let idle = now - *self.idle.get_or_insert(now);
        let mut core = self.shared.core().lock();
        // First: a peer that is gone may have sent its last packets on a new link.
        self.shared.accept(&mut core);
        core.tick(now);
        if idle >= LINGER {
            core.drop_idle_watches(self.shared.doorbells());
        }
        // What is written without notice: doorbells, and what copy engines write.
        let watching = core.is_watching() || core.is_copying();
        let copying = core.is_copying();
        let hot = core.must_poll() || self.shared.progress_state().copied.is_recent();
        if let Some(doorbells) = core.newly_watched() {
            self.doorbells = doorbells;
        }
        let timer = core.next_timer();
        let active = core.is_active();
        let is_awake = idle < if hot { WATCH_SPIN } else { SPIN } && !gdsync_shm::cores_are_busy();
        if !is_awake {
            core.unwatch_all(self.shared.doorbells());
        }
        self.shared.unlock(core);
        if is_awake {
            if idle > SPIN / 2 {
                gdsync_shm::yield_core();
            }
            return hot && !copying;
        }
        let mut nap = SLEEP;
        if watching {
            nap = gdsync_shm::nap(idle, SPIN..=WATCH_NAP);
        }
        if active {
            // A link may be full, or a timer not set yet.
            nap = nap
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
                // Last: a doorbell rung while the core was looked at has left a note.
                || shared.doorbells().is_pending()
        };
        shared.sleep(&ready, nap);
        shared.progress_state().thread.lock().asleep = false;
        if nap == SLEEP && started.elapsed() >= SLEEP {
            let mut core = shared.core().lock();
            core.look_at_all();
            shared.unlock(core);
        } else if !watching {
            self.idle = None;
        }
        false
    }
}
