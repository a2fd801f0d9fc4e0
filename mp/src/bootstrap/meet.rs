//! How the ranks find rank 0.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::launch::{Root, is_loopback};

/// Longest wait for one answer to a connection request; a lost packet should not eat the whole limit.
const DIAL: Duration = Duration::from_secs(5);

/// Longest pause between two connection requests.
const MAX_PAUSE: Duration = Duration::from_millis(500);

pub(super) const FIX_ROOT: &str = "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT name its host and port, \
                                   and that no firewall is between";

/// Where rank 0 lets the others in.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) listener: TcpListener,
    /// The file that says where: removed with the door.
    sign: Option<PathBuf>,
}

impl Door {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, sign: None }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(sign) = &self.sign {
            // Somebody else's now, or gone with the launcher's folder.
            let _ = std::fs::remove_file(sign);
        }
    }
}

/// Where this rank begins.
#[derive(Debug)]
pub(super) enum Place {
    /// Rank 0.
    Here(Door),
    /// The others.
    There(Target),
}

/// Where rank 0 is.
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// `host:port`
    Address(String),
    /// A file that says so.
    File(PathBuf),
}

/// The place that the launcher's variables alone say.
pub(super) fn place(root: &Root, rank: usize) -> Result<Place> {
    match (root, rank) {
        (Root::At(root), 0) => Ok(Place::Here(Door::new(listen(root)?))),
        (Root::At(root), _) => {
            split(root)?;
            Ok(Place::There(Target::Address(root.clone())))
        }
        (Root::File(path), 0) => {
            let listener = listen("127.0.0.1:0")?;
            let address = address(&listener)?;
            put_up(path, &address.to_string()).map_err(|error| {
                let fix = "make the folder writable, or set MASTER_PORT to a free port for all ranks";
                Error::bootstrap_os(path.display().to_string(), "rank 0 cannot write the file", error, fix)
            })?;
            Ok(Place::Here(Door { listener, sign: Some(path.clone()) }))
        }
        (Root::File(path), _) => Ok(Place::There(Target::File(path.clone()))),
        (Root::Pmi { .. }, _) => unreachable!("a session of PMI finds the place"),
    }
}

/// Whole or not at all: others may be reading.
fn put_up(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension(format!("{}", std::process::id()));
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path).inspect_err(|_| drop(std::fs::remove_file(&new)))
}

pub(super) fn address(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|error| {
        Error::bootstrap_os(
            "its socket",
            "cannot be asked for its port",
            error,
            "check the network of this host",
        )
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
        let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
        TcpListener::bind(&any[..])
    };
    bound.map_err(|error| {
        let fix = "stop what uses the port, or set MASTER_PORT to a free one for all ranks";
        Error::bootstrap_os(root, "rank 0 cannot listen", error, fix)
    })
}

fn split(root: &str) -> Result<(&str, u16)> {
    let parts = root.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    parts.ok_or_else(|| Error::launch(format!("the root is '{root}'"), "write it as host:port"))
}

/// Dials until rank 0 answers, and says where it was.
pub(super) fn dial(target: &Target, deadline: &Deadline) -> Result<(TcpStream, String)> {
    let mut pause = Duration::from_millis(10);
    loop {
        let error = match try_target(target, deadline) {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        if deadline.is_over() {
            let root = match target {
                Target::Address(root) => root.clone(),
                Target::File(path) => path.display().to_string(),
            };
            let what = format!("rank 0 could not be reached for {:?}", deadline.limit());
            return Err(Error::bootstrap_os(root, what, error, FIX_ROOT));
        }
        sleep(pause.min(deadline.remaining()));
        pause = MAX_PAUSE.min(pause * 2);
    }
}

fn try_target(target: &Target, deadline: &Deadline) -> io::Result<(TcpStream, String)> {
    let root = match target {
        Target::Address(root) => root.clone(),
        // Read each time: what is there may be left from a rank 0 that was killed.
        Target::File(path) => std::fs::read_to_string(path)?,
    };
    try_dial(&root, deadline).map(|stream| (stream, root))
}

fn try_dial(root: &str, deadline: &Deadline) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in root.to_socket_addrs()? {
        // At least a moment: a limit of zero is an error of its own.
        let limit = deadline.remaining().clamp(Duration::from_millis(1), DIAL);
        match TcpStream::connect_timeout(&address, limit) {
            // Without a listener, a socket that dials a port of its own range can reach itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
