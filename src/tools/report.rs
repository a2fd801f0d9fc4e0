//! What the JSON of every tool has in common.

use std::fs;

use gdrcopy::cuda::GpuInfo;
use gdrcopy::{BackendKind, Gdr};
use serde::{Deserialize, Serialize};

use super::cuda;
use super::tools_shared::Result;
use super::tools_shared::{Output, say};
use crate::measure::Machine;

/// The results of a tool and all that is needed to understand them.
#[derive(Serialize)]
pub(super) struct Report<'a, P, R> {
    pub(super) tool: &'static str,
    pub(super) machine: Machine,
    #[serde(flatten)]
    pub(super) setup: &'a Setup,
    /// The options.
    pub(super) parameters: P,
    pub(super) results: R,
}

/// What mappings are made with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) backend: String,
    /// Why the backends before it were not used.
    pub(super) refused: Vec<String>,
    /// Version of the kernel module of the backend, where it has one.
    pub(super) kernel_module: Option<String>,
    /// Version of NVIDIA's kernel driver.
    pub(super) nvidia_driver: Option<String>,
    /// Version of CUDA that the driver offers.
    pub(super) cuda: Option<String>,
    /// The GPU in use; none on a machine without.
    pub(super) gpu: Option<Gpu>,
}

/// A GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Gpu {
    pub(super) ordinal: i32,
    pub(super) name: String,
    pub(super) pci: String,
}

impl Setup {
    /// Says with what, and why with nothing better.
    pub(super) fn tell(&self, output: &Output) -> Result<()> {
        let Self { backend, refused, .. } = self;
        let refused = refused.iter().map(|why| format!("; not {why}")).collect::<String>();
        say!(output, "backend: {backend}{refused}")?;
        match self.is_plain() {
            true => say!(output, "NOTE: no GPU takes part; all of it is about plain memory"),
            false => Ok(()),
        }
    }

    /// No GPU takes part.
    pub(super) fn is_plain(&self) -> bool {
        self.backend == BackendKind::Host.name()
    }

    /// Of an opened library.
    pub(super) fn of(gdr: &Gdr, gpus: &[GpuInfo], ordinal: i32) -> Self {
        let gpu = gpus
            .iter()
            .find(|gpu| gpu.ordinal == ordinal && gdr.backend() != BackendKind::Host)
            .map(|gpu| Gpu { ordinal, name: gpu.name.clone(), pci: gpu.pci.clone() });
        Self {
            backend: gdr.backend().name().to_owned(),
            refused: gdr.refusals().iter().map(ToString::to_string).collect(),
            kernel_module: gdr.driver_version().map(|(major, minor)| format!("{major}.{minor}")),
            nvidia_driver: nvidia_driver(),
            cuda: cuda::version(),
            gpu,
        }
    }
}

/// Version of NVIDIA's kernel driver, where it is loaded.
fn nvidia_driver() -> Option<String> {
    fs::read_to_string("/sys/module/nvidia/version").ok().map(|version| version.trim().to_owned())
}
