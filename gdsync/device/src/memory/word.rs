//! Words that devices and CPU share.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::Memory;
use crate::cuda::Gpu;
use crate::error::Result;

impl Memory {
    /// A handle to the 32-bit word at `offset`, for stream waits and writes.
    ///
    /// # Errors
    /// As [`Memory::atomic32`].
    pub fn word32(&self, offset: usize) -> Result<Word32> {
        self.atomic32(offset)?;
        Ok(Word32(self.slice(offset, 4)?))
    }

    /// A handle to the 64-bit word at `offset`, for stream waits and writes.
    ///
    /// # Errors
    /// As [`Memory::atomic64`].
    pub fn word64(&self, offset: usize) -> Result<Word64> {
        self.atomic64(offset)?;
        Ok(Word64(self.slice(offset, 8)?))
    }

    /// The aligned 64-bit words at `offset`, as atomics in native byte order.
    ///
    /// # Errors
    /// As [`Memory::atomic64`].
    #[inline]
    pub fn words64<const N: usize>(&self, offset: usize) -> Result<&[AtomicU64; N]> {
        let ptr = self.check_aligned::<[AtomicU64; N]>(offset)?;
        // SAFETY: in range, aligned, alive as long as `self`, and only touched atomically.
        Ok(unsafe { ptr.as_ref() })
    }

    /// As [`Memory::words64`], for host memory only and without an error.
    #[inline(always)]
    pub fn host_words64<const N: usize>(&self, offset: usize) -> Option<&[AtomicU64; N]> {
        let ptr = self.ptr.as_ptr().wrapping_add(offset).cast::<[AtomicU64; N]>();
        let fits = offset < self.len && self.len - offset >= size_of::<[AtomicU64; N]>();
        // SAFETY: in range, aligned, alive as long as `self`, and only touched atomically.
        (fits && self.is_host() && ptr.is_aligned()).then(|| unsafe { &*ptr })
    }
}

/// Caches the address of a memory on a GPU.
#[derive(Debug, Default)]
pub struct Found(OnceLock<(usize, Place)>);

/// The location of a memory for a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of the first byte on the GPU.
    pub addr: u64,
    /// It is memory of that GPU.
    pub is_near: bool,
}

impl Found {
    /// The location of `memory`, which must be the same in each call, for `gpu`.
    ///
    /// # Errors
    /// As [`Memory::gpu_addr`].
    #[inline]
    pub fn place(&self, memory: &Memory, gpu: &Gpu) -> Result<Place> {
        match self.0.get() {
            Some(&(context, place)) if context == gpu.raw_context() => Ok(place),
            _ => self.find(memory, gpu),
        }
    }

    /// Whether a location is cached.
    #[inline]
    pub fn is_known(&self) -> bool {
        self.0.get().is_some()
    }

    #[cold]
    fn find(&self, memory: &Memory, gpu: &Gpu) -> Result<Place> {
        let place = memory.place(gpu)?;
        // For the first GPU. The location is valid as long as the memory lives.
        self.0.get_or_init(|| (gpu.raw_context(), place));
        Ok(place)
    }
}

impl Memory {
    /// Its location for `gpu`.
    ///
    /// # Errors
    /// As [`Memory::gpu_addr`].
    #[inline]
    pub fn place(&self, gpu: &Gpu) -> Result<Place> {
        let is_near = self.gpu().is_some_and(|owner| owner.ordinal() == gpu.ordinal());
        Ok(Place { addr: self.gpu_addr(gpu)?, is_near })
    }
}

macro_rules! words {
    ($($word:ident, $atomic:ident, $value:ty, $bits:literal;)*) => {$(
        #[doc = concat!("A ", $bits, "-bit word in device-visible memory, native byte order, kept alive by this handle.")]
        #[derive(Clone, Debug)]
        pub struct $word(Memory);

        impl $word {
            /// The word as an atomic.
            #[inline]
            pub fn atomic(&self) -> &$atomic {
                // SAFETY: the only constructor, in `Memory`, checked range and alignment.
                unsafe { self.0.ptr.cast::<$atomic>().as_ref() }
            }

            /// Reads the word; what its writer wrote before it is visible afterwards.
            pub fn load(&self) -> $value {
                self.atomic().load(Ordering::Acquire)
            }

            /// Writes the word after everything this thread wrote before.
            pub fn store(&self, value: $value) {
                self.atomic().store(value, Ordering::Release);
                self.0.fence();
            }

            /// Its address in work requests: see [`Memory::addr`].
            pub fn addr(&self) -> u64 {
                self.0.addr()
            }

            /// The memory of the word.
            pub fn memory(&self) -> &Memory {
                &self.0
            }
        }
    )*};
}

words! {
    Word32, AtomicU32, u32, "32";
    Word64, AtomicU64, u64, "64";
}
