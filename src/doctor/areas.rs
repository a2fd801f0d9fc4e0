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

/// An area.
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
    Area { name: "driver", title: "NVIDIA driver", checks: driver::CHECKS, asks: &[], probe: driver::probe },
    Area { name: "gpu", title: "GPUs", checks: gpu::CHECKS, asks: &[Live::Cuda], probe: gpu::probe },
    Area {
        name: "mapping",
        title: "CPU mappings of GPU memory",
        checks: mapping::CHECKS,
        asks: &[Live::Cuda, Live::Mapping],
        probe: mapping::probe,
    },
    Area {
        name: "modules",
        title: "Kernel modules",
        checks: modules::CHECKS,
        asks: &[Live::Cuda],
        probe: modules::probe,
    },
    Area {
        name: "rdma",
        title: "RDMA devices",
        checks: rdma::CHECKS,
        asks: &[Live::Verbs],
        probe: rdma::probe,
    },
    Area { name: "limits", title: "Limits", checks: limits::CHECKS, asks: &[], probe: limits::probe },
    Area { name: "iommu", title: "IOMMU and PCIe", checks: iommu::CHECKS, asks: &[], probe: iommu::probe },
    Area {
        name: "topology",
        title: "Topology",
        checks: topology::CHECKS,
        asks: &[Live::Cuda],
        probe: topology::probe,
    },
    Area {
        name: "container",
        title: "Container",
        checks: container::CHECKS,
        asks: &[],
        probe: container::probe,
    },
    Area {
        name: "environment",
        title: "Environment",
        checks: environment::CHECKS,
        asks: &[],
        probe: environment::probe,
    },
    Area {
        name: "choice",
        title: "What is used here",
        checks: choice::CHECKS,
        asks: &[Live::Cuda, Live::Choice],
        probe: choice::probe,
    },
];

/// Whether a probe of this name belongs to what was asked for: names of probes or of areas; nothing for all.
pub(super) fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|wanted| wanted == name || wanted == area_of(name))
}
