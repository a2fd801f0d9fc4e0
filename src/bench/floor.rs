//! The floor: two threads, or two processes, that bounce a cache line. No message can be faster.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::measure::Samples;

use super::Result;

/// Bytes of the file with the line.
const SIZE: usize = 4096;

/// A file of shared memory that another process can open by the returned path.
pub(super) fn create() -> Result<(File, String)> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"gdasync-floor".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the descriptor is fresh and nobody else's.
    let file: File = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
    file.set_len(SIZE as u64)?;
    Ok((file, format!("/proc/{}/fd/{fd}", std::process::id())))
}

/// Maps the file. The mapping is never undone: it is one page of a short-lived program.
pub(super) fn map(file: &File) -> Result<Memory> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, prot, flags, file.as_raw_fd(), 0) };
    if raw == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the mapping is valid for its size and stays until the process ends.
    Ok(unsafe { Memory::from_raw(raw.cast(), SIZE) }?)
}

/// Bounces the line `rounds` times; the side that serves times each round trip.
pub(super) fn bounce(line: &AtomicU64, serves: bool, rounds: u64, timeout: Duration) -> Result<Samples> {
    let deadline = Instant::now() + timeout;
    let mut samples = Samples::default();
    for n in 0..rounds {
        let (mine, theirs) = if serves { (2 * n + 1, 2 * n + 2) } else { (2 * n + 2, 2 * n + 1) };
        let start = Instant::now();
        if start > deadline {
            return Err("the other side of the floor is gone".into());
        }
        if serves {
            line.store(mine, Ordering::Release);
        }
        let mut spins = 0u32;
        while line.load(Ordering::Acquire) != theirs {
            spins += 1;
            if spins.is_multiple_of(1 << 20) && Instant::now() > deadline {
                return Err("the other side of the floor is gone".into());
            }
        }
        if serves {
            samples.add(start.elapsed());
        } else {
            line.store(mine, Ordering::Release);
        }
    }
    Ok(samples)
}
