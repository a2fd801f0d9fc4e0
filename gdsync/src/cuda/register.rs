//! Host memory that CUDA knows, so that GPUs can reach it.

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;

use super::reaper::Doomed;
use super::{Gpu, Pages};
use crate::error::{Error, Result};

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: for all contexts of the process, by address.
const PORTABLE_MAPPED: u32 = 3;
const PAGE: usize = 4096;

/// Host memory registered with CUDA. When this is dropped, it is given back in time: see [`super::reaper`].
pub(crate) struct Registered {
    /// The GPU's address of the first byte that was asked for.
    addr: u64,
    /// The pages that were registered here; `None` where the application had done it.
    ours: Option<(Gpu, Range<usize>)>,
}

impl Registered {
    /// Takes over what was registered before.
    pub(crate) fn again(gpu: &Gpu, pages: Pages) -> Self {
        let first = pages.ptr.as_ptr().expose_provenance();
        Self { addr: pages.addr, ours: Some((gpu.clone(), first..first + pages.len)) }
    }

    /// The bytes, mapped by the caller and used no more, go to another user, so that CUDA need not be asked, or back to the
    /// system. Returns false where they are the caller's to unmap.
    pub(crate) fn keep(mut self, ptr: NonNull<u8>, len: usize) -> bool {
        let Some((gpu, pages)) = self.ours.take() else { return false };
        if gpu.kept().put_host(Pages { ptr, len, addr: self.addr }).is_err() {
            gpu.doom(Doomed::Host { first: pages.start, len, unmap: true });
        }
        true
    }

    /// What the application has registered or pinned itself.
    pub(crate) fn of_application(addr: u64) -> Self {
        Self { addr, ours: None }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({:#x})", self.addr)
    }
}

impl Gpu {
    /// Makes host memory known to CUDA. Pages that the application has pinned or registered are taken as they are.
    pub(crate) fn register(&self, ptr: NonNull<u8>, len: usize) -> Result<Registered> {
        let api = self.api();
        let before = ptr.as_ptr().addr() % PAGE;
        let first = ptr.as_ptr().map_addr(|addr| addr - before);
        let len = (before + len).next_multiple_of(PAGE);
        let pages = first.expose_provenance()..first.addr() + len;
        self.settle(&pages)?;
        let _current = self.enter()?;
        if let Ok(addr) = self.device_pointer(ptr.as_ptr()) {
            return Ok(Registered::of_application(addr));
        }
        tracing::trace!(?first, len, "host memory is registered with CUDA");
        // SAFETY: pages of the process, which its owner keeps until the registration is gone.
        let known = unsafe { api.mem_host_register(first.cast(), len, PORTABLE_MAPPED) };
        let ours = match known {
            // Another part of the same pages was registered meanwhile.
            Err(gdrcopy::Error::Cuda { status: CudaStatus::HOST_MEMORY_ALREADY_REGISTERED, .. }) => None,
            done => {
                done.map_err(Error::cuda("registering host memory with CUDA"))?;
                Some((self.clone(), pages))
            }
        };
        let addr = self.device_pointer(ptr.as_ptr()).map_err(Error::cuda("finding registered memory"))?;
        Ok(Registered { addr, ours })
    }

    /// The address of registered memory for this GPU, whose context must be current.
    fn device_pointer(&self, ptr: *mut u8) -> gdrcopy::Result<u64> {
        let mut addr = 0;
        // SAFETY: a place for the answer; the driver checks the address.
        unsafe { self.api().mem_host_get_device_pointer(&mut addr, ptr.cast(), 0) }?;
        Ok(addr)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some((gpu, pages)) = self.ours.take() {
            gpu.doom(Doomed::Host { first: pages.start, len: pages.len(), unmap: false });
        }
    }
}

/// Gives a registration back. A context must be current.
pub(super) fn unregister(api: &Api, first: usize) -> Result<()> {
    let first = std::ptr::with_exposed_provenance_mut::<c_void>(first);
    // SAFETY: callers own the registration, and give it back once.
    unsafe { api.mem_host_unregister(first) }.map_err(Error::cuda("giving back host memory"))
}
