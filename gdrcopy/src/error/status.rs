//! Status codes of the CUDA driver.

use std::fmt;

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
    ($($constant:ident = $code:literal, $name:literal, $errno:ident, $fix:literal;)*) => {
        impl CudaStatus {
            /// `CUDA_SUCCESS`.
            pub const SUCCESS: Self = Self(0);
            $(
                #[doc = concat!("`", $name, "`.")]
                pub const $constant: Self = Self($code);
            )*
        }

        const KNOWN: &[Known] = &[
            $(Known { status: CudaStatus::$constant, name: $name, errno: libc::$errno, fix: $fix },)*
        ];
    };
}

// Numbers and names: `CUresult` in cuda.h of CUDA 12.8.
statuses! {
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE", EINVAL,
        "check address, length and alignment, and that the memory is not freed";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY", ENOMEM,
        "free memory of this GPU (nvidia-smi shows who holds it); if contexts of many processes use it, unset \
         CUDA_DEVICE_MAX_CONNECTIONS";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED", ENODEV,
        "CUDA does not work in a child forked after it was used: open it in the child, or use exec";
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED", ENODEV,
        "the process is ending: use GPU memory before main returns";
    STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY", ENODEV,
        "the toolkit's stub of libcuda was found: take its stubs folder out of LD_LIBRARY_PATH";
    DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", EBUSY,
        "another process has the GPU for itself: end it, or change the compute mode with nvidia-smi -c";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE", ENODEV,
        "no GPU is visible: check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE", EINVAL,
        "use an ordinal below the number of visible GPUs";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT", EINVAL,
        "the memory's context is gone: do not destroy it while its memory is in use";
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE", EIO,
        "the GPU's memory is damaged: end the process and see nvidia-smi -q -d ECC";
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM", EIO,
        "see the kernel log (dmesg), and the limits on open files and locked memory";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE", EINVAL,
        "the context was reset: do not call cudaDeviceReset while mappings are in use";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY", EAGAIN,
        "ask again later";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND", ENOENT,
        "the module has no such kernel: it and the program are of different versions";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS", EIO,
        "an earlier kernel used a wrong address: restart the process, compute-sanitizer finds the kernel";
    PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", EEXIST,
        "nothing: it is as it should be";
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", EIO,
        "the context was reset: do not call cudaDeviceReset while mappings are in use";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", EEXIST,
        "register a range of host pages once, with one call";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED", EIO,
        "an earlier kernel failed: restart the process, compute-sanitizer finds the kernel";
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED", EPERM,
        "not allowed here: no CUDA call may be made in a stream's host function or during capture";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED", EOPNOTSUPP,
        "this GPU or driver does not do it: use another kind of memory, or a newer driver";
    SYSTEM_NOT_READY = 802, "CUDA_ERROR_SYSTEM_NOT_READY", ENODEV,
        "start nvidia-fabricmanager (NVSwitch machines need it), then try again";
    SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ENODEV,
        "libcuda and the kernel driver differ in version: reboot, or reload the kernel driver";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN", EIO,
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

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn numbers_and_names_are_those_of_cuda_h() {
        for (status, theirs) in [
            (CudaStatus::SUCCESS, CUresult::CUDA_SUCCESS),
            (CudaStatus::INVALID_VALUE, CUresult::CUDA_ERROR_INVALID_VALUE),
            (CudaStatus::OUT_OF_MEMORY, CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            (CudaStatus::NOT_INITIALIZED, CUresult::CUDA_ERROR_NOT_INITIALIZED),
            (CudaStatus::DEINITIALIZED, CUresult::CUDA_ERROR_DEINITIALIZED),
            (CudaStatus::STUB_LIBRARY, CUresult::CUDA_ERROR_STUB_LIBRARY),
            (CudaStatus::DEVICE_UNAVAILABLE, CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE),
            (CudaStatus::NO_DEVICE, CUresult::CUDA_ERROR_NO_DEVICE),
            (CudaStatus::INVALID_DEVICE, CUresult::CUDA_ERROR_INVALID_DEVICE),
            (CudaStatus::INVALID_CONTEXT, CUresult::CUDA_ERROR_INVALID_CONTEXT),
            (CudaStatus::ECC_UNCORRECTABLE, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE),
            (CudaStatus::OPERATING_SYSTEM, CUresult::CUDA_ERROR_OPERATING_SYSTEM),
            (CudaStatus::INVALID_HANDLE, CUresult::CUDA_ERROR_INVALID_HANDLE),
            (CudaStatus::ILLEGAL_ADDRESS, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
            (CudaStatus::CONTEXT_IS_DESTROYED, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
            (CudaStatus::LAUNCH_FAILED, CUresult::CUDA_ERROR_LAUNCH_FAILED),
            (CudaStatus::NOT_PERMITTED, CUresult::CUDA_ERROR_NOT_PERMITTED),
            (CudaStatus::NOT_SUPPORTED, CUresult::CUDA_ERROR_NOT_SUPPORTED),
            (CudaStatus::NOT_FOUND, CUresult::CUDA_ERROR_NOT_FOUND),
            (CudaStatus::PEER_ACCESS_ALREADY_ENABLED, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
            (CudaStatus::HOST_MEMORY_ALREADY_REGISTERED, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
            (CudaStatus::NOT_READY, CUresult::CUDA_ERROR_NOT_READY),
            (CudaStatus::SYSTEM_NOT_READY, CUresult::CUDA_ERROR_SYSTEM_NOT_READY),
            (CudaStatus::SYSTEM_DRIVER_MISMATCH, CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
            (CudaStatus::UNKNOWN, CUresult::CUDA_ERROR_UNKNOWN),
        ] {
            assert_eq!(status.0, theirs as u32, "{status}");
            assert_eq!(status.name(), format!("{theirs:?}"));
        }
        assert_eq!(KNOWN.len(), 24, "a new status belongs in the list above");
    }
}
