//! Doorbell register pages (UARs) of DevX queue pairs.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{mlx5dv_devx_uar, mlx5dv_uar_alloc_type as kind};

use super::object::last_errno;
use crate::Open;
use crate::explain::{Call, failed};
use gdsync_device::error::Result;

/// A doorbell register, freed when nobody can write to it any more.
pub(in crate::direct) struct Uar {
    open: Arc<Open>,
    mlx5: &'static Mlx5,
    raw: NonNull<mlx5dv_devx_uar>,
}

// SAFETY: libmlx5 is thread-safe.
unsafe impl Send for Uar {}
// SAFETY: libmlx5 is thread-safe.
unsafe impl Sync for Uar {}

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
                return Ok(Self { open: open.clone(), mlx5, raw });
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
