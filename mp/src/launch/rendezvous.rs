//! How the ranks meet at rank 0: it listens and accepts, the others dial.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::connection::{
    Conn, FIX_NETWORK, FIX_ROOT, Failure, Job, Kind, MAX_PAYLOAD, TICK, announce, connect, wait,
};
use super::environment::{Root, is_loopback};
use crate::error::{Error, Result};
use crate::wait::Deadline;

const FIX_MISSING: &str = "see that each was started, with the same MASTER_ADDR and MASTER_PORT";

/// Longest wait for one answer to a connection request; a lost packet must not use up the whole limit.
const DIAL: Duration = Duration::from_secs(5);

/// Longest pause between two connection requests.
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// How long a connection may take to send its hello.
const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a failed accept, which a shortage of descriptors would repeat at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The listening sockets of all ranks, for the time when rank 0 is gone. No rank accepts there before the ranks have to find each
/// other again; until then the system answers, which shows that the process is alive.
#[derive(Debug)]
pub(super) struct Listeners {
    pub(super) own: TcpListener,
    /// The addresses of all ranks, as this one reaches them.
    pub(super) all: Vec<SocketAddr>,
}

/// The socket of rank 0.
#[derive(Debug)]
pub(super) struct RootListener {
    pub(super) listener: TcpListener,
    /// The file with its address, removed with it.
    file: Option<PathBuf>,
}

impl RootListener {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, file: None }
    }
}

impl Drop for RootListener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // It may be gone with the launcher's folder.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// What this rank does to meet the others.
#[derive(Debug)]
pub(super) enum Rendezvous {
    /// Rank 0.
    Listen(RootListener),
    /// The others.
    Dial(Target),
}

/// The address of rank 0.
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// `host:port`
    Address(String),
    /// A file with that.
    File(PathBuf),
}

/// The rendezvous at a root that needs no launcher.
pub(super) fn of(root: &Root, rank: usize) -> Result<Rendezvous> {
    match (root, rank) {
        (Root::At(root), 0) => Ok(Rendezvous::Listen(RootListener::new(listen(root)?))),
        (Root::At(root), _) => {
            split(root)?;
            Ok(Rendezvous::Dial(Target::Address(root.clone())))
        }
        (Root::File(path), 0) => {
            let listener = listen("127.0.0.1:0")?;
            let address = address(&listener)?;
            publish(path, &address.to_string()).map_err(|error| {
                let fix = "make the folder writable, or set MASTER_PORT to a free port for all ranks";
                Error::bootstrap_os(path.display().to_string(), "rank 0 cannot write the file", error, fix)
            })?;
            Ok(Rendezvous::Listen(RootListener { listener, file: Some(path.clone()) }))
        }
        (Root::File(path), _) => Ok(Rendezvous::Dial(Target::File(path.clone()))),
        (Root::Pmi { .. }, _) => unreachable!("PMI finds the rendezvous"),
    }
}

/// Writes a file atomically: others may be reading it.
fn publish(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension(format!("{}", std::process::id()));
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path).inspect_err(|_| drop(std::fs::remove_file(&new)))
}

pub(super) fn address(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|error| {
        Error::bootstrap_os("its socket", "cannot be asked for its port", error, FIX_NETWORK)
    })
}

pub(super) fn listen(root: &str) -> Result<TcpListener> {
    let (host, port) = split(root)?;
    let bound = if is_loopback(host) {
        TcpListener::bind(root)
    } else if host.parse::<Ipv4Addr>().is_ok() {
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
    } else {
        // Not the addresses of the name: many hosts list their own name as 127.0.1.1.
        bind_any(port)
    };
    bound.map_err(|error| {
        let fix = "another process has RANK=0 of this job, or something else uses the port: stop it, or set MASTER_PORT to a free one \
                   for all ranks";
        Error::bootstrap_os(root, "rank 0 cannot listen", error, fix)
    })
}

/// Listens at all addresses of this host.
pub(super) fn bind_any(port: u16) -> io::Result<TcpListener> {
    let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
    TcpListener::bind(&any[..])
}

fn split(root: &str) -> Result<(&str, u16)> {
    let parts = root.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    parts.ok_or_else(|| Error::launch(format!("the root is '{root}'"), "write it as host:port"))
}

impl Target {
    /// Dials until rank 0 answers. Returns its address, too.
    pub(super) fn dial(&self, deadline: &Deadline) -> Result<(TcpStream, String)> {
        let mut pause = Duration::from_millis(10);
        loop {
            let error = match self.try_dial(deadline) {
                Ok(found) => return Ok(found),
                Err(error) => error,
            };
            if deadline.is_over() {
                let root = match self {
                    Self::Address(root) => root.clone(),
                    Self::File(path) => path.display().to_string(),
                };
                let limit = deadline.limit();
                let what = match self {
                    Self::Address(root) if root.to_socket_addrs().is_err() => {
                        format!("this host could not resolve the name for {limit:?}")
                    }
                    _ => format!("rank 0 could not be reached for {limit:?}"),
                };
                return Err(Error::bootstrap_os(root, what, error, FIX_ROOT));
            }
            sleep(pause.min(deadline.remaining()));
            pause = MAX_PAUSE.min(pause * 2);
        }
    }

    fn try_dial(&self, deadline: &Deadline) -> io::Result<(TcpStream, String)> {
        let root = match self {
            Self::Address(root) => root.clone(),
            // Read each time: it may be left over from a rank 0 that was killed.
            Self::File(path) => std::fs::read_to_string(path)?,
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in root.to_socket_addrs()? {
            match connect(address, DIAL, deadline) {
                Ok(stream) => return Ok((stream, root)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Accepts the connections of the other ranks.
struct Acceptor<'a> {
    listener: &'a TcpListener,
    job: Job,
    /// Ranks 1 and up.
    ranks: Vec<Option<Conn>>,
    /// Connections without a hello, and their start.
    pending: Vec<(Conn, Instant)>,
    /// The last one rejected: likely the reason why a rank is missing.
    rejected: Option<String>,
}

/// Waits until ranks 1 to `size - 1` have connected, until `check` returns an error. Returns them in this order.
pub(super) fn accept(
    listener: &TcpListener,
    job: Job,
    deadline: &Deadline,
    check: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Conn>> {
    let address =
        listener.local_addr().map_or_else(|_| "its socket".to_owned(), |address| address.to_string());
    listener.set_nonblocking(true).map_err(|error| {
        Error::bootstrap_os(address.clone(), "cannot use the socket", error, "pass a listening TCP socket")
    })?;
    let ranks = (1..job.size).map(|_| None).collect();
    let mut acceptor = Acceptor { listener, job, ranks, pending: Vec::new(), rejected: None };
    let outcome = acceptor.run(&address, deadline, check);
    let mut conns: Vec<Conn> = acceptor.ranks.into_iter().flatten().collect();
    match outcome {
        Ok(()) => {
            conns.iter_mut().zip(1..).for_each(|(conn, rank)| conn.peer = format!("rank {rank}"));
            Ok(conns)
        }
        Err(failure) => {
            announce(&mut conns, &job, &failure);
            Err(failure.error)
        }
    }
}

impl Acceptor<'_> {
    fn run(
        &mut self,
        address: &str,
        deadline: &Deadline,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> std::result::Result<(), Failure> {
        loop {
            self.accept();
            self.read_hellos();
            for (conn, rank) in self.ranks.iter_mut().zip(1..) {
                let present = conn.as_mut().map_or(Ok(()), |conn| conn.expect_silence(Kind::Hello));
                present.map_err(|error| Failure { rank, error })?;
            }
            let missing: Vec<u32> =
                (1..).zip(&self.ranks).filter(|(_, conn)| conn.is_none()).map(|(rank, _)| rank).collect();
            let Some(&rank) = missing.first() else { return Ok(()) };
            check().map_err(|error| {
                let gone = match error {
                    Error::Child { rank, .. } => u32::try_from(rank).unwrap_or(u32::MAX),
                    _ => rank,
                };
                Failure { rank: gone, error }
            })?;
            if deadline.is_over() {
                let names: Vec<_> = missing.iter().map(|rank| format!("rank {rank}")).collect();
                let why = self.rejected.as_ref().map_or(String::new(), |who| format!(" (rejected: {who})"));
                let what = format!(
                    "connections to rank 0 at {address}: waiting for {} (CommunicatorBuilder::timeout){why}",
                    names.join(", ")
                );
                return Err(Failure { rank, error: deadline.error(what, FIX_MISSING) });
            }
            let conns = self.pending.iter().map(|(conn, _)| conn).chain(self.ranks.iter().flatten());
            let mut fds: Vec<libc::pollfd> = std::iter::once(self.listener.as_raw_fd())
                .chain(conns.map(Conn::fd))
                .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
                .collect();
            wait(&mut fds, deadline.remaining().min(TICK)).map_err(|error| Failure { rank: 0, error })?;
        }
    }

    fn accept(&mut self) {
        loop {
            let accepted =
                self.listener.accept().and_then(|(stream, address)| Conn::new(stream, address.to_string()));
            match accepted {
                Ok(conn) => self.pending.push((conn, Instant::now())),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.rejected = Some(format!("a connection, by the system: {error}"));
                    return sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn read_hellos(&mut self) {
        for (mut conn, since) in std::mem::take(&mut self.pending) {
            match greeting(&mut conn, since, self.job, &self.ranks) {
                Ok(None) => self.pending.push((conn, since)),
                Ok(Some(rank)) => self.ranks[rank as usize - 1] = Some(conn),
                Err(why) => {
                    self.rejected = Some(format!("{}, because {why}", conn.peer));
                    reject(conn, self.job, &why);
                }
            }
        }
    }
}

/// The rank that the hello of a connection asks for, or why it cannot have it; `None` while the hello may come. `ranks` are 1 and up.
pub(super) fn greeting(
    conn: &mut Conn,
    since: Instant,
    job: Job,
    ranks: &[Option<Conn>],
) -> std::result::Result<Option<u32>, String> {
    let said = |error| match error {
        Error::Bootstrap { what, .. } => format!("it {what}"),
        other => other.to_string(),
    };
    match conn.fill().map_err(said)? {
        false if since.elapsed() < HELLO_LIMIT => return Ok(None),
        false => return Err("it sent no hello".to_owned()),
        true => {}
    }
    let hello = conn.take_any().map_err(said)?.header;
    if hello.kind != Kind::Hello {
        return Err("it did not begin with a hello".to_owned());
    }
    if hello.token != job.token {
        return Err("its job token is not the one of this job".to_owned());
    }
    if hello.size != job.size {
        return Err(format!("its world size is {}, but {} at rank 0", hello.size, job.size));
    }
    match hello.rank.checked_sub(1).and_then(|index| ranks.get(index as usize)) {
        None => Err(format!("rank {} has no place among {}", hello.rank, job.size)),
        Some(Some(owner)) => Err(format!("rank {} is taken: {}", hello.rank, owner.peer)),
        Some(None) => {
            conn.peer = format!("rank {} ({})", hello.rank, conn.peer);
            conn.max_payload = MAX_PAYLOAD;
            Ok(Some(hello.rank))
        }
    }
}

/// Tells a connection why it is none of the job, and closes it.
pub(super) fn reject(mut conn: Conn, job: Job, why: &str) {
    tracing::warn!(peer = conn.peer, why, "connection rejected");
    // Without the token of the job.
    conn.farewell(Job { token: 0, ..job }.frame(Kind::Refused, 0, why.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_an_address_are_told() {
        let target = Target::Address("no.such.host.invalid:29500".into());
        let text = target.dial(&Deadline::after(Duration::from_millis(1))).unwrap_err().to_string();
        assert!(
            text.contains("this host could not resolve the name") && text.contains("MASTER_ADDR"),
            "{text}"
        );
    }
}
