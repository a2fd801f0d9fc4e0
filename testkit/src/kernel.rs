//! The simulated kernel: device files by path, and the texts of `/proc` and `/sys`.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_void};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use gdrcopy::host_page;
use gdrcopy::system::{Kernel, Linux};
use parking_lot::Mutex;

use crate::machine::{Machine, dma_buf_offset};

/// Which open file a descriptor belongs to, duplicates included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The file behind a descriptor.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        File::from(fd.try_clone_to_owned()?).metadata().map(Self::from)
    }
}

impl From<Metadata> for FileId {
    fn from(file: Metadata) -> Self {
        Self { device: file.dev(), inode: file.ino() }
    }
}

/// The device's end of an open file. It notices when this process closes the last descriptor, even if children that other tests
/// forked still have theirs.
#[derive(Debug)]
pub struct DeviceEnd {
    id: FileId,
    peer: UnixStream,
    /// The descriptor that the user got first.
    user: RawFd,
}

impl DeviceEnd {
    /// A new open file: the user's descriptor and the device's end.
    pub fn open() -> io::Result<(OwnedFd, Self)> {
        let (user, peer) = UnixStream::pair()?;
        peer.set_nonblocking(true)?;
        let id = FileId::of(user.as_fd())?;
        let end = Self { id, peer, user: user.as_raw_fd() };
        Ok((user.into(), end))
    }

    /// Which file this is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Whether the user has closed the file.
    pub fn is_closed(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.peer.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one valid entry; a timeout of zero never waits.
        unsafe { libc::poll(&raw mut poll, 1, 0) };
        if poll.revents & libc::POLLHUP != 0 {
            return true;
        }
        // Somebody has a descriptor: mostly this process its first one, else look at all of them.
        let shown = |path: PathBuf| path.metadata().is_ok_and(|file| FileId::from(file) == self.id);
        if shown(format!("/proc/self/fd/{}", self.user).into()) {
            return false;
        }
        let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return false };
        !open.flatten().any(|entry| shown(entry.path()))
    }
}

/// A kernel with the given device files and dma-bufs, and nothing else.
///
/// The machine's fault `mmap of a dma-buf` is an `errno`; `wrong page of a dma-buf` is by how many pages mappings of
/// them are displaced.
#[derive(Debug)]
pub struct SimulatedKernel {
    machine: Arc<Machine>,
    nodes: BTreeMap<CString, Arc<dyn Kernel>>,
    texts: BTreeMap<String, String>,
    files: Mutex<HashMap<FileId, Arc<dyn Kernel>>>,
}

impl SimulatedKernel {
    /// A kernel without devices.
    pub fn new(machine: Arc<Machine>) -> Self {
        let (nodes, texts, files) = Default::default();
        Self { machine, nodes, texts, files }
    }

    /// Adds a device file, whose descriptors are real ones, made with [`DeviceEnd::open`]. The fault `open PATH` of the machine makes its opening fail with an `errno`.
    #[must_use]
    pub fn with_device(mut self, path: &str, device: Arc<dyn Kernel>) -> Self {
        self.nodes.insert(CString::new(path).expect("a path without NUL"), device);
        self
    }

    /// Adds a file of `/proc` or `/sys`.
    #[must_use]
    pub fn with_text(mut self, path: &str, text: &str) -> Self {
        self.texts.insert(path.into(), text.into());
        self
    }

    fn device(&self, fd: BorrowedFd<'_>) -> io::Result<Arc<dyn Kernel>> {
        let id = FileId::of(fd)?;
        self.files.lock().get(&id).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTTY))
    }
}

// SAFETY: the devices map into a place that the kernel chose or that the caller reserved, and unmap nothing.
unsafe impl Kernel for SimulatedKernel {
    fn open(&self, path: &CStr) -> io::Result<OwnedFd> {
        if let Some(errno) = self.machine.fault(&format!("open {}", path.to_string_lossy())) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let node = self.nodes.get(path).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        let fd = node.open(path)?;
        self.files.lock().insert(FileId::of(fd.as_fd())?, node.clone());
        Ok(fd)
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        let device = self.device(fd)?;
        // SAFETY: the caller guarantees `arg`.
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
            // SAFETY: the caller guarantees `at`.
            return unsafe { device.mmap(fd, len, offset, at) };
        }
        if let Some(errno) = self.machine.fault("mmap of a dma-buf") {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let pages = self.machine.fault("wrong page of a dma-buf").map_or(0, i32::unsigned_abs);
        let start = dma_buf_offset(fd)? + u64::from(pages) * host_page() as u64;
        // SAFETY: the caller guarantees `at`.
        unsafe { Linux.mmap(fd, len, start + offset, at) }
    }

    fn read(&self, path: &str) -> io::Result<String> {
        self.texts.get(path).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }
}
