//! Names and numbers of backends, mapping types, flags and attributes.

use std::fmt;

/// A way to map GPU memory for the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The kernel module `gdrdrv`, NVIDIA's or ours.
    Gdrdrv,
    /// `mmap` of a CUDA dma-buf: CUDA 13.3 and newer, no module.
    DmaBuf,
    /// The NVIDIA driver's own resource-manager interface: stock drivers with open kernel modules, no module of GDRCopy.
    Rm,
    /// Plain memory, for machines without a GPU.
    Host,
}

impl BackendKind {
    /// All backends, in the order in which [`Gdr::open`](crate::Gdr::open) tries them.
    pub const ALL: [Self; 4] = [Self::Gdrdrv, Self::DmaBuf, Self::Rm, Self::Host];

    /// The name in logs, options and `GDRCOPY_BACKEND`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gdrdrv => "gdrdrv",
            Self::DmaBuf => "dmabuf",
            Self::Rm => "rm",
            Self::Host => "host",
        }
    }

    /// An attribute of a backend that has the same ones on every machine, as all but `gdrdrv` have.
    pub(crate) fn attribute(self, attribute: Attribute) -> u32 {
        match (self, attribute) {
            (Self::Host, Attribute::SupportPinFlagForcePcie)
            | (Self::Host | Self::Rm, Attribute::UsingDmaBufMmap) => 0,
            _ => 1,
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the CPU caches a mapping. The numbers are those of GDRCopy's `gdr_mapping_type_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MappingType {
    /// Stores are combined and weakly ordered, loads are not cached: PCIe BAR1 on x86.
    WriteCombining = 1,
    /// Coherent and cached like host memory.
    Cached = 2,
    /// Device memory of Arm: no reordering, no unaligned access.
    Device = 3,
}

bitflags::bitflags! {
    /// Options of a pin.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct PinFlags: u32 {
        /// Maps through PCIe BAR1 even if the platform has a coherent link (`GDR_PIN_FLAG_FORCE_PCIE`).
        const FORCE_PCIE = 1;
        /// Lets the range go beyond its CUDA allocation, up to the GPU pages around it or the driver's block of memory: for
        /// callers that round to GPU pages themselves. The mapping then shows whatever else lies there. GDRCopy has no such
        /// flag: its interface always allows this.
        const WHOLE_PAGES = 1 << 16;
    }
}

/// Properties of a backend; numbers of GDRCopy's `gdr_attr_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attribute {
    /// 1: a mapping shows the old data after its memory is freed, until unpin.
    UsePersistentMapping = 1,
    /// 1: [`PinFlags::FORCE_PCIE`] is supported.
    SupportPinFlagForcePcie = 2,
    /// 1: mappings come from `mmap` of a dma-buf.
    UsingDmaBufMmap = 3,
}

/// GPU pages, in which the GPU driver maps memory, bytes.
pub(crate) const GPU_PAGE: u64 = 64 << 10;

/// `ENOTSUPP`: internal to the Linux kernel, but NVIDIA's driver returns it.
pub(crate) const ENOTSUPP: i32 = 524;

/// The page size of host memory, bytes: 4 KiB on x86-64, up to 64 KiB on aarch64. GPU pages (64 KiB) and register pages of mlx5
/// cards (4 KiB) do not depend on it.
pub fn host_page() -> usize {
    // Not rustix's, which reads the auxiliary vector: tests replace `sysconf` to run with other page sizes.
    // SAFETY: no arguments but a known name.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("POSIX has a page size")
}
