//! GPU memory, pinned host memory, and host memory of the application that was registered.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::{Mutex, RecursiveRwLock};

use super::context::{self, Context};
use super::handles::number;
use super::status::{LAUNCH_TIMEOUT, NOT_REGISTERED};
use super::{Outcome, address, capture, control, put, queue, require};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{Handle, RANGE_HANDLE_DMA_BUF};
use gdrcopy::host_page;

use crate::pages::{Mapped, memory_file};

/// Bytes of a GPU.
const GPU_MEMORY: usize = 141 << 30;
/// `CU_MEMHOSTREGISTER_IOMEMORY`.
const IO_MEMORY: u32 = 4;

/// Held while host memory is unregistered, which others of the kind, and registrations, wait for.
static REGISTERING: Mutex<()> = Mutex::new(());
static REGIONS: Mutex<BTreeMap<usize, Arc<Region>>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Device,
    HostAllocated,
    HostRegistered,
}

/// Memory that the driver knows.
pub(super) struct Region {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) kind: Kind,
    pub(super) context: Arc<Context>,
    /// Given to no other.
    pub(super) id: Handle,
    /// Registers of a device.
    pub(super) is_io: bool,
    /// Until it is freed or unregistered. Locked while work uses the memory.
    alive: RecursiveRwLock<bool>,
    /// What is not the application's.
    bytes: Option<Bytes>,
}

/// A memory file, mapped until it is freed: the address may be used again though a mapping still holds the bytes.
struct Bytes {
    file: File,
    mapped: Mutex<Option<Mapped>>,
}

impl Bytes {
    fn new(len: usize) -> std::io::Result<(usize, Self)> {
        let len = len.next_multiple_of(host_page());
        let file = memory_file(c"simulated-cuda", len as u64)?;
        let mapped = Mapped::new(&file, len)?;
        Ok((mapped.addr(), Self { file, mapped: Mutex::new(Some(mapped)) }))
    }
}

impl Region {
    pub(super) fn contains(&self, addr: usize, len: usize) -> bool {
        let end = self.start + self.len;
        (self.start..end).contains(&addr) && len <= end - addr
    }

    /// Uses the memory, if it is still there. It stays meanwhile.
    pub(super) fn touch<T>(&self, act: impl FnOnce() -> T) -> Outcome<T> {
        // A copy may have both ends in one region, so the lock is recursive.
        let alive = self.alive.read();
        require(*alive, CudaStatus::ILLEGAL_ADDRESS)?;
        Ok(act())
    }

    fn end(&self) {
        *self.alive.write() = false;
        if let Some(bytes) = &self.bytes {
            bytes.mapped.lock().take();
        }
    }
}

/// The memory at an address, with all of the bytes.
pub(super) fn find(addr: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.lock();
    let (_, region) = regions.range(..=addr).next_back()?;
    region.contains(addr, len).then(|| region.clone())
}

/// Memory that work of a context can use.
pub(super) fn reachable(context: &Context, addr: usize, len: usize) -> Outcome<Arc<Region>> {
    let region = find(addr, len).ok_or(CudaStatus::INVALID_VALUE)?;
    let reached = region.kind != Kind::Device || context.reaches(&region.context);
    require(reached, CudaStatus::INVALID_VALUE)?;
    Ok(region)
}

/// Allocations of GPU memory, of host memory, and registrations that are younger than a handle.
pub(super) fn since(first: Handle) -> [usize; 3] {
    let regions = REGIONS.lock();
    [Kind::Device, Kind::HostAllocated, Kind::HostRegistered]
        .map(|kind| regions.values().filter(|region| region.kind == kind && region.id > first).count())
}

/// A context is gone, and its memory with it.
pub(super) fn forget(context: Handle) {
    let of_it = |_: &usize, region: &mut Arc<Region>| region.context.handle == context;
    let gone: Vec<_> = REGIONS.lock().extract_if(.., of_it).collect();
    gone.iter().for_each(|(_, region)| region.end());
}

/// Takes a region that begins at an address out of the table.
fn remove(addr: usize, kind: Kind) -> Option<Arc<Region>> {
    let mut regions = REGIONS.lock();
    regions.get(&addr).filter(|region| region.kind == kind)?;
    let region = regions.remove(&addr)?;
    drop(regions);
    region.end();
    Some(region)
}

/// Bytes of the current context's GPU that are free, and all of them.
pub(super) fn info(free: *mut usize, total: *mut usize) -> Outcome {
    let device = context::current()?.device;
    let is_there = |region: &&Arc<Region>| region.kind == Kind::Device && region.context.device == device;
    let used: usize = REGIONS.lock().values().filter(is_there).map(|region| region.len).sum();
    put(free, GPU_MEMORY.saturating_sub(used))?;
    put(total, GPU_MEMORY)
}

/// A dma-buf of whole pages of GPU memory: a descriptor as [`dma_buf_offset`](crate::dma_buf_offset) reads it.
pub(super) fn dma_buf(handle: *mut c_void, addr: u64, len: usize, kind: u32) -> Outcome {
    let (start, page) = (address(addr)?, host_page());
    let is_whole = len > 0 && start.is_multiple_of(page) && len.is_multiple_of(page);
    require(is_whole && kind == RANGE_HANDLE_DMA_BUF, CudaStatus::INVALID_VALUE)?;
    let region = find(start, 1).filter(|region| region.kind == Kind::Device);
    let region = region.ok_or(CudaStatus::INVALID_VALUE)?;
    let offset = start - region.start;
    require(offset + len <= region.len.next_multiple_of(page), CudaStatus::INVALID_VALUE)?;
    let file = &region.bytes.as_ref().ok_or(CudaStatus::NOT_SUPPORTED)?.file;
    // Opened anew, because a duplicate would share its position.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(true).open(path);
    let opened =
        opened.and_then(|mut file| file.seek(SeekFrom::Start(offset as u64)).map(|_| OwnedFd::from(file)));
    let fd = opened.map_err(|_| CudaStatus::OPERATING_SYSTEM)?;
    put(handle.cast::<i32>(), fd.into_raw_fd())
}

/// Frees or unregisters what begins at an address. CUDA waits for the GPU, and for host memory this waits for both.
fn give_back(addr: usize, kind: Kind, otherwise: CudaStatus) -> Outcome {
    context::current()?;
    capture::unsafe_call()?;
    let region =
        find(addr, 1).filter(|region| region.start == addr && region.kind == kind).ok_or(otherwise)?;
    let _alone = (kind == Kind::HostRegistered).then(|| REGISTERING.lock());
    queue::wait_for_idle((kind == Kind::Device).then_some(region.context.device))?;
    remove(addr, kind).map(drop).ok_or(otherwise)
}

fn allocate(len: usize, kind: Kind) -> Outcome<usize> {
    let context = context::current()?;
    capture::unsafe_call()?;
    require(len > 0, CudaStatus::INVALID_VALUE)?;
    require(len <= GPU_MEMORY, CudaStatus::OUT_OF_MEMORY)?;
    let (start, bytes) = Bytes::new(len).map_err(|_| CudaStatus::OUT_OF_MEMORY)?;
    let (id, alive) = (number(), RecursiveRwLock::new(true));
    let region = Region { start, len, kind, context, id, is_io: false, alive, bytes: Some(bytes) };
    REGIONS.lock().insert(start, Arc::new(region));
    Ok(start)
}

pub(super) fn alloc(addr: *mut u64, len: usize) -> Outcome {
    require(!addr.is_null(), CudaStatus::INVALID_VALUE)?;
    put(addr, allocate(len, Kind::Device)? as u64)
}

pub(super) fn free(addr: u64) -> Outcome {
    give_back(address(addr)?, Kind::Device, CudaStatus::INVALID_VALUE)
}

pub(super) fn host_alloc(addr: *mut *mut c_void, len: usize, flags: u32) -> Outcome {
    require(!addr.is_null() && flags <= 7, CudaStatus::INVALID_VALUE)?;
    put(addr, std::ptr::with_exposed_provenance_mut(allocate(len, Kind::HostAllocated)?))
}

pub(super) fn free_host(addr: *mut c_void) -> Outcome {
    give_back(addr.addr(), Kind::HostAllocated, CudaStatus::INVALID_VALUE)
}

pub(super) fn register(addr: *mut c_void, len: usize, flags: u32) -> Outcome {
    let context = context::current()?;
    capture::unsafe_call()?;
    require(!addr.is_null() && len > 0 && flags <= 15, CudaStatus::INVALID_VALUE)?;
    let start = addr.expose_provenance();
    let end = start.checked_add(len).ok_or(CudaStatus::INVALID_VALUE)?;
    let is_whole = start.is_multiple_of(host_page()) && end.is_multiple_of(host_page());
    require(
        if flags & IO_MEMORY == 0 { is_mapped(start, end) } else { is_whole },
        CudaStatus::INVALID_VALUE,
    )?;
    let _alone = REGISTERING.try_lock_for(control::patience()).ok_or(LAUNCH_TIMEOUT)?;
    let mut regions = REGIONS.lock();
    let overlapped = regions.range(..end).next_back().filter(|(_, region)| region.start + region.len > start);
    match overlapped {
        Some((_, region)) if region.kind == Kind::Device => return Err(CudaStatus::INVALID_VALUE),
        Some(_) => return Err(CudaStatus::HOST_MEMORY_ALREADY_REGISTERED),
        None => {}
    }
    let (id, alive) = (number(), RecursiveRwLock::new(true));
    let is_io = flags & IO_MEMORY != 0;
    let region = Region { start, len, kind: Kind::HostRegistered, context, id, is_io, alive, bytes: None };
    regions.insert(start, Arc::new(region));
    Ok(())
}

/// Whether there is something at all these addresses.
fn is_mapped(start: usize, end: usize) -> bool {
    let page = host_page();
    let first = start - start % page;
    let mut resident = vec![0; (end - first).div_ceil(page)];
    let pages = std::ptr::without_provenance_mut(first);
    // SAFETY: a place for a byte for each page; the kernel checks the addresses.
    unsafe { libc::mincore(pages, end - first, resident.as_mut_ptr()) == 0 }
}

pub(super) fn unregister(addr: *mut c_void) -> Outcome {
    give_back(addr.addr(), Kind::HostRegistered, NOT_REGISTERED)
}

pub(super) fn host_device_pointer(addr: *mut u64, host: *mut c_void, flags: u32) -> Outcome {
    context::current()?;
    let region = find(host.addr(), 1).filter(|region| region.kind != Kind::Device && flags == 0);
    require(region.is_some(), CudaStatus::INVALID_VALUE)?;
    put(addr, host.addr() as u64)
}
