//! What the library runs on: the kernel and, where there is one, the CUDA driver.

use std::sync::Arc;

use crate::cuda::{Cuda, CudaSource, Installed};
use crate::error::Result;
use crate::kernel::{Kernel, Linux};
use crate::late::Late;

/// The machine under the library: the real one, or a simulated one in tests. Clones share one CUDA driver.
#[derive(Clone, Debug)]
pub struct System {
    pub(crate) kernel: Arc<dyn Kernel>,
    cuda: Arc<LateCuda>,
}

/// CUDA, loaded and initialised at the first need: afterwards the process cannot fork children that use CUDA.
#[derive(Debug)]
struct LateCuda {
    source: Box<dyn CudaSource>,
    driver: Late<Arc<dyn Cuda>>,
}

impl System {
    /// This machine.
    pub fn real() -> Self {
        Self::with(Arc::new(Linux), Installed)
    }

    /// A machine made of the given parts.
    pub fn simulated(kernel: Arc<dyn Kernel>, cuda: Option<Arc<dyn Cuda>>) -> Self {
        Self::with(kernel, cuda)
    }

    /// A machine whose CUDA has yet to be initialised.
    pub fn with(kernel: Arc<dyn Kernel>, source: impl CudaSource + 'static) -> Self {
        Self { kernel, cuda: Arc::new(LateCuda { source: Box::new(source), driver: Late::new() }) }
    }

    /// The CUDA driver, initialised by the first call.
    ///
    /// # Errors
    /// Why there is none. The next call tries again.
    pub fn cuda(&self) -> Result<&Arc<dyn Cuda>> {
        self.cuda.driver.get_or_make(|| self.cuda.source.initialise())
    }

    /// The version of CUDA, without initialising it.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn cuda_version(&self) -> Result<u32> {
        self.cuda.source.version()
    }
}
