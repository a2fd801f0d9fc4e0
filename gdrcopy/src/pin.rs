//! Pinned GPU memory, and GPU memory of the library's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::Allocation;
use crate::error::{Error, Result, check_bounds};
use crate::fork::Owner;
use crate::mapping::{Mapping, Opened, PinnedMemory};
use crate::types::{MappingType, PinFlags};

/// Pinned GPU memory. Unpinned when this value and its mapping are dropped.
///
/// GPU memory may be freed while it is pinned. On every backend that [`Gdr::open`](crate::Gdr::open) chooses, the physical memory
/// stays until unpin and a mapping continues to show the old bytes, with two exceptions: `cuMemAlloc` memory of less than 2 MiB
/// lies in a block that several allocations share, memory of a pool in its chunks, and CUDA may give its place to a new allocation of
/// this process. The same happens with GDRCopy. It never happens to a [`GpuBuffer`], to larger or to `cuMemCreate` memory.
#[derive(Debug)]
pub struct Pin(Arc<PinnedMemory>);

/// What a pin covers; see `gdr_info_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinInfo {
    /// First pinned address: the requested one, rounded down to the backend's pages.
    pub va: u64,
    /// Bytes pinned from `va` on.
    pub mapped_size: usize,
    /// Granularity of pins, bytes.
    pub page_size: u32,
    /// Whether a mapping exists now.
    pub mapped: bool,
}

impl Pin {
    /// Pins `len` bytes at `addr` on an opened backend.
    pub(crate) fn new(opened: &Arc<Opened>, addr: u64, len: usize, flags: PinFlags) -> Result<Self> {
        opened.owner.check()?;
        if !PinFlags::all().contains(flags) {
            return Err(Error::invalid("pin flags", flags.bits(), "a combination of PinFlags"));
        }
        if addr == 0 {
            return Err(Error::invalid("GPU address", 0, "an address that CUDA handed out"));
        }
        if len == 0 || addr.checked_add(len as u64).is_none() || isize::try_from(len).is_err() {
            return Err(Error::invalid("length", len, "one byte to the rest of the allocation"));
        }
        let pinned = opened.backend.pin(addr, len, flags)?;
        let (mapped, owner, opened) = (AtomicBool::new(false), Owner::this_process(), opened.clone());
        Ok(Self(Arc::new(PinnedMemory { pinned, addr, len, mapped, owner, opened })))
    }

    /// The requested GPU address.
    pub fn addr(&self) -> u64 {
        self.0.addr
    }

    /// The requested length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "a pin is never empty")]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// What is pinned, in whole pages.
    pub fn info(&self) -> PinInfo {
        let pinned = &self.0.pinned;
        PinInfo {
            va: pinned.va(),
            mapped_size: pinned.pinned_len(),
            page_size: pinned.page_size(),
            mapped: self.0.mapped.load(Ordering::Relaxed),
        }
    }

    /// Whether the driver took the memory away because it was freed. Always false on backends that keep it.
    ///
    /// # Errors
    /// [`Error::OtherProcess`]; [`Error::Sys`] of the kernel module.
    pub fn invalidated(&self) -> Result<bool> {
        self.0.owner.check()?;
        self.0.pinned.invalidated()
    }

    /// Maps the memory, from the requested byte on. A pin with [`PinFlags::WHOLE_PAGES`] may reach beyond the GPU memory; its
    /// mapping ends with the memory, see [`Mapping::len`].
    ///
    /// # Errors
    /// [`Error::AlreadyMapped`] while another mapping of this pin lives; [`Error::Invalidated`] if the memory was freed since it was
    /// pinned, on backends that compare a new mapping with what CUDA shows (`dmabuf`, `rm`); [`Error::Exhausted`] for BAR1 space;
    /// [`Error::OtherProcess`]; [`Error::ProofFailed`], [`Error::Cuda`], [`Error::Rm`] and [`Error::Sys`] of the drivers.
    pub fn map(&self) -> Result<Mapping> {
        self.map_as(None)
    }

    /// Maps with a caching type, if the platform has it.
    ///
    /// # Errors
    /// As [`Pin::map`]; [`Error::Unsupported`] if the platform lacks the type.
    pub fn map_as(&self, request: impl Into<Option<MappingType>>) -> Result<Mapping> {
        // The backend has rounded the start down, by less than the address space.
        let skip = usize::try_from(self.0.addr - self.0.pinned.va()).expect("a page fits the address space");
        let (va, backed) = (self.0.pinned.va(), self.0.pinned.backed_len());
        match backed.checked_sub(skip) {
            Some(there @ 1..) => self.map_range(skip, self.0.len.min(there), request.into()),
            _ => {
                let (addr, len) = (self.0.addr, self.0.len);
                Err(Error::BeyondAllocation { addr, len, base: va, size: backed })
            }
        }
    }

    /// Maps from [`PinInfo::va`] on, as `gdr_map` does. Where the pin reaches beyond the GPU memory, the mapping has a hole.
    ///
    /// # Errors
    /// As [`Pin::map_as`]; [`Error::InvalidArgument`] for a length of 0 or beyond [`PinInfo::mapped_size`].
    pub fn map_pages(&self, len: usize, request: Option<MappingType>) -> Result<Mapping> {
        if len == 0 || len > self.0.pinned.pinned_len() {
            return Err(Error::invalid("mapping length", len, "one byte to what is pinned"));
        }
        self.map_range(0, len, request)
    }

    fn map_range(&self, skip: usize, len: usize, request: Option<MappingType>) -> Result<Mapping> {
        let range = self.0.map(skip + len, request)?;
        Ok(Mapping::new(range, skip, len, self.0.pinned.va() + skip as u64, self.0.clone()))
    }

    /// Unpins, and returns the error that a drop can only log. If a mapping lives, it keeps the memory pinned.
    ///
    /// # Errors
    /// [`Error::OtherProcess`]; [`Error::Rm`] and [`Error::Sys`] of the drivers.
    pub fn unpin(self) -> Result<()> {
        Arc::try_unwrap(self.0).map_or(Ok(()), |held| held.pinned.unpin())
    }
}

/// GPU memory that the library allocated; freed when dropped. Pins and mappings of it may live longer and then show the old bytes.
///
/// CUDA may wait for all work of the GPU before it frees memory: do not drop this while a stream waits for something that the
/// dropping thread has yet to do.
#[derive(Debug)]
pub struct GpuBuffer {
    // The first field: freed before the backend closes.
    allocation: Box<dyn Allocation>,
    /// Requested bytes; the allocation may be larger.
    len: usize,
    opened: Arc<Opened>,
}

impl GpuBuffer {
    pub(crate) fn new(allocation: Box<dyn Allocation>, len: usize, opened: Arc<Opened>) -> Self {
        Self { allocation, len, opened }
    }

    /// The GPU address (`CUdeviceptr`).
    pub fn addr(&self) -> u64 {
        self.allocation.addr()
    }

    /// The length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Pins all of it.
    ///
    /// # Errors
    /// As [`Gdr::pin`](crate::Gdr::pin).
    pub fn pin(&self) -> Result<Pin> {
        Pin::new(&self.opened, self.addr(), self.len(), PinFlags::empty())
    }

    /// Pins and maps all of it.
    ///
    /// # Errors
    /// As [`Gdr::pin`](crate::Gdr::pin) and [`Pin::map`].
    pub fn map(&self) -> Result<Mapping> {
        self.pin()?.map()
    }

    /// Writes by CUDA's copy engine, and returns when the bytes are in place.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Cuda`], and for up to 256 KiB
    /// [`Error::Timeout`] if the application's waiting streams occupy the whole GPU. The bytes
    /// may then still arrive at any later time. A longer copy waits without a limit.
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> Result<()> {
        check_bounds(offset, data.len(), self.len)?;
        self.allocation.write(offset, data)
    }

    /// Reads by CUDA's copy engine.
    ///
    /// # Errors
    /// As [`GpuBuffer::copy_in`].
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        check_bounds(offset, out.len(), self.len)?;
        self.allocation.read(offset, out)
    }
}
