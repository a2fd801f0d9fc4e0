//! Status codes of the CUDA driver.

use std::fmt;

/// A `CUresult`: an integer, because newer drivers return codes that no list here has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaStatus(pub u32);

impl CudaStatus {
    /// `CUDA_SUCCESS`.
    pub const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: Self = Self(1);
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_NOT_INITIALIZED`.
    pub const NOT_INITIALIZED: Self = Self(3);
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: Self = Self(100);
    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub const INVALID_DEVICE: Self = Self(101);
    /// `CUDA_ERROR_INVALID_CONTEXT`.
    pub const INVALID_CONTEXT: Self = Self(201);
    /// `CUDA_ERROR_NOT_PERMITTED`.
    pub const NOT_PERMITTED: Self = Self(800);
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: Self = Self(801);
    /// `CUDA_ERROR_UNKNOWN`.
    pub const UNKNOWN: Self = Self(999);

    /// The name in `cuda.h`, where this crate knows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SUCCESS => "CUDA_SUCCESS",
            Self::INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
            Self::OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
            Self::NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
            Self::NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
            Self::INVALID_DEVICE => "CUDA_ERROR_INVALID_DEVICE",
            Self::INVALID_CONTEXT => "CUDA_ERROR_INVALID_CONTEXT",
            Self::NOT_PERMITTED => "CUDA_ERROR_NOT_PERMITTED",
            Self::NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
            Self::UNKNOWN => "CUDA_ERROR_UNKNOWN",
            _ => "see CUresult in cuda.h",
        }
    }

    /// The nearest `errno`.
    pub fn errno(self) -> i32 {
        match self {
            Self::SUCCESS => 0,
            Self::INVALID_VALUE | Self::INVALID_CONTEXT | Self::INVALID_DEVICE => libc::EINVAL,
            Self::OUT_OF_MEMORY => libc::ENOMEM,
            Self::NO_DEVICE | Self::NOT_INITIALIZED => libc::ENODEV,
            Self::NOT_PERMITTED => libc::EPERM,
            Self::NOT_SUPPORTED => libc::EOPNOTSUPP,
            _ => libc::EIO,
        }
    }
}

impl fmt::Display for CudaStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA status {} ({})", self.0, self.name())
    }
}
