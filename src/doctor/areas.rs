//! What is looked at, by area: each has its probes in a file.

/// An area and its checks: constant and name of each, what is tried, and why one wants to know.
macro_rules! area {
    (
        $area:ident $name:literal $title:literal asks [$($live:expr),*] probes by $probe:expr;
        $($check:ident $full:literal tried $tried:expr, why $why:expr;)+
    ) => {
        $(const $check: Check = Check { name: $full, tried: $tried, why: $why };)+

        pub(super) const $area: Area = Area {
            name: $name,
            title: $title,
            checks: &[$(&$check),+],
            asks: &[$($live),*],
            probe: $probe,
        };
    };
}

mod driver;
mod fabric;
pub(super) mod gpu;
pub(super) mod pci;
pub(super) mod process;
pub(super) mod rdma;

use super::live::Live;
use super::machine::Machine;
use super::probe::{Check, Probe, area_of};

pub(super) struct Area {
    /// What the names of its probes begin with.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) checks: &'static [&'static Check],
    /// Who must be asked before.
    pub(super) asks: &'static [Live],
    pub(super) probe: fn(&Machine) -> Vec<Probe>,
}

/// All areas, in the order of the report.
pub(super) const AREAS: &[Area] = &[
    driver::DRIVER_AREA,
    gpu::GPU_AREA,
    driver::MAPPING_AREA,
    driver::MODULES_AREA,
    rdma::RDMA_AREA,
    rdma::LIMITS_AREA,
    fabric::FABRIC_AREA,
    pci::IOMMU_AREA,
    pci::TOPOLOGY_AREA,
    process::CONTAINER_AREA,
    process::ENVIRONMENT_AREA,
    process::CHOICE_AREA,
];

/// Whether a probe of this name belongs to what was asked for: names of probes or of areas; nothing for all.
pub(super) fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|wanted| wanted == name || wanted == area_of(name))
}

/// A number of bytes for people.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scale = 1;
    while unit + 1 < UNITS.len() && count / scale >= 1024 {
        scale *= 1024;
        unit += 1;
    }
    match (count / scale, count % scale * 10 / scale) {
        (whole, 0) => format!("{whole} {}", UNITS[unit]),
        (whole, tenths) => format!("{whole}.{tenths} {}", UNITS[unit]),
    }
}
