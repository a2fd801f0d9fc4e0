//! Options that several tools have.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use gdrcopy::cuda::AllocKind;
use gdrcopy::{BackendKind, MappingType};
use serde::Serialize;

use super::tools_shared::{Failure, Result};

/// Options of every tool.
#[derive(Args, Clone, Debug)]
pub(super) struct Common {
    /// GPU, as CUDA counts them.
    #[arg(short = 'd', long, value_name = "ORDINAL", default_value_t = 0)]
    pub(super) gpu: i32,
    /// How to map: gdrdrv, dmabuf, rm or host [default: the first that works].
    #[arg(long, value_name = "BACKEND")]
    pub(super) backend: Option<BackendKind>,
    /// Writes the results as JSON to this file, or with "-" to standard output and all else to standard error.
    #[arg(long, value_name = "FILE|-")]
    pub(super) json: Option<PathBuf>,
}

/// Which memory to map, and how.
#[derive(Args, Clone, Copy, Debug, Serialize)]
pub(super) struct Memory {
    /// How GPU memory is allocated.
    #[arg(short = 'a', long, value_enum, value_name = "FN", default_value_t = AllocFn::CuMemAlloc)]
    pub(super) alloc: AllocFn,
    /// Caching type of the mapping.
    #[arg(short = 'M', long, value_enum, value_name = "TYPE", default_value_t = MapAs::Default)]
    pub(super) mapping: MapAs,
}

/// How GPU memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub(super) enum AllocFn {
    /// `cuMemAlloc`.
    #[value(name = "cuMemAlloc")]
    #[serde(rename = "cuMemAlloc")]
    CuMemAlloc,
    /// `cuMemCreate` and `cuMemMap`.
    #[value(name = "cuMemCreate")]
    #[serde(rename = "cuMemCreate")]
    CuMemCreate,
}

impl AllocFn {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CuMemAlloc => "cuMemAlloc",
            Self::CuMemCreate => "cuMemCreate",
        }
    }

    pub(super) fn kind(self) -> AllocKind {
        match self {
            Self::CuMemAlloc => AllocKind::Malloc,
            Self::CuMemCreate => AllocKind::Vmm,
        }
    }
}

/// The caching type to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum MapAs {
    /// The platform's.
    Default,
    /// Write combining.
    Wc,
    /// Cached.
    Cache,
    /// Device memory of Arm.
    Device,
}

impl MapAs {
    pub(super) fn request(self) -> Option<MappingType> {
        match self {
            Self::Default => None,
            Self::Wc => Some(MappingType::WriteCombining),
            Self::Cache => Some(MappingType::Cached),
            Self::Device => Some(MappingType::Device),
        }
    }
}

/// Parses a number of bytes, at least 1: `4096`, `0x1000`, `4K`, `4Ki`, `16M`, `1G`; all are powers of 1024.
pub(super) fn bytes(text: &str) -> std::result::Result<usize, String> {
    let expected = || "expected a number of bytes such as 4096, 0x1000, 64K, 16M or 1G".to_owned();
    let short = text.strip_suffix('i').unwrap_or(text);
    let (digits, shift) = match short.chars().last() {
        Some('k' | 'K') => (&short[..short.len() - 1], 10),
        Some('m' | 'M') => (&short[..short.len() - 1], 20),
        Some('g' | 'G') => (&short[..short.len() - 1], 30),
        _ => (text, 0),
    };
    let number = match digits.strip_prefix("0x") {
        Some(hex) => usize::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let number = number.map_err(|_| expected())?;
    // A buffer of this size and its copies must fit into the address space.
    number.checked_mul(1 << shift).filter(|&bytes| bytes <= 1 << 46).ok_or_else(expected)
}

/// Refuses what makes no sense together.
pub(super) fn usage(fine: bool, message: impl FnOnce() -> String) -> Result<()> {
    if fine { Ok(()) } else { Err(Failure::Usage(message())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, expected) in
            [("0", 0), ("131072", 131_072), ("0x10", 16), ("64K", 65536), ("2Mi", 2 << 20), ("1g", 1 << 30)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "K", "i", "-1", "1.5M", "12 K", "0x", "5i", "99999999999G", "1T", "Ä"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
