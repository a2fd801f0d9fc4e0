//! The system calls that backends make: one seam, so that a simulated machine can stand in for the kernel.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// The kernel, as far as backends need it.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// Opens a device file for reading and writing, closed on exec.
    ///
    /// # Errors
    /// What `open` says.
    fn open(&self, path: &CStr) -> io::Result<OwnedFd>;

    /// Device control.
    ///
    /// # Errors
    /// What `ioctl` says.
    ///
    /// # Safety
    /// `arg` must point to the structure that `request` of this device reads and writes.
    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()>;

    /// A shared, readable and writable mapping of `len` bytes at `offset` of `fd`, at `at` when given:
    /// an address range that the caller reserved.
    ///
    /// # Errors
    /// What `mmap` says.
    ///
    /// # Safety
    /// With `at`, the range must be the caller's own, with nothing in it that is still of use.
    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>>;

    /// Reads a file of `/proc` or `/sys`.
    ///
    /// # Errors
    /// What the file system says.
    fn read(&self, path: &str) -> io::Result<String>;
}

/// The kernel this process runs on.
#[derive(Debug)]
pub(crate) struct Linux;

/// The result of a call that gives -1 and `errno`.
pub(crate) fn check(result: i32) -> io::Result<i32> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Kernel for Linux {
    fn open(&self, path: &CStr) -> io::Result<OwnedFd> {
        // SAFETY: a terminated string and flags; nothing else is passed.
        let fd = check(unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
        // SAFETY: just opened, owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        loop {
            // SAFETY: the caller vouches for `arg`.
            match check(unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), arg) }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map(drop),
            }
        }
    }

    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>> {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let (hint, fixed) = at.map_or((std::ptr::null_mut(), 0), |at| (at.as_ptr().cast(), libc::MAP_FIXED));
        // SAFETY: without MAP_FIXED no existing mapping is touched; with it, the caller vouches for the range.
        let raw = unsafe { libc::mmap(hint, len, prot, libc::MAP_SHARED | fixed, fd.as_raw_fd(), offset) };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(raw.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))
    }

    fn read(&self, path: &str) -> io::Result<String> {
        std::fs::read_to_string(path)
    }
}
