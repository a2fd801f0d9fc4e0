//! The installed CUDA driver, or another one that is given as a table of entry points.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::from_ref;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::FdFlags;

use super::raw::layout::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER,
    GRANULARITY_MINIMUM, HANDLE_TYPE_FD, HOST_ALLOC_PORTABLE, Handle, LOCATION_DEVICE, MemLocation,
    ORDERING_OWNER, RANGE_FLAG_PCIE, RANGE_HANDLE_DMA_BUF, RDMA_WITH_VMM_SUPPORTED, RDMA_WRITES_ORDERING,
    STREAM_NON_BLOCKING, pointer_attribute,
};
use super::raw::{self, Api, Current, Relaxed};
use super::{
    AllocKind, Cuda, CudaSource, CudaStatus, GpuInfo, Objects, Piece, PointerInfo, objects, unknown,
};
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::types::host_page;

/// The `libcuda` of this machine.
#[derive(Debug)]
pub(crate) struct Installed;

impl CudaSource for Installed {
    fn version(&self) -> Result<u32> {
        version(&Api::load()?)
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        Ok(Arc::new(Driver::with(Api::load()?)?))
    }
}

/// A CUDA driver given as a table of entry points, in place of the installed one: an emulator, or a wrapper around the
/// table that [`Api::load`] gives.
#[derive(Debug)]
pub struct EntryPoints(Api);

impl EntryPoints {
    /// A driver of these entry points.
    ///
    /// # Safety
    /// Each entry point must do what the CUDA driver's manual says of it: the library passes addresses of its own memory for
    /// answers, and copies to and from the memory that the driver allocates.
    pub const unsafe fn new(api: Api) -> Self {
        Self(api)
    }
}

impl CudaSource for EntryPoints {
    fn version(&self) -> Result<u32> {
        version(&self.0)
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        Ok(Arc::new(Driver::with(self.0)?))
    }
}

fn version(api: &Api) -> Result<u32> {
    let mut version = 0;
    // SAFETY: a place for the answer.
    unsafe { api.driver_get_version(&mut version) }?;
    u32::try_from(version).map_err(|_| Error::invalid("CUDA version", version, "a positive number"))
}

/// `libcuda`, loaded and initialised.
struct Driver {
    api: Api,
    gpus: Vec<Gpu>,
    /// Live memory of [`Cuda::alloc`], by address.
    allocations: Mutex<HashMap<u64, Allocation>>,
    owner: Owner,
}

impl Driver {
    fn with(api: Api) -> Result<Self> {
        // SAFETY: no flags are defined.
        unsafe { api.init(0) }?;
        let mut count = 0;
        // SAFETY: a place for the answer.
        unsafe { api.device_get_count(&mut count) }?;
        let gpus = (0..count).map(|ordinal| Gpu::new(&api, ordinal)).collect::<Result<_>>()?;
        Ok(Self { api, gpus, allocations: Mutex::default(), owner: Owner::this_process() })
    }

    fn gpu(&self, ordinal: i32) -> Result<&Gpu> {
        self.owner.check()?;
        let found = usize::try_from(ordinal).ok().and_then(|index| self.gpus.get(index));
        found.ok_or_else(|| Error::invalid("device", ordinal, "the CUDA ordinal of a visible GPU"))
    }

    fn attribute(&self, gpu: &Gpu, attribute: u32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a place for the answer; the driver checks the number.
        unsafe { self.api.device_get_attribute(&mut value, attribute, gpu.device) }?;
        Ok(value)
    }

    /// Whether the GPU's kernels see writes over PCIe without a flush.
    fn orders_writes(&self, gpu: &Gpu) -> Result<bool> {
        if let Some(&known) = gpu.orders_writes.get() {
            return Ok(known);
        }
        let ordering = match self.attribute(gpu, RDMA_WRITES_ORDERING) {
            // The driver is older than the attribute.
            Err(Error::Cuda { status: CudaStatus::INVALID_VALUE, .. }) => 0,
            told => told?,
        };
        Ok(*gpu.orders_writes.get_or_init(|| ordering >= ORDERING_OWNER))
    }

    fn info(&self, gpu: &Gpu) -> Result<GpuInfo> {
        let id = text(|buffer, len| {
            // SAFETY: `buffer` has `len` bytes.
            unsafe { self.api.device_get_pci_bus_id(buffer, len, gpu.device) }
        })?;
        let name = text(|buffer, len| {
            // SAFETY: `buffer` has `len` bytes.
            unsafe { self.api.device_get_name(buffer, len, gpu.device) }
        })?;
        let pci = sysfs_address(&id).ok_or_else(|| {
            Error::invalid("PCI address from cuDeviceGetPCIBusId", &id, "domain:bus:device.function")
        })?;
        Ok(GpuInfo { ordinal: gpu.ordinal, pci, name })
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({} GPUs)", self.gpus.len())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // In a forked child CUDA does not work, and the parent still uses the contexts.
        if self.owner.is_caller() {
            self.gpus.iter().for_each(|gpu| gpu.release(&self.api));
        }
    }
}

impl Cuda for Driver {
    fn driver_version(&self) -> Result<u32> {
        version(&self.api)
    }

    fn devices(&self) -> Result<Vec<GpuInfo>> {
        self.gpus.iter().map(|gpu| self.info(gpu)).collect()
    }

    fn device_attribute(&self, device: i32, attribute: u32) -> Result<i32> {
        self.attribute(self.gpu(device)?, attribute)
    }

    fn pointer(&self, addr: u64) -> Result<PointerInfo> {
        self.owner.check()?;
        raw::pointer_info(&self.api, addr)
    }

    fn buffer_id(&self, addr: u64) -> Result<u64> {
        self.owner.check()?;
        raw::buffer_id(&self.api, addr)
    }

    fn dma_buf(&self, memory: u64, addr: u64, len: usize, pcie: bool) -> Result<OwnedFd> {
        let _current = self.memory_context(memory)?.1.enter(&self.api)?;
        let flags = if pcie { RANGE_FLAG_PCIE } else { 0 };
        received_fd(|fd| {
            // SAFETY: a place for the descriptor; the driver checks the range.
            unsafe {
                self.api.mem_get_handle_for_address_range(fd.cast(), addr, len, RANGE_HANDLE_DMA_BUF, flags)
            }
        })
    }

    fn objects(&self, memory: u64, addr: u64, len: usize) -> Result<Objects> {
        self.owner.check()?;
        let Some(entry) = self.api.mem_get_handle_for_address_range else {
            return Err(raw::missing("cuMemGetHandleForAddressRange"));
        };
        let named = |addr, len| objects::named_by(entry as usize, || self.dma_buf(memory, addr, len, false));
        let [pool] = raw::one_by_one(&self.api, memory, [pointer_attribute::MEMPOOL_HANDLE])?;
        if pool != 0 {
            return self.pool_objects(named, memory, addr, len);
        }
        let (objects, exported) = named(addr, len)?;
        exported?;
        if objects.len() == Some(len as u64) {
            Ok(objects)
        } else {
            Err(objects::refuse("it names other bytes"))
        }
    }

    fn alloc(&self, device: i32, len: usize, kind: AllocKind) -> Result<u64> {
        self.allocate(self.gpu(device)?, len, kind)
    }

    unsafe fn free(&self, addr: u64) -> Result<()> {
        let allocation = self.allocations.lock().remove(&addr);
        match allocation {
            Some(Allocation::Malloc { ordinal, raw }) => {
                let _current = self.enter_primary(self.gpu(ordinal)?)?;
                // SAFETY: given by cuMemAlloc, not freed yet; the caller vouches that nothing uses it.
                unsafe { self.api.mem_free(raw) }
            }
            Some(Allocation::Vmm { ordinal, len }) => {
                let _current = self.enter_primary(self.gpu(ordinal)?)?;
                self.unmap(addr, len)
            }
            None => Err(Error::invalid(
                "address",
                format_args!("{addr:#x}"),
                "one that alloc gave, not freed yet",
            )),
        }
    }

    unsafe fn copy_to_device(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
        let start = |stream: &CopyStream| {
            let pinned = stream.pinned(len);
            if let Some(pinned) = pinned {
                // SAFETY: the caller guarantees `src`; the bounce buffer is long enough and not in use.
                unsafe { pinned.copy_from_nonoverlapping(src, len) };
            }
            let from = pinned.map_or(src, <*mut u8>::cast_const);
            // SAFETY: readable as said above; the driver checks the GPU side.
            unsafe { self.api.memcpy_to_device_async(dst, from.cast(), len, stream.stream) }
        };
        self.on_stream(device, dst, len, start, |_| {})
    }

    unsafe fn gather_from_device(&self, device: i32, dst: *mut u8, src: &[u64], len: usize) -> Result<()> {
        let (Some(&first), Some(all)) = (src.first(), len.checked_mul(src.len())) else {
            return Err(Error::invalid(
                "number of pieces",
                src.len(),
                "at least one, within the address space",
            ));
        };
        let start = |stream: &CopyStream| {
            let to = stream.pinned(all).unwrap_or(dst);
            src.iter().enumerate().try_for_each(|(index, &src)| {
                let to = to.wrapping_add(index * len);
                // SAFETY: the caller guarantees `dst`, the pinned buffer is long enough; the driver checks the GPU side.
                unsafe { self.api.memcpy_to_host_async(to.cast(), src, len, stream.stream) }
            })
        };
        self.on_stream(device, first, all, start, |stream| {
            if let Some(pinned) = stream.pinned(all) {
                // SAFETY: the copies into the pinned buffer are over; the caller guarantees `dst`.
                unsafe { dst.copy_from_nonoverlapping(pinned, all) };
            }
        })
    }

    fn flush(&self, device: i32, memory: u64) -> Result<()> {
        if self.orders_writes(self.gpu(device)?)? {
            return Ok(());
        }
        let _current = self.memory_context(memory)?.1.enter(&self.api)?;
        // SAFETY: plain numbers; a context is current.
        unsafe { self.api.flush_gpu_direct_rdma_writes(FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER) }
    }
}

impl Driver {
    /// The objects of memory of a pool: one for each chunk.
    ///
    /// libcuda (580.159) exports no range that begins outside live allocations, although those of a pool share pages; and of a range that
    /// does not begin its chunk it takes the end for as far from the chunk's beginning. So one live page of each chunk is asked for. Its
    /// object and place are right, its size is not looked at.
    fn pool_objects(
        &self,
        named: impl Fn(u64, usize) -> Result<(Objects, Result<()>)>,
        memory: u64,
        addr: u64,
        len: usize,
    ) -> Result<Objects> {
        let (page, end) = (host_page(), addr.saturating_add(len as u64));
        let (mut objects, mut at, mut inside) = (Objects::default(), addr, memory);
        while at < end {
            let asked = [pointer_attribute::MAPPING_BASE_ADDR, pointer_attribute::MAPPING_SIZE];
            let [chunk, size] = raw::one_by_one(&self.api, inside, asked)?;
            let chunk_end = chunk.saturating_add(size);
            let id = |at| raw::buffer_id(&self.api, at);
            let own = inside.next_multiple_of(page as u64);
            let live = if (chunk..chunk_end).contains(&own) && id(own)? == id(inside)? {
                Some(own)
            } else {
                (chunk..chunk_end).step_by(page).find(|&at| id(at).is_ok_and(|id| id != 0))
            };
            let Some(live) = live.filter(|_| (chunk..chunk_end).contains(&at)) else {
                return Err(CudaStatus::INVALID_VALUE.error_of("cuMemGetHandleForAddressRange"));
            };
            // A size that it takes for 0 it refuses before it names anything.
            let (some, _) = named(live, page).or_else(|_| named(live, 2 * page))?;
            let to = end.min(chunk_end);
            let place = |piece: &Piece| Some((piece.object, (piece.offset + at).checked_sub(live)?));
            let Some((object, offset)) = some.pieces.first().and_then(place) else {
                return Err(objects::refuse("it names no object of a pool"));
            };
            objects.client = some.client;
            objects.pieces.push(Piece { object, offset, len: to - at });
            (at, inside) = (to, to);
        }
        Ok(objects)
    }
}

/// Reads a text that the driver writes into a buffer of a given size.
fn text(fill: impl FnOnce(*mut c_char, i32) -> Result<()>) -> Result<String> {
    const LEN: u16 = 256;
    let mut buffer = [0u8; LEN as usize];
    fill(buffer.as_mut_ptr().cast(), LEN.into())?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// Takes ownership of a file descriptor of the driver and closes it on exec: in another program it would keep the GPU memory.
fn received_fd(make: impl FnOnce(*mut i32) -> Result<()>) -> Result<OwnedFd> {
    let mut raw = -1;
    make(&mut raw)?;
    if raw < 0 {
        return Err(Error::invalid("file descriptor from CUDA", raw, "0 or more"));
    }
    // SAFETY: the driver made it for the caller.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|e| {
        Error::sys("fcntl(FD_CLOEXEC)", e.into(), "the descriptor from CUDA was closed by another thread")
    })?;
    Ok(fd)
}

/// CUDA's PCI address as `/sys/bus/pci/devices` writes it. CUDA's is in capitals and its domain may have more
/// zeros in front.
pub fn sysfs_address(id: &str) -> Option<String> {
    let mut parts = id.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok());
    let (domain, bus, device, function) = (parts.next()??, parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

struct Gpu {
    ordinal: i32,
    /// `CUdevice`.
    device: i32,
    /// The primary context, retained at its first use: making it may take a second and much memory.
    primary: Mutex<Option<Handle>>,
    /// Idle streams of the primary context.
    streams: Mutex<Vec<CopyStream>>,
    /// Whether its kernels see writes over PCIe without a flush, once asked.
    orders_writes: OnceLock<bool>,
}

/// A context to work in.
#[derive(Clone, Copy)]
struct Context {
    handle: Handle,
    /// The primary context is retained; the application may destroy any other one after the call.
    primary: bool,
}

impl Gpu {
    fn new(api: &Api, ordinal: i32) -> Result<Self> {
        let mut device = 0;
        // SAFETY: a place for the answer; the driver checks the ordinal.
        unsafe { api.device_get(&mut device, ordinal) }?;
        let (primary, streams, orders_writes) = Default::default();
        Ok(Self { ordinal, device, primary, streams, orders_writes })
    }

    /// The primary context, retained until [`release`](Self::release).
    fn primary(&self, api: &Api) -> Result<Handle> {
        let mut primary = self.primary.lock();
        if let Some(handle) = *primary {
            return Ok(handle);
        }
        let mut handle = 0;
        let _relaxed = Relaxed::enter(api);
        // SAFETY: a place for the answer and a device of this driver.
        unsafe { api.primary_ctx_retain(&mut handle, self.device) }?;
        *primary = Some(handle);
        Ok(handle)
    }

    fn holds_primary(&self) -> bool {
        self.primary.lock().is_some()
    }

    /// Whether a context is the primary one. Does not make the primary context.
    fn is_primary(&self, api: &Api, handle: Handle) -> Result<bool> {
        if self.primary.lock().is_none() {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: places for the answers and a device of this driver.
            unsafe { api.primary_ctx_get_state(self.device, &mut flags, &mut active) }?;
            if active == 0 {
                return Ok(false);
            }
        }
        Ok(self.primary(api)? == handle)
    }

    fn release(&self, api: &Api) {
        let Some(handle) = self.primary.lock().take() else { return };
        let streams = std::mem::take(&mut *self.streams.lock());
        let entered = (Context { handle, primary: true }).enter(api).map(|_current| {
            for stream in streams {
                stream.destroy(api);
            }
        });
        let released = entered.and_then(|()| {
            // SAFETY: `primary` has retained it, and `take` leaves nothing to release again.
            unsafe { api.primary_ctx_release(self.device) }
        });
        if let Err(error) = released {
            tracing::debug!(%error, "GPU {}: primary context not released", self.ordinal);
        }
    }
}

impl Context {
    fn enter(self, api: &Api) -> Result<Current<'_>> {
        // SAFETY: a live context: retained, or named by the driver as that of live memory.
        unsafe { Current::enter(api, self.handle) }
    }
}

impl Driver {
    fn enter_primary(&self, gpu: &Gpu) -> Result<Current<'_>> {
        Context { handle: gpu.primary(&self.api)?, primary: true }.enter(&self.api)
    }

    /// The GPU and the context of memory: its own (`cuMemAlloc`), or else its GPU's primary one. Refuses addresses that CUDA does not
    /// know: on some machines a GPU would access the heap there.
    fn memory_context(&self, addr: u64) -> Result<(&Gpu, Context)> {
        self.owner.check()?;
        let asked =
            [pointer_attribute::CONTEXT, pointer_attribute::MEMORY_TYPE, pointer_attribute::DEVICE_ORDINAL];
        let [own, kind, ordinal] = raw::attributes(&self.api, addr, asked)?;
        if raw::number(kind) == 0 {
            return Err(unknown(addr));
        }
        let gpu = self.gpu(raw::number(ordinal).cast_signed())?;
        let own = Handle::from_ne_bytes(own.to_ne_bytes());
        let (handle, primary) = match own {
            0 => (gpu.primary(&self.api)?, true),
            _ => (own, gpu.is_primary(&self.api, own)?),
        };
        Ok((gpu, Context { handle, primary }))
    }
}

/// GPU pages are this large for pinning; bytes.
const ALIGN: usize = 64 << 10;

/// How to free an allocation.
#[derive(Clone, Copy, Debug)]
enum Allocation {
    /// The address that `cuMemAlloc` returned, at or before the one of `alloc`.
    Malloc { ordinal: i32, raw: u64 },
    /// `cuMemMap` of this many bytes, in a reservation of the same size.
    Vmm { ordinal: i32, len: usize },
}

impl Driver {
    fn allocate(&self, gpu: &Gpu, len: usize, kind: AllocKind) -> Result<u64> {
        if len == 0 {
            return Err(Error::invalid("length", len, "at least one byte"));
        }
        let _current = self.enter_primary(gpu)?;
        let made = match kind {
            AllocKind::Malloc => self.malloc(gpu, len),
            AllocKind::Vmm => self.vmm(gpu, len),
        };
        let (addr, allocation) = made.map_err(|error| match error {
            Error::Cuda { status: CudaStatus::OUT_OF_MEMORY, .. } => {
                Error::Exhausted { what: "GPU memory", len, fix: CudaStatus::OUT_OF_MEMORY.fix() }
            }
            other => other,
        })?;
        self.allocations.lock().insert(addr, allocation);
        Ok(addr)
    }

    /// `cuMemAlloc` guarantees 256 bytes of alignment, so this allocates more and aligns.
    fn malloc(&self, gpu: &Gpu, len: usize) -> Result<(u64, Allocation)> {
        let more = len.checked_add(ALIGN - 1).ok_or(too_long(len))?;
        let mut raw = 0;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.mem_alloc(&mut raw, more) }?;
        if let Err(error) = self.set_sync_memops(raw) {
            // SAFETY: allocated above; nothing else knows it.
            unsafe { self.api.mem_free(raw) }.unwrap_or_else(|error| leaked(raw, &error));
            return Err(error);
        }
        let addr = raw.next_multiple_of(ALIGN as u64);
        Ok((addr, Allocation::Malloc { ordinal: gpu.ordinal, raw }))
    }

    fn vmm(&self, gpu: &Gpu, len: usize) -> Result<(u64, Allocation)> {
        let location = MemLocation { kind: LOCATION_DEVICE, id: gpu.device };
        let prop = AllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_TYPE_FD,
            location,
            win32_meta_data: 0,
            compression: 0,
            gpu_direct_rdma: u8::from(self.attribute(gpu, RDMA_WITH_VMM_SUPPORTED)? != 0),
            usage: 0,
            reserved: [0; 4],
        };
        let mut granularity = 0;
        // SAFETY: a place for the answer and properties of the driver's layout.
        unsafe { self.api.mem_get_allocation_granularity(&mut granularity, &prop, GRANULARITY_MINIMUM) }?;
        let granularity = granularity.max(ALIGN);
        let len = len.checked_next_multiple_of(granularity).ok_or(too_long(len))?;
        let mut memory = 0;
        // SAFETY: a place for the answer and properties of the driver's layout.
        unsafe { self.api.mem_create(&mut memory, len, &prop, 0) }?;
        let shown = self.show(memory, len, granularity, location);
        // From here on the mapping alone holds the memory.
        // SAFETY: created above, given back once.
        unsafe { self.api.mem_release(memory) }.unwrap_or_else(|error| leaked(memory, &error));
        Ok((shown?, Allocation::Vmm { ordinal: gpu.ordinal, len }))
    }

    /// Maps memory at a new address and enables GPU access. Undoes everything on failure.
    fn show(&self, memory: u64, len: usize, align: usize, location: MemLocation) -> Result<u64> {
        let mut addr = 0;
        // SAFETY: a place for the answer.
        unsafe { self.api.mem_address_reserve(&mut addr, len, align, 0, 0) }?;
        // SAFETY: the range was reserved above, and the caller made the memory with this length.
        let mapped = unsafe { self.api.mem_map(addr, len, 0, memory, 0) };
        if let Err(error) = mapped {
            self.unreserve(addr, len).unwrap_or_else(|error| leaked(addr, &error));
            return Err(error);
        }
        let access = AccessDesc { location, flags: ACCESS_READ_WRITE };
        // SAFETY: the range was mapped above; one description.
        let usable = unsafe { self.api.mem_set_access(addr, len, &access, 1) };
        if let Err(error) = usable {
            self.unmap(addr, len).unwrap_or_else(|error| leaked(addr, &error));
            return Err(error);
        }
        // Not every driver has the attribute for VMM memory. Without it CUDA's small copies to this memory may return early; copies of
        // this crate wait in any case.
        if let Err(error) = self.set_sync_memops(addr) {
            tracing::debug!(%error, "VMM memory at {addr:#x} without SYNC_MEMOPS");
        }
        Ok(addr)
    }

    /// Undoes `cuMemMap` and the reservation.
    fn unmap(&self, addr: u64, len: usize) -> Result<()> {
        // SAFETY: a whole mapping made here that nothing uses any more.
        unsafe { self.api.mem_unmap(addr, len) }?;
        self.unreserve(addr, len)
    }

    fn unreserve(&self, addr: u64, len: usize) -> Result<()> {
        // SAFETY: a whole reservation made here, with nothing mapped in it.
        unsafe { self.api.mem_address_free(addr, len) }
    }

    fn set_sync_memops(&self, addr: u64) -> Result<()> {
        let on = 1u32;
        // SAFETY: the attribute takes a 32-bit number; the memory is live.
        unsafe { self.api.pointer_set_attribute(from_ref(&on).cast(), pointer_attribute::SYNC_MEMOPS, addr) }
    }
}

fn too_long(len: usize) -> Error {
    Error::invalid("length", len, "at most the memory of the GPU")
}

fn leaked(what: u64, error: &Error) {
    tracing::warn!(%error, "GPU memory {what:#x} stays allocated until the process ends");
}

// Copies run on streams of the driver object. The legacy stream, which CUDA's synchronous copies use, waits for the blocking streams
// of the application, and those may wait for this copy.
//
// If the application blocks as many streams as the GPU has hardware queues for this process (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by
// default), an H200 runs no other stream of any priority. So copies through a bounce buffer have a timeout. There is no buffer for
// memory of another context while its GPU has no primary context: pinned memory lasts as long as its context, and only the primary
// one is retained here. Making one would take a second and much GPU memory.

/// The largest copy through a pinned bounce buffer, bytes. To the host the buffer is faster: on an H200 8 KiB take 6.6 us instead of
/// 8.7, and 256 KiB 22 instead of 29. It also allows a timeout, since the copy does not use the caller's memory.
const BOUNCE: usize = 256 << 10;

/// The time limit of a copy through the bounce buffer: a thousand times what it needs.
const COPY_TIMEOUT: Duration = Duration::from_secs(2);
/// A wait spins for this long, and then sleeps between polls.
const SPIN: Duration = Duration::from_millis(1);

/// A stream with a bounce buffer.
struct CopyStream {
    stream: Handle,
    /// The address of the bounce buffer of [`BOUNCE`] bytes, 0 for none.
    bounce: usize,
}

impl CopyStream {
    /// The bounce buffer, if a copy of this length fits.
    fn pinned(&self, len: usize) -> Option<*mut u8> {
        let fits = len <= BOUNCE && self.bounce != 0;
        fits.then(|| std::ptr::with_exposed_provenance_mut(self.bounce))
    }

    /// Destroys an idle stream. Its context must be current.
    fn destroy(self, api: &Api) {
        // SAFETY: made here, destroyed once, with its context current.
        let destroyed = unsafe { api.stream_destroy(self.stream) };
        let freed = match self.bounce {
            0 => Ok(()),
            // SAFETY: the context is current, and nothing runs that uses the buffer.
            bounce => unsafe { api.mem_free_host(std::ptr::with_exposed_provenance_mut(bounce)) },
        };
        if let Err(error) = destroyed.and(freed) {
            tracing::debug!(%error, "stream not destroyed");
        }
    }
}

impl Driver {
    /// Runs a copy of `len` bytes from or to GPU memory at `addr` on a stream, and `finish` when the bytes are there.
    fn on_stream(
        &self,
        device: i32,
        addr: u64,
        len: usize,
        start: impl FnOnce(&CopyStream) -> Result<()>,
        finish: impl FnOnce(&CopyStream),
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let (gpu, context) = self.memory_context(addr)?;
        if gpu.ordinal != device {
            return Err(Error::invalid("device", device, "the GPU that the memory is on"));
        }
        let _current = context.enter(&self.api)?;
        let idle = if context.primary { gpu.streams.lock().pop() } else { None };
        let mut stream = idle.map_or_else(|| self.new_stream(context.primary), Ok)?;
        let lender = if context.primary || len > BOUNCE { None } else { self.stream_with_buffer(gpu) };
        if let Some(lender) = &lender {
            stream.bounce = lender.bounce;
        }
        let started = start(&stream);
        // Also after a failure, since part of the copy may be in progress.
        match self.wait(&stream, stream.pinned(len).is_some()) {
            Ok(()) => {
                if started.is_ok() {
                    finish(&stream);
                }
                // All are kept: CUDA may wait for all work of the GPU to free pinned memory.
                if context.primary {
                    gpu.streams.lock().push(stream);
                } else {
                    stream.bounce = 0;
                    stream.destroy(&self.api);
                    gpu.streams.lock().extend(lender);
                }
                started
            }
            Err(error) => {
                // After a timeout the GPU may still use the stream and its buffer, so they are leaked.
                // Nor may what was lent, as its own context is not current.
                if !matches!(error, Error::Timeout { .. }) {
                    if lender.is_some() {
                        stream.bounce = 0;
                    }
                    stream.destroy(&self.api);
                }
                started.and(Err(error))
            }
        }
    }

    /// Waits until the bytes are in place: an asynchronous copy from pageable memory may return earlier. A copy of the caller's own
    /// memory has no timeout, since the GPU would continue to use it.
    fn wait(&self, stream: &CopyStream, may_give_up: bool) -> Result<()> {
        if !may_give_up {
            // SAFETY: the caller's stream is alive, and its context is current.
            return unsafe { self.api.stream_synchronize(stream.stream) };
        }
        let start = Instant::now();
        loop {
            // Read before the poll, so that a process that was stopped in between polls once more.
            let waited = start.elapsed();
            // SAFETY: the caller's stream is alive, and its context is current.
            let done = unsafe { self.api.stream_query(stream.stream) };
            if !matches!(done, Err(Error::Cuda { status: CudaStatus::NOT_READY, .. })) {
                return done;
            }
            match waited {
                spinning if spinning < SPIN => std::hint::spin_loop(),
                waiting if waiting < COPY_TIMEOUT => std::thread::sleep(SPIN / 10),
                _ => {
                    return Err(Error::Timeout {
                        what: "a copy by CUDA (which may still happen)",
                        after: COPY_TIMEOUT,
                        fix: "let fewer streams wait at a time than CUDA_DEVICE_MAX_CONNECTIONS (8 by default, 32 at \
                              most): with that many, no other work of this process runs on the GPU",
                    });
                }
            }
        }
    }

    /// Makes a stream of the highest priority.
    fn new_stream(&self, kept: bool) -> Result<CopyStream> {
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        // SAFETY: places for the answers; a context is current.
        unsafe { self.api.ctx_get_stream_priority_range(&mut least, &mut greatest) }?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, greatest) }?;
        Ok(CopyStream { stream, bounce: if kept { self.pinned() } else { 0 } })
    }

    /// A stream of the primary context, if there is one, whose bounce buffer another context may use: memory is pinned for all
    /// contexts.
    fn stream_with_buffer(&self, gpu: &Gpu) -> Option<CopyStream> {
        if !gpu.holds_primary() {
            return None;
        }
        let idle = gpu.streams.lock().pop();
        let made = || self.enter_primary(gpu).and_then(|_current| self.new_stream(true));
        idle.map_or_else(made, Ok)
            .inspect_err(|error| tracing::debug!(%error, "a copy goes without a pinned buffer"))
            .ok()
    }

    /// Allocates a bounce buffer; without one, copies are slower and have no timeout.
    fn pinned(&self) -> usize {
        let mut bounce = std::ptr::null_mut();
        // SAFETY: a place for the answer; a context is current.
        let allocated = unsafe { self.api.mem_host_alloc(&mut bounce, BOUNCE, HOST_ALLOC_PORTABLE) };
        match allocated {
            Ok(()) => bounce.expose_provenance(),
            Err(error) => {
                tracing::debug!(%error, "copies to the host go without a pinned buffer");
                0
            }
        }
    }
}
