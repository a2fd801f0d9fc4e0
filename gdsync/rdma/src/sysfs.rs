//! RDMA devices in sysfs.

use std::path::{Path, PathBuf};

use super::port::{GidEntry, GidKind, LinkLayer, Port, PortState};
use super::topology::{Place, entries, text};

/// Mount point.
pub(crate) const SYSFS: &str = "/sys";

/// An RDMA device in sysfs.
#[derive(Debug)]
pub struct Class {
    directory: PathBuf,
}

impl Class {
    /// Looks up device `name`.
    pub fn of(sysfs: &Path, name: &str) -> Option<Self> {
        let directory = sysfs.join("class/infiniband").join(name);
        directory.is_dir().then_some(Self { directory })
    }

    /// PCI location of its card; for a software device, of its network card.
    pub fn place(&self, sysfs: &Path) -> Option<Place> {
        let of_network_card = || {
            let netdev = text(&self.directory.join("parent"))?;
            Place::of(&sysfs.join("class/net").join(netdev).join("device"))
        };
        Place::of(&self.directory.join("device")).or_else(of_network_card)
    }

    /// Whether it speaks iWARP (`RDMA_NODE_RNIC`).
    pub fn is_iwarp(&self) -> bool {
        text(&self.directory.join("node_type")).is_some_and(|text| text.starts_with("4:"))
    }

    /// Its ports.
    pub fn ports(&self) -> Vec<Port> {
        let ports = self.directory.join("ports");
        let mut found: Vec<_> = entries(&ports)
            .into_iter()
            .filter_map(|name| Some(port(&ports.join(&name), name.parse().ok()?)))
            .collect();
        found.sort_by_key(|port| port.number);
        found
    }
}

fn port(directory: &Path, number: u8) -> Port {
    let field = |name| text(&directory.join(name)).unwrap_or_default();
    // "4: ACTIVE"
    let state = field("state").split(':').next().and_then(|code| code.parse().ok()).unwrap_or(0);
    let link = match field("link_layer").as_str() {
        "InfiniBand" => LinkLayer::InfiniBand,
        "Ethernet" => LinkLayer::Ethernet,
        _ => LinkLayer::Unknown,
    };
    let lid = field("lid");
    let lid = u16::from_str_radix(lid.trim_start_matches("0x"), 16).unwrap_or(0);
    let mut gids: Vec<_> =
        entries(&directory.join("gids")).iter().filter_map(|name| gid(directory, name)).collect();
    gids.sort_by_key(|entry| entry.index);
    Port { number, state: PortState(state), link, lid, mtu: None, gids }
}

/// A GID table entry; `None` for an empty one.
fn gid(directory: &Path, name: &str) -> Option<GidEntry> {
    let index = name.parse().ok()?;
    let gid: gdsync_device::Gid = text(&directory.join("gids").join(name))?.parse().ok()?;
    if gid.0 == [0; 16] {
        return None;
    }
    let kind = match text(&directory.join("gid_attrs/types").join(name)).as_deref() {
        Some("RoCE v2") => GidKind::RoceV2,
        Some("IB/RoCE v1") => GidKind::IbOrRoceV1,
        _ => GidKind::Unknown,
    };
    Some(GidEntry { index, gid, kind })
}
