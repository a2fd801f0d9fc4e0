//! What commands name: registered memory and doorbell pages.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use gdsync::memory::{Memory, Word64};
use parking_lot::Mutex;
use rdma_core_sys::mlx5::{
    mlx5dv_devx_uar, mlx5dv_devx_umem, mlx5dv_devx_umem_in, mlx5dv_devx_umem_in_mask as mask,
    mlx5dv_uar_alloc_type as kind,
};
use rdma_core_sys::verbs::{ibv_access_flags as access, ibv_context};

use crate::devx::{Level, Refusal, level, refuse};
use crate::errno::complain;
use crate::qp::Register;
use crate::region::{Mapped, PAGE};
use crate::{errno, region};

static UMEMS: Mutex<BTreeMap<u32, Arc<Umem>>> = Mutex::new(BTreeMap::new());
static UARS: Mutex<BTreeMap<u32, Arc<Page>>> = Mutex::new(BTreeMap::new());
/// Numbers are not used again, so that what is gone is not found.
static NEXT: AtomicU32 = AtomicU32::new(0x51);

/// Registered memory.
#[derive(Debug)]
pub(super) struct Umem {
    addr: *mut u8,
    len: usize,
    /// Of a DMA-BUF.
    mapping: Option<Mapped>,
}

// SAFETY: an address range; the bytes are reached through a `Memory`.
unsafe impl Send for Umem {}
// SAFETY: as above.
unsafe impl Sync for Umem {}

/// How many are registered; those that came as DMA-BUFs alone, where that is asked.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_umems(as_dma_buf: bool) -> usize {
    UMEMS.lock().values().filter(|umem| !as_dma_buf || umem.mapping.is_some()).count()
}

impl Umem {
    /// The memory of this number.
    pub(super) fn find(id: u32) -> Result<Arc<Self>, Refusal> {
        UMEMS
            .lock()
            .get(&id)
            .cloned()
            .ok_or_else(|| refuse::resource(1, format!("umem {id:#x} is not there")))
    }

    /// `len` bytes at `offset`, a multiple of `align`. They must be gone before this.
    pub(super) fn part(&self, offset: u64, len: usize, align: u64) -> Result<Memory, Refusal> {
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.len as u64);
        if end.is_none() {
            return Err(refuse::size(2, format!("{len} bytes at {offset:#x} leave a umem of {}", self.len)));
        }
        if !offset.is_multiple_of(align) {
            return Err(refuse::parameter(3, format!("offset {offset:#x} is no multiple of {align}")));
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        // SAFETY: it was pinned or mapped, and stays until this is dropped.
        unsafe { Memory::from_raw(self.addr.wrapping_add(start), len) }
            .map_err(|error| refuse::parameter(4, error.to_string()))
    }
}

/// A doorbell page.
#[derive(Debug)]
pub(super) struct Page {
    register: Register,
    taken: AtomicBool,
}

impl Page {
    /// The page of this number.
    pub(super) fn find(id: u32) -> Result<Arc<Self>, Refusal> {
        UARS.lock().get(&id).cloned().ok_or_else(|| refuse::resource(5, format!("no doorbell page {id:#x}")))
    }

    /// Takes it for a queue pair.
    pub(super) fn take(&self) -> Result<Word64, Refusal> {
        if self.taken.swap(true, Ordering::SeqCst) {
            return Err(refuse::resource(
                6,
                "a doorbell page is that of another queue pair: memory keeps one doorbell",
            ));
        }
        Ok(self.register.word())
    }

    /// The reverse.
    pub(super) fn release(&self) {
        self.taken.store(false, Ordering::SeqCst);
    }
}

fn register(umem: Umem) -> *mut mlx5dv_devx_umem {
    let umem_id = NEXT.fetch_add(1, Ordering::SeqCst);
    UMEMS.lock().insert(umem_id, Arc::new(umem));
    Box::into_raw(Box::new(mlx5dv_devx_umem { umem_id }))
}

fn by_address(addr: *mut c_void, len: usize, rights: access) -> Result<Umem, c_int> {
    if len == 0 || rights != access::IBV_ACCESS_LOCAL_WRITE {
        return Err(libc::EINVAL);
    }
    region::pin(addr.addr(), len, true)?;
    Ok(Umem { addr: addr.cast(), len, mapping: None })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_devx_umem_reg(
    _context: *mut ibv_context,
    addr: *mut c_void,
    size: usize,
    rights: access,
) -> *mut mlx5dv_devx_umem {
    if level() == Level::None {
        return errno::null(libc::EOPNOTSUPP);
    }
    by_address(addr, size, rights).map_or_else(errno::null, register)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_devx_umem_reg_ex(
    _context: *mut ibv_context,
    attr: &mlx5dv_devx_umem_in,
) -> *mut mlx5dv_devx_umem {
    // Page sizes below that of the host cannot be had, and all above it must be allowed.
    if level() == Level::None || !mask::MLX5DV_UMEM_MASK_DMABUF.contains(attr.comp_mask) {
        return errno::null(libc::EOPNOTSUPP);
    }
    if attr.pgsz_bitmap & PAGE as u64 == 0 {
        return errno::null(libc::EINVAL);
    }
    let made = if attr.comp_mask.is_empty() {
        by_address(attr.addr, attr.size, attr.access)
    } else if level() == Level::NoDmaBuf {
        Err(libc::EOPNOTSUPP)
    } else if attr.size == 0 || attr.access != access::IBV_ACCESS_LOCAL_WRITE {
        Err(libc::EINVAL)
    } else {
        Mapped::dma_buf(attr.dmabuf_fd, attr.addr.addr() as u64, attr.size).map(|(mapped, addr)| Umem {
            addr: addr.cast(),
            len: attr.size,
            mapping: Some(mapped),
        })
    };
    made.map_or_else(errno::null, register)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_umem_dereg(umem: *mut mlx5dv_devx_umem) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { (*umem).umem_id };
    {
        let mut all = UMEMS.lock();
        let Some(found) = all.get(&id) else { return libc::EINVAL };
        if Arc::strong_count(found) > 1 {
            complain(format!("umem {id:#x} is deregistered while a queue lies there"));
            return libc::EBUSY;
        }
        all.remove(&id);
    }
    // SAFETY: a box of this module, that was in the list until now.
    drop(unsafe { Box::from_raw(umem) });
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_devx_alloc_uar(
    _context: *mut ibv_context,
    asked: kind,
) -> *mut mlx5dv_devx_uar {
    let known = [
        kind::MLX5DV_UAR_ALLOC_TYPE_BF,
        kind::MLX5DV_UAR_ALLOC_TYPE_NC,
        kind::MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED,
    ];
    let has_dedicated = level() == Level::All;
    let is_had = has_dedicated || asked != kind::MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED;
    if level() == Level::None || !known.contains(&asked) || !is_had {
        return errno::null(libc::EOPNOTSUPP);
    }
    let register = match Register::alloc() {
        Ok(register) => register,
        Err(errno) => return errno::null(errno),
    };
    let page_id = NEXT.fetch_add(1, Ordering::SeqCst);
    let (base, at) = (register.page(), register.at());
    UARS.lock().insert(page_id, Arc::new(Page { register, taken: AtomicBool::new(false) }));
    Box::into_raw(Box::new(mlx5dv_devx_uar {
        reg_addr: at.cast(),
        base_addr: base.cast(),
        page_id,
        ..mlx5dv_devx_uar::zeroed()
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_free_uar(uar: *mut mlx5dv_devx_uar) {
    if uar.is_null() {
        return;
    }
    // SAFETY: the caller vouches for it: a box of the function above.
    let uar = unsafe { Box::from_raw(uar) };
    let page = UARS.lock().remove(&uar.page_id);
    if page.is_none_or(|page| page.taken.load(Ordering::SeqCst)) {
        complain(format!("doorbell page {:#x} is freed while a queue pair has it", uar.page_id));
    }
}
