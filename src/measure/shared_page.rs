//! A page that two processes share.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};

use gdsync::memory::Memory;

/// Bytes of the page.
pub const SIZE: usize = 4096;

/// A file of one zeroed page, and a path by which other processes of the user can open it while this one has it open.
///
/// # Errors
/// What the system refuses.
pub fn create() -> Result<(File, String)> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"gdasync-page".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor is fresh and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(SIZE as u64)?;
    Ok((file, format!("/proc/{}/fd/{fd}", std::process::id())))
}

/// Maps the file. The mapping is never undone: it is one page of a short-lived program.
///
/// # Errors
/// What the system refuses.
pub fn map(file: &File) -> Result<Memory> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, prot, flags, file.as_raw_fd(), 0) };
    if raw == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    // SAFETY: the mapping is valid for its size and stays until the process ends.
    unsafe { Memory::from_raw(raw.cast(), SIZE) }.map_err(Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_a_page_share_it() {
        let (file, path) = create().unwrap();
        let other = File::options().read(true).write(true).open(path).unwrap();
        let (here, there) = (map(&file).unwrap(), map(&other).unwrap());
        assert_eq!(there.to_vec(), [0; SIZE]);
        here.write(SIZE - 6, b"shared").unwrap();
        let mut found = [0; 6];
        there.read(SIZE - 6, &mut found).unwrap();
        assert_eq!(&found, b"shared");
    }
}
