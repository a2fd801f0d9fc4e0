//! Memory files that cannot shrink, to share with other processes.

use std::ffi::CStr;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::{Error, Result};

/// A memory file of `size` bytes that nobody can shrink or grow: mapping it cannot fault later.
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

/// Checks that a peer's file holds `size` bytes for ever.
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

/// Fails where this process may make no file of so many bytes (RLIMIT_FSIZE): the kernel kills one that tries.
pub(crate) fn check_file_limit(bytes: usize) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writing.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0 && limit.rlim_cur < bytes as u64 {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}
