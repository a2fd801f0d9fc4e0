//! Where an HCA is reached: an abstract Unix socket named after its GID, and one thread that greets and buries peers.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::bell::Bell;
use super::fds;
use super::ring::{RING_BYTES, RxRing, TxRing};
use super::span::Spans;
use crate::error::{Error, Result};
use crate::hca::{Gid, secret};
use crate::memory::{Memory, Word64, user};

/// First bytes of a greeting: protocol and version.
const MAGIC: &[u8; 8] = b"gdswire3";
/// A greeting: magic, GID of the sender, the secret of its job or 0, its mark for this peer.
const GREETING: usize = 40;
/// Bytes of the file with the rings of both directions, and a page with the words of offers.
const FILE: usize = 2 * RING_SPAN + 4096;
/// A ring, rounded to pages.
const RING_SPAN: usize = RING_BYTES.next_multiple_of(4096);
/// The handshake's errors only go into messages.
type Handshake<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// Connections that have not greeted yet; the oldest goes when one more comes.
const MAX_STRANGERS: usize = 64;
/// How long the listener rests when there is no descriptor for a connection.
const REST: Duration = Duration::from_millis(100);

/// Both ends of a link, as one HCA holds them.
#[derive(Debug)]
pub(crate) struct LinkEnds {
    pub(crate) peer: Gid,
    pub(crate) tx: TxRing,
    pub(crate) rx: RxRing,
    /// Wakes the peer.
    pub(crate) bell: Bell,
    pub(crate) line: Line,
    /// Words for what this side offers the peer, and the peer this side; none in a link to itself.
    pub(crate) offers: Option<[Word64; 2]>,
}

/// The socket behind a link: it tells when the peer dies. Dropping it tells the peer that we left.
#[derive(Debug)]
pub(crate) struct Line {
    alive: Arc<AtomicBool>,
    stream: Option<UnixStream>,
}

impl Line {
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// The process at the other end, by its number here, if this process sees it.
    pub(crate) fn pid(&self) -> Option<libc::pid_t> {
        let Some(stream) = &self.stream else { return libc::pid_t::try_from(std::process::id()).ok() };
        fds::peer(stream).ok().filter(|peer| peer.pid > 0).map(|peer| peer.pid)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            // The control thread sees the hang-up and closes its copy.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The port of one HCA.
pub(crate) struct Port {
    shared: Arc<Shared>,
    control: Option<JoinHandle<()>>,
}

struct Shared {
    gid: Gid,
    bell: Bell,
    /// Wakes the control thread to look at `watched` and `stop` again.
    poke: OwnedFd,
    stop: AtomicBool,
    /// Links whose hang-up the control thread waits for.
    watched: Mutex<HashMap<u64, Watched>>,
    /// Draws the mark for each peer.
    marks: RandomState,
    next: AtomicU64,
    /// Where the rings of links are mapped.
    spans: Spans,
    accepted: Mutex<Vec<LinkEnds>>,
    has_accepted: AtomicBool,
}

/// A link as the control thread knows it.
struct Watched {
    stream: UnixStream,
    alive: Arc<AtomicBool>,
    peer: Gid,
    mark: u64,
}

/// What each side of a link tells the other. Anybody can read GIDs in `/proc/net/unix`: that a second link comes from the HCA
/// that has the first one is known by the mark, a random number that an HCA has for each peer and tells nobody else.
#[derive(Clone, Copy)]
struct Greeting {
    gid: Gid,
    secret: u64,
    mark: u64,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({})", self.shared.gid)
    }
}

impl Port {
    /// Opens the port. `bell` is rung when a link comes or goes.
    pub(crate) fn open(gid: Gid, bell: Bell) -> Result<Self> {
        let fix = "raise the limit of open files (ulimit -n)";
        secret::known()?;
        let listener = address(gid)
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| Error::os("bind of an abstract Unix socket", e, fix))?;
        // SAFETY: a plain call.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(Error::last_os("eventfd", fix));
        }
        // SAFETY: the descriptor is fresh and nobody else's.
        let poke = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
        let shared = Arc::new(Shared {
            gid,
            bell,
            poke,
            stop: AtomicBool::new(false),
            watched: Mutex::default(),
            marks: RandomState::new(),
            next: AtomicU64::new(0),
            spans: Spans::default(),
            accepted: Mutex::default(),
            has_accepted: AtomicBool::new(false),
        });
        let control = Control { shared: shared.clone(), listener, strangers: Vec::new(), rests: false };
        let control = std::thread::Builder::new()
            .name("gdsync-port".into())
            .spawn(move || control.run())
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, control: Some(control) })
    }

    /// Links to the HCA `peer`, which must have its port open.
    pub(crate) fn connect(&self, peer: Gid, timeout: Duration) -> Result<LinkEnds> {
        let deadline = Instant::now() + timeout;
        let failed = |why: String| Error::Peer { peer: peer.to_string(), why };
        let stream = fds::connect(&name(peer), deadline).map_err(|e| {
            failed(match e.kind() {
                io::ErrorKind::TimedOut => {
                    format!("its process has taken no connection for {timeout:?}; see whether it is stopped")
                }
                _ => format!(
                    "no process of this host and network namespace serves this GID ({e}); start it first"
                ),
            })
        })?;
        let (file, bell, mark) = greet(&stream, &self.shared, peer, deadline).map_err(|e| {
            failed(format!(
                "the handshake failed ({e}); use the same version and GDSYNC_JOB_TOKEN on both sides"
            ))
        })?;
        self.shared.link((peer, mark), &file, 0, bell, stream)
    }

    /// A link from the HCA to itself, over ordinary memory.
    pub(crate) fn loopback(&self) -> Result<LinkEnds> {
        let memory = Memory::alloc(RING_BYTES)?;
        let line = Line { alive: Arc::new(AtomicBool::new(true)), stream: None };
        let (tx, rx) = (TxRing::new(memory.clone()), RxRing::new(memory));
        Ok(LinkEnds { peer: self.shared.gid, tx, rx, bell: self.shared.bell.clone(), line, offers: None })
    }

    /// Whether peers have linked to us since [`Port::take_accepted`].
    pub(crate) fn has_accepted(&self) -> bool {
        self.shared.has_accepted.load(Ordering::Acquire)
    }

    /// The links that peers have made.
    pub(crate) fn take_accepted(&self) -> Vec<LinkEnds> {
        let mut accepted = self.shared.accepted.lock();
        self.shared.has_accepted.store(false, Ordering::Release);
        std::mem::take(&mut *accepted)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.poke();
        if let Some(control) = self.control.take() {
            // A panic there was reported by the panic hook; there is nobody to return it to.
            let _ = control.join();
        }
    }
}

fn name(gid: Gid) -> String {
    format!("gdsync/{gid}")
}

fn address(gid: Gid) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name(gid))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Abstract addresses have no permissions: whoever is at the other end must be the same user, also where one of them is root.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let (own, other) = (user(), fds::peer(stream)?.uid);
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    if own != other {
        return Err(invalid(&format!("the process at the other end belongs to user {other}")));
    }
    match is_anybody(own, &read("/proc/sys/kernel/overflowuid"), &read("/proc/self/uid_map")) {
        true => Err(invalid("this user namespace shows users without a number as this one: map the user")),
        false => Ok(()),
    }
}

/// Whether the number of a user may stand for others: all who have none in this user namespace are seen under the same.
fn is_anybody(user: libc::uid_t, overflow: &str, map: &str) -> bool {
    let overflow = overflow.trim().parse().unwrap_or(65_534);
    let has_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    user == overflow && !has_all
}

impl Greeting {
    fn to_bytes(self) -> [u8; GREETING] {
        let mut out = [0; GREETING];
        out[..8].copy_from_slice(MAGIC);
        out[8..24].copy_from_slice(&self.gid.0);
        out[24..32].copy_from_slice(&self.secret.to_ne_bytes());
        out[32..].copy_from_slice(&self.mark.to_ne_bytes());
        out
    }

    /// A peer's, of the same version and job.
    fn read(bytes: &[u8]) -> Handshake<Self> {
        let whole: &[u8; GREETING] =
            bytes.try_into().map_err(|_| format!("a greeting of {} bytes", bytes.len()))?;
        let (magic, rest) = whole.split_first_chunk::<8>().expect("40 bytes");
        let (gid, rest) = rest.split_first_chunk::<16>().expect("32 bytes");
        let ([secret, mark], []) = rest.as_chunks::<8>() else { return Err("not a greeting".into()) };
        let [secret, mark] = [secret, mark].map(|bytes| u64::from_ne_bytes(*bytes));
        if magic != MAGIC {
            return Err("not a greeting of this version".into());
        }
        if secret != own_secret()? {
            return Err("a greeting of another job".into());
        }
        Ok(Self { gid: Gid(*gid), secret, mark })
    }
}

fn own_secret() -> Result<u64> {
    Ok(secret::known()?.unwrap_or(0))
}

/// The connecting side of the handshake: makes the rings, sends them, and gets the peer's bell and mark.
fn greet(
    stream: &UnixStream,
    shared: &Shared,
    peer: Gid,
    deadline: Instant,
) -> Handshake<(OwnedFd, Bell, u64)> {
    check_user(stream)?;
    let file = fds::memfd(c"gdsync-link", FILE)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_write_timeout(Some(left))?;
    stream.set_read_timeout(Some(left))?;
    let greeting = shared.greeting(peer)?;
    fds::send(stream, &greeting.to_bytes(), &[file.as_raw_fd(), shared.bell.fd().as_raw_fd()])?;
    let mut bytes = [0; GREETING];
    let (got, fds) = fds::receive(stream, &mut bytes)?;
    let answer = Greeting::read(&bytes[..got])?;
    if answer.gid != peer {
        return Err("the answer of another HCA".into());
    }
    let [bell] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| invalid("the answer carries no bell"))?;
    Ok((file, Bell::open(bell)?, answer.mark))
}

impl Shared {
    fn poke(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from a live integer.
        unsafe { libc::write(self.poke.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// What this HCA tells a peer.
    fn greeting(&self, peer: Gid) -> Result<Greeting> {
        Ok(Greeting { gid: self.gid, secret: own_secret()?, mark: self.marks.hash_one(peer) })
    }

    /// Whether a greeting may be of the HCA that it names: not where the GID is ours, or that of a living link with another mark.
    fn is_credible(&self, greeting: &Greeting) -> bool {
        let watched = self.watched.lock();
        let marks = || watched.values().filter(|link| link.peer == greeting.gid).map(|link| link.mark);
        greeting.gid != self.gid && (marks().next().is_none() || marks().any(|mark| mark == greeting.mark))
    }

    /// Makes the ends of a link over the shared rings; `side` 0 is the one that connected.
    fn link(
        &self,
        (peer, mark): (Gid, u64),
        file: &OwnedFd,
        side: usize,
        bell: Bell,
        stream: UnixStream,
    ) -> Result<LinkEnds> {
        let span = self.spans.map(file.as_fd(), FILE)?;
        let alive = Arc::new(AtomicBool::new(true));
        let copy = stream
            .try_clone()
            .map_err(|e| Error::os("dup", e, "raise the limit of open files (ulimit -n)"))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.watched.lock().insert(id, Watched { stream: copy, alive: alive.clone(), peer, mark });
        self.poke();
        let tx = TxRing::of_link(&span, side * RING_SPAN)?;
        let rx = RxRing::of_link(&span, (1 - side) * RING_SPAN)?;
        // On lines that are not fetched together.
        let word = |side: usize| span.memory().word64(2 * RING_SPAN + side * 128);
        let offers = Some([word(side)?, word(1 - side)?]);
        Ok(LinkEnds { peer, tx, rx, bell, line: Line { alive, stream: Some(stream) }, offers })
    }
}

/// The control thread. It blocks in poll and uses no CPU between events.
struct Control {
    shared: Arc<Shared>,
    listener: UnixListener,
    strangers: Vec<UnixStream>,
    /// There was no descriptor for the last connection.
    rests: bool,
}

impl Control {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let links: Vec<(u64, i32)> =
                self.shared.watched.lock().iter().map(|(id, link)| (*id, link.stream.as_raw_fd())).collect();
            // The kernel passes over -1.
            let (listener, timeout) = match std::mem::take(&mut self.rests) {
                true => (-1, i32::try_from(REST.as_millis()).expect("a moment")),
                false => (self.listener.as_raw_fd(), -1),
            };
            let fixed = [self.shared.poke.as_raw_fd(), listener];
            let strangers = self.strangers.iter().map(AsRawFd::as_raw_fd);
            let mut polled: Vec<libc::pollfd> = fixed
                .into_iter()
                .chain(links.iter().map(|(_, fd)| *fd))
                .chain(strangers)
                .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
                .collect();
            let count = polled.len() as libc::nfds_t;
            // SAFETY: the array is valid for its length.
            unsafe { libc::poll(polled.as_mut_ptr(), count, timeout) };
            let ready = |i: usize| polled[i].revents != 0;
            if ready(0) {
                let mut drained = 0u64;
                // SAFETY: eight bytes are written to a live integer.
                unsafe { libc::read(self.shared.poke.as_raw_fd(), (&raw mut drained).cast(), 8) };
            }
            let gone = links.iter().enumerate().filter(|(i, _)| ready(2 + i)).map(|(_, (id, _))| *id);
            self.bury(gone.collect());
            let first = 2 + links.len();
            for i in (0..self.strangers.len()).rev() {
                if ready(first + i) {
                    let stranger = self.strangers.swap_remove(i);
                    if let Err(error) = self.welcome(stranger) {
                        tracing::warn!(%error, "software HCA: a connection that is no peer");
                    }
                }
            }
            if ready(1) {
                self.accept();
            }
        }
    }

    /// A peer says nothing more on its socket: whatever is readable is the end of it.
    fn bury(&self, gone: Vec<u64>) {
        for id in gone {
            let Some(link) = self.shared.watched.lock().remove(&id) else { continue };
            link.alive.store(false, Ordering::Release);
            self.shared.bell.ring_hard();
        }
    }

    fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    // Without a descriptor the connection stays where it is, and would wake this thread again at once.
                    self.rests = error.kind() != io::ErrorKind::WouldBlock;
                    return;
                }
            };
            if let Err(error) = check_user(&stream) {
                tracing::warn!(%error, "software HCA: refused a connection");
                continue;
            }
            if stream.set_nonblocking(true).is_ok() {
                if self.strangers.len() == MAX_STRANGERS {
                    self.strangers.remove(0);
                }
                self.strangers.push(stream);
            }
        }
    }

    /// The accepting side of the handshake.
    fn welcome(&self, stream: UnixStream) -> Handshake<()> {
        let mut bytes = [0; GREETING];
        let (got, fds) = fds::receive(&stream, &mut bytes)?;
        let greeting = Greeting::read(&bytes[..got])?;
        let Greeting { gid: peer, mark, .. } = greeting;
        if !self.shared.is_credible(&greeting) {
            return Err(format!("a process claims to be {peer}, which is linked already").into());
        }
        let [file, bell] =
            <[OwnedFd; 2]>::try_from(fds).map_err(|_| invalid("a greeting carries two files"))?;
        fds::check_memfd(&file, FILE)?;
        let bell = Bell::open(bell)?;
        let answer = self.shared.greeting(peer)?;
        fds::send(&stream, &answer.to_bytes(), &[self.shared.bell.fd().as_raw_fd()])?;
        let ends = self.shared.link((peer, mark), &file, 1, bell, stream)?;
        let mut accepted = self.shared.accepted.lock();
        accepted.push(ends);
        self.shared.has_accepted.store(true, Ordering::Release);
        drop(accepted);
        self.shared.bell.ring();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
