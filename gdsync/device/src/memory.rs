//! Memory shared with devices. All reads and writes of it are in this module.
//!
//! Rings, doorbell records, doorbells and payload are [`Memory`]. No `&[u8]` or `&mut [u8]` refers to it: bytes are copied in and out,
//! words are atomics. Accesses are bounds-checked, and a clone keeps the bytes mapped, so a late access cannot fault.
//!
//! The bytes are in host memory, or on a GPU behind a mapping (`gdrcopy`). Through a mapping a load takes a microsecond, and stores
//! stay in write-combining buffers, so stores of this module end with a fence. Host memory is registered with CUDA when a GPU first
//! uses it.

mod access;
mod checked;
mod pages;
mod peer;
mod process;
mod word;

use std::any::Any;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::{fmt, mem};

use gdrcopy::copy::store_fence;
pub use gdrcopy::host_page;
use gdrcopy::{Mapping, MappingType};
use parking_lot::Mutex;

pub use self::access::Plain;
use self::pages::DmaBuf;
pub(crate) use self::pages::check_file_limit;
pub use self::pages::{check_memfd, clear_eventfd, eventfd, memfd, signal_eventfd};
pub use self::peer::{ExportedMemory, PeerMemory};
pub use self::process::{MARK, Process, user};
pub use self::word::{Found, Place, Word32, Word64};
use crate::cuda::{Buffer, Flush, Gpu, Pages, Registered};
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;

/// A range of bytes shared with devices. Clones are cheap and share the bytes.
#[derive(Clone)]
pub struct Memory {
    ptr: NonNull<u8>,
    len: usize,
    /// Address of the first byte in work requests.
    addr: u64,
    reach: Reach,
    owner: Arc<Owner>,
}

/// How the CPU accesses the bytes.
#[derive(Clone, Copy, Debug)]
enum Reach {
    /// Host memory.
    Host,
    /// Host memory that its program may unmap at any time: copied by the kernel, which checks the addresses.
    Checked,
    /// GPU memory or device registers, behind a mapping of this type.
    Mapped(MappingType),
    /// GPU memory without a mapping: only copy engines access it.
    Engine,
}

/// A weak handle of a [`Memory`].
#[derive(Debug)]
pub struct WeakMemory {
    memory: Parts,
    owner: Weak<Owner>,
}

/// A [`Memory`] without its owner.
#[derive(Clone, Copy, Debug)]
struct Parts {
    ptr: NonNull<u8>,
    len: usize,
    addr: u64,
    reach: Reach,
}

// SAFETY: an address only; the bytes are reached through a `Memory`.
unsafe impl Send for WeakMemory {}

impl WeakMemory {
    /// The memory, if it still exists.
    pub fn upgrade(&self) -> Option<Memory> {
        let Parts { ptr, len, addr, reach } = self.memory;
        Some(Memory { ptr, len, addr, reach, owner: self.owner.upgrade()? })
    }

    /// Whether it still exists.
    pub fn is_there(&self) -> bool {
        self.owner.strong_count() > 0
    }
}

/// Keeps the bytes alive.
struct Owner {
    bytes: Bytes,
    /// Registration with CUDA, of host memory that a GPU uses.
    registered: OnceLock<Registered>,
    /// Held while the bytes are being registered.
    registering: Mutex<()>,
    fork_guard: ForkGuard,
}

enum Bytes {
    Mapped {
        ptr: NonNull<u8>,
        len: usize,
        /// Of a file that others may have mapped, too, now or before.
        is_shared: AtomicBool,
    },
    Borrowed {
        ptr: NonNull<u8>,
        len: usize,
    },
    /// A dma-buf of another driver, mapped.
    DmaBuf(Arc<DmaBuf>),
    /// Registers of a device, mapped while the guard lives.
    Io {
        ptr: NonNull<u8>,
        len: usize,
        guard: Arc<dyn Any + Send + Sync>,
    },
    /// GPU memory of the application.
    Gpu {
        gpu: Gpu,
        mapping: Mapping,
    },
    /// GPU memory of this library.
    Buffer(Buffer),
    /// GPU memory without a mapping, with the reason.
    Unmapped {
        gpu: Gpu,
        why: String,
    },
}

impl Bytes {
    /// The GPU that they are on.
    #[inline]
    fn gpu(&self) -> Option<&Gpu> {
        match self {
            Bytes::Gpu { gpu, .. } | Bytes::Unmapped { gpu, .. } => Some(gpu),
            Bytes::Buffer(buffer) => Some(buffer.gpu()),
            Bytes::Mapped { .. } | Bytes::Borrowed { .. } | Bytes::DmaBuf(_) | Bytes::Io { .. } => None,
        }
    }

    /// The mapping of GPU memory, if there is one.
    fn mapping(&self) -> Option<&Mapping> {
        match self {
            Bytes::Gpu { mapping, .. } => Some(mapping),
            Bytes::Buffer(buffer) => Some(buffer.mapping()),
            _ => None,
        }
    }
}

// SAFETY: the bytes are only reached through volatiles, atomics, and copies in assembly of this module and of gdrcopy, which any
// thread may do at any time; the owner frees them once, when the last clone goes.
unsafe impl Send for Memory {}
// SAFETY: no method returns a plain reference to the bytes; all accesses are volatile, atomic, or copies in assembly.
unsafe impl Sync for Memory {}
// SAFETY: the mapping may be unmapped from any thread.
unsafe impl Send for Owner {}
// SAFETY: `Owner` only hands out addresses; only its drop touches the pointer.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        let registered = self.registered.take();
        if !self.fork_guard.is_here() {
            // Registration, mapping and GPU belong to the parent, and the child may have other pages at these addresses.
            let nothing = Bytes::Borrowed { ptr: NonNull::dangling(), len: 0 };
            return mem::forget((registered, mem::replace(&mut self.bytes, nothing)));
        }
        if let Bytes::Io { guard, .. } = &self.bytes {
            return registered.into_iter().for_each(|registered| registered.unregister_before(guard.clone()));
        }
        if let Bytes::DmaBuf(mapped) = &self.bytes {
            return registered
                .into_iter()
                .for_each(|registered| registered.unregister_before(mapped.clone()));
        }
        if let Bytes::Mapped { ptr, len, ref is_shared } = self.bytes {
            let may_keep = !is_shared.load(Ordering::Relaxed);
            if registered.is_some_and(|registered| registered.recycle(ptr, len, may_keep)) {
                return;
            }
            // SAFETY: this owner made the mapping with this length and no clone is left to use it.
            unsafe { libc::munmap(ptr.as_ptr().cast(), len) };
        }
    }
}

impl Owner {
    fn new(bytes: Bytes) -> Arc<Self> {
        let (registered, registering, fork_guard) = Default::default();
        Arc::new(Self { bytes, registered, registering, fork_guard })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {} B)", self.addr(), self.len)
    }
}

/// Orders stores to host memory before later stores, as devices see them. On Arm the fences of `std` order only for CPUs.
#[inline]
pub fn host_fence() {
    fence_for_devices(MappingType::Cached);
}

#[inline]
fn fence_for_devices(kind: MappingType) {
    #[cfg(debug_assertions)]
    fences::count();
    store_fence(kind);
}

/// Rounds a length up to whole pages of the host.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 and for more than half the address space.
pub fn page_round(len: usize) -> Result<usize> {
    len.checked_next_multiple_of(host_page())
        .filter(|&l| l > 0 && l <= isize::MAX.unsigned_abs())
        .ok_or(Error::invalid("memory length", len, "1 byte to half the address space"))
}

impl Memory {
    /// Allocates `len` zeroed bytes, page-aligned. Forked children see zeros.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a length of 0, [`Error::Sys`] if the kernel has no memory.
    pub fn alloc(len: usize) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::mmap(len, flags, -1)
    }

    /// Maps the first `len` bytes of a shared memory file.
    ///
    /// # Errors
    /// As [`Memory::alloc`].
    pub fn map_shared(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        Self::mmap(len, libc::MAP_SHARED, fd.as_raw_fd())
    }

    fn mmap(len: usize, flags: i32, fd: i32) -> Result<Self> {
        let mapped = page_round(len)?;
        let ptr = pages::map(mapped, flags, fd)?;
        let is_shared = (flags & libc::MAP_SHARED != 0).into();
        Ok(Self::host(ptr, len, Bytes::Mapped { ptr, len: mapped, is_shared }))
    }

    fn host(ptr: NonNull<u8>, len: usize, bytes: Bytes) -> Self {
        Self { ptr, len, addr: ptr.as_ptr() as u64, reach: Reach::Host, owner: Owner::new(bytes) }
    }

    /// GPU memory of the application behind a mapping.
    pub fn on_gpu(gpu: &Gpu, mapping: Mapping) -> Self {
        Self::behind_mapping(Bytes::Gpu { gpu: gpu.clone(), mapping })
    }

    /// GPU memory of this library.
    pub fn buffer(buffer: Buffer) -> Self {
        Self::behind_mapping(Bytes::Buffer(buffer))
    }

    fn behind_mapping(bytes: Bytes) -> Self {
        let mapping = bytes.mapping().expect("only called with mapped memory");
        let ptr = NonNull::new(mapping.as_ptr()).expect("mappings do not begin at 0");
        let (len, addr, reach) = (mapping.len(), mapping.addr(), Reach::Mapped(mapping.kind()));
        Self { ptr, len, addr, reach, owner: Owner::new(bytes) }
    }

    /// Host memory that is still registered.
    pub fn of_pages(gpu: &Gpu, pages: Pages, len: usize) -> Self {
        let memory = Self::host(
            pages.ptr,
            len,
            Bytes::Mapped { ptr: pages.ptr, len: pages.len, is_shared: false.into() },
        );
        memory.owner.registered.get_or_init(|| Registered::of_pages(gpu, pages));
        memory
    }

    /// GPU memory that only copy engines access, with the reason.
    pub fn unmapped(gpu: &Gpu, addr: u64, len: usize, why: String) -> Self {
        let owner = Owner::new(Bytes::Unmapped { gpu: gpu.clone(), why });
        Self { ptr: NonNull::dangling(), len, addr, reach: Reach::Engine, owner }
    }

    /// Host memory that the application registered with CUDA.
    ///
    /// # Errors
    /// As [`Memory::from_raw`].
    ///
    /// # Safety
    /// As [`Memory::from_raw`].
    pub unsafe fn from_registered(ptr: *mut u8, len: usize, registered: Registered) -> Result<Self> {
        // SAFETY: what the caller promised.
        let memory = unsafe { Self::from_raw(ptr, len) }?;
        let _ = memory.owner.registered.set(registered);
        Ok(memory)
    }

    /// Wraps memory that the caller owns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null pointer, a length of 0, or a range that wraps.
    ///
    /// # Safety
    /// The range must stay mapped, readable and writable until every clone of the result is gone, and
    /// no Rust reference to it may be used meanwhile, except `&AtomicU32`-like or `&UnsafeCell`-like ones.
    ///
    /// Once a GPU has used it, it must stay mapped until [`Gpu::reclaim`] has returned: until then CUDA has the pages registered,
    /// and would use them instead of new memory at the same address.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Result<Self> {
        let ok =
            len > 0 && (ptr as usize).checked_add(len).is_some_and(|end| end <= isize::MAX.unsigned_abs());
        match NonNull::new(ptr).filter(|_| ok) {
            Some(ptr) => Ok(Self::host(ptr, len, Bytes::Borrowed { ptr, len })),
            None => Err(Error::invalid("memory range", len, "a non-null pointer and at least one byte")),
        }
    }

    /// Host memory of a program that may unmap it at any time, where a card would have its pages pinned. Copies from and to it are
    /// made by the kernel and fail with [`Error::Sys`] (`EFAULT`) instead of by a signal; each takes about a microsecond longer. Words
    /// are checked before they are returned: that they are mapped, and may be written to.
    ///
    /// # Errors
    /// As [`Memory::from_raw`].
    ///
    /// # Safety
    /// No Rust reference to the range may be used while a clone of the result exists, except `&AtomicU32`-like or `&UnsafeCell`-like
    /// ones. A word ([`Memory::atomic64`]) must stay mapped while it is used.
    pub unsafe fn of_program(ptr: *mut u8, len: usize) -> Result<Self> {
        // SAFETY: what the caller promised; that it stays mapped is only needed for `Reach::Host`.
        let memory = unsafe { Self::from_raw(ptr, len) }?;
        Ok(memory.checked())
    }

    /// The same host memory, accessed as that of [`Memory::of_program`]: its file may be truncated. A word
    /// ([`Memory::atomic64`]) must stay in the file while it is used.
    #[must_use]
    pub fn checked(self) -> Self {
        let reach = if let Reach::Host = self.reach { Reach::Checked } else { self.reach };
        Self { reach, ..self }
    }

    /// Opens the file that copies of programs' memory go through ([`Memory::of_program`]). Otherwise the first copy does.
    ///
    /// # Errors
    /// [`Error::Sys`].
    pub fn prepare_checked_copies() -> Result<()> {
        checked::prepare()
    }

    /// Write-only registers of a device.
    ///
    /// # Safety
    /// The range must be mapped for writing while `guard` lives.
    pub unsafe fn io(ptr: NonNull<u8>, len: usize, guard: Arc<dyn Any + Send + Sync>) -> Self {
        let owner = Owner::new(Bytes::Io { ptr, len, guard });
        Self { ptr, len, addr: ptr.as_ptr() as u64, reach: Reach::Mapped(MappingType::WriteCombining), owner }
    }

    /// Drops this without blocking the calling thread: freeing GPU memory may wait for all work of the GPU.
    pub fn release_in_background(self) {
        let known = self.gpu().is_some() || self.owner.registered.get().is_some();
        if known && Arc::strong_count(&self.owner) == 1 {
            // If no thread can be started, this one blocks.
            let _ = std::thread::Builder::new().name("gdsync-free".into()).spawn(move || drop(self));
        }
    }

    /// A weak handle.
    pub fn downgrade(&self) -> WeakMemory {
        let &Self { ptr, len, addr, reach, ref owner } = self;
        WeakMemory { memory: Parts { ptr, len, addr, reach }, owner: Arc::downgrade(owner) }
    }

    /// The address of the first byte in work requests: the CPU's for host memory, the GPU's for GPU memory.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The GPU that it is on; `None` for host memory.
    #[inline]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.owner.bytes.gpu()
    }

    /// Whether it is memory of this GPU, in the same context.
    #[inline]
    pub fn is_on(&self, gpu: &Gpu) -> bool {
        self.gpu().is_some_and(|own| own.raw_context() == gpu.raw_context())
    }

    /// The address of the first byte on a GPU. The first call registers all of the host memory with CUDA; it stays registered.
    ///
    /// # Errors
    /// [`Error::Cuda`] if CUDA refuses to register it, or the GPU cannot access the one that it is on.
    #[inline]
    pub fn gpu_addr(&self, gpu: &Gpu) -> Result<u64> {
        match self.gpu() {
            Some(owner) => gpu.reach(owner).map(|()| self.addr),
            None => self.registered_addr(gpu),
        }
    }

    fn registered_addr(&self, gpu: &Gpu) -> Result<u64> {
        let (start, len, is_io) = match self.owner.bytes {
            Bytes::Io { ptr, len, .. } => (ptr, len, true),
            Bytes::Mapped { ptr, len, .. } | Bytes::Borrowed { ptr, len } => (ptr, len, false),
            Bytes::DmaBuf(ref mapped) => (mapped.ptr, mapped.len, false),
            Bytes::Gpu { .. } | Bytes::Buffer(_) | Bytes::Unmapped { .. } => unreachable!("it is on a GPU"),
        };
        let offset = self.ptr.as_ptr() as u64 - start.as_ptr() as u64;
        if let Some(registered) = self.owner.registered.get() {
            return Ok(registered.addr() + offset);
        }
        let _once = self.owner.registering.lock();
        let registered = match self.owner.registered.get() {
            Some(registered) => registered,
            None => {
                let new = if is_io { gpu.register_io(start, len) } else { gpu.register(start, len) }?;
                self.owner.registered.get_or_init(|| new)
            }
        };
        Ok(registered.addr() + offset)
    }

    /// Whether [`Memory::gpu_addr`] need not register it.
    #[inline]
    pub fn is_known_to_gpus(&self) -> bool {
        self.gpu().is_some() || self.owner.registered.get().is_some()
    }

    /// Returns when writes of this thread are visible to running kernels of the GPU: see [`Mapping::flush`]. No effect on host memory.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn flush(&self) -> Result<()> {
        let Some(mapping) = self.owner.bytes.mapping() else { return Ok(()) };
        mapping.flush().map_err(Error::cuda("flushing writes to the GPU"))
    }

    /// Whether later work of the GPU sees writes through the mapping only after [`Memory::flush`].
    #[inline]
    pub fn needs_flush(&self) -> bool {
        let Reach::Mapped(_) = self.reach else { return false };
        self.gpu().is_some_and(|gpu| gpu.capabilities().flush != Flush::NotNeeded)
    }

    /// Orders writes through a mapping before later stores, and empties the write-combining buffers. No effect on host memory.
    #[inline]
    pub fn fence(&self) {
        if let Reach::Mapped(kind) = self.reach {
            fence_for_devices(kind);
        }
    }

    /// Whether it is host memory.
    #[inline]
    pub fn is_host(&self) -> bool {
        matches!(self.reach, Reach::Host | Reach::Checked)
    }

    /// Where bytes of host memory are in this process, for system calls; `None` for other memory, and for such that its program may unmap.
    pub fn host_bytes(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let is_host = matches!(self.reach, Reach::Host) && self.inside(offset, len).is_ok();
        // SAFETY: the offset lies inside.
        is_host.then(|| unsafe { self.ptr.add(offset) })
    }

    /// Whether the CPU can access the bytes. If not, as in GPU memory that no backend maps, queues use copy engines, and reads and
    /// writes here fail with [`Error::NotMapped`].
    pub fn is_mapped(&self) -> bool {
        !matches!(self.reach, Reach::Engine)
    }

    /// Whether the first and the last byte can be read, of host memory that the caller owns. A card refuses to register other memory.
    pub fn is_readable(&self) -> bool {
        if !matches!((self.reach, &self.owner.bytes), (Reach::Host, Bytes::Borrowed { .. })) {
            return true;
        }
        let first = self.ptr.as_ptr().cast_const();
        [first, first.wrapping_add(self.len.saturating_sub(1))].into_iter().all(|byte| {
            // No file to copy through says nothing of the memory.
            !matches!(checked::load(byte, &mut [0]), Err(error) if error.errno() == libc::EFAULT)
        })
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a Memory is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A part of this memory, sharing its bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        self.inside(offset, len.max(1))?;
        let ptr = match self.reach {
            Reach::Engine => self.ptr,
            // SAFETY: the offset lies inside.
            Reach::Host | Reach::Checked | Reach::Mapped(_) => unsafe { self.ptr.add(offset) },
        };
        Ok(Self { ptr, len, addr: self.addr + offset as u64, owner: self.owner.clone(), ..*self })
    }

    #[inline]
    fn inside(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::OutOfBounds { offset, len, size: self.len }),
        }
    }

    #[cold]
    fn not_mapped(&self) -> Error {
        let why = match &self.owner.bytes {
            Bytes::Unmapped { why, .. } => why.clone(),
            _ => "it is not mapped".into(),
        };
        Error::NotMapped { addr: self.addr, why }
    }

    /// The CPU's address of a part.
    #[inline]
    fn check(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        self.inside(offset, len)?;
        if let Reach::Engine = self.reach {
            return Err(self.not_mapped());
        }
        // SAFETY: the offset lies inside.
        Ok(unsafe { self.ptr.add(offset) })
    }

    /// The aligned 32-bit word at `offset`, as an atomic in native byte order.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::NotMapped`], or [`Error::InvalidArgument`] if the address is not a multiple of 4.
    #[inline]
    pub fn atomic32(&self, offset: usize) -> Result<&AtomicU32> {
        let ptr = self.check_aligned::<AtomicU32>(offset)?;
        // SAFETY: in range, aligned, alive as long as `self`, and only touched atomically.
        Ok(unsafe { ptr.as_ref() })
    }

    /// The aligned 64-bit word at `offset`, as an atomic in native byte order.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::NotMapped`], or [`Error::InvalidArgument`] if the address is not a multiple of 8.
    #[inline]
    pub fn atomic64(&self, offset: usize) -> Result<&AtomicU64> {
        let ptr = self.check_aligned::<AtomicU64>(offset)?;
        // SAFETY: in range, aligned, alive as long as `self`, and only touched atomically.
        Ok(unsafe { ptr.as_ref() })
    }

    #[inline]
    fn check_aligned<T>(&self, offset: usize) -> Result<NonNull<T>> {
        let ptr = self.check(offset, size_of::<T>())?.cast::<T>();
        if !ptr.is_aligned() {
            return Err(misaligned(ptr.cast()));
        }
        if let Reach::Checked = self.reach {
            checked::check_writable(ptr.cast())?;
        }
        Ok(ptr)
    }
}

#[cold]
fn misaligned(ptr: NonNull<u8>) -> Error {
    Error::invalid("word address", format!("{ptr:#?}"), "a multiple of the word size")
}

/// Counts fences for devices in builds with debug assertions, because tests on x86-64 cannot observe them otherwise.
#[cfg(debug_assertions)]
pub mod fences {
    use std::cell::Cell;

    thread_local! {
        static COUNT: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn count() {
        COUNT.set(COUNT.get() + 1);
    }

    /// Number of fences that this thread executed while `f` ran.
    pub fn during(f: impl FnOnce()) -> usize {
        let before = COUNT.get();
        f();
        COUNT.get() - before
    }
}
