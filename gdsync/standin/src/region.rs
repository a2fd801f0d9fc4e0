//! Memory regions.

use std::ffi::{c_int, c_void};

use gdsync::memory::Memory;
use gdsync::verbs::Access;
use rdma_core_sys::verbs::{ibv_access_flags as flags, ibv_mr, ibv_pd};

use crate::complaint::complain;
use crate::context::Context;
use crate::domain::Domain;
use crate::{errno, pages};

/// `struct ibv_mr`, and what is behind it.
#[repr(C)]
struct Region {
    base: ibv_mr,
    key: u32,
    /// The mapping of a DMA-BUF.
    mapped: Option<Mapped>,
}

pub(crate) struct Mapped {
    addr: *mut c_void,
    len: usize,
}

// SAFETY: an address range that this alone unmaps.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// `length` bytes of a DMA-BUF from `offset` on, and the address of the first. The DMA-BUF is reached through a mapping
    /// of it, so it must be one that can be mapped.
    ///
    /// # Errors
    /// `EINVAL`, or `EOPNOTSUPP` for one that cannot be mapped.
    pub(crate) fn dma_buf(fd: c_int, offset: u64, length: usize) -> Result<(Self, *mut c_void), c_int> {
        let first = usize::try_from(offset).unwrap_or(usize::MAX) % pages::PAGE;
        let (Some(len), Ok(begin)) = (length.checked_add(first), i64::try_from(offset - first as u64)) else {
            return Err(libc::EINVAL);
        };
        // One of a simulated GPU stands where it begins in the memory that it is of; a real one has no position.
        // SAFETY: no pointers.
        let begin = begin + unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }.max(0);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping touches no existing memory.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, begin) };
        if addr == libc::MAP_FAILED {
            complain("a DMA-BUF cannot be mapped, so the software HCA does not reach it");
            return Err(libc::EOPNOTSUPP);
        }
        Ok((Self { addr, len }, addr.wrapping_byte_add(first)))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this module made the mapping, and the region that used it is gone.
        unsafe { libc::munmap(self.addr, self.len) };
    }
}

/// The rights of a region.
///
/// # Errors
/// `EINVAL` for those that the kernel refuses, `EOPNOTSUPP` for what this card does not do.
fn rights(access: flags) -> Result<Access, c_int> {
    // What is optional may be ignored.
    let access = access.difference(flags::IBV_ACCESS_OPTIONAL_RANGE);
    let plain = Access::from_bits(access.bits()).ok_or(libc::EOPNOTSUPP)?;
    let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if plain.intersects(writes) && !plain.contains(Access::LOCAL_WRITE) {
        return Err(libc::EINVAL);
    }
    Ok(plain)
}

unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: flags,
    mapped: Option<Mapped>,
) -> Result<Box<Region>, c_int> {
    let rights = rights(access)?;
    if length == 0 {
        return Err(libc::EINVAL);
    }
    // The card writes nowhere without this right.
    pages::pin(addr.addr(), length, rights.contains(Access::LOCAL_WRITE))?;
    // SAFETY: it is there, and the caller vouches that it stays until it is deregistered.
    let memory = unsafe { Memory::from_raw(addr.cast(), length) }.map_err(|_| libc::EINVAL)?;
    // SAFETY: the caller vouches for the domain.
    let context = unsafe { (*pd).context };
    // SAFETY: it is the domain's.
    let hca = unsafe { Context::of(context) }.hca;
    // SAFETY: as above.
    let domain = unsafe { Domain::of(pd) };
    let key = hca.card.register(domain.pdn(), &memory, iova, rights).map_err(|_| libc::ENOMEM)?;
    domain.add_user();
    let base = ibv_mr { context, pd, addr, length, handle: key >> 8, lkey: key, rkey: key };
    Ok(Box::new(Region { base, key, mapped }))
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: flags,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { register(pd, addr, length, addr as u64, access, None) })
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: flags,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { register(pd, addr, length, iova, access, None) })
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: flags,
) -> *mut ibv_mr {
    let (mapped, addr) = match Mapped::dma_buf(fd, offset, length) {
        Ok((mapped, addr)) => (Some(mapped), addr),
        Err(errno) => return errno::null(errno),
    };
    // SAFETY: the caller vouches for the domain, and the mapping goes with the region.
    errno::hand_out(unsafe { register(pd, addr, length, iova, access, mapped) })
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the caller vouches for it: a box of this module.
    let Region { base, key, mapped } = *unsafe { Box::from_raw(mr.cast::<Region>()) };
    // SAFETY: a context outlives its regions.
    unsafe { Context::of(base.context) }.hca.card.deregister(key);
    // SAFETY: a domain with regions cannot be freed.
    unsafe { Domain::of(base.pd) }.remove_user();
    drop(mapped);
    0
}
