//! Properties of an RDMA device, read without opening it.

use std::path::Path;

use super::port::Port;
use super::sysfs::Class;
use super::sysfs::{Distance, Place};

/// A GPU and its PCIe distance from a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NearGpu {
    /// PCI address `domain:bus:device.function` of the GPU, lower-case hexadecimal.
    pub pci: String,
    /// PCIe path between the two.
    pub distance: Distance,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Name of the device.
    pub name: String,
    /// PCI location of its card, if any.
    pub place: Option<Place>,
    /// Speaks iWARP, which is not supported.
    pub is_iwarp: bool,
    /// Driven by libmlx5.
    pub is_mlx5: bool,
    /// Its ports.
    pub ports: Vec<Port>,
    /// GPUs, nearest first; empty without a card.
    pub gpus: Vec<NearGpu>,
}

impl Survey {
    /// Surveys device `name`. `ask` queries its ports if sysfs does not list it.
    pub(super) fn of(
        sysfs: &Path,
        name: &str,
        is_mlx5: bool,
        gpus: &[Place],
        ask: impl FnOnce() -> Vec<Port>,
    ) -> Self {
        let class = Class::of(sysfs, name);
        let place = class.as_ref().and_then(|class| class.place(sysfs));
        let near = |place: &Place| {
            let near = |gpu: &Place| NearGpu { pci: gpu.address.clone(), distance: place.distance(gpu) };
            let mut gpus: Vec<_> = gpus.iter().map(near).collect();
            gpus.sort_by_key(|gpu| gpu.distance);
            gpus
        };
        Self {
            name: name.to_owned(),
            is_iwarp: class.as_ref().is_some_and(Class::is_iwarp),
            is_mlx5,
            ports: class.as_ref().map_or_else(ask, Class::ports),
            gpus: place.as_ref().map(near).unwrap_or_default(),
            place,
        }
    }

    /// Why it is unusable; `None` if it is usable.
    pub fn refusal(&self) -> Option<String> {
        if self.is_iwarp {
            return Some("it speaks iWARP, which is not supported".into());
        }
        let mut refusals = self.ports.iter().map(Port::refusal);
        let first = refusals.next().unwrap_or_else(|| Some("it has no port".into()))?;
        refusals.all(|refusal| refusal.is_some()).then_some(first)
    }

    /// Distance to the GPU at this PCI address, or to the nearest one.
    fn distance(&self, gpu: Option<&str>) -> Option<Distance> {
        self.gpus.iter().find(|near| gpu.is_none_or(|gpu| near.pci == gpu)).map(|near| near.distance)
    }
}

/// Index of the default device: the first usable one among those nearest to a GPU, mlx5 cards first.
///
/// With the PCI address of a GPU, nearest to that one.
pub fn preferred(devices: &[Survey], gpu: Option<&str>) -> Option<usize> {
    let usable = devices.iter().enumerate().filter(|(_, device)| device.refusal().is_none());
    let order = |device: &Survey| {
        let distance = device.distance(gpu);
        (distance.is_none(), distance, !device.is_mlx5)
    };
    usable.min_by_key(|(_, device)| order(device)).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::super::port::{GidKind, LinkLayer};
    use super::super::sysfs;
    use super::*;

    /// A temporary tree like `/sys`.
    struct Tree(PathBuf);

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const SWITCH: &str = "pci0000:00/0000:00:01.0/0000:01:00.0";

    impl Tree {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("gdsync-sysfs-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
            fs::create_dir_all(root.join("class/infiniband")).unwrap();
            Self(root)
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        /// Adds a PCI device below these bridges.
        fn pci(&self, path: &str, class: &str, vendor: &str, numa: &str) {
            for (file, text) in [("class", class), ("vendor", vendor), ("numa_node", numa)] {
                self.write(&format!("devices/{path}/{file}"), text);
            }
            let address = path.rsplit('/').next().unwrap();
            let link = self.0.join("bus/pci/devices").join(address);
            symlink(self.0.join("devices").join(path), link).unwrap();
        }

        fn gpu(&self, path: &str, numa: &str) {
            self.pci(path, "0x030200", "0x10de", numa);
        }

        /// Adds an RDMA device with one port on this PCI device.
        fn card(&self, name: &str, path: &str, state: &str) {
            self.pci(path, "0x020700", "0x15b3", "0");
            let class = format!("class/infiniband/{name}");
            self.write(&format!("{class}/node_type"), "1: CA");
            let port = format!("{class}/ports/1");
            self.write(&format!("{port}/state"), state);
            self.write(&format!("{port}/link_layer"), "Ethernet");
            self.write(&format!("{port}/lid"), "0x0");
            self.write(&format!("{port}/gids/0"), "fe80:0000:0000:0000:0000:0000:0000:0001");
            self.write(&format!("{port}/gid_attrs/types/0"), "IB/RoCE v1");
            self.write(&format!("{port}/gids/3"), "0000:0000:0000:0000:0000:ffff:0a00:0001");
            self.write(&format!("{port}/gid_attrs/types/3"), "RoCE v2");
            self.write(&format!("{port}/gids/4"), "0000:0000:0000:0000:0000:0000:0000:0000");
            symlink(self.0.join("devices").join(path), self.0.join(&class).join("device")).unwrap();
        }

        fn survey(&self, name: &str) -> Survey {
            Survey::of(&self.0, name, true, &sysfs::gpus(&self.0), Vec::new)
        }
    }

    #[test]
    fn distances_follow_the_pci_tree() {
        let tree = Tree::new("distances");
        tree.card("mlx5_0", &format!("{SWITCH}/0000:02:00.0/0000:03:00.0"), "4: ACTIVE");
        tree.gpu(&format!("{SWITCH}/0000:02:01.0/0000:04:00.0"), "0");
        tree.gpu(
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:05:00.0/0000:06:00.0/0000:07:00.0",
            "0",
        );
        tree.gpu("pci0000:00/0000:00:02.0/0000:08:00.0", "0");
        tree.gpu("pci0000:40/0000:40:01.0/0000:41:00.0", "0");
        tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", "1");
        // Neither is an NVIDIA GPU.
        tree.pci("pci0000:80/0000:80:02.0/0000:82:00.0", "0x030000", "0x1002", "1");
        tree.pci("pci0000:80/0000:80:03.0/0000:83:00.0", "0x040300", "0x10de", "1");
        let device = tree.survey("mlx5_0");
        let found: Vec<_> = device.gpus.iter().map(|gpu| (gpu.pci.as_str(), gpu.distance)).collect();
        let expected = [
            ("0000:04:00.0", Distance::SameSwitch),
            ("0000:07:00.0", Distance::SeveralSwitches),
            ("0000:08:00.0", Distance::HostBridge),
            ("0000:41:00.0", Distance::SameNode),
            ("0000:81:00.0", Distance::AcrossSockets),
        ];
        assert_eq!(found, expected);
        let place = device.place.unwrap();
        assert_eq!((place.address.as_str(), place.numa), ("0000:03:00.0", Some(0)));
    }

    #[test]
    fn unknown_numa_nodes_are_not_equal() {
        let tree = Tree::new("nodes");
        tree.gpu("pci0000:40/0000:40:01.0/0000:41:00.0", "-1");
        tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", "-1");
        let gpus = sysfs::gpus(&tree.0);
        assert_eq!(gpus[0].numa, None);
        assert_eq!(gpus[0].distance(&gpus[1]), Distance::AcrossSockets);
    }

    #[test]
    fn ports_and_gids_are_read() {
        let tree = Tree::new("ports");
        tree.card("mlx5_0", "pci0000:00/0000:00:01.0/0000:03:00.0", "4: ACTIVE");
        let device = tree.survey("mlx5_0");
        let [port] = &device.ports[..] else { panic!("{:?}", device.ports) };
        assert_eq!((port.number, port.link, port.lid), (1, LinkLayer::Ethernet, 0));
        assert!(port.is_active());
        let gids: Vec<_> = port.gids.iter().map(|entry| (entry.index, entry.kind)).collect();
        assert_eq!(gids, [(0, GidKind::IbOrRoceV1), (3, GidKind::RoceV2)]);
        assert_eq!(port.best_gid().unwrap().gid.to_string(), "0000:0000:0000:0000:0000:ffff:0a00:0001");
    }

    #[test]
    fn nearest_usable_device_is_preferred() {
        let tree = Tree::new("preferred");
        tree.gpu(&format!("{SWITCH}/0000:02:01.0/0000:04:00.0"), "0");
        tree.card("a_far", "pci0000:80/0000:80:01.0/0000:81:00.0", "4: ACTIVE");
        tree.card("b_down", &format!("{SWITCH}/0000:02:00.0/0000:03:00.0"), "1: DOWN");
        tree.card("c_iwarp", &format!("{SWITCH}/0000:02:03.0/0000:05:00.0"), "4: ACTIVE");
        tree.write("class/infiniband/c_iwarp/node_type", "4: RNIC");
        tree.card("d_near", "pci0000:00/0000:00:02.0/0000:06:00.0", "4: ACTIVE");
        let mut devices: Vec<_> =
            ["a_far", "b_down", "c_iwarp", "d_near"].map(|name| tree.survey(name)).into();
        let preferred = |devices: &[Survey]| super::preferred(devices, None);
        assert_eq!(devices[preferred(&devices).unwrap()].name, "d_near");
        assert!(devices[1].refusal().unwrap().contains("port 1 is DOWN"));
        devices.pop();
        assert_eq!(devices[preferred(&devices).unwrap()].name, "a_far");
        assert!(devices[2].refusal().unwrap().contains("iWARP"));
        assert_eq!(preferred(&devices[1..]), None);
    }

    #[test]
    fn each_gpu_prefers_its_nearest_device() {
        let tree = Tree::new("pairs");
        for (bridge, card, gpu) in [("01", "02", "03"), ("04", "05", "06")] {
            let bridge = format!("pci0000:00/0000:00:{bridge}.0/0000:{bridge}:00.0");
            tree.gpu(&format!("{bridge}/0000:{bridge}:01.0/0000:{gpu}:00.0"), "0");
            tree.card(
                &format!("mlx5_{card}"),
                &format!("{bridge}/0000:{bridge}:02.0/0000:{card}:00.0"),
                "4: ACTIVE",
            );
        }
        let devices = ["mlx5_02", "mlx5_05"].map(|name| tree.survey(name));
        assert_eq!(preferred(&devices, Some("0000:03:00.0")), Some(0));
        assert_eq!(preferred(&devices, Some("0000:06:00.0")), Some(1));
        assert_eq!(preferred(&devices, Some("0000:99:00.0")), Some(0));
    }

    #[test]
    fn software_device_is_placed_at_its_network_card() {
        let tree = Tree::new("software");
        tree.gpu("pci0000:00/0000:00:02.0/0000:08:00.0", "0");
        tree.pci("pci0000:00/0000:00:03.0/0000:09:00.0", "0x020000", "0x8086", "0");
        tree.write("class/infiniband/rxe0/parent", "eth0");
        tree.write("class/net/eth0/mtu", "1500");
        let card = tree.0.join("devices/pci0000:00/0000:00:03.0/0000:09:00.0");
        symlink(card, tree.0.join("class/net/eth0/device")).unwrap();
        let device = tree.survey("rxe0");
        assert_eq!(device.distance(None), Some(Distance::HostBridge));
        assert!(device.refusal().unwrap().contains("no port"));
        // On an interface without a card.
        tree.write("class/infiniband/rxe1/parent", "lo");
        assert_eq!(tree.survey("rxe1").place, None);
    }

    #[test]
    fn device_missing_in_sysfs_is_queried() {
        let tree = Tree::new("unknown");
        tree.gpu("pci0000:00/0000:00:02.0/0000:08:00.0", "0");
        let port = Port {
            number: 2,
            state: super::super::port::PortState::ACTIVE,
            link: LinkLayer::Ethernet,
            lid: 0,
            mtu: Some(4096),
            gids: Vec::new(),
        };
        let device = Survey::of(&tree.0, "mlx5_9", true, &sysfs::gpus(&tree.0), || vec![port.clone()]);
        assert_eq!((device.ports, device.gpus, device.place), (vec![port], Vec::new(), None));
    }
}
