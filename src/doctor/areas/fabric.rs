//! libfabric, its providers, and the fabrics that need it.

use super::super::live::Live;
use super::super::machine::Machine;
use super::super::requirements::numbers;
use super::{Area, Check, Probe};

area! {
    FABRIC_AREA "fabric" "libfabric" asks [Live::Fabric] probes by probe_fabric;
    LIBRARY "fabric.library" tried "loading libfabric.so.1, or what GDSYNC_LIBFABRIC names; only where the probe or GDSYNC_DEVICE=fabric:... asks for it",
        why "devices `fabric:PROVIDER` reach other hosts over fabrics without verbs";
    PROVIDER "fabric.provider" tried "fi_getinfo, as for a device `fabric:PROVIDER`",
        why "a provider must send messages of 16 KiB between endpoints for reliable datagrams";
    EFA "fabric.efa" tried "the devices of the driver efa in sysfs, the kernel, FI_EFA_FORK_SAFE, and the provider",
        why "RDMA devices of AWS (EFA) have no reliable connections: messages go through libfabric";
    CXI "fabric.cxi" tried "/dev/cxi*, SLINGSHOT_VNIS, and the provider",
        why "Slingshot has no verbs: messages go through libfabric, within the networks (VNI) that the launcher gives the job";
}

/// The first kernel whose forks leave registered memory alone.
const FORK_SAFE: (u32, u32) = (5, 13);

fn probe_fabric(machine: &Machine) -> Vec<Probe> {
    // Its devices are named by their PCI addresses.
    let has_efa = machine.system.names("/sys/bus/pci/drivers/efa").iter().any(|name| name.contains(':'));
    let has_cxi = machine.system.names("/dev").iter().any(|name| name.starts_with("cxi"));
    if machine.fabric.is_none() && !has_efa && !has_cxi {
        let none = "no device that needs it; `gdasync doctor --only fabric` loads it and lists its providers";
        return FABRIC_AREA.checks.iter().map(|check| check.skip(none)).collect();
    }
    let mut probes = vec![library(machine)];
    probes.extend(providers(machine));
    probes.push(if has_efa { efa(machine) } else { EFA.skip("no EFA device") });
    probes.push(if has_cxi { cxi(machine) } else { CXI.skip("no Slingshot device") });
    probes
}

fn library(machine: &Machine) -> Probe {
    const FIX: &str =
        "install libfabric1 (Debian, Ubuntu) or libfabric (Fedora, RHEL), or name one: GDSYNC_LIBFABRIC=PATH";
    let Some(asked) = &machine.fabric else {
        return LIBRARY.skip("not loaded; `gdasync doctor --only fabric` does");
    };
    match (&asked.facts.library, &asked.trouble) {
        (_, Some(trouble)) => LIBRARY.fail(
            trouble.as_str(),
            "see whether `fi_info` answers; FI_PROVIDER=NAME has it load one provider only",
        ),
        (Some(Ok(found)), _) if machine.has_driver() && machine.variable("FI_HMEM").is_none() => LIBRARY
            .ok(found.as_str())
            .advice("FI_HMEM=system keeps newer versions from starting CUDA by themselves"),
        (Some(Ok(found)), _) => LIBRARY.ok(found.as_str()),
        (Some(Err(why)), _) => LIBRARY.fail(why.as_str(), FIX),
        (None, _) => LIBRARY.fail("libfabric was not asked", FIX),
    }
}

fn providers(machine: &Machine) -> Vec<Probe> {
    let all = machine.fabric.iter().flat_map(|asked| &asked.facts.providers);
    let each = |(name, found): &(String, Result<String, String>)| {
        let probe = match found {
            Ok(properties) => PROVIDER.ok(properties.as_str()),
            Err(why) => PROVIDER.skip(why.as_str()),
        };
        probe.about(name)
    };
    let probes: Vec<_> = all.map(each).collect();
    if probes.is_empty() { vec![PROVIDER.skip("none is known")] } else { probes }
}

/// The problem of the provider of a device of this machine, and its fix.
fn missing(machine: &Machine, provider: &str, place: &str) -> Option<(String, String)> {
    let all = &machine.fabric.as_ref()?.facts.providers;
    let fix = || format!("take the libfabric of its vendor: GDSYNC_LIBFABRIC={place}/libfabric.so.1");
    match all.iter().find(|(name, _)| name == provider) {
        Some((_, Ok(_))) => None,
        Some((_, Err(why))) => Some((why.clone(), fix())),
        None => Some((format!("this libfabric has no provider {provider}"), fix())),
    }
}

fn efa(machine: &Machine) -> Probe {
    if let Some((what, fix)) = missing(machine, "efa", "/opt/amazon/efa/lib64") {
        return EFA.warn(what, fix);
    }
    let release = machine.system.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    if machine.variable("FI_EFA_FORK_SAFE").is_none()
        && numbers(&release).is_some_and(|found| found < FORK_SAFE)
    {
        let what = format!("Linux {release}: a program that forks is ended by the provider");
        return EFA.warn(what, "set FI_EFA_FORK_SAFE=1, or use Linux 5.13 or newer");
    }
    EFA.ok("GDSYNC_DEVICE=fabric:efa")
        .advice("the security group must let its members send to each other, all protocols")
}

fn cxi(machine: &Machine) -> Probe {
    if let Some((what, fix)) = missing(machine, "cxi", "/opt/cray/libfabric/VERSION/lib64") {
        return CXI.warn(what, fix);
    }
    match machine.variable("SLINGSHOT_VNIS") {
        None => CXI.warn(
            "SLINGSHOT_VNIS is not set: this process is in no network of a job",
            "run the doctor, and programs, by the launcher of the system (`srun --network=single_node_vni` within one node)",
        ),
        Some(vnis) => CXI.ok(format!("GDSYNC_DEVICE=fabric:cxi, VNI {vnis}")),
    }
}
