//! How a software HCA is set up.

use std::sync::Arc;

use gdsync_device::FaultPlan;
use gdsync_device::copy_engine::CopyEngine;
use gdsync_device::env::variable;
use gdsync_device::error::{Error, Result};

use super::cma::CmaPolicy;

/// From here on a copy engine is worth its start. Through a mapping, 32 KiB leave GPU memory in 44 us (H200), and reach it
/// in 1.3 us; a copy engine takes 10 us, most of it to begin.
const BY_REFERENCE: usize = 32 << 10;
/// Keys have 24 bits for the index of a region; the first indices are not used.
pub(crate) const MAX_REGIONS: usize = (1 << 24) - 1024;
/// How a software HCA is set up.
#[derive(Clone, Debug)]
pub struct SoftHcaConfig {
    /// Treats what a card would punish as an error (doorbell before record, wrong owner bits, signature, reserved bits).
    pub strict: bool,
    /// Faults from the start.
    pub faults: FaultPlan,
    /// Payload in GPU memory of so many bytes and more is left to a copy engine of the receiver (default 32 KiB; see
    /// [the module](super)).
    pub by_reference: usize,
    /// Which payload in host memory the receiver reads by cross-memory attach.
    pub cma: CmaPolicy,
    /// Memory regions that it takes at a time, at most 2^24 - 1024 (the default).
    pub max_regions: usize,
    /// What moves payload in place of CUDA's copy engines.
    #[doc(hidden)]
    pub copy_engine: Option<Arc<dyn CopyEngine>>,
}

impl Default for SoftHcaConfig {
    fn default() -> Self {
        let faults = FaultPlan::default();
        let (by_reference, cma) = (BY_REFERENCE, CmaPolicy::default());
        Self { strict: false, faults, by_reference, cma, max_regions: MAX_REGIONS, copy_engine: None }
    }
}

impl SoftHcaConfig {
    /// From the environment: `GDSYNC_STRICT=1`, `GDSYNC_FAULTS` as [`FaultPlan`] reads it, `GDSYNC_BY_REFERENCE=bytes`, and
    /// `GDSYNC_CMA` as [`CmaPolicy`] reads it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a value that cannot be read.
    pub fn from_env() -> Result<Self> {
        let strict = match variable("GDSYNC_STRICT").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(Error::invalid("GDSYNC_STRICT", format!("'{other}'"), "0 or 1")),
        };
        let text = variable("GDSYNC_FAULTS").unwrap_or_default();
        let faults = text.parse().map_err(|error| match error {
            Error::InvalidArgument { what, value, expected } => {
                Error::invalid("GDSYNC_FAULTS", format!("'{text}', where {what} is {value}"), expected)
            }
            other => other,
        })?;
        let by_reference = match variable("GDSYNC_BY_REFERENCE") {
            None => BY_REFERENCE,
            Some(text) => text.parse().map_err(|_| {
                Error::invalid("GDSYNC_BY_REFERENCE", format!("'{text}'"), "a number of bytes")
            })?,
        };
        let cma = variable("GDSYNC_CMA").map_or(Ok(CmaPolicy::default()), |text| text.parse())?;
        Ok(Self { strict, faults, by_reference, cma, ..Self::default() })
    }
}
