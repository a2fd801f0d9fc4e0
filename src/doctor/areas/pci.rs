//! What is between devices on the PCI bus: IOMMU, access control, distances, and the CPUs next to them.

use std::collections::BTreeSet;

use gdsync::rdma::{Distance, Place};

use super::super::live::{GpuFacts, Live};
use super::super::machine::{Hca, Machine};
use super::{Area, Check, Probe};

area! {
    IOMMU_AREA "iommu" "IOMMU and PCIe" asks [] probes by |machine| vec![mode(machine), acs(machine)];
    MODE "iommu.mode" tried "the IOMMU groups of GPUs and cards in sysfs, /sys/class/iommu, /proc/cmdline",
        why "an IOMMU that translates sends what devices write to each other up to the CPU, or refuses it";
    ACS "iommu.acs" tried "the access control (ACS) of the bridges between GPUs and cards, in their configuration space",
        why "bridges that redirect requests send what GPU and card write to each other up to the CPU, or lose it";
}

fn mode(machine: &Machine) -> Probe {
    let system = &machine.system;
    let (gpus, hcas) = (machine.gpus(), machine.hcas());
    let has_pair = !gpus.is_empty() && hcas.iter().any(|hca| hca.place.is_some());
    let places = gpus.iter().chain(hcas.iter().filter_map(|hca| hca.place.as_ref()));
    let kind = |place: &Place| system.text(&format!("{}/iommu_group/type", system.pci(&place.address)));
    let kinds: BTreeSet<_> = places.filter_map(kind).collect();
    let units = system.names("/sys/class/iommu").len();
    let options = system.text("/proc/cmdline").unwrap_or_default();
    let options: Vec<_> = options.split_whitespace().filter(|word| word.contains("iommu")).collect();
    let options =
        if options.is_empty() { String::new() } else { format!(" (kernel options {})", options.join(" ")) };
    let translates = kinds.iter().any(|kind| kind.starts_with("DMA"));
    match () {
        () if !machine.has_sysfs() => MODE.skip("not known: /sys is not mounted"),
        () if kinds.is_empty() && units == 0 => MODE.ok(format!("off{options}")),
        () if translates && has_pair => MODE.warn(
            format!("it translates for GPUs or cards{options}"),
            "boot with `iommu=pt` (and `intel_iommu=on` or `amd_iommu=on` where virtual machines need it), or switch VT-d or \
             AMD-Vi off in the firmware",
        ),
        () if translates => MODE.ok(format!("it translates{options}; there are no GPU and card that would talk")),
        () if kinds.is_empty() => MODE.ok(format!("on, {units} unit(s); no GPU or card is behind it{options}")),
        () => MODE.ok(format!("on, passes addresses of GPUs and cards through{options}")),
    }
}

/// What a bridge does to requests between devices below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Straight,
    Redirected,
    /// More than this user may see would have to be read.
    Hidden,
}

fn acs(machine: &Machine) -> Probe {
    let (gpus, hcas) = (machine.gpus(), machine.hcas());
    let cards: Vec<_> = hcas.iter().filter_map(|hca| hca.place.as_ref()).collect();
    let between: BTreeSet<_> = gpus
        .iter()
        .flat_map(|gpu| cards.iter().map(move |card| (gpu, *card)))
        .filter(|(gpu, card)| gpu.distance(card) <= Distance::SeveralSwitches)
        .flat_map(|(gpu, card)| gpu.bridges().iter().chain(card.bridges()))
        .cloned()
        .collect();
    if between.is_empty() {
        return ACS.skip("no GPU and card below common switches");
    }
    let is = |wanted: Access| {
        let of = |bridge: &&String| access(machine, bridge) == wanted;
        between.iter().filter(of).map(String::as_str).collect::<Vec<_>>().join(", ")
    };
    let (redirected, hidden) = (is(Access::Redirected), is(Access::Hidden));
    match () {
        () if !redirected.is_empty() => ACS.warn(
            format!("requests are redirected by {redirected}"),
            "switch ACS off in the firmware, or for each of them as root: `setpci -s BRIDGE ECAP_ACS+0x6.w=0000` (not where \
             virtual machines own these devices)",
        ),
        () if !hidden.is_empty() => ACS
            .skip(format!("only root can read that of {hidden}"))
            .advice("`sudo gdasync doctor --only iommu.acs`, or `sudo lspci -vvv | grep -i acsctl`"),
        () => ACS.ok(format!("{} bridges between GPUs and cards let requests through", between.len())),
    }
}

/// Looks for the ACS capability (0x000d) in the extended configuration space: PCI Express Base Specification, 7.7.11.
fn access(machine: &Machine, bridge: &str) -> Access {
    /// P2P request redirect, P2P completion redirect, upstream forwarding.
    const REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 4;
    const EXTENDED: usize = 0x100;
    let path = machine.system.path(&format!("{}/config", machine.system.pci(bridge)));
    let config = std::fs::read(path).unwrap_or_default();
    // What users other than root see.
    if config.len() <= 64 {
        return Access::Hidden;
    }
    let word = |at: usize| config.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    let mut at = EXTENDED;
    // No more capabilities fit, so a list that bites its tail ends too.
    for _ in 0..(4096 - EXTENDED) / 8 {
        let (Some(id), Some(next)) = (word(at), word(at + 2)) else { return Access::Straight };
        match id {
            0x000d if word(at + 6).unwrap_or(0) & REDIRECTS != 0 => return Access::Redirected,
            0x000d => return Access::Straight,
            _ => at = usize::from(next >> 4),
        }
        if at < EXTENDED {
            break;
        }
    }
    Access::Straight
}

area! {
    TOPOLOGY_AREA "topology" "Topology" asks [Live::Cuda] probes by probe_topology;
    HCA "topology.gpu_hca" tried "the PCI path of each GPU to each card with a usable port, in sysfs",
        why "GPUDirect RDMA goes straight from card to GPU memory: best through switches (PIX, PXB), slower through a host \
         bridge (PHB, NODE), worst or not at all across sockets (SYS): the words of `nvidia-smi topo -m`";
    PEER "topology.gpu_gpu" tried "NVLink between each GPU and each other by nvmlDeviceGetP2PStatus, their PCI path in sysfs",
        why "payload between GPUs of one host goes over NVLink, or over this path: as fast as PCIe through switches (PIX, PXB), \
         slower through a host bridge (PHB, NODE), slowest or staged across sockets (SYS)";
    CPUS "topology.cpus" tried "NUMA node and local CPUs of the device in sysfs, Cpus_allowed_list of this process",
        why "threads that poll rings, and memory that a device uses, should be on its NUMA node";
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

/// A GPU by its order on the PCI bus, and its address: CUDA may number GPUs differently.
fn name(at: usize, gpu: &Place) -> String {
    format!("GPU{at} ({})", gpu.address)
}

fn probe_topology(machine: &Machine) -> Vec<Probe> {
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
    for check in TOPOLOGY_AREA.checks {
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
    /// Through a host bridge, or NVLink: NVML did not say.
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
