//! The `/sys`, `/proc` and `/dev` of a machine on which nothing is wrong (`healthy.txt`), and what goes wrong on it. What the
//! doctor then says is in `snapshots`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use tempfile::TempDir;

use super::super::areas::rdma::Limits;
use super::super::live::{Answer, Bar1, CudaFacts, FabricFacts, Route, attribute};
use super::super::machine::Machine;
use super::{set, set_variable, taken, told};

/// What goes wrong, in words, and how to make it so.
pub(super) type Case = (&'static str, fn(&Tree, &mut Machine));

/// The driver, the ways to map, and kernel modules.
pub(super) const DRIVER: &[Case] = &[
    ("an old driver", |tree, _| {
        tree.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  510.47.03  Release",
        );
    }),
    ("a version that is no version", |tree, _| {
        tree.write("proc/driver/nvidia/version", "NVRM version: Open Kernel Module, built by hand")
    }),
    ("no driver", |tree, _| tree.remove("proc/driver/nvidia")),
    ("the proprietary modules", |tree, _| {
        tree.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep",
        );
        tree.gdrdrv("2.6", "proprietary", "yes");
    }),
    ("a device file that is missing", |tree, _| tree.remove("dev/nvidia-uvm")),
    ("no device file of any GPU", |tree, _| {
        ["dev/nvidia0", "dev/nvidia1"].iter().for_each(|file| tree.remove(file))
    }),
    ("doorbells that only root may ring", |tree, _| {
        tree.write("proc/driver/nvidia/params", "EnableStreamMemOPs: 0\nRegistryDwords: \"\"")
    }),
    ("root without the option", |tree, machine| {
        tree.write("proc/driver/nvidia/params", "RegistryDwords: \"PeerMappingOverride=0; RMOther=1\"");
        machine.is_root = true;
    }),
    ("gdrdrv does not map", |_, machine| {
        machine.mapping.facts.backends[0].1 = Err("ioctl: Invalid argument".into())
    }),
    ("nothing maps", |_, machine| {
        machine.mapping.facts.backends.iter_mut().for_each(|(_, outcome)| *outcome = Err("refused".into()));
    }),
    ("mapping hangs before all", |_, machine| {
        machine.mapping.facts.backends.clear();
        machine.mapping.trouble = Some("no answer within 4s".into());
    }),
    ("no libgdrapi", |_, machine| machine.mapping.facts.gdrapi = None),
    ("NVIDIA's libgdrapi without its module", |_, machine| {
        machine.mapping.facts.gdrapi = Some(Err("gdr_open fails".into()))
    }),
    ("a GPU that NCCL's RMA does not serve", |_, machine| set(machine, attribute::RDMA_WITH_VMM, 0)),
    ("gdrdrv without a file", |tree, _| tree.remove("dev/gdrdrv")),
    ("an old gdrdrv", |tree, _| tree.gdrdrv("1.3", "opensource", "yes")),
    ("gdrdrv for another driver", |tree, _| tree.gdrdrv("2.6", "proprietary", "yes")),
    ("gdrdrv whose mappings vanish", |tree, _| tree.gdrdrv("2.6", "opensource", "no")),
    ("gdrdrv unloaded, its file left", |tree, _| tree.remove("proc/driver/gdrdrv")),
    ("no gdrdrv", |tree, _| {
        tree.remove("proc/driver/gdrdrv");
        tree.remove("dev/gdrdrv");
    }),
    ("no peermem, but dma-bufs", |tree, _| tree.remove("sys/module/nvidia_peermem")),
    ("the old peermem", |tree, _| {
        tree.remove("sys/module/nvidia_peermem");
        tree.write("sys/module/nv_peer_mem/refcnt", "0");
    }),
];

pub(super) const CUDA: &[Case] = &[
    ("no libcuda", |_, machine| {
        machine.cuda.facts.version = Some(Err("loading libcuda.so.1: no such file".into()))
    }),
    ("CUDA does not start", |_, machine| {
        machine.cuda.facts = CudaFacts {
            version: Some(Result::Ok(13000)),
            count: Some(Err("cuInit: 999".into())),
            gpus: Vec::new(),
        };
    }),
    ("CUDA hangs", |_, machine| {
        machine.cuda.facts.count = None;
        machine.cuda.trouble = Some("no answer within 4s, in cuInit".into());
    }),
    ("an old CUDA", |_, machine| machine.cuda.facts.version = Some(Result::Ok(11040))),
    ("GPUs that are hidden", |_, machine| machine.cuda.facts.count = Some(Result::Ok(0))),
    ("a GPU that answers nothing", |_, machine| {
        machine.cuda.facts.gpus[1].attributes.clear();
        machine.cuda.trouble = Some("no answer within 4s".into());
    }),
    ("a GPU that is too old", |_, machine| {
        set(machine, attribute::COMPUTE_MAJOR, 6);
        set(machine, attribute::COMPUTE_MINOR, 1);
    }),
    ("a GPU newer than the tables", |_, machine| set(machine, attribute::COMPUTE_MAJOR, 99)),
    ("no GPUDirect RDMA", |_, machine| set(machine, attribute::RDMA, 0)),
    ("no dma-bufs", |_, machine| set(machine, attribute::DMA_BUF, 0)),
    ("no dma-bufs and no peermem", |tree, machine| {
        set(machine, attribute::DMA_BUF, 0);
        set(machine, attribute::COMPUTE_MAJOR, 7);
        tree.remove("sys/module/nvidia_peermem");
    }),
    ("a dma-buf that is claimed and refused", |_, machine| {
        machine.cuda.facts.gpus[1].dma_buf = Some(Err("status 801".into()))
    }),
    ("no NOR waits", |_, machine| set(machine, attribute::WAIT_NOR, 0)),
    ("inbound writes without order", |_, machine| set(machine, attribute::RDMA_WRITES_ORDERING, 0)),
    ("inbound writes without order or flush", |_, machine| {
        set(machine, attribute::RDMA_WRITES_ORDERING, 0);
        set(machine, attribute::RDMA_FLUSH_OPTIONS, 0);
    }),
    ("streams that flush", |_, machine| {
        set(machine, attribute::RDMA_WRITES_ORDERING, 0);
        set(machine, attribute::FLUSH_REMOTE_WRITES, 1);
    }),
    ("memory operations that do not run", |_, machine| {
        machine.cuda.facts.gpus[1].memop = Some(Err("what a stream wrote did not show".into()))
    }),
    ("a GPU that another process has for itself", |_, machine| taken(machine, 1, attribute::EXCLUSIVE)),
    ("the first GPU, had by another process", |_, machine| {
        taken(machine, 0, attribute::EXCLUSIVE);
        machine.mapping.facts.backends.iter_mut().for_each(|(_, outcome)| *outcome = Err("taken".into()));
        machine.choice.facts.gpu = Some(Err("taken".into()));
    }),
    ("a GPU that nobody may use", |_, machine| taken(machine, 1, attribute::PROHIBITED)),
    ("a capture that is refused", |_, machine| {
        machine.cuda.facts.gpus[1].capture = Some(Err("status 900".into()))
    }),
    ("a probe that was killed before the capture", |_, machine| {
        machine.cuda.facts.gpus[1].capture = None;
        machine.cuda.trouble = Some("killed by signal 11, in capturing".into());
    }),
    ("GPUs that do not reach each other", |_, machine| {
        machine.cuda.facts.gpus[1].peers = [(0, false)].into()
    }),
    ("a GPU alone", |_, machine| machine.cuda.facts.gpus[1].peers.clear()),
    ("BAR1 that is used up", |_, machine| {
        let bar1 = Bar1 { total: 256 << 30, free: 1 << 20, used: (256 << 30) - (1 << 20) };
        machine.cuda.facts.gpus[1].bar1 = Some(Result::Ok(bar1));
    }),
    ("a small BAR1", |_, machine| {
        let bar1 = Bar1 { total: 256 << 20, free: 250 << 20, used: 6 << 20 };
        machine.cuda.facts.gpus[1].bar1 = Some(Result::Ok(bar1));
    }),
    ("no NVML", |_, machine| machine.cuda.facts.gpus[1].bar1 = Some(Err("NVML is not here".into()))),
    ("no NVML and no resources", |tree, machine| {
        machine.cuda.facts.gpus[1].bar1 = Some(Err("NVML is not here".into()));
        tree.remove("sys/bus/pci/devices/0000:83:00.0/resource");
    }),
];

pub(super) const NETWORK: &[Case] = &[
    ("libfabric was not to be loaded", |_, machine| machine.fabric = None),
    ("neither libfabric nor a device that needs it", |tree, machine| {
        machine.fabric = None;
        ["dev/cxi0", "sys/bus/pci/drivers/efa"].iter().for_each(|path| tree.remove(path));
    }),
    ("no libfabric", |_, machine| {
        let library = Some(Err("libfabric.so.1: no such file".into()));
        machine.fabric = Some(told(FabricFacts { library, providers: Vec::new() }));
    }),
    ("libfabric hangs", |_, machine| {
        let trouble = Some("no answer within 4s, in fi_getinfo".into());
        machine.fabric = Some(Answer { facts: FabricFacts::default(), trouble });
    }),
    ("libfabric of another vendor", |_, machine| {
        let providers = machine.fabric.iter_mut().flat_map(|asked| &mut asked.facts.providers);
        providers.for_each(|(name, found)| {
            if name == "efa" { *name = "udp".into() } else { *found = Err("it sends no messages".into()) }
        });
    }),
    ("Slingshot without a network", |_, machine| _ = machine.environment.remove("SLINGSHOT_VNIS")),
    ("no libibverbs", |_, machine| {
        machine.verbs.facts.libibverbs = Some(Err("libibverbs.so.1: no such file".into()))
    }),
    ("libibverbs hangs", |_, machine| {
        machine.verbs.trouble = Some("no answer within 4s, in opening mlx5_0".into())
    }),
    ("libibverbs before dma-bufs", |_, machine| machine.verbs.facts.dma_bufs = false),
    ("devices that cannot be listed", |_, machine| {
        machine.verbs.facts.no_list = Some("Function not implemented".into())
    }),
    ("no libmlx5", |_, machine| machine.verbs.facts.libmlx5 = Some(Err("libmlx5.so.1: no such file".into()))),
    ("an old libmlx5", |_, machine| {
        machine.verbs.facts.libmlx5 = Some(Result::Ok("/usr/lib/libmlx5.so.1.24.42.0".into()))
    }),
    ("a libmlx5 without dedicated registers", |_, machine| {
        machine.verbs.facts.libmlx5 = Some(Result::Ok("/usr/lib/libmlx5.so.1.24.44.0".into()))
    }),
    ("an old kernel", |tree, _| tree.write("proc/sys/kernel/osrelease", "5.4.0-150-generic")),
    ("a card that does not open", |_, machine| {
        machine.verbs.facts.devices[1].open = Some(Err("Permission denied".into()))
    }),
    ("a card that libibverbs does not list", |_, machine| machine.verbs.facts.devices.truncate(1)),
    ("a card of the old kind", |tree, machine| {
        tree.write("sys/class/infiniband/mlx5_1/device/device", "0x1007");
        tree.link("sys/class/infiniband/mlx5_1/device/driver", "sys/bus/pci/drivers/mlx4_core");
        machine.verbs.facts.devices[1].devx = None;
    }),
    ("a card with a link that it cannot have", |tree, _| {
        tree.write("sys/class/infiniband/mlx5_1/device/device", "0x1011")
    }),
    ("no link", |tree, _| tree.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")),
    ("no address", |tree, _| tree.remove("sys/class/infiniband/mlx5_1/ports/1/gids")),
    ("a link-local address only", |tree, _| tree.remove("sys/class/infiniband/mlx5_1/ports/1/gids/3")),
    ("InfiniBand without a subnet manager", |tree, _| {
        tree.write("sys/class/infiniband/mlx5_1/ports/1/link_layer", "InfiniBand")
    }),
    ("a device file that is missing", |tree, _| tree.remove("dev/infiniband/uverbs1")),
    ("iWARP", |tree, _| tree.write("sys/class/infiniband/mlx5_1/node_type", "4: RNIC")),
    ("no ib_uverbs", |tree, _| tree.remove("sys/class/infiniband_verbs/uverbs1")),
    ("no DevX", |_, machine| {
        machine.verbs.facts.devices[1].devx = Some(Err("Operation not permitted".into()))
    }),
    ("hardly any memory may be locked", |_, machine| machine.limits.memlock = Some(64 << 10)),
    ("little memory may be locked", |_, machine| machine.limits.memlock = Some(8 << 20)),
    ("a capability that lifts the limit", |_, machine| {
        machine.limits = Limits { memlock: Some(64 << 10), is_lifted: true }
    }),
    ("an IOMMU that translates", |tree, _| {
        tree.write("sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "DMA-FQ");
        tree.write("proc/cmdline", "quiet intel_iommu=on");
    }),
    ("an IOMMU that passes all", |tree, _| {
        tree.write("sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "identity")
    }),
    ("a switch that redirects", |tree, _| tree.bridge(BRIDGES[3], 0x1d)),
    ("a switch that only checks", |tree, _| tree.bridge(BRIDGES[3], 0x01)),
    ("configuration that only root may read", |tree, _| tree.config(BRIDGES[1], &[0; 64])),
    ("a list of capabilities that bites its tail", |tree, _| {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x10]);
        tree.config(BRIDGES[1], &config);
    }),
    ("a card behind the host bridge", |tree, _| {
        tree.pci("pci0000:00/0000:00:05.0/0000:09:00.0", "0x020700", ("0x15b3", "0x1021"), ("0", "0-63"));
        tree.link("sys/devices/pci0000:00/0000:00:05.0/0000:09:00.0/driver", "sys/bus/pci/drivers/mlx5_core");
        tree.link("sys/class/infiniband/mlx5_0/device", "sys/devices/pci0000:00/0000:00:05.0/0000:09:00.0");
    }),
    ("GPUs on two sockets without NVLink", |_, machine| {
        machine.cuda.facts.gpus[1].nvlinks.values_mut().for_each(|joined| *joined = false)
    }),
    ("GPUs on two sockets and no NVML", |_, machine| machine.cuda.facts.gpus[1].nvlinks.clear()),
    ("a process on the other socket", |tree, _| tree.write("proc/self/status", "Cpus_allowed_list:\t64-127")),
];

pub(super) const SURROUNDINGS: &[Case] = &[
    ("a container that has all", |tree, _| tree.write(".dockerenv", "")),
    ("a pod without RDMA's files", |tree, machine| {
        set_variable(machine, "KUBERNETES_SERVICE_HOST", "10.0.0.1");
        tree.remove("dev/infiniband");
    }),
    ("no /proc", |tree, _| tree.rename("proc/self", "proc/nobody")),
    ("one hardware queue", |_, machine| set_variable(machine, "CUDA_DEVICE_MAX_CONNECTIONS", "1")),
    ("hardware queues without number", |_, machine| {
        set_variable(machine, "CUDA_DEVICE_MAX_CONNECTIONS", "many")
    }),
    ("a variable that is wrong", |_, machine| set_variable(machine, "GDSYNC_PORT", "first")),
    ("a backend that does not exist", |_, machine| set_variable(machine, "GDRCOPY_BACKEND", "bar2")),
    ("a variable with a slip in its name", |_, machine| set_variable(machine, "GDSYNC_DEVISE", "mlx5_1")),
    ("launches that wait", |_, machine| set_variable(machine, "CUDA_LAUNCH_BLOCKING", "1")),
    ("GPUs that a variable hides", |_, machine| set_variable(machine, "CUDA_VISIBLE_DEVICES", "")),
    ("a container without compute", |_, machine| {
        set_variable(machine, "NVIDIA_DRIVER_CAPABILITIES", "utility")
    }),
    ("a device that does not open", |_, machine| {
        machine.choice.facts.route = Some(Err("Cannot allocate memory".into()))
    }),
    ("a device that does not exist", |_, machine| {
        machine.choice.facts.device = Some(Err("no RDMA device 'mlx9'".into()));
        machine.choice.facts.route = None;
    }),
    ("opening that hangs", |_, machine| {
        machine.choice.facts.route = None;
        machine.choice.trouble = Some("no answer within 4s, in opening mlx5_0".into());
    }),
    ("a GPU that does not open", |_, machine| machine.choice.facts.gpu = Some(Err("cuInit: 999".into()))),
    ("doorbells that are refused", |_, machine| {
        machine.choice.facts.route = Some(Result::Ok(Route::Proxy));
        machine.choice.facts.not_direct = Some("set PeerMappingOverride=1".into());
    }),
    ("the proxy asked for", |_, machine| {
        machine.choice.facts.route = Some(Result::Ok(Route::Proxy));
        set_variable(machine, "GDSYNC_PATH", "proxy");
    }),
    ("the software HCA though there are cards", |_, machine| {
        machine.choice.facts.route = Some(Result::Ok(Route::Soft));
        machine.choice.facts.reaches_other_hosts = false;
    }),
];

/// Device files that are closed to the user.
pub(super) const ALONE: &[Case] = &[
    ("a GPU that is closed", |tree, _| tree.close("dev/nvidia1")),
    ("gdrdrv that is closed", |tree, _| tree.close("dev/gdrdrv")),
    ("a card that is closed", |tree, _| tree.close("dev/infiniband/uverbs0")),
];

/// The files of a machine, at first those of `healthy.txt`.
#[derive(Debug)]
pub(super) struct Tree(TempDir);

pub(super) const GPUS: [&str; 2] = ["0000:03:00.0", "0000:83:00.0"];
/// The bridges of the first socket: root port, and the switch's ports.
pub(super) const BRIDGES: [&str; 4] = ["0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:02:01.0"];

impl Tree {
    pub(super) fn healthy() -> Self {
        // In memory where that can be: a tree is two hundred files.
        let root = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let tree = Self(root);
        for (n, (bus, cpus)) in [("0", "0-63"), ("8", "64-127")].into_iter().enumerate() {
            let lines = include_str!("healthy.txt").replace("{n}", &n.to_string());
            let lines = lines.replace("{bus}", bus).replace("{cpus}", cpus);
            for line in lines.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
                match (line.split_once(" ="), line.split_once(" -> ")) {
                    (_, Some((path, target))) => tree.link(path, target),
                    (Some((path, text)), _) => {
                        tree.write(path, &text.trim_start().replace("\\n", "\n").replace("\\t", "\t"));
                    }
                    _ => fs::create_dir_all(tree.root().join(line)).unwrap(),
                }
            }
            for bridge in BRIDGES {
                tree.bridge(&bridge.replacen("0000:0", &format!("0000:{bus}"), 1), 0);
            }
        }
        tree
    }

    pub(super) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("{text}\n")).unwrap();
        if path.starts_with(self.root().join("dev")) {
            fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
        }
    }

    /// Takes away a file, a link, or a directory with all in it.
    pub(super) fn remove(&self, path: &str) {
        let path = self.root().join(path);
        let is_directory = path.symlink_metadata().unwrap().is_dir();
        if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        fs::rename(self.root().join(from), self.root().join(to)).unwrap();
    }

    /// Also to the user of the tests, whose file it is.
    pub(super) fn close(&self, path: &str) {
        fs::set_permissions(self.root().join(path), fs::Permissions::from_mode(0o000)).unwrap();
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
        let directory = self.root().join("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("config"), bytes).unwrap();
    }

    pub(super) fn link(&self, path: &str, target: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(self.root().join(target), path).unwrap();
    }
}
