//! Listening socket of an HCA: a control thread accepts links and detects hang-ups.
//!
//! Abstract sockets have no permissions and public names. Three checks protect a link:
//! - Both ends belong to the same user (`SO_PEERCRED`), even if one is root.
//! - The socket's name is a hash of the GID, and the greeting carries the GID itself: only peers that know the address
//!   can connect.
//! - The process that claims a GID must serve the socket of that GID.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::bell::Bell;
use super::fds;
use super::ring::{RING_BYTES, RxRing, TxRing};
use super::span::Spans;
use gdsync_device::Gid;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, user};

/// First bytes of a greeting: protocol and version.
const MAGIC: &[u8; 8] = b"gdswire4";
/// Bytes of a greeting: magic, GID of the receiver, GID of the sender.
const GREETING: usize = 40;
/// Bytes of the shared memory file: the rings of both directions.
const FILE: usize = 2 * RING_SPAN;
/// Bytes of a ring, rounded to pages.
const RING_SPAN: usize = RING_BYTES.next_multiple_of(4096);
/// Handshake errors are only logged or formatted.
type Handshake<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// Maximum connections before their greeting; the oldest is closed for a new one.
const MAX_STRANGERS: usize = 64;
/// Pause of the listener after accept fails, as when descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Pause between attempts to connect to a full backlog.
const CONNECT_PAUSE: Duration = Duration::from_millis(2);

/// This side's ends of a link.
#[derive(Debug)]
pub(crate) struct LinkEnds {
    pub(crate) peer: Gid,
    pub(crate) tx: TxRing,
    pub(crate) rx: RxRing,
    /// Notifies the peer.
    pub(crate) bell: Bell,
    pub(crate) line: Line,
}

/// The link's socket. Its hang-up reports the death of the peer; dropping it closes the link.
#[derive(Debug)]
pub(crate) struct Line {
    alive: Arc<AtomicBool>,
    stream: Option<UnixStream>,
}

impl Line {
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// PID of the peer, if visible and of the same user. A process of another user may since have executed another
    /// program, whose memory root must not read.
    pub(crate) fn pid(&self) -> Option<libc::pid_t> {
        let Some(stream) = &self.stream else { return libc::pid_t::try_from(std::process::id()).ok() };
        fds::peer(stream).ok().filter(|peer| peer.pid > 0 && peer.uid == user()).map(|peer| peer.pid)
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
    /// Event fd that makes the control thread read `watched` and `stop` again.
    poke: OwnedFd,
    stop: AtomicBool,
    /// Links whose hang-up the control thread polls for.
    watched: Mutex<HashMap<u64, (UnixStream, Arc<AtomicBool>)>>,
    next: AtomicU64,
    /// Mappings of the links' rings.
    spans: Spans,
    accepted: Mutex<Vec<LinkEnds>>,
    has_accepted: AtomicBool,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({})", self.shared.gid)
    }
}

impl Port {
    /// Opens the port. `bell` is notified when a link opens or closes.
    pub(crate) fn open(gid: Gid, bell: Bell) -> Result<Self> {
        let fix = "raise the limit of open files (ulimit -n)";
        let listener = SocketAddr::from_abstract_name(name(gid))
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| Error::os("bind of an abstract Unix socket", e, fix))?;
        // SAFETY: no pointers are passed.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(Error::last_os("eventfd", fix));
        }
        // SAFETY: `eventfd` returned this descriptor; nothing else owns it.
        let poke = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
        let shared = Arc::new(Shared {
            gid,
            bell,
            poke,
            stop: AtomicBool::new(false),
            watched: Mutex::default(),
            next: AtomicU64::new(0),
            spans: Spans::default(),
            accepted: Mutex::default(),
            has_accepted: AtomicBool::new(false),
        });
        let control = Control { shared: shared.clone(), listener, strangers: Vec::new(), paused: None };
        let control = std::thread::Builder::new()
            .name("gdsync-port".into())
            .spawn(move || control.run())
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, control: Some(control) })
    }

    /// Connects to the open port of the HCA `peer`.
    pub(crate) fn connect(&self, peer: Gid, timeout: Duration) -> Result<LinkEnds> {
        let deadline = Instant::now() + timeout;
        let failed = |why: String| Error::Peer { peer: peer.to_string(), why };
        let stream = loop {
            match try_connect(peer) {
                Ok(stream) => break stream,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        let why = "its process accepts no connections: it is stopped, or its backlog is full; \
                                   resume it (kill -CONT), or end the process that fills the backlog";
                        return Err(failed(why.to_owned()));
                    }
                    std::thread::sleep(CONNECT_PAUSE);
                }
                Err(e) => {
                    return Err(failed(format!(
                        "no process of this host and network namespace serves this GID ({e}); start it first"
                    )));
                }
            }
        };
        let answer = greet(&stream, peer, &self.shared, deadline);
        let (file, bell) = answer
            .map_err(|e| failed(format!("the handshake failed ({e}); use the same version on both sides")))?;
        self.shared.link(peer, &file, 0, bell, stream)
    }

    /// The loopback link, over private memory.
    pub(crate) fn loopback(&self) -> Result<LinkEnds> {
        let memory = Memory::alloc(RING_BYTES)?;
        let line = Line { alive: Arc::new(AtomicBool::new(true)), stream: None };
        let (tx, rx) = (TxRing::new(memory.clone()), RxRing::new(memory));
        Ok(LinkEnds { peer: self.shared.gid, tx, rx, bell: self.shared.bell.clone(), line })
    }

    /// Whether peers connected since [`Port::take_accepted`].
    pub(crate) fn has_accepted(&self) -> bool {
        self.shared.has_accepted.load(Ordering::Acquire)
    }

    /// Links that peers opened.
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
            // The panic hook reported a panic there.
            let _ = control.join();
        }
    }
}

/// Name of a port's socket. The 64-bit hash matches 2^56 GIDs, so `/proc/net/unix` does not reveal the GID.
fn name(gid: Gid) -> String {
    let mut hasher = DefaultHasher::new();
    gid.0.hash(&mut hasher);
    format!("gdsync/{:016x}", hasher.finish())
}

/// Connects to a port without blocking; `WouldBlock` if its backlog is full.
fn try_connect(gid: Gid) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name(gid).as_bytes())?)?;
    Ok(UnixStream::from(socket))
}

fn greeting(to: Gid, from: Gid) -> [u8; GREETING] {
    let mut out = [0; GREETING];
    out[..8].copy_from_slice(MAGIC);
    out[8..24].copy_from_slice(&to.0);
    out[24..].copy_from_slice(&from.0);
    out
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Checks that the peer runs as the same user.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let own = user();
    match fds::peer(stream)?.uid {
        uid if uid == own => Ok(()),
        uid => Err(invalid(&format!(
            "the process at the other end belongs to user {uid}, this one to {own}; run both as the same user"
        ))),
    }
}

/// Checks that the peer serves the socket of the GID it claims.
fn check_claim(stream: &UnixStream, claimed: Gid) -> io::Result<()> {
    let claimant = fds::peer(stream)?;
    let owner = fds::peer(&try_connect(claimed)?)?;
    if (owner.pid, owner.uid) == (claimant.pid, claimant.uid) {
        return Ok(());
    }
    Err(invalid("the process at the other end claims the GID of another one"))
}

/// Sender's GID in a greeting to `own`.
fn read_greeting(bytes: &[u8], own: Gid) -> io::Result<Gid> {
    let bytes: &[u8; GREETING] = bytes.try_into().map_err(|_| invalid("not a greeting of this version"))?;
    let mut gids = bytes[8..].as_chunks::<16>().0.iter().map(|gid| Gid(*gid));
    match (bytes.starts_with(MAGIC), gids.next(), gids.next()) {
        (false, ..) => Err(invalid("not a greeting of this version")),
        (true, Some(to), Some(from)) if to == own => Ok(from),
        _ => Err(invalid("a greeting for another GID")),
    }
}

/// Connecting side of the handshake: creates and sends the rings, and receives the peer's event count.
fn greet(stream: &UnixStream, peer: Gid, shared: &Shared, deadline: Instant) -> Handshake<(OwnedFd, Bell)> {
    check_user(stream)?;
    stream.set_nonblocking(false)?;
    let file = gdsync_device::memfd(c"gdsync-link", FILE)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_write_timeout(Some(left))?;
    stream.set_read_timeout(Some(left))?;
    fds::send(stream, &greeting(peer, shared.gid), &[file.as_raw_fd(), shared.bell.fd().as_raw_fd()])?;
    let mut bytes = [0; GREETING];
    let (got, fds) = fds::receive(stream, &mut bytes)?;
    if read_greeting(&bytes[..got], shared.gid)? != peer {
        return Err(invalid("the answer comes from another GID").into());
    }
    let [bell] =
        <[OwnedFd; 1]>::try_from(fds).map_err(|_| invalid("the answer must carry one descriptor"))?;
    Ok((file, Bell::open(bell)?))
}

impl Shared {
    fn poke(&self) {
        let one = 1u64;
        // SAFETY: `one` lives on the stack and has 8 bytes.
        unsafe { libc::write(self.poke.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Creates this side's ends over the shared rings; `side` is 0 for the connecting side.
    fn link(
        &self,
        peer: Gid,
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
        self.watched.lock().insert(id, (copy, alive.clone()));
        self.poke();
        let tx = TxRing::of_link(&span, side * RING_SPAN)?;
        let rx = RxRing::of_link(&span, (1 - side) * RING_SPAN)?;
        Ok(LinkEnds { peer, tx, rx, bell, line: Line { alive, stream: Some(stream) } })
    }
}

/// The control thread. It blocks in `poll`.
struct Control {
    shared: Arc<Shared>,
    listener: UnixListener,
    strangers: Vec<UnixStream>,
    /// No connection is accepted before this time.
    paused: Option<Instant>,
}

impl Control {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let links: Vec<(u64, i32)> = self
                .shared
                .watched
                .lock()
                .iter()
                .map(|(id, (stream, _))| (*id, stream.as_raw_fd()))
                .collect();
            let fixed = [self.shared.poke.as_raw_fd(), self.listener.as_raw_fd()];
            let strangers = self.strangers.iter().map(AsRawFd::as_raw_fd);
            let mut polled: Vec<libc::pollfd> = fixed
                .into_iter()
                .chain(links.iter().map(|(_, fd)| *fd))
                .chain(strangers)
                .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
                .collect();
            let count = polled.len() as libc::nfds_t;
            self.paused = self.paused.filter(|until| Instant::now() < *until);
            let mut timeout = -1;
            if self.paused.is_some() {
                // `poll` ignores negative descriptors.
                polled[1].fd = -1;
                timeout = i32::try_from(ACCEPT_PAUSE.as_millis()).expect("a short pause");
            }
            // SAFETY: `polled` is valid for `count` entries.
            unsafe { libc::poll(polled.as_mut_ptr(), count, timeout) };
            let ready = |i: usize| polled[i].revents != 0;
            if ready(0) {
                let mut drained = 0u64;
                // SAFETY: `drained` lives on the stack and has 8 bytes.
                unsafe { libc::read(self.shared.poke.as_raw_fd(), (&raw mut drained).cast(), 8) };
            }
            let gone = links.iter().enumerate().filter(|(i, _)| ready(2 + i)).map(|(_, (id, _))| *id);
            self.bury(gone.collect());
            let first = 2 + links.len();
            for i in (0..self.strangers.len()).rev() {
                if ready(first + i) {
                    let stranger = self.strangers.swap_remove(i);
                    if let Err(error) = self.welcome(stranger) {
                        tracing::warn!(%error, "software HCA: handshake failed");
                    }
                }
            }
            if ready(1) {
                self.accept();
            }
        }
    }

    /// Handles hang-ups. Peers never send on an open link, so a readable socket is a closed one.
    fn bury(&self, gone: Vec<u64>) {
        for id in gone {
            let Some((_stream, alive)) = self.shared.watched.lock().remove(&id) else { continue };
            alive.store(false, Ordering::Release);
            self.shared.bell.ring_hard();
        }
    }

    fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!(%error, "software HCA: accept failed; trying again");
                        self.paused = Some(Instant::now() + ACCEPT_PAUSE);
                    }
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

    /// Accepting side of the handshake.
    fn welcome(&self, stream: UnixStream) -> Handshake<()> {
        let mut bytes = [0; GREETING];
        let (got, fds) = fds::receive(&stream, &mut bytes)?;
        if got == 0 {
            // The peer gave up, or only checked who serves this GID.
            return Ok(());
        }
        let peer = read_greeting(&bytes[..got], self.shared.gid)?;
        check_claim(&stream, peer)?;
        let [file, bell] =
            <[OwnedFd; 2]>::try_from(fds).map_err(|_| invalid("a greeting must carry two descriptors"))?;
        gdsync_device::check_memfd(&file, FILE)?;
        let bell = Bell::open(bell)?;
        fds::send(&stream, &greeting(peer, self.shared.gid), &[self.shared.bell.fd().as_raw_fd()])?;
        let ends = self.shared.link(peer, &file, 1, bell, stream)?;
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
