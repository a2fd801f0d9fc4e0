//! Simulated GPU memory: physical objects and the addresses under which CUDA shows them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Weak};

use super::{provider, real};
use crate::cuda::MemoryKind;
use crate::memory_file::memory_file;

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
    /// See [`real`].
    Provider(provider::Object),
}

/// Physical memory of one GPU, alive while somebody holds it.
#[derive(Debug)]
pub struct Object {
    /// The GPU, as a CUDA ordinal.
    pub gpu: i32,
    /// Bytes.
    pub size: usize,
    bytes: Bytes,
    /// The inode, by which descriptors of this memory are known.
    inode: u64,
}

impl Object {
    /// Zeroed memory on a GPU.
    pub fn new(gpu: i32, size: usize) -> io::Result<Arc<Self>> {
        let bytes = if real::is_wanted() {
            Bytes::Provider(real::memory(size)?)
        } else {
            Bytes::File(memory_file(c"gpu-memory", size as u64)?)
        };
        let mut object = Self { gpu, size, bytes, inode: 0 };
        object.inode = object.file().metadata()?.ino();
        Ok(Arc::new(object))
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
    pub fn read(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        self.file().read_exact_at(out, offset as u64)
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
    /// VMM memory made for export as a file descriptor.
    pub exportable: bool,
    /// Never the same for two allocations.
    pub buffer_id: u64,
}

/// Somebody who is told when CUDA lets go of physical memory: the free callback of `nvidia_p2p_get_pages`.
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
    pub(super) fn new(gpus: i32) -> Self {
        let (ranges, open_blocks, objects, watchers) = Default::default();
        // Where the driver puts its allocations on x86.
        let next_va = 0x7f40_0000_0000;
        let next_va = if real::is_wanted() { real::addresses(next_va >> 8) } else { next_va };
        Self { gpus, ranges, open_blocks, objects, next_object: FIRST_OBJECT, next_va, next_id: 1, watchers }
    }

    /// How many GPUs there are.
    pub fn gpus(&self) -> i32 {
        self.gpus
    }

    /// Allocates in the manner of `cuMemAlloc` ([`MemoryKind::Malloc`], sharing 2 MiB objects) or, for any
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
        let exportable = kind == MemoryKind::Vmm;
        let range = VaRange { base, len, object, offset, kind, exportable, buffer_id };
        if let Some((memory, (va, offset, len))) = self.shown_by(&range) {
            memory.show(va, offset, len).expect("free addresses");
        }
        self.ranges.insert(base, range);
        base
    }

    /// The chunks of the made-up GPU that this allocation alone shows, where memory is of that kind.
    fn shown_by<'a>(&self, range: &'a VaRange) -> Option<(&'a provider::Object, (u64, u64, u64))> {
        let Bytes::Provider(memory) = &range.object.bytes else { return None };
        let chunks = real::chunks(range);
        let shared = self.ranges.values().any(|other| real::chunks(other).0 == chunks.0);
        (!shared).then_some((memory, chunks))
    }

    /// Makes VMM memory exportable, as it is at first, or not.
    pub fn set_exportable(&mut self, base: u64, exportable: bool) {
        if let Some(range) = self.ranges.get_mut(&base) {
            range.exportable = exportable;
        }
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

    /// The object of a handle, while somebody holds it.
    pub fn object_by_handle(&self, handle: u32) -> Option<Arc<Object>> {
        self.objects.get(&handle)?.upgrade()
    }

    /// The object whose memory a file descriptor shows, while somebody holds it.
    pub fn object_by_fd(&self, fd: BorrowedFd<'_>) -> io::Result<Option<Arc<Object>>> {
        let inode = File::from(fd.try_clone_to_owned()?).metadata()?.ino();
        Ok(self.objects.values().filter_map(Weak::upgrade).find(|object| object.inode == inode))
    }

    /// Memory of a GPU that somebody holds, bytes.
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

    /// Takes an allocation away; its object lives on while somebody else holds it.
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

    /// Tells somebody of every object that is freed from now on.
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
