//! The real CUDA driver.

use std::sync::Arc;

use super::Cuda;
use crate::error::Result;

/// `libcuda`, loaded and initialised.
pub(crate) struct Driver;

impl Driver {
    /// Loads and initialises the driver.
    pub(crate) fn load() -> Result<Arc<dyn Cuda>> {
        Err(crate::Error::Unsupported { what: "CUDA".into(), by: "this build", fix: "wait" })
    }
}
