//! What is looked at, by area: each has its probes in a file.

pub(super) mod choice;
pub(super) mod container;
pub(super) mod driver;
pub(super) mod environment;
pub(super) mod gpu;
pub(super) mod iommu;
pub(super) mod limits;
pub(super) mod mapping;
pub(super) mod modules;
pub(super) mod rdma;
pub(super) mod topology;

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

const fn area(
    (name, title): (&'static str, &'static str),
    checks: &'static [&'static Check],
    asks: &'static [Live],
    probe: fn(&Machine) -> Vec<Probe>,
) -> Area {
    Area { name, title, checks, asks, probe }
}

/// All areas, in the order of the report.
pub(super) const AREAS: &[Area] = &[
    area(("driver", "NVIDIA driver"), driver::CHECKS, &[], driver::probe),
    area(("gpu", "GPUs"), gpu::CHECKS, &[Live::Cuda], gpu::probe),
    area(
        ("mapping", "CPU mappings of GPU memory"),
        mapping::CHECKS,
        &[Live::Cuda, Live::Mapping],
        mapping::probe,
    ),
    area(("modules", "Kernel modules"), modules::CHECKS, &[Live::Cuda], modules::probe),
    area(("rdma", "RDMA devices"), rdma::CHECKS, &[Live::Verbs], rdma::probe),
    area(("limits", "Limits"), limits::CHECKS, &[], limits::probe),
    area(("iommu", "IOMMU and PCIe"), iommu::CHECKS, &[], iommu::probe),
    area(("topology", "Topology"), topology::CHECKS, &[Live::Cuda], topology::probe),
    area(("container", "Container"), container::CHECKS, &[], container::probe),
    area(("environment", "Environment"), environment::CHECKS, &[], environment::probe),
    area(("choice", "What is used here"), choice::CHECKS, &[Live::Cuda, Live::Choice], choice::probe),
];

/// Whether a probe of this name belongs to what was asked for: names of probes or of areas; nothing for all.
pub(super) fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|wanted| wanted == name || wanted == area_of(name))
}
