//! The ways to get a CPU mapping of GPU memory: one trait, one module each.

mod cuda_allocation;
pub(crate) mod dmabuf;
pub(crate) mod gdrdrv;
pub(crate) mod host;
mod locate;
pub(crate) mod proof;
pub(crate) mod reservation;
pub(crate) mod rm;

use std::fmt;
use std::str::FromStr;

use crate::cpu_range::CpuRange;
use crate::cuda::AllocKind;
use crate::error::{Error, Result};

pub(crate) use cuda_allocation::CudaAllocation;
pub(crate) use locate::{Part, locate};

/// How CPU mappings of GPU memory are made, in the order in which [`Gdr::open`](crate::Gdr::open) tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The kernel module `gdrdrv`, NVIDIA's or ours.
    Gdrdrv,
    /// `mmap` of a CUDA dma-buf: CUDA 13.3 and newer, no module.
    DmaBuf,
    /// The NVIDIA driver's own resource-manager interface: stock drivers, no module.
    Rm,
    /// Plain memory, where there is no GPU.
    Host,
}

impl BackendKind {
    /// All backends, best first.
    pub const LADDER: [Self; 4] = [Self::Gdrdrv, Self::DmaBuf, Self::Rm, Self::Host];

    /// The name in logs, options and `GDRCOPY_BACKEND`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gdrdrv => "gdrdrv",
            Self::DmaBuf => "dmabuf",
            Self::Rm => "rm",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::LADDER
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| Error::invalid("backend (GDRCOPY_BACKEND)", name, "gdrdrv, dmabuf, rm or host"))
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
    /// How to pin.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct PinFlags: u32 {
        /// Map through PCIe BAR1 also where the platform has a coherent link (`GDR_PIN_FLAG_FORCE_PCIE`).
        const FORCE_PCIE = 1;
        /// The range may leave its CUDA allocation, as far as the GPU pages around it, or the driver's block of
        /// memory, reach: for callers that round to GPU pages themselves. The mapping then shows what else lies there,
        /// be it memory of others in this process or of nobody. Not one of GDRCopy's flags: its interface always
        /// allows it.
        const WHOLE_PAGES = 1 << 16;
    }
}

/// Properties of a backend; numbers of GDRCopy's `gdr_attr_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attribute {
    /// 1: a mapping survives the freeing of its memory and shows the old data until unpin.
    UsePersistentMapping = 1,
    /// 1: [`PinFlags::FORCE_PCIE`] is understood.
    SupportPinFlagForcePcie = 2,
    /// 1: mappings come from `mmap` of a dma-buf.
    UsingDmaBufMmap = 3,
}

/// A backend that has been found to work here.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    fn kind(&self) -> BackendKind;

    /// Version of the kernel module, `(major, minor)`.
    fn driver_version(&self) -> Option<(u16, u16)> {
        None
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32>;

    /// Pins `len` bytes at `addr`, at least one, in any alignment, within one allocation unless the flags say otherwise.
    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>>;

    /// Allocates `len` bytes, at least one, that [`pin`](Self::pin) accepts, on a device (a CUDA ordinal):
    /// a [`CudaAllocation`], except where there is no GPU.
    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>>;
}

/// Memory made by a backend. Dropping it frees it.
pub(crate) trait Allocation: Send + Sync + fmt::Debug {
    /// Its address on the GPU.
    fn addr(&self) -> u64;

    /// Its size, bytes.
    fn len(&self) -> usize;

    /// Copies into it the way the GPU does, not through a CPU mapping; in place on return.
    fn write(&self, offset: usize, data: &[u8]) -> Result<()>;

    /// Copies out of it the way the GPU does.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()>;
}

/// Pages of the GPU, in which its driver maps memory, bytes.
pub(crate) const GPU_PAGE: u64 = 64 << 10;

/// `ENOTSUPP`: a number of the Linux kernel's own that NVIDIA's driver lets out.
pub(crate) const ENOTSUPP: i32 = 524;

/// Bytes of a page of host memory, in which the kernel maps and pins: 4 KiB on x86-64, up to 64 KiB on aarch64.
///
/// NVIDIA's GPU pages (64 KiB) and the register pages of mlx5 cards (4 KiB) do not depend on it.
pub fn host_page() -> usize {
    // SAFETY: no arguments but a known name.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("POSIX has a page size")
}

/// Refuses an access that would leave something of `size` bytes.
#[inline]
pub(crate) fn inside(offset: usize, len: usize, size: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfBounds { offset, len, size }),
    }
}

/// Pinned memory. Dropping it unpins.
pub(crate) trait Pinned: Send + Sync + fmt::Debug {
    /// First byte that is pinned, at or before the address asked for.
    fn va(&self) -> u64;

    /// Bytes pinned from [`va`](Self::va) on.
    fn pinned_len(&self) -> usize;

    /// Bytes from [`va`](Self::va) on behind which there is memory; a mapping of more has a hole.
    fn backed_len(&self) -> usize {
        self.pinned_len()
    }

    /// The CUDA allocation under the first byte asked for, of which this backend made sure that it is the one pinned.
    /// None without CUDA.
    fn located(&self) -> Option<&Part> {
        None
    }

    /// Granularity to which the range was rounded, bytes.
    fn page_size(&self) -> u32;

    /// Maps the first `len` bytes (counted from [`va`](Self::va), rounded up to pages). The caller makes
    /// sure that there is one mapping at a time and that the pin outlives it.
    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange>;

    /// Whether the driver has taken the memory away (the memory was freed and the backend does not hold it).
    fn invalidated(&self) -> Result<bool> {
        Ok(false)
    }

    /// Releases the pin, telling what went wrong where a drop can only log it.
    fn unpin(self: Box<Self>) -> Result<()>;
}
