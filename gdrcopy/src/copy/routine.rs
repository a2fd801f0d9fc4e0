//! The names of the copy routines, and where they work.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// An instruction set to copy with. The widths are those of one access to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Routine {
    /// Words of 8 bytes and less, everywhere.
    Scalar,
    /// x86-64, 16 bytes: streaming stores (`movntdq`), plain loads (`movdqa`).
    Sse2,
    /// x86-64, 16 bytes: streaming loads (`movntdqa`). Its stores would be those of [`Sse2`](Self::Sse2).
    Sse41,
    /// x86-64, 32 bytes: streaming stores (`vmovntdq`), plain loads (`vmovdqa`).
    Avx,
    /// x86-64, 32 bytes: streaming loads (`vmovntdqa`). Its stores would be those of [`Avx`](Self::Avx).
    Avx2,
    /// x86-64, 64 bytes: streaming stores and loads.
    Avx512,
    /// x86-64, 64 bytes: direct stores (`movdir64b`), each one whole bus write. There are no such loads.
    Movdir64b,
    /// aarch64, 64 bytes: four registers at a time (`st1`, `ld1`).
    Neon,
}

impl Routine {
    /// All routines, of every architecture.
    pub const ALL: [Self; 8] = [
        Self::Scalar,
        Self::Sse2,
        Self::Sse41,
        Self::Avx,
        Self::Avx2,
        Self::Avx512,
        Self::Movdir64b,
        Self::Neon,
    ];

    /// The name in logs, options, `GDRCOPY_STORE` and `GDRCOPY_LOAD`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Sse2 => "sse2",
            Self::Sse41 => "sse41",
            Self::Avx => "avx",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Movdir64b => "movdir64b",
            Self::Neon => "neon",
        }
    }

    /// Whether the routine copies to the device, where it is [`supported`](Self::supported).
    pub fn stores(self) -> bool {
        !matches!(self, Self::Sse41 | Self::Avx2)
    }

    /// Whether the routine copies from the device, where it is [`supported`](Self::supported).
    pub fn loads(self) -> bool {
        self != Self::Movdir64b
    }
}

impl fmt::Display for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Routine {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|routine| routine.name() == name).ok_or_else(|| {
            Error::invalid("copy routine", name, "scalar, sse2, sse41, avx, avx2, avx512, movdir64b or neon")
        })
    }
}
