//! The watchdog: a thread that announces receives, releases complete operations, and notices dead ranks, without calls of the program.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use gdsync_device::fork_guard::ForkGuard;
use parking_lot::{Mutex, MutexGuard};

use crate::credit::CreditFlag;
use crate::peer::Peer;
use crate::rma_queue::{AllRmaQueues, RmaQueues};
use crate::transport::SILENCE;

/// How long receives may be held back.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How often the thread polls so before it sleeps: a wake-up costs more than a poll.
const POLLS: u32 = 50;

/// Announces receives and takes messages out of FIFOs, if the flag is set, and returns whether it was. It is set again where
/// `look` says that more is to do.
pub(crate) fn answer(flag: &CreditFlag, peers: &[Arc<Peer>], look: impl Fn(&Peer) -> bool) -> bool {
    // Cleared first: receives that are held back from now on set it again.
    let is_set = flag.take();
    if is_set {
        let more = peers.iter().fold(false, |more, peer| more | look(peer));
        if more {
            flag.set();
        }
    }
    is_set
}

/// What the watchdog looks after beside connections.
pub(crate) trait Watched: fmt::Debug + Send + Sync {
    /// Called every [`SILENCE`].
    fn look(&self);
}

/// That of a communicator.
pub(crate) type AllWatched = Arc<Mutex<Vec<Arc<dyn Watched>>>>;

fn run(flag: &CreditFlag, peers: &[Arc<Peer>], rma: &AllRmaQueues, watched: &AllWatched) {
    let (mut tended, mut polls) = (Instant::now(), 0);
    let mut stop = flag.lock();
    while !*stop {
        if polls > 0 {
            flag.sleep(&mut stop, POLL_INTERVAL);
        } else if !flag.is_polling() {
            flag.sleep(&mut stop, SILENCE.saturating_sub(tended.elapsed()));
        }
        MutexGuard::unlocked(&mut stop, || {
            if polls > 0 {
                polls = if answer(flag, peers, Peer::watch) { POLLS } else { polls - 1 };
                if polls == 0 {
                    flag.stop_polling();
                    // The flag may have been set before, without a wake-up.
                    answer(flag, peers, Peer::watch);
                }
            } else if flag.is_polling() {
                polls = POLLS;
            }
            if tended.elapsed() >= SILENCE {
                watched.lock().iter().for_each(|one| one.look());
                peers.iter().for_each(|peer| peer.recycle());
                RmaQueues::recycle(&mut rma.lock());
                tended = Instant::now();
            }
        });
    }
}

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watchdog {
    flag: Arc<CreditFlag>,
    thread: Option<JoinHandle<()>>,
    fork_guard: ForkGuard,
}

impl Watchdog {
    pub(crate) fn start(
        flag: Arc<CreditFlag>,
        peers: Arc<[Arc<Peer>]>,
        rma: AllRmaQueues,
        watched: AllWatched,
    ) -> io::Result<Self> {
        let pending = flag.clone();
        let run = move || {
            if catch_unwind(AssertUnwindSafe(|| run(&pending, &peers, &rma, &watched))).is_err() {
                // Nothing announces the receives of the connections any more.
                let error = gdsync::Error::Panicked { thread: "mp-watch" };
                peers.iter().for_each(|peer| peer.transport.fail(&error));
            }
        };
        let thread = Some(Builder::new().name("mp-watch".into()).spawn(run)?);
        Ok(Self { flag, thread, fork_guard: ForkGuard::default() })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some(thread) = self.fork_guard.take_thread(&mut self.thread) {
            self.flag.stop();
            // It does not panic, and nothing could be done if it did.
            let _ = thread.join();
        }
    }
}
