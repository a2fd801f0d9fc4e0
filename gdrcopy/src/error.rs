//! The errors of this crate: what failed, why, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use cudarc::driver::sys::CUresult;

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
    pub(crate) fn invalid(what: &'static str, value: impl fmt::Display, expected: &'static str) -> Self {
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

/// A `CUresult`: an integer, because newer drivers return codes that no list here has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaStatus(pub u32);

/// What this crate knows of a status.
struct Known {
    status: CudaStatus,
    name: &'static str,
    errno: i32,
    fix: &'static str,
}

/// Declares the constants and the table behind them, from one list.
macro_rules! statuses {
    ($($constant:ident = $name:ident, $errno:ident, $fix:literal;)*) => {
        impl CudaStatus {
            /// `CUDA_SUCCESS`.
            pub const SUCCESS: Self = Self(0);
            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                pub const $constant: Self = Self(CUresult::$name as u32);
            )*
        }

        const KNOWN: &[Known] = &[
            $(Known { status: CudaStatus::$constant, name: stringify!($name), errno: libc::$errno, fix: $fix },)*
        ];
    };
}

statuses! {
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE, EINVAL,
        "check address, length and alignment, and that the memory is not freed";
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY, ENOMEM,
        "free memory of this GPU (nvidia-smi shows who holds it); if contexts of many processes use it, unset \
         CUDA_DEVICE_MAX_CONNECTIONS";
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED, ENODEV,
        "CUDA does not work in a child forked after it was used: open it in the child, or use exec";
    DEINITIALIZED = CUDA_ERROR_DEINITIALIZED, ENODEV,
        "the process is ending: use GPU memory before main returns";
    STUB_LIBRARY = CUDA_ERROR_STUB_LIBRARY, ENODEV,
        "the toolkit's stub of libcuda was found: take its stubs folder out of LD_LIBRARY_PATH";
    DEVICE_UNAVAILABLE = CUDA_ERROR_DEVICE_UNAVAILABLE, EBUSY,
        "another process has the GPU for itself: end it, or change the compute mode with nvidia-smi -c";
    NO_DEVICE = CUDA_ERROR_NO_DEVICE, ENODEV,
        "no GPU is visible: check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices";
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE, EINVAL,
        "use an ordinal below the number of visible GPUs";
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT, EINVAL,
        "the memory's context is gone: do not destroy it while its memory is in use";
    ECC_UNCORRECTABLE = CUDA_ERROR_ECC_UNCORRECTABLE, EIO,
        "the GPU's memory is damaged: end the process and see nvidia-smi -q -d ECC";
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM, EIO,
        "see the kernel log (dmesg), and the limits on open files and locked memory";
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE, EINVAL,
        "the context was reset: do not call cudaDeviceReset while mappings are in use";
    NOT_READY = CUDA_ERROR_NOT_READY, EAGAIN,
        "ask again later";
    NOT_FOUND = CUDA_ERROR_NOT_FOUND, ENOENT,
        "the module has no such kernel: it and the program are of different versions";
    ILLEGAL_ADDRESS = CUDA_ERROR_ILLEGAL_ADDRESS, EIO,
        "an earlier kernel used a wrong address: restart the process, compute-sanitizer finds the kernel";
    PEER_ACCESS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, EEXIST,
        "nothing: it is as it should be";
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED, EIO,
        "the context was reset: do not call cudaDeviceReset while mappings are in use";
    HOST_MEMORY_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, EEXIST,
        "register a range of host pages once, with one call";
    LAUNCH_FAILED = CUDA_ERROR_LAUNCH_FAILED, EIO,
        "an earlier kernel failed: restart the process, compute-sanitizer finds the kernel";
    NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED, EPERM,
        "not allowed here: no CUDA call may be made in a stream's host function or during capture";
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED, EOPNOTSUPP,
        "this GPU or driver does not do it: use another kind of memory, or a newer driver";
    SYSTEM_NOT_READY = CUDA_ERROR_SYSTEM_NOT_READY, ENODEV,
        "start nvidia-fabricmanager (NVSwitch machines need it), then try again";
    SYSTEM_DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, ENODEV,
        "libcuda and the kernel driver differ in version: reboot, or reload the kernel driver";
    UNKNOWN = CUDA_ERROR_UNKNOWN, EIO,
        "see the kernel log (dmesg) for NVRM or Xid lines; nvidia-modprobe -u -c 0 makes missing device files";
}

impl CudaStatus {
    fn known(self) -> Option<&'static Known> {
        KNOWN.iter().find(|known| known.status == self)
    }

    /// The name in `cuda.h`, where this crate knows it.
    pub fn name(self) -> &'static str {
        match self.known() {
            Some(known) => known.name,
            None if self == Self::SUCCESS => "CUDA_SUCCESS",
            None => "see CUresult in cuda.h",
        }
    }

    /// The nearest `errno`.
    pub fn errno(self) -> i32 {
        match self.known() {
            Some(known) => known.errno,
            None if self == Self::SUCCESS => 0,
            None => libc::EIO,
        }
    }

    /// What the user can do about it.
    pub fn fix(self) -> &'static str {
        self.known().map_or("the CUDA driver manual explains the number", |known| known.fix)
    }
}

impl fmt::Display for CudaStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA status {} ({})", self.0, self.name())
    }
}

impl CudaStatus {
    /// The result of a call of this symbol that returned this.
    #[inline]
    pub(crate) fn check(self, symbol: &'static str) -> Result<()> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self.error_of(symbol)) }
    }

    #[cold]
    pub(crate) fn error_of(self, symbol: &'static str) -> Error {
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
