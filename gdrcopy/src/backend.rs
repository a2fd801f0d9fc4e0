//! The ways to map GPU memory for the CPU: one trait, and one module for each backend.
//!
//! A new backend implements [`Backend`] and [`Pinned`] in a module here. It gets a variant in
//! [`BackendKind`], an arm in `Options::open_backend` and `Survey::new` (`gdr.rs`), and a line in `each` of `tests/it/rig.rs`,
//! which runs the contract tests on it.

pub(crate) mod dmabuf;
pub(crate) mod gdrdrv;
pub(crate) mod host;
pub(crate) mod locate;
pub(crate) mod proof;
pub(crate) mod rm;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use self::locate::Part;
use crate::cpu_range::CpuRange;
use crate::cuda::{AllocKind, Cuda};
use crate::error::{Error, Result, check_bounds};
use crate::fork::Owner;
use crate::types::{Attribute, BackendKind, MappingType, PinFlags, host_page};

impl FromStr for BackendKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| Error::invalid("backend (GDRCOPY_BACKEND)", name, "gdrdrv, dmabuf, rm or host"))
    }
}

impl MappingType {
    /// The refusal of this type.
    pub(crate) fn unsupported(self, by: &'static str, fix: &'static str) -> Error {
        Error::Unsupported { what: format!("a mapping of type {self:?}"), by, fix }
    }
}

/// A backend that works on this system.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    fn kind(&self) -> BackendKind;

    /// Version of the kernel module, `(major, minor)`.
    fn driver_version(&self) -> Option<(u16, u16)> {
        None
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        Ok(self.kind().attribute(attribute))
    }

    /// Pins `len` bytes (at least one) at `addr`, of any alignment, within one allocation unless the flags allow more.
    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>>;

    /// Allocates `len` bytes (at least one) for [`pin`](Self::pin) on a device (a CUDA ordinal).
    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>>;
}

/// Memory that a backend allocated; freed when dropped.
pub(crate) trait Allocation: Send + Sync + fmt::Debug {
    /// Its address on the GPU.
    fn addr(&self) -> u64;

    /// Its size, bytes.
    fn len(&self) -> usize;

    /// Writes as the GPU does, not through a CPU mapping, and returns when the bytes are in place.
    fn write(&self, offset: usize, data: &[u8]) -> Result<()>;

    /// Reads as the GPU does.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()>;
}

/// Pinned memory; unpinned when dropped.
pub(crate) trait Pinned: Send + Sync + fmt::Debug {
    /// The first pinned byte, at or before the requested address.
    fn va(&self) -> u64;

    /// Bytes pinned from [`va`](Self::va) on.
    fn pinned_len(&self) -> usize;

    /// Bytes from [`va`](Self::va) on that are backed by memory; a longer mapping has a hole.
    fn backed_len(&self) -> usize {
        self.pinned_len()
    }

    /// The CUDA allocation of the first requested byte, which the backend verified to be the pinned one. None without CUDA.
    fn located(&self) -> Option<&Part> {
        None
    }

    /// The page size to which the range was rounded, bytes.
    fn page_size(&self) -> u32 {
        u32::try_from(host_page()).expect("pages are small")
    }

    /// Maps the first `len` bytes from [`va`](Self::va) on, rounded up to pages. The caller ensures that there is one mapping at a
    /// time and that the pin outlives it.
    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange>;

    /// Whether the driver took the memory away because it was freed.
    fn invalidated(&self) -> Result<bool> {
        Ok(false)
    }

    /// Unpins, and returns the error that a drop can only log.
    fn unpin(self: Box<Self>) -> Result<()>;
}

/// CUDA memory, accessed by the GPU's copy engines; freed when dropped.
#[derive(Debug)]
pub(crate) struct CudaAllocation {
    cuda: Arc<dyn Cuda>,
    device: i32,
    addr: u64,
    len: usize,
    owner: Owner,
}

impl CudaAllocation {
    pub(crate) fn new(cuda: &Arc<dyn Cuda>, device: i32, len: usize) -> Result<Self> {
        Self::of_kind(cuda, device, len, AllocKind::Malloc)
    }

    pub(crate) fn of_kind(cuda: &Arc<dyn Cuda>, device: i32, len: usize, kind: AllocKind) -> Result<Self> {
        let addr = cuda.alloc(device, len, kind)?;
        Ok(Self { cuda: cuda.clone(), device, addr, len, owner: Owner::this_process() })
    }

    /// The GPU address of a part.
    fn part(&self, offset: usize, len: usize) -> Result<u64> {
        self.owner.check()?;
        check_bounds(offset, len, self.len)?;
        Ok(self.addr + offset as u64)
    }
}

impl Allocation for CudaAllocation {
    fn addr(&self) -> u64 {
        self.addr
    }

    fn len(&self) -> usize {
        self.len
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        let dst = self.part(offset, data.len())?;
        // SAFETY: a slice of that length.
        unsafe { self.cuda.copy_to_device(self.device, dst, data.as_ptr(), data.len()) }
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let src = self.part(offset, out.len())?;
        // SAFETY: a slice of that length.
        unsafe { self.cuda.copy_from_device(self.device, out.as_mut_ptr(), src, out.len()) }
    }
}

impl Drop for CudaAllocation {
    fn drop(&mut self) {
        // In a forked child CUDA does not work, and the memory is the parent's.
        if !self.owner.is_caller() {
            return;
        }
        // SAFETY: allocated by `new`; only mappings may still show it.
        if let Err(error) = unsafe { self.cuda.free(self.addr) } {
            tracing::warn!(%error, "GPU memory at {:#x} not freed", self.addr);
        }
    }
}
