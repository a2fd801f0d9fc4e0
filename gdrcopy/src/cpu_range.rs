//! An address range of this process that shows GPU memory: reserved, filled, unmapped or revoked; and memory files.

use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::system::Kernel;
use crate::types::MappingType;

/// A mapped range, unmapped when dropped. Forked children have a hole there.
pub(crate) struct CpuRange {
    ptr: NonNull<u8>,
    len: usize,
    kind: MappingType,
    owner: Owner,
    /// Dropped after the range is unmapped: what the backend holds for it.
    guard: Option<Box<dyn Send + Sync>>,
}

// SAFETY: the range may be read, written and unmapped from any thread; this type never forms references to it.
unsafe impl Send for CpuRange {}
// SAFETY: no method of a shared reference accesses the bytes.
unsafe impl Sync for CpuRange {}

impl fmt::Debug for CpuRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuRange({:p}, {} B, {:?})", self.ptr, self.len, self.kind)
    }
}

impl CpuRange {
    /// Takes ownership of a mapping and keeps it out of forked children. `guard` is dropped after it is unmapped.
    ///
    /// # Safety
    /// `ptr` and `len` must be one mapping, or several adjacent ones, that nothing else unmaps.
    pub(crate) unsafe fn adopt(
        ptr: NonNull<u8>,
        len: usize,
        kind: MappingType,
        guard: Option<Box<dyn Send + Sync>>,
    ) -> Result<Self> {
        let range = Self { ptr, len, kind, owner: Owner::this_process(), guard };
        // SAFETY: the caller owns the range; the advice only concerns fork.
        unsafe { rustix::mm::madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }.map_err(|e| {
            Error::sys("madvise(MADV_DONTFORK)", e.into(), "this kernel cannot keep mappings from children")
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

    /// Unmaps, once, and returns the error that a drop can only log. If the range cannot be unmapped, `guard` is leaked.
    pub(crate) fn release(&mut self) -> Result<()> {
        // A forked child has a hole here, or another mapping by now.
        if !self.owner.is_caller() || self.len == 0 {
            return Ok(());
        }
        let len = std::mem::take(&mut self.len);
        let guard = self.guard.take();
        // SAFETY: the range is this value's own and nothing uses it any more.
        unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), len) }.map_err(|error| {
            let behind = guard.is_some();
            // Otherwise the driver would reuse its BAR1 space, and these addresses would show foreign memory.
            std::mem::forget(guard);
            if behind {
                tracing::warn!("{len} B at {:p} stay mapped until the process ends", self.ptr);
            }
            Error::sys("munmap", error.into(), "the range was changed from outside this library")
        })?;
        Ok(())
    }

    /// Releases the memory but keeps the addresses reserved until the process ends: every access there raises `SIGBUS`. If they
    /// cannot be reserved, they are unmapped.
    pub(crate) fn revoke(&mut self) -> Result<()> {
        if !self.owner.is_caller() || self.len == 0 {
            return Ok(());
        }
        // SAFETY: the range is this value's own; a later access is meant to raise the signal.
        if let Err(error) = unsafe { take_away(self.ptr, self.len) } {
            tracing::warn!("the addresses of {self:?} cannot be reserved: {error}");
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

/// A memory file of `len` zero bytes. Fails with `EFBIG` if the file size limit (`RLIMIT_FSIZE`) is lower: the kernel kills a
/// process that exceeds it.
pub(crate) fn memory_file(name: &CStr, len: u64) -> io::Result<File> {
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < len) {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}

/// Seals that keep a file empty.
const NEVER_GROWS: SealFlags = SealFlags::GROW.union(SealFlags::SEAL);

/// The descriptor of a sealed empty file; -1 before the first use. Children inherit it.
static EMPTY: AtomicI32 = AtomicI32::new(-1);

/// A sealed empty file, the same one each time: the kernel merges neighbouring mappings of one file only.
fn empty_file() -> io::Result<BorrowedFd<'static>> {
    let seen = EMPTY.load(Ordering::Acquire);
    let fd = if stays_empty(seen) { seen } else { new_empty_file(seen)? };
    // SAFETY: this library never closes it. If the program closed it, `stays_empty` notices.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Whether a descriptor is of a sealed empty file. A daemon closes all descriptors, so the number may be of another file.
fn stays_empty(fd: RawFd) -> bool {
    if fd < 0 {
        return false;
    }
    // SAFETY: not closed here; the calls below find out whether it is open.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let sealed = rustix::fs::fcntl_get_seals(&*file).is_ok_and(|seals| seals.contains(NEVER_GROWS));
    sealed && file.metadata().is_ok_and(|data| data.len() == 0)
}

/// Replaces the descriptor that was `seen` by one of a new file. The first of several callers wins.
fn new_empty_file(seen: RawFd) -> io::Result<RawFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create(c"taken-away", flags)?);
    rustix::fs::fcntl_add_seals(&file, NEVER_GROWS)?;
    match EMPTY.compare_exchange(seen, file.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(file.into_raw_fd()),
        Err(others) => Ok(others),
    }
}

/// Replaces a mapping by one of an empty file: no later `mmap` gets the addresses, an access raises `SIGBUS`, and forked
/// children have a hole there. On an error the old mapping may still exist.
///
/// Neighbouring ranges become one mapping of the kernel, which limits their number (`vm.max_map_count`).
///
/// # Safety
/// The range must consist of whole mappings of the caller's. Later accesses raise the signal.
pub(crate) unsafe fn take_away(ptr: NonNull<u8>, len: usize) -> io::Result<()> {
    // Every access is beyond the end of an empty file.
    let empty = empty_file()?;
    // Neighbours merge where their offsets are neighbours too.
    let offset = ptr.addr().get() as u64;
    // SAFETY: the caller's own range, with nothing in it that is still of use.
    unsafe {
        rustix::mm::mmap(
            ptr.as_ptr().cast(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
            empty,
            offset,
        )
    }?;
    // SAFETY: the mapping just made; the advice concerns fork only.
    unsafe { rustix::mm::madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }?;
    Ok(())
}

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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use gdsync_testkit::process::{End, in_child};

    use super::*;
    use crate::system::Linux;
    use crate::types::host_page;

    const LEN: usize = 65_536;

    fn range(guard: &Arc<()>) -> CpuRange {
        let (prot, null) = (ProtFlags::READ, std::ptr::null_mut());
        // SAFETY: a new anonymous mapping touches none that exists.
        let raw = unsafe { rustix::mm::mmap_anonymous(null, LEN, prot, MapFlags::PRIVATE) }.unwrap();
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
    fn the_guard_is_dropped_with_its_range() {
        let guard = Arc::new(());
        range(&guard).release().unwrap();
        drop(range(&guard));
        range(&guard).revoke().unwrap();
        assert_eq!(Arc::strong_count(&guard), 1);
    }

    #[test]
    fn the_guard_of_a_range_that_stays_mapped_is_leaked() {
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

    #[test]
    fn every_access_to_a_revoked_page_raises_sigbus() {
        let len = 3 * host_page();
        for offset in [0, len / 2, len - 1] {
            for is_store in [false, true] {
                let end = in_child(|| {
                    let Ok(file) = memory_file(c"test", len as u64) else { return false };
                    // SAFETY: no address is given.
                    let Ok(ptr) = (unsafe { Linux.mmap(file.as_fd(), len, 0, None) }) else { return false };
                    // SAFETY: inside the mapping.
                    let byte = unsafe { ptr.add(offset) };
                    // SAFETY: mapped.
                    unsafe { byte.write_volatile(1) };
                    // SAFETY: this test's own mapping; that the access below ends the child is what is expected.
                    if unsafe { take_away(ptr, len) }.is_err() {
                        return false;
                    }
                    if is_store {
                        // SAFETY: inside the mapping; that the access ends the child is expected.
                        unsafe { byte.write_volatile(2) };
                        return true;
                    }
                    // SAFETY: inside the mapping; that the access ends the child is expected.
                    unsafe { byte.read_volatile() == 1 }
                });
                assert_eq!(end, End::Killed(libc::SIGBUS), "{offset} {is_store}");
            }
        }
    }
}
