//! Policy for cross-memory attach (CMA) of host payloads.

use std::str::FromStr;

use gdsync_device::error::Error;

/// From this length on, one kernel copy is faster than two copies through shared memory.
const THRESHOLD: usize = 64 << 10;

/// Which single-buffer host payloads the receiver reads with `process_vm_readv` (one copy); others go through shared
/// memory (two copies, pipelined). Where the kernel denies the read, all payloads are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmaPolicy {
    /// 64 KiB and more.
    #[default]
    Auto,
    /// This many bytes and more.
    From(usize),
    /// None.
    Never,
}

impl CmaPolicy {
    /// Minimum length in bytes.
    pub(crate) fn threshold(self) -> Option<usize> {
        match self {
            Self::Auto => Some(THRESHOLD),
            Self::From(bytes) => Some(bytes),
            Self::Never => None,
        }
    }
}

/// `auto`, `never`, or a number of bytes.
impl FromStr for CmaPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            _ => text.parse().map(Self::From).map_err(|_| {
                Error::invalid("GDSYNC_CMA", format!("'{text}'"), "auto, never, or a number of bytes")
            }),
        }
    }
}
