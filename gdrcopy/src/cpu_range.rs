//! An address range of this process that shows GPU memory; unmapped when dropped.

use std::fmt;
use std::ptr::NonNull;

use crate::backend::MappingType;
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::memory_file::take_away;
use crate::system::check;

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

    /// Unmaps, once; telling what went wrong where a drop can only log it. What is still mapped then keeps what is
    /// behind it.
    pub(crate) fn release(&mut self) -> Result<()> {
        // A forked child has a hole here, or by now something else.
        if !self.owner.is_caller() || self.len == 0 {
            return Ok(());
        }
        let len = std::mem::take(&mut self.len);
        let guard = self.guard.take();
        // SAFETY: the range is this value's own and nothing uses it any more.
        check(unsafe { libc::munmap(self.ptr.as_ptr().cast(), len) }).map_err(|error| {
            let behind = guard.is_some();
            // Else the driver would give its BAR1 space to somebody else, whose memory these addresses would show.
            std::mem::forget(guard);
            if behind {
                tracing::warn!("kept until the process ends: what is behind {len} B at {:p}", self.ptr);
            }
            Error::sys("munmap", error, "the range was changed from outside this library")
        })?;
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LEN: usize = 65_536;

    fn range(guard: &Arc<()>) -> CpuRange {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping touches none that exists.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), LEN, libc::PROT_READ, flags, -1, 0) };
        assert_ne!(raw, libc::MAP_FAILED);
        let ptr = NonNull::new(raw.cast()).unwrap();
        // SAFETY: the mapping above, which has no other owner.
        unsafe { CpuRange::adopt(ptr, LEN, MappingType::Cached, Some(Box::new(guard.clone()))) }.unwrap()
    }

    /// Addresses within a page, for which `munmap` is refused.
    fn spoil(range: &mut CpuRange) {
        // SAFETY: within the mapping.
        range.ptr = unsafe { range.ptr.add(1) };
    }

    #[test]
    fn what_is_behind_a_range_goes_with_it() {
        let guard = Arc::new(());
        range(&guard).release().unwrap();
        drop(range(&guard));
        range(&guard).revoke().unwrap();
        assert_eq!(Arc::strong_count(&guard), 1);
    }

    #[test]
    fn what_is_behind_a_range_that_is_still_mapped_stays() {
        let guard = Arc::new(());
        let mut told = range(&guard);
        spoil(&mut told);
        assert_eq!(told.release().unwrap_err().errno(), libc::EINVAL);
        told.release().unwrap();
        drop(told);
        assert_eq!(Arc::strong_count(&guard), 2, "after a release");
        let mut dropped = range(&guard);
        spoil(&mut dropped);
        drop(dropped);
        assert_eq!(Arc::strong_count(&guard), 3, "after a drop");
        let mut revoked = range(&guard);
        spoil(&mut revoked);
        revoked.revoke().unwrap_err();
        drop(revoked);
        assert_eq!(Arc::strong_count(&guard), 4, "after a revocation");
    }
}
