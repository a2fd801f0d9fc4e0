//! Listening socket of an HCA: a control thread accepts links and detects hang-ups.
//!
//! Abstract sockets have no permissions and public names. Four checks protect a link:
//! - Both ends belong to the same user (`SO_PEERCRED`), even if one is root.
//! - The socket's name is a hash of the GID, and the greeting carries the GID itself: only peers that know the address
//!   can connect.
//! - The process that claims a GID must serve the socket of that GID.
//! - Both ends have the same job secret, or none.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{IoSlice, IoSliceMut, Write as _};
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use parking_lot::Mutex;
use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
};

use super::ring::{MappingPool, RING_BYTES, RxHints, RxRing, TxRing};
use super::{ACCEPT_PAUSE, ACCEPTS, Accepted, Event, EventCount, MAX_LINKS, MAX_PENDING_GREETINGS, Peer};
use crate::job;
use gdsync_device::Gid;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::user;

/// First bytes of a greeting: protocol and version.
const MAGIC: &[u8; 8] = b"gdswire6";
/// Bytes of a greeting: magic, GID of the receiver, GID of the sender, job secret (0 if none).
const GREETING: usize = 48;
/// Bytes of the shared memory file: the rings of both directions.
const FILE: usize = 2 * RING_SPAN;
/// Bytes of a ring, rounded to pages.
const RING_SPAN: usize = RING_BYTES.next_multiple_of(4096);
/// Handshake errors are only logged or formatted.
type Handshake<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// Name of the control thread.
const THREAD: &str = "gdsync-port";
/// Links with one GID with which no more of it are taken. Two are of use: both sides may connect at once.
const MAX_LINKS_OF_GID: usize = 64;
/// Answers a greeting in place of one: no more links are taken.
const FULL: &[u8] = b"full";
/// Pause between attempts to connect to a full backlog.
const CONNECT_PAUSE: Duration = Duration::from_millis(2);

/// This side's ends of a link.
#[derive(Debug)]
pub(crate) struct LinkEnds {
    pub(crate) peer: Peer,
    pub(crate) tx: TxRing,
    pub(crate) rx: RxRing,
    /// Notifies the peer.
    pub(crate) event: Event,
    pub(crate) socket: PeerSocket,
}

/// The link's socket. Its hang-up reports the death of the peer; dropping it closes the link.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    alive: Arc<AtomicBool>,
    stream: Option<UnixStream>,
}

impl PeerSocket {
    /// Of the link of an HCA to itself.
    pub(super) fn own() -> Self {
        Self { alive: Arc::new(AtomicBool::new(true)), stream: None }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// PID of the peer, if visible and of the same user. A process of another user may since have executed another
    /// program, whose memory root must not read.
    pub(crate) fn pid(&self) -> Option<libc::pid_t> {
        let Some(stream) = &self.stream else { return libc::pid_t::try_from(std::process::id()).ok() };
        peer_credentials(stream).ok().filter(|peer| peer.pid > 0 && peer.uid == user()).map(|peer| peer.pid)
    }
}

impl Drop for PeerSocket {
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
    event: EventCount,
    /// Event fd that makes the control thread read `watched` and `stop` again.
    wake_fd: OwnedFd,
    stop: AtomicBool,
    /// Whether processes of all jobs may connect, as to a card.
    any_job: bool,
    /// Whether a thread of the HCA has panicked. Set under the lock of `watched`.
    failed: AtomicBool,
    #[cfg(test)]
    panics: AtomicBool,
    /// Links whose hang-up the control thread polls for.
    watched: Mutex<HashMap<u64, Watched>>,
    next: AtomicU64,
    /// Mappings of the links' rings.
    mappings: MappingPool,
    accepted: Accepted<LinkEnds>,
}

/// A link whose hang-up the control thread polls for.
struct Watched {
    peer: Gid,
    stream: UnixStream,
    alive: Arc<AtomicBool>,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({})", self.shared.gid)
    }
}

impl Port {
    /// Opens the port. `event` is notified when a link opens or closes. `any_job`: processes of all jobs may connect.
    pub(crate) fn open(gid: Gid, event: EventCount, any_job: bool) -> Result<Self> {
        job::current()?;
        let fix = "raise the limit of open files (ulimit -n)";
        let listener = SocketAddr::from_abstract_name(name(gid))
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| Error::os("bind of an abstract Unix socket", e, fix))?;
        let wake_fd = gdsync_device::eventfd()?;
        let shared = Arc::new(Shared {
            gid,
            event,
            wake_fd,
            stop: AtomicBool::new(false),
            any_job,
            failed: AtomicBool::new(false),
            #[cfg(test)]
            panics: AtomicBool::new(false),
            watched: Mutex::default(),
            next: AtomicU64::new(0),
            mappings: MappingPool::default(),
            accepted: Accepted::default(),
        });
        let control =
            Control { shared: shared.clone(), listener, greeting_pending: Vec::new(), paused: None };
        let control = std::thread::Builder::new()
            .name(THREAD.into())
            .spawn(move || control.run_guarded())
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, control: Some(control) })
    }

    /// Connects to the open port of the HCA `peer`.
    pub(crate) fn connect(&self, peer: Gid, timeout: Duration) -> Result<LinkEnds> {
        if self.shared.failed.load(Ordering::Acquire) {
            return Err(Error::Panicked { thread: THREAD });
        }
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
        let response = handshake_connect(&stream, peer, &self.shared, deadline);
        let (file, event) = response.map_err(|e| failed(format!("the handshake failed: {e}")))?;
        self.shared.link(peer, &file, 0, event, stream)
    }

    /// The hints of its links.
    pub(crate) fn rx_hints(&self) -> RxHints {
        self.shared.mappings.rx_hints.clone()
    }

    /// Closes all links, and makes no more, after a panic.
    pub(crate) fn close(&self) {
        self.shared.close();
    }

    /// Whether peers connected since [`Port::take_accepted`].
    pub(crate) fn has_accepted(&self) -> bool {
        self.shared.accepted.any()
    }

    /// Links that peers opened.
    pub(crate) fn take_accepted(&self) -> Vec<LinkEnds> {
        self.shared.accepted.take()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake_control();
        if let Some(control) = self.control.take() {
            // The panic hook reported a panic there.
            let _ = control.join();
        }
    }
}

/// Name of a port's socket. The 64-bit hash matches 2^56 GIDs, so `/proc/net/unix` does not reveal the GID.
pub(crate) fn name(gid: Gid) -> String {
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

fn greeting(to: Gid, from: Gid, secret: u64) -> [u8; GREETING] {
    let mut out = [0; GREETING];
    out[..8].copy_from_slice(MAGIC);
    out[8..24].copy_from_slice(&to.0);
    out[24..40].copy_from_slice(&from.0);
    out[40..].copy_from_slice(&secret.to_be_bytes());
    out
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Checks that the peer runs as the same user.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let own = user();
    match peer_credentials(stream)?.uid {
        uid if uid == own && is_ambiguous(own, &fs::read_to_string("/proc/self/uid_map")?) => {
            Err(invalid("this user namespace does not map its own user, so all others look the same; map it"))
        }
        uid if uid == own => Ok(()),
        uid => Err(invalid(&format!(
            "the process at the other end belongs to user {uid}, this one to {own}; run both as the same user"
        ))),
    }
}

/// Whether `user` is the one that the kernel reports for every user without a number in this user namespace.
fn is_ambiguous(user: libc::uid_t, uid_map: &str) -> bool {
    const OVERFLOW: libc::uid_t = 65_534;
    user == OVERFLOW && !uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Checks that the peer serves the socket of the GID it claims.
fn check_claim(stream: &UnixStream, claimed: Gid) -> io::Result<()> {
    let claimant = peer_credentials(stream)?;
    let owner = peer_credentials(&try_connect(claimed)?)?;
    if (owner.pid, owner.uid) == (claimant.pid, claimant.uid) {
        return Ok(());
    }
    Err(invalid("the process at the other end claims the GID of another one"))
}

/// Sender's GID in a greeting to `own`.
fn read_greeting(bytes: &[u8], own: Gid, own_secret: u64) -> Handshake<Gid> {
    if bytes.is_empty() {
        return Err(invalid(
            "it refused the greeting; use the same version and GDSYNC_JOB_TOKEN in both processes",
        )
        .into());
    }
    if bytes == FULL {
        return Err(invalid("it has as many links as it takes, of this process or of all; end some").into());
    }
    let bytes: &[u8; GREETING] = bytes.try_into().map_err(|_| invalid("not a greeting of this version"))?;
    if !bytes.starts_with(MAGIC) {
        return Err(invalid("not a greeting of this version").into());
    }
    let (gids, secret) = (bytes[8..40].as_chunks::<16>().0, &bytes[40..]);
    if Gid(gids[0]) != own {
        return Err(invalid("a greeting for another GID").into());
    }
    if secret != own_secret.to_be_bytes() {
        return Err(invalid("the process at the other end has another GDSYNC_JOB_TOKEN").into());
    }
    Ok(Gid(gids[1]))
}

/// Connecting side of the handshake: creates and sends the rings, and receives the peer's event count.
fn handshake_connect(
    stream: &UnixStream,
    peer: Gid,
    shared: &Shared,
    deadline: Instant,
) -> Handshake<(OwnedFd, EventCount)> {
    check_user(stream)?;
    stream.set_nonblocking(false)?;
    let file = gdsync_device::memfd(c"gdsync-link", FILE)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_write_timeout(Some(left))?;
    stream.set_read_timeout(Some(left))?;
    send_with_fds(stream, &greeting(peer, shared.gid, shared.secret()?), &[file.as_fd(), shared.event.fd()])?;
    let mut bytes = [0; GREETING];
    let (got, fds) = receive_with_fds(stream, &mut bytes)?;
    if read_greeting(&bytes[..got], shared.gid, shared.secret()?)? != peer {
        return Err(invalid("the response comes from another GID").into());
    }
    let [event] =
        <[OwnedFd; 1]>::try_from(fds).map_err(|_| invalid("the response must carry one descriptor"))?;
    Ok((file, EventCount::open(event)?))
}

impl Shared {
    /// Secret in greetings; 0 if there is none.
    fn secret(&self) -> Result<u64> {
        Ok(if self.any_job { 0 } else { job::current()?.unwrap_or(0) })
    }

    /// Whether it takes a link of this peer.
    fn takes(&self, peer: Gid) -> bool {
        let watched = self.watched.lock();
        let of_peer = watched.values().filter(|link| link.peer == peer).count();
        watched.len() < MAX_LINKS && of_peer < MAX_LINKS_OF_GID
    }

    fn wake_control(&self) {
        gdsync_device::signal_eventfd(&self.wake_fd);
    }

    fn close(&self) {
        let mut watched = self.watched.lock();
        self.failed.store(true, Ordering::Release);
        for (_, link) in watched.drain() {
            let _ = link.stream.shutdown(std::net::Shutdown::Both);
            link.alive.store(false, Ordering::Release);
        }
        drop(watched);
        self.event.notify_always();
    }

    /// Creates this side's ends over the shared rings; `side` is 0 for the connecting side.
    fn link(
        &self,
        peer: Gid,
        file: &OwnedFd,
        side: usize,
        event: EventCount,
        stream: UnixStream,
    ) -> Result<LinkEnds> {
        let mapping = self.mappings.map(file.as_fd(), FILE)?;
        let alive = Arc::new(AtomicBool::new(true));
        let copy = stream
            .try_clone()
            .map_err(|e| Error::os("dup", e, "raise the limit of open files (ulimit -n)"))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut watched = self.watched.lock();
        if self.failed.load(Ordering::Acquire) {
            return Err(Error::Panicked { thread: THREAD });
        }
        watched.insert(id, Watched { peer, stream: copy, alive: alive.clone() });
        drop(watched);
        self.wake_control();
        let tx = TxRing::of_link(&mapping, side * RING_SPAN)?;
        let rx = RxRing::of_link(&mapping, (1 - side) * RING_SPAN)?;
        let (event, socket) = (Event::Memory(event), PeerSocket { alive, stream: Some(stream) });
        Ok(LinkEnds { peer: Peer::near(peer), tx, rx, event, socket })
    }
}

/// The control thread. It blocks in `poll`.
struct Control {
    shared: Arc<Shared>,
    listener: UnixListener,
    /// Connections before their greeting, the oldest first, which is closed for one too many.
    greeting_pending: Vec<UnixStream>,
    /// No connection is accepted before this time.
    paused: Option<Instant>,
}

impl Control {
    /// Runs until the port is dropped. A panic closes all links, and the port makes no more.
    fn run_guarded(mut self) {
        let shared = self.shared.clone();
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            shared.close();
        }
    }

    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            #[cfg(test)]
            assert!(!self.shared.panics.load(Ordering::Acquire), "for the test");
            let links: Vec<(u64, i32)> =
                self.shared.watched.lock().iter().map(|(id, link)| (*id, link.stream.as_raw_fd())).collect();
            let fixed = [self.shared.wake_fd.as_raw_fd(), self.listener.as_raw_fd()];
            let greeting_pending = self.greeting_pending.iter().map(AsRawFd::as_raw_fd);
            let mut polled: Vec<libc::pollfd> = fixed
                .into_iter()
                .chain(links.iter().map(|(_, fd)| *fd))
                .chain(greeting_pending)
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
                gdsync_device::clear_eventfd(&self.shared.wake_fd);
            }
            let gone = links.iter().enumerate().filter(|(i, _)| ready(2 + i)).map(|(_, (id, _))| *id);
            self.handle_peer_death(gone.collect());
            let first = 2 + links.len();
            for i in (0..self.greeting_pending.len()).rev() {
                if ready(first + i) {
                    let stream = self.greeting_pending.remove(i);
                    if let Err(error) = self.handshake_accept(stream) {
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
    fn handle_peer_death(&self, gone: Vec<u64>) {
        for id in gone {
            let Some(link) = self.shared.watched.lock().remove(&id) else { continue };
            link.alive.store(false, Ordering::Release);
            self.shared.event.notify_always();
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
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
                if self.greeting_pending.len() == MAX_PENDING_GREETINGS {
                    self.greeting_pending.remove(0);
                }
                self.greeting_pending.push(stream);
            }
        }
    }

    /// Accepting side of the handshake.
    fn handshake_accept(&self, stream: UnixStream) -> Handshake<()> {
        let mut bytes = [0; GREETING];
        let (got, fds) = receive_with_fds(&stream, &mut bytes)?;
        if got == 0 {
            // The peer gave up, or only checked who serves this GID.
            return Ok(());
        }
        let peer = read_greeting(&bytes[..got], self.shared.gid, self.shared.secret()?)?;
        check_claim(&stream, peer)?;
        let [file, event] =
            <[OwnedFd; 2]>::try_from(fds).map_err(|_| invalid("a greeting must carry two descriptors"))?;
        gdsync_device::check_memfd(&file, FILE)?;
        let event = EventCount::open(event)?;
        if !self.shared.takes(peer) {
            (&stream).write_all(FULL)?;
            return Err(invalid("one link too many").into());
        }
        let answer = greeting(peer, self.shared.gid, self.shared.secret()?);
        send_with_fds(&stream, &answer, &[self.shared.event.fd()])?;
        let ends = self.shared.link(peer, &file, 1, event, stream)?;
        self.shared.accepted.add(|| Some(ends));
        self.shared.event.notify();
        Ok(())
    }
}

/// Maximum descriptors per message.
const MAX_FDS: usize = 2;

/// PID and effective UID of the peer. The PID is 0 if not visible in this namespace.
fn peer_credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    // SAFETY: the structure is plain old data, for which zero bytes are valid.
    let mut cred: libc::ucred = unsafe { zeroed() };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("a small structure");
    let fd = stream.as_raw_fd();
    // SAFETY: `cred` and `len` are valid for writing and `len` says how much.
    let rc = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &raw mut len)
    };
    if rc == 0 { Ok(cred) } else { Err(io::Error::last_os_error()) }
}

/// Sends `bytes` with one or two descriptors.
fn send_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "it holds {MAX_FDS} descriptors");
    let mut send = || sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    let sent = retry_on_intr(&mut send)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one message and its descriptors. Fails if there are too many.
fn receive_with_fds(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    // With room to detect one too many.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // Stopping and continuing a process interrupts it, too.
    let got = retry_on_intr(|| {
        recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Err(invalid("too many descriptors"));
    }
    Ok((got.bytes, fds))
}

#[cfg(test)]
mod tests {
    //! Links between ports: handshake, hostile connections, death of a peer.

    use std::io::Read;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn port() -> (Port, Gid) {
        let gid = Gid::random().unwrap();
        (Port::open(gid, EventCount::create().unwrap(), false).unwrap(), gid)
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < TIMEOUT, "{what} did not happen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn accepted(port: &Port) -> LinkEnds {
        let mut found = Vec::new();
        until("a link", || {
            found.extend(port.take_accepted());
            !found.is_empty()
        });
        found.remove(0)
    }

    fn exchange(from: &mut LinkEnds, to: &mut LinkEnds, tag: u8) {
        assert!(from.tx.try_push(&[tag; 28], b"hello", &[]).unwrap());
        let record = to.rx.peek().unwrap().expect("what was pushed is there");
        let mut body = [0; 5];
        to.rx.read_body(&record, 0, &mut body).unwrap();
        assert_eq!((record.header, &body), ([tag; 28], b"hello"));
        to.rx.pop(record);
    }

    #[test]
    fn link_carries_records_both_ways_and_reports_hang_up() {
        let ((a, _), (b, b_gid)) = (port(), port());
        let mut near = a.connect(b_gid, TIMEOUT).unwrap();
        let mut far = accepted(&b);
        assert_eq!((near.peer.gid, far.peer.gid), (b_gid, a.shared.gid));
        exchange(&mut near, &mut far, 1);
        exchange(&mut far, &mut near, 2);
        drop(far);
        until("the end of the link", || !near.socket.is_alive());
        until("the control thread forgets it", || {
            b.shared.watched.lock().is_empty() && a.shared.watched.lock().is_empty()
        });
    }

    #[test]
    fn panic_of_the_control_thread_closes_links() {
        let ((a, a_gid), (b, b_gid)) = (port(), port());
        let near = a.connect(b_gid, TIMEOUT).unwrap();
        let far = accepted(&b);
        a.shared.panics.store(true, Ordering::Release);
        a.shared.wake_control();
        until("the end of this side", || !near.socket.is_alive());
        let error = a.connect(b_gid, TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::Panicked { thread: THREAD }), "{error}");
        drop(near);
        until("the end of the other side", || !far.socket.is_alive());
        assert!(b.connect(a_gid, Duration::from_millis(50)).is_err(), "nobody accepts");
    }

    #[test]
    fn both_sides_connect_at_once() {
        let ((a, a_gid), (b, b_gid)) = (port(), port());
        let mut near = a.connect(b_gid, TIMEOUT).unwrap();
        let mut other = b.connect(a_gid, TIMEOUT).unwrap();
        exchange(&mut near, &mut accepted(&b), 3);
        exchange(&mut other, &mut accepted(&a), 4);
    }

    #[test]
    fn connect_to_unknown_gid_names_the_reason() {
        let (a, _) = port();
        let error = a.connect(Gid([3; 16]), TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("0303:0303") && error.contains("start it first"), "{error}");
    }

    #[test]
    fn invalid_connections_neither_block_nor_break_the_port() {
        let (a, gid) = port();
        let call = || UnixStream::connect_addr(&SocketAddr::from_abstract_name(name(gid)).unwrap()).unwrap();
        let _silent: Vec<_> = (0..MAX_PENDING_GREETINGS + 8).map(|_| call()).collect();
        let closed = |mut stream: UnixStream| {
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_))
        };
        let (b, b_gid) = port();
        for bytes in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0; GREETING],
            &greeting(b_gid, gid, 0),
            &greeting(gid, b_gid, 0),
        ] {
            let mut stream = call();
            stream.write_all(bytes).unwrap();
            assert!(closed(stream), "garbage, a greeting for another GID, or one without descriptors");
        }
        let small = gdsync_device::memfd(c"small", 4096).unwrap();
        let stream = call();
        send_with_fds(&stream, &greeting(gid, b_gid, 0), &[small.as_fd(), small.as_fd()]).unwrap();
        assert!(closed(stream), "rings too small");
        // SAFETY: the name is a C string.
        let raw = unsafe { libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: `memfd_create` returned this descriptor; nothing else owns it.
        let unsealed: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
        std::fs::File::from(unsealed.try_clone().unwrap()).set_len(FILE as u64).unwrap();
        let stream = call();
        send_with_fds(&stream, &greeting(gid, b_gid, 0), &[unsealed.as_fd(), unsealed.as_fd()]).unwrap();
        assert!(closed(stream), "a file that could shrink");

        let mut near = b.connect(gid, TIMEOUT).unwrap();
        exchange(&mut near, &mut accepted(&a), 5);
    }

    /// Whether `gid` answers a connection that claims to come from `claimed`.
    fn is_let_in(gid: Gid, claimed: Gid) -> bool {
        let mut stream = try_connect(gid).unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let (file, event) = (gdsync_device::memfd(c"link", FILE).unwrap(), EventCount::create().unwrap());
        // Fails if the connection was closed at once.
        let _ = send_with_fds(&stream, &greeting(gid, claimed, 0), &[file.as_fd(), event.fd()]);
        matches!(stream.read(&mut [0; GREETING]), Ok(GREETING))
    }

    #[test]
    fn users_that_a_namespace_does_not_map_are_not_told_apart() {
        let all = "         0          0 4294967295\n";
        assert!(is_ambiguous(65_534, "0 1000 1\n") && is_ambiguous(65_534, ""));
        assert!(!is_ambiguous(65_534, all) && !is_ambiguous(1000, "0 1000 1\n"));
    }

    #[test]
    fn process_of_another_job_is_refused() {
        let (a, gid) = port();
        let mut child = child_of(gid);
        child
            .env("GDSYNC_JOB_TOKEN", "1")
            .env("RUST_BACKTRACE", "0")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success() && text.contains("GDSYNC_JOB_TOKEN"), "{text}");
        assert!(!a.has_accepted());
    }

    /// Child process of the next test, run as another user.
    #[test]
    fn child_of_another_user() {
        let Ok(gid) = std::env::var("GDSYNC_TEST_LINK_AS_ANOTHER_USER") else { return };
        let (_own, own) = port();
        std::process::exit(if is_let_in(gid.parse().unwrap(), own) { 1 } else { 42 });
    }

    #[test]
    fn process_of_another_user_is_refused_even_by_root() {
        let (_a, gid) = port();
        // By file descriptor, because the other user may lack access to the path.
        let mut child = Command::new("/proc/self/exe");
        child.args(["--exact", "wire::port::tests::child_of_another_user"]);
        child.env("GDSYNC_TEST_LINK_AS_ANOTHER_USER", gid.to_string()).stdout(Stdio::null());
        if user() != 0 {
            eprintln!("skipped: only root can start a process of another user");
            return;
        }
        assert_eq!(child.uid(12_345).gid(12_345).status().unwrap().code(), Some(42), "it was let in");
    }

    /// A process with a false GID would receive the messages of the true owner.
    #[test]
    fn gid_can_only_be_claimed_by_the_process_that_serves_it() {
        let (a, gid) = port();
        let claim = |claimed| is_let_in(gid, claimed);
        assert!(!claim(Gid::random().unwrap()), "nobody serves it");
        // Another process serves this GID and has linked itself.
        let mut child = child_of(gid).spawn().unwrap();
        let theirs = accepted(&a);
        assert!(!claim(theirs.peer.gid), "the process that serves it is another one");
        assert!(theirs.socket.is_alive(), "its link goes on");
        child.kill().unwrap();
        child.wait().unwrap();
        let (_b, b_gid) = port();
        assert!(claim(b_gid), "this process serves it");
    }

    #[test]
    fn socket_name_does_not_reveal_the_gid() {
        let gid = Gid::random().unwrap();
        assert!(!name(gid).contains(&gid.to_string()));
        assert_ne!(name(gid), name(Gid::random().unwrap()));
        assert_eq!(name(gid), name(gid));
    }

    #[test]
    fn full_backlog_fails_at_the_deadline() {
        let gid = Gid::random().unwrap();
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name(gid)).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _queued: Vec<_> = std::iter::from_fn(|| try_connect(gid).ok()).take(1 << 14).collect();
        let (a, _) = port();
        let error = a.connect(gid, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("accepts no connections"), "{error}");
    }

    /// Child process that `killed_process_is_noticed` kills.
    #[test]
    fn child_that_connects_and_waits() {
        let Ok(gid) = std::env::var("GDSYNC_TEST_CONNECT_TO") else { return };
        let (port, _) = port();
        let mut ends = port.connect(gid.parse().unwrap(), TIMEOUT).unwrap();
        assert!(ends.tx.try_push(&[7; 28], b"hello", &[]).unwrap());
        ends.event.notify();
        std::thread::sleep(TIMEOUT);
    }

    /// Child process of the next test, with a descriptor limit of 0.
    #[test]
    fn child_without_descriptors() {
        if std::env::var_os("GDSYNC_TEST_NO_DESCRIPTORS").is_none() {
            return;
        }
        let (port, gid) = port();
        let address = SocketAddr::from_abstract_name(format!("gdsync-test-spin-{gid}")).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let _pending = UnixStream::connect_addr(&listener.local_addr().unwrap()).unwrap();
        let shared = port.shared.clone();
        let mut control = Control { shared, listener, greeting_pending: Vec::new(), paused: None };
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the pointer is valid for one structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
        control.accept();
        assert!(control.paused.is_some(), "{gid}: accept would be retried at once");
        std::process::exit(42);
    }

    #[test]
    fn one_turn_accepts_few_connections() {
        let (port, gid) = port();
        let address = SocketAddr::from_abstract_name(format!("gdsync-test-flood-{gid}")).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let _flood: Vec<_> = (0..40).map(|_| UnixStream::connect_addr(&address).unwrap()).collect();
        let shared = port.shared.clone();
        let mut control = Control { shared, listener, greeting_pending: Vec::new(), paused: None };
        control.accept();
        assert!(!control.greeting_pending.is_empty());
        control.listener.accept().expect("the rest waits for the next turn");
    }

    #[test]
    fn a_process_has_bounded_links_to_another() {
        let ((a, gid), (b, _)) = (port(), port());
        let mut links = Vec::new();
        let error = loop {
            assert!(links.len() <= MAX_LINKS_OF_GID, "nothing limits it");
            match b.connect(gid, TIMEOUT) {
                Ok(link) => links.push(link),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error, Error::Peer { .. }) && error.to_string().contains("as many links"),
            "{error}"
        );
        drop((links, a.take_accepted()));
        until("the ends are seen", || a.shared.watched.lock().is_empty());
        b.connect(gid, TIMEOUT).unwrap();
    }

    #[test]
    fn accept_pauses_when_descriptors_run_out() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "wire::port::tests::child_without_descriptors"]);
        child.env("GDSYNC_TEST_NO_DESCRIPTORS", "1").stdout(Stdio::null());
        assert_eq!(child.status().unwrap().code(), Some(42));
    }

    fn child_of(gid: Gid) -> Command {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "wire::port::tests::child_that_connects_and_waits"]);
        child.env("GDSYNC_TEST_CONNECT_TO", gid.to_string()).stdout(Stdio::null());
        child
    }

    #[test]
    fn killed_process_is_noticed() {
        let (a, gid) = port();
        let mut child = child_of(gid).spawn().unwrap();
        let mut ends = accepted(&a);
        until("the child's record", || ends.rx.has_record());
        assert!(ends.socket.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        until("news of the death", || !ends.socket.is_alive());
        assert_eq!(ends.rx.peek().unwrap().unwrap().header, [7; 28], "what arrived before stays readable");
    }

    #[test]
    fn only_a_greeting_is_taken_for_one() {
        let [own, from] = [Gid([1; 16]), Gid([2; 16])];
        bolero::check!().with_type::<(bool, Vec<u8>)>().for_each(|(changes, bytes)| {
            let mut whole = greeting(own, from, 7).to_vec();
            if *changes {
                whole.truncate(GREETING.min(GREETING - 4 + bytes.len()));
                whole.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
            }
            let bytes = if *changes { &whole } else { bytes };
            match read_greeting(bytes, own, 7) {
                Ok(peer) => assert_eq!(bytes[..], greeting(own, peer, 7)),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        });
    }
}
