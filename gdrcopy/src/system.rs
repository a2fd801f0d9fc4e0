//! What the library runs on: the kernel's device files and the CUDA driver. Tests and emulators may replace both.
//!
//! [`GdrBuilder::system`](crate::GdrBuilder::system) opens the library on a [`System`]. Replace the kernel with a
//! [`Kernel`] that serves some device files itself and leaves the others to [`Linux`], and the CUDA driver with a
//! [`CudaSource`]: an object that implements [`Cuda`], or a table of entry points
//! ([`EntryPoints`](crate::cuda::EntryPoints)).

use std::ffi::{CStr, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use once_cell::sync::OnceCell;
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::cuda::{Cuda, CudaSource, Installed};
use crate::error::Result;

/// The system calls that backends make.
///
/// # Safety
/// [`mmap`](Self::mmap) must return a mapping of the whole length, readable and writable, that nothing but its caller
/// unmaps: the library accesses and unmaps it without further checks.
pub unsafe trait Kernel: Send + Sync + fmt::Debug {
    /// Opens a device file for reading and writing, closed on exec.
    ///
    /// # Errors
    /// Those of `open`.
    fn open(&self, path: &CStr) -> io::Result<OwnedFd>;

    /// Calls a device's `ioctl`.
    ///
    /// # Errors
    /// Those of `ioctl`.
    ///
    /// # Safety
    /// `arg` must point to the structure that `request` of this device reads and writes.
    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()>;

    /// Makes a shared, readable and writable mapping of `len` bytes at `offset` of `fd`; at address `at` if given, which the
    /// caller has reserved.
    ///
    /// # Errors
    /// Those of `mmap`.
    ///
    /// # Safety
    /// With `at`, the range must be the caller's own, and nothing in it may still be in use.
    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>>;

    /// Reads a file of `/proc` or `/sys`; there is none unless this is implemented.
    ///
    /// # Errors
    /// Those of `open` and `read`.
    fn read(&self, _path: &str) -> io::Result<String> {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// The kernel that this process runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linux;

// SAFETY: the kernel makes the mapping, and this process alone unmaps it.
unsafe impl Kernel for Linux {
    fn open(&self, path: &CStr) -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        loop {
            // SAFETY: `arg` is what `request` needs: the caller guarantees it.
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
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let (hint, fixed) = match at {
            Some(at) => (at.as_ptr().cast(), MapFlags::FIXED),
            None => (std::ptr::null_mut(), MapFlags::empty()),
        };
        // SAFETY: without MAP_FIXED no existing mapping changes; with it, the range is the caller's own.
        let raw = unsafe { rustix::mm::mmap(hint, len, prot, MapFlags::SHARED | fixed, fd, offset) }?;
        NonNull::new(raw.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))
    }

    fn read(&self, path: &str) -> io::Result<String> {
        std::fs::read_to_string(path)
    }
}

/// Turns the result of a call that returns -1 and sets `errno` into a `Result`.
pub(crate) fn check(result: i32) -> io::Result<i32> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A kernel and a CUDA driver. Clones share the CUDA driver, which is initialised at its first use.
#[derive(Clone, Debug)]
pub struct System {
    pub(crate) kernel: Arc<dyn Kernel>,
    cuda: Arc<LazyCuda>,
}

/// CUDA, loaded and initialised at its first use: afterwards the process cannot fork children that use CUDA.
#[derive(Debug)]
struct LazyCuda {
    source: Box<dyn CudaSource>,
    /// A forked child must not ask for it while a thread of its parent may be making it: it would wait for a thread that it does
    /// not have. So only the process that owns a library asks.
    driver: OnceCell<Arc<dyn Cuda>>,
}

impl System {
    /// This machine: [`Linux`] and the installed CUDA driver.
    pub fn real() -> Self {
        Self::new(Arc::new(Linux), Installed)
    }

    /// A system of these parts. `None` of type `Option<Arc<dyn Cuda>>` is a system without CUDA.
    pub fn new(kernel: Arc<dyn Kernel>, cuda: impl CudaSource + 'static) -> Self {
        Self { kernel, cuda: Arc::new(LazyCuda { source: Box::new(cuda), driver: OnceCell::new() }) }
    }

    /// The kernel.
    pub fn kernel(&self) -> &Arc<dyn Kernel> {
        &self.kernel
    }

    /// The CUDA driver; the first call initialises it.
    ///
    /// # Errors
    /// The error of [`CudaSource::initialise`]. The next call tries again.
    pub fn cuda(&self) -> Result<&Arc<dyn Cuda>> {
        self.cuda.driver.get_or_try_init(|| self.cuda.source.initialise())
    }

    /// The version of CUDA, without initialising it.
    pub(crate) fn cuda_version(&self) -> Result<u32> {
        self.cuda.source.version()
    }
}
