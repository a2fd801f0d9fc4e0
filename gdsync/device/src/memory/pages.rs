//! Pages of host memory, alone or shared with other processes.

use std::ffi::CStr;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::EventfdFlags;

use super::{Bytes, Memory, page_round, pages};
use crate::cuda::is_registered;
use crate::error::{Error, Result};

/// Maps pages for reading and writing, hidden from forked children.
///
/// Skips addresses where CUDA has pages registered that their owner has unmapped: GPUs would go on using the old pages.
pub(super) fn map(len: usize, flags: i32, fd: i32) -> Result<NonNull<u8>> {
    loop {
        let pages = fresh(len, flags, fd)?;
        let start = pages.addr().get();
        if !is_registered(&(start..start + len)) {
            keep_from_children(pages, len, flags);
            return Ok(pages);
        }
        // Left mapped, so that the address is not reused.
        tracing::warn!(?pages, len, "CUDA knows memory that was unmapped: its place is not used again");
    }
}

/// Keeps pages out of forked children, so that devices go on with the pages of the parent. Children see zeros in place of private pages,
/// which users may touch, and nothing in place of shared ones, which only the library uses.
fn keep_from_children(pages: NonNull<u8>, len: usize, flags: i32) {
    let wipe = (flags & libc::MAP_PRIVATE != 0).then_some(libc::MADV_WIPEONFORK);
    let _done = wipe.into_iter().chain([libc::MADV_DONTFORK]).find(|&advice| {
        // SAFETY: the caller's fresh mapping; the advice only concerns fork.
        unsafe { libc::madvise(pages.as_ptr().cast(), len, advice) == 0 }
    });
}

fn fresh(len: usize, flags: i32, fd: i32) -> Result<NonNull<u8>> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, fd, 0) };
    if raw == libc::MAP_FAILED {
        return Err(Error::last_os("mmap", "free memory or raise the address space limit (ulimit -v)"));
    }
    Ok(NonNull::new(raw.cast()).expect("mmap without MAP_FIXED never returns 0"))
}

impl Memory {
    /// Maps a shared memory file, or zeroed memory, over the pages of this memory. Concurrent readers see this as a write by another
    /// process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless it was allocated by this library and never registered; [`Error::Sys`].
    pub fn remap(&self, file: Option<BorrowedFd<'_>>) -> Result<()> {
        let (ptr, len, is_shared) = match &self.owner.bytes {
            // A GPU would go on using the old pages.
            Bytes::Mapped { ptr, len, is_shared } if self.owner.registered.get().is_none() => {
                (*ptr, *len, is_shared)
            }
            _ => {
                return Err(Error::invalid(
                    "memory",
                    format!("{self:?}"),
                    "unregistered pages of the library",
                ));
            }
        };
        is_shared.fetch_or(file.is_some(), Ordering::Relaxed);
        let (flags, fd) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
        };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is a mapping of this memory, which is only used as memory that others write to as well.
        let raw = unsafe { libc::mmap(ptr.as_ptr().cast(), len, prot, flags | libc::MAP_FIXED, fd, 0) };
        if raw == libc::MAP_FAILED {
            return Err(Error::last_os("mmap", "free memory or raise the address space limit (ulimit -v)"));
        }
        keep_from_children(ptr, len, flags);
        Ok(())
    }

    /// Allocates `len` zeroed bytes that other processes can map by the returned file, which cannot be resized. `name` is shown in `/proc`.
    ///
    /// # Errors
    /// As [`Memory::alloc`].
    pub fn shared(name: &CStr, len: usize) -> Result<(Self, OwnedFd)> {
        let file = memfd(name, super::page_round(len)?)?;
        Ok((Self::map_shared(file.as_fd(), len)?, file))
    }

    /// Maps the first `len` bytes of a file from [`Memory::shared`] of another process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a file that is shorter or can shrink; [`Error::Sys`].
    pub fn of_shared(file: &OwnedFd, len: usize) -> Result<Self> {
        check_memfd(file, len)?;
        Self::map_shared(file.as_fd(), len)
    }
}

/// Creates an event descriptor whose reads and writes do not block.
///
/// # Errors
/// [`Error::Sys`].
pub fn eventfd() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| Error::os("eventfd", e.into(), "raise the limit of open files (ulimit -n)"))
}

/// Makes an event descriptor readable.
pub fn signal_eventfd(fd: &OwnedFd) {
    // Fails only when the counter is full, and then the descriptor is readable.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes an event descriptor unreadable again.
pub fn clear_eventfd(fd: &OwnedFd) {
    // Fails only when it is unreadable already.
    let _ = rustix::io::read(fd, &mut [0; 8]);
}

/// Creates a memory file of `size` bytes that cannot be resized, so that accesses to a mapping of it cannot fault.
///
/// # Errors
/// [`Error::Sys`].
pub fn memfd(name: &CStr, size: usize) -> Result<OwnedFd> {
    const FIX: &str = "raise the limit of open files (ulimit -n) or free memory";
    check_file_limit(size)
        .map_err(|e| Error::os("memfd_create", e, "raise the limit of the size of files (ulimit -f)"))?;
    // SAFETY: the name is a C string.
    let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if raw < 0 {
        return Err(Error::last_os("memfd_create", FIX));
    }
    // SAFETY: the descriptor is fresh and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let length = libc::off_t::try_from(size)
        .map_err(|_| Error::invalid("memory file size", size, "less than 2^63"))?;
    // SAFETY: a plain call on a valid descriptor.
    if unsafe { libc::ftruncate(raw, length) } != 0 {
        return Err(Error::last_os("ftruncate", FIX));
    }
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: a plain call on a valid descriptor.
    if unsafe { libc::fcntl(raw, libc::F_ADD_SEALS, seals) } != 0 {
        return Err(Error::last_os("fcntl(F_ADD_SEALS)", "use Linux 3.17 or newer"));
    }
    Ok(fd)
}

/// Checks that a peer's file has `size` bytes and cannot shrink.
///
/// # Errors
/// [`Error::InvalidArgument`] if not; [`Error::Sys`].
pub fn check_memfd(fd: &OwnedFd, size: usize) -> Result<()> {
    // SAFETY: a plain call on a valid descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(Error::invalid("peer's memory file", seals, "a memfd sealed against shrinking"));
    }
    // SAFETY: the structure is plain old data, for which zero bytes are valid.
    let mut stat: libc::stat = unsafe { zeroed() };
    // SAFETY: `stat` is valid for writing.
    if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(Error::last_os("fstat", "report this"));
    }
    if usize::try_from(stat.st_size).is_ok_and(|got| got >= size) {
        Ok(())
    } else {
        Err(Error::invalid("peer's memory file size", stat.st_size, "the size of the structure in it"))
    }
}

/// Checks the limit of the size of files (RLIMIT_FSIZE). The kernel kills processes that exceed it.
pub(crate) fn check_file_limit(bytes: usize) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writing.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0 && limit.rlim_cur < bytes as u64 {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}

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

#[cfg(test)]
mod tests {
    use gdsync_testkit::driver;

    use super::*;
    use crate::cuda::Gpu;
    use crate::memory::Memory;

    const PAGE: usize = 4096;
    const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

    /// As a library of a device does that closes what it had mapped.
    #[test]
    fn addresses_of_pages_that_cuda_still_knows_are_not_used_again() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
        // The kernel gives the highest gap that is wide enough: many, so that other threads do not fill it first.
        let gaps: Vec<_> = (0..64)
            .map(|_| {
                let pages = fresh(3 * PAGE, FLAGS, -1).unwrap();
                // SAFETY: mapped, and used by nobody.
                let memory = unsafe { Memory::from_raw(pages.as_ptr(), 3 * PAGE) }.unwrap();
                memory.gpu_addr(&gpu).unwrap();
                memory
            })
            .collect();
        for gap in &gaps {
            let start = std::ptr::with_exposed_provenance_mut(usize::try_from(gap.addr()).unwrap());
            // SAFETY: this test's own pages, which nobody uses.
            assert_eq!(unsafe { libc::munmap(start, 3 * PAGE) }, 0);
        }
        let fresh: Vec<_> = (0..128).map(|n| Memory::alloc((1 + n % 3) * PAGE).unwrap()).collect();
        for memory in &fresh {
            let end = memory.addr() + memory.len() as u64;
            let is_over = |gap: &&Memory| gap.addr() < end && memory.addr() < gap.addr() + gap.len() as u64;
            assert_eq!(gaps.iter().find(is_over).map(Memory::addr), None, "{memory:?}");
            memory.gpu_addr(&gpu).unwrap();
        }
    }

    #[test]
    fn both_mappings_have_the_same_bytes() {
        let (memory, file) = Memory::shared(c"gdsync-test", 100).unwrap();
        let other = Memory::of_shared(&file, 100).unwrap();
        memory.write(7, b"shared").unwrap();
        assert_eq!(other.to_vec()[7..13], *b"shared");
        assert!(Memory::of_shared(&file, 5000).is_err(), "it is one page long");
        let file = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(Memory::of_shared(&file, 100).is_err(), "it could become shorter");
    }
}
