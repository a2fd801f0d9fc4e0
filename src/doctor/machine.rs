//! The facts that probes judge: the kernel's files, and the answers of the probing processes.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use gdsync::rdma::{Place, SysfsDevice, gpus};

use super::areas::rdma::Limits;
use super::live::{Answer, ChoiceFacts, CudaFacts, FabricFacts, MappingFacts, VerbsFacts};

/// A machine, real or made up by a test.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) system: System,
    pub(super) cuda: Answer<CudaFacts>,
    pub(super) mapping: Answer<MappingFacts>,
    pub(super) verbs: Answer<VerbsFacts>,
    /// `None` where libfabric was not to be loaded.
    pub(super) fabric: Option<Answer<FabricFacts>>,
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

    pub(super) fn has_driver(&self) -> bool {
        self.system.exists("/proc/driver/nvidia/version")
    }
}

impl Hca {
    pub(super) fn is_mlx5(&self, system: &System) -> bool {
        self.driver(system).is_some_and(|driver| driver.starts_with("mlx5"))
    }

    pub(super) fn driver(&self, system: &System) -> Option<String> {
        system.link(&format!("/sys/class/infiniband/{}/device/driver", self.name))
    }

    pub(super) fn is_usable(&self) -> bool {
        self.class.ports().iter().any(|port| port.refusal().is_none())
    }
}

/// A directory that has `sys`, `proc` and `dev`.
#[derive(Clone, Debug)]
pub(super) struct System {
    root: PathBuf,
}

/// What this process may do with a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Read and write.
    Usable,
    /// It is there, and closed to this user.
    Closed,
    /// It is not there.
    Missing,
}

impl System {
    pub(super) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// A path such as `/sys/class/net`, in this root.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(super) fn sysfs(&self) -> PathBuf {
        self.path("/sys")
    }

    /// The trimmed text of a file; `None` where there is none or it is empty.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        let bytes = fs::read(self.path(path)).ok()?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The names in a directory, sorted; none where there is no such directory.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Asks for the rights of this process without opening the file, which could start something.
    pub(super) fn node(&self, path: &str) -> Node {
        let path = self.path(path);
        let Some(name) = path.exists().then(|| CString::new(path.as_os_str().as_bytes()).ok()).flatten()
        else {
            return Node::Missing;
        };
        // By the C library, which the emulated card stands in front of.
        // SAFETY: the name ends with 0.
        match unsafe { libc::access(name.as_ptr(), libc::R_OK | libc::W_OK) } {
            0 => Node::Usable,
            _ => Node::Closed,
        }
    }

    /// The directory of a PCI device, by its address.
    pub(super) fn pci(&self, address: &str) -> String {
        format!("/sys/bus/pci/devices/{address}")
    }

    /// The name of what a link points to, such as the driver of a device.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        Some(fs::read_link(self.path(path)).ok()?.file_name()?.to_string_lossy().into_owned())
    }
}
