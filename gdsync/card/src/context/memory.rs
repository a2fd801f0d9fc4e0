//! Protection domains and memory regions.

use std::sync::Arc;

use gdsync_device::Access;
use gdsync_device::cuda::Gpu;
use gdsync_device::memory::{Memory, host_page};
use parking_lot::Mutex;
use rustix::io::Errno;

use super::{Context, Pd, Result};
use crate::abi::{
    ib_uverbs_alloc_pd, ib_uverbs_alloc_pd_resp, ib_uverbs_dealloc_pd, ib_uverbs_dereg_mr, ib_uverbs_reg_mr,
    ib_uverbs_reg_mr_resp, ib_uverbs_rereg_mr, ib_uverbs_rereg_mr_resp, mlx5_ib_alloc_pd_resp,
};
use crate::command::Command;
use crate::hca::Hca;
use crate::log::log;
use crate::user::{User, pin};

/// A memory region.
#[derive(Debug)]
pub(super) struct Mr {
    hca: &'static Hca,
    pub(super) key: u32,
    /// Changed by REREG_MR.
    pub(super) attr: Mutex<MrAttr>,
}

/// What a region is registered with.
#[derive(Clone, Debug)]
pub(super) struct MrAttr {
    pub(super) pd: Arc<Pd>,
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) hca_va: u64,
    pub(super) access_flags: u32,
    /// Memory of a dma-buf, which has no address of the program.
    pub(super) dma_buf: Option<Memory>,
}

impl MrAttr {
    /// Checks it as the kernel does. The memory, and the rights that the HCA knows.
    pub(super) fn check(&self) -> Result<(Memory, Access)> {
        let Self { start, length, hca_va, .. } = *self;
        check_access(self.access_flags)?;
        let page = host_page() as u64;
        let wraps = |from: u64| from.checked_add(length).is_none();
        if length == 0 || start % page != hca_va % page || wraps(start) || wraps(hca_va) {
            return Err(Errno::INVAL);
        }
        let access = Access::from_bits_truncate(self.access_flags & Access::all().bits());
        let memory = self.dma_buf.clone().map_or_else(|| region(start, length, access), Ok)?;
        Ok((memory, access))
    }
}

impl Mr {
    pub(super) fn new(hca: &'static Hca, attr: MrAttr) -> Result<Arc<Self>> {
        let (memory, access) = attr.check()?;
        let key = hca.card.register(attr.pd.pdn, &memory, attr.hca_va, access);
        let key = key.map_err(|_| Errno::NOMEM)?;
        Ok(Arc::new(Self { hca, key, attr: Mutex::new(attr) }))
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.hca.card.deregister(self.key);
    }
}

/// `enum ib_access_flags`
mod flag {
    pub(super) const LOCAL_WRITE: u32 = 1;
    pub(super) const REMOTE_WRITE: u32 = 1 << 1;
    pub(super) const REMOTE_ATOMIC: u32 = 1 << 3;
    pub(super) const MW_BIND: u32 = 1 << 4;
    pub(super) const ZERO_BASED: u32 = 1 << 5;
    pub(super) const ON_DEMAND: u32 = 1 << 6;
    pub(super) const HUGETLB: u32 = 1 << 7;
    /// Those that a kernel may ignore: relaxed ordering and others.
    pub(super) const OPTIONAL: u32 = 0x3ff0_0000;
}

impl Context {
    pub(super) fn alloc_pd(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let _: ib_uverbs_alloc_pd = command.request()?;
        let pdn = self.hca.card.alloc_pd().map_err(|_| Errno::NOMEM)?;
        let pd_handle = self.new_handle();
        let core = ib_uverbs_alloc_pd_resp { pd_handle };
        command.respond_both(user, &core, &mlx5_ib_alloc_pd_resp { pdn })?;
        self.pds.add(pd_handle, Arc::new(Pd { pdn }));
        Ok(())
    }

    pub(super) fn dealloc_pd(&self, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_dealloc_pd = command.request()?;
        self.pds.remove(request.pd_handle).map(drop)
    }

    pub(super) fn reg_mr(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_reg_mr = command.request()?;
        let ib_uverbs_reg_mr { start, length, hca_va, access_flags, .. } = request;
        command.check_response::<ib_uverbs_reg_mr_resp>()?;
        let pd = self.pds.get(request.pd_handle)?;
        let attr = MrAttr { pd, start, length, hca_va, access_flags, dma_buf: None };
        let mr = Mr::new(self.hca, attr)?;
        let mr_handle = self.new_handle();
        command.respond(user, &ib_uverbs_reg_mr_resp { mr_handle, lkey: mr.key, rkey: mr.key })?;
        self.mrs.add(mr_handle, mr);
        Ok(())
    }

    pub(super) fn dereg_mr(&self, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_dereg_mr = command.request()?;
        self.mrs.remove(request.mr_handle).map(drop)
    }
}

/// Rights that the kernel accepts (`ib_check_mr_access`).
pub(super) fn check_access(flags: u32) -> Result<()> {
    let known = Access::all().bits() | flag::MW_BIND | flag::ZERO_BASED | flag::ON_DEMAND | flag::HUGETLB;
    let needs_local = flags & (flag::REMOTE_WRITE | flag::REMOTE_ATOMIC) != 0;
    if needs_local && flags & flag::LOCAL_WRITE == 0 || flags & !(known | flag::OPTIONAL) != 0 {
        return Err(Errno::INVAL);
    }
    if flags & flag::ON_DEMAND != 0 { Err(Errno::OPNOTSUPP) } else { Ok(()) }
}

/// The memory of a region: host memory, which must be writable unless only reading is allowed, or GPU memory.
fn region(start: u64, length: u64, access: Access) -> Result<Memory> {
    let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let size = usize::try_from(length).map_err(|_| Errno::INVAL)?;
    if let Err(errno) = pin(start, length, !access.intersects(writes)) {
        // As a kernel with nvidia-peermem: an address without pages may be of a GPU.
        return on_gpu(start, size)?.ok_or(errno);
    }
    // Nothing pins its pages here: the program may unmap them first.
    // SAFETY: the range was mapped when `pin` checked it. Only atomics of a peer use words of it; a program that unmaps them at that
    // very moment ends by a fault.
    unsafe { Memory::of_program(address(start)?, size) }.map_err(|_| Errno::FAULT)
}

fn address(addr: u64) -> Result<*mut u8> {
    usize::try_from(addr).map(std::ptr::with_exposed_provenance_mut).map_err(|_| Errno::FAULT)
}

/// The memory at an address, if it is of a GPU.
///
/// # Errors
/// `EFAULT`, with the reason in the log.
pub(super) fn on_gpu(addr: u64, len: usize) -> Result<Option<Memory>> {
    // SAFETY: CUDA knows the range. That it stays allocated until the region ends is up to the program; where it is mapped, the mapping
    // keeps it.
    unsafe { Gpu::find(addr, len) }.map_err(|error| {
        log!("GPU memory of {len} bytes at {addr:#x} cannot be registered: {error}");
        Errno::FAULT
    })
}

/// The memory of a ring or doorbell record, which must be writable.
///
/// # Errors
/// `EFAULT`, or `EINVAL` for a wrong alignment or no length.
pub(super) fn ring(addr: u64, len: usize, align: u64) -> Result<Memory> {
    if !addr.is_multiple_of(align) || len == 0 {
        return Err(Errno::INVAL);
    }
    pin(addr, len as u64, false)?;
    // SAFETY: the range is mapped with the rights that the card needs, as `pin` checked. That it stays so until the object ends is up
    // to the program, which gives rings to its driver: nothing pins its pages here.
    unsafe { Memory::from_raw(address(addr)?, len) }.map_err(|_| Errno::FAULT)
}

/// `enum ib_mr_rereg_flags`
mod rereg_flag {
    pub(super) const TRANSLATION: u32 = 1;
    pub(super) const PD: u32 = 1 << 1;
    pub(super) const ACCESS: u32 = 1 << 2;
}

impl Context {
    /// As mlx5's driver where the card can change the region in place: the keys stay.
    pub(super) fn rereg_mr(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_rereg_mr = command.request()?;
        command.check_response::<ib_uverbs_rereg_mr_resp>()?;
        let has = |bit| request.flags & bit != 0;
        if request.flags == 0 {
            return Err(Errno::INVAL);
        }
        if has(!(rereg_flag::TRANSLATION | rereg_flag::PD | rereg_flag::ACCESS)) {
            return Err(Errno::OPNOTSUPP);
        }
        let mr = self.mrs.get(request.mr_handle)?;
        let mut current = mr.attr.lock();
        let mut attr = current.clone();
        if has(rereg_flag::TRANSLATION) {
            (attr.start, attr.length, attr.hca_va) = (request.start, request.length, request.hca_va);
            // The new memory is the program's, as the kernel has it.
            attr.dma_buf = None;
        }
        if has(rereg_flag::PD) {
            attr.pd = self.pds.get(request.pd_handle)?;
        }
        if has(rereg_flag::ACCESS) {
            attr.access_flags = request.access_flags;
        }
        let (memory, access) = attr.check()?;
        let changed = self.hca.card.reregister(mr.key, attr.pd.pdn, &memory, attr.hca_va, access);
        changed.map_err(|_| Errno::INVAL)?;
        *current = attr;
        command.respond(user, &ib_uverbs_rereg_mr_resp { lkey: mr.key, rkey: mr.key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_those_of_the_kernel() {
        for flags in [0, 1, 3, 5, 9, 0xf, 1 << 20 | 1, 4, 0x10, 0x80] {
            assert_eq!(check_access(flags), Ok(()), "{flags:#x}");
        }
        for flags in [2, 8, 0xa, 0x100, 1 << 31] {
            assert_eq!(check_access(flags), Err(Errno::INVAL), "{flags:#x}");
        }
        assert_eq!(check_access(0x41), Err(Errno::OPNOTSUPP), "on-demand paging");
    }
}
