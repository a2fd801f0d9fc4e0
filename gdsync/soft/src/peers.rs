//! Links of a card: made by threads of their own, because the step must not wait for a handshake.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::links::{Links, OwnedPacket};
use crate::wire::Peer;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::{Condvar, Gid};

/// A peer that did not answer is not asked again for this long.
const RETRY: Duration = Duration::from_millis(200);
/// Datagrams copied for a link that is being made. They fit into its ring.
const MAX_WAITING: usize = 64;
/// How long more of them are held up, for the first link to a peer.
const WAIT: Duration = Duration::from_secs(1);
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
    waiting: Waiting,
}

/// Datagrams for a link that is being made, in order, each with its number for the fault plan.
pub(crate) type Waiting = Vec<(OwnedPacket, u64)>;

/// Where a datagram goes.
pub(crate) enum Reach<'a> {
    /// Over this link.
    Link(usize),
    /// Into the list of a link that is being made.
    Soon(&'a mut Waiting),
    /// The list is full, and the link may come soon.
    Full,
    /// Nowhere.
    Never,
}

impl Peers {
    /// How to reach a peer; asks for a link if there is none.
    pub(crate) fn reach(&mut self, peer: Gid, links: &Links) -> Reach<'_> {
        if let Some(link) = links.find(Peer::near(peer)) {
            return Reach::Link(link);
        }
        let last = self.attempts.get(&peer);
        if last.is_none_or(|last| !last.under_way && last.since.elapsed() >= RETRY) {
            let is_first = last.is_none();
            if self.attempts.len() >= MAX {
                self.attempts.retain(|_, attempt| attempt.under_way);
            }
            if self.attempts.values().filter(|attempt| attempt.under_way).count() >= MAX_ATTEMPTS {
                return Reach::Never;
            }
            let attempt = Attempt { since: Instant::now(), under_way: true, is_first, waiting: Vec::new() };
            self.attempts.insert(peer, attempt);
            self.requests.state.lock().wanted.push(peer);
            self.requests.changed.notify_one();
        }
        match self.attempts.get_mut(&peer).filter(|attempt| attempt.under_way) {
            Some(attempt) if attempt.waiting.len() < MAX_WAITING => Reach::Soon(&mut attempt.waiting),
            Some(attempt) if attempt.is_first && attempt.since.elapsed() < WAIT => Reach::Full,
            _ => Reach::Never,
        }
    }

    /// Notes an attempt that ends with [`Peers::tried`].
    #[cfg(test)]
    pub(crate) fn seek(&mut self, peer: Gid) {
        let attempt = Attempt { since: Instant::now(), under_way: true, is_first: true, waiting: Vec::new() };
        self.attempts.insert(peer, attempt);
    }

    /// Whether an attempt to reach this peer is under way.
    pub(crate) fn is_sought(&self, peer: Gid) -> bool {
        self.attempts.get(&peer).is_some_and(|attempt| attempt.under_way)
    }

    /// Takes the datagrams that wait for a link to this peer.
    pub(crate) fn take_waiting(&mut self, peer: Gid) -> Waiting {
        self.attempts.get_mut(&peer).map(|attempt| std::mem::take(&mut attempt.waiting)).unwrap_or_default()
    }

    /// What the thread that makes links is asked for.
    pub(crate) fn requests(&self) -> Arc<Requests> {
        self.requests.clone()
    }

    /// Notes that the attempt to make a link has ended. Datagrams that still wait for it are dropped.
    pub(crate) fn tried(&mut self, peer: Gid, has_link: bool) {
        if has_link {
            self.attempts.remove(&peer);
        } else if let Some(attempt) = self.attempts.get_mut(&peer) {
            (attempt.since, attempt.under_way) = (Instant::now(), false);
            attempt.waiting = Vec::new();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Header, PacketOp};

    fn put(peers: &mut Peers, peer: Gid) -> bool {
        let Reach::Soon(waiting) = peers.reach(peer, &Links::default()) else { return false };
        let header = Header::new(PacketOp::DATAGRAM, 1, 2, 3);
        waiting.push((OwnedPacket::copy(&header, &[], &[]).unwrap(), 0));
        true
    }

    #[test]
    fn datagrams_wait_as_long_as_the_attempt_for_their_peer() {
        let (mut peers, [silent, other]) = (Peers::default(), [Gid([1; 16]), Gid([2; 16])]);
        assert!((0..MAX_WAITING).all(|_| put(&mut peers, silent)) && !put(&mut peers, silent));
        assert!(put(&mut peers, other));
        for (since, waits) in [(Instant::now() + RETRY * 1000, true), (Instant::now() - WAIT, false)] {
            peers.attempts.get_mut(&silent).unwrap().since = since;
            assert_eq!(matches!(peers.reach(silent, &Links::default()), Reach::Full), waits);
        }
        assert_eq!(*peers.requests.state.lock().wanted, [silent, other]);
        peers.tried(silent, false);
        assert!(peers.take_waiting(silent).is_empty());
        peers.attempts.get_mut(&silent).unwrap().since = Instant::now() - RETRY;
        assert!((0..MAX_WAITING).all(|_| put(&mut peers, silent)), "it is asked again");
        assert!(matches!(peers.reach(silent, &Links::default()), Reach::Never), "it held up sends once");
        assert_eq!(peers.take_waiting(other).len(), 1);
        assert!(put(&mut peers, other), "it is under way");
        peers.tried(other, true);
        assert!(put(&mut peers, other), "its link has gone since");
        assert_eq!(*peers.requests.state.lock().wanted, [silent, other, silent, other]);
    }
}
