//! The emulated GPU of the kernel module's tests: `kmod/tests/provider`, by its device file.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::ioctl::{Direction, opcode};

const PATH: &str = "/dev/gdr_provider";

/// Granularity of objects and addresses, bytes.
pub const CHUNK: u64 = 64 << 10;

/// Where the memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Pages of the kernel.
    Ram = 0,
    /// The BAR of a PCI device, if the machine has it.
    Bar = 1,
}

/// Faults that can be set, for all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `errno` of `nvidia_p2p_get_pages`.
    Get = 0,
    /// Version of the page table.
    Version,
    /// Number of the page size, plus 1.
    PageSize,
    /// So many entries too few.
    Entries,
    /// The first page lies askew.
    Misaligned,
    /// Success without a table.
    NoTable,
    /// `errno` of `nvidia_p2p_put_pages`, which then keeps the pages: persistent ones until this ends, others until they are
    /// freed.
    Put,
    /// Milliseconds before `nvidia_p2p_get_pages` returns, while callbacks may come.
    Delay,
    /// `errno` of attaching to a dma-buf.
    Attach,
    /// `errno` of mapping a dma-buf.
    Map,
    /// A dma-buf with half a page.
    Odd,
    /// The page table says that the CPU may cache.
    Cacheable,
    /// The GPU copies to where dma-bufs move until this is ended.
    Copying,
}

/// Live objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct State {
    /// Objects of memory.
    pub objects: u64,
    /// Pieces of [`CHUNK`] bytes.
    pub chunks: u64,
    /// Page tables given out and not taken back.
    pub pins: u64,
    /// Page tables in memory.
    pub tables: u64,
    /// Callbacks made so far.
    pub callbacks: u64,
    /// Calls so far that the interface forbids.
    pub misuse: u64,
    /// Importers of dma-bufs.
    pub attachments: u64,
    /// Mappings of importers.
    pub dma_mappings: u64,
}

fn call<T>(file: &File, direction: Direction, nr: u8, arg: &mut T) -> io::Result<()> {
    let request = opcode::from_components(direction, b'G', nr, size_of::<T>());
    // SAFETY: the request number has the size of the structure, and the driver touches no more than that.
    match unsafe { libc::ioctl(file.as_raw_fd(), request.into(), std::ptr::from_mut(arg)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn open() -> io::Result<File> {
    File::options().read(true).write(true).open(PATH)
}

/// Whether the driver is loaded.
pub fn is_there() -> bool {
    Path::new(PATH).exists()
}

/// Sets a fault; 0 clears it.
pub fn set_fault(fault: Fault, value: i32) -> io::Result<()> {
    call(&open()?, Direction::Write, 6, &mut (fault as u32, value))
}

/// Counts the live objects.
pub fn state() -> io::Result<State> {
    let mut state = State::default();
    call(&open()?, Direction::Read, 7, &mut state)?;
    Ok(state)
}

/// An object of memory. Closing it removes it from all addresses.
#[derive(Debug)]
pub struct Object {
    file: File,
}

impl Object {
    /// Zeroed memory; `size` in whole [`CHUNK`]s.
    pub fn new(size: u64, backing: Backing) -> io::Result<Self> {
        let file = open()?;
        call(&file, Direction::Write, 1, &mut [size, backing as u64])?;
        Ok(Self { file })
    }

    /// The open file: read and written at offsets as a GPU would.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Shows the object at addresses of this process.
    ///
    /// # Errors
    /// `EEXIST` where addresses are taken.
    pub fn show(&self, va: u64, offset: u64, len: u64) -> io::Result<()> {
        call(&self.file, Direction::Write, 2, &mut [va, offset, len])
    }

    /// Hides the addresses, with the callbacks of a free.
    ///
    /// # Errors
    /// `EINVAL` where no range begins.
    pub fn hide(&self, va: u64) -> io::Result<()> {
        call(&self.file, Direction::Write, 3, &mut [va])
    }

    /// A dma-buf of a part.
    pub fn export(&self, offset: u64, len: u64, read_only: bool) -> io::Result<OwnedFd> {
        #[repr(C)]
        struct Export {
            offset: u64,
            len: u64,
            read_only: u32,
            fd: i32,
        }
        let mut args = Export { offset, len, read_only: read_only.into(), fd: -1 };
        call(&self.file, Direction::ReadWrite, 4, &mut args)?;
        // SAFETY: a new descriptor, nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(args.fd) })
    }

    /// Moves the object to other memory, and notifies the importers of its dma-bufs.
    ///
    /// # Errors
    /// `EBUSY` while page tables have it.
    pub fn move_to(&self, backing: Backing) -> io::Result<()> {
        call(&self.file, Direction::Write, 5, &mut [backing as u64])
    }
}

/// Whether `GDRCOPY_TEST_KMOD` asks for it.
pub fn is_wanted() -> bool {
    std::env::var_os("GDRCOPY_TEST_KMOD").is_some()
}

/// Addresses that no machine of this process has had: the emulated GPU does not know of machines.
pub(crate) fn addresses(first: u64) -> u64 {
    static MACHINES: AtomicU64 = AtomicU64::new(0);
    first + (MACHINES.fetch_add(1, Ordering::Relaxed) << 36)
}

/// A counter of the module, of `/proc/driver/gdrdrv/stats`.
///
/// # Panics
/// Without the module or such a counter.
pub fn counter(name: &str) -> u64 {
    let stats = std::fs::read_to_string("/proc/driver/gdrdrv/stats").expect("the module's counters");
    let value = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {stats}"))
}

/// Memory of the emulated GPU: behind PCI where there is room, as on a real one.
pub(crate) fn memory(size: usize) -> io::Result<Object> {
    let size = (size as u64).next_multiple_of(CHUNK);
    Object::new(size, Backing::Bar).or_else(|_| Object::new(size, Backing::Ram))
}
