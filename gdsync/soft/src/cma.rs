//! Which payload in host memory the receiver reads by cross-memory attach (CMA).

use std::str::FromStr;

use gdsync_device::error::Error;

/// From here on, one copy by the kernel takes less than two through shared memory.
const THRESHOLD: usize = 64 << 10;

/// Which payload in host memory, in one buffer, the receiver copies by cross-memory attach (`process_vm_readv`, one copy), and
/// which is sent through shared memory (two copies, which overlap). Where the kernel does not let the receiver read, all is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmaPolicy {
    /// From 64 KiB on.
    #[default]
    Auto,
    /// From so many bytes on.
    From(usize),
    /// None.
    Never,
}

impl CmaPolicy {
    /// The shortest payload that the receiver reads.
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
