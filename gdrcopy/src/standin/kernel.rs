//! The simulated kernel: device files by path, and the texts of `/proc` and `/sys`.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Machine, dma_buf_offset};
use crate::backend::host_page;
use crate::fork::Owner;
use crate::kernel::{Kernel, Linux};

/// One device file. Its descriptors are real ones, made with [`DeviceEnd::open`].
pub trait Device: Send + Sync + std::fmt::Debug {
    /// A new open file.
    ///
    /// # Errors
    /// What this device's `open` says.
    fn open(&self) -> io::Result<OwnedFd>;

    /// Device control.
    ///
    /// # Errors
    /// What this device's `ioctl` says.
    ///
    /// # Safety
    /// `arg` must point to the structure that `request` reads and writes.
    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()>;

    /// A shared, readable and writable mapping, at `at` when given.
    ///
    /// # Errors
    /// What this device's `mmap` says.
    ///
    /// # Safety
    /// With `at`, the range must be the caller's own reservation, with nothing in it.
    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>>;
}

/// Which open file a descriptor belongs to, duplicates included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The file behind a descriptor.
    ///
    /// # Errors
    /// What `dup` and `fstat` say.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let metadata = File::from(fd.try_clone_to_owned()?).metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// The device's end of an open file. It tells when the user's descriptor is closed.
#[derive(Debug)]
pub struct DeviceEnd {
    id: FileId,
    user: RawFd,
    owner: Owner,
}

impl DeviceEnd {
    /// A new open file: the user's descriptor and the device's end.
    ///
    /// # Errors
    /// What `socket` says.
    pub fn open() -> io::Result<(OwnedFd, Self)> {
        // Anything with an inode that is not used again soon.
        let user = OwnedFd::from(UnixDatagram::unbound()?);
        let end =
            Self { id: FileId::of(user.as_fd())?, user: user.as_raw_fd(), owner: Owner::this_process() };
        Ok((user, end))
    }

    /// Which file this is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Whether the user has closed the file. It is the opener's descriptor that counts: a child that another test
    /// has forked may hold a copy for a moment, and closes only that.
    pub fn is_closed(&self) -> bool {
        if !self.owner.is_caller() {
            return false;
        }
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: a place for the answer; a number that is no descriptor is refused.
        if unsafe { libc::fstat(self.user, stat.as_mut_ptr()) } != 0 {
            return true;
        }
        // SAFETY: filled by the call above.
        let stat = unsafe { stat.assume_init() };
        self.id != FileId { device: stat.st_dev, inode: stat.st_ino }
    }
}

/// A kernel with the given device files and dma-bufs, and nothing else.
///
/// The machine's fault `mmap of a dma-buf` is an `errno`; `wrong page of a dma-buf` is by how many pages mappings of
/// them are displaced.
#[derive(Debug)]
pub struct SimulatedKernel {
    machine: Arc<Machine>,
    nodes: BTreeMap<CString, Arc<dyn Device>>,
    texts: BTreeMap<String, String>,
    files: Mutex<HashMap<FileId, Arc<dyn Device>>>,
}

impl SimulatedKernel {
    /// A kernel without devices.
    pub fn new(machine: Arc<Machine>) -> Self {
        Self { machine, nodes: BTreeMap::new(), texts: BTreeMap::new(), files: Mutex::default() }
    }

    /// Adds a device file. The fault `open PATH` of the machine makes its opening fail with an `errno`.
    #[must_use]
    pub fn with_device(mut self, path: &str, device: Arc<dyn Device>) -> Self {
        self.nodes.insert(CString::new(path).expect("a path without NUL"), device);
        self
    }

    /// Adds a file of `/proc` or `/sys`.
    #[must_use]
    pub fn with_text(mut self, path: &str, text: &str) -> Self {
        self.texts.insert(path.into(), text.into());
        self
    }

    fn device(&self, fd: BorrowedFd<'_>) -> io::Result<Arc<dyn Device>> {
        let id = FileId::of(fd)?;
        self.files.lock().get(&id).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTTY))
    }
}

impl Kernel for SimulatedKernel {
    fn open(&self, path: &CStr) -> io::Result<OwnedFd> {
        if let Some(errno) = self.machine.fault(&format!("open {}", path.to_string_lossy())) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let node = self.nodes.get(path).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        let fd = node.open()?;
        self.files.lock().insert(FileId::of(fd.as_fd())?, node.clone());
        Ok(fd)
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        let device = self.device(fd)?;
        // SAFETY: the caller vouches for `arg`.
        unsafe { device.ioctl(fd, request, arg) }
    }

    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>> {
        if let Ok(device) = self.device(fd) {
            // SAFETY: the caller vouches for `at`.
            return unsafe { device.mmap(fd, len, offset, at) };
        }
        if let Some(errno) = self.machine.fault("mmap of a dma-buf") {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let pages = self.machine.fault("wrong page of a dma-buf").map_or(0, i32::unsigned_abs);
        let start = dma_buf_offset(fd)? + u64::from(pages) * host_page() as u64;
        // SAFETY: the caller vouches for `at`.
        unsafe { Linux.mmap(fd, len, start + offset, at) }
    }

    fn read(&self, path: &str) -> io::Result<String> {
        self.texts.get(path).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }
}
