//! Pages of host memory.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use super::{Bytes, Memory};
use crate::cuda::is_registered;
use crate::error::{Error, Result};

/// Maps pages for reading and writing, and keeps what is in them out of forked children.
///
/// Never where CUDA knows pages that their owner has unmapped without a word: GPUs would go on using those in place of
/// the new ones, and see stale bytes.
pub(super) fn map(len: usize, flags: i32, fd: i32) -> Result<NonNull<u8>> {
    loop {
        let pages = fresh(len, flags, fd)?;
        let start = pages.addr().get();
        if !is_registered(&(start..start + len)) {
            keep_from_children(pages, len, flags);
            return Ok(pages);
        }
        // They stay mapped, so that nobody else gets them either.
        tracing::warn!(?pages, len, "CUDA knows memory that was unmapped: its place is not used again");
    }
}

/// Neither copied, so that a device goes on with the pages of the parent, nor shared. Of private pages, which users touch, children
/// get zeros; of shared ones, which only the library does, nothing.
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
    /// Has pages that were mapped here show a shared memory file, or nothing, instead of what they showed. To those who look at
    /// them meanwhile it is as if another process had written.
    pub fn show(&self, file: Option<BorrowedFd<'_>>) -> Result<()> {
        let (ptr, len) = match self.owner.bytes {
            // A GPU would go on with the old pages.
            Bytes::Mapped { ptr, len } if self.owner.registered.get().is_none() => (ptr, len),
            _ => {
                return Err(Error::invalid(
                    "memory",
                    format!("{self:?}"),
                    "unregistered pages of the library",
                ));
            }
        };
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
}
