//! The NVIDIA kernel driver, the modules beside it, and the ways to map GPU memory.

use super::super::live::{Live, attribute};
use super::super::machine::{Machine, Node};
use super::super::requirements::{DRIVER, GDRDRV, OPEN_MODULES, numbers};
use super::{Area, Check, Probe};

area! {
    DRIVER_AREA "driver" "NVIDIA driver" asks [] probes by probe_driver;
    VERSION "driver.version" tried "/proc/driver/nvidia/version",
        why "what streams and mappings can do follows from the version of the driver";
    FLAVOUR "driver.flavour" tried "/proc/driver/nvidia/version",
        why "only the open kernel modules export GPU memory as dma-bufs, which RDMA devices register without nvidia-peermem";
    NODES "driver.nodes" tried "access(2) to /dev/nvidiactl, /dev/nvidia-uvm and /dev/nvidiaN",
        why "CUDA reaches the driver through these files";
    DOORBELLS "driver.doorbells" tried "PeerMappingOverride in /proc/driver/nvidia/params, and the user",
        why "a GPU rings the doorbell of a card only if its driver lets it map the card's registers (IO memory)";
}

fn probe_driver(machine: &Machine) -> Vec<Probe> {
    let Some(text) = machine.system.text("/proc/driver/nvidia/version") else {
        let without = "the NVIDIA driver is not loaded";
        let first = match machine.gpus().len() {
            0 if !machine.has_sysfs() => {
                VERSION.skip("not known whether there is a GPU: /sys is not mounted")
            }
            0 => VERSION.skip("no NVIDIA GPU on the PCI bus"),
            count => VERSION.warn(
                format!("{count} NVIDIA GPU(s) on the PCI bus, and no driver for them"),
                format!(
                    "install the NVIDIA driver {} or newer, with open kernel modules; `modprobe nvidia`",
                    DRIVER.least()
                ),
            ),
        };
        return vec![first, FLAVOUR.skip(without), NODES.skip(without), DOORBELLS.skip(without)];
    };
    vec![version(&text), flavour(machine, &text), nodes(machine), doorbells(machine)]
}

/// `580.159.04`: the first word of the first line that looks like a version.
fn version_in(text: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version)
}

fn version(text: &str) -> Probe {
    let Some(version) = version_in(text) else {
        let found = format!("a version that cannot be read: {}", text.lines().next().unwrap_or_default());
        return VERSION.warn(found, "compare with what `nvidia-smi` says");
    };
    let found = format!("{} {version}", DRIVER.name);
    match DRIVER.lack(&found, numbers(version)) {
        Some(lack) => VERSION.fail(lack, format!("install {} {} or newer", DRIVER.name, DRIVER.least())),
        None => VERSION.ok(found),
    }
}

fn is_open(text: &str) -> bool {
    text.lines().next().is_some_and(|line| line.contains("Open Kernel Module"))
}

fn flavour(machine: &Machine, text: &str) -> Probe {
    if is_open(text) {
        return FLAVOUR.ok("open kernel modules");
    }
    match machine.hcas().is_empty() {
        true => FLAVOUR.ok("proprietary kernel modules; there is no RDMA device that would register GPU memory"),
        false => FLAVOUR.warn(
            format!("proprietary kernel modules: no {}", OPEN_MODULES.for_what()),
            "on Turing and newer install the open ones (package nvidia-open, or `-m=kernel-open` of the installer); \
             else load nvidia-peermem",
        ),
    }
}

fn nodes(machine: &Machine) -> Probe {
    let gpus = machine.system.names("/proc/driver/nvidia/gpus").len();
    let fixed = ["nvidiactl".to_owned(), "nvidia-uvm".to_owned()];
    let each = machine.system.names("/dev").into_iter().filter(|name| {
        name.strip_prefix("nvidia")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    });
    let each: Vec<_> = each.collect();
    let count = each.len();
    let named = |state: Node| {
        let names =
            fixed.iter().chain(&each).filter(|name| machine.system.node(&format!("/dev/{name}")) == state);
        names.map(|name| format!("/dev/{name}")).collect::<Vec<_>>().join(", ")
    };
    let (missing, closed) = (named(Node::Missing), named(Node::Closed));
    match () {
        () if !missing.is_empty() => NODES.fail(
            format!("missing: {missing}"),
            "run `nvidia-modprobe -u -c 0` or `nvidia-smi` once as root; in a container start it with `--gpus all`",
        ),
        () if count == 0 => NODES.fail(
            "missing: /dev/nvidiaN of every GPU",
            "run `nvidia-smi` once as root; in a container start it with `--gpus all`",
        ),
        () if !closed.is_empty() => NODES.fail(
            format!("closed to this user: {closed}"),
            "`chmod 666` them, or join the group that owns them; NVreg_DeviceFileMode of the module sets it for good",
        ),
        () => NODES.ok(format!("control, uvm and {count} of {} GPU(s) open to this user", gpus.max(count))),
    }
}

/// Whether the module lets every user map IO memory.
fn has_override(machine: &Machine) -> bool {
    let params = machine.system.text("/proc/driver/nvidia/params").unwrap_or_default();
    let words = params.lines().find_map(|line| line.strip_prefix("RegistryDwords:")).unwrap_or_default();
    let words = words.replace(['"', ' '], "");
    words.split(';').any(|word| word == "PeerMappingOverride=1")
}

fn doorbells(machine: &Machine) -> Probe {
    let cards = machine.hcas().iter().filter(|hca| hca.is_mlx5(&machine.system)).count();
    match () {
        () if has_override(machine) => DOORBELLS.ok("PeerMappingOverride=1: any user's GPU may ring"),
        () if cards == 0 => DOORBELLS.skip("PeerMappingOverride is not set; there is no mlx5 card whose doorbell it would be"),
        () if machine.is_root => DOORBELLS.ok("PeerMappingOverride is not set, and root does not need it"),
        () => DOORBELLS.warn(
            "PeerMappingOverride is not set: only root's GPUs may ring, so a thread posts for this user",
            "put `options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"` into /etc/modprobe.d/nvidia.conf, \
             rebuild the initramfs if the module is in it, and reboot",
        ),
    }
}

area! {
    MODULES_AREA "modules" "Kernel modules" asks [Live::Cuda]
        probes by |machine| vec![module(machine), peermem(machine)];
    MODULE "modules.gdrdrv" tried "/proc/driver/gdrdrv/params, and access(2) to /dev/gdrdrv",
        why "GDRCopy's kernel module is the first way to map GPU memory; it is not needed where another one works";
    PEERMEM "modules.peermem" tried "/sys/module/nvidia_peermem and nv_peer_mem",
        why "RDMA devices register GPU memory by this module where there are no dma-bufs";
}

fn module(machine: &Machine) -> Probe {
    let system = &machine.system;
    let node = system.node("/dev/gdrdrv");
    let Some(params) = system.text("/proc/driver/gdrdrv/params") else {
        return match node {
            Node::Missing => MODULE.skip("not loaded"),
            _ => MODULE.warn(
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
        _ if numbers(version).is_some_and(|pair| !GDRDRV.is_met(pair)) => MODULE.fail(
            format!("{found}, older than {}", GDRDRV.least()),
            "install gdrdrv 2.6, or unload it (`rmmod gdrdrv`): other ways to map work without",
        ),
        Node::Missing => MODULE.warn(
            format!("{found}, and there is no /dev/gdrdrv"),
            "`mknod /dev/gdrdrv c $(awk '$2==\"gdrdrv\"{print $1}' /proc/devices) 0 && chmod 666 /dev/gdrdrv` as root; a \
             container takes `--device /dev/gdrdrv`",
        ),
        Node::Closed => MODULE.warn(
            format!("{found}, and /dev/gdrdrv is closed to this user"),
            "`chmod 666 /dev/gdrdrv` as root, or a udev rule that does it",
        ),
        Node::Usable if driver.zip(field("Built for NVIDIA driver flavor")).is_some_and(|(is, built)| is != built) => {
            MODULE.warn(
                format!("{found}, and the loaded driver is {}", driver.unwrap_or_default()),
                "build gdrdrv against the loaded driver",
            )
        }
        Node::Usable if field("Use persistent mapping") == Some("no") => MODULE.warn(
            format!("{found}, without persistent mappings: they vanish when memory is freed, so it is not used"),
            "`modprobe -r gdrdrv && modprobe gdrdrv use_persistent_mapping=1`",
        ),
        Node::Usable => MODULE.ok(found),
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

area! {
    MAPPING_AREA "mapping" "CPU mappings of GPU memory" asks [Live::Cuda, Live::Mapping]
        probes by |machine| vec![mapping(machine), nccl(machine)];
    ANY "mapping.any" tried "mapping 64 KiB of GPU 0, writing and reading it back, by each way: the kernel module gdrdrv, mmap of a CUDA dma-buf, the \
         driver's own resource manager (rm)",
        why "CPU mappings cost 0.1 us where cudaMemcpy costs 5: rings, flags and small payload in GPU memory need one way";
    NCCL "mapping.nccl" tried "gdr_open of libgdrapi.so, as NCCL loads it; attributes of the GPUs",
        why "NCCL's RMA and GIN over sockets need GDRCopy";
}

fn mapping(machine: &Machine) -> Probe {
    if !machine.has_driver() {
        return ANY.skip("the NVIDIA driver is not loaded");
    }
    if machine.cuda.facts.gpus.first().is_some_and(|gpu| gpu.is_taken) {
        return ANY.skip("GPU 0 may not be used now; see gpu.memop_run");
    }
    let backends = &machine.mapping.facts.backends;
    let works = backends.iter().find_map(|(way, outcome)| Some((way, outcome.as_ref().ok()?)));
    let refused =
        backends.iter().filter_map(|(way, outcome)| Some(format!("{way}: {}", outcome.as_ref().err()?)));
    let refused = refused.collect::<Vec<_>>().join("; ");
    match (works, &machine.mapping.trouble) {
        (Some((way, found)), _) if refused.is_empty() => ANY.ok(format!("{way} serves: {found}")),
        (Some((way, found)), _) => ANY.ok(format!("{way} serves: {found}. Not by {refused}")),
        (None, Some(trouble)) => ANY.fail(trouble.as_str(), "try again with `--timeout 60`, and look into `dmesg`"),
        (None, None) => ANY.fail(
            format!("GPU memory cannot be mapped here: {refused}"),
            "`GDRCOPY_BACKEND=rm RUST_LOG=debug gdasync gdrcopy sanity` says more; rings stay in host memory meanwhile",
        ),
    }
}

fn nccl(machine: &Machine) -> Probe {
    const INSTALL: &str = "`capi/install --only gdrapi` installs ours, which needs no module";
    if !machine.has_driver() {
        return NCCL.skip("the NVIDIA driver is not loaded");
    }
    let lacks = machine.cuda.facts.gpus.iter().find_map(|gpu| match gpu {
        _ if gpu.attributes.is_empty() => None,
        _ if gpu.attribute(attribute::COMPUTE_MAJOR) < 7 => Some((gpu, "is older than Volta")),
        _ if gpu.attribute(attribute::RDMA_WITH_VMM) == 0 => {
            Some((gpu, "has no GPUDirect RDMA of cuMemCreate memory"))
        }
        _ => None,
    });
    let serves = match lacks {
        Some((gpu, what)) => format!("no: GPU {} {what}", gpu.ordinal),
        None => "yes".into(),
    };
    match &machine.mapping.facts.gdrapi {
        _ if machine.mapping.trouble.is_some() => NCCL.skip("not reached; see mapping.any"),
        None => NCCL.skip("NCCL would find no GDRCopy: there is no libgdrapi.so").advice(INSTALL),
        Some(Ok(way)) => {
            NCCL.ok(format!("NCCL would find GDRCopy: yes, by {way}; RMA and GIN over sockets: {serves}"))
        }
        Some(Err(why)) => NCCL.warn(format!("NCCL would find libgdrapi.so and no GDRCopy: {why}"), INSTALL),
    }
}
