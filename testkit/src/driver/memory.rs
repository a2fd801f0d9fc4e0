//! Memory that the driver knows (of GPUs, pinned, registered, virtual), and entry points of memory and of addresses.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{
    ACCESS_READ_WRITE, AccessDesc, AllocationProp, Handle, MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST,
    RANGE_HANDLE_DMA_BUF, pointer_attribute as asked_for,
};
use gdrcopy::host_page;
use parking_lot::{Mutex, RecursiveRwLock};

use super::context::{Context, Table, current, number};
use super::status::{ALREADY_MAPPED, LAUNCH_TIMEOUT, NOT_REGISTERED};
use super::stream::unsafe_call;
use super::{Outcome, address, control, get, get_all, put, queue, require};
use crate::machine::{Mapped, memory_file};

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
    /// Unique.
    pub(super) id: Handle,
    /// Registers of a device.
    pub(super) is_io: bool,
    /// False after a free or unregistration. Read-locked while work uses the memory.
    pub(super) alive: RecursiveRwLock<bool>,
    /// The backing file; none for registered and for virtual memory.
    pub(super) bytes: Option<Bytes>,
}

/// A memory file, mapped until the free. A mapping by the library keeps the bytes after that.
pub(super) struct Bytes {
    pub(super) file: File,
    mapped: Mutex<Option<Mapped>>,
}

impl Bytes {
    pub(super) fn new(len: usize) -> io::Result<(usize, Self)> {
        Self::of(memory_file(c"simulated-cuda", len.next_multiple_of(host_page()) as u64)?, len)
    }

    /// Maps a memory file.
    fn of(file: File, len: usize) -> io::Result<(usize, Self)> {
        let mapped = Mapped::new(&file, len.next_multiple_of(host_page()))?;
        Ok((mapped.addr(), Self { file, mapped: Mutex::new(Some(mapped)) }))
    }
}

impl Region {
    fn new(start: usize, len: usize, kind: Kind, context: Arc<Context>) -> Self {
        let (id, alive) = (number(), RecursiveRwLock::new(true));
        Self { start, len, kind, context, id, is_io: false, alive, bytes: None }
    }

    pub(super) fn contains(&self, addr: usize, len: usize) -> bool {
        let end = self.start + self.len;
        (self.start..end).contains(&addr) && len <= end - addr
    }

    /// Runs `act` unless the memory was freed; the free waits for it.
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

/// The region that contains a range.
pub(super) fn find(addr: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.lock();
    let (_, region) = regions.range(..=addr).next_back()?;
    region.contains(addr, len).then(|| region.clone())
}

/// The region of a range that work of a context can access.
pub(super) fn reachable(context: &Context, addr: usize, len: usize) -> Outcome<Arc<Region>> {
    let region = find(addr, len).ok_or(CudaStatus::INVALID_VALUE)?;
    let reached = region.kind != Kind::Device || context.reaches(&region.context);
    require(reached, CudaStatus::INVALID_VALUE)?;
    Ok(region)
}

/// Allocations of GPU memory, of host memory, and registrations made after a handle.
pub(super) fn since(first: Handle) -> [usize; 3] {
    let regions = REGIONS.lock();
    [Kind::Device, Kind::HostAllocated, Kind::HostRegistered]
        .map(|kind| regions.values().filter(|region| region.kind == kind && region.id > first).count())
}

/// Frees the memory of a destroyed context.
pub(super) fn forget(context: Handle) {
    let of_it = |_: &usize, region: &mut Arc<Region>| region.context.handle == context;
    let gone: Vec<_> = REGIONS.lock().extract_if(.., of_it).collect();
    gone.iter().for_each(|(_, region)| region.end());
}

/// Removes the region that begins at an address.
fn remove(addr: usize, kind: Kind) -> Option<Arc<Region>> {
    let mut regions = REGIONS.lock();
    regions.get(&addr).filter(|region| region.kind == kind)?;
    let region = regions.remove(&addr)?;
    drop(regions);
    region.end();
    Some(region)
}

/// Bytes of a GPU.
const GPU_MEMORY: usize = 141 << 30;
/// `CU_MEMHOSTREGISTER_IOMEMORY`.
const IO_MEMORY: u32 = 4;

/// Held while host memory is unregistered; registrations wait for it.
static REGISTERING: Mutex<()> = Mutex::new(());

/// Free and total bytes of the current context's GPU.
pub(super) fn info(free: *mut usize, total: *mut usize) -> Outcome {
    let device = current()?.device;
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

/// Frees or unregisters the region at an address. Waits for the GPU, for host memory for both GPUs.
fn give_back(addr: usize, kind: Kind, otherwise: CudaStatus) -> Outcome {
    current()?;
    unsafe_call()?;
    let region =
        find(addr, 1).filter(|region| region.start == addr && region.kind == kind).ok_or(otherwise)?;
    let _alone = (kind == Kind::HostRegistered).then(|| REGISTERING.lock());
    queue::wait_for_idle((kind == Kind::Device).then_some(region.context.device))?;
    remove(addr, kind).map(drop).ok_or(otherwise)
}

fn allocate(len: usize, kind: Kind) -> Outcome<usize> {
    let context = current()?;
    unsafe_call()?;
    require(len > 0, CudaStatus::INVALID_VALUE)?;
    require(len <= GPU_MEMORY, CudaStatus::OUT_OF_MEMORY)?;
    let (start, bytes) = Bytes::new(len).map_err(|_| CudaStatus::OUT_OF_MEMORY)?;
    let region = Region { bytes: Some(bytes), ..Region::new(start, len, kind, context) };
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
    let context = current()?;
    unsafe_call()?;
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
    let is_io = flags & IO_MEMORY != 0;
    let region = Region { is_io, ..Region::new(start, len, Kind::HostRegistered, context) };
    regions.insert(start, Arc::new(region));
    Ok(())
}

/// Whether all these addresses are mapped.
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
    current()?;
    let region = find(host.addr(), 1).filter(|region| region.kind != Kind::Device && flags == 0);
    require(region.is_some(), CudaStatus::INVALID_VALUE)?;
    put(addr, host.addr() as u64)
}

/// `CU_POINTER_ATTRIBUTE_DEVICE_POINTER`, `CU_POINTER_ATTRIBUTE_HOST_POINTER`, `CU_POINTER_ATTRIBUTE_MAPPED`.
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const MAPPED: u32 = 13;
/// Attributes from here on are newer than the driver.
const END: u32 = 21;
/// `CU_DEVICE_INVALID`.
const NO_DEVICE: i32 = -2;
/// The first bytes of this driver's IPC handles; the process, and the descriptor, length and inode of the memory file follow.
const IPC: [u8; 8] = *b"sim-cuda";

/// An answer of 32 or 64 bits.
enum Answer {
    Narrow(u32),
    Wide(u64),
}

fn answer(region: Option<&Region>, asked: u32, addr: u64) -> Outcome<Answer> {
    use Answer::{Narrow, Wide};
    require((1..END).contains(&asked), CudaStatus::INVALID_VALUE)?;
    let device = region.is_some_and(|region| region.kind == Kind::Device);
    let of = |value: fn(&Region) -> usize| Wide(region.map_or(0, |region| value(region) as u64));
    Ok(match asked {
        asked_for::CONTEXT => of(|region| region.context.handle),
        asked_for::MEMORY_TYPE => Narrow(match region {
            Some(_) if device => MEMORY_TYPE_DEVICE,
            Some(_) => MEMORY_TYPE_HOST,
            None => 0,
        }),
        asked_for::DEVICE_ORDINAL => {
            Narrow(region.map_or(NO_DEVICE, |region| region.context.device).cast_unsigned())
        }
        asked_for::BUFFER_ID => of(|region| region.id),
        asked_for::RANGE_START_ADDR | asked_for::MAPPING_BASE_ADDR => of(|region| region.start),
        asked_for::RANGE_SIZE | asked_for::MAPPING_SIZE => of(|region| region.len),
        asked_for::IS_LEGACY_CUDA_IPC_CAPABLE => {
            Narrow(region.is_some_and(|region| device && region.bytes.is_some()).into())
        }
        asked_for::SYNC_MEMOPS | asked_for::IS_MANAGED => Narrow(0),
        MAPPED => Narrow(region.is_some().into()),
        DEVICE_POINTER => Wide(region.map_or(0, |_| addr)),
        HOST_POINTER => Wide(region.filter(|_| !device).map_or(0, |_| addr)),
        _ => Wide(0),
    })
}

fn write(place: *mut c_void, answer: &Answer) -> Outcome {
    match *answer {
        Answer::Narrow(value) => put(place.cast(), value),
        Answer::Wide(value) => put(place.cast(), value),
    }
}

pub(super) fn attribute(place: *mut c_void, asked: u32, addr: u64) -> Outcome {
    let region = find(address(addr)?, 1).ok_or(CudaStatus::INVALID_VALUE)?;
    write(place, &answer(Some(&region), asked, addr)?)
}

pub(super) fn attributes(count: u32, asked: *const u32, places: *const *mut c_void, addr: u64) -> Outcome {
    let region = find(address(addr)?, 1);
    let (asked, places) = (get_all(asked, count)?, get_all(places, count)?);
    let answers: Vec<_> =
        asked.iter().map(|&asked| answer(region.as_deref(), asked, addr)).collect::<Outcome<_>>()?;
    places.iter().zip(&answers).try_for_each(|(&place, answer)| write(place, answer))
}

/// `SYNC_MEMOPS` has no effect: copies are synchronous enough.
pub(super) fn set_attribute(value: *const c_void, asked: u32, addr: u64) -> Outcome {
    let known = find(address(addr)?, 1).is_some_and(|region| region.kind == Kind::Device);
    require(known && asked == asked_for::SYNC_MEMOPS, CudaStatus::INVALID_VALUE)?;
    require(get(value.cast::<u32>())? <= 1, CudaStatus::INVALID_VALUE)
}

pub(super) fn ipc_handle(handle: *mut [u8; 64], addr: u64) -> Outcome {
    current()?;
    let region = find(address(addr)?, 1).filter(|region| region.kind == Kind::Device);
    let region = region.ok_or(CudaStatus::INVALID_VALUE)?;
    let file = &region.bytes.as_ref().ok_or(CudaStatus::INVALID_VALUE)?.file;
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&IPC);
    bytes[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
    bytes[12..16].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
    bytes[16..24].copy_from_slice(&(region.len as u64).to_ne_bytes());
    bytes[24..32]
        .copy_from_slice(&file.metadata().map_err(|_| CudaStatus::OPERATING_SYSTEM)?.ino().to_ne_bytes());
    put(handle, bytes)
}

/// Handles that a thread is opening.
static OPENING: Mutex<Vec<[u8; 64]>> = Mutex::new(Vec::new());

/// Maps the memory file of the other process once more. Its bytes stay when that process frees them or ends. Refuses what another thread
/// is opening, as driver 580 does.
pub(super) fn open_ipc(addr: *mut u64, handle: [u8; 64], flags: u32) -> Outcome {
    let mut opening = OPENING.lock();
    require(!opening.contains(&handle), ALREADY_MAPPED)?;
    opening.push(handle);
    drop(opening);
    let opened = map_ipc(addr, handle, flags);
    std::thread::sleep(Duration::from_millis(1));
    OPENING.lock().retain(|other| *other != handle);
    opened
}

fn map_ipc(addr: *mut u64, handle: [u8; 64], flags: u32) -> Outcome {
    let context = current()?;
    let mut rest = handle.strip_prefix(&IPC).ok_or(CudaStatus::INVALID_VALUE)?;
    require(!addr.is_null() && flags == 1, CudaStatus::INVALID_VALUE)?;
    let [process, fd] = [0; 2].map(|_: u8| u32::from_ne_bytes(take(&mut rest)));
    let [len, inode] = [0; 2].map(|_: u8| u64::from_ne_bytes(take(&mut rest)));
    require(process != std::process::id(), CudaStatus::INVALID_CONTEXT)?;
    let file = File::options().read(true).write(true).open(format!("/proc/{process}/fd/{fd}"));
    let file = file.map_err(|_| CudaStatus::INVALID_VALUE)?;
    let is_it = file.metadata().is_ok_and(|found| found.ino() == inode && found.len() >= len);
    require(is_it, CudaStatus::INVALID_VALUE)?;
    let len = usize::try_from(len).map_err(|_| CudaStatus::INVALID_VALUE)?;
    let (start, bytes) = Bytes::of(file, len).map_err(|_| CudaStatus::OUT_OF_MEMORY)?;
    let region = Region { bytes: Some(bytes), ..Region::new(start, len, Kind::Device, context) };
    REGIONS.lock().insert(start, Arc::new(region));
    put(addr, start as u64)
}

/// The first bytes of an IPC handle that are left.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (first, behind) = rest.split_first_chunk().expect("a handle is longer");
    *rest = behind;
    *first
}

pub(super) fn close_ipc(addr: u64) -> Outcome {
    give_back(address(addr)?, Kind::Device, CudaStatus::INVALID_VALUE)
}

/// Granularity of `cuMemCreate`, bytes.
const GRANULARITY: usize = 2 << 20;
/// Memory of `cuMemCreate`: its bytes.
static CREATED: Table<usize> = Table::new();
/// Reserved addresses: bytes, a number, and the mapping that keeps them.
static RESERVED: Mutex<BTreeMap<usize, (usize, Handle, Mapped)>> = Mutex::new(BTreeMap::new());

/// Physical memory and reservations made after a handle.
pub(super) fn virtual_since(first: Handle) -> usize {
    CREATED.since(first) + RESERVED.lock().values().filter(|(_, number, _)| *number > first).count()
}

pub(super) fn granularity(place: *mut usize) -> Outcome {
    put(place, GRANULARITY)
}

pub(super) fn create(memory: *mut u64, len: usize, prop: *const AllocationProp) -> Outcome {
    let prop = get(prop)?;
    let usual = (prop.kind, prop.location.kind) == (1, 1) && len > 0 && len.is_multiple_of(GRANULARITY);
    require(usual, CudaStatus::INVALID_VALUE)?;
    put(memory, CREATED.insert(|_| len) as u64)
}

pub(super) fn release(memory: u64) -> Outcome {
    CREATED.remove(address(memory)?).map(drop)
}

pub(super) fn reserve(addr: *mut u64, len: usize, align: usize) -> Outcome {
    // 0: the default alignment.
    let align = align.max(host_page());
    let room = len.checked_add(align).ok_or(CudaStatus::OUT_OF_MEMORY)?;
    let mapped = memory_file(c"simulated-vmm", room as u64).and_then(|file| Mapped::new(&file, room));
    let mapped = mapped.map_err(|_| CudaStatus::OUT_OF_MEMORY)?;
    let start = mapped.addr().next_multiple_of(align);
    RESERVED.lock().insert(start, (len, number(), mapped));
    put(addr, start as u64)
}

/// Whether this is a whole reservation, and whether memory is mapped in it.
fn reserved(start: usize, len: usize) -> (bool, bool) {
    (RESERVED.lock().get(&start).is_some_and(|known| known.0 == len), find(start, 1).is_some())
}

pub(super) fn unreserve(addr: u64, len: usize) -> Outcome {
    let start = address(addr)?;
    require(reserved(start, len) == (true, false), CudaStatus::INVALID_VALUE)?;
    RESERVED.lock().remove(&start).map(drop).ok_or(CudaStatus::INVALID_VALUE)
}

pub(super) fn map(addr: u64, len: usize, memory: u64) -> Outcome {
    let start = address(addr)?;
    let fits = CREATED.get(address(memory)?)? == len && reserved(start, len) == (true, false);
    require(fits, CudaStatus::INVALID_VALUE)?;
    REGIONS.lock().insert(start, Arc::new(Region::new(start, len, Kind::Device, current()?)));
    Ok(())
}

pub(super) fn unmap(addr: u64, len: usize) -> Outcome {
    let start = address(addr)?;
    require(reserved(start, len) == (true, true), CudaStatus::INVALID_VALUE)?;
    remove(start, Kind::Device).map(drop).ok_or(CudaStatus::INVALID_VALUE)
}

pub(super) fn set_access(addr: u64, len: usize, access: *const AccessDesc, count: usize) -> Outcome {
    let usual = count == 1 && get(access)?.flags == ACCESS_READ_WRITE;
    require(usual && reserved(address(addr)?, len) == (true, true), CudaStatus::INVALID_VALUE)
}
