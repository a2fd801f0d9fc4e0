//! Registering through the cache.

use std::ops::Range;

use gdsync::cuda::Gpu;
use gdsync::verbs::Access;

use super::{Cache, Cached};
use crate::communicator::Communicator;
use crate::error::Result;

impl Communicator {
    /// Registers `len` bytes of host memory for messages, or finds them registered: see [the cache](crate::cache).
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device): for no bytes, a null pointer or a range that wraps, and when the device
    /// refuses the registration though the cache has given up all that is idle.
    ///
    /// # Safety
    /// The range must stay mapped, readable and writable until the result, its clones and all messages on it are gone, and
    /// until [`Cache::invalidate`] was called for it. While messages on it are under way no Rust reference to it may be used,
    /// except to read what is only sent. Once a GPU has used it, [`Memory::from_raw`](gdsync::memory::Memory::from_raw) says
    /// what else must be waited for.
    #[inline]
    pub unsafe fn register_cached(&self, ptr: *mut u8, len: usize) -> Result<Cached> {
        // SAFETY: what the caller promises.
        unsafe { self.cached(None, ptr.expose_provenance() as u64, len) }
    }

    /// Registers `len` bytes at an address of GPU memory for messages, or finds them registered: see
    /// [the cache](crate::cache). The memory may be of every kind that [`Gpu::wrap`] takes.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device): for no bytes, for what [`Gpu::wrap`] refuses, and when the device refuses the
    /// registration though the cache has given up all that is idle.
    ///
    /// # Safety
    /// The memory must stay allocated until the result, its clones and all messages on it are gone, and where
    /// [`CacheConfig::announced`](crate::cache::CacheConfig::announced) says so until [`Cache::invalidate`] was called for it.
    #[inline]
    pub unsafe fn register_cached_gpu(&self, gpu: &Gpu, addr: u64, len: usize) -> Result<Cached> {
        // SAFETY: what the caller promises.
        unsafe { self.cached(Some(gpu), addr, len) }
    }

    /// The registration cache.
    pub fn cache(&self) -> &Cache {
        &self.0.cache
    }

    /// # Safety
    /// As the two functions above.
    #[inline]
    unsafe fn cached(&self, gpu: Option<&Gpu>, addr: u64, len: usize) -> Result<Cached> {
        let range = range(addr, len)?;
        // Peers get no rights: the registration outlives its handle.
        let register = |memory: &_| self.0.register(memory, Access::LOCAL_WRITE);
        // SAFETY: what the caller promises.
        Ok(unsafe { self.0.cache.get(gpu, &range, register) }?)
    }
}

fn range(addr: u64, len: usize) -> gdsync::Result<Range<u64>> {
    let end = addr.checked_add(len as u64).filter(|_| addr != 0 && len != 0);
    end.map(|end| addr..end).ok_or_else(|| gdsync::Error::InvalidArgument {
        what: "memory range",
        value: format!("{len} bytes at {addr:#x}"),
        expected: "a non-null address and at least one byte, inside the address space",
    })
}
