//! The errors of this crate: what failed, why, and what the user can do about it.

mod status;

use std::io;
use std::time::Duration;

pub use self::status::CudaStatus;
use crate::types::BackendKind;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a backend was not used.
#[derive(Debug, thiserror::Error)]
#[error("{backend}: {error}")]
pub struct Refusal {
    /// The backend.
    pub backend: BackendKind,
    /// Its reason, with the fix.
    pub error: Error,
}

/// The errors of this crate. `Display` gives the cause and, where there is one, the fix; there is no `source()` beside it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call does not accept an argument.
    #[error("{what} is {value}: expected {expected}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What was passed.
        value: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// The address is not of GPU memory that can be mapped.
    #[error("{addr:#x} is {found}; {fix}")]
    NotMappable {
        /// The address.
        addr: u64,
        /// What lies there.
        found: &'static str,
        /// What the user can do.
        fix: &'static str,
    },
    /// The range goes beyond its allocation.
    #[error(
        "{len} bytes at {addr:#x} go beyond the allocation of {size} bytes at {base:#x}; pin at most what was allocated"
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
    /// An access would go beyond its mapping or buffer.
    #[error("{len} bytes at offset {offset} do not fit in {size} bytes")]
    OutOfBounds {
        /// First byte of the access.
        offset: usize,
        /// Its length.
        len: usize,
        /// The size of the mapping or buffer.
        size: usize,
    },
    /// The pin has a mapping already; it may have one at a time.
    #[error("this memory is already mapped by this pin; drop the mapping, or pin the memory once more")]
    AlreadyMapped,
    /// The memory was freed: the pin no longer holds it, or can no longer map it.
    #[error("the GPU memory under this pin was freed; pin the new allocation")]
    Invalidated,
    /// The value belongs to another process, which forked this one.
    #[error(
        "pinned by process {owner}, used by process {caller}; a forked child must open and pin for itself"
    )]
    OtherProcess {
        /// The process that opened the library.
        owner: u32,
        /// The one that called.
        caller: u32,
    },
    /// A resource ran out.
    #[error("{what} is used up: {len} more bytes do not fit; {fix}")]
    Exhausted {
        /// The resource, for example BAR1 space.
        what: &'static str,
        /// The bytes asked for.
        len: usize,
        /// What the user can do.
        fix: &'static str,
    },
    /// The backend, driver or GPU does not support this.
    #[error("{what} is not supported by {by}; {fix}")]
    Unsupported {
        /// The feature.
        what: String,
        /// What lacks it.
        by: &'static str,
        /// What the user can do.
        fix: &'static str,
    },
    /// A mapping showed other bytes than CUDA, and was discarded.
    #[error("mapping of {addr:#x} discarded: {found}; {fix}")]
    ProofFailed {
        /// The address that was mapped.
        addr: u64,
        /// The difference.
        found: String,
        /// What the user can do.
        fix: &'static str,
    },
    /// An operation did not end in time.
    #[error("{what} did not end within {after:?}; {fix}")]
    Timeout {
        /// The operation.
        what: &'static str,
        /// The time limit.
        after: Duration,
        /// What the user can do.
        fix: &'static str,
    },
    /// A system call failed.
    #[error("{call}: {error}; {fix}")]
    Sys {
        /// The call, with its object.
        call: String,
        /// The error of the system call.
        error: io::Error,
        /// What the user can do.
        fix: &'static str,
    },
    /// A call of the CUDA driver failed.
    #[error("{call}: {status}; {fix}")]
    Cuda {
        /// The call.
        call: &'static str,
        /// The status that the driver returned.
        status: CudaStatus,
        /// What the user can do.
        fix: &'static str,
    },
    /// The NVIDIA driver's resource manager refused an operation.
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

impl Error {
    pub(crate) fn invalid(what: &'static str, value: impl std::fmt::Display, expected: &'static str) -> Self {
        Self::InvalidArgument { what, value: value.to_string(), expected }
    }

    pub(crate) fn sys(call: impl Into<String>, error: io::Error, fix: &'static str) -> Self {
        Self::Sys { call: call.into(), error, fix }
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
            Self::Sys { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            Self::Cuda { status, .. } => status.errno(),
            Self::Rm { .. } => libc::EIO,
            Self::NoBackend(_) => libc::ENODEV,
        }
    }
}

/// Refuses an access beyond `size` bytes.
#[inline]
pub(crate) fn check_bounds(offset: usize, len: usize, size: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfBounds { offset, len, size }),
    }
}

impl CudaStatus {
    /// The result of a call of this symbol that returned this.
    #[inline]
    pub(crate) fn check(self, symbol: &'static str) -> Result<()> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self.error_of(symbol)) }
    }

    #[cold]
    fn error_of(self, symbol: &'static str) -> Error {
        Error::Cuda { call: name_of(symbol), status: self, fix: self.fix() }
    }
}

/// The name in the manual: a symbol without the number of its version.
pub(crate) fn name_of(symbol: &'static str) -> &'static str {
    symbol.strip_suffix("_v2").unwrap_or(symbol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_holds_the_cause_and_there_is_no_source() {
        let error = Error::sys("open x", io::Error::from_raw_os_error(libc::ENOENT), "make it");
        assert!(error.to_string().starts_with("open x: No such file"), "{error}");
        assert!(std::error::Error::source(&error).is_none());
    }

    #[test]
    fn a_status_from_a_newer_driver_is_an_error_with_its_number() {
        let error = CudaStatus(4711).check("cuSomething").unwrap_err();
        assert_eq!(error.errno(), libc::EIO);
        let text = error.to_string();
        assert!(text.contains("cuSomething") && text.contains("4711"), "{text}");
    }

    #[test]
    fn success_is_no_error() {
        assert_eq!(CudaStatus::SUCCESS.errno(), 0);
        CudaStatus::SUCCESS.check("cuSomething").unwrap();
    }
}
