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

use crate::backend::{MappingType, inside};
use crate::copy::{self, Copier};
use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::pin::Held;

/// A range of GPU memory in the CPU's address space. Any thread may use it; who writes the same bytes from two sides
/// gets one or the other, as with any device memory. Unmapped when dropped; forked children have a hole there.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    addr: u64,
    kind: MappingType,
    copier: &'static Copier,
    range: ManuallyDrop<CpuRange>,
    held: Arc<Held>,
}

// SAFETY: the bytes are device memory, reached by volatile or streaming accesses from any thread; the range is
// unmapped once, by the drop.
unsafe impl Send for Mapping {}
// SAFETY: as above, no method hands out a reference to the bytes.
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

/// Words that are stored and loaded whole.
pub trait Word: Copy + sealed::Sealed {}

macro_rules! words {
    ($($word:ty)*) => { $(impl sealed::Sealed for $word {} impl Word for $word {})* };
}
words!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64);

impl Mapping {
    pub(crate) fn new(range: CpuRange, skip: usize, len: usize, addr: u64, held: Arc<Held>) -> Self {
        debug_assert!(skip + len <= range.len());
        // SAFETY: the backend mapped at least `skip + len` bytes.
        let ptr = unsafe { range.ptr().add(skip) };
        let (kind, copier, range) = (range.kind(), Copier::best(), ManuallyDrop::new(range));
        Self { ptr, len, addr, kind, copier, range, held }
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
        inside(offset, len, self.len)?;
        // SAFETY: inside the mapping.
        Ok(unsafe { self.ptr.as_ptr().add(offset) })
    }

    fn word<T: Word>(&self, offset: usize) -> Result<*mut T> {
        let ptr = self.at(offset, size_of::<T>())?.cast::<T>();
        if ptr.is_aligned() {
            Ok(ptr)
        } else {
            Err(Error::invalid("word address", ptr.addr(), "a multiple of the word's size"))
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
        // SAFETY: as in `write_unfenced`, the other way round.
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

    /// Returns when all earlier writes of this thread have arrived in GPU memory, visible to running kernels: a fence,
    /// a read that pushes the posted writes before it, and CUDA's flush where there is CUDA and the GPU needs one.
    ///
    /// For memory that was freed under the mapping CUDA has no flush any more: there the writes have arrived, no more.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn flush(&self) -> Result<()> {
        copy::full_fence();
        // SAFETY: the first byte of the mapping.
        unsafe { self.ptr.as_ptr().read_volatile() };
        copy::load_fence(self.kind);
        self.held.flush()
    }

    /// Unmaps, telling what went wrong where a drop can only log it.
    ///
    /// # Errors
    /// [`Error::Sys`].
    pub fn unmap(mut self) -> Result<()> {
        self.range.release()
    }

    /// Takes the memory away from who may still have a pointer to it, in the manner of `gdr_close`: the addresses
    /// stay taken until the process ends, and every access to them raises `SIGBUS`. It costs address space; neighbouring
    /// places are one mapping of the kernel.
    ///
    /// # Errors
    /// [`Error::Sys`].
    pub fn revoke(mut self) -> Result<()> {
        self.range.revoke()
    }

    /// CUDA and the GPU whose copy engine reaches all of it, as long as CUDA knows the memory.
    pub(crate) fn cuda(&self) -> Option<(&dyn Cuda, i32)> {
        self.held.cuda(self.addr, self.len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: taken once, here; nothing uses the range afterwards.
        drop(unsafe { ManuallyDrop::take(&mut self.range) });
        self.held.unmapped();
    }
}
