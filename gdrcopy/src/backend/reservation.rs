//! Reserved address space that several adjacent mappings fill.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::cpu_range::CpuRange;
use crate::error::{Error, Result};
use crate::system::Kernel;
use crate::types::MappingType;

/// Reserved addresses, filled from the start; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    ptr: NonNull<u8>,
    len: usize,
    filled: usize,
}

impl Reservation {
    /// Reserves `len` bytes, whole pages.
    pub(crate) fn new(len: usize) -> Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping touches none that exists.
        let raw = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) };
        let ptr =
            raw.and_then(|raw| NonNull::new(raw.cast()).ok_or(rustix::io::Errno::FAULT)).map_err(|e| {
                let call = format!("mmap of {len} bytes of address space");
                Error::sys(call, e.into(), "raise vm.max_map_count, or the limit of `ulimit -v`")
            })?;
        Ok(Self { ptr, len, filled: 0 })
    }

    /// Maps the first `len` bytes of a file after the filled part.
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

    /// Converts into a range that keeps `guard`. The part that is not filled cannot be accessed.
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
        // SAFETY: this value's own range, which nothing else knows.
        if let Err(error) = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) } {
            tracing::warn!(%error, "munmap of {:p} failed", self.ptr);
        }
    }
}
