//! Protection domains.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::ibv_pd;

use super::explain::{Call, failed_last};
use super::open::Open;
use gdsync_device::error::Result;

/// A protection domain, freed on drop. Objects created in it keep it alive.
pub(crate) struct Domain {
    open: Arc<Open>,
    pd: NonNull<ibv_pd>,
}

// SAFETY: libibverbs is thread-safe.
unsafe impl Send for Domain {}
// SAFETY: libibverbs is thread-safe.
unsafe impl Sync for Domain {}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "protection domain of {:?}", self.open)
    }
}

impl Open {
    /// Allocates a protection domain.
    pub(crate) fn alloc_pd(self: &Arc<Self>) -> Result<Domain> {
        // SAFETY: the device is open while `self` lives.
        let pd = unsafe { self.verbs().ibv_alloc_pd(self.context().as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| failed_last("ibv_alloc_pd", self.name(), &Call::Other))?;
        Ok(Domain { open: self.clone(), pd })
    }
}

impl Domain {
    pub(crate) fn open(&self) -> &Arc<Open> {
        &self.open
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_pd> {
        self.pd
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc_pd`, freed only here.
        let errno = unsafe { self.open.verbs().ibv_dealloc_pd(self.pd.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = self.open.name(), errno, "a protection domain was not freed");
        }
    }
}
