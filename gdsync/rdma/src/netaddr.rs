//! IP addresses: those of this machine, as GIDs, and as the system takes them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::{io, ptr};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

use gdsync_device::Gid;

/// An IP address in the form of a GID: one of IPv4 is mapped into IPv6.
pub(crate) fn gid_of(ip: IpAddr) -> Gid {
    Gid(match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    })
}

/// The other way; `None` for one that no peer can have.
pub(crate) fn ip_of(gid: Gid) -> Option<IpAddr> {
    let ip = Ipv6Addr::from(gid.0).to_canonical();
    (!ip.is_unspecified() && !ip.is_multicast()).then_some(ip)
}

/// As the system takes it.
pub(super) fn raw(at: SocketAddr) -> sockaddr_storage {
    // SAFETY: all-zero bytes are an address of no family.
    let mut out: sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut out;
    match at {
        SocketAddr::V4(at) => {
            // SAFETY: all-zero bytes are an address.
            let mut one: sockaddr_in = unsafe { std::mem::zeroed() };
            one.sin_family = family(libc::AF_INET);
            one.sin_port = at.port().to_be();
            one.sin_addr.s_addr = u32::from_ne_bytes(at.ip().octets());
            // SAFETY: storage has room and alignment for every kind of address.
            unsafe { place.cast::<sockaddr_in>().write(one) };
        }
        SocketAddr::V6(at) => {
            // SAFETY: all-zero bytes are an address.
            let mut one: sockaddr_in6 = unsafe { std::mem::zeroed() };
            one.sin6_family = family(libc::AF_INET6);
            one.sin6_port = at.port().to_be();
            one.sin6_addr.s6_addr = at.ip().octets();
            // SAFETY: as above.
            unsafe { place.cast::<sockaddr_in6>().write(one) };
        }
    }
    out
}

fn family(number: i32) -> u16 {
    u16::try_from(number).expect("families are small numbers")
}

/// Calls something that takes an address by a pointer.
pub(super) fn with_raw<T>(at: SocketAddr, call: impl FnOnce(*mut sockaddr) -> T) -> T {
    let mut storage = raw(at);
    call((&raw mut storage).cast())
}

/// The addresses of this machine that peers elsewhere may know, those of IPv4 first. Neither loopback nor link-local ones.
pub(crate) fn of_this_machine() -> io::Result<Vec<IpAddr>> {
    let mut first = ptr::null_mut();
    // SAFETY: a place for the answer.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut at) = (Vec::new(), first);
    while !at.is_null() {
        // SAFETY: an entry of the list.
        let entry = unsafe { &*at };
        found.extend(read(entry.ifa_addr));
        at = entry.ifa_next;
    }
    // SAFETY: the list, freed once.
    unsafe { libc::freeifaddrs(first) };
    let is_link_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.segments()[0] & 0xffc0 == 0xfe80);
    found.retain(|ip| !ip.is_loopback() && !is_link_local(ip));
    found.sort_by_key(IpAddr::is_ipv6);
    Ok(found)
}

/// The IP address of an entry, if it is one.
fn read(addr: *const sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: every address begins with its family.
    match i32::from(unsafe { (*addr).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says so.
            let one = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            Some(IpAddr::from(one.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says so.
            let one = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            Some(IpAddr::from(one.sin6_addr.s6_addr))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_both_forms() {
        for text in ["10.9.2.1", "2001:db8::7"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(ip_of(gid_of(ip)), Some(ip));
            let at = SocketAddr::new(ip, 4791);
            let read = with_raw(at, |addr| read(addr));
            assert_eq!(read, Some(ip));
        }
        assert_eq!(gid_of([10, 0, 0, 1].into()).to_string(), "0000:0000:0000:0000:0000:ffff:0a00:0001");
        assert_eq!([Gid([0; 16]), Gid([0xff; 16])].map(ip_of), [None, None]);
    }

    #[test]
    fn ports_are_written_in_network_order() {
        let raw = raw("10.0.0.1:258".parse().unwrap());
        // SAFETY: an address of IPv4 was written there.
        let one = unsafe { (&raw const raw).cast::<sockaddr_in>().read() };
        assert_eq!(one.sin_port.to_ne_bytes(), [1, 2]);
    }

    #[test]
    fn loopback_is_no_address_for_peers() {
        assert!(of_this_machine().unwrap().iter().all(|ip| !ip.is_loopback()));
    }
}
