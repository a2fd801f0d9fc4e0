//! The files of the emulated devices under `/sys` and `/dev`, kept in memory.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use crate::address::{Link, Port};

/// Name of an interface that exists everywhere and is up, named as that of the ports.
pub(crate) const INTERFACE: &str = "lo";
/// Character devices of verbs have this major number; minors begin at 192.
pub(crate) const MAJOR: u32 = 231;
const MINOR: u32 = 192;
/// Where programs look whether a card reaches GPU memory by its address.
const PEER_MEMORY: [&str; 2] = ["/sys/module/nvidia_peermem", "/sys/kernel/mm/memory_peers/nv_mem"];
/// The most links on a path.
const MAX_LINKS: usize = 40;

/// What a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Dir,
    File(Content),
    /// Its target, from the root on.
    Link(String),
    /// The character device of a device.
    Device(usize),
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Text(String),
    /// Depends on the address of the port of a device, which starts its HCA.
    Address(usize, Address),
}

/// What a file says of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Gid(u32),
    Guid,
    Lid,
}

impl Address {
    /// The line for a port.
    pub(crate) fn text(self, port: Port) -> String {
        match self {
            Self::Gid(index) => {
                let gid = port.gid(index).map_or(gdsync_device::Gid([0; 16]), |(gid, _)| gid);
                format!("{gid}\n")
            }
            Self::Guid => {
                let mut text = String::new();
                for (at, byte) in port.guid().iter().enumerate() {
                    let colon = if at > 0 && at % 2 == 0 { ":" } else { "" };
                    _ = write!(text, "{colon}{byte:02x}");
                }
                text + "\n"
            }
            Self::Lid => format!("{:#x}\n", port.lid()),
        }
    }
}

/// Where a path leads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'a> {
    /// To this node, under this path without links.
    Node(String, &'a Node),
    /// Nowhere, where only emulated files are.
    Nothing,
    /// To files of the system.
    Elsewhere,
}

/// All files.
#[derive(Debug)]
pub(crate) struct Tree {
    /// By path, without a slash at the end.
    nodes: BTreeMap<String, Node>,
    /// Directories below which there are only emulated files.
    roots: Vec<String>,
}

/// What `stat` says of an emulated file's device: one without a name, as that of sysfs.
pub(crate) const FILE_SYSTEM: u64 = 0xcafe;

/// The number of an emulated file in its file system.
pub(crate) fn inode(path: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish() | 1
}

/// The number of a device file.
pub(crate) fn device_number(device: usize) -> u64 {
    libc::makedev(MAJOR, MINOR + u32::try_from(device).unwrap_or_default())
}

impl Tree {
    /// The files of `devices` devices.
    pub(crate) fn new(devices: usize, link: Link) -> Self {
        let mut tree = Self { nodes: BTreeMap::new(), roots: Vec::new() };
        for root in ["/dev/infiniband", "/sys/class/infiniband", "/sys/class/infiniband_verbs"] {
            tree.root(root);
        }
        tree.text("/sys/class/infiniband_verbs/abi_version", "6");
        for module in PEER_MEMORY {
            tree.root(module);
            tree.text(&format!("{module}/version"), "1.3");
        }
        for device in 0..devices {
            tree.device(device, link);
        }
        tree
    }

    /// As where the modules for GPU memory are not loaded.
    pub(crate) fn without_peer_memory(mut self) -> Self {
        for module in PEER_MEMORY {
            self.roots.retain(|root| root != module);
            self.nodes.retain(|path, _| !path.starts_with(module));
        }
        self
    }

    fn root(&mut self, path: &str) {
        self.roots.push(path.to_owned());
        self.nodes.insert(path.to_owned(), Node::Dir);
    }

    fn add(&mut self, path: &str, node: Node) {
        let mut parent = path;
        while let Some((above, _)) = parent.rsplit_once('/') {
            if above.is_empty() || !self.is_claimed(above) {
                break;
            }
            self.nodes.entry(above.to_owned()).or_insert(Node::Dir);
            parent = above;
        }
        self.nodes.insert(path.to_owned(), node);
    }

    fn text(&mut self, path: &str, text: &str) {
        self.add(path, Node::File(Content::Text(format!("{text}\n"))));
    }

    fn device(&mut self, device: usize, link: Link) {
        let bus = format!("cafe:{:02x}", device + 1);
        let bdf = format!("{bus}:00.0");
        let bridge = format!("/sys/devices/pcicafe:00/cafe:00:{:02x}.0", device + 1);
        let pci = format!("{bridge}/{bdf}");
        self.root(&pci);
        let (name, verbs) = (format!("mlx5_{device}"), format!("uverbs{device}"));
        let ib = format!("{pci}/infiniband/{name}");
        let uverbs = format!("{pci}/infiniband_verbs/{verbs}");
        self.add(&format!("/dev/infiniband/{verbs}"), Node::Device(device));
        self.add(&format!("/sys/class/infiniband/{name}"), Node::Link(ib.clone()));
        self.add(&format!("/sys/class/infiniband_verbs/{verbs}"), Node::Link(uverbs.clone()));
        let slot = format!("/sys/bus/pci/devices/{bdf}");
        self.roots.push(slot.clone());
        self.nodes.insert(slot, Node::Link(pci.clone()));
        // NCCL finds the device from here.
        self.nodes.insert(format!("/sys/class/pci_bus/{bus}"), Node::Link(format!("{bridge}/pci_bus/{bus}")));
        self.nodes.insert(format!("{pci}/subsystem"), Node::Link("/sys/bus/pci".to_owned()));

        // SAFETY: asks for a number. (The standard library's count opens files, which would come back here.)
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        let cpus = usize::try_from(cpus).unwrap_or(1).max(1);
        for (file, text) in [
            ("vendor", "0x15b3"),
            ("device", "0x1021"),
            ("subsystem_vendor", "0x15b3"),
            ("subsystem_device", "0x0041"),
            ("class", "0x020700"),
            ("revision", "0x00"),
            ("irq", "0"),
            ("enable", "1"),
            ("numa_node", "0"),
            ("local_cpus", &cpu_mask(cpus)),
            ("local_cpulist", &format!("0-{}", cpus - 1)),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_width", "16"),
            ("modalias", "pci:v000015B3d00001021sv000015B3sd00000041bc02sc07i00"),
            ("uevent", &format!("DRIVER=mlx5_core\nPCI_SLOT_NAME={bdf}")),
        ] {
            self.text(&format!("{pci}/{file}"), text);
        }
        self.add(&format!("{pci}/net/{INTERFACE}"), Node::Dir);
        self.add(&format!("{pci}/driver"), Node::Link("/sys/bus/pci/drivers/mlx5_core".into()));

        for (file, text) in [
            ("dev", format!("{MAJOR}:{}", MINOR as usize + device).as_str()),
            ("ibdev", &name),
            ("abi_version", "1"),
        ] {
            self.text(&format!("{uverbs}/{file}"), text);
        }
        self.add(&format!("{uverbs}/device"), Node::Link(pci.clone()));

        for (file, text) in [
            ("node_type", "1: CA"),
            ("node_desc", "gdasync card"),
            ("fw_ver", "28.39.1002"),
            ("hw_rev", "0"),
            ("hca_type", "MT4129"),
            ("board_id", "MT_0000000838"),
        ] {
            self.text(&format!("{ib}/{file}"), text);
        }
        self.add(&format!("{ib}/device"), Node::Link(pci));
        for file in ["node_guid", "sys_image_guid"] {
            self.add(&format!("{ib}/{file}"), Node::File(Content::Address(device, Address::Guid)));
        }
        self.port(&format!("{ib}/ports/1"), device, link);
    }

    fn port(&mut self, port: &str, device: usize, link: Link) {
        for (file, text) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", "200 Gb/sec (2X NDR)"),
            ("sm_lid", if link == Link::InfiniBand { "0x1" } else { "0x0" }),
            ("sm_sl", "0"),
            ("lid_mask_count", "0"),
            ("cap_mask", &format!("{:#010x}", link.capabilities())),
            ("link_layer", &format!("{link:?}")),
        ] {
            self.text(&format!("{port}/{file}"), text);
        }
        self.add(&format!("{port}/lid"), Node::File(Content::Address(device, Address::Lid)));
        for index in 0..link.pkeys() {
            self.text(&format!("{port}/pkeys/{index}"), if index == 0 { "0xffff" } else { "0x0000" });
        }
        let any = Port { link, number: 1 };
        for index in 0..link.gids() {
            let gid = Node::File(Content::Address(device, Address::Gid(index)));
            self.add(&format!("{port}/gids/{index}"), gid);
            if let Some((_, kind)) = any.gid(index) {
                self.text(&format!("{port}/gid_attrs/types/{index}"), kind.name());
                if link == Link::Ethernet {
                    self.text(&format!("{port}/gid_attrs/ndevs/{index}"), INTERFACE);
                }
            }
        }
    }

    /// Whether a path without links is that of an emulated file or missing.
    fn is_claimed(&self, path: &str) -> bool {
        let below = |root: &String| {
            path.strip_prefix(root.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.roots.iter().any(below)
    }

    /// What a path names. `follow`: also if its last part is a link.
    pub(crate) fn find(&self, path: &str, follow: bool) -> Found<'_> {
        let mut left: Vec<String> = parts(path);
        let mut done = String::new();
        let mut links = 0;
        let mut led_to = None;
        while let Some(part) = left.pop() {
            if part == ".." {
                done.truncate(done.rfind('/').unwrap_or(0));
                continue;
            }
            let parent = self.nodes.get(&done);
            if self.is_claimed(&done) && parent != Some(&Node::Dir) {
                return Found::Nothing;
            }
            done.push('/');
            done.push_str(&part);
            if let Some(Node::Link(target)) = self.nodes.get(&done)
                && (follow || !left.is_empty())
            {
                links += 1;
                if links > MAX_LINKS {
                    return Found::Nothing;
                }
                left.extend(parts(target));
                led_to = Some(target);
                done.clear();
            }
        }
        match self.nodes.get(&done) {
            Some(node) => Found::Node(done, node),
            None if self.is_claimed(&done) => Found::Nothing,
            // Out of the emulated files.
            None if led_to == Some(&done) => Found::Node(done, &Node::Dir),
            None => Found::Elsewhere,
        }
    }

    /// Names in a directory, with what they are.
    pub(crate) fn list<'a>(&'a self, dir: &'a str) -> impl Iterator<Item = (&'a str, &'a Node)> {
        let inside = self.nodes.range(format!("{dir}/")..).map_while(move |(path, node)| {
            path.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/')).map(|name| (name, node))
        });
        inside.filter(|(name, _)| !name.contains('/'))
    }
}

/// The parts of a path, the last one first.
fn parts(path: &str) -> Vec<String> {
    path.split('/').rev().filter(|part| !matches!(*part, "" | ".")).map(str::to_owned).collect()
}

/// A mask of the first CPUs, in groups of 32.
fn cpu_mask(cpus: usize) -> String {
    let groups = cpus.div_ceil(32);
    let group = |at: usize| {
        let bits = (cpus - at * 32).min(32);
        format!("{:08x}", u32::MAX >> (32 - bits))
    };
    (0..groups).rev().map(group).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tree: &Tree, path: &str) -> Option<String> {
        match tree.find(path, true) {
            Found::Node(_, Node::File(Content::Text(text))) => Some(text.clone()),
            _ => None,
        }
    }

    impl Tree {
        /// All paths, also by way of links.
        pub(crate) fn paths(&self) -> impl Iterator<Item = &String> {
            self.nodes.keys()
        }
    }

    #[test]
    fn links_lead_to_the_device() {
        let tree = Tree::new(2, Link::Ethernet);
        for path in [
            "/sys/class/infiniband/mlx5_1/device/vendor",
            "/sys/class/infiniband_verbs/uverbs1/device/vendor",
            "/sys/bus/pci/devices/cafe:02:00.0/vendor",
            "/sys/class/pci_bus/cafe:02/../../cafe:02:00.0/vendor",
            "//sys/class/./infiniband//mlx5_1/../../vendor",
            "/sys/class/net/../infiniband/mlx5_1/device/infiniband/../vendor",
        ] {
            assert_eq!(text(&tree, path).as_deref(), Some("0x15b3\n"), "{path}");
        }
        assert_eq!(text(&tree, "/sys/class/infiniband_verbs/uverbs1/ibdev").as_deref(), Some("mlx5_1\n"));
        assert_eq!(text(&tree, "/sys/class/infiniband_verbs/uverbs1/dev").as_deref(), Some("231:193\n"));
        let subsystem = tree.find("/sys/class/infiniband/mlx5_0/device/subsystem", true);
        assert_eq!(subsystem, Found::Node("/sys/bus/pci".to_owned(), &Node::Dir));
        let link = tree.find("/sys/class/infiniband/mlx5_0", false);
        assert!(matches!(link, Found::Node(_, Node::Link(_))), "{link:?}");
    }

    #[test]
    fn missing_files_are_missing_only_where_all_are_emulated() {
        let tree = Tree::new(1, Link::InfiniBand);
        for path in [
            "/sys/class/infiniband/mlx5_1",
            "/sys/class/infiniband/mlx5_0/ports/2",
            "/sys/class/infiniband/mlx5_0/node_type/x",
            "/dev/infiniband/rdma_cm",
        ] {
            assert_eq!(tree.find(path, true), Found::Nothing, "{path}");
        }
        let around = "/sys/class/pci_bus/cafe:01/../max_link_speed";
        for path in
            ["/sys/class/net", around, "/sys/class/infiniband_mad", "/sys", "/", "/sys/class/infiniband/.."]
        {
            assert_eq!(tree.find(path, true), Found::Elsewhere, "{path}");
        }
        assert_eq!(tree.find("/dev/infiniband/uverbs0", true).node(), Some(&Node::Device(0)));
    }

    impl<'a> Found<'a> {
        fn node(&self) -> Option<&'a Node> {
            if let Self::Node(_, node) = self { Some(node) } else { None }
        }
    }

    #[test]
    fn directories_list_their_own_names() {
        let tree = Tree::new(2, Link::Ethernet);
        let names = |dir: &str| tree.list(dir).map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(names("/sys/class/infiniband"), ["mlx5_0", "mlx5_1"]);
        assert_eq!(names("/sys/class/infiniband_verbs"), ["abi_version", "uverbs0", "uverbs1"]);
        assert_eq!(names("/dev/infiniband"), ["uverbs0", "uverbs1"]);
        let Found::Node(port, _) = tree.find("/sys/class/infiniband/mlx5_0/ports/1/gids", true) else {
            panic!("a directory");
        };
        assert_eq!(names(&port).len(), 16);
    }

    #[test]
    fn masks_cover_the_cpus() {
        assert_eq!(cpu_mask(1), "00000001");
        assert_eq!(cpu_mask(32), "ffffffff");
        assert_eq!(cpu_mask(40), "000000ff,ffffffff");
    }
}
