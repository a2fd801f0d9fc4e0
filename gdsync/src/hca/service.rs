//! The service thread: runs the HCA when nobody else does, and sleeps when there is nothing to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::core::Core;
use super::soft::Shared;
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

/// What the service thread is doing, as others need to know it.
#[derive(Debug, Default)]
pub(super) struct Duty {
    /// It leaves the work to others, and looks again in a while.
    defers: bool,
    /// Others have left: it must look now.
    wanted: bool,
    /// It sleeps on the bell.
    asleep: bool,
}

#[derive(Debug)]
pub(super) struct Service {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    pub(super) fn start(shared: Arc<Shared>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let worker =
            Worker { shared: shared.clone(), stop: stop.clone(), lent: 0, idle: None, doorbells: Vec::new() };
        let thread = std::thread::Builder::new()
            .name("gdsync-hca".into())
            .spawn(move || worker.run())
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, stop, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.shared.take_over();
        self.shared.bell.ring_hard();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by the panic hook; there is nobody to return it to.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Wakes the service thread if it sleeps while there is unfinished work.
    pub(super) fn wake_if_unattended(&self) {
        if self.busy.load(Ordering::Relaxed) {
            self.bell.ring();
        }
    }

    /// The caller stops running the HCA: the service thread takes over at once.
    pub(super) fn take_over(&self) {
        let mut duty = self.duty.lock();
        // Also when it does not defer now: it may be just about to, for the sake of what the caller did before.
        duty.wanted = true;
        if duty.defers {
            self.duty_changed.notify_one();
        } else if duty.asleep {
            drop(duty);
            self.wake_if_unattended();
        }
    }
}

struct Worker {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    /// The count of others' steps when last looked at.
    lent: u64,
    /// Since when there has been nothing to do.
    idle: Option<Instant>,
    /// Those that are watched.
    doorbells: Vec<Word64>,
}

impl Worker {
    fn run(mut self) {
        while !self.stop.load(Ordering::Acquire) {
            let lent = self.shared.lent.load(Ordering::Relaxed);
            // What others do does not help a GPU: they may be gone when it writes a doorbell.
            if lent != self.lent && !self.shared.hot.load(Ordering::Relaxed) {
                self.lent = lent;
                self.defer();
            } else if self.shared.try_step() == Some(true) {
                self.idle = None;
            } else if self.rest() {
                self.look_out();
            }
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
        let mut duty = self.shared.duty.lock();
        duty.defers = true;
        if !duty.wanted && !self.shared.rung.is_noted() && !self.stop.load(Ordering::Acquire) {
            self.shared.duty_changed.wait_for(&mut duty, DEFER);
        }
        duty.defers = false;
        if std::mem::take(&mut duty.wanted) {
            self.lent = self.shared.lent.load(Ordering::Relaxed);
        }
        drop(duty);
        // Those who only look for completions neither run timers nor see that a peer is gone.
        let mut core = self.shared.core.lock();
        self.shared.accept(&mut core);
        core.tick(Instant::now());
        self.shared.settle(core);
        self.idle = None;
    }

    /// There is nothing to do now. Returns whether it is worth while to look out for what may come any moment.
    fn rest(&mut self) -> bool {
        let now = Instant::now();
        let idle = now - *self.idle.get_or_insert(now);
        let mut core = self.shared.core.lock();
        // First: a peer that is gone may have sent its last packets on a new link.
        self.shared.accept(&mut core);
        core.tick(now);
        if idle >= LINGER {
            core.rest(&self.shared.rung);
        }
        // What is written without notice: doorbells, and what copy engines write.
        let watching = core.is_watching() || core.is_copying();
        let (hot, copying) = (core.is_hot(), core.is_copying());
        if let Some(doorbells) = core.newly_watched() {
            self.doorbells = doorbells;
        }
        let timer = core.next_timer();
        let active = core.is_active();
        self.shared.settle(core);
        if idle < if hot { WATCH_SPIN } else { SPIN } {
            if idle > SPIN / 2 {
                std::thread::yield_now();
            }
            return hot && !copying;
        }
        let mut nap = SLEEP;
        if watching {
            nap = (idle / 8).clamp(SPIN, WATCH_NAP);
        }
        if active {
            // A link may be full, or a timer not set yet.
            nap = nap
                .min(timer.map_or(DEFER, |t| t.saturating_duration_since(now)))
                .max(Duration::from_micros(5));
        }
        self.shared.duty.lock().asleep = true;
        let started = Instant::now();
        let shared = &self.shared;
        let stop = &self.stop;
        let ready = || {
            let is_new = |mut core: MutexGuard<'_, Core>| {
                core.has_packet()
                    || (core.is_watching() || core.is_copying()) && !watching
                    || core.is_active() && !active
            };
            stop.load(Ordering::Acquire)
                || shared.port.has_accepted()
                || shared.core.try_lock().is_none_or(is_new)
                // Last: a doorbell rung while the core was looked at has left a note.
                || shared.rung.is_noted()
        };
        shared.bell.sleep(&ready, nap);
        shared.duty.lock().asleep = false;
        if nap == SLEEP && started.elapsed() >= SLEEP {
            let mut core = shared.core.lock();
            core.look_at_all();
            shared.settle(core);
        } else if !watching {
            self.idle = None;
        }
        false
    }
}
