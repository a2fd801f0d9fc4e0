//! What this process has of the card: its HCAs, its open descriptors, and the files it sees.
//!
//! A forked child has none of its parent's threads, so it starts anew at its first use, and the parent's open devices
//! are of no use to it. A child of `vfork` shares the parent's memory until it executes a program: descriptors that it
//! closes stay open in the parent.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use gdsync_device::fork_guard::ForkGuard;
use parking_lot::Mutex;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use crate::address::Link;
use crate::context::Context;
use crate::events::into_program;
use crate::hca::Hca;
use crate::log::log;
use crate::modes::Modes;
use crate::sysfs::{Content, Tree};
use crate::user::ThisProcess;

/// Environment variable with the number of devices, which `gdasync card` passes to the program.
const DEVICES: &str = "GDASYNC_CARD_DEVICES";
/// The most devices.
const MAX_DEVICES: usize = 8;
/// Descriptors below this number can be of the card.
const MAX_FDS: usize = 1 << 16;
/// Bytes of a device file: 2^20 doorbell pages, allocated at first use.
const FILE: usize = 4 << 30;

/// By descriptor: the inode of a file of the card that it had when it was opened, or 0. Read by each interposed call.
static INODES: [AtomicU64; MAX_FDS] = [const { AtomicU64::new(0) }; MAX_FDS];

fn inode(fd: RawFd) -> Option<&'static AtomicU64> {
    usize::try_from(fd).ok().and_then(|fd| INODES.get(fd))
}

/// Whether a descriptor may be one of the card: one load.
pub(crate) fn may_be_ours(fd: RawFd) -> bool {
    inode(fd).is_some_and(|inode| inode.load(Ordering::Relaxed) != 0)
}

/// What a descriptor of the card is.
#[derive(Clone, Debug)]
pub(crate) enum Open {
    Device {
        context: Arc<Context>,
        device: usize,
    },
    /// A directory of the emulated files.
    Dir(String),
    /// A channel of completions or DevX events of this context.
    Channel(Weak<Context>),
    /// Opened by the parent process.
    Inherited,
}

/// The state of one process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    /// Tells a child from its parent also where both have the same number, in different namespaces.
    fork_guard: ForkGuard,
    /// Processes that this one was forked from, directly or not.
    parents: *const Process,
    link: Link,
    hcas: Vec<OnceLock<Hca>>,
    /// Held while an HCA starts.
    starting: Mutex<()>,
    tree: OnceLock<Tree>,
    open: Mutex<HashMap<RawFd, Open>>,
}

// SAFETY: the pointer is null or to a box that is never freed, which is shared.
unsafe impl Send for Process {}
// SAFETY: the pointer is null or to a box that is never freed, which is shared.
unsafe impl Sync for Process {}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

impl Process {
    /// That of this process, made by the first call. Never freed: threads may use it until the process ends.
    pub(crate) fn this() -> &'static Self {
        loop {
            if let Some(process) = Self::existing() {
                return process;
            }
            let parents = PROCESS.load(Ordering::Acquire);
            let new = Box::into_raw(Box::new(Self::new(parents)));
            if PROCESS.compare_exchange(parents, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: it comes from `into_raw` above and was not published.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }

    /// That of this process, if there is one.
    fn existing() -> Option<&'static Self> {
        let pid = std::process::id();
        let mut next = PROCESS.load(Ordering::Acquire).cast_const();
        // SAFETY: null, or a box that is never freed, published with Release.
        while let Some(process) = unsafe { next.as_ref() } {
            if process.pid == pid && process.fork_guard.is_here() {
                return Some(process);
            }
            next = process.parents;
        }
        None
    }

    fn new(parents: *const Self) -> Self {
        let devices = std::env::var(DEVICES).ok().and_then(|text| text.parse().ok()).unwrap_or(1);
        let devices = usize::min(devices, MAX_DEVICES);
        Self {
            pid: std::process::id(),
            fork_guard: ForkGuard::default(),
            parents,
            link: Link::from_env(),
            hcas: (0..devices).map(|_| OnceLock::new()).collect(),
            starting: Mutex::default(),
            tree: OnceLock::new(),
            open: Mutex::default(),
        }
    }

    /// The emulated files.
    pub(crate) fn tree(&self) -> &Tree {
        self.tree.get_or_init(|| {
            let tree = Tree::new(self.hcas.len(), self.link);
            match Modes::from_env() {
                Ok(modes) if modes.no_peermem => tree.without_peer_memory(),
                _ => tree,
            }
        })
    }

    /// The HCA of a device, started by the first call. One that does not start is tried again by the next call.
    pub(crate) fn hca(&'static self, device: usize) -> Result<&'static Hca, Errno> {
        let hca = self.hcas.get(device).ok_or(Errno::NODEV)?;
        let _one = self.starting.lock();
        if let Some(hca) = hca.get() {
            return Ok(hca);
        }
        let started = Hca::start(self.link)?;
        Ok(hca.get_or_init(|| started))
    }

    /// What a file holds.
    pub(crate) fn text(&'static self, content: &Content) -> Result<String, Errno> {
        match content {
            Content::Text(text) => Ok(text.clone()),
            Content::Address(device, address) => Ok(address.text(self.hca(*device)?.port)),
        }
    }

    /// Opens a device.
    pub(crate) fn open_device(&'static self, device: usize) -> Result<RawFd, Errno> {
        let hca = self.hca(device)?;
        let file = gdsync_device::memory::memfd(c"uverbs", FILE).map_err(|error| {
            log!("a device needs a sparse memory file of {FILE} bytes: {error}");
            Errno::NOMEM
        })?;
        let doorbells = rustix::io::fcntl_dupfd_cloexec(&file, 0)?;
        let context = Arc::new(Context::new(hca, doorbells));
        self.adopt(file, Open::Device { context, device })
    }

    /// Opens a directory of the emulated files. Its descriptor is a file without contents.
    pub(crate) fn open_dir(&self, path: &str) -> Result<RawFd, Errno> {
        let file = rustix::fs::memfd_create(c"directory", MemfdFlags::CLOEXEC)?;
        self.adopt(file, Open::Dir(path.to_owned()))
    }

    /// Gives a descriptor to the program, and knows it from now on.
    fn adopt(&self, file: OwnedFd, open: Open) -> Result<RawFd, Errno> {
        self.know(file.as_fd(), open)?;
        Ok(into_program(file))
    }

    fn know(&self, file: BorrowedFd<'_>, open: Open) -> Result<(), Errno> {
        let fd = file.as_raw_fd();
        let slot = inode(fd).ok_or(Errno::MFILE)?;
        let number = rustix::fs::fstat(file)?.st_ino;
        let old = self.open.lock().insert(fd, open);
        slot.store(number, Ordering::Release);
        // Without the lock: a context that ends waits for its HCA.
        drop(old);
        Ok(())
    }

    /// What a descriptor is, if it is of the card. One that was closed behind our back, and opened again as something
    /// else, is not.
    pub(crate) fn find(fd: RawFd) -> Option<Open> {
        let number = inode(fd)?.load(Ordering::Acquire);
        if number == 0 {
            return None;
        }
        // SAFETY: used for one call, which fails if the descriptor is closed.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        if rustix::fs::fstat(file).is_ok_and(|stat| stat.st_ino == number) {
            let open = Self::existing().and_then(|process| process.open.lock().get(&fd).cloned());
            return Some(open.unwrap_or(Open::Inherited));
        }
        Self::forget(fd);
        None
    }

    /// A descriptor is about to be closed. One of the parent's is left to the parent, whose memory this may be.
    pub(crate) fn forget(fd: RawFd) {
        let Some(process) = Self::existing() else { return };
        let Some(old) = process.open.lock().remove(&fd) else { return };
        if let Some(slot) = inode(fd) {
            slot.store(0, Ordering::Release);
        }
        if let Open::Channel(context) = &old
            && let Some(context) = context.upgrade()
        {
            context.close_channel(fd);
        }
    }

    /// As [`Process::forget`], of all in a range.
    pub(crate) fn forget_range(range: std::ops::Range<RawFd>) {
        let Some(process) = Self::existing() else { return };
        let known: Vec<_> = process.open.lock().keys().copied().filter(|fd| range.contains(fd)).collect();
        known.into_iter().for_each(Self::forget);
    }

    /// The program duplicated a descriptor.
    pub(crate) fn duplicated(from: RawFd, to: RawFd) {
        if let (Some(open), Some(process)) = (Self::find(from), Self::existing()) {
            if let Open::Channel(context) = &open
                && let Some(context) = context.upgrade()
            {
                context.duplicate_channel(from, to);
            }
            // SAFETY: the program has just got it, and this call only looks at it.
            let file = unsafe { BorrowedFd::borrow_raw(to) };
            _ = process.know(file, open);
        }
    }

    /// Runs a write command.
    pub(crate) fn write(&self, context: &Arc<Context>, bytes: &[u8]) -> Result<(), Errno> {
        context.write(&ThisProcess, bytes)?;
        self.know_channels(context);
        Ok(())
    }

    /// Runs an `RDMA_VERBS_IOCTL`.
    pub(crate) fn ioctl(&self, context: &Arc<Context>, addr: u64) -> Result<(), Errno> {
        context.ioctl(&ThisProcess, addr)?;
        self.know_channels(context);
        Ok(())
    }

    fn know_channels(&self, context: &Arc<Context>) {
        for fd in context.take_new_channels() {
            // SAFETY: the program has not got it yet, so it is open.
            let file = unsafe { BorrowedFd::borrow_raw(fd) };
            _ = self.know(file, Open::Channel(Arc::downgrade(context)));
        }
    }
}

/// A file in memory with this text.
pub(crate) fn text_file(text: &str) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create(c"sysfs", MemfdFlags::CLOEXEC)?;
    rustix::io::write(&file, text.as_bytes())?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file)
}
