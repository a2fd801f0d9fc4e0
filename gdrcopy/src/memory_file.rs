//! Files that are only memory, and what an empty one is good for.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, FromRawFd};
use std::ptr::NonNull;

use crate::kernel::{Kernel, Linux, check};

/// A file of `len` zero bytes, gone with its last descriptor and mapping. An error where the limit of the size of files
/// (RLIMIT_FSIZE) is smaller: the kernel kills a process that goes beyond it.
pub(crate) fn memory_file(name: &CStr, len: u64) -> io::Result<File> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writing.
    check(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) })?;
    if limit.rlim_cur < len {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // SAFETY: a terminated string and flags; nothing else is passed.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: just created, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

/// Takes away what is mapped, at once, and keeps the addresses: no later `mmap` gets them, an access raises `SIGBUS`,
/// and forked children have a hole there. On an error the old mapping may still be there.
///
/// # Safety
/// The range must be whole mappings of the caller's, which nobody uses except to be told by the signal.
pub(crate) unsafe fn take_away(ptr: NonNull<u8>, len: usize) -> io::Result<()> {
    // Every access is beyond the end of an empty file.
    let empty = memory_file(c"taken-away", 0)?;
    // SAFETY: the caller's own range, with nothing in it that is still of use.
    unsafe { Linux.mmap(empty.as_fd(), len, 0, Some(ptr)) }?;
    // SAFETY: the mapping just made; the advice only concerns fork.
    check(unsafe { libc::madvise(ptr.as_ptr().cast(), len, libc::MADV_DONTFORK) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::host_page;
    use crate::backend::tests::rig::{End, in_child};

    #[test]
    fn every_page_that_was_taken_away_raises_sigbus_on_any_access() {
        let len = 3 * host_page();
        for offset in [0, len / 2, len - 1] {
            for is_store in [false, true] {
                let end = in_child(|| {
                    let Ok(file) = memory_file(c"test", len as u64) else { return false };
                    // SAFETY: no place is asked for.
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
                        // SAFETY: as above.
                        unsafe { byte.write_volatile(2) };
                        return true;
                    }
                    // SAFETY: as above.
                    unsafe { byte.read_volatile() == 1 }
                });
                assert_eq!(end, End::Killed(libc::SIGBUS), "{offset} {is_store}");
            }
        }
    }
}
