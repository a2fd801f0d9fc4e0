//! A CPU mapping of GPU memory, and the copies on it.
//!
//! # Ordering
//!
//! A mapping of BAR1 is write-combined: stores leave the core late, in any order, and in pieces of at most 64 bytes.
//! [`Mapping::write`] and [`Mapping::store`] end with a store fence: they are ordered before every later store of
//! this thread, to any memory. They do not wait for arrival, which no store can.
//!
//! CUDA work that is *submitted* afterwards sees the bytes. A kernel that is *already running* may see them late, and
//! a large write in any order. To hand it data and then a flag:
//!
//! 1. [`Mapping::write`] the data,
//! 2. [`Mapping::flush`],
//! 3. [`Mapping::store`] the flag,
//!
//! and the kernel reads the flag with an acquire load of system scope before the data. Without the flush the flag may
//! overtake the data. A naturally aligned word of up to 8 bytes is never torn; anything longer may be.
//!
//! In the other direction: the kernel writes data, `__threadfence_system()`, writes the flag; the CPU polls the flag
//! with [`Mapping::load`], then [`Mapping::read`]s. Loads are not cached and not speculated across the load fence
//! that both end with.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::{Backend, Pinned};
use crate::copy::{self, Copier};
use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::error::{Error, Result, check_bounds};
use crate::fork::Owner;
use crate::system::System;
use crate::types::{BackendKind, MappingType};

/// An opened backend and the system that it runs on.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) system: System,
    pub(crate) owner: Owner,
}

impl Opened {
    /// The CUDA driver that knows the memory. The host backend has none.
    pub(crate) fn cuda(&self) -> Option<&Arc<dyn Cuda>> {
        if self.backend.kind() == BackendKind::Host { None } else { self.system.cuda().ok() }
    }
}

/// Pinned memory, shared by the pin and its mapping.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    // The first field: unpinned before the backend closes.
    pub(crate) pinned: Box<dyn Pinned>,
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) mapped: AtomicBool,
    pub(crate) owner: Owner,
    pub(crate) opened: Arc<Opened>,
}

impl PinnedMemory {
    /// Maps from `va` on; the caller calls [`PinnedMemory::unmapped`] afterwards.
    pub(crate) fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.owner.check()?;
        if self.mapped.swap(true, Ordering::Acquire) {
            return Err(Error::AlreadyMapped);
        }
        self.pinned.map(len, request).inspect_err(|_| self.unmapped())
    }

    pub(crate) fn unmapped(&self) {
        self.mapped.store(false, Ordering::Release);
    }

    /// CUDA and the device of these addresses, if they lie in the pinned allocation and it is live: CUDA may have freed it and
    /// given its addresses to another one.
    pub(crate) fn cuda(&self, addr: u64, len: usize) -> Option<(&dyn Cuda, i32)> {
        let part = self.pinned.located().filter(|part| part.holds(addr, len))?;
        let cuda = &**self.opened.cuda()?;
        part.is_live(cuda).is_ok_and(|live| live).then_some((cuda, part.memory.device))
    }

    /// CUDA's flush of writes over PCIe, if there is CUDA. Freed memory has no context to flush in.
    pub(crate) fn flush(&self) -> Result<()> {
        let (Some(part), Some(cuda)) = (self.pinned.located(), self.opened.cuda()) else { return Ok(()) };
        match cuda.flush(part.memory.device, part.start()) {
            Err(Error::NotMappable { .. }) => Ok(()),
            flushed => flushed,
        }
    }
}

/// A range of GPU memory in the CPU's address space. Any thread may use it; of two writers of the same bytes, either may win.
/// Unmapped when dropped; forked children have a hole there.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    addr: u64,
    kind: MappingType,
    copier: &'static Copier,
    range: ManuallyDrop<CpuRange>,
    memory: Arc<PinnedMemory>,
}

// SAFETY: the bytes are device memory, reached by volatile or streaming accesses from any thread; the range is
// unmapped once, by the drop.
unsafe impl Send for Mapping {}
// SAFETY: no method returns a reference to the bytes.
unsafe impl Sync for Mapping {}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Mapping({:p}, {} B of GPU memory at {:#x}, {:?})",
            self.ptr,
            self.len,
            self.addr(),
            self.kind
        )
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A word that is stored and loaded in one access.
pub trait Word: Copy + sealed::Sealed {}

macro_rules! words {
    ($($word:ty)*) => { $(impl sealed::Sealed for $word {} impl Word for $word {})* };
}
words!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64);

impl Mapping {
    pub(crate) fn new(
        range: CpuRange,
        skip: usize,
        len: usize,
        addr: u64,
        memory: Arc<PinnedMemory>,
    ) -> Self {
        debug_assert!(skip + len <= range.len());
        // SAFETY: the backend mapped at least `skip + len` bytes.
        let ptr = unsafe { range.ptr().add(skip) };
        let (kind, copier, range) = (range.kind(), Copier::best(), ManuallyDrop::new(range));
        Self { ptr, len, addr, kind, copier, range, memory }
    }

    /// The address of the first byte in this process. Device memory: use volatile or streaming accesses only, and
    /// mind [`Mapping::kind`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The GPU address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes mapped.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// How the CPU caches it.
    pub fn kind(&self) -> MappingType {
        self.kind
    }

    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Result<*mut u8> {
        check_bounds(offset, len, self.len)?;
        // SAFETY: inside the mapping.
        Ok(unsafe { self.ptr.as_ptr().add(offset) })
    }

    fn word<T: Word>(&self, offset: usize) -> Result<*mut T> {
        let ptr = self.at(offset, size_of::<T>())?.cast::<T>();
        if ptr.is_aligned() {
            Ok(ptr)
        } else {
            Err(Error::invalid("word address", format!("{:#x}", ptr.addr()), "a multiple of the word's size"))
        }
    }

    /// Writes bytes; ordered before every later store of this thread.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[inline]
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.write_unfenced(offset, data)?;
        copy::store_fence(self.kind);
        Ok(())
    }

    /// Writes bytes without a fence, for several writes that end in one [`Mapping::fence`].
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[inline]
    pub fn write_unfenced(&self, offset: usize, data: &[u8]) -> Result<()> {
        let dst = self.at(offset, data.len())?;
        // SAFETY: `dst` is checked for the length, and a slice cannot overlap device memory.
        unsafe { self.copier.to_device(self.kind, dst, data.as_ptr(), data.len()) };
        Ok(())
    }

    /// Orders all writes so far before every later store of this thread.
    #[inline]
    pub fn fence(&self) {
        copy::store_fence(self.kind);
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let src = self.at(offset, out.len())?;
        // SAFETY: `src` is checked for the length, and a slice cannot overlap device memory.
        unsafe { self.copier.from_device(self.kind, out.as_mut_ptr(), src, out.len()) };
        copy::load_fence(self.kind);
        Ok(())
    }

    /// Stores one aligned word whole, ordered before every later store of this thread.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::InvalidArgument`] for an unaligned word.
    #[inline]
    pub fn store<T: Word>(&self, offset: usize, value: T) -> Result<()> {
        let ptr = self.word::<T>(offset)?;
        // SAFETY: in range and aligned.
        unsafe { ptr.write_volatile(value) };
        copy::store_fence(self.kind);
        Ok(())
    }

    /// Loads one aligned word whole, before every later load of this thread.
    ///
    /// # Errors
    /// As [`Mapping::store`].
    #[inline]
    pub fn load<T: Word>(&self, offset: usize) -> Result<T> {
        let ptr = self.word::<T>(offset)?;
        // SAFETY: in range and aligned; every bit pattern is a value of a `Word`.
        let value = unsafe { ptr.read_volatile() };
        copy::load_fence(self.kind);
        Ok(value)
    }

    /// Returns when all earlier writes of this thread have arrived in GPU memory and running kernels see them: a fence, a read
    /// that pushes the posted writes before it, and CUDA's flush if the GPU needs one.
    ///
    /// CUDA has no flush for memory that was freed under the mapping: the writes have arrived, but kernels may not see them.
    ///
    /// # Errors
    /// [`Error::Cuda`] of the flush.
    pub fn flush(&self) -> Result<()> {
        copy::full_fence();
        // SAFETY: the first byte of the mapping.
        unsafe { self.ptr.as_ptr().read_volatile() };
        copy::load_fence(self.kind);
        self.memory.flush()
    }

    /// Unmaps, and returns the error that a drop can only log.
    ///
    /// # Errors
    /// [`Error::Sys`].
    pub fn unmap(mut self) -> Result<()> {
        self.range.release()
    }

    /// Unmaps as `gdr_close` does, for callers that may still have pointers into the mapping: the addresses stay reserved until
    /// the process ends, and every access to them raises `SIGBUS`. This costs address space; neighbouring ranges are one mapping
    /// of the kernel.
    ///
    /// # Errors
    /// [`Error::Sys`].
    pub fn revoke(mut self) -> Result<()> {
        self.range.revoke()
    }

    /// CUDA and the GPU whose copy engine reaches all of the mapping; none after the memory was freed.
    pub(crate) fn cuda(&self) -> Option<(&dyn Cuda, i32)> {
        self.memory.cuda(self.addr, self.len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: taken once, here; nothing uses the range afterwards.
        drop(unsafe { ManuallyDrop::take(&mut self.range) });
        self.memory.unmapped();
    }
}
