//! Files that are only memory, and what an empty one is good for.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::system::{Kernel, Linux, check};

/// A file of `len` zero bytes, gone with its last descriptor and mapping. An error where the limit of the size of files
/// (RLIMIT_FSIZE) is smaller: the kernel kills a process that goes beyond it.
pub(crate) fn memory_file(name: &CStr, len: u64) -> io::Result<File> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writing.
    check(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) })?;
    if limit.rlim_cur < len {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let file = create(name, 0)?;
    file.set_len(len)?;
    Ok(file)
}

fn create(name: &CStr, flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: a terminated string and flags; nothing else is passed.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags) })?;
    // SAFETY: just created, owned by nobody else.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// What keeps a file empty, whoever has it.
const NEVER_GROWS: i32 = libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The descriptor of an empty file that stays empty; -1 without one. Children inherit it.
static EMPTY: AtomicI32 = AtomicI32::new(-1);

/// An empty file that stays empty, the same one each time: the kernel merges neighbouring mappings of one file only.
fn empty_file() -> io::Result<BorrowedFd<'static>> {
    let seen = EMPTY.load(Ordering::Acquire);
    let fd = if stays_empty(seen) { seen } else { new_empty_file(seen)? };
    // SAFETY: never closed by this library. A program that closes descriptors of others is found out by `stays_empty`.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Whether a descriptor is of such a file. Programs that become daemons close all, and the number may be another file's now.
fn stays_empty(fd: RawFd) -> bool {
    // SAFETY: a number and a command; any number is allowed.
    let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
    if seals == -1 || seals & NEVER_GROWS != NEVER_GROWS {
        return false;
    }
    // SAFETY: open a moment ago; not closed here.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    file.metadata().is_ok_and(|data| data.len() == 0)
}

/// Makes such a file in the place of what was `seen` there. Of several callers one makes it for all.
fn new_empty_file(seen: RawFd) -> io::Result<RawFd> {
    let file = create(c"taken-away", libc::MFD_ALLOW_SEALING)?;
    // SAFETY: the file just made, and a number.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, NEVER_GROWS) })?;
    match EMPTY.compare_exchange(seen, file.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(file.into_raw_fd()),
        Err(others) => Ok(others),
    }
}

/// Takes away what is mapped, at once, and keeps the addresses: no later `mmap` gets them, an access raises `SIGBUS`,
/// and forked children have a hole there. On an error the old mapping may still be there.
///
/// Neighbouring places are one mapping of the kernel, which has a limit for their number (vm.max_map_count).
///
/// # Safety
/// The range must be whole mappings of the caller's, which nobody uses except to be told by the signal.
pub(crate) unsafe fn take_away(ptr: NonNull<u8>, len: usize) -> io::Result<()> {
    // Every access is beyond the end of an empty file.
    let empty = empty_file()?;
    // Neighbours merge where their offsets are neighbours too.
    let offset = ptr.addr().get() as u64;
    // SAFETY: the caller's own range, with nothing in it that is still of use.
    unsafe { Linux.mmap(empty, len, offset, Some(ptr)) }?;
    // SAFETY: the mapping just made; the advice only concerns fork.
    check(unsafe { libc::madvise(ptr.as_ptr().cast(), len, libc::MADV_DONTFORK) }).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use gdsync_testkit::process::{End, in_child};

    use super::*;
    use crate::backend::host_page;

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
