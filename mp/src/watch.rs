//! A thread that looks after the connections, so that the program and its streams need not.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::link::SILENCE;
use crate::peer::Peer;
use crate::window::Lanes;

/// How long receives may be held back.
const SOON: Duration = Duration::from_millis(1);

/// Says that there are receives which a rank should soon be told of.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// There may be some.
    is_on: AtomicBool,
    /// The thread knows, or there is none.
    is_heard: AtomicBool,
    stop: Mutex<bool>,
    changed: Condvar,
}

impl Alarm {
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

    /// Tells everybody, if it is on.
    pub(crate) fn answer(&self, peers: &[Peer]) {
        if self.is_on.load(Ordering::Relaxed) {
            // First: what is held back from here on switches it on again.
            self.is_on.store(false, Ordering::SeqCst);
            peers.iter().for_each(|peer| peer.link.credits.catch_up());
        }
    }

    fn watch(&self, peers: &[Peer], lanes: &Mutex<Vec<Arc<Lanes>>>) {
        let mut tended = Instant::now();
        let mut stop = self.stop.lock();
        while !*stop {
            if !self.is_heard.load(Ordering::SeqCst) {
                self.changed.wait_for(&mut stop, SILENCE.saturating_sub(tended.elapsed()));
            }
            if !*stop && self.is_heard.load(Ordering::SeqCst) {
                self.changed.wait_for(&mut stop, SOON);
            }
            MutexGuard::unlocked(&mut stop, || {
                self.is_heard.store(false, Ordering::SeqCst);
                self.answer(peers);
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
        Ok(Self { alarm, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.alarm.stop.lock() = true;
        self.alarm.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot fail, and nothing is to be done if it did.
            let _ = thread.join();
        }
    }
}
