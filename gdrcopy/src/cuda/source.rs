//! Where the CUDA driver comes from: it is asked as late as can be.

use std::fmt;
use std::sync::Arc;

use super::Cuda;
use crate::error::{Error, Result};

/// A CUDA driver that may not be initialised yet.
pub trait CudaSource: Send + Sync + fmt::Debug {
    /// `cuDriverGetVersion`, which works before `cuInit`: needs the library, touches no GPU, and a child forked
    /// afterwards may use CUDA.
    ///
    /// # Errors
    /// Why there is no CUDA.
    fn version(&self) -> Result<u32>;

    /// `cuInit`. Children forked afterwards cannot use CUDA.
    ///
    /// # Errors
    /// Why CUDA cannot be used.
    fn initialise(&self) -> Result<Arc<dyn Cuda>>;
}

/// A driver that is initialised already, or none.
impl CudaSource for Option<Arc<dyn Cuda>> {
    fn version(&self) -> Result<u32> {
        self.initialise()?.driver_version()
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        self.clone().ok_or_else(|| Error::Unsupported {
            what: "CUDA".into(),
            by: "the simulated machine",
            fix: "give it a CUDA driver",
        })
    }
}
