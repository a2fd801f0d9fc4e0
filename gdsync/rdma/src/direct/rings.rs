//! Memory for the rings of a card: ours, so that GPUs reach it too.
//!
//! libmlx5 asks a *parent domain* for the memory of what is created with it. Each queue gets a domain of its own, so that
//! what is asked for belongs to that queue.

use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys::verbs::{
    ibv_alloc_parent_domain, ibv_parent_domain_init_attr, ibv_parent_domain_init_attr_mask, ibv_pd, ibv_td,
};

use crate::Domain;
use crate::explain::{Call, failed_last};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, host_page};
use gdsync_device::{OnGpu, Places};

/// What the memory of one queue is taken from, and what was taken.
#[derive(Debug)]
struct Rings {
    places: Places,
    given: Mutex<Vec<Memory>>,
    /// Why nothing was given at last.
    failure: Mutex<Option<Error>>,
}

/// A parent domain with an allocator. Dropped after what was created with it.
pub(super) struct RingDomain {
    base: Arc<Domain>,
    raw: NonNull<ibv_pd>,
    /// libmlx5 has its address.
    rings: Box<Rings>,
}

// SAFETY: libibverbs may be called from any thread, and the rest is behind locks.
unsafe impl Send for RingDomain {}
// SAFETY: as above.
unsafe impl Sync for RingDomain {}

impl fmt::Debug for RingDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rings.given.lock().fmt(f)
    }
}

impl Drop for RingDomain {
    fn drop(&mut self) {
        // SAFETY: made here, freed once, after what was created with it.
        let errno = unsafe { self.base.open().verbs().ibv_dealloc_pd(self.raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(device = self.base.open().name(), errno, "a parent domain was not freed");
            // libmlx5 still has the address: it stays.
            let rings =
                Rings { places: Places::default(), given: Mutex::default(), failure: Mutex::default() };
            std::mem::forget(std::mem::replace(&mut self.rings, Box::new(rings)));
        }
    }
}

impl RingDomain {
    /// Over `base`, with the doorbell register of `td` if there is one. The memory is known to the GPU of `places`.
    pub(super) fn new(base: &Arc<Domain>, td: Option<NonNull<ibv_td>>, places: &Places) -> Result<Self> {
        let open = base.open();
        let places = Places { gpu: places.gpu.clone(), on_gpu: OnGpu::empty() };
        let rings = Box::new(Rings { places, given: Mutex::default(), failure: Mutex::default() });
        let mut attr = ibv_parent_domain_init_attr::zeroed();
        attr.pd = base.raw().as_ptr();
        attr.td = td.map_or(std::ptr::null_mut(), NonNull::as_ptr);
        attr.comp_mask = ibv_parent_domain_init_attr_mask::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
            | ibv_parent_domain_init_attr_mask::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        attr.alloc = Some(alloc);
        attr.free = Some(free);
        attr.pd_context = (&raw const *rings).cast_mut().cast();
        // SAFETY: the device is open, and the context lives as long as the domain.
        let raw = unsafe { ibv_alloc_parent_domain(open.context().as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| failed_last("ibv_alloc_parent_domain", open.name(), &Call::Other))?;
        Ok(Self { base: base.clone(), raw, rings })
    }

    pub(super) fn raw(&self) -> NonNull<ibv_pd> {
        self.raw
    }

    /// Why memory was refused since the last call, which the library only calls ENOMEM.
    pub(super) fn take_failure(&self) -> Option<Error> {
        self.rings.failure.lock().take()
    }

    /// The `len` bytes of ours that the library calls `at`.
    ///
    /// # Errors
    /// [`Error::Device`] where they are not ours.
    pub(super) fn find(&self, at: *mut c_void, len: usize, what: &str) -> Result<Memory> {
        let at = at.addr() as u64;
        let given = self.rings.given.lock();
        let inside = |memory: &Memory| {
            let offset = usize::try_from(at.checked_sub(memory.addr())?).ok()?;
            memory.slice(offset, len).ok()
        };
        given.iter().find_map(inside).ok_or_else(|| Error::Device {
            device: self.base.open().name().to_owned(),
            why: format!(
                "libmlx5 put the {what} elsewhere than it was told: install rdma-core 36 or newer, and unset \
                 MLX_QP_ALLOC_TYPE and MLX_CQ_ALLOC_TYPE"
            ),
        })
    }
}

impl Rings {
    /// `len` zeroed bytes that stay where they are in a fork, at a multiple of `align`.
    fn take(&self, len: usize, align: usize) -> Result<NonNull<c_void>> {
        // The library may want more than pages.
        let spare = if align > host_page() { align } else { 0 };
        let whole = self.places.alloc(OnGpu::empty(), len.max(1) + spare)?;
        let addr = usize::try_from(whole.addr()).expect("64-bit hosts only");
        let memory = whole.slice(addr.next_multiple_of(align.max(1)) - addr, len.max(1))?;
        let at = usize::try_from(memory.addr()).expect("64-bit hosts only");
        self.given.lock().push(memory);
        Ok(NonNull::new(std::ptr::with_exposed_provenance_mut(at)).expect("memory is not at 0"))
    }
}

/// Called by libmlx5 for the memory of a queue or a doorbell record.
extern "C" fn alloc(
    _domain: *mut ibv_pd,
    context: *mut c_void,
    len: usize,
    align: usize,
    _kind: u64,
) -> *mut c_void {
    // SAFETY: the context of a domain, which lives as long as that.
    let rings = unsafe { &*context.cast::<Rings>() };
    let taken = catch_unwind(AssertUnwindSafe(|| rings.take(len, align)));
    match taken {
        Ok(Ok(at)) => at.as_ptr(),
        Ok(Err(error)) => {
            *rings.failure.lock() = Some(error);
            std::ptr::null_mut()
        }
        Err(_) => std::ptr::null_mut(),
    }
}

/// Called by libmlx5 when the queue is gone. Who still has a clone of the memory keeps it.
extern "C" fn free(_domain: *mut ibv_pd, context: *mut c_void, at: *mut c_void, _kind: u64) {
    // SAFETY: the context of a domain, which lives as long as that.
    let rings = unsafe { &*context.cast::<Rings>() };
    let at = at.addr() as u64;
    let freed = {
        let mut given = rings.given.lock();
        given.iter().position(|memory| memory.addr() == at).map(|found| given.swap_remove(found))
    };
    drop(freed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rings() -> Box<Rings> {
        Box::new(Rings { places: Places::default(), given: Mutex::default(), failure: Mutex::default() })
    }

    #[test]
    fn memory_is_zeroed_aligned_and_given_back() {
        let rings = rings();
        let context = (&raw const *rings).cast_mut().cast::<c_void>();
        let mut all = Vec::new();
        for (len, align) in [(8, 8), (64, 4096), (4096, 4096), (1 << 21, 1 << 15), (100_000, 1 << 16), (0, 0)]
        {
            let at = alloc(std::ptr::null_mut(), context, len, align, 0);
            assert!(!at.is_null() && at.addr().is_multiple_of(align.max(1)), "{len} {align}");
            let memory = rings.given.lock().last().unwrap().clone();
            assert_eq!((memory.addr(), memory.len()), (at.addr() as u64, len.max(1)));
            assert!(memory.to_vec().iter().all(|&byte| byte == 0));
            all.push(at);
        }
        for at in all {
            free(std::ptr::null_mut(), context, at, 0);
        }
        assert!(rings.given.lock().is_empty());
        // What was never given.
        free(std::ptr::null_mut(), context, std::ptr::dangling_mut(), 0);
    }

    #[test]
    fn what_cannot_be_had_is_null_and_explained() {
        let rings = rings();
        let context = (&raw const *rings).cast_mut().cast::<c_void>();
        assert!(alloc(std::ptr::null_mut(), context, usize::MAX / 2, 8, 0).is_null());
        assert!(rings.failure.lock().take().is_some());
    }
}
