//! Connections of two processes that meet as they like: one listens, others connect to its address, each to a communicator of two.

use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::str;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::bootstrap::Bootstrap;
use super::connection::{Conn, FIX_FILES, FIX_NETWORK, Job, Kind, TICK, send_to_all, wait};
use super::environment::{Launch, Launcher, Root};
use super::rendezvous::{address, greeting, reject};
use crate::builder::CommunicatorBuilder;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// A process that others connect to ([`CommunicatorBuilder::connect_to`]), one after the other. Each pair is a communicator of its own:
/// the listener is rank 0, the other one rank 1.
///
/// ```no_run
/// # use std::time::Duration;
/// # use mp::{Communicator, launch::Listener};
/// # fn tell(address: &[u8]) {}
/// # fn told() -> Vec<u8> { Vec::new() }
/// # fn main() -> mp::Result<()> {
/// # let minute = Duration::from_secs(60);
/// let listener = Listener::bind(None)?;
/// tell(&listener.address()?); // by whatever the processes have
/// let comm = listener.accept(Communicator::builder().timeout(minute))?;
/// // In the other process:
/// let comm = Communicator::builder().timeout(minute).connect_to(&told())?;
/// # Ok(())
/// # }
/// ```
///
/// The address has a random number, which keeps strangers from taking the place of a peer by accident, not attackers out: use it on
/// networks you trust.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    token: u64,
    /// Connections without a hello, and their start.
    pending: Mutex<Vec<(Conn, Instant)>>,
    is_closed: Arc<AtomicBool>,
}

/// Most connections without a hello; for one too many the oldest is closed.
const MAX_PENDING: usize = 64;

/// The address of this host by which others reach it: that of its default route, or loopback where it has none.
pub(super) fn own_address() -> IpAddr {
    let route = || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        // Sends nothing. An address of documentation (RFC 5737).
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    };
    route().map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip())
}

/// A number that no other job has.
pub(super) fn new_token() -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::bootstrap_os("this rank", "has no random numbers", error.into(), "mount /dev/urandom")
    })
}

/// Rank `rank` of a job of `size` ranks, whose rank 0 listens at `root`.
pub(super) fn job(rank: usize, size: usize, root: SocketAddr, token: u64) -> Launch {
    let root = Root::At(root.to_string());
    Launch { rank, size, local_rank: 0, local_size: None, root, token, launcher: Launcher::Env }
}

impl Listener {
    /// Listens at an address of this host, at a port that is free: without one, at that of the default route.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the system refuses.
    pub fn bind(ip: Option<IpAddr>) -> Result<Self> {
        let failed =
            |error| Error::bootstrap_os("this process", "cannot listen", error, "name another address");
        let listener = TcpListener::bind((ip.unwrap_or_else(own_address), 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, token: new_token()?, pending: Mutex::default(), is_closed: Arc::default() })
    }

    /// What the others need to connect: at most 64 bytes.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the system does not tell it.
    pub fn address(&self) -> Result<Vec<u8>> {
        let at = address(&self.listener)?.to_string();
        Ok([&self.token.to_be_bytes(), at.as_bytes()].concat())
    }

    /// Ends [`Listener::accept`] in all threads, within a quarter of a second: it accepts no more process.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Waits until a process connects, and builds a communicator with it, for at most [`CommunicatorBuilder::timeout`]. Connections
    /// that say nothing hold up no other: at most 64 are kept, each for 5 s.
    ///
    /// # Errors
    /// [`Error::Deadline`] if none connects; [`Error::Closed`] if a thread closes the listener; [`Error::Bootstrap`] and [`Error::Device`] as [`CommunicatorBuilder::init_over`].
    pub fn accept(&self, builder: CommunicatorBuilder) -> Result<Communicator> {
        let deadline = Deadline::after(builder.0.timeout);
        let resolved = builder.resolve()?;
        let job = Job { size: 2, token: self.token };
        let conn = loop {
            if self.is_closed.load(Ordering::Relaxed) {
                return Err(Error::Closed { what: "the listener" });
            }
            if let Some(conn) = self.greeted(job) {
                break conn;
            }
            self.accept_one()?;
            if deadline.is_over() {
                let fix = "see that a process connects to the address of this listener";
                return Err(deadline.error("waiting for a connection", fix));
            }
            let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut fds = vec![poll(self.listener.as_raw_fd())];
            fds.extend(self.pending.lock().iter().map(|(conn, _)| poll(conn.fd())));
            wait(&mut fds, deadline.remaining().min(TICK))?;
        };
        let mut conns = vec![conn];
        let welcome = job.frame(Kind::Welcome, 0, &[]);
        send_to_all(&mut conns, &welcome, Kind::Welcome.name(), &deadline)
            .map_err(|failure| failure.error)?;
        let mut bootstrap = Bootstrap::new(0, job, conns);
        // Dropped with the return of this call: closing the listener later does not end the communicator.
        let is_closed = Arc::new(self.is_closed.clone());
        bootstrap.accepted_by = Arc::downgrade(&is_closed);
        builder.build(Box::new(bootstrap), resolved, deadline)
    }

    /// Accepts a connection if one is there. One at a time: those behind the peer of this call are for later calls.
    fn accept_one(&self) -> Result<()> {
        match self.listener.accept() {
            Ok((stream, from)) => {
                let mut pending = self.pending.lock();
                if pending.len() == MAX_PENDING {
                    pending.remove(0);
                }
                pending.extend(Conn::new(stream, from.to_string()).map(|conn| (conn, Instant::now())));
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(Error::bootstrap_os("this process", "cannot accept", error, FIX_FILES)),
        }
    }

    /// The first connection that has introduced itself as rank 1 of this job.
    fn greeted(&self, job: Job) -> Option<Conn> {
        let mut pending = self.pending.lock();
        let mut next = 0;
        while let Some((conn, since)) = pending.get_mut(next) {
            match greeting(conn, *since, job, &[None]) {
                Ok(None) => next += 1,
                Ok(Some(_)) => return Some(pending.remove(next).0),
                Err(why) => reject(pending.remove(next).0, job, &why),
            }
        }
        None
    }
}

impl CommunicatorBuilder {
    /// Connects to a [`Listener`], whose [address](Listener::address) the program has got in some way, and builds a communicator of the
    /// two processes: this one is rank 1.
    ///
    /// # Errors
    /// [`Error::Launch`] for what is no such address; [`Error::Bootstrap`] if nothing accepts there before
    /// [`CommunicatorBuilder::timeout`], and with [`Error::Deadline`] and [`Error::Device`] as [`CommunicatorBuilder::init_over`].
    pub fn connect_to(self, address: &[u8]) -> Result<Communicator> {
        let deadline = Deadline::after(self.0.timeout);
        let resolved = self.resolve()?;
        let parsed = address.split_first_chunk().and_then(|(token, at)| {
            Some((u64::from_be_bytes(*token), str::from_utf8(at).ok()?.parse().ok()?))
        });
        let (token, at) = parsed.ok_or_else(|| {
            let what = format!("{} bytes that are no address of a listener", address.len());
            Error::launch(what, "pass what Listener::address returned, all of it")
        })?;
        let bootstrap = Bootstrap::connect(&job(1, 2, at, token), deadline.remaining())?;
        self.build(Box::new(bootstrap), resolved, deadline)
    }
}

/// Listens for the ranks of a part of a job.
pub(super) fn listen_for_part() -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((own_address(), 0));
    let listener =
        listener.map_err(|error| Error::bootstrap_os("this rank", "cannot listen", error, FIX_NETWORK))?;
    let at = address(&listener)?;
    Ok((listener, at))
}
