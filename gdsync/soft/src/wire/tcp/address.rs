//! The address of this host that a TCP device listens at.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};

use gdsync_device::env::variable;
use gdsync_device::error::{Error, Result};

/// Where the ranks of a job meet, as launchers tell it.
const MEETING: &str = "MASTER_ADDR";
/// Addresses that are reserved for documentation: the route to them is the default route.
const ELSEWHERE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// The address that `tcp:NAME` names: an IP address, or the first one of a network interface. Without a name, the one from which
/// this host reaches `MASTER_ADDR`, or else other hosts.
///
/// # Errors
/// [`Error::InvalidArgument`] if there is no such interface, or no route to other hosts.
pub fn tcp_address(name: Option<&str>) -> Result<IpAddr> {
    let none = |value: &str, expected| Err(Error::invalid("the address of the TCP device", value, expected));
    let Some(name) = name else {
        return match by_route() {
            Some(address) => Ok(address),
            None => none(
                "not known",
                "a route to other hosts, or a named one: GDSYNC_DEVICE=tcp:ADDRESS, or tcp:INTERFACE",
            ),
        };
    };
    match name.parse().ok().or_else(|| of_interface(name)) {
        None => none(name, "an IP address of this host, or a network interface that has one (`ip address`)"),
        Some(IpAddr::V6(address)) if address.is_unicast_link_local() => {
            none(name, "an address that is not link-local: those need a scope, which GIDs do not have")
        }
        Some(address) if address.is_unspecified() || address.is_multicast() => {
            none(name, "one address of this host, not all: peers must be able to name it")
        }
        Some(address) => Ok(address),
    }
}

/// The source address of packets to where the job meets, or to other hosts.
fn by_route() -> Option<IpAddr> {
    let meeting =
        variable(MEETING).and_then(|name| (name.as_str(), 0).to_socket_addrs().ok()).into_iter().flatten();
    let targets = meeting.map(|target| target.ip()).chain(ELSEWHERE);
    targets.filter_map(source).find(|source| !source.is_loopback())
}

/// The source address of packets to `target`. Nothing is sent.
fn source(target: IpAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(SocketAddr::new(target, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The first address of an interface that packets can be sent from: IPv4 first.
fn of_interface(name: &str) -> Option<IpAddr> {
    let found = interfaces().ok()?.into_iter().filter(|one| one.name == name).map(|one| one.address);
    let is_usable = |address: &IpAddr| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    found.filter(is_usable).min_by_key(IpAddr::is_ipv6)
}

/// An address of a network interface of this host.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Interface {
    /// The name of the interface.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// Whether the interface is up.
    pub is_up: bool,
}

/// All IP addresses of the network interfaces of this host, in the order of the system.
///
/// # Errors
/// [`Error::Sys`] of `getifaddrs`.
pub fn interfaces() -> Result<Vec<Interface>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` is valid for writing the list's head.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(Error::last_os("getifaddrs", "raise the limit of memory, or name an IP address"));
    }
    let (mut found, mut next) = (Vec::new(), list);
    // SAFETY: `next` is an entry of the list, which lives until it is freed below, or null at its end.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: an address that is not null points to a socket address of its family, which the list holds.
        let Some(address) = (unsafe { ip(entry.ifa_addr) }) else { continue };
        // SAFETY: the name of an entry is a C string of the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        let is_up = libc::c_int::try_from(entry.ifa_flags).is_ok_and(|flags| flags & libc::IFF_UP != 0);
        found.push(Interface { name, address, is_up });
    }
    // SAFETY: `getifaddrs` made the list, and nothing of it is used from here on.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// The IP address in a socket address, if it has one.
///
/// # Safety
/// `address` points to a socket address of its family.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller vouches for the address, and every socket address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one of IPv4.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is one of IPv6.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_addresses_or_interfaces() {
        assert_eq!(tcp_address(Some("10.1.2.3")).unwrap(), IpAddr::from([10, 1, 2, 3]));
        assert_eq!(tcp_address(Some("fd00::1")).unwrap(), "fd00::1".parse::<IpAddr>().unwrap());
        assert_eq!(tcp_address(Some("lo")).unwrap(), IpAddr::from([127, 0, 0, 1]));
        for bad in ["0.0.0.0", "::", "fe80::1", "224.0.0.1", "nothing-of-this-name", ""] {
            let error = tcp_address(Some(bad)).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn the_route_tells_the_source() {
        assert_eq!(source(Ipv4Addr::LOCALHOST.into()), Some(Ipv4Addr::LOCALHOST.into()));
    }
}
