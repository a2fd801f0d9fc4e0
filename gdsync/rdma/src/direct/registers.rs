//! The doorbell registers of a card: one for each queue pair, written by whoever triggers its sends.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys::verbs::{ibv_alloc_td, ibv_dealloc_td, ibv_td, ibv_td_init_attr};

use super::devx::Uar;
use crate::Open;
use crate::explain::{Call, failed_last};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64, host_page};

/// A thread domain: a register that libmlx5 gives to nobody else.
pub(super) struct KernelExecutor {
    open: Arc<Open>,
    td: NonNull<ibv_td>,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for KernelExecutor {}
// SAFETY: as above.
unsafe impl Sync for KernelExecutor {}

impl Drop for KernelExecutor {
    fn drop(&mut self) {
        // SAFETY: made here, freed once, after the domains over it.
        let errno = unsafe { ibv_dealloc_td(self.td.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = self.open.name(), errno, "a thread domain was not freed");
        }
    }
}

impl KernelExecutor {
    pub(super) fn td(&self) -> NonNull<ibv_td> {
        self.td
    }
}

/// The registers of a device, which are used again.
pub(super) struct Registers {
    open: Arc<Open>,
    idle: Mutex<Vec<KernelExecutor>>,
    /// Pages of the host with registers, by address.
    pages: Mutex<HashMap<usize, Page>>,
}

/// A page of the host with registers. A card has them in pages of 4 KiB, of which one of the host may have several; CUDA takes whole pages
/// of the host, each once, so all registers in one share its registration.
struct Page {
    memory: Memory,
    mapped_by: Arc<MappedBy>,
}

/// What keeps the registers of a page mapped.
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

    /// A register that nobody uses; `None` where the card has none left, and libmlx5 takes one that several queue pairs share.
    /// Doorbells of these do not disturb each other: each is one write of eight bytes.
    pub(super) fn acquire(&self) -> Option<KernelExecutor> {
        if let Some(kernel_exec) = self.idle.lock().pop() {
            return Some(kernel_exec);
        }
        let mut attr = ibv_td_init_attr::zeroed();
        // SAFETY: the device is open.
        let td = unsafe { ibv_alloc_td(self.open.context().as_ptr(), &raw mut attr) };
        let Some(td) = NonNull::new(td) else {
            let error = failed_last("ibv_alloc_td", self.open.name(), &Call::Other);
            tracing::debug!(%error, "a queue pair shares a doorbell register");
            return None;
        };
        Some(KernelExecutor { open: self.open.clone(), td })
    }

    /// Takes a register back whose queue pair is gone.
    pub(super) fn release(&self, kernel_exec: KernelExecutor) {
        self.idle.lock().push(kernel_exec);
    }

    /// The register at this address, as libmlx5 told it of a queue pair.
    pub(super) fn doorbell(&self, at: *mut c_void) -> Result<Word64> {
        self.find(at, None)
    }

    /// The register of this page of DevX.
    pub(super) fn doorbell_of(&self, uar: &Arc<Uar>) -> Result<Word64> {
        self.find(uar.register(), Some(uar))
    }

    fn find(&self, at: *mut c_void, uar: Option<&Arc<Uar>>) -> Result<Word64> {
        let (addr, size) = (at.addr(), host_page());
        if addr < size || !addr.is_multiple_of(8) {
            let why =
                format!("libmlx5 told {addr:#x} for a doorbell register: install rdma-core 36 or newer");
            return Err(Error::Device { device: self.open.name().to_owned(), why });
        }
        let offset = addr % size;
        let mut pages = self.pages.lock();
        let page = pages.entry(addr - offset).or_insert_with(|| {
            let ptr = NonNull::new(at.wrapping_byte_sub(offset).cast()).expect("it is not the first page");
            let mapped_by = Arc::new(MappedBy { _open: self.open.clone(), uars: Mutex::default() });
            // SAFETY: libmlx5 maps whole pages of the host, until the device is closed, or all pages of DevX in it freed: `mapped_by`
            // keeps the device open, and gets each of those pages.
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
