//! The CUDA driver, as far as mappings need it: found at run time, behind a trait so that it can be replaced.

mod driver;
mod objects;
pub mod raw;
mod relocation;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use crate::error::CudaStatus;
pub use driver::{EntryPoints, sysfs_address};
pub use objects::{Objects, Piece};

pub(crate) use driver::Installed;

use crate::error::{Error, Result};

/// A GPU that CUDA shows to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// CUDA device ordinal in this process.
    pub ordinal: i32,
    /// PCI address, `domain:bus:device.function` in lower-case hexadecimal, as in `/sys/bus/pci/devices`.
    pub pci: String,
    /// Product name.
    pub name: String,
}

/// The kind of memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// `cuMemAlloc`, `cudaMalloc`.
    Malloc,
    /// `cuMemCreate` and `cuMemMap`.
    Vmm,
    /// Stream-ordered pool, `cuMemAllocAsync`.
    Pool,
    /// Managed (unified) memory.
    Managed,
    /// Host memory known to CUDA.
    Host,
    /// Unknown to CUDA, or freed.
    Unknown,
}

/// CUDA's information about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// CUDA device ordinal of the memory.
    pub device: i32,
    /// First address of the allocation (of the one `cuMemMap` mapping for VMM memory).
    pub base: u64,
    /// Its size, bytes.
    pub size: usize,
    /// A number that CUDA gives to no other allocation of this process.
    pub buffer_id: u64,
}

/// How [`Cuda::alloc`] allocates memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AllocKind {
    /// `cuMemAlloc`.
    #[default]
    Malloc,
    /// `cuMemCreate`, exportable and usable for GPUDirect RDMA.
    Vmm,
}

/// The CUDA driver. Device numbers are CUDA ordinals. Calls leave the caller's current context unchanged and are not captured during a
/// stream capture. Except for [`Cuda::free`], they never wait for the caller's streams.
pub trait Cuda: Send + Sync + fmt::Debug {
    /// `cuDriverGetVersion`: 1000 * major + 10 * minor.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn driver_version(&self) -> Result<u32>;

    /// The GPUs of this process.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn devices(&self) -> Result<Vec<GpuInfo>>;

    /// `cuDeviceGetAttribute`; numbers as in `cuda.h`.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn device_attribute(&self, device: i32, attribute: u32) -> Result<i32>;

    /// The allocation at an address; [`MemoryKind::Unknown`] and no error if CUDA does not know the address.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn pointer(&self, addr: u64) -> Result<PointerInfo>;

    /// [`PointerInfo::buffer_id`] alone, which is faster: another number after the memory was freed and allocated again, 0 if there is
    /// no allocation.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn buffer_id(&self, addr: u64) -> Result<u64>;

    /// `cuMemGetHandleForAddressRange` for a dma-buf of whole host pages; `pcie` forces BAR1. `memory` is an address in the
    /// allocation, since the pages may begin before it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn dma_buf(&self, memory: u64, addr: u64, len: usize, pcie: bool) -> Result<OwnedFd>;

    /// The objects of the resource manager that a range of whole host pages consists of, neither more nor fewer bytes; for memory that
    /// could be exported by [`dma_buf`](Self::dma_buf).
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::Unsupported`] if the driver does not show the objects.
    fn objects(&self, memory: u64, addr: u64, len: usize) -> Result<Objects>;

    /// Allocates GPU memory with `SYNC_MEMOPS` set; aligned to 64 KiB.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Exhausted`].
    fn alloc(&self, device: i32, len: usize, kind: AllocKind) -> Result<u64>;

    /// Frees memory of [`Cuda::alloc`]. CUDA may wait for all work of the GPU first: do not call this while a stream waits for
    /// something that the calling thread has yet to do.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// `addr` must come from [`Cuda::alloc`] of this object; nothing but mappings may use the memory any more.
    unsafe fn free(&self, addr: u64) -> Result<()>;

    /// Copies host memory to GPU memory, and returns when the bytes are in place for the GPU and through BAR1.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    unsafe fn copy_to_device(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()>;

    /// Copies GPU memory to host memory.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// `dst` must be writable for `len` bytes.
    unsafe fn copy_from_device(&self, device: i32, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees it.
        unsafe { self.gather_from_device(device, dst, &[src], len) }
    }

    /// Copies pieces of `len` bytes of one allocation to adjacent host memory, and waits once.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// `dst` must be writable for `len` bytes of each piece.
    unsafe fn gather_from_device(&self, device: i32, dst: *mut u8, src: &[u64], len: usize) -> Result<()>;

    /// `cuFlushGPUDirectRDMAWrites` to the owner's scope, in the context of the memory at this address: afterwards the GPU's running
    /// kernels see what reached it over PCIe before. Does nothing if the GPU needs no flush.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::NotMappable`] if a flush is needed and CUDA knows no memory there.
    fn flush(&self, device: i32, memory: u64) -> Result<()>;
}

/// Where the CUDA driver comes from. It is initialised as late as possible.
pub trait CudaSource: Send + Sync + fmt::Debug {
    /// `cuDriverGetVersion`, which works before `cuInit`: it needs the library, touches no GPU, and children that are forked
    /// afterwards may use CUDA.
    ///
    /// # Errors
    /// [`Error::Sys`] where there is no `libcuda`, [`Error::Cuda`].
    fn version(&self) -> Result<u32>;

    /// `cuInit`. Children that are forked afterwards cannot use CUDA.
    ///
    /// # Errors
    /// As [`version`](Self::version).
    fn initialise(&self) -> Result<Arc<dyn Cuda>>;
}

/// A driver that is initialised already, or none.
impl CudaSource for Option<Arc<dyn Cuda>> {
    fn version(&self) -> Result<u32> {
        self.initialise()?.driver_version()
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        self.clone().ok_or_else(|| Error::Unsupported {
            what: "CUDA".into(),
            by: "this system, which was built without it",
            fix: "give the System a CUDA driver",
        })
    }
}

/// The error for an address that CUDA does not know.
pub(crate) fn unknown(addr: u64) -> Error {
    let found = "no CUDA memory of this process";
    let fix = "pass the address of a live allocation; memory of other processes must be opened here first";
    Error::NotMappable { addr, found, fix }
}
