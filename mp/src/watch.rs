//! A thread that looks after the connections, so that the program and its streams need not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::link::{Link, SILENCE};
use crate::peer::Peer;
use crate::window::Lanes;

/// How long receives may be held back.
const SOON: Duration = Duration::from_millis(1);

/// How often the thread looks so soon before it sleeps: waking it costs more than a look.
const LOOKS: u32 = 50;

/// Says that there are receives which a rank should soon be told of.
#[derive(Debug)]
pub(crate) struct Alarm {
    is_watched: bool,
    /// There may be some.
    is_on: AtomicBool,
    /// The thread looks soon, or there is none.
    is_heard: AtomicBool,
    stop: Mutex<bool>,
    changed: Condvar,
}

impl Alarm {
    /// With the thread, or without.
    pub(crate) fn new(is_watched: bool) -> Self {
        let [is_on, is_heard] = [false, !is_watched].map(AtomicBool::new);
        Self { is_watched, is_on, is_heard, stop: Mutex::new(false), changed: Condvar::new() }
    }

    /// Whether there is the thread.
    pub(crate) fn is_watched(&self) -> bool {
        self.is_watched
    }

    /// Switches it on. Whoever switches it off sees what was written before with [`Ordering::SeqCst`].
    pub(crate) fn ring(&self) {
        if !self.is_on.load(Ordering::SeqCst) {
            self.is_on.store(true, Ordering::SeqCst);
        }
        if !self.is_heard.load(Ordering::SeqCst) && !self.is_heard.swap(true, Ordering::SeqCst) {
            // The thread is asleep, or looks before it is.
            drop(self.stop.lock());
            self.changed.notify_one();
        }
    }

    /// Tells those who wait for it, if it is on.
    pub(crate) fn answer(&self, peers: &[Peer]) {
        self.answer_and(peers, |link| link.credits.catch_up_or_leave() | link.take());
    }

    /// Tells everybody, if it is on, and says whether it was.
    fn answer_all(&self, peers: &[Peer]) -> bool {
        self.answer_and(peers, |link| {
            link.credits.catch_up();
            link.watch()
        })
    }

    /// Looks after each, if it is on, and says whether it was: it stays so where somebody must look again.
    fn answer_and(&self, peers: &[Peer], look: impl Fn(&Link) -> bool) -> bool {
        let is_on = self.is_on.load(Ordering::SeqCst);
        if is_on {
            // First: what is held back from here on switches it on again.
            self.is_on.store(false, Ordering::SeqCst);
            let mut again = false;
            for Peer { link, .. } in peers {
                again |= look(link);
            }
            if again {
                self.ring();
            }
        }
        is_on
    }

    fn watch(&self, peers: &[Peer], lanes: &Mutex<Vec<Arc<Lanes>>>) {
        let (mut tended, mut looks) = (Instant::now(), 0);
        let mut stop = self.stop.lock();
        while !*stop {
            if looks > 0 {
                self.changed.wait_for(&mut stop, SOON);
            } else if !self.is_heard.load(Ordering::SeqCst) {
                self.changed.wait_for(&mut stop, SILENCE.saturating_sub(tended.elapsed()));
            }
            MutexGuard::unlocked(&mut stop, || {
                if looks > 0 {
                    looks = if self.answer_all(peers) { LOOKS } else { looks - 1 };
                    if looks == 0 {
                        self.is_heard.store(false, Ordering::SeqCst);
                        // What nobody was woken for.
                        self.answer_all(peers);
                    }
                } else if self.is_heard.load(Ordering::SeqCst) {
                    looks = LOOKS;
                }
                if tended.elapsed() >= SILENCE {
                    peers.iter().for_each(Peer::recycle);
                    Lanes::recycle(&mut lanes.lock());
                    tended = Instant::now();
                }
            });
        }
    }
}

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    alarm: Arc<Alarm>,
    thread: Option<JoinHandle<()>>,
    /// The process that has it.
    of: u32,
}

impl Watch {
    pub(crate) fn start(
        alarm: Arc<Alarm>,
        peers: Arc<[Peer]>,
        lanes: Arc<Mutex<Vec<Arc<Lanes>>>>,
    ) -> io::Result<Self> {
        let watched = alarm.clone();
        let run = move || watched.watch(&peers, &lanes);
        let thread = Builder::new().name("mp-watch".into()).spawn(run)?;
        Ok(Self { alarm, thread: Some(thread), of: std::process::id() })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.of != std::process::id() {
            // Nor may its handle be dropped: its number may be that of another thread here.
            return mem::forget(self.thread.take());
        }
        *self.alarm.stop.lock() = true;
        self.alarm.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot fail, and nothing is to be done if it did.
            let _ = thread.join();
        }
    }
}
