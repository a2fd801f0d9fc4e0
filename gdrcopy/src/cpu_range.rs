//! An address range of this process that shows GPU memory; unmapped when dropped.

use std::fmt;
use std::ptr::NonNull;

use crate::backend::MappingType;
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::kernel::check;
use crate::memory_file::take_away;

/// A mapped range. Forked children have a hole there.
pub(crate) struct CpuRange {
    ptr: NonNull<u8>,
    len: usize,
    kind: MappingType,
    owner: Owner,
    /// What the backend gives back after the range is gone.
    guard: Option<Box<dyn Send + Sync>>,
}

// SAFETY: the range may be read, written and unmapped from any thread; this type never forms references to it.
unsafe impl Send for CpuRange {}
// SAFETY: as above; no method of a shared reference touches the bytes.
unsafe impl Sync for CpuRange {}

impl fmt::Debug for CpuRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuRange({:p}, {} B, {:?})", self.ptr, self.len, self.kind)
    }
}

impl CpuRange {
    /// Takes over a mapping and keeps it out of forked children. `guard` is dropped after the unmapping.
    ///
    /// # Safety
    /// `ptr` and `len` must be a whole mapping, or several adjacent ones, that nobody else unmaps.
    pub(crate) unsafe fn adopt(
        ptr: NonNull<u8>,
        len: usize,
        kind: MappingType,
        guard: Option<Box<dyn Send + Sync>>,
    ) -> Result<Self> {
        let range = Self { ptr, len, kind, owner: Owner::this_process(), guard };
        // SAFETY: the caller owns the range; the advice only concerns fork.
        check(unsafe { libc::madvise(ptr.as_ptr().cast(), len, libc::MADV_DONTFORK) }).map_err(|e| {
            Error::sys("madvise(MADV_DONTFORK)", e, "this kernel cannot keep mappings from children")
        })?;
        Ok(range)
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn kind(&self) -> MappingType {
        self.kind
    }

    /// Unmaps, once; telling what went wrong where a drop can only log it.
    pub(crate) fn release(&mut self) -> Result<()> {
        // A forked child has a hole here, or by now something else.
        if !self.owner.is_caller() || self.len == 0 {
            return Ok(());
        }
        let len = std::mem::take(&mut self.len);
        // SAFETY: the range is this value's own and nothing uses it any more.
        check(unsafe { libc::munmap(self.ptr.as_ptr().cast(), len) })
            .map_err(|e| Error::sys("munmap", e, "the range was changed from outside this library"))?;
        self.guard = None;
        Ok(())
    }

    /// Gives the memory back and keeps the addresses, in which every access then raises `SIGBUS`, until the process
    /// ends. Where they cannot be kept they are unmapped.
    pub(crate) fn revoke(&mut self) -> Result<()> {
        if !self.owner.is_caller() || self.len == 0 {
            return Ok(());
        }
        // SAFETY: the range is this value's own; whoever still looks at it is to be told.
        if let Err(error) = unsafe { take_away(self.ptr, self.len) } {
            tracing::warn!("the addresses of {self:?} cannot be kept from other uses: {error}");
            return self.release();
        }
        self.len = 0;
        self.guard = None;
        Ok(())
    }
}

impl Drop for CpuRange {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!("{error}");
        }
    }
}
