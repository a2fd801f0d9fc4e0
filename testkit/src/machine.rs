//! The simulated machine: physical GPU memory, the addresses under which CUDA shows it, mappings of it, and faults.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use gdrcopy::cuda::MemoryKind;
use gdrcopy::system::{Kernel, Linux};
use parking_lot::Mutex;
use rustix::fs::MemfdFlags;
use rustix::mm::Advice;

use crate::kmod::{self, CHUNK};

/// The machine, shared by its CUDA, its kernel and the test.
#[derive(Debug)]
pub struct Machine {
    /// GPU memory and its allocations.
    pub memory: Mutex<Memory>,
    /// The settings of CUDA.
    pub cuda: Mutex<CudaSettings>,
    faults: Mutex<HashMap<String, i32>>,
}

impl Machine {
    /// A machine with `gpus` GPUs of 1 GiB and as much BAR1 each.
    pub fn new(gpus: i32) -> Arc<Self> {
        let memory = Mutex::new(Memory::new(gpus));
        Arc::new(Self { memory, cuda: Mutex::default(), faults: Mutex::default() })
    }

    /// From now on the named operation fails with this code (an `errno`, a CUDA or a driver status, as the
    /// operation has it); 0 ends it. The names are those given to [`Machine::fault`] by the devices.
    pub fn fail(&self, operation: &str, code: i32) {
        let mut faults = self.faults.lock();
        if code == 0 {
            faults.remove(operation)
        } else {
            faults.insert(operation.into(), code)
        };
    }

    /// The code with which an operation shall fail.
    pub fn fault(&self, operation: &str) -> Option<i32> {
        self.faults.lock().get(operation).copied()
    }
}

/// The simulated driver's information about itself and its GPUs.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// `cuDriverGetVersion`.
    pub driver_version: u32,
    /// Device attributes by number; one that is not here is refused, as by a driver that does not know it.
    pub attributes: HashMap<u32, i32>,
    /// The product name of every GPU.
    pub name: String,
    /// The PCI address of every GPU, in place of [`pci`].
    pub pci: Option<String>,
}

impl Default for CudaSettings {
    /// An H200 under CUDA 13.0.
    fn default() -> Self {
        // Integrated; host page tables; VMM; POSIX handles; RDMA with VMM; RDMA; flush from the host; write
        // ordering of the owner; dma-buf.
        let attributes =
            [(18, 0), (100, 0), (102, 1), (103, 1), (110, 1), (116, 1), (117, 1), (118, 100), (124, 1)];
        Self { driver_version: 13000, attributes: attributes.into(), name: "Simulated GPU".into(), pci: None }
    }
}

/// Allocations of `cuMemAlloc` share objects of this size, as on real GPUs; bytes.
const BLOCK: usize = 2 << 20;
/// Alignment of `cuMemAlloc`, bytes.
const GRAIN: usize = 512;
/// Memory of each GPU, bytes.
const CAPACITY: usize = 1 << 30;
/// The resource manager's client of the CUDA driver of this process.
pub const CLIENT: u32 = 0xc1d0_0001;
/// The resource manager's handles of memory objects count from here.
const FIRST_OBJECT: u32 = 0x5c00_0001;

/// Where the bytes of an object are.
#[derive(Debug)]
enum Bytes {
    File(File),
    /// See [`kmod`].
    Provider(kmod::Object),
}

/// Physical memory of one GPU; freed with the last reference.
#[derive(Debug)]
pub struct Object {
    /// The GPU, as a CUDA ordinal.
    pub gpu: i32,
    /// Bytes.
    pub size: usize,
    bytes: Bytes,
}

impl Object {
    /// Zeroed memory on a GPU.
    pub fn new(gpu: i32, size: usize) -> io::Result<Arc<Self>> {
        let bytes = if kmod::is_wanted() {
            Bytes::Provider(kmod::memory(size)?)
        } else {
            Bytes::File(memory_file(c"gpu-memory", size as u64)?)
        };
        Ok(Arc::new(Self { gpu, size, bytes }))
    }

    fn file(&self) -> &File {
        match &self.bytes {
            Bytes::File(file) => file,
            Bytes::Provider(object) => object.file(),
        }
    }

    /// The file to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file().as_fd()
    }

    /// Writes bytes, as the GPU would.
    pub fn write(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        self.file().write_all_at(data, offset as u64)
    }

    /// Reads bytes, as the GPU would.
    pub fn read(&self, offset: usize, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file().read_exact_at(&mut bytes, offset as u64).map(|()| bytes)
    }

    /// A dma-buf of the memory from `offset` on: a descriptor that stands at this position, see
    /// [`dma_buf_offset`].
    pub fn dma_buf(&self, offset: u64) -> io::Result<OwnedFd> {
        if let Bytes::Provider(object) = &self.bytes {
            return object.export(offset, self.size as u64 - offset, false);
        }
        let path = format!("/proc/self/fd/{}", self.file().as_raw_fd());
        // Opened anew, because a duplicate would share its position.
        let mut file = File::options().read(true).write(true).open(path)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(file.into())
    }
}

/// Where a simulated dma-buf begins in its object: a kernel adds this to the offset of an `mmap`. It is 0 for
/// any other descriptor of an object.
pub fn dma_buf_offset(fd: BorrowedFd<'_>) -> io::Result<u64> {
    File::from(fd.try_clone_to_owned()?).stream_position()
}

/// An allocation: an address range that shows a part of an object.
#[derive(Clone, Debug)]
pub struct VaRange {
    /// First address.
    pub base: u64,
    /// Bytes.
    pub len: usize,
    /// The physical memory.
    pub object: Arc<Object>,
    /// Where in the object the range begins.
    pub offset: usize,
    /// How it was made.
    pub kind: MemoryKind,
    /// Never the same for two allocations.
    pub buffer_id: u64,
}

/// The free callback of `nvidia_p2p_get_pages`.
pub trait FreeWatcher: Send + Sync + std::fmt::Debug {
    /// No allocation shows the object any more. Called with the machine's memory locked.
    fn freed(&self, object: &Arc<Object>);
}

/// All GPU memory of the machine.
#[derive(Debug)]
pub struct Memory {
    gpus: i32,
    ranges: BTreeMap<u64, VaRange>,
    /// The object from which small allocations of each GPU come: first address, object, bytes used.
    open_blocks: BTreeMap<i32, (u64, Arc<Object>, usize)>,
    /// Every object that was ever shown, by its handle in the resource manager.
    objects: BTreeMap<u32, Weak<Object>>,
    next_object: u32,
    next_va: u64,
    next_id: u64,
    watchers: Vec<Weak<dyn FreeWatcher>>,
}

impl Memory {
    pub(crate) fn new(gpus: i32) -> Self {
        let (ranges, open_blocks, objects, watchers) = Default::default();
        // Where the driver puts its allocations on x86.
        let next_va = 0x7f40_0000_0000;
        let next_va = if kmod::is_wanted() { kmod::addresses(next_va >> 8) } else { next_va };
        Self { gpus, ranges, open_blocks, objects, next_object: FIRST_OBJECT, next_va, next_id: 1, watchers }
    }

    /// How many GPUs there are.
    pub fn gpus(&self) -> i32 {
        self.gpus
    }

    /// Allocates like `cuMemAlloc` ([`MemoryKind::Malloc`], sharing 2 MiB objects) or, for any
    /// other kind, as an object of its own. `ENOMEM` where the GPU is full.
    pub fn alloc(&mut self, gpu: i32, len: usize, kind: MemoryKind) -> io::Result<u64> {
        if len > CAPACITY {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let wanted = len.max(1).next_multiple_of(GRAIN);
        let shared = kind == MemoryKind::Malloc && wanted < BLOCK;
        let (va, object, offset) = match self.open_blocks.get(&gpu) {
            Some((va, object, used)) if shared && used + wanted <= BLOCK => (*va, object.clone(), *used),
            _ => {
                let size = wanted.next_multiple_of(BLOCK);
                if self.in_use(gpu) + size > CAPACITY {
                    return Err(io::Error::from_raw_os_error(libc::ENOMEM));
                }
                let va = self.next_va;
                self.next_va += size as u64;
                (va, Object::new(gpu, size)?, 0)
            }
        };
        if shared {
            self.open_blocks.insert(gpu, (va, object.clone(), offset + wanted));
        }
        Ok(self.insert(va + offset as u64, len, object, offset, kind))
    }

    /// Shows a part of an object at an address.
    pub fn insert(
        &mut self,
        base: u64,
        len: usize,
        object: Arc<Object>,
        offset: usize,
        kind: MemoryKind,
    ) -> u64 {
        let buffer_id = self.next_id;
        self.next_id += 1;
        self.object_handle(&object);
        let range = VaRange { base, len, object, offset, kind, buffer_id };
        if let Some((memory, (va, offset, len))) = self.shown_by(&range) {
            memory.show(va, offset, len).expect("free addresses");
        }
        self.ranges.insert(base, range);
        base
    }

    /// The chunks of the emulated GPU that this allocation alone shows, where memory is of that kind.
    fn shown_by<'a>(&self, range: &'a VaRange) -> Option<(&'a kmod::Object, (u64, u64, u64))> {
        let Bytes::Provider(memory) = &range.object.bytes else { return None };
        let shown = chunks(range);
        let shared = self.ranges.values().any(|other| chunks(other).0 == shown.0);
        (!shared).then_some((memory, shown))
    }

    /// The handle of an object in the resource manager, under [`CLIENT`].
    pub fn object_handle(&mut self, object: &Arc<Object>) -> u32 {
        self.objects.retain(|_, known| known.strong_count() > 0);
        let known = self.objects.iter().find(|(_, known)| std::ptr::eq(known.as_ptr(), Arc::as_ptr(object)));
        if let Some((&handle, _)) = known {
            return handle;
        }
        let handle = self.next_object;
        self.next_object += 1;
        self.objects.insert(handle, Arc::downgrade(object));
        handle
    }

    /// The live object of a handle.
    pub fn object_by_handle(&self, handle: u32) -> Option<Arc<Object>> {
        self.objects.get(&handle)?.upgrade()
    }

    /// Memory of live objects of a GPU, bytes.
    fn in_use(&self, gpu: i32) -> usize {
        self.objects
            .values()
            .filter_map(Weak::upgrade)
            .filter(|held| held.gpu == gpu)
            .map(|held| held.size)
            .sum()
    }

    /// How many allocations there are.
    pub fn allocations(&self) -> usize {
        self.ranges.len()
    }

    /// Frees an allocation; its object lives as long as it is referenced.
    pub fn free(&mut self, base: u64) -> Option<VaRange> {
        let range = self.ranges.remove(&base)?;
        if let Some((memory, (va, ..))) = self.shown_by(&range) {
            memory.hide(va).expect("addresses that were shown");
        }
        if !self.ranges.values().any(|other| Arc::ptr_eq(&other.object, &range.object)) {
            self.watchers.iter().filter_map(Weak::upgrade).for_each(|watcher| watcher.freed(&range.object));
        }
        Some(range)
    }

    /// Registers a callback for freed objects.
    pub fn watch(&mut self, watcher: Weak<dyn FreeWatcher>) {
        self.watchers.push(watcher);
    }

    /// An allocation whose object lies under an address, and the place in the object. Objects go on to both sides
    /// of an allocation: drivers work in pages, so what else its first and last page hold is within reach.
    pub fn backing(&self, addr: u64) -> Option<(&VaRange, usize)> {
        self.find(addr).into_iter().chain(self.ranges.values()).find_map(|range| {
            let offset = addr.checked_sub(range.base - range.offset as u64)?;
            let offset = usize::try_from(offset).ok().filter(|offset| *offset < range.object.size)?;
            Some((range, offset))
        })
    }

    /// What the driver exports at an address: the object, the place in it, and how many bytes follow. Virtual memory ends with its
    /// mapping, other memory with its object.
    pub(crate) fn exported(&self, addr: u64) -> Option<(Arc<Object>, usize, usize)> {
        let of = |range: &VaRange| {
            if !matches!(range.kind, MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool) {
                return None;
            }
            let is_virtual = range.kind == MemoryKind::Vmm;
            let (skip, len) = if is_virtual { (0, range.len) } else { (range.offset, range.object.size) };
            let inside = usize::try_from(addr.checked_sub(range.base - skip as u64)?).ok()?;
            let rest = len.checked_sub(inside).filter(|rest| *rest > 0)?;
            Some((range.object.clone(), range.offset - skip + inside, rest))
        };
        self.find(addr).into_iter().chain(self.ranges.values()).find_map(of)
    }

    /// An allocation with at least a byte in `len` bytes at `addr`.
    pub fn touching(&self, addr: u64, len: u64) -> Option<&VaRange> {
        let (_, range) = self.ranges.range(..addr + len).next_back()?;
        (range.base + range.len as u64 > addr).then_some(range)
    }

    /// The allocation that contains an address.
    pub fn find(&self, addr: u64) -> Option<&VaRange> {
        let (_, range) = self.ranges.range(..=addr).next_back()?;
        (addr - range.base < range.len as u64).then_some(range)
    }
}

/// The PCI address of a simulated GPU.
pub fn pci(ordinal: i32) -> String {
    format!("0000:{:02x}:00.0", 0x0f + ordinal)
}

/// The chunks that an allocation is shown with, by first address: what shares an object lies in its pages.
fn chunks(range: &VaRange) -> (u64, u64, u64) {
    let (offset, len) = (range.offset as u64, range.len as u64);
    if range.kind == MemoryKind::Malloc {
        return (range.base - offset, 0, (range.object.size as u64).next_multiple_of(CHUNK));
    }
    let skip = offset % CHUNK;
    (range.base - skip, offset - skip, (skip + len).next_multiple_of(CHUNK))
}

/// A mapping of physical memory in the user's address space. The user unmaps it without a word.
#[derive(Debug)]
pub(crate) struct Vma {
    addr: usize,
    len: usize,
    /// What lies at the first byte.
    inode: u64,
    offset: u64,
}

impl Vma {
    /// Maps the first `len` bytes of `pieces` (object, first byte, bytes), one behind the other.
    ///
    /// # Safety
    /// With `at`, the range must be the caller's own reservation, with nothing in it.
    pub(crate) unsafe fn new(
        pieces: &[(Arc<Object>, usize, usize)],
        len: usize,
        at: Option<NonNull<u8>>,
    ) -> io::Result<Self> {
        let Some((first, offset, _)) = pieces.first() else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let inode = File::from(first.fd().try_clone_to_owned()?).metadata()?.ino();
        let start = at.map_or_else(|| reserve(len), Ok)?;
        let mut done = 0;
        for (object, offset, piece) in pieces {
            let part = (*piece).min(len - done);
            if part == 0 {
                break;
            }
            // SAFETY: inside the reservation.
            let here = unsafe { start.add(done) };
            // SAFETY: a part of the reservation that nothing was mapped into so far.
            unsafe { Linux.mmap(object.fd(), part, *offset as u64, Some(here)) }?;
            done += part;
        }
        Ok(Self { addr: start.as_ptr().expose_provenance(), len, inode, offset: *offset as u64 })
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.addr)).expect("mapped above address 0")
    }

    /// Whether the two cover a common byte; then the older one is gone.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.addr < other.addr + other.len && other.addr < self.addr + self.len
    }

    /// Whether the user has not unmapped it.
    pub(crate) fn is_there(&self) -> bool {
        fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.lines().any(|line| self.shows(line)))
    }

    /// Whether a line of `/proc/self/maps` has this mapping, perhaps merged with a neighbour.
    fn shows(&self, line: &str) -> bool {
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let fields: Vec<_> = line.split_whitespace().collect();
        let [range, _, offset, _, inode, ..] = fields[..] else { return false };
        let Some((Some(start), Some(end))) = range.split_once('-').map(|(start, end)| (hex(start), hex(end)))
        else {
            return false;
        };
        let addr = self.addr as u64;
        (start..end).contains(&addr)
            && inode.parse() == Ok(self.inode)
            && hex(offset).is_some_and(|offset| offset + (addr - start) == self.offset)
    }

    /// Takes the pages away; the range stays, and an access raises `SIGBUS`.
    pub(crate) fn zap(&self) {
        if !self.is_there() {
            return;
        }
        // Every access is beyond the end of an empty file.
        let empty = memory_file(c"taken-away", 0).expect("a memory file");
        // SAFETY: the range is still what this device mapped; that its user loses it is the point.
        unsafe { Linux.mmap(empty.as_fd(), self.len, 0, Some(self.ptr())) }.expect("room for a mapping");
    }
}

fn reserve(len: usize) -> io::Result<NonNull<u8>> {
    let file = memory_file(c"reserved", 0)?;
    // SAFETY: no address is given.
    unsafe { Linux.mmap(file.as_fd(), len, 0, None) }
}

/// A file of `len` zero bytes that exists as long as a descriptor or a mapping of it.
pub(crate) fn memory_file(name: &CStr, len: u64) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}

/// A mapping of a memory file; unmapped when dropped. Forked children have a hole there.
#[derive(Debug)]
pub(crate) struct Mapped {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the value holds addresses only; it never accesses the bytes.
unsafe impl Send for Mapped {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub(crate) fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: no address is given, so no existing mapping changes.
        let ptr = unsafe { Linux.mmap(file.as_fd(), len, 0, None) }?;
        let mapped = Self { ptr, len };
        // SAFETY: the range is this value's own; the advice concerns fork only.
        unsafe { rustix::mm::madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }?;
        Ok(mapped)
    }

    pub(crate) fn addr(&self) -> usize {
        self.ptr.as_ptr().expose_provenance()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and the driver's tables no longer name it.
        unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) }.expect("a mapping of its own");
    }
}
