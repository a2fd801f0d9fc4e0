//! Registration of host memory with CUDA, and memory of the application.
//!
//! CUDA registers whole pages, each once. Memories of the application may share a page; then they share its registration, which is
//! given back when the last of them is dropped.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdrcopy::cuda::raw::layout::pointer_attribute;
use gdrcopy::cuda::raw::{Api, pointer_info};
use gdrcopy::cuda::{CudaStatus, MemoryKind, PointerInfo};
use parking_lot::Mutex;

use super::deferred_free::DeferredFree;
use super::{Gpu, Pages};
use crate::error::{Error, Result};
use crate::fork_guard::PerProcess;
use crate::memory::{Memory, host_page};

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: for all contexts of the process, by address.
const PORTABLE_MAPPED: u32 = 3;
/// `CU_MEMHOSTREGISTER_IOMEMORY`: the registers of a device, which has no pages of memory.
const IO_MEMORY: u32 = 4;
/// Bytes of a page of GPU memory, as cards reach it.
const GPU_PAGE: usize = 64 << 10;
/// Maximum wait for CUDA to unregister device registers; waiting streams delay it.
const FORGET: Duration = Duration::from_secs(600);
/// What fails without permission, and the remedy.
const DOORBELLS: &str = "letting the GPU ring the card's doorbells, for which the NVIDIA driver asks for root or for its option \
                         NVreg_RegistryDwords=\"PeerMappingOverride=1;\" (in /etc/modprobe.d, then reload it); \
                         GDSYNC_PATH=proxy works without";

/// Ends and registrations by driver and first page. None overlap.
type Table = BTreeMap<(usize, usize), (usize, Weak<Ours>)>;

/// The registrations of this process.
static REGISTERED: PerProcess<Mutex<Table>> = PerProcess::new();
/// Held while memory is being registered.
static REGISTERING: Mutex<()> = Mutex::new(());

/// Registered host memory. After the drop a thread unregisters it: see `deferred_free`.
pub struct Registered {
    /// The GPU's address of the first byte.
    addr: u64,
    /// The registrations; empty if the application has registered the memory.
    ours: Vec<Arc<Ours>>,
}

/// A registration of pages.
struct Ours {
    gpu: Gpu,
    pages: Range<usize>,
    /// The pages go to the free list.
    free_list: bool,
}

impl Ours {
    /// Enters a registration in the table.
    fn new(gpu: &Gpu, pages: Range<usize>) -> Arc<Self> {
        let ours = Arc::new(Self { gpu: gpu.clone(), pages, free_list: false });
        REGISTERED.get().lock().insert(ours.key(), (ours.pages.end, Arc::downgrade(&ours)));
        ours
    }

    fn key(&self) -> (usize, usize) {
        (driver(self.gpu.api()), self.pages.start)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        // Under the lock, so that the pages are in the table or queued to be given back.
        let mut table = REGISTERED.get().lock();
        table.remove(&self.key());
        if !self.free_list {
            let (first, len) = (self.pages.start, self.pages.len());
            self.gpu.defer_free(DeferredFree::Host { first, len, unmap: false });
        }
    }
}

/// Whether any of these pages is registered.
pub fn is_registered(pages: &Range<usize>) -> bool {
    let overlaps = |start: usize, end: usize| start < pages.end && pages.start < end;
    let table = REGISTERED.get().lock();
    table.iter().any(|((_, start), (end, ours))| overlaps(*start, *end) && ours.strong_count() > 0)
}

/// Identifies a driver.
fn driver(api: &Api) -> usize {
    api.mem_host_register.map_or(0, |entry| entry as usize)
}

impl Registered {
    /// Pages that are still registered.
    pub fn of_pages(gpu: &Gpu, pages: Pages) -> Self {
        let first = pages.ptr.as_ptr().expose_provenance();
        let ours = Ours::new(gpu, first..first + pages.len);
        Self { addr: pages.addr, ours: vec![ours] }
    }

    /// Keeps the bytes registered for the next user if it may, or gives them back to CUDA and the system. Returns false if the caller must
    /// unmap them.
    pub fn recycle(mut self, ptr: NonNull<u8>, len: usize, may_keep: bool) -> bool {
        let Some(mut ours) = self.ours.pop().and_then(Arc::into_inner) else { return false };
        ours.free_list = true;
        let (gpu, first) = (ours.gpu.clone(), ours.pages.start);
        drop(ours);
        if !may_keep || !gpu.free_list().put_host(Pages { ptr, len, addr: self.addr }) {
            gpu.defer_free(DeferredFree::Host { first, len, unmap: true });
        }
        true
    }

    /// Memory that the application has registered or pinned.
    pub fn of_application(addr: u64) -> Self {
        Self { addr, ours: Vec::new() }
    }

    /// Unregisters the memory, and drops `guard`, which keeps it mapped, afterwards.
    pub fn unregister_before(self, guard: Arc<dyn Any + Send + Sync>) {
        let gpu = self.ours.first().map(|ours| ours.gpu.clone());
        drop(self);
        let Some(gpu) = gpu else { return };
        let wait = move || {
            if gpu.reclaim(FORGET).is_err() {
                tracing::debug!("a device stays open: CUDA has not let its registers go");
                std::mem::forget(guard);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gdsync-close".into()).spawn(wait) {
            tracing::debug!(%error, "a device may be closed while CUDA knows its registers");
        }
    }

    /// The address on the GPU.
    pub fn addr(&self) -> u64 {
        self.addr
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({:#x})", self.addr)
    }
}

impl Gpu {
    /// Registers host memory, except for pages that the application has pinned or registered.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::InvalidArgument`] if the application has registered only a part of the memory.
    pub fn register(&self, ptr: NonNull<u8>, len: usize) -> Result<Registered> {
        self.register_as(ptr, len, PORTABLE_MAPPED)
    }

    /// Registers device registers, so that the GPU can write them.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn register_io(&self, ptr: NonNull<u8>, len: usize) -> Result<Registered> {
        let refused = match self.register_as(ptr, len, PORTABLE_MAPPED | IO_MEMORY) {
            Err(refused) => refused,
            done => return done,
        };
        tracing::debug!(error = %refused, "CUDA does not take these registers of a device for IO memory");
        // Registers of a device in software are ordinary memory.
        self.register_as(ptr, len, PORTABLE_MAPPED).map_err(|_| match refused {
            Error::Cuda { source, .. } => Error::Cuda { what: DOORBELLS, source },
            other => other,
        })
    }

    fn register_as(&self, ptr: NonNull<u8>, len: usize, flags: u32) -> Result<Registered> {
        let start = ptr.as_ptr().expose_provenance();
        let bytes = start..start + len;
        let page = host_page();
        let pages = start - start % page..bytes.end.next_multiple_of(page);
        let _current = self.enter()?;
        // Not the lock of the table, which drops take: CUDA may block until streams are idle.
        let _alone = REGISTERING.lock();
        let mut ours = loop {
            self.deferred_free().wait_unregistered(&pages)?;
            if let Some(ours) = self.registered(&pages) {
                break ours;
            }
            // Another thread is about to unregister one of them.
            std::thread::yield_now();
        };
        let mut next = pages.start;
        let mut gaps = Vec::new();
        for known in &ours {
            gaps.push(next..known.pages.start);
            next = known.pages.end;
        }
        gaps.push(next..pages.end);
        for gap in gaps.into_iter().filter(|gap| !gap.is_empty()) {
            ours.extend(self.register_pages(gap, &bytes, flags)?);
        }
        let addr = self.device_pointer(start).map_err(Error::cuda("finding registered memory"))?;
        Ok(Registered { addr, ours })
    }

    /// The registrations of these pages, in order; `None` while one of them is being given back.
    fn registered(&self, pages: &Range<usize>) -> Option<Vec<Arc<Ours>>> {
        let table = REGISTERED.get().lock();
        let before = table.range((driver(self.api()), 0)..(driver(self.api()), pages.end)).rev();
        let overlap = before.map(|(_, known)| known).take_while(|(end, _)| *end > pages.start);
        let found: Vec<_> = overlap.map(|(_, ours)| ours.upgrade()).collect();
        let is_leaving = self.deferred_free().is_leaving(pages);
        drop(table);
        let found = found.into_iter().rev().collect::<Option<Vec<_>>>();
        found.filter(|_| !is_leaving)
    }

    /// Registers pages that this library has not registered; `None` if the application has.
    fn register_pages(
        &self,
        pages: Range<usize>,
        bytes: &Range<usize>,
        flags: u32,
    ) -> Result<Option<Arc<Ours>>> {
        let ends = [pages.start.max(bytes.start), pages.end.min(bytes.end) - 1];
        let is_known = |at: usize| self.device_pointer(at).is_ok();
        if !ends.into_iter().any(is_known) {
            tracing::trace!(?pages, "host memory is registered with CUDA");
            let first = std::ptr::with_exposed_provenance_mut::<c_void>(pages.start);
            // SAFETY: the pages are mapped, and their owner keeps them until they are unregistered.
            match unsafe { self.api().mem_host_register(first, pages.len(), flags) } {
                // The application has registered other parts of the pages.
                Err(gdrcopy::Error::Cuda { status: CudaStatus::HOST_MEMORY_ALREADY_REGISTERED, .. }) => {}
                done => {
                    done.map_err(Error::cuda("registering host memory with CUDA"))?;
                    return Ok(Some(Ours::new(self, pages)));
                }
            }
        }
        if ends.into_iter().all(is_known) {
            return Ok(None);
        }
        let value = format!("{} bytes at {:#x}", bytes.len(), bytes.start);
        Err(Error::invalid(
            "memory for a GPU",
            value,
            "memory that the application registered with CUDA whole or not at all",
        ))
    }

    /// The address of registered memory on this GPU, whose context must be current.
    fn device_pointer(&self, at: usize) -> gdrcopy::Result<u64> {
        let mut addr = 0;
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(at);
        // SAFETY: a place for the answer; the driver checks the address.
        unsafe { self.api().mem_host_get_device_pointer(&mut addr, at, 0) }?;
        Ok(addr)
    }
}

/// Unregisters pages. A context must be current.
pub(super) fn unregister(api: &Api, first: usize) -> Result<()> {
    let first = std::ptr::with_exposed_provenance_mut::<c_void>(first);
    // SAFETY: the caller owns the registration and gives it back once.
    unsafe { api.mem_host_unregister(first) }.map_err(Error::cuda("giving back host memory"))
}

impl Gpu {
    /// Wraps memory of the application, by what CUDA knows of its address:
    ///
    /// | memory | result |
    /// |---|---|
    /// | `cudaMalloc`, `cudaMallocAsync`, `cuMemCreate` | GPU memory, mapped for the CPU |
    /// | the same where gdrcopy cannot map it | GPU memory that only copy engines access: [`Memory::is_mapped`] |
    /// | `cudaHostAlloc`, `cudaHostRegister` | host memory, already registered |
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address unknown to CUDA, memory of another GPU, or a range that exceeds its allocation;
    /// [`Error::Unsupported`] for managed memory; [`Error::Cuda`].
    ///
    /// # Safety
    /// The memory must stay allocated until every clone of the result is dropped, and no Rust reference to it may be used meanwhile.
    pub unsafe fn wrap(&self, addr: u64, len: usize) -> Result<Memory> {
        let current = self.enter()?;
        let info = pointer_info(self.api(), addr).map_err(Error::cuda("asking CUDA what an address is"))?;
        match info.kind {
            MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool => {
                if info.device != self.ordinal() {
                    let value = format!("memory of GPU {} for GPU {}", info.device, self.ordinal());
                    return Err(Error::invalid("GPU", value, "the GPU that the memory is on"));
                }
                check_range(&info, addr, len)?;
                drop(current);
                Ok(self.wrap_own(&info, addr, len))
            }
            MemoryKind::Host => {
                check_range(&info, addr, len)?;
                let host = self.attribute(pointer_attribute::HOST_POINTER, addr)?;
                let device = self.attribute(pointer_attribute::DEVICE_POINTER, addr)?;
                let host = usize::try_from(host).map_err(|_| unknown(addr))?;
                let ptr = std::ptr::with_exposed_provenance_mut(host);
                // SAFETY: CUDA knows the range as host memory; the caller promised the rest.
                unsafe { Memory::from_registered(ptr, len, Registered::of_application(device)) }
            }
            MemoryKind::Managed => Err(Error::Unsupported {
                what: "managed memory",
                by: "a memory region, whose bytes must stay where they are",
                fix: "use memory of cudaMalloc, or host memory of cudaHostAlloc",
            }),
            _ => Err(unknown(addr)),
        }
    }

    /// The GPU memory at an address, on any GPU, as [`Gpu::wrap`] gives it. `None` if this process has not loaded `libcuda`,
    /// which this call does not load, or not initialised it, or if the address is not in GPU memory.
    ///
    /// A card reaches whole pages of GPU memory, so the range may end up to 64 KiB behind the allocation. The result ends with it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that exceeds its allocation further, [`Error::Unsupported`] for a GPU or driver that is
    /// too old, [`Error::Cuda`].
    ///
    /// # Safety
    /// As [`Gpu::wrap`].
    pub unsafe fn find(addr: u64, len: usize) -> Result<Option<Memory>> {
        let Some(info) = find_info(addr)? else { return Ok(None) };
        let len = within(&info, addr, len);
        check_range(&info, addr, len)?;
        let gpu = Self::open(info.device)?;
        Ok(Some(gpu.wrap_own(&info, addr, len)))
    }

    /// The GPU that the memory at an address is on; `None` as from [`Gpu::find`].
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn at(addr: u64) -> Result<Option<Self>> {
        find_info(addr)?.map(|info| Self::open(info.device)).transpose()
    }

    /// Memory of this GPU, mapped if possible.
    fn wrap_own(&self, info: &PointerInfo, addr: u64, len: usize) -> Memory {
        let mapped = self.gdr().and_then(|gdr| gdr.map(addr, len).map_err(Error::cuda("mapping GPU memory")));
        match mapped {
            Ok(mapping) => Memory::on_gpu(self, mapping),
            Err(error) => {
                tracing::info!(addr, len, kind = ?info.kind, %error, "GPU memory without a mapping: copy engines move it");
                Memory::unmapped(self, addr, len, error.to_string())
            }
        }
    }

    /// An 8-byte attribute of an address.
    fn attribute(&self, attribute: u32, addr: u64) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: a place for the answer, which has eight bytes.
        unsafe { self.api().pointer_get_attribute((&raw mut value).cast(), attribute, addr) }
            .map_err(Error::cuda("finding host memory on the GPU"))?;
        Ok(value)
    }
}

/// Whether the program has loaded `libcuda`, which stays.
fn is_loaded() -> bool {
    static SEEN: AtomicBool = AtomicBool::new(false);
    if SEEN.load(Ordering::Relaxed) {
        return true;
    }
    // SAFETY: the name is a string; with this flag nothing is loaded.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return false;
    }
    // SAFETY: gives back the reference that the call above took. Others hold the library.
    unsafe { libc::dlclose(library) };
    SEEN.store(true, Ordering::Relaxed);
    true
}

/// What CUDA knows of GPU memory at an address; `None` if it is not loaded or initialised, or knows none.
fn find_info(addr: u64) -> Result<Option<PointerInfo>> {
    if !is_loaded() {
        return Ok(None);
    }
    let api = Api::load().map_err(Error::cuda("loading CUDA"))?;
    let info = match pointer_info(&api, addr) {
        // A program of the host, linked with CUDA.
        Err(gdrcopy::Error::Cuda { status: CudaStatus::NOT_INITIALIZED, .. }) => return Ok(None),
        known => known.map_err(Error::cuda("asking CUDA what an address is"))?,
    };
    Ok(Some(info).filter(|info| matches!(info.kind, MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool)))
}

/// The length of a range without what a page of the GPU holds behind its allocation.
fn within(info: &PointerInfo, addr: u64, len: usize) -> usize {
    let rest = addr.checked_sub(info.base).and_then(|at| info.size.checked_sub(usize::try_from(at).ok()?));
    match rest {
        Some(rest) if rest > 0 && len <= rest.saturating_add(GPU_PAGE - 1) => len.min(rest),
        _ => len,
    }
}

fn unknown(addr: u64) -> Error {
    Error::invalid(
        "address",
        format!("{addr:#x}"),
        "live memory of cudaMalloc, cuMemCreate, cudaMallocAsync or cudaHostRegister; for other host memory, Memory::from_raw",
    )
}

/// Checks that a range lies in its allocation. Old drivers do not report the size of some.
fn check_range(info: &PointerInfo, addr: u64, len: usize) -> Result<()> {
    let fits = || {
        let offset = usize::try_from(addr.checked_sub(info.base)?).ok()?;
        offset.checked_add(len).filter(|&end| end <= info.size)
    };
    if len > 0 && (info.size == 0 || fits().is_some()) {
        return Ok(());
    }
    let allocation =
        format!("{len} bytes at {addr:#x}, in an allocation of {} bytes at {:#x}", info.size, info.base);
    Err(Error::invalid("range", allocation, "at least one byte, inside one allocation"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use gdsync_testkit::driver;
    use gdsync_testkit::process::{End, in_child};

    use super::*;

    #[test]
    fn a_forked_child_allocates_while_its_parent_registers() {
        let _held = REGISTERED.get().lock();
        assert_eq!(in_child(|| Memory::alloc(4096).is_ok()), End::Said(true));
    }

    /// The next user of kept pages must not share them with another process.
    #[test]
    fn shared_pages_are_not_kept() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
        let (pages, file) = Memory::shared(c"test", 4096).unwrap();
        let other = Memory::of_shared(&file, 4096).unwrap();
        let remapped = Memory::alloc(4096).unwrap();
        remapped.remap(Some(file.as_fd())).unwrap();
        for memory in [pages, remapped] {
            memory.gpu_addr(&gpu).unwrap();
            drop(memory);
        }
        for _ in 0..2 {
            gpu.alloc_host_piece(4096).unwrap().fill(0, 4096, 7).unwrap();
        }
        assert_eq!(other.to_vec(), [0; 4096]);
    }

    #[test]
    fn a_page_of_the_gpu_ends_with_its_allocation() {
        let info = info();
        for (addr, len, left) in [
            (0x1000, 0x1000, 0x100),
            (0x1080, 0x80, 0x80),
            (0x1080, 0x81, 0x80),
            (0x1000, 0x100ff, 0x100),
            // Further behind, before, and behind the allocation: for `check_range` to refuse.
            (0x1000, 0x10100, 0x10100),
            (0xfff, 1, 1),
            (0x1100, 1, 1),
        ] {
            assert_eq!(within(&info, addr, len), left, "{addr:#x} {len:#x}");
        }
    }

    fn info() -> PointerInfo {
        PointerInfo { kind: MemoryKind::Malloc, device: 0, base: 0x1000, size: 0x100, buffer_id: 1 }
    }

    #[test]
    fn a_range_must_lie_in_its_allocation() {
        let info = info();
        for (addr, len, ok) in [
            (0x1000, 0x100, true),
            (0x10ff, 1, true),
            (0x1000, 0x101, false),
            (0x10ff, 2, false),
            (0xfff, 1, false),
            (0x1000, 0, false),
            (0x1001, usize::MAX, false),
        ] {
            assert_eq!(check_range(&info, addr, len).is_ok(), ok, "{addr:#x} {len:#x}");
        }
        check_range(&PointerInfo { size: 0, ..info }, 0x5000, 10).unwrap();
    }
}
