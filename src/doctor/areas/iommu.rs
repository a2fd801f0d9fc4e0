//! What stands between devices on the PCI bus: the IOMMU, and the access control of switches.

use std::collections::BTreeSet;

use super::super::machine::Machine;
use super::super::probe::{Check, Probe};
use gdsync::rdma::{Distance, Place};

const MODE: Check = Check {
    name: "iommu.mode",
    tried: "the IOMMU groups of GPUs and cards in sysfs, /sys/class/iommu, /proc/cmdline",
    why: "an IOMMU that translates sends what devices write to each other up to the CPU, or refuses it",
};
const ACS: Check = Check {
    name: "iommu.acs",
    tried: "the access control (ACS) of the bridges between GPUs and cards, in their configuration space",
    why: "bridges that redirect requests send what GPU and card write to each other up to the CPU, or lose it",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&MODE, &ACS];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    vec![mode(machine), acs(machine)]
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
