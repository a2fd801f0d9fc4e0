//! Pinned GPU memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::{MappingType, Pinned};
use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::gdr::Gdr;
use crate::mapping::Mapping;

/// GPU memory held for mapping. Unpinned when this value and its mapping are gone.
///
/// Freeing the GPU memory under a pin is allowed. On every backend that [`Gdr::open`] chooses, the physical memory
/// stays until unpin, and a mapping goes on showing it: the old bytes, unless CUDA gives the place to a new allocation of
/// this process. That can happen to `cuMemAlloc` memory of less than 2 MiB, whose blocks several allocations share, also
/// with GDRCopy; never to a [`GpuBuffer`](crate::GpuBuffer), to larger or to `cuMemCreate` memory.
#[derive(Debug)]
pub struct Pin(Arc<Held>);

/// What a pin and its mapping share.
#[derive(Debug)]
pub(crate) struct Held {
    // Declared first: unpinned before the backend closes.
    pinned: Box<dyn Pinned>,
    addr: u64,
    len: usize,
    mapped: AtomicBool,
    owner: Owner,
    gdr: Gdr,
}

/// What is pinned; see `gdr_info_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinInfo {
    /// First address that is pinned: the one asked for, rounded down to the backend's pages.
    pub va: u64,
    /// Bytes pinned from `va` on.
    pub mapped_size: usize,
    /// Granularity of pins, bytes.
    pub page_size: u32,
    /// Whether a mapping exists now.
    pub mapped: bool,
}

impl Held {
    /// Maps from `va` on; the caller gives the mapping back with [`Held::unmapped`].
    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.owner.check()?;
        if self.mapped.swap(true, Ordering::Acquire) {
            return Err(Error::AlreadyMapped);
        }
        self.pinned.map(len, request).inspect_err(|_| self.unmapped())
    }

    pub(crate) fn unmapped(&self) {
        self.mapped.store(false, Ordering::Release);
    }

    /// CUDA and the device of these addresses, if they are all in the allocation that is pinned and as long as CUDA
    /// still means it by them: it may have been freed, and the addresses given to another one.
    pub(crate) fn cuda(&self, addr: u64, len: usize) -> Option<(&dyn Cuda, i32)> {
        let part = self.pinned.located().filter(|part| part.holds(addr, len))?;
        let cuda = &**self.gdr.cuda()?;
        part.is_live(cuda).is_ok_and(|live| live).then_some((cuda, part.memory.device))
    }

    /// CUDA's flush of what came over PCIe, where there is CUDA. Freed memory has no context left to flush in.
    pub(crate) fn flush(&self) -> Result<()> {
        let (Some(part), Some(cuda)) = (self.pinned.located(), self.gdr.cuda()) else { return Ok(()) };
        match cuda.flush(part.memory.device, part.start()) {
            Err(Error::NotMappable { .. }) => Ok(()),
            flushed => flushed,
        }
    }
}

impl Pin {
    pub(crate) fn new(pinned: Box<dyn Pinned>, addr: u64, len: usize, gdr: Gdr) -> Self {
        let (mapped, owner) = (AtomicBool::new(false), Owner::this_process());
        Self(Arc::new(Held { pinned, addr, len, mapped, owner, gdr }))
    }

    /// The GPU address asked for.
    pub fn addr(&self) -> u64 {
        self.0.addr
    }

    /// The length asked for, bytes.
    #[expect(clippy::len_without_is_empty, reason = "a pin is never empty")]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// What is pinned in fact.
    pub fn info(&self) -> PinInfo {
        let pinned = &self.0.pinned;
        PinInfo {
            va: pinned.va(),
            mapped_size: pinned.pinned_len(),
            page_size: pinned.page_size(),
            mapped: self.0.mapped.load(Ordering::Relaxed),
        }
    }

    /// Whether the GPU memory was taken away by its being freed. Never so on backends that hold it.
    ///
    /// # Errors
    /// What the backend says.
    pub fn invalidated(&self) -> Result<bool> {
        self.0.owner.check()?;
        self.0.pinned.invalidated()
    }

    /// Maps the memory; the mapping begins at the byte that was asked for. It ends early where a pin of
    /// [`PinFlags::WHOLE_PAGES`](crate::PinFlags::WHOLE_PAGES) goes on behind the end of the GPU memory: see
    /// [`Mapping::len`].
    ///
    /// # Errors
    /// [`Error::AlreadyMapped`] while another mapping of this pin lives, or what the backend lacks.
    /// [`Error::Invalidated`] if the memory was freed since it was pinned, on backends that compare a new mapping with
    /// what CUDA shows (`dmabuf`, `rm`); a mapping that exists does not mind.
    pub fn map(&self) -> Result<Mapping> {
        self.map_as(None)
    }

    /// Maps with a caching type of your choice, where the platform has it.
    ///
    /// # Errors
    /// As [`Pin::map`]; [`Error::Unsupported`] where the platform lacks the type.
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

    /// Maps from [`PinInfo::va`] on, in the manner of `gdr_map`: up to its end, be there memory or a hole.
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

    /// Unpins, telling what went wrong where a drop can only log it. While a mapping lives the pin stays with it.
    ///
    /// # Errors
    /// What the backend says.
    pub fn unpin(self) -> Result<()> {
        Arc::try_unwrap(self.0).map_or(Ok(()), |held| held.pinned.unpin())
    }
}
