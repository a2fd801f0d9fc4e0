//! Doorbell registers of a card, one per queue pair: thread domains, and UARs of DevX queue pairs.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{mlx5dv_devx_uar, mlx5dv_uar_alloc_type as kind};
use rdma_core_sys::verbs::{ibv_alloc_td, ibv_dealloc_td, ibv_td, ibv_td_init_attr};

use crate::Open;
use crate::Raw;
use crate::explain::{Call, failed, failed_last, last_errno};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64, host_page};

/// A thread domain: owns a doorbell register.
pub(super) struct ThreadDomain {
    open: Arc<Open>,
    td: Raw<ibv_td>,
}

impl Drop for ThreadDomain {
    fn drop(&mut self) {
        // SAFETY: created here, freed only here, after the domains over it.
        let errno = unsafe { ibv_dealloc_td(self.td.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = self.open.name(), errno, "a thread domain was not freed");
        }
    }
}

impl ThreadDomain {
    pub(super) fn td(&self) -> NonNull<ibv_td> {
        *self.td
    }
}

/// Doorbell registers of a device, for reuse.
pub(super) struct Registers {
    open: Arc<Open>,
    idle: Mutex<Vec<ThreadDomain>>,
    /// Host pages with registers, by address.
    pages: Mutex<HashMap<usize, Page>>,
}

/// A host page with registers. Card pages have 4 KiB, so a host page may hold several. CUDA registers each host page
/// only once, so its registers share the registration.
struct Page {
    memory: Memory,
    mapped_by: Arc<MappedBy>,
}

/// Keeps the registers of a page mapped.
struct MappedBy {
    _open: Arc<Open>,
    uars: Mutex<Vec<Arc<Uar>>>,
}

impl fmt::Debug for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages of registers of {:?}", self.pages.lock().len(), self.open)
    }
}

impl Registers {
    pub(super) fn new(open: &Arc<Open>) -> Self {
        Self { open: open.clone(), idle: Mutex::default(), pages: Mutex::default() }
    }

    /// A free register; `None` if the card has none left. libmlx5 then uses one shared by several queue pairs, which is
    /// safe: each doorbell is one 8-byte write.
    pub(super) fn acquire(&self) -> Option<ThreadDomain> {
        if let Some(thread_domain) = self.idle.lock().pop() {
            return Some(thread_domain);
        }
        let mut attr = ibv_td_init_attr::zeroed();
        // SAFETY: the device is open.
        let td = unsafe { ibv_alloc_td(self.open.context().as_ptr(), &raw mut attr) };
        let Some(td) = NonNull::new(td) else {
            let error = failed_last("ibv_alloc_td", self.open.name(), &Call::Other);
            tracing::debug!(%error, "a queue pair shares a doorbell register");
            return None;
        };
        Some(ThreadDomain { open: self.open.clone(), td: Raw(td) })
    }

    /// Returns the register of a destroyed queue pair.
    pub(super) fn release(&self, thread_domain: ThreadDomain) {
        self.idle.lock().push(thread_domain);
    }

    /// The register at this address, which libmlx5 reported for a queue pair.
    pub(super) fn doorbell(&self, at: *mut c_void) -> Result<Word64> {
        self.find(at, None)
    }

    /// The register of this DevX page.
    pub(super) fn doorbell_of(&self, uar: &Arc<Uar>) -> Result<Word64> {
        self.find(uar.register(), Some(uar))
    }

    fn find(&self, at: *mut c_void, uar: Option<&Arc<Uar>>) -> Result<Word64> {
        let (addr, size) = (at.addr(), host_page());
        if addr < size || !addr.is_multiple_of(8) {
            let why = format!(
                "libmlx5 returned the invalid doorbell register address {addr:#x}: install rdma-core 36 or newer"
            );
            return Err(Error::Device { device: self.open.name().to_owned(), why });
        }
        let offset = addr % size;
        let mut pages = self.pages.lock();
        let page = pages.entry(addr - offset).or_insert_with(|| {
            let ptr = NonNull::new(at.wrapping_byte_sub(offset).cast()).expect("it is not the first page");
            let mapped_by = Arc::new(MappedBy { _open: self.open.clone(), uars: Mutex::default() });
            // SAFETY: libmlx5 maps whole host pages until the device is closed or all DevX pages in it are freed;
            // `mapped_by` keeps the device open and holds each of those pages.
            let memory = unsafe { Memory::io(ptr, size, mapped_by.clone()) };
            Page { memory, mapped_by }
        });
        if let Some(uar) = uar {
            let mut uars = page.mapped_by.uars.lock();
            if !uars.iter().any(|known| Arc::ptr_eq(known, uar)) {
                uars.push(uar.clone());
            }
        }
        page.memory.word64(offset)
    }
}

/// A doorbell register, freed when no thread or GPU can write to it any more.
pub(in crate::direct) struct Uar {
    open: Arc<Open>,
    mlx5: &'static Mlx5,
    raw: Raw<mlx5dv_devx_uar>,
}

impl fmt::Debug for Uar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "doorbell page {:#x} of {}", self.page(), self.open.name())
    }
}

impl Drop for Uar {
    fn drop(&mut self) {
        // SAFETY: allocated here, freed only here.
        unsafe { self.mlx5.mlx5dv_devx_free_uar(self.raw.as_ptr()) };
    }
}

impl Uar {
    /// Allocates an exclusive page (rdma-core 45), else a shared one, which is safe: each doorbell is one 8-byte write.
    fn alloc(open: &Arc<Open>, mlx5: &'static Mlx5) -> Result<Self> {
        let kinds = [
            kind::MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED,
            kind::MLX5DV_UAR_ALLOC_TYPE_NC,
            kind::MLX5DV_UAR_ALLOC_TYPE_BF,
        ];
        let mut errno = libc::EIO;
        for asked in kinds {
            // SAFETY: the device is open.
            let raw = unsafe { mlx5.mlx5dv_devx_alloc_uar(open.context().as_ptr(), asked) };
            if let Some(raw) = NonNull::new(raw) {
                tracing::debug!(device = open.name(), kind = asked.name(), "a doorbell page");
                return Ok(Self { open: open.clone(), mlx5, raw: Raw(raw) });
            }
            errno = last_errno();
        }
        Err(failed("mlx5dv_devx_alloc_uar", open.name(), &Call::Other, errno))
    }

    /// Number in commands.
    pub(super) fn page(&self) -> u32 {
        // SAFETY: the page lives until `self` is dropped.
        unsafe { (*self.raw.as_ptr()).page_id }
    }

    /// Address of the register.
    pub(in crate::direct) fn register(&self) -> *mut c_void {
        // SAFETY: the page lives until `self` is dropped.
        unsafe { (*self.raw.as_ptr()).reg_addr }
    }
}

/// UARs of a device, for reuse.
pub(super) struct Uars {
    open: Arc<Open>,
    mlx5: &'static Mlx5,
    idle: Mutex<Vec<Arc<Uar>>>,
}

impl fmt::Debug for Uars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} idle doorbell pages of {}", self.idle.lock().len(), self.open.name())
    }
}

impl Uars {
    pub(super) fn new(open: &Arc<Open>, mlx5: &'static Mlx5) -> Self {
        Self { open: open.clone(), mlx5, idle: Mutex::default() }
    }

    /// Takes a free one or allocates one.
    pub(super) fn acquire(&self) -> Result<Arc<Uar>> {
        let idle = self.idle.lock().pop();
        idle.map_or_else(|| Uar::alloc(&self.open, self.mlx5).map(Arc::new), Ok)
    }

    /// Returns the UAR of a destroyed queue pair.
    pub(super) fn release(&self, uar: Arc<Uar>) {
        self.idle.lock().push(uar);
    }
}
