//! TCP links between software HCAs of any hosts: listener, greeting, death of a peer. Where [libfabric](super::fabric) carries the
//! packets, they only greet and tell the end of a peer.
//!
//! The listener is bound to one address of this host, which is the GID, and its port is the LID. A control thread accepts
//! connections and [greets](greeting); connections that have not proved the job's secret cost a descriptor and a hundred bytes
//! each, at most [`MAX_PENDING_GREETINGS`] of them, for at most [`PATIENCE`].
//!
//! The kernel reports the end of a peer's process at once, and that of its host or of the network after [`SILENCE`].
//!
//! Without a secret any process may become a peer: a port takes links of peers up to a half of the descriptors of the process.

mod address;
mod frames;
mod greeting;
mod sockets;

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::process::{Resource, getrlimit};

use self::greeting::{ANSWER, CROSSED, FULL, HELLO, Hello, NONCE, PROOF, WELCOME};
use super::fabric::Endpoint;
use super::{ACCEPT_PAUSE, ACCEPTS, Accepted, MAX_LINKS, MAX_PENDING_GREETINGS, Peer};
use crate::job;
use gdsync_device::error::{Error, Result};
use gdsync_device::{Gid, random};

pub use address::{Interface, interfaces, tcp_address};
pub(super) use frames::{Connection, FRAME, MAX_BODY};
pub(crate) use frames::{FarEnds, FarRx, FarTx, Frame};
pub(super) use greeting::Offer;
pub(crate) use sockets::Sockets;

/// What [`Provider::wire`](gdsync_device::Provider::wire) says of a software HCA over TCP.
pub const TCP: &str = "TCP";
/// Name of the control thread.
const THREAD: &str = "gdsync-tcp";
/// How long a greeting may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// A peer whose system acknowledges nothing for this long is gone. Longer than a link that is down for 2 s: TCP repeats after 0.2,
/// 0.6, 1.4 and 3 s.
pub(super) const SILENCE: Duration = Duration::from_millis(3500);
/// Without traffic, the peer's system is asked this often.
const PROBE: Duration = Duration::from_secs(1);
/// Pause before a connection that was closed in the greeting is tried again.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Tries, where the peer closes connections in the greeting.
const CONNECT_TRIES: u32 = 5;

/// Why a peer is refused that is one too many.
const FULL_TEXT: &str = "it has as many links as it takes: at most half as many as it may have open files, and half of those with one \
                         address; raise ulimit -n there, or keep strangers out by GDSYNC_JOB_TOKEN";

/// The listener of one HCA.
pub(crate) struct TcpPort {
    shared: Arc<Shared>,
    control: Option<JoinHandle<()>>,
}

struct Shared {
    own: Peer,
    sockets: Arc<Sockets>,
    /// Event fd that makes the control thread read `stop` again.
    wake_fd: OwnedFd,
    stop: AtomicBool,
    /// The control thread has panicked.
    failed: AtomicBool,
    accepted: Accepted<FarEnds>,
    connections: Mutex<Connections>,
}

/// The connections of a port. Two ports have one, whichever connects.
struct Connections {
    links: Vec<(Peer, Weak<Connection>)>,
    /// Those that this side connects to.
    dialed: Vec<Peer>,
    /// With this many, none of peers is taken; none of an address that has half of them.
    most: usize,
}

impl Connections {
    fn has(&mut self, peer: Peer) -> bool {
        self.links.retain(|(_, connection)| connection.strong_count() > 0);
        let lives = |link: &Weak<Connection>| link.upgrade().is_some_and(|link| link.is_alive());
        self.links.iter().any(|(to, link)| *to == peer && lives(link))
    }

    /// Whether the port `own` takes a connection of `peer`. If both connect at once, that of the smaller address stays.
    fn verdict(&mut self, peer: Peer, own: Peer) -> [u8; 1] {
        if self.has(peer) || own < peer && self.dialed.contains(&peer) {
            return CROSSED;
        }
        let of_address = self.links.iter().filter(|(to, _)| to.gid == peer.gid).count();
        let is_full = self.links.len() >= self.most || of_address >= self.most / 2;
        if is_full { FULL } else { WELCOME }
    }

    fn add(&mut self, made: FarEnds) -> FarEnds {
        self.links.push((made.peer, Arc::downgrade(&made.tx.connection)));
        made
    }
}

impl fmt::Debug for TcpPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpPort({})", self.shared.own)
    }
}

impl TcpPort {
    /// Listens at this address, on a port that the system chooses. An endpoint of libfabric may carry the packets.
    ///
    /// # Errors
    /// [`Error::Sys`] if the address is not one of this host, or descriptors or threads run out.
    pub(crate) fn open(address: IpAddr, endpoint: Option<Arc<Endpoint>>) -> Result<Self> {
        job::current()?;
        let listener = TcpListener::bind((address, 0))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| Error::os("bind of a TCP socket", e, "name an address of this host: tcp:ADDRESS"))?;
        let local = listener
            .local_addr()
            .map_err(|e| Error::os("getsockname", e, "report this: a bound socket has an address"))?;
        let descriptors = getrlimit(Resource::Nofile).current.and_then(|most| usize::try_from(most).ok());
        let most = descriptors.map_or(MAX_LINKS, |most| MAX_LINKS.min(most / 2));
        let shared = Arc::new(Shared {
            own: Peer::at(local),
            sockets: Arc::new(Sockets::new(endpoint)?),
            wake_fd: gdsync_device::eventfd()?,
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            accepted: Accepted::default(),
            connections: Mutex::new(Connections { links: Vec::new(), dialed: Vec::new(), most }),
        });
        let control = Control { shared: shared.clone(), listener, pending: Vec::new(), paused: None };
        let control = std::thread::Builder::new()
            .name(THREAD.into())
            .spawn(move || control.run_guarded())
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, control: Some(control) })
    }

    /// The address of the HCA.
    pub(crate) fn own(&self) -> Peer {
        self.shared.own
    }

    /// The sockets of its links.
    pub(crate) fn sockets(&self) -> &Arc<Sockets> {
        &self.shared.sockets
    }

    /// Connects to the HCA `peer`. Returns `None` if a link to it exists, or its own connection will be the link.
    ///
    /// # Errors
    /// [`Error::Peer`] if it does not answer, or is of another job; [`Error::Panicked`].
    pub(crate) fn connect(&self, peer: Peer, timeout: Duration) -> Result<Option<FarEnds>> {
        if self.shared.failed.load(Ordering::Acquire) {
            return Err(Error::Panicked { thread: THREAD });
        }
        let mut connections = self.shared.connections.lock();
        if connections.has(peer) {
            return Ok(None);
        }
        connections.dialed.push(peer);
        drop(connections);
        let made = self.keep_connecting(peer, timeout);
        let mut connections = self.shared.connections.lock();
        let at = connections.dialed.iter().position(|dialed| *dialed == peer).expect("added above");
        connections.dialed.swap_remove(at);
        Ok(made?.map(|made| connections.add(made)))
    }

    fn keep_connecting(&self, peer: Peer, timeout: Duration) -> Result<Option<FarEnds>> {
        let deadline = Instant::now() + timeout;
        let mut tries = 1;
        loop {
            match self.try_connect(peer, deadline) {
                Ok(made) => return Ok(made),
                // Strangers may have pushed this side out.
                Err(why) if why.is_closed() && tries < CONNECT_TRIES && Instant::now() < deadline => {
                    tries += 1;
                    std::thread::sleep(CONNECT_PAUSE);
                }
                Err(why) => return Err(Error::Peer { peer: peer.to_string(), why: why.to_string() }),
            }
        }
    }

    fn try_connect(&self, peer: Peer, deadline: Instant) -> std::result::Result<Option<FarEnds>, Failure> {
        let stream = dial(self.shared.own.address().ip(), peer.address(), deadline).map_err(Failure::Dial)?;
        let greet = Failure::Greeting;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_write_timeout(Some(left)).map_err(greet)?;
        let refused = |error: Error| Failure::Refused(error.to_string());
        let (secret, nonce) = (secret().map_err(refused)?, random().map_err(refused)?);
        let offer = self.shared.offer().map_err(refused)?;
        let connection = Connection::new(stream, self.shared.sockets.clone());
        let mut stream = &connection.stream;
        let hello = Hello { to: peer, from: self.shared.own, nonce, offer: offer.clone() }.to_bytes();
        stream.write_all(&hello).map_err(greet)?;
        let mut answer = [0; ANSWER];
        read_until(stream, &mut answer, deadline).map_err(greet)?;
        let checked = greeting::check_answer(secret, &hello, &answer);
        let (proof, theirs) = checked.map_err(|why| Failure::Refused(why.to_owned()))?;
        // Before the peer has the link: it may send at once.
        let made = self.shared.make(peer, &connection, &offer, &theirs).map_err(Failure::Refused)?;
        stream.write_all(&proof).map_err(greet)?;
        // The peer has the link when this side begins to use it, even if this side ends at once.
        let mut verdict = [0];
        read_until(stream, &mut verdict, deadline).map_err(greet)?;
        match verdict {
            WELCOME => {}
            CROSSED => return Ok(None),
            FULL => return Err(Failure::Refused(FULL_TEXT.to_owned())),
            _ => {
                return Err(Failure::Refused(
                    "it ends the greeting as no software HCA of this version does".into(),
                ));
            }
        }
        prepare(stream).map_err(greet)?;
        Ok(Some(made))
    }

    /// Closes all links, and makes no more, after a panic.
    pub(crate) fn close(&self) {
        self.shared.close();
    }

    /// Whether peers connected since [`TcpPort::take_accepted`].
    pub(crate) fn has_accepted(&self) -> bool {
        self.shared.accepted.any()
    }

    /// Links that peers opened.
    pub(crate) fn take_accepted(&self) -> Vec<FarEnds> {
        self.shared.accepted.take()
    }
}

impl Drop for TcpPort {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        gdsync_device::signal_eventfd(&self.shared.wake_fd);
        if let Some(control) = self.control.take() {
            // The panic hook reported a panic there.
            let _ = control.join();
        }
    }
}

/// Why a connection was not made.
#[derive(Debug)]
enum Failure {
    Dial(io::Error),
    Greeting(io::Error),
    Refused(String),
}

impl Failure {
    /// The peer closed the connection in the greeting.
    fn is_closed(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        matches!(self, Self::Greeting(e) if matches!(e.kind(), BrokenPipe | ConnectionReset | UnexpectedEof))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dial(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                write!(f, "no process serves this address ({error}); start it first")
            }
            Self::Dial(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                write!(
                    f,
                    "this process has no descriptor left for it ({error}); raise the limit of open files (ulimit -n)"
                )
            }
            Self::Dial(error) => write!(
                f,
                "its host cannot be reached over TCP ({error}); check route and firewall: all ports between the hosts of a job must \
                 be open, or name another address of this host: GDSYNC_DEVICE=tcp:ADDRESS"
            ),
            Self::Greeting(error) => write!(
                f,
                "the greeting failed ({error}); use the same version and GDSYNC_JOB_TOKEN in both processes, without NAT between \
                 them"
            ),
            Self::Refused(why) => f.write_str(why),
        }
    }
}

/// The secret in greetings; 0 if there is none.
fn secret() -> Result<u64> {
    Ok(job::current()?.unwrap_or(0))
}

/// Connects from the address `from`, which is how the peer knows this HCA.
fn dial(from: IpAddr, to: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
    match rustix::net::connect(&socket, &to) {
        Err(rustix::io::Errno::INPROGRESS) => {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
            let ready = loop {
                match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                    Err(rustix::io::Errno::INTR) if Instant::now() < deadline => {}
                    done => break done?,
                }
            };
            if ready == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            sockopt::socket_error(&socket)??;
        }
        done => done?,
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Reads all of it until the deadline: a timeout of a socket is that of one byte.
fn read_until(mut stream: &TcpStream, mut to: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !to.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(to) {
            _ if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => to = &mut to[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Prepares the socket of a link: small packets leave at once, and a silent peer is noticed.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE)?;
    sockopt::set_tcp_keepintvl(stream, PROBE)?;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(SILENCE.as_millis()).expect("a few seconds"))?;
    Ok(())
}

impl Shared {
    /// What this side says of a new link.
    fn offer(&self) -> Result<Offer> {
        match self.sockets.endpoint() {
            Some(endpoint) => endpoint.offer(),
            None => Ok(Offer { carrier: TCP.into(), ..Offer::default() }),
        }
    }

    /// Makes the link that both sides have made their offers for.
    ///
    /// # Errors
    /// The text says why not.
    fn make(
        &self,
        peer: Peer,
        connection: &Arc<Connection>,
        own: &Offer,
        theirs: &Offer,
    ) -> std::result::Result<FarEnds, String> {
        if own.carrier != theirs.carrier {
            return Err(format!(
                "its packets are carried by {}, those of this process by {}; open the same device in both, with one version of libfabric",
                theirs.carrier, own.carrier
            ));
        }
        let link = |endpoint: &Arc<Endpoint>| endpoint.connect(own, theirs, connection.clone());
        Ok(FarEnds::new(peer, connection, self.sockets.endpoint().map(link).transpose()?))
    }

    fn close(&self) {
        self.failed.store(true, Ordering::Release);
        let connections = self.connections.lock();
        connections.links.iter().filter_map(|(_, link)| link.upgrade()).for_each(|link| link.close());
        self.sockets.notify();
    }
}

/// The control thread. It blocks in `poll`.
struct Control {
    shared: Arc<Shared>,
    listener: TcpListener,
    /// Connections in their greeting, the oldest first.
    pending: Vec<Greeting>,
    /// No connection is accepted before this time.
    paused: Option<Instant>,
}

/// The greeting of an accepted connection.
struct Greeting {
    stream: TcpStream,
    from: Gid,
    until: Instant,
    bytes: [u8; HELLO],
    got: usize,
    /// The hello, its bytes, and the nonce and offer of the answer.
    answered: Option<(Hello, [u8; HELLO], [u8; NONCE], Offer)>,
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
            let ready = self.wait();
            let now = Instant::now();
            if ready[0] {
                gdsync_device::clear_eventfd(&self.shared.wake_fd);
            }
            for i in (0..self.pending.len()).rev() {
                if !ready[2 + i] && now < self.pending[i].until {
                    continue;
                }
                let done = if ready[2 + i] {
                    self.pending[i].advance(&self.shared)
                } else {
                    Err("it took too long".into())
                };
                match done {
                    Ok(None) => {}
                    Ok(Some((hello, own))) => {
                        let greeting = self.pending.remove(i);
                        self.accepted(&hello, &own, greeting.stream);
                    }
                    Err(why) => {
                        let greeting = self.pending.remove(i);
                        let from = greeting.from;
                        tracing::info!(?from, why, "software HCA: closed a connection in its greeting");
                    }
                }
            }
            if ready[1] {
                self.accept();
            }
        }
    }

    /// Waits. Returns what is ready: the event fd, the listener, and each greeting.
    fn wait(&mut self) -> Vec<bool> {
        self.paused = self.paused.filter(|until| Instant::now() < *until);
        let listens = if self.paused.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut fds =
            vec![PollFd::new(&self.shared.wake_fd, PollFlags::IN), PollFd::new(&self.listener, listens)];
        fds.extend(self.pending.iter().map(|greeting| PollFd::new(&greeting.stream, PollFlags::IN)));
        let ends = self.pending.iter().map(|greeting| greeting.until).chain(self.paused);
        let timeout = ends.min().map(|end| end.saturating_duration_since(Instant::now()));
        // After an error, as an interruption, nothing is ready.
        let _ = poll(&mut fds, timeout.and_then(|left| Timespec::try_from(left).ok()).as_ref());
        fds.iter().map(|fd| !fd.revents().is_empty()).collect()
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!(%error, "software HCA: accept failed; trying again");
                        self.paused = Some(Instant::now() + ACCEPT_PAUSE);
                    }
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.pending.len() == MAX_PENDING_GREETINGS {
                // The oldest of the address that has most: a flood pushes out its own.
                let of = |i: &usize| self.pending.iter().filter(|g| g.from == self.pending[*i].from).count();
                let oldest = (0..self.pending.len()).rev().max_by_key(of).expect("it is full");
                self.pending.remove(oldest);
            }
            let (from, until) = (Peer::at(from).gid, Instant::now() + PATIENCE);
            self.pending.push(Greeting { stream, from, until, bytes: [0; HELLO], got: 0, answered: None });
        }
    }

    /// Takes over the connection of a peer.
    fn accepted(&self, hello: &Hello, own: &Offer, stream: TcpStream) {
        let (shared, peer) = (&self.shared, hello.from);
        let connection = Connection::new(stream, shared.sockets.clone());
        let prepared = prepare(&connection.stream).map_err(|error| error.to_string());
        let made = match prepared.and_then(|()| shared.make(peer, &connection, own, &hello.offer)) {
            Ok(made) => made,
            Err(why) => {
                tracing::warn!(why, %peer, "software HCA: a link was not accepted");
                return;
            }
        };
        // Consumes this handle of the connection: the link then has the only one, and the port sees when the link ends.
        let welcome = move || {
            let mut connections = shared.connections.lock();
            let verdict = connections.verdict(peer, shared.own);
            // Before the link is taken, so that no packet leaves before. An empty socket takes it.
            let is_told = (&connection.stream).write(&verdict).is_ok();
            (verdict == WELCOME && is_told).then(|| connections.add(made))
        };
        if shared.accepted.add(welcome) {
            shared.sockets.notify();
        }
    }
}

impl Greeting {
    /// Reads what has arrived, and no byte behind the greeting. Returns both sides' offers once the peer has proved the secret.
    ///
    /// # Errors
    /// Why the connection is to be closed.
    fn advance(&mut self, shared: &Shared) -> std::result::Result<Option<(Hello, Offer)>, String> {
        let wanted = if self.answered.is_none() { HELLO } else { PROOF };
        match (&self.stream).read(&mut self.bytes[self.got..wanted]) {
            Ok(0) => return Err("it was closed".into()),
            Ok(count) => self.got += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error.to_string()),
        }
        if self.got < wanted {
            return Ok(None);
        }
        let text = |error: Error| error.to_string();
        let secret = secret().map_err(text)?;
        if let Some((hello, bytes, nonce, own)) = &self.answered {
            let proof = self.bytes.first_chunk().expect("a hello is longer than a proof");
            return match greeting::is_proof(secret, bytes, nonce, proof) {
                true => Ok(Some((hello.clone(), own.clone()))),
                false => Err("it has another GDSYNC_JOB_TOKEN".into()),
            };
        }
        let hello = Hello::read(&self.bytes, shared.own, self.from)?;
        let (nonce, own) = (random().map_err(text)?, shared.offer().map_err(text)?);
        let answer = greeting::answer(secret, &self.bytes, &nonce, &own);
        // An empty socket takes it as a whole.
        if (&self.stream).write(&answer).map_err(|error| error.to_string())? != answer.len() {
            return Err("its socket is full".into());
        }
        (self.answered, self.got) = (Some((hello, self.bytes, nonce, own)), 0);
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
