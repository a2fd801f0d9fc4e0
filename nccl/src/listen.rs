//! The socket that the ranks meet at: `listen` opens one at each rank, `connect` uses that of rank 0.

use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use gdsync::env::variable;
use gdsync::hca::interfaces;
use gdsync::{Error, Result};
use mp::launch::{Bootstrap, Launch, Launcher, Root};

use crate::abi::HANDLE_BYTES;

/// First bytes of a handle: the name, and the version of all that ranks exchange.
const MAGIC: [u8; 8] = *b"GDANCCL1";

/// The address of this host for the others, if not that of an interface.
const ADDRESS: &str = "GDA_NCCL_ADDRESS";
/// NCCL's variable: beginnings of the names of interfaces; after `=` whole names, after `^` those to leave out.
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";

const FIX: &str = "raise the limit on open files (ulimit -n), and check the network of this host";

/// A rank that can be connected to.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    token: u64,
    /// NCCL's hash of the communicator.
    pub(crate) comm: u64,
    /// The number of the device.
    pub(crate) device: c_int,
}

impl Listener {
    /// Opens the socket.
    pub(crate) fn open(comm: u64, device: c_int) -> Result<Self> {
        let address = own_address()?;
        let socket = TcpListener::bind((address, 0)).map_err(|_| {
            let expected = "an address of an interface of this host (NCCL_SOCKET_IFNAME chooses one)";
            Error::invalid("the address for other ranks (GDA_NCCL_ADDRESS)", address, expected)
        })?;
        let token = RandomState::new().hash_one(address);
        Ok(Self { socket, token, comm, device })
    }

    /// What other ranks need: name, token, port, address.
    pub(crate) fn handle(&self) -> Result<[u8; HANDLE_BYTES]> {
        let at = self.socket.local_addr().map_err(|error| Error::os("getsockname", error, FIX))?;
        let ip = match at.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut handle = [0; HANDLE_BYTES];
        let parts = [&MAGIC[..], &self.token.to_be_bytes(), &at.port().to_be_bytes(), &ip.octets()].concat();
        handle[..parts.len()].copy_from_slice(&parts);
        Ok(handle)
    }

    /// Connects all ranks, through the one whose handle this is.
    pub(crate) fn connect(
        &self,
        root: &[u8; HANDLE_BYTES],
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> mp::Result<Bootstrap> {
        let (at, token) = read(root)?;
        let root = Root::At(at.to_string());
        let launch =
            Launch { rank, size, local_rank: 0, local_size: None, root, token, launcher: Launcher::Env };
        if rank > 0 || size == 1 {
            return Bootstrap::connect(&launch, timeout);
        }
        let socket = self.socket.try_clone().map_err(|error| Error::os("dup", error, FIX))?;
        Bootstrap::root(socket, &launch, timeout)
    }
}

/// The address and the token in a handle.
fn read(handle: &[u8; HANDLE_BYTES]) -> Result<(SocketAddr, u64)> {
    let (magic, rest) = handle.split_first_chunk::<8>().expect("a handle is longer");
    if *magic != MAGIC {
        let expected = "one of this version of the plug-in: install the same libnccl-rma-gda.so, and set NCCL_RMA_PLUGIN=gda, at all ranks";
        return Err(Error::invalid("the handle of rank 0", format!("{magic:?}"), expected));
    }
    let (token, rest) = rest.split_first_chunk().expect("a handle is longer");
    let (port, rest) = rest.split_first_chunk().expect("a handle is longer");
    let (ip, _) = rest.split_first_chunk::<16>().expect("a handle is longer");
    let ip = Ipv6Addr::from(*ip);
    let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
    Ok((SocketAddr::new(ip, u16::from_be_bytes(*port)), u64::from_be_bytes(*token)))
}

/// The address of this host that other ranks reach.
fn own_address() -> Result<IpAddr> {
    if let Some(text) = variable(ADDRESS) {
        return text.parse().map_err(|_| Error::invalid(ADDRESS, text, "an IP address of this host"));
    }
    let wanted = variable(INTERFACES).unwrap_or_default();
    let found = choose(&wanted, &usable()?);
    found.ok_or_else(|| Error::invalid(INTERFACES, wanted, "an interface of this host that has an address"))
}

/// The address of the first interface that the variable allows. Without one loopback comes last.
fn choose(wanted: &str, interfaces: &[(String, IpAddr)]) -> Option<IpAddr> {
    let (is_excluding, names) = wanted.strip_prefix('^').map_or((false, wanted), |rest| (true, rest));
    let (is_whole, names) = names.strip_prefix('=').map_or((false, names), |rest| (true, rest));
    let is_named = |name: &str| {
        let mut names = names.split(',').filter(|one| !one.is_empty());
        names.any(|one| if is_whole { one == name } else { name.starts_with(one) })
    };
    let allowed = interfaces.iter().filter(|(name, _)| names.is_empty() || is_named(name) != is_excluding);
    allowed.min_by_key(|(_, address)| (address.is_loopback(), address.is_ipv6())).map(|(_, address)| *address)
}

/// The interfaces that are up, with their addresses; no link-local ones.
fn usable() -> Result<Vec<(String, IpAddr)>> {
    let is_local_to_link = |address: &IpAddr| matches!(address, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let all = interfaces()?.into_iter().filter(|one| one.is_up && !is_local_to_link(&one.address));
    Ok(all.map(|one| (one.name, one.address)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_chosen_as_nccl_does() {
        let one = |name: &str, at: &str| (name.to_owned(), at.parse::<IpAddr>().unwrap());
        let all = [
            one("lo", "127.0.0.1"),
            one("eth0", "fd00::1"),
            one("eth0", "10.0.0.1"),
            one("eth01", "10.0.0.2"),
        ];
        for (wanted, expected) in [
            ("", Some("10.0.0.1")),
            ("lo", Some("127.0.0.1")),
            ("eth01", Some("10.0.0.2")),
            ("=eth01,lo", Some("10.0.0.2")),
            ("ib,eth", Some("10.0.0.1")),
            ("^eth", Some("127.0.0.1")),
            ("^=eth0,lo", Some("10.0.0.2")),
            ("ib", None),
        ] {
            assert_eq!(choose(wanted, &all).map(|at| at.to_string()).as_deref(), expected, "{wanted}");
        }
    }

    #[test]
    fn a_handle_is_read_as_written_and_no_other_bytes_are() {
        let listener = Listener::open(7, 0).unwrap();
        let handle = listener.handle().unwrap();
        assert_eq!(read(&handle).unwrap(), (listener.socket.local_addr().unwrap(), listener.token));
        let text = read(&[7; HANDLE_BYTES]).unwrap_err().to_string();
        assert!(text.contains("handle of rank 0") && text.contains("same libnccl-rma-gda.so"), "{text}");
    }
}
