//! The NVIDIA kernel driver, as it shows itself in `/proc/driver/nvidia`.

use super::super::machine::Machine;
use super::super::probe::{Check, Probe};
use super::super::requirements::{DRIVER, OPEN_MODULES};
use super::super::system::Node;

const VERSION: Check = Check {
    name: "driver.version",
    tried: "/proc/driver/nvidia/version",
    why: "what streams and mappings can do follows from the version of the driver",
};
const FLAVOUR: Check = Check {
    name: "driver.flavour",
    tried: "/proc/driver/nvidia/version",
    why: "only the open kernel modules export GPU memory as dma-bufs, which RDMA devices register without nvidia-peermem",
};
const NODES: Check = Check {
    name: "driver.nodes",
    tried: "access(2) to /dev/nvidiactl, /dev/nvidia-uvm and /dev/nvidiaN",
    why: "CUDA reaches the driver through these files",
};
const DOORBELLS: Check = Check {
    name: "driver.doorbells",
    tried: "PeerMappingOverride in /proc/driver/nvidia/params, and the user",
    why: "a GPU rings the doorbell of a card only if its driver lets it map the card's registers (IO memory)",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&VERSION, &FLAVOUR, &NODES, &DOORBELLS];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
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

pub(super) fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next().and_then(Result::ok).unwrap_or(0)))
}

fn version(text: &str) -> Probe {
    match version_in(text).and_then(|version| Some((version, numbers(version)?))) {
        Some((version, pair)) if DRIVER.is_met(pair) => VERSION.ok(format!("{} {version}", DRIVER.name)),
        Some((version, _)) => VERSION.fail(
            format!("{} {version} is older than {}: no {}", DRIVER.name, DRIVER.least(), DRIVER.for_what),
            format!("install {} {} or newer", DRIVER.name, DRIVER.least()),
        ),
        None => VERSION.warn(
            format!("a version that cannot be read: {}", text.lines().next().unwrap_or_default()),
            "compare with what `nvidia-smi` says",
        ),
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
            format!("proprietary kernel modules: no {}", OPEN_MODULES.for_what),
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

/// Whether the module was told to let anybody map IO memory.
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
