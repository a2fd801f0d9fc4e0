//! Links of a card: made by threads of their own, because the step must not wait for a handshake.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::links::Links;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::{Condvar, Gid};

/// A peer that did not answer is not asked again for this long.
const RETRY: Duration = Duration::from_millis(200);
/// How long datagrams wait for the first link to a peer. Later ones are dropped until there is a link.
const WAIT: Duration = Duration::from_millis(300);
/// Peers remembered.
const MAX: usize = 1024;
/// Attempts under way at once, each in a thread.
const MAX_ATTEMPTS: usize = 64;

/// Peers that something was sent to and no link leads to.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    attempts: BTreeMap<Gid, Attempt>,
    requests: Arc<Requests>,
}

/// The last attempt to make a link.
#[derive(Debug)]
struct Attempt {
    /// When it began, or ended.
    since: Instant,
    under_way: bool,
    is_first: bool,
}

/// Where a datagram goes.
pub(crate) enum Reach {
    /// Over this link.
    Link(usize),
    /// Over a link that is being made.
    Soon,
    /// Nowhere.
    Never,
}

impl Peers {
    /// How to reach a peer; asks for a link if there is none.
    pub(crate) fn reach(&mut self, peer: Gid, links: &Links) -> Reach {
        if let Some(link) = links.find(peer) {
            return Reach::Link(link);
        }
        let last = self.attempts.get(&peer);
        match last {
            Some(at) if at.under_way && at.is_first && at.since.elapsed() < WAIT => return Reach::Soon,
            Some(at) if at.under_way || at.since.elapsed() < RETRY => return Reach::Never,
            _ => {}
        }
        let is_first = last.is_none();
        if self.attempts.len() >= MAX {
            self.attempts.retain(|_, attempt| attempt.under_way);
        }
        if self.attempts.values().filter(|attempt| attempt.under_way).count() >= MAX_ATTEMPTS {
            return Reach::Never;
        }
        self.attempts.insert(peer, Attempt { since: Instant::now(), under_way: true, is_first });
        self.requests.state.lock().wanted.push(peer);
        self.requests.changed.notify_one();
        if is_first { Reach::Soon } else { Reach::Never }
    }

    /// What the thread that makes links is asked for.
    pub(crate) fn requests(&self) -> Arc<Requests> {
        self.requests.clone()
    }

    /// Notes that the attempt to make a link has ended.
    pub(crate) fn tried(&mut self, peer: Gid, has_link: bool) {
        if has_link {
            self.attempts.remove(&peer);
        } else if let Some(attempt) = self.attempts.get_mut(&peer) {
            (attempt.since, attempt.under_way) = (Instant::now(), false);
        }
    }
}

/// Requests for links.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    wanted: Vec<Gid>,
    stops: bool,
}

/// The thread that starts a thread for each attempt; joined on drop. An attempt has a deadline, and ends by itself.
#[derive(Debug)]
pub(crate) struct Connector {
    fork_guard: ForkGuard,
    requests: Arc<Requests>,
    thread: Option<JoinHandle<()>>,
}

impl Connector {
    /// Starts the thread, which has `connect` called for each peer.
    pub(crate) fn start(
        requests: Arc<Requests>,
        fork_guard: ForkGuard,
        connect: impl Fn(Gid) + Send + Sync + 'static,
    ) -> Result<Self> {
        let (own, connect) = (requests.clone(), Arc::new(connect));
        let thread = std::thread::Builder::new()
            .name("gdsync-connect".into())
            .spawn(move || {
                while let Some(peer) = own.next() {
                    // A silent peer does not hold up others.
                    let attempt = connect.clone();
                    let thread = std::thread::Builder::new().name("gdsync-connect".into());
                    if thread.spawn(move || attempt(peer)).is_err() {
                        connect(peer);
                    }
                }
            })
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { fork_guard, requests, thread: Some(thread) })
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        let Some(thread) = self.fork_guard.take_thread(&mut self.thread) else { return };
        self.requests.state.lock().stops = true;
        self.requests.changed.notify_one();
        // The panic hook has reported a panic of the thread.
        let _ = thread.join();
    }
}

impl Requests {
    /// Waits for a request; `None` at the end.
    fn next(&self) -> Option<Gid> {
        let mut state = self.state.lock();
        while state.wanted.is_empty() && !state.stops {
            self.changed.wait(&mut state);
        }
        if state.stops { None } else { Some(state.wanted.remove(0)) }
    }
}
