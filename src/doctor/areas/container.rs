//! Whether this runs in a container, and what that one was not given.

use super::super::machine::Machine;
use super::super::probe::{Check, Probe};

const CONTAINER: Check = Check {
    name: "container.kind",
    tried: "/.dockerenv, /run/.containerenv, /run/systemd/container, /proc/1/cgroup and the environment",
    why: "a container sees only the devices, limits and capabilities that it was given",
};
const MOUNTS: Check = Check {
    name: "container.mounts",
    tried: "/proc/self and /sys/class",
    why: "devices, limits and paths are looked for in /sys and /proc, and a program that starts its ranks itself needs /proc",
};
const DEVICES: Check = Check {
    name: "container.devices",
    tried: "device files in /dev for what sysfs and /proc show",
    why: "sysfs shows the host's devices also where the container may not use them",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&CONTAINER, &MOUNTS, &DEVICES];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    let Some(kind) = kind(machine) else {
        return vec![CONTAINER.ok("none"), mounts(machine), DEVICES.skip("no container")];
    };
    vec![CONTAINER.ok(kind), mounts(machine), devices(machine)]
}

fn mounts(machine: &Machine) -> Probe {
    match (machine.system.exists("/proc/self"), machine.has_sysfs()) {
        (true, true) => MOUNTS.ok("/proc and /sys are there"),
        (false, _) => MOUNTS.fail(
            "/proc is not mounted: what is said of GPUs, RDMA devices and the choice means nothing",
            "mount it (`mount -t proc proc /proc`); containers have it unless told otherwise",
        ),
        (true, false) => MOUNTS.warn(
            "/sys is not mounted: no device can be seen",
            "mount it (`mount -t sysfs sysfs /sys`); containers have it unless told otherwise",
        ),
    }
}

fn kind(machine: &Machine) -> Option<String> {
    let system = &machine.system;
    if machine.variable("KUBERNETES_SERVICE_HOST").is_some() {
        return Some("a Kubernetes pod".into());
    }
    if system.exists("/.dockerenv") {
        return Some("Docker".into());
    }
    if system.exists("/run/.containerenv") {
        return Some("Podman".into());
    }
    if let Some(name) = system.text("/run/systemd/container") {
        return Some(name);
    }
    if let Some(name) =
        machine.variable("container").or(machine.variable("APPTAINER_NAME").and(Some("Apptainer")))
    {
        return Some(name.to_owned());
    }
    let cgroup = system.text("/proc/1/cgroup").unwrap_or_default();
    ["docker", "kubepods", "containerd", "lxc"]
        .into_iter()
        .find(|word| cgroup.contains(word))
        .map(str::to_owned)
}

fn devices(machine: &Machine) -> Probe {
    let system = &machine.system;
    let lacks = [
        (machine.has_driver() && !system.exists("/dev/nvidiactl"), "NVIDIA's device files", "`--gpus all`"),
        (
            !machine.hcas().is_empty() && !system.exists("/dev/infiniband"),
            "/dev/infiniband",
            "`--device /dev/infiniband --ulimit memlock=-1 --cap-add IPC_LOCK`, and the host's network (`--network host`)",
        ),
        (
            system.exists("/proc/driver/gdrdrv") && !system.exists("/dev/gdrdrv"),
            "/dev/gdrdrv",
            "`--device /dev/gdrdrv`",
        ),
    ];
    let lacks: Vec<_> = lacks.into_iter().filter(|(lacking, ..)| *lacking).collect();
    if lacks.is_empty() {
        return DEVICES.ok("all that sysfs and /proc show have their files");
    }
    let join = |part: fn(&(bool, &'static str, &'static str)) -> &'static str| {
        lacks.iter().map(part).collect::<Vec<_>>().join(", ")
    };
    DEVICES.warn(
        format!("it was not given {}", join(|lack| lack.1)),
        format!("start it with {}", join(|lack| lack.2)),
    )
}
