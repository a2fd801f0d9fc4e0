//! Allocator for the rings of a card, so that GPUs can access them.
//!
//! libmlx5 asks a *parent domain* for the memory of queues created in it. Each queue has its own parent domain, so
//! allocations belong to that queue.

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
use crate::Raw;
use crate::explain::{Call, failed_last};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, host_page};
use gdsync_device::{OnGpu, Places};

/// Allocations of one queue.
#[derive(Debug)]
struct Rings {
    places: Places,
    given: Mutex<Vec<Memory>>,
    /// Error of the last failed allocation.
    failure: Mutex<Option<Error>>,
}

/// A parent domain with an allocator. Dropped after the queue created with it.
pub(super) struct RingDomain {
    base: Arc<Domain>,
    raw: Raw<ibv_pd>,
    /// Boxed, because libmlx5 holds its address.
    rings: Box<Rings>,
}

impl fmt::Debug for RingDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rings.given.lock().fmt(f)
    }
}

impl Drop for RingDomain {
    fn drop(&mut self) {
        // SAFETY: created here, freed only here, after the queue created with it.
        let errno = unsafe { self.base.open().verbs().ibv_dealloc_pd(self.raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(device = self.base.open().name(), errno, "a parent domain was not freed");
            // libmlx5 still holds the address, so it is leaked.
            let rings =
                Rings { places: Places::default(), given: Mutex::default(), failure: Mutex::default() };
            std::mem::forget(std::mem::replace(&mut self.rings, Box::new(rings)));
        }
    }
}

impl RingDomain {
    /// A domain over `base`, with the doorbell register of `td` if given. Its memory is mapped for the GPU of `places`.
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
        // SAFETY: the device is open, and the allocator outlives the domain.
        let raw = unsafe { ibv_alloc_parent_domain(open.context().as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| failed_last("ibv_alloc_parent_domain", open.name(), &Call::Other))?;
        Ok(Self { base: base.clone(), raw: Raw(raw), rings })
    }

    pub(super) fn raw(&self) -> NonNull<ibv_pd> {
        *self.raw
    }

    /// Takes the error of a failed allocation; the library reports only ENOMEM.
    pub(super) fn take_failure(&self) -> Option<Error> {
        self.rings.failure.lock().take()
    }

    /// Our memory for the `len` bytes at the library's address `at`.
    ///
    /// # Errors
    /// [`Error::Device`] if it was not allocated here.
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
                "libmlx5 did not put the {what} where it was allocated: install rdma-core 36 or newer, and unset \
                 MLX_QP_ALLOC_TYPE and MLX_CQ_ALLOC_TYPE"
            ),
        })
    }
}

impl Rings {
    /// Allocates `len` zeroed bytes aligned to `align`, kept in place across a fork.
    fn take(&self, len: usize, align: usize) -> Result<NonNull<c_void>> {
        // The library may want alignment beyond pages.
        let spare = if align > host_page() { align } else { 0 };
        let whole = self.places.alloc(OnGpu::empty(), len.max(1) + spare)?;
        let addr = usize::try_from(whole.addr()).expect("64-bit hosts only");
        let memory = whole.slice(addr.next_multiple_of(align.max(1)) - addr, len.max(1))?;
        let at = usize::try_from(memory.addr()).expect("64-bit hosts only");
        self.given.lock().push(memory);
        Ok(NonNull::new(std::ptr::with_exposed_provenance_mut(at)).expect("memory is not at 0"))
    }
}

/// Allocation callback of libmlx5 for queues and doorbell records.
extern "C" fn alloc(
    _domain: *mut ibv_pd,
    context: *mut c_void,
    len: usize,
    align: usize,
    _kind: u64,
) -> *mut c_void {
    // SAFETY: the context of a domain, which lives as long as the domain.
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

/// Free callback of libmlx5. Clones keep the memory alive.
extern "C" fn free(_domain: *mut ibv_pd, context: *mut c_void, at: *mut c_void, _kind: u64) {
    // SAFETY: the context of a domain, which lives as long as the domain.
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
    fn memory_is_zeroed_aligned_and_freed() {
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
        // Never allocated.
        free(std::ptr::null_mut(), context, std::ptr::dangling_mut(), 0);
    }

    #[test]
    fn failed_allocation_is_null_with_an_error() {
        let rings = rings();
        let context = (&raw const *rings).cast_mut().cast::<c_void>();
        assert!(alloc(std::ptr::null_mut(), context, usize::MAX / 2, 8, 0).is_null());
        assert!(rings.failure.lock().take().is_some());
    }
}
