//! RDMA devices, limits, the PCI bus.

use super::super::areas::limits::Limits;
use super::super::areas::topology;
use super::super::probe::Status::{Fail, Ok, Skip, Warn};
use super::rig::{Case, healthy};
use super::tree::{BRIDGES, Tree};

pub(super) const CASES: &[Case] = &[
    Case {
        what: "no libibverbs",
        change: |_, machine| {
            machine.verbs.facts.libibverbs = Some(Err("libibverbs.so.1: no such file".into()))
        },
        says: &[("rdma.core", "", Fail, "no such file", "libibverbs1")],
    },
    Case {
        what: "libibverbs hangs",
        change: |_, machine| machine.verbs.trouble = Some("no answer within 4s, in opening mlx5_0".into()),
        says: &[("rdma.core", "", Fail, "in opening mlx5_0", "ibv_devinfo")],
    },
    Case {
        what: "libibverbs before dma-bufs",
        change: |_, machine| machine.verbs.facts.dma_bufs = false,
        says: &[("rdma.core", "", Warn, "cannot register dma-bufs", "rdma-core 34")],
    },
    Case {
        what: "devices that cannot be listed",
        change: |_, machine| machine.verbs.facts.no_list = Some("Function not implemented".into()),
        says: &[("rdma.core", "", Fail, "not implemented", "ib_uverbs")],
    },
    Case {
        what: "no libmlx5",
        change: |_, machine| machine.verbs.facts.libmlx5 = Some(Err("libmlx5.so.1: no such file".into())),
        says: &[("rdma.mlx5", "", Warn, "a thread posts", "ibverbs-providers")],
    },
    Case {
        what: "an old libmlx5",
        change: |_, machine| {
            machine.verbs.facts.libmlx5 = Some(Result::Ok("/usr/lib/libmlx5.so.1.24.42.0".into()))
        },
        says: &[("rdma.mlx5", "", Warn, "no queues in GPU memory", "rdma-core 43")],
    },
    Case {
        what: "a libmlx5 without dedicated registers",
        change: |_, machine| {
            machine.verbs.facts.libmlx5 = Some(Result::Ok("/usr/lib/libmlx5.so.1.24.44.0".into()))
        },
        says: &[(
            "rdma.mlx5",
            "",
            Ok,
            "older than 45: queue pairs in GPU memory share a doorbell register",
            "",
        )],
    },
    Case {
        what: "an old kernel",
        change: |tree, _| tree.write("proc/sys/kernel/osrelease", "5.4.0-150-generic"),
        says: &[("rdma.kernel", "", Warn, "5.4.0-150-generic is older than 5.12", "nvidia-peermem")],
    },
    Case {
        what: "a card that does not open",
        change: |_, machine| machine.verbs.facts.devices[1].open = Some(Err("Permission denied".into())),
        says: &[("rdma.card", "mlx5_1", Fail, "does not open: Permission denied", "rdma.node")],
    },
    Case {
        what: "a card that libibverbs does not list",
        change: |_, machine| machine.verbs.facts.devices.truncate(1),
        says: &[
            ("rdma.card", "mlx5_1", Fail, "does not list it", "modprobe ib_uverbs"),
            ("rdma.devx", "mlx5_1", Skip, "not opened", ""),
        ],
    },
    Case {
        what: "a card of the old kind",
        change: |tree, machine| {
            tree.write("sys/class/infiniband/mlx5_1/device/device", "0x1007");
            tree.link("sys/class/infiniband/mlx5_1/device/driver", "sys/bus/pci/drivers/mlx4_core");
            machine.verbs.facts.devices[1].devx = None;
        },
        says: &[
            ("rdma.card", "mlx5_1", Ok, "ConnectX-3 Pro, driver mlx4_core, firmware 28.39.1002", ""),
            ("rdma.devx", "mlx5_1", Skip, "no mlx5 card", ""),
        ],
    },
    Case {
        what: "a card with a link that it cannot have",
        change: |tree, _| tree.write("sys/class/infiniband/mlx5_1/device/device", "0x1011"),
        says: &[("rdma.card", "mlx5_1", Warn, "ports should be InfiniBand", "update firmware")],
    },
    Case {
        what: "no link",
        change: |tree, _| tree.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN"),
        says: &[
            ("rdma.link", "mlx5_1", Warn, "port 1 is DOWN, RoCE, 400 Gb/sec", "cable"),
            ("rdma.gids", "mlx5_1", Skip, "no port has a link", ""),
            ("topology.gpu_hca", "GPU1", Warn, "across sockets", "bring up mlx5_1"),
        ],
    },
    Case {
        what: "no address",
        change: |tree, _| tree.remove("sys/class/infiniband/mlx5_1/ports/1/gids"),
        says: &[
            ("rdma.gids", "mlx5_1", Warn, "port 1 has none", "ip addr add"),
            ("topology.gpu_hca", "GPU1", Warn, "across sockets", "bring up mlx5_1"),
        ],
    },
    Case {
        what: "a link-local address only",
        change: |tree, _| tree.remove("sys/class/infiniband/mlx5_1/ports/1/gids/3"),
        says: &[("rdma.gids", "mlx5_1", Warn, "(RoCE v1): peers must be in the same", "ip addr add")],
    },
    Case {
        what: "InfiniBand without a subnet manager",
        change: |tree, _| tree.write("sys/class/infiniband/mlx5_1/ports/1/link_layer", "InfiniBand"),
        says: &[
            ("rdma.link", "mlx5_1", Ok, "InfiniBand", ""),
            ("rdma.gids", "mlx5_1", Warn, "no LID", "opensm"),
            ("topology.gpu_hca", "GPU1", Warn, "across sockets", "bring up mlx5_1"),
        ],
    },
    Case {
        what: "a device file that is missing",
        change: |tree, _| tree.remove("dev/infiniband/uverbs1"),
        says: &[(
            "rdma.node",
            "mlx5_1",
            Fail,
            "/dev/infiniband/uverbs1 is missing",
            "--device /dev/infiniband",
        )],
    },
    Case {
        what: "iWARP without its connection manager",
        change: |tree, _| tree.write("sys/class/infiniband/mlx5_1/node_type", "4: RNIC"),
        says: &[
            ("rdma.link", "mlx5_1", Ok, "ACTIVE, iWARP", ""),
            ("rdma.gids", "mlx5_1", Ok, "iWARP", ""),
            ("rdma.node", "mlx5_1", Fail, "rdma_cm, which iWARP needs, is not", "modprobe rdma_ucm"),
        ],
    },
    Case {
        what: "no ib_uverbs",
        change: |tree, _| tree.remove("sys/class/infiniband_verbs/uverbs1"),
        says: &[("rdma.node", "mlx5_1", Fail, "offers none", "modprobe ib_uverbs")],
    },
    Case {
        what: "no DevX",
        change: |_, machine| {
            machine.verbs.facts.devices[1].devx = Some(Err("Operation not permitted".into()))
        },
        says: &[("rdma.devx", "mlx5_1", Warn, "not permitted", "UCTX_EN")],
    },
    Case {
        what: "hardly any memory may be locked",
        change: |_, machine| machine.limits.memlock = Some(64 << 10),
        says: &[("limits.memlock", "", Fail, "64 KiB may be locked", "ulimit -l unlimited")],
    },
    Case {
        what: "little memory may be locked",
        change: |_, machine| machine.limits.memlock = Some(8 << 20),
        says: &[("limits.memlock", "", Warn, "8 MiB may be locked", "--ulimit memlock=-1")],
    },
    Case {
        what: "a capability that lifts the limit",
        change: |_, machine| {
            machine.limits = Limits { memlock: Some(64 << 10), ipc_lock: true, beyond: Some(true) }
        },
        says: &[
            ("limits.memlock", "", Ok, "CAP_IPC_LOCK lifts it", ""),
            ("limits.ipc_lock", "", Ok, "effective", ""),
        ],
    },
    Case {
        what: "a capability without effect",
        change: |_, machine| {
            machine.limits = Limits { memlock: Some(64 << 10), ipc_lock: true, beyond: Some(false) }
        },
        says: &[
            ("limits.memlock", "", Fail, "64 KiB may be locked", "memlock"),
            ("limits.ipc_lock", "", Warn, "without effect", "user namespace"),
        ],
    },
    Case {
        what: "an IOMMU that translates",
        change: |tree, _| {
            tree.write("sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "DMA-FQ");
            tree.write("proc/cmdline", "quiet intel_iommu=on");
        },
        says: &[("iommu.mode", "", Warn, "(kernel options intel_iommu=on)", "iommu=pt")],
    },
    Case {
        what: "an IOMMU that passes all",
        change: |tree, _| tree.write("sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "identity"),
        says: &[("iommu.mode", "", Ok, "passes addresses", "")],
    },
    Case {
        what: "a switch that redirects",
        change: |tree, _| tree.bridge(BRIDGES[3], 0x1d),
        says: &[("iommu.acs", "", Warn, "redirected by 0000:02:01.0", "setpci")],
    },
    Case { what: "a switch that only checks", change: |tree, _| tree.bridge(BRIDGES[3], 0x01), says: &[] },
    Case {
        what: "configuration that only root may read",
        change: |tree, _| tree.config(BRIDGES[1], &[0; 64]),
        says: &[("iommu.acs", "", Skip, "only root can read that of 0000:01:00.0", "sudo")],
    },
    Case {
        what: "a list of capabilities that bites its tail",
        change: |tree, _| {
            let mut config = vec![0; 4096];
            config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x10]);
            tree.config(BRIDGES[1], &config);
        },
        says: &[],
    },
    Case {
        what: "a card behind the host bridge",
        change: |tree, _| {
            tree.pci("pci0000:00/0000:00:05.0/0000:09:00.0", "0x020700", ("0x15b3", "0x1021"), ("0", "0-63"));
            tree.link(
                "sys/devices/pci0000:00/0000:00:05.0/0000:09:00.0/driver",
                "sys/bus/pci/drivers/mlx5_core",
            );
            tree.link(
                "sys/class/infiniband/mlx5_0/device",
                "sys/devices/pci0000:00/0000:00:05.0/0000:09:00.0",
            );
        },
        says: &[
            ("rdma.card", "mlx5_0", Ok, "at 0000:09:00.0", ""),
            ("iommu.acs", "", Ok, "4 bridges", ""),
            (
                "topology.gpu_hca",
                "GPU0",
                Warn,
                "nearest is mlx5_0, host bridge (mlx5_0 PHB, mlx5_1 SYS)",
                "lspci -tv",
            ),
        ],
    },
    Case {
        what: "GPUs on two sockets without NVLink",
        change: |_, machine| {
            machine.cuda.facts.gpus[1].nvlinks.values_mut().for_each(|joined| *joined = false)
        },
        says: &[(
            "topology.gpu_gpu",
            "GPU1",
            Warn,
            "GPU0 SYS: some traffic crosses sockets",
            "nvidia-smi topo -m",
        )],
    },
    Case {
        what: "GPUs on two sockets and no NVML",
        change: |_, machine| machine.cuda.facts.gpus[1].nvlinks.clear(),
        says: &[("topology.gpu_gpu", "GPU1", Skip, "GPU0 SYS; NVML could not be asked", "")],
    },
    Case {
        what: "a process on the other socket",
        change: |tree, _| tree.write("proc/self/status", "Cpus_allowed_list:\t64-127"),
        says: &[
            (
                "topology.cpus",
                "GPU0",
                Warn,
                "NUMA node 0, CPUs 0-63; this process runs on 64-127",
                "numactl --cpunodebind=0",
            ),
            ("topology.cpus", "mlx5_0", Warn, "runs on 64-127", "taskset -c 0-63"),
        ],
    },
];

#[test]
fn ways_between_gpus_are_told_apart() {
    let bridge = "pci0000:00/0000:00:05.0";
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0";
    for (below, joined, status, found) in [
        (bridge, Some(true), Ok, "GPU1 NV, GPU2 NV: NVLink"),
        (bridge, Some(false), Warn, "GPU1 PHB, GPU2 NV: some traffic passes a host bridge"),
        (bridge, None, Skip, "GPU1 PHB, GPU2 NV; NVML could not be asked"),
        (switch, Some(false), Ok, "GPU1 PIX, GPU2 NV: no host bridge"),
        (switch, None, Ok, "GPU1 PIX, GPU2 NV: no host bridge"),
    ] {
        let tree = Tree::healthy();
        tree.pci(&format!("{below}/0000:09:00.0"), "0x030200", ("0x10de", "0x2335"), ("0", "0-63"));
        let mut machine = healthy(&tree);
        let links = &mut machine.cuda.facts.gpus[0].nvlinks;
        links.extend(joined.map(|joined| ("0000:09:00.0".to_owned(), joined)));
        let probes = topology::probe(&machine);
        let peers = probes.iter().find(|probe| probe.name == "topology.gpu_gpu").expect("of GPU0");
        assert!(peers.status == status && peers.found.starts_with(found), "{joined:?}: {peers:?}");
    }
}
