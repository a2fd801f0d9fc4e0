//! Memory that processes share without any message.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::Duration;

use gdsync::memory::Memory;
use mp::Communicator;

/// Bytes of a page.
pub const SIZE: usize = 4096;

/// Zeroed memory of `len` bytes that all ranks share. They must be on one host: the software HCA, and with it what this is
/// compared with, reaches no further. Every rank must call this.
///
/// # Errors
/// What the system refuses, and of the exchange between the ranks.
pub fn share(
    comm: &Communicator,
    len: usize,
    timeout: Duration,
) -> std::result::Result<Memory, Box<dyn std::error::Error>> {
    let own = (comm.rank() == 0).then(|| create(len)).transpose()?;
    let path = own.as_ref().map_or("", |(_, path)| path);
    let paths = comm.exchange(path.as_bytes(), timeout)?;
    let opened = match &own {
        Some((file, _)) => file.try_clone()?,
        None => {
            let path = std::str::from_utf8(&paths[0])?;
            let open = File::options().read(true).write(true).open(path);
            open.map_err(|e| format!("{path}: {e}: the floor needs all ranks on one host, as one user"))?
        }
    };
    let memory = map(&opened, len)?;
    // All have opened it before rank 0 closes its file.
    comm.barrier(timeout)?;
    Ok(memory)
}

/// A file of so many zeroed bytes, and a path by which other processes of the user can open it while this one has it open.
fn create(len: usize) -> Result<(File, String)> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"gdasync-page".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor is fresh and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len as u64)?;
    Ok((file, format!("/proc/{}/fd/{fd}", std::process::id())))
}

/// Maps the file. The mapping is never undone: it is small, and the program short-lived.
fn map(file: &File, len: usize) -> Result<Memory> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, file.as_raw_fd(), 0) };
    if raw == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    // SAFETY: the mapping is valid for its size and stays until the process ends.
    unsafe { Memory::from_raw(raw.cast(), len) }.map_err(Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_a_page_share_it() {
        let (file, path) = create(SIZE).unwrap();
        let other = File::options().read(true).write(true).open(path).unwrap();
        let (here, there) = (map(&file, SIZE).unwrap(), map(&other, SIZE).unwrap());
        assert_eq!(there.to_vec(), [0; SIZE]);
        here.write(SIZE - 6, b"shared").unwrap();
        let mut found = [0; 6];
        there.read(SIZE - 6, &mut found).unwrap();
        assert_eq!(&found, b"shared");
    }
}
