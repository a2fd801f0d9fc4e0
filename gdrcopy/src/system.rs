//! What the library runs on: the kernel and, where there is one, the CUDA driver.

use std::sync::Arc;

use crate::cuda::{Cuda, Driver};
use crate::error::Result;
use crate::kernel::{Kernel, Linux};

/// The machine under the library: the real one, or a simulated one in tests.
#[derive(Clone, Debug)]
pub struct System {
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) cuda: CudaState,
}

/// CUDA, or why there is none.
pub(crate) type CudaState = std::result::Result<Arc<dyn Cuda>, Arc<str>>;

impl System {
    /// This machine. Loads and initialises the CUDA driver if there is one.
    pub fn real() -> Self {
        let cuda = Driver::load().map(|driver| driver as Arc<dyn Cuda>).map_err(|e| e.to_string().into());
        Self { kernel: Arc::new(Linux), cuda }
    }

    /// A machine made of the given parts.
    pub fn simulated(kernel: Arc<dyn Kernel>, cuda: Option<Arc<dyn Cuda>>) -> Self {
        Self { kernel, cuda: cuda.ok_or_else(|| "the simulated machine has no CUDA".into()) }
    }

    /// The CUDA driver.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) where there is none, with the reason.
    pub fn cuda(&self) -> Result<&Arc<dyn Cuda>> {
        self.cuda.as_ref().map_err(|why| crate::Error::Unsupported {
            what: format!("CUDA ({why})"),
            by: "this machine",
            fix: "install the NVIDIA driver, or use the host backend",
        })
    }
}
