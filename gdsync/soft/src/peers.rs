//! Links for datagrams: made by a thread of their own, because the step must not wait for a handshake.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::links::Links;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::{Condvar, Gid};

/// Datagrams for a peer that did not answer are dropped this long before it is asked again.
const RETRY: Duration = Duration::from_millis(200);
/// Peers remembered.
const MAX: usize = 1024;

/// Peers that datagrams were sent to and no link leads to.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// When the last attempt failed; `None` while one is under way.
    attempts: BTreeMap<Gid, Option<Instant>>,
    requests: Arc<Requests>,
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
        match self.attempts.get(&peer) {
            Some(None) => return Reach::Soon,
            Some(Some(at)) if at.elapsed() < RETRY => return Reach::Never,
            _ => {}
        }
        if self.attempts.len() >= MAX {
            self.attempts.retain(|_, failed| failed.is_none());
        }
        if self.attempts.len() >= MAX {
            return Reach::Never;
        }
        self.attempts.insert(peer, None);
        self.requests.state.lock().wanted.push(peer);
        self.requests.changed.notify_one();
        Reach::Soon
    }

    /// What the thread that makes links is asked for.
    pub(crate) fn requests(&self) -> Arc<Requests> {
        self.requests.clone()
    }

    /// Notes that the attempt to make a link has ended.
    pub(crate) fn tried(&mut self, peer: Gid, has_link: bool) {
        if has_link {
            self.attempts.remove(&peer);
        } else {
            self.attempts.insert(peer, Some(Instant::now()));
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

/// The thread that makes links; joined on drop.
#[derive(Debug)]
pub(crate) struct Connector {
    fork_guard: ForkGuard,
    requests: Arc<Requests>,
    thread: Option<JoinHandle<()>>,
}

impl Connector {
    /// Starts the thread, which calls `connect` for each peer.
    pub(crate) fn start(
        requests: Arc<Requests>,
        fork_guard: ForkGuard,
        connect: impl Fn(Gid) + Send + 'static,
    ) -> Result<Self> {
        let own = requests.clone();
        let thread = std::thread::Builder::new()
            .name("gdsync-connect".into())
            .spawn(move || {
                while let Some(peer) = own.next() {
                    connect(peer);
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
