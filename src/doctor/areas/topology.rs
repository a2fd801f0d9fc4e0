//! What the bytes between GPUs and cards pass, and the CPUs next to them.

use std::collections::BTreeSet;

use gdsync::rdma::{Distance, Place};
use serde::Serialize;

use super::super::live::GpuFacts;
use super::super::machine::{Hca, Machine};
use super::super::probe::{Check, Probe};

const HCA: Check = Check {
    name: "topology.gpu_hca",
    tried: "the PCI path of each GPU to each card with a usable port, in sysfs",
    why: "GPUDirect RDMA goes straight from card to GPU memory: best through switches (PIX, PXB), slower through a host \
          bridge (PHB, NODE), worst or not at all across sockets (SYS)",
};
const PEER: Check = Check {
    name: "topology.gpu_gpu",
    tried: "NVLink between each GPU and each other by nvmlDeviceGetP2PStatus, their PCI path in sysfs",
    why: "payload between GPUs of one host goes over NVLink, or over this path: as fast as PCIe through switches (PIX, PXB), \
          slower through a host bridge (PHB, NODE), slowest or staged across sockets (SYS)",
};
const CPUS: Check = Check {
    name: "topology.cpus",
    tried: "NUMA node and local CPUs of the device in sysfs, Cpus_allowed_list of this process",
    why: "threads that poll rings, and memory that a device uses, should be on its NUMA node",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&HCA, &PEER, &CPUS];

/// Two devices and what is between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(in crate::doctor) struct Pair {
    pub(in crate::doctor) from: String,
    pub(in crate::doctor) to: String,
    /// As `nvidia-smi topo -m` has it, but for the number of NVLinks.
    pub(in crate::doctor) path: &'static str,
}

/// The word of `nvidia-smi topo -m`.
fn short(distance: Distance) -> &'static str {
    match distance {
        Distance::SameSwitch => "PIX",
        Distance::SeveralSwitches => "PXB",
        Distance::HostBridge => "PHB",
        Distance::SameNode => "NODE",
        Distance::AcrossSockets => "SYS",
    }
}

/// Every pair of GPUs and cards.
pub(in crate::doctor) fn pairs(machine: &Machine) -> Vec<Pair> {
    let gpus = machine.gpus();
    let mut places: Vec<_> = gpus.iter().enumerate().map(|(at, gpu)| (name(at, gpu), gpu.clone())).collect();
    places.extend(machine.hcas().into_iter().filter_map(|hca| Some((hca.name, hca.place?))));
    let mut pairs = Vec::new();
    for (at, (from, start)) in places.iter().enumerate() {
        for (to, end) in &places[at + 1..] {
            let path = match way(machine, start, end) {
                Way::NvLink => "NV",
                _ => short(start.distance(end)),
            };
            pairs.push(Pair { from: from.clone(), to: to.clone(), path });
        }
    }
    pairs
}

/// GPUs by their order on the PCI bus: CUDA may number them in another way, so the address is told.
fn name(at: usize, gpu: &Place) -> String {
    format!("GPU{at} ({})", gpu.address)
}

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    let (gpus, hcas) = (machine.gpus(), machine.hcas());
    let mut probes = Vec::new();
    for (at, gpu) in gpus.iter().enumerate() {
        probes.push(to_cards(gpu, &hcas).about(name(at, gpu)));
        probes.push(to_peers(machine, at, &gpus).about(name(at, gpu)));
        probes.push(cpus(machine, gpu).about(name(at, gpu)));
    }
    for (hca, place) in hcas.iter().filter_map(|hca| Some((hca, hca.place.as_ref()?))) {
        probes.push(cpus(machine, place).about(&hca.name));
    }
    for check in CHECKS {
        if probes.iter().all(|probe| probe.name != check.name) {
            probes.push(check.skip("no NVIDIA GPU, or no RDMA device, on the PCI bus"));
        }
    }
    probes
}

fn to_cards(gpu: &Place, hcas: &[Hca]) -> Probe {
    let paths = |usable: bool| {
        let places = hcas.iter().filter(move |hca| hca.is_usable() || !usable);
        let mut paths: Vec<_> =
            places.filter_map(|hca| Some((gpu.distance(hca.place.as_ref()?), hca.name.as_str()))).collect();
        paths.sort();
        paths
    };
    let list = |paths: &[(Distance, &str)]| {
        paths
            .iter()
            .map(|(distance, name)| format!("{name} {}", short(*distance)))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let (usable, all) = (paths(true), paths(false));
    let Some(&(nearest, name)) = usable.first() else {
        return HCA.skip(match all.is_empty() {
            true => "no RDMA device on the PCI bus".into(),
            false => format!("no RDMA device with a usable port ({})", list(&all)),
        });
    };
    let found = format!("nearest is {name}, {nearest} ({})", list(&all));
    let better = all.first().filter(|(distance, _)| *distance < nearest);
    let fix = match better {
        Some((_, closer)) => format!("bring up {closer}, which is nearer"),
        None => "move card or GPU to slots below one PCIe switch; see `lspci -tv`".into(),
    };
    match nearest {
        Distance::SameSwitch | Distance::SeveralSwitches => {
            HCA.ok(format!("{found}: good for GPUDirect RDMA"))
        }
        Distance::HostBridge | Distance::SameNode => {
            HCA.warn(format!("{found}: GPUDirect RDMA works, slower than through a switch on many CPUs"), fix)
        }
        Distance::AcrossSockets => HCA.warn(
            format!("{found}: GPUDirect RDMA is slow or impossible; staging through the host may be faster"),
            fix,
        ),
    }
}

/// How payload gets from one device to another, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    NvLink,
    Switches,
    /// Past a host bridge, unless there is NVLink, of which nobody could be asked.
    Unknown,
    HostBridge,
    Sockets,
}

fn way(machine: &Machine, from: &Place, to: &Place) -> Way {
    let of = |gpu: &&GpuFacts| gpu.pci == from.address;
    let facts = machine.cuda.facts.gpus.iter().find(of);
    let joined = facts.and_then(|gpu| gpu.nvlinks.get(&to.address));
    match (joined, from.distance(to)) {
        (Some(true), _) => Way::NvLink,
        (_, Distance::SameSwitch | Distance::SeveralSwitches) => Way::Switches,
        (None, _) => Way::Unknown,
        (_, Distance::HostBridge | Distance::SameNode) => Way::HostBridge,
        (_, Distance::AcrossSockets) => Way::Sockets,
    }
}

fn to_peers(machine: &Machine, at: usize, gpus: &[Place]) -> Probe {
    let others = gpus.iter().enumerate().filter(|(other, _)| *other != at);
    let ways: Vec<_> =
        others.map(|(other, gpu)| (other, way(machine, &gpus[at], gpu), gpus[at].distance(gpu))).collect();
    let name = |(other, way, distance): &(usize, Way, Distance)| match way {
        Way::NvLink => format!("GPU{other} NV"),
        _ => format!("GPU{other} {}", short(*distance)),
    };
    let found = ways.iter().map(name).collect::<Vec<_>>().join(", ");
    let fix = "let ranks that exchange most use GPUs with NVLink or a switch between them (`nvidia-smi topo -m`); `gpu.peers` \
               says whether they reach each other at all";
    match ways.iter().map(|(_, way, _)| *way).max() {
        None => PEER.skip("one GPU"),
        Some(Way::NvLink) => PEER.ok(format!("{found}: NVLink")),
        Some(Way::Switches) => PEER.ok(format!("{found}: no host bridge is in the way")),
        Some(Way::Unknown) => PEER.skip(format!("{found}; NVML could not be asked for NVLink")),
        Some(Way::HostBridge) => PEER.warn(format!("{found}: some traffic passes a host bridge"), fix),
        Some(Way::Sockets) => PEER.warn(format!("{found}: some traffic crosses sockets"), fix),
    }
}

/// The numbers of a list such as `0-3,8`.
pub(super) fn numbers(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

fn cpus(machine: &Machine, place: &Place) -> Probe {
    let system = &machine.system;
    let directory = system.pci(&place.address);
    let Some(local) = system.text(&format!("{directory}/local_cpulist")) else {
        return CPUS.skip("the kernel does not tell its CPUs");
    };
    let status = system.text("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(str::trim);
    let node = place.numa.map_or_else(|| "no NUMA node known".to_owned(), |node| format!("NUMA node {node}"));
    let found = format!("{node}, CPUs {local}");
    let Some(allowed) = allowed else { return CPUS.ok(found) };
    let bind = match place.numa {
        Some(node) => format!("`numactl --cpunodebind={node} --membind={node}`, or `taskset -c {local}`"),
        None => format!("`taskset -c {local}`"),
    };
    match numbers(allowed).is_disjoint(&numbers(&local)) {
        true => CPUS.warn(
            format!("{found}; this process runs on {allowed}, none of which is near"),
            format!("start with {bind}"),
        ),
        false => CPUS.ok(found).advice(format!("bind to it with {bind}")),
    }
}
