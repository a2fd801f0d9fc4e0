//! RDMA devices and PCI topology in sysfs.

use std::path::{Component, Path, PathBuf};
use std::{fmt, fs};

use super::port::{GidEntry, GidKind, LinkLayer, Port, PortState};

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

/// Trimmed text of a file; `None` if missing or empty.
pub(super) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Sorted names in a directory; empty if it does not exist.
pub(super) fn entries(path: &Path) -> Vec<String> {
    let names = fs::read_dir(path).into_iter().flatten();
    let mut names: Vec<_> = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// PCIe path between two devices, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// At most one PCIe switch (`PIX` of `nvidia-smi topo`).
    SameSwitch,
    /// Several PCIe switches below one root port (`PXB`).
    SeveralSwitches,
    /// A host bridge of the CPU (`PHB`).
    HostBridge,
    /// Two host bridges of one NUMA node (`NODE`).
    SameNode,
    /// The link between sockets (`SYS`), or unknown NUMA nodes.
    AcrossSockets,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameSwitch => "same switch",
            Self::SeveralSwitches => "several switches",
            Self::HostBridge => "host bridge",
            Self::SameNode => "same NUMA node",
            Self::AcrossSockets => "across sockets",
        })
    }
}

/// Location of a device in the PCI tree.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// PCI address `domain:bus:device.function`, lower-case hexadecimal.
    pub address: String,
    /// NUMA node, if known.
    pub numa: Option<u32>,
    /// Path from the host bridge to the device.
    chain: Vec<String>,
}

impl Place {
    /// Location of the device with this sysfs directory, or link to it; `None` if it is not a PCI device.
    pub fn of(directory: &Path) -> Option<Self> {
        let real = fs::canonicalize(directory).ok()?;
        let names: Vec<_> = real
            .components()
            .filter_map(|part| if let Component::Normal(name) = part { name.to_str() } else { None })
            .collect();
        let root = names.iter().rposition(|name| name.starts_with("pci") && name.contains(':'))?;
        let chain: Vec<_> = names[root..].iter().map(|&name| name.to_owned()).collect();
        let address = chain.last().filter(|name| is_address(name))?.clone();
        let numa = text(&real.join("numa_node")).and_then(|text| text.parse().ok());
        Some(Self { address, numa, chain })
    }

    /// PCI addresses of the bridges above it, from the root port.
    pub fn bridges(&self) -> &[String] {
        self.chain.get(1..self.chain.len() - 1).unwrap_or_default()
    }

    /// Distance to another device.
    pub fn distance(&self, other: &Self) -> Distance {
        let common = self.chain.iter().zip(&other.chain).take_while(|(a, b)| a == b).count();
        // Count from where the paths part: a switch has a port for each device.
        let below = |chain: &[String]| chain.len() - common;
        match common {
            0 if self.numa.is_some() && self.numa == other.numa => Distance::SameNode,
            0 => Distance::AcrossSockets,
            1 => Distance::HostBridge,
            _ if below(&self.chain) <= 2 && below(&other.chain) <= 2 => Distance::SameSwitch,
            _ => Distance::SeveralSwitches,
        }
    }
}

/// Whether `name` is a PCI address.
fn is_address(name: &str) -> bool {
    let mut parts = name.split([':', '.']);
    let mut number = |len| {
        parts.next().is_some_and(|part| part.len() >= len && part.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    number(4) && number(2) && number(2) && number(1)
}

/// NVIDIA GPUs in the PCI tree under `sysfs`.
pub fn gpus(sysfs: &Path) -> Vec<Place> {
    const NVIDIA: &str = "0x10de";
    // VGA and 3D controllers.
    const CLASSES: [&str; 2] = ["0x0300", "0x0302"];
    let directory = sysfs.join("bus/pci/devices");
    let is_gpu = |device: &Path| {
        let text = |name| text(&device.join(name)).unwrap_or_default();
        text("vendor") == NVIDIA && CLASSES.iter().any(|class| text("class").starts_with(class))
    };
    let mut found: Vec<_> = entries(&directory)
        .into_iter()
        .map(|name| directory.join(name))
        .filter(|device| is_gpu(device))
        .filter_map(|device| Place::of(&device))
        .collect();
    found.sort_by(|a, b| a.address.cmp(&b.address));
    found
}
