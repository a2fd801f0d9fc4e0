//! The CUDA driver of the simulated machine before `cuInit`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Machine, SimulatedCuda};
use crate::cuda::{Cuda, CudaSource, CudaStatus};
use crate::error::Result;

/// A simulated `libcuda` that counts its initialisations. The machine's fault `cuInit` is a `CUresult`.
#[derive(Clone, Debug)]
pub struct UninitialisedCuda {
    machine: Arc<Machine>,
    cuda: Arc<SimulatedCuda>,
    initialised: Arc<AtomicUsize>,
}

impl UninitialisedCuda {
    /// The driver of this machine. Clones are the same driver.
    pub fn new(machine: &Arc<Machine>) -> Self {
        let cuda = SimulatedCuda::new(machine);
        Self { machine: machine.clone(), cuda, initialised: Arc::default() }
    }

    /// How often `cuInit` was called.
    pub fn initialised(&self) -> usize {
        self.initialised.load(Ordering::Relaxed)
    }
}

impl CudaSource for UninitialisedCuda {
    fn version(&self) -> Result<u32> {
        self.cuda.driver_version()
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        self.initialised.fetch_add(1, Ordering::Relaxed);
        let status =
            self.machine.fault("cuInit").map_or(CudaStatus::SUCCESS, |code| CudaStatus(code.unsigned_abs()));
        status.check("cuInit")?;
        Ok(self.cuda.clone())
    }
}
