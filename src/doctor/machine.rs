//! Everything the probes judge: what the kernel shows, and what those answered who were asked.

use std::collections::BTreeMap;

use gdsync::rdma::{Place, SysfsDevice, gpus};

use super::areas::limits::Limits;
use super::live::{Answer, ChoiceFacts, CudaFacts, MappingFacts, VerbsFacts};
use super::system::System;

/// A machine, or a test's idea of one.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) system: System,
    pub(super) cuda: Answer<CudaFacts>,
    pub(super) mapping: Answer<MappingFacts>,
    pub(super) verbs: Answer<VerbsFacts>,
    pub(super) choice: Answer<ChoiceFacts>,
    pub(super) limits: Limits,
    pub(super) is_root: bool,
    /// The variables of this process.
    pub(super) environment: BTreeMap<String, String>,
}

/// An RDMA device that the kernel has.
#[derive(Debug)]
pub(super) struct Hca {
    pub(super) name: String,
    pub(super) place: Option<Place>,
    pub(super) class: SysfsDevice,
}

impl Machine {
    /// The GPUs of NVIDIA that are on the PCI bus, whatever their driver.
    pub(super) fn gpus(&self) -> Vec<Place> {
        gpus(&self.system.sysfs())
    }

    pub(super) fn hcas(&self) -> Vec<Hca> {
        let sysfs = self.system.sysfs();
        let names = self.system.names("/sys/class/infiniband");
        let device = |name: String| {
            let class = SysfsDevice::of(&sysfs, &name)?;
            Some(Hca { place: class.place(&sysfs), name, class })
        };
        names.into_iter().filter_map(device).collect()
    }

    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.environment.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// Whether the kernel shows its devices here.
    pub(super) fn has_sysfs(&self) -> bool {
        self.system.exists("/sys/class")
    }

    /// Whether the NVIDIA kernel driver runs.
    pub(super) fn has_driver(&self) -> bool {
        self.system.exists("/proc/driver/nvidia/version")
    }
}

impl Hca {
    /// Whether the kernel drives it by mlx5.
    pub(super) fn is_mlx5(&self, system: &System) -> bool {
        self.driver(system).is_some_and(|driver| driver.starts_with("mlx5"))
    }

    /// The kernel driver of its card.
    pub(super) fn driver(&self, system: &System) -> Option<String> {
        system.link(&format!("/sys/class/infiniband/{}/device/driver", self.name))
    }

    /// Whether some port can be used.
    pub(super) fn is_usable(&self) -> bool {
        self.class.ports().iter().any(|port| port.refusal().is_none())
    }
}
