//! A copy of `/sys`, `/proc` and `/dev` of a machine on which nothing is wrong.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Two sockets; below each a switch with a GPU and a card.
#[derive(Debug)]
pub(super) struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) const GPUS: [&str; 2] = ["0000:03:00.0", "0000:83:00.0"];
/// The bridges of the first socket: root port, and the switch's ports.
pub(super) const BRIDGES: [&str; 4] = ["0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:02:01.0"];

pub(super) const OPEN_DRIVER: &str =
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build";

impl Tree {
    pub(super) fn empty() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("gdasync-doctor-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // In memory where that can be: a tree is two hundred files.
        let memory = PathBuf::from("/dev/shm");
        let root = if memory.is_dir() { memory } else { std::env::temp_dir() }.join(name);
        let _ = fs::remove_dir_all(&root);
        for directory in ["sys/bus/pci/devices", "sys/class", "proc/self", "dev"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        Self(root)
    }

    pub(super) fn healthy() -> Self {
        let tree = Self::empty();
        tree.write("proc/driver/nvidia/version", OPEN_DRIVER);
        tree.write(
            "proc/driver/nvidia/params",
            "EnableStreamMemOPs: 0\nRegistryDwords: \"PeerMappingOverride=1;\"",
        );
        tree.write("proc/sys/kernel/osrelease", "6.8.0-45-generic");
        tree.write("proc/cmdline", "root=/dev/sda1 quiet");
        tree.write("proc/self/status", "Name:\tgdasync\nCpus_allowed_list:\t0-127");
        tree.gdrdrv("2.6", "opensource", "yes");
        fs::create_dir_all(tree.0.join("sys/module/nvidia_peermem")).unwrap();
        for file in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "gdrdrv"] {
            tree.write(&format!("dev/{file}"), "");
        }
        for (at, (domain, cpus)) in [("0", "0-63"), ("8", "64-127")].into_iter().enumerate() {
            let bus = |bus: &str| format!("0000:{domain}{bus}");
            let switch = format!("pci{}/{}/{}", bus("0"), bus("0:01.0"), bus("1:00.0"));
            let (gpu, card) = (
                format!("{switch}/{}/{}", bus("2:00.0"), bus("3:00.0")),
                format!("{switch}/{}/{}", bus("2:01.0"), bus("4:00.0")),
            );
            tree.pci(&gpu, "0x030200", ("0x10de", "0x2335"), (&at.to_string(), cpus));
            tree.write(
                &format!("sys/devices/{gpu}/resource"),
                "0x0 0xffffff 0x14220c\n0x0 0x3fffffffff 0x14220c",
            );
            tree.pci(&card, "0x020700", ("0x15b3", "0x1021"), (&at.to_string(), cpus));
            tree.write(
                &format!("proc/driver/nvidia/gpus/{}/information", bus("3:00.0")),
                "Model: NVIDIA H200",
            );
            for port in [bus("0:01.0"), bus("1:00.0"), bus("2:00.0"), bus("2:01.0")] {
                tree.bridge(&port, 0);
            }
            tree.hca(at, &card);
        }
        tree
    }

    pub(super) fn root(&self) -> &Path {
        &self.0
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("{text}\n")).unwrap();
        if path.starts_with(self.0.join("dev")) {
            fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
        }
    }

    /// Takes away a file, a link, or a directory with all in it.
    pub(super) fn remove(&self, path: &str) {
        let path = self.0.join(path);
        let is_directory = path.symlink_metadata().unwrap().is_dir();
        if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        fs::rename(self.0.join(from), self.0.join(to)).unwrap();
    }

    /// Also to the user of the tests, whose file it is.
    pub(super) fn close(&self, path: &str) {
        fs::set_permissions(self.0.join(path), fs::Permissions::from_mode(0o000)).unwrap();
    }

    pub(super) fn gdrdrv(&self, version: &str, flavour: &str, persistent: &str) {
        let text = format!(
            "Version: {version}\nBuilt for NVIDIA driver flavor: {flavour}\nUse persistent mapping: {persistent}\ndbg_enabled: 0"
        );
        self.write("proc/driver/gdrdrv/params", &text);
    }

    /// A PCI device below these bridges.
    pub(super) fn pci(
        &self,
        path: &str,
        class: &str,
        (vendor, device): (&str, &str),
        (numa, cpus): (&str, &str),
    ) {
        let directory = format!("sys/devices/{path}");
        for (file, text) in [
            ("class", class),
            ("vendor", vendor),
            ("device", device),
            ("numa_node", numa),
            ("local_cpulist", cpus),
        ] {
            self.write(&format!("{directory}/{file}"), text);
        }
        let address = path.rsplit('/').next().unwrap();
        self.link(&format!("sys/bus/pci/devices/{address}"), &directory);
    }

    /// A bridge whose access control is set so; other capabilities stand before it.
    pub(super) fn bridge(&self, address: &str, control: u8) {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x14]);
        config[0x140..0x144].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00]);
        config[0x146] = control;
        self.config(address, &config);
    }

    pub(super) fn config(&self, address: &str, bytes: &[u8]) {
        let directory = self.0.join("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("config"), bytes).unwrap();
    }

    /// `mlx5_N` on the card at this path.
    fn hca(&self, at: usize, card: &str) {
        let directory = format!("sys/class/infiniband/mlx5_{at}");
        for (file, text) in [
            ("fw_ver", "28.39.1002"),
            ("board_id", "MT_0000000838"),
            ("node_type", "1: CA"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/link_layer", "Ethernet"),
            ("ports/1/lid", "0x0"),
            ("ports/1/rate", "400 Gb/sec (4X NDR)"),
            ("ports/1/gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001"),
            ("ports/1/gid_attrs/types/0", "IB/RoCE v1"),
            ("ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
            ("ports/1/gid_attrs/types/3", "RoCE v2"),
        ] {
            self.write(&format!("{directory}/{file}"), text);
        }
        self.link(&format!("{directory}/device"), &format!("sys/devices/{card}"));
        fs::create_dir_all(self.0.join("sys/bus/pci/drivers/mlx5_core")).unwrap();
        self.link(&format!("sys/devices/{card}/driver"), "sys/bus/pci/drivers/mlx5_core");
        self.write(&format!("sys/class/infiniband_verbs/uverbs{at}/ibdev"), &format!("mlx5_{at}"));
        self.write(&format!("dev/infiniband/uverbs{at}"), "");
    }

    pub(super) fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(self.0.join(target), path).unwrap();
    }
}
