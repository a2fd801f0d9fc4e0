//! Address space in which several mappings lie side by side.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use crate::backend::MappingType;
use crate::cpu_range::CpuRange;
use crate::error::{Error, Result};
use crate::system::Kernel;

/// Reserved addresses, filled from the first on; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    ptr: NonNull<u8>,
    len: usize,
    filled: usize,
}

impl Reservation {
    /// Reserves `len` bytes, whole pages.
    pub(crate) fn new(len: usize) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping touches none that exists.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        match NonNull::new(raw.cast()) {
            Some(ptr) if raw != libc::MAP_FAILED => Ok(Self { ptr, len, filled: 0 }),
            _ => Err(Error::sys(
                format!("mmap of {len} bytes of address space"),
                io::Error::last_os_error(),
                "raise vm.max_map_count, or the limit of `ulimit -v`",
            )),
        }
    }

    /// Maps the first `len` bytes of a file behind what is filled.
    pub(crate) fn append(&mut self, kernel: &dyn Kernel, fd: BorrowedFd<'_>, len: usize) -> io::Result<()> {
        if len > self.len - self.filled {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: inside the reservation, checked above.
        let at = unsafe { self.ptr.add(self.filled) };
        // SAFETY: a part of this reservation that nothing was mapped into so far.
        unsafe { kernel.mmap(fd, len, 0, Some(at)) }?;
        self.filled += len;
        Ok(())
    }

    /// Hands the addresses over, with what must live as long. What is not filled cannot be accessed.
    pub(crate) fn into_range(
        self,
        kind: MappingType,
        guard: Option<Box<dyn Send + Sync>>,
    ) -> Result<CpuRange> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the whole reservation, which now has no other owner.
        unsafe { CpuRange::adopt(this.ptr, this.len, kind, guard) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: this value's own range, never handed out.
        if unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) } != 0 {
            tracing::warn!(error = %io::Error::last_os_error(), "munmap of {:p} failed", self.ptr);
        }
    }
}
