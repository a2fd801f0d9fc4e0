//! The errors of this crate: what failed, why, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::backend::BackendKind;
use crate::cuda::CudaStatus;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a backend of the ladder was not used.
#[derive(Debug, thiserror::Error)]
#[error("{backend}: {error}")]
pub struct Refusal {
    /// The backend.
    pub backend: BackendKind,
    /// Its reason, with the fix.
    pub error: Error,
}

/// What can go wrong. `{:?}` prints what `{}` does.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument lies outside what the call accepts.
    #[error("{what} is {value}: expected {expected}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What was passed.
        value: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// The address is not that of GPU memory which can be mapped.
    #[error("{addr:#x} is {found}; {fix}")]
    NotMappable {
        /// The address.
        addr: u64,
        /// What lies there.
        found: &'static str,
        /// What the user can do.
        fix: &'static str,
    },
    /// The range leaves its allocation.
    #[error(
        "{len} bytes at {addr:#x} leave the allocation of {size} bytes at {base:#x}; pin at most what was allocated"
    )]
    BeyondAllocation {
        /// First byte of the range.
        addr: u64,
        /// Its length.
        len: usize,
        /// Where the allocation begins.
        base: u64,
        /// The allocation's size.
        size: usize,
    },
    /// An access would leave its mapping or buffer.
    #[error("{len} bytes at offset {offset} do not fit in {size} bytes")]
    OutOfBounds {
        /// First byte of the access.
        offset: usize,
        /// Its length.
        len: usize,
        /// The size of the mapping or buffer.
        size: usize,
    },
    /// A pin has one mapping at a time.
    #[error("this memory is already mapped by this pin; drop the mapping, or pin the memory once more")]
    AlreadyMapped,
    /// The memory was freed, and the pin does not hold it or cannot map it any more.
    #[error("the GPU memory under this pin was freed; pin the new allocation")]
    Invalidated,
    /// Pins belong to the process that made them.
    #[error(
        "pinned by process {owner}, used by process {caller}; a forked child must open and pin for itself"
    )]
    OtherProcess {
        /// The process that opened the library.
        owner: u32,
        /// The one that called.
        caller: u32,
    },
    /// Something finite is used up.
    #[error("{what} is used up: {len} more bytes do not fit; {fix}")]
    Exhausted {
        /// What is used up, for example BAR1 space.
        what: &'static str,
        /// The bytes asked for.
        len: usize,
        /// What the user can do.
        fix: &'static str,
    },
    /// The backend does not do this.
    #[error("{what} is not supported by {by}; {fix}")]
    Unsupported {
        /// The feature.
        what: String,
        /// What lacks it.
        by: &'static str,
        /// What the user can do.
        fix: &'static str,
    },
    /// A mapping did not show the memory that CUDA shows.
    #[error("mapping of {addr:#x} discarded: {found}; {fix}")]
    ProofFailed {
        /// The address that was mapped.
        addr: u64,
        /// What was seen.
        found: String,
        /// What the user can do.
        fix: &'static str,
    },
    /// Something did not happen in time.
    #[error("{what} did not end within {after:?}; {fix}")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        after: Duration,
        /// What the user can do.
        fix: &'static str,
    },
    /// A system call failed.
    #[error("{call}: {source}; {fix}")]
    Sys {
        /// The call, with its object.
        call: String,
        /// What the system said.
        source: io::Error,
        /// What the user can do.
        fix: &'static str,
    },
    /// A call of the CUDA driver failed.
    #[error("{call}: {status}; {fix}")]
    Cuda {
        /// The call.
        call: &'static str,
        /// What the driver said.
        status: CudaStatus,
        /// What the user can do.
        fix: &'static str,
    },
    /// The NVIDIA driver's resource manager refused.
    #[error("resource manager, {call}: status {status:#x} ({name}); {fix}")]
    Rm {
        /// The operation.
        call: &'static str,
        /// `NV_STATUS`.
        status: u32,
        /// Its name, where known.
        name: &'static str,
        /// What the user can do.
        fix: &'static str,
    },
    /// No backend works here.
    #[error("GPU memory cannot be mapped here: {}", join(.0))]
    NoBackend(Vec<Refusal>),
}

fn join(refusals: &[Refusal]) -> String {
    refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join(" | ")
}

/// As Display: what failed and the fix, also where a program's `main` returns it or `unwrap` panics with it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    pub(crate) fn invalid(what: &'static str, value: impl std::fmt::Display, expected: &'static str) -> Self {
        Self::InvalidArgument { what, value: value.to_string(), expected }
    }

    pub(crate) fn sys(call: impl Into<String>, source: io::Error, fix: &'static str) -> Self {
        Self::Sys { call: call.into(), source, fix }
    }

    /// The `errno` value that GDRCopy's C interface gives for this cause.
    pub fn errno(&self) -> i32 {
        match self {
            Self::InvalidArgument { .. }
            | Self::NotMappable { .. }
            | Self::BeyondAllocation { .. }
            | Self::OutOfBounds { .. }
            | Self::Invalidated => libc::EINVAL,
            Self::AlreadyMapped => libc::EAGAIN,
            Self::OtherProcess { .. } => libc::EACCES,
            Self::Exhausted { .. } => libc::ENOMEM,
            Self::Unsupported { .. } => libc::EOPNOTSUPP,
            Self::ProofFailed { .. } => libc::EIO,
            Self::Timeout { .. } => libc::ETIMEDOUT,
            Self::Sys { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            Self::Cuda { status, .. } => status.errno(),
            Self::Rm { .. } => libc::EIO,
            Self::NoBackend(_) => libc::ENODEV,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_is_the_message() {
        let error = Error::invalid("offset", 7, "a multiple of 8");
        assert_eq!(format!("{error:?}"), "offset is 7: expected a multiple of 8");
    }
}
