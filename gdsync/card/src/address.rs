//! The addresses of an emulated port: GIDs, LID and GUID, all made of one number.

use gdsync_device::Gid;

/// The address of another port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Lid(u16),
    Gid(Gid),
}

/// The last unicast LID.
const LAST_LID: u16 = 0xbfff;

/// The link layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Ethernet,
    InfiniBand,
}

impl Link {
    /// Environment variable that `gdasync card` passes to the program.
    pub(crate) const VARIABLE: &str = "GDASYNC_CARD_LINK";

    pub(crate) fn from_env() -> Self {
        if std::env::var_os(Self::VARIABLE).is_some_and(|link| link == "ib") {
            Self::InfiniBand
        } else {
            Self::Ethernet
        }
    }

    /// Entries of the GID table.
    pub(crate) fn gids(self) -> u32 {
        match self {
            Self::Ethernet => 16,
            Self::InfiniBand => 8,
        }
    }

    /// Entries of the P_Key table.
    pub(crate) fn pkeys(self) -> u16 {
        match self {
            Self::Ethernet => 1,
            Self::InfiniBand => 128,
        }
    }

    /// Capability mask of the port (`enum ib_port_capability_mask_bits`), as ConnectX cards report it.
    pub(crate) fn capabilities(self) -> u32 {
        match self {
            Self::Ethernet => 0x0401_0000,
            Self::InfiniBand => 0xa751_e848,
        }
    }

    /// The numbers that ports may have: unicast LIDs, or the last three bytes of a MAC address.
    pub(crate) fn number(self, random: u32) -> u32 {
        match self {
            Self::Ethernet => 1 + random % 0xff_fffe,
            Self::InfiniBand => 1 + random % u32::from(LAST_LID),
        }
    }

    /// The one of an address's two forms that leads to its port.
    pub(crate) fn path(self, lid: u16, gid: [u8; 16]) -> Path {
        match self {
            Self::Ethernet => Path::Gid(Gid(gid)),
            Self::InfiniBand => Path::Lid(lid),
        }
    }

    /// The GID of the HCA at an address: the link-local one, whichever form the address has. `None` for an address
    /// that no port of this link has.
    pub(crate) fn canonical(self, path: Path) -> Option<Gid> {
        let gid = match (self, path) {
            (Self::InfiniBand, Path::Lid(lid @ 1..=LAST_LID)) => {
                return Some(port(self, lid.into()).link_local());
            }
            (_, Path::Lid(_)) => return None,
            (_, Path::Gid(gid)) => gid,
        };
        let [.., a, b, c] = gid.0;
        let number = u32::from_be_bytes([0, a, b, c]);
        if self == Self::Ethernet && gid.is_ipv4() {
            return (gid.0[12] == 10).then(|| port(self, number).link_local());
        }
        (self == Self::InfiniBand || gid != port(Self::InfiniBand, number).link_local()).then_some(gid)
    }
}

fn port(link: Link, number: u32) -> Port {
    Port { link, number }
}

/// The version of RoCE that a GID is for (`enum ib_uverbs_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum GidType {
    InfiniBand = 0,
    RoceV1 = 1,
    RoceV2 = 2,
}

impl GidType {
    /// As sysfs names it.
    pub(crate) fn name(self) -> &'static str {
        if self == Self::RoceV2 { "RoCE v2" } else { "IB/RoCE v1" }
    }
}

/// A port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) link: Link,
    /// 24 bits, or the LID.
    pub(crate) number: u32,
}

impl Port {
    pub(crate) fn lid(self) -> u16 {
        match self.link {
            Link::Ethernet => 0,
            Link::InfiniBand => u16::try_from(self.number).unwrap_or_default(),
        }
    }

    /// The MAC address, under Mellanox's prefix.
    pub(crate) fn mac(self) -> [u8; 6] {
        let [_, a, b, c] = self.number.to_be_bytes();
        [0x00, 0x02, 0xc9, a, b, c]
    }

    pub(crate) fn guid(self) -> [u8; 8] {
        let [m, e, l, a, b, c] = self.mac();
        [m, e, l, 0xff, 0xfe, a, b, c]
    }

    /// The link-local GID.
    pub(crate) fn link_local(self) -> Gid {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&[0xfe, 0x80]);
        bytes[8..].copy_from_slice(&self.guid());
        if self.link == Link::Ethernet {
            // As the kernel makes it of a MAC address.
            bytes[8] ^= 2;
        }
        Gid(bytes)
    }

    fn ipv4(self) -> Gid {
        let [_, a, b, c] = self.number.to_be_bytes();
        Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, a, b, c])
    }

    /// Entry `index` of the GID table.
    pub(crate) fn gid(self, index: u32) -> Option<(Gid, GidType)> {
        match (self.link, index) {
            (Link::InfiniBand, 0) => Some((self.link_local(), GidType::InfiniBand)),
            (Link::Ethernet, 0) => Some((self.link_local(), GidType::RoceV1)),
            (Link::Ethernet, 1) => Some((self.link_local(), GidType::RoceV2)),
            (Link::Ethernet, 2) => Some((self.ipv4(), GidType::RoceV1)),
            (Link::Ethernet, 3) => Some((self.ipv4(), GidType::RoceV2)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_a_port_leads_to_one_name() {
        for number in [1, 0x1234, 0xbfff] {
            let eth = port(Link::Ethernet, number);
            for index in 0..Link::Ethernet.gids() {
                let Some((gid, _)) = eth.gid(index) else { continue };
                assert_eq!(Link::Ethernet.canonical(Path::Gid(gid)), Some(eth.link_local()), "{gid}");
            }
            assert_eq!(Link::Ethernet.canonical(Path::Lid(7)), None, "Ethernet has no LIDs");
            let mut foreign = eth.gid(3).unwrap().0;
            foreign.0[12] = 192;
            assert_eq!(Link::Ethernet.canonical(Path::Gid(foreign)), None, "{foreign} is no card's");
            let ib = port(Link::InfiniBand, number);
            assert_eq!(ib.gid(1), None);
            assert_eq!(Link::Ethernet.canonical(Path::Gid(ib.link_local())), None, "it is of the other link");
            for path in [Path::Gid(ib.gid(0).unwrap().0), Path::Lid(ib.lid())] {
                assert_eq!(Link::InfiniBand.canonical(path), Some(ib.link_local()));
            }
        }
        for lid in [0, 0xc000, u16::MAX] {
            assert_eq!(Link::InfiniBand.canonical(Path::Lid(lid)), None, "{lid} is no port's");
        }
    }

    #[test]
    fn addresses_have_the_forms_of_mellanox_cards() {
        let eth = port(Link::Ethernet, 0x12_3456);
        assert_eq!(eth.gid(0).unwrap().0.to_string(), "fe80:0000:0000:0000:0202:c9ff:fe12:3456");
        assert_eq!(eth.gid(3).unwrap().0.to_string(), "0000:0000:0000:0000:0000:ffff:0a12:3456");
        assert_eq!(eth.lid(), 0);
        let ib = port(Link::InfiniBand, 0x1234);
        assert_eq!(ib.gid(0).unwrap().0.to_string(), "fe80:0000:0000:0000:0002:c9ff:fe00:1234");
        assert_eq!(ib.lid(), 0x1234);
    }

    #[test]
    fn numbers_of_ports_are_in_range() {
        for random in [0, 1, 0xbffe, 0xbfff, 0xff_ffff, u32::MAX] {
            assert!((1..=0xbfff).contains(&Link::InfiniBand.number(random)));
            assert!((1..=0xff_fffe).contains(&Link::Ethernet.number(random)));
        }
    }
}
