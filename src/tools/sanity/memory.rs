//! Memory that `gdrcopy` does not hand out, and a look at any address.

use std::io::{self, PipeReader};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::case::Outcome;

/// An allocation of CUDA with an address of its own choice.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) addr: u64,
    context: Arc<CudaContext>,
}

impl Raw {
    /// `cuMemAlloc`, at any multiple of 512 bytes.
    pub(super) fn device(context: &Arc<CudaContext>, len: usize) -> Outcome<Self> {
        context.bind_to_thread()?;
        // SAFETY: a context is current.
        let addr = unsafe { result::malloc_sync(len) }?;
        Ok(Self { addr, context: context.clone() })
    }

    /// `cuMemAllocManaged`.
    pub(super) fn managed(context: &Arc<CudaContext>, len: usize) -> Outcome<Self> {
        context.bind_to_thread()?;
        let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
        // SAFETY: a context is current.
        let addr = unsafe { result::malloc_managed(len, flags) }?;
        Ok(Self { addr, context: context.clone() })
    }

    /// Reads by CUDA.
    pub(super) fn read(&self, out: &mut [u8]) -> Outcome {
        self.context.bind_to_thread()?;
        // SAFETY: the cases read no more than they allocated.
        Ok(unsafe { result::memcpy_dtoh_sync(out, self.addr) }?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by this type and freed once. A failure would show in the leak checks.
            let _ = unsafe { result::free_sync(self.addr) };
        }
    }
}

/// Asks the kernel to read a byte at an address of this process, where a load might kill the process.
pub(super) fn readable(addr: usize) -> Outcome<bool> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: the kernel checks the address and says so.
    let written = unsafe { libc::write(writer.as_raw_fd(), std::ptr::without_provenance(addr), 1) };
    let error = io::Error::last_os_error();
    drop::<PipeReader>(reader);
    match written {
        1 => Ok(true),
        _ if error.raw_os_error() == Some(libc::EFAULT) => Ok(false),
        _ => Err(error.into()),
    }
}
