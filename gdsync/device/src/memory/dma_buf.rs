//! Dma-bufs of other drivers.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Bytes, Memory, page_round, pages};
use crate::error::{Error, Result};

/// A mapped dma-buf.
pub(super) struct DmaBuf {
    pub(super) ptr: NonNull<u8>,
    pub(super) len: usize,
    fd: OwnedFd,
}

// SAFETY: an address only; the bytes are reached through a `Memory`. It may be unmapped from any thread.
unsafe impl Send for DmaBuf {}
// SAFETY: no method uses the address.
unsafe impl Sync for DmaBuf {}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        // SAFETY: mapped with this length by `of_dma_buf`; the memory that used it is gone.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

impl Memory {
    /// The `len` bytes from `offset` on of a dma-buf of another driver, which must let the CPU map it. Devices of libibverbs use the
    /// dma-buf itself. It stays open with the memory.
    ///
    /// GPU memory of CUDA needs none: see [`Gpu::find`](crate::cuda::Gpu::find).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no bytes or a range that leaves it; [`Error::Sys`] if it cannot be mapped.
    pub fn of_dma_buf(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self> {
        let failed = |error: rustix::io::Errno| Error::os("dma-buf", error.into(), "pass an open dma-buf");
        let size = u64::try_from(rustix::fs::fstat(fd).map_err(failed)?.st_size).unwrap_or(0);
        let end = offset.checked_add(len as u64).filter(|&end| len > 0 && end <= size);
        let end = end.and_then(|end| usize::try_from(end).ok()).ok_or_else(|| Error::InvalidArgument {
            what: "the range of the dma-buf",
            value: format!("{len} bytes from {offset} on"),
            expected: "at least one byte, and none behind its end",
        })?;
        let fd = fd.try_clone_to_owned().map_err(|error| Error::os("dup", error, "raise ulimit -n"))?;
        let mapped = page_round(end)?;
        let ptr = pages::map(mapped, libc::MAP_SHARED, fd.as_raw_fd())?;
        Self::host(ptr, end, Bytes::DmaBuf(Arc::new(DmaBuf { ptr, len: mapped, fd }))).slice(end - len, len)
    }

    /// The dma-buf that the memory is of, and where it begins there.
    pub fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.owner.bytes {
            Bytes::DmaBuf(whole) => {
                Some((whole.fd.as_fd(), (self.ptr.addr().get() - whole.ptr.addr().get()) as u64))
            }
            _ => None,
        }
    }
}
