//! Ports of an RDMA device and their GIDs.

use std::fmt;
use std::fmt::Write;

use gdsync_device::Gid;

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// Link state.
    pub state: PortState,
    /// Link layer.
    pub link: LinkLayer,
    /// LID on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// Maximum path MTU in bytes, if the device was queried.
    pub mtu: Option<u32>,
    /// GID table without empty entries.
    pub gids: Vec<GidEntry>,
}

/// Port state (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct PortState(pub u8);

impl PortState {
    /// No link.
    pub const DOWN: Self = Self(1);
    /// Link without a subnet manager's configuration.
    pub const INIT: Self = Self(2);
    /// Ready.
    pub const ACTIVE: Self = Self(4);
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "DOWN",
            2 => "INIT",
            3 => "ARMED",
            4 => "ACTIVE",
            5 => "ACTIVE_DEFER",
            other => return write!(f, "state {other}"),
        })
    }
}

/// Link layer below the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet, that is, RoCE.
    Ethernet,
    /// Unknown to the kernel.
    Unknown,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "RoCE",
            Self::Unknown => "unknown link",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct GidEntry {
    /// Index in the table.
    pub index: u32,
    /// Address.
    pub gid: Gid,
    /// Kind.
    pub kind: GidKind,
}

/// GID kind (`enum ibv_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand, or RoCE v1 on Ethernet.
    IbOrRoceV1,
    /// RoCE v2: UDP over IP.
    RoceV2,
    /// Unknown to the kernel.
    Unknown,
}

/// Scope of a GID, widest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scope {
    Ipv4,
    Global,
    LinkLocal,
}

fn scope(gid: Gid) -> Scope {
    match gid.0 {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..] => Scope::Ipv4,
        [0xfe, second, ..] if second & 0xc0 == 0x80 => Scope::LinkLocal,
        _ => Scope::Global,
    }
}

impl Port {
    /// Whether the port is active.
    pub fn is_active(&self) -> bool {
        self.state == PortState::ACTIVE
    }

    /// Best GID for queue pairs. On Ethernet: RoCE v2 before v1; IPv4-mapped before global before link-local; then the
    /// lowest index.
    pub fn best_gid(&self) -> Option<GidEntry> {
        let version = |entry: &GidEntry| match entry.kind {
            _ if self.link == LinkLayer::InfiniBand => 0,
            GidKind::RoceV2 => 0,
            GidKind::Unknown => 1,
            GidKind::IbOrRoceV1 => 2,
        };
        let order = |entry: &&GidEntry| match self.link {
            // Entry 0 is derived from the port's GUID and always valid.
            LinkLayer::InfiniBand => (0, Scope::Ipv4, entry.index),
            _ => (version(entry), scope(entry.gid), entry.index),
        };
        // Queue pairs index the table with 8 bits.
        self.gids.iter().filter(|entry| entry.index <= u32::from(u8::MAX)).min_by_key(order).copied()
    }

    /// The GID table entry at `index`.
    pub fn gid(&self, index: u8) -> Option<GidEntry> {
        self.gids.iter().find(|entry| entry.index == u32::from(index)).copied()
    }

    /// The GID table, for messages.
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        for GidEntry { index, gid, kind } in &self.gids {
            let kind = match kind {
                GidKind::IbOrRoceV1 if self.link == LinkLayer::InfiniBand => "IB",
                GidKind::IbOrRoceV1 => "RoCE v1",
                GidKind::RoceV2 => "RoCE v2",
                GidKind::Unknown => "unknown type",
            };
            let comma = if text.is_empty() { "" } else { ", " };
            write!(text, "{comma}{index} = {gid} ({kind})").expect("text can be written to a string");
        }
        if text.is_empty() { "it is empty".into() } else { text }
    }

    /// Why no queue pair can use it and how to fix that; `None` if it is usable.
    pub fn refusal(&self) -> Option<String> {
        let number = self.number;
        if !self.is_active() {
            let fix = match self.link {
                LinkLayer::InfiniBand => "check the cable, and that a subnet manager (opensm) runs",
                _ => "check the cable, and set the network interface up (`ip link set DEV up`)",
            };
            return Some(format!("port {number} is {}: {fix}", self.state));
        }
        if self.link == LinkLayer::InfiniBand && self.lid == 0 {
            return Some(format!("port {number} has no LID: check that a subnet manager (opensm) runs"));
        }
        if self.best_gid().is_none() {
            let fix = "give its network interface an address (`ip addr add ADDRESS/24 dev DEV`)";
            return Some(format!("port {number} has no GID: {fix}"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(bytes: &[(usize, u8)]) -> Gid {
        let mut gid = [0; 16];
        bytes.iter().for_each(|&(at, byte)| gid[at] = byte);
        Gid(gid)
    }

    fn port(link: LinkLayer, gids: &[(u32, Gid, GidKind)]) -> Port {
        let gids = gids.iter().map(|&(index, gid, kind)| GidEntry { index, gid, kind }).collect();
        Port { number: 1, state: PortState::ACTIVE, link, lid: 1, mtu: None, gids }
    }

    #[test]
    fn best_gid_is_v2_with_widest_scope() {
        use GidKind::{IbOrRoceV1 as V1, RoceV2 as V2, Unknown};
        let local = gid(&[(0, 0xfe), (1, 0x80), (15, 1)]);
        let ipv4 = gid(&[(10, 0xff), (11, 0xff), (12, 10), (15, 1)]);
        let global = gid(&[(0, 0x20), (1, 1), (15, 1)]);
        let best = |gids: &[_]| port(LinkLayer::Ethernet, gids).best_gid().map(|entry| entry.index);
        assert_eq!(best(&[(0, local, V1), (1, local, V2), (2, ipv4, V1), (3, ipv4, V2)]), Some(3));
        assert_eq!(best(&[(0, local, V1), (1, local, V2), (2, ipv4, V1)]), Some(1));
        assert_eq!(best(&[(0, global, V2), (5, ipv4, V2), (7, ipv4, V2)]), Some(5));
        assert_eq!(best(&[(0, local, V2), (4, global, V2)]), Some(4));
        assert_eq!(best(&[(0, local, Unknown), (1, ipv4, V1)]), Some(0));
        assert_eq!(best(&[(256, ipv4, V2), (3, local, V1)]), Some(3));
        assert_eq!(best(&[]), None);
        let ib = port(LinkLayer::InfiniBand, &[(0, local, V1), (1, global, V1)]);
        assert_eq!(ib.best_gid().unwrap().index, 0);
    }

    #[test]
    fn unusable_port_names_the_reason() {
        let good = port(LinkLayer::Ethernet, &[(0, gid(&[(0, 0xfe), (1, 0x80)]), GidKind::RoceV2)]);
        assert_eq!(good.refusal(), None);
        let why = |port: Port| port.refusal().unwrap();
        assert!(why(Port { state: PortState::DOWN, ..good.clone() }).contains("DOWN: check the cable"));
        assert!(
            why(Port { gids: Vec::new(), ..good.clone() }).contains("no GID: give its network interface")
        );
        let ib = Port { link: LinkLayer::InfiniBand, ..good };
        assert!(
            why(Port { state: PortState::INIT, ..ib.clone() }).contains("INIT: check the cable, and that")
        );
        assert!(why(Port { lid: 0, ..ib }).contains("no LID"));
    }
}
