//! What the tools need of CUDA and `gdrcopy` does not offer: baselines, kernels, memory of other kinds.

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, result, sys};

use super::tools_shared::{Failure, Result};

/// Whether there is a CUDA driver. Calls into one that is not there end the process.
pub(super) fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading the driver's library runs its initialisers, which any use of CUDA does.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The version of CUDA that the driver offers, such as `13.0`.
pub(super) fn version() -> Option<String> {
    if !present() {
        return None;
    }
    let mut version = 0;
    // SAFETY: `version` is valid for writing.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    status.result().ok()?;
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The primary context of a GPU, current in this thread.
pub(super) fn context(gpu: i32) -> Result<Arc<CudaContext>> {
    if !present() {
        return Err(Failure::failed("CUDA is needed for this, and libcuda.so.1 is not here"));
    }
    let ordinal = usize::try_from(gpu).map_err(|_| Failure::Usage(format!("there is no GPU {gpu}")))?;
    let context = CudaContext::new(ordinal).map_err(|e| Failure::failed(format_args!("GPU {gpu}: {e}")))?;
    context.bind_to_thread()?;
    Ok(context)
}

/// Pinned host memory that the GPU reaches at its address.
#[derive(Debug)]
pub(super) struct Pinned {
    ptr: *mut u8,
    len: usize,
    context: Arc<CudaContext>,
}

// SAFETY: plain memory owned by this value; CUDA frees it from any thread.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference gives out the address only.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed memory.
    pub(super) fn alloc(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        context.bind_to_thread()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current.
        let ptr = unsafe { result::malloc_host(len, flags) }?.cast::<u8>();
        // SAFETY: just allocated with this length.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Self { ptr, len, context: context.clone() })
    }

    /// Its address, for the CPU and for the GPU.
    pub(super) fn addr(&self) -> u64 {
        self.ptr.addr() as u64
    }

    /// The memory as words that the GPU may change at any time.
    pub(super) fn words(&self) -> &[AtomicU32] {
        // SAFETY: initialised, aligned to pages, alive as long as this value; and others may change atomics.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 4) }
    }

    /// The bytes; the GPU must not write them meanwhile.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: initialised, and borrowed from this value alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `alloc`, used by nobody any more. Nothing can be done about a failure.
            let _ = unsafe { result::free_host(self.ptr.cast::<c_void>()) };
        }
    }
}

/// `cuMemcpy`, complete on return.
pub(super) fn memcpy(dst: u64, src: u64, len: usize) -> Result<()> {
    // SAFETY: the callers pass buffers of their own, of at least this length; CUDA checks addresses of GPUs.
    Ok(unsafe { sys::cuMemcpy(dst, src, len) }.result()?)
}

/// Fills GPU memory with zeros, complete on return.
pub(super) fn clear(context: &CudaContext, addr: u64, len: usize) -> Result<()> {
    // SAFETY: the callers pass GPU buffers of their own, of at least this length.
    unsafe { result::memset_d8_sync(addr, 0, len) }?;
    Ok(context.synchronize()?)
}
