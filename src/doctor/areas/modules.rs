//! Kernel modules beside the driver: gdrdrv, and those that hand GPU addresses to the RDMA core.

use super::super::live::attribute;
use super::super::machine::Machine;
use super::super::probe::{Check, Probe};
use super::super::requirements::GDRDRV as NEEDED;
use super::super::system::Node;
use super::driver::numbers;

const GDRDRV: Check = Check {
    name: "modules.gdrdrv",
    tried: "/proc/driver/gdrdrv/params, and access(2) to /dev/gdrdrv",
    why: "GDRCopy's kernel module is the first way to map GPU memory; it is not needed where another one works",
};
const PEERMEM: Check = Check {
    name: "modules.peermem",
    tried: "/sys/module/nvidia_peermem and nv_peer_mem",
    why: "RDMA devices register GPU memory by this module where there are no dma-bufs",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&GDRDRV, &PEERMEM];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    vec![gdrdrv(machine), peermem(machine)]
}

fn gdrdrv(machine: &Machine) -> Probe {
    let system = &machine.system;
    let node = system.node("/dev/gdrdrv");
    let Some(params) = system.text("/proc/driver/gdrdrv/params") else {
        return match node {
            Node::Missing => GDRDRV.skip("not loaded"),
            _ => GDRDRV.warn(
                "/dev/gdrdrv is there, and the module is not loaded",
                "`modprobe gdrdrv`, or remove the file",
            ),
        };
    };
    let field = |name: &str| {
        params.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let version = field("Version").unwrap_or("unknown");
    let mut found = format!("version {version}");
    if let Some(flavour) = field("Built for NVIDIA driver flavor") {
        found += &format!(", built for the {flavour} driver");
    }
    let is_open =
        |text: String| if text.contains("Open Kernel Module") { "opensource" } else { "proprietary" };
    let driver = system.text("/proc/driver/nvidia/version").map(is_open);
    match node {
        _ if numbers(version).is_some_and(|pair| !NEEDED.is_met(pair)) => GDRDRV.fail(
            format!("{found}, older than {}", NEEDED.least()),
            "install gdrdrv 2.6, or unload it (`rmmod gdrdrv`): other ways to map work without",
        ),
        Node::Missing => GDRDRV.warn(
            format!("{found}, and there is no /dev/gdrdrv"),
            "`mknod /dev/gdrdrv c $(awk '$2==\"gdrdrv\"{print $1}' /proc/devices) 0 && chmod 666 /dev/gdrdrv` as root; a \
             container takes `--device /dev/gdrdrv`",
        ),
        Node::Closed => GDRDRV.warn(
            format!("{found}, and /dev/gdrdrv is closed to this user"),
            "`chmod 666 /dev/gdrdrv` as root, or a udev rule that does it",
        ),
        Node::Usable if driver.zip(field("Built for NVIDIA driver flavor")).is_some_and(|(is, built)| is != built) => {
            GDRDRV.warn(
                format!("{found}, and the loaded driver is {}", driver.unwrap_or_default()),
                "build gdrdrv against the loaded driver",
            )
        }
        Node::Usable if field("Use persistent mapping") == Some("no") => GDRDRV.warn(
            format!("{found}, without persistent mappings: they vanish when memory is freed, so it is not used"),
            "`modprobe -r gdrdrv && modprobe gdrdrv use_persistent_mapping=1`",
        ),
        Node::Usable => GDRDRV.ok(found),
    }
}

fn peermem(machine: &Machine) -> Probe {
    let loaded = ["nvidia_peermem", "nv_peer_mem"]
        .into_iter()
        .find(|name| machine.system.exists(&format!("/sys/module/{name}")));
    let gpus = &machine.cuda.facts.gpus;
    let has_dma_bufs = gpus.iter().all(|gpu| gpu.attribute(attribute::DMA_BUF) != 0);
    match loaded {
        Some("nv_peer_mem") => PEERMEM.warn(
            "nv_peer_mem is loaded, which drivers of 470 and newer replace",
            "`rmmod nv_peer_mem && modprobe nvidia-peermem`",
        ),
        Some(name) => PEERMEM.ok(format!("{name} is loaded")),
        None if machine.hcas().is_empty() => PEERMEM.skip("not loaded; there is no RDMA device"),
        None if gpus.is_empty() => PEERMEM.skip("not loaded; there is no GPU that CUDA shows"),
        None if has_dma_bufs => PEERMEM.skip("not loaded, and not needed: GPU memory is registered by dma-bufs"),
        None => PEERMEM.warn(
            "not loaded, and there are no dma-bufs: GPU memory cannot be registered with RDMA devices. The CPU proxy stages it in \
             pinned host memory: a copy by the GPU before and after each message, a thread that rings in its place, as much host \
             memory as is registered, and no windows over it",
            "`modprobe nvidia-peermem` (needs the RDMA core of MLNX_OFED or DOCA-OFED), or install the open kernel modules; \
             `MP_GPU_PATH=peer` has such memory refused instead of staged",
        ),
    }
}
