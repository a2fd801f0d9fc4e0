//! Protection domains, thread domains, parent domains with the memory that their allocators give, and address handles.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use gdsync::memory::Memory;
use parking_lot::Mutex;
use rdma_core_sys::mlx5::mlx5_wqe_av;
use rdma_core_sys::verbs::{
    IBV_ALLOCATOR_USE_DEFAULT, ibv_ah, ibv_ah_attr, ibv_context, ibv_domain_alloc, ibv_domain_free,
    ibv_parent_domain_init_attr, ibv_parent_domain_init_attr_mask as mask, ibv_pd, ibv_td, ibv_td_init_attr,
};

use crate::context::{Context, ENTRIES, PORT};
use crate::errno::{code, complain};
use crate::{errno, region};

/// The protection domains by number, each an address.
static NUMBERED: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// Runs `f` on the protection domain of this number, which stays meanwhile; `None` where there is none.
pub(crate) fn numbered<T>(pdn: u32, f: impl FnOnce(&Domain) -> T) -> Option<T> {
    let all = NUMBERED.lock();
    let pd = *all.get(&pdn)? as *mut ibv_pd;
    // SAFETY: it is taken from the list before it is freed.
    Some(f(unsafe { Domain::of(pd) }))
}

/// `struct ibv_pd`, and what is behind it.
#[repr(C)]
pub(crate) struct Domain {
    base: UnsafeCell<ibv_pd>,
    users: Users,
    kind: Kind,
}

enum Kind {
    Plain { pdn: u32 },
    Parent { of: *mut ibv_pd, td: *mut ibv_td, allocator: Option<Allocator> },
}

/// Functions of the application that give memory for queues.
#[derive(Clone, Copy)]
pub(crate) struct Allocator {
    pub(crate) domain: *mut ibv_pd,
    pub(crate) context: *mut c_void,
    pub(crate) alloc: ibv_domain_alloc,
    pub(crate) free: ibv_domain_free,
}

/// How many objects were made with another one.
#[derive(Debug, Default)]
pub(crate) struct Users(AtomicU32);

impl Users {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// # Errors
    /// `EBUSY` while there are any.
    pub(crate) fn none(&self) -> Result<(), c_int> {
        if self.0.load(Ordering::Relaxed) == 0 { Ok(()) } else { Err(libc::EBUSY) }
    }
}

impl Domain {
    /// # Safety
    /// It must be a domain of this library.
    pub(crate) unsafe fn of<'a>(pd: *mut ibv_pd) -> &'a Self {
        // SAFETY: the caller vouches for it.
        unsafe { &*pd.cast() }
    }

    /// The number of the protection domain, which a parent domain shares.
    pub(crate) fn pdn(&self) -> u32 {
        match self.kind {
            Kind::Plain { pdn } => pdn,
            // SAFETY: a domain outlives its parent domains.
            Kind::Parent { of, .. } => unsafe { Self::of(of) }.pdn(),
        }
    }

    /// The allocator of a parent domain, if it has one.
    pub(crate) fn allocator(&self) -> Option<Allocator> {
        match self.kind {
            Kind::Plain { .. } => None,
            Kind::Parent { allocator, .. } => allocator,
        }
    }

    pub(crate) fn is_parent(&self) -> bool {
        matches!(self.kind, Kind::Parent { .. })
    }

    /// Something was made with it: the kernel knows the protection domain alone, the provider parent domains too.
    pub(crate) fn add_user(&self) {
        self.users.add();
        if let Kind::Parent { of, .. } = self.kind {
            // SAFETY: a domain outlives its parent domains.
            unsafe { Self::of(of) }.users.add();
        }
    }

    /// The reverse of [`Domain::add_user`].
    pub(crate) fn remove_user(&self) {
        self.users.remove();
        if let Kind::Parent { of, .. } = self.kind {
            // SAFETY: a domain outlives its parent domains.
            unsafe { Self::of(of) }.users.remove();
        }
    }

    fn new(context: *mut ibv_context, handle: u32, kind: Kind) -> Box<Self> {
        Box::new(Self { base: UnsafeCell::new(ibv_pd { context, handle }), users: Users::default(), kind })
    }
}

/// `struct ibv_td`, and who uses it.
#[repr(C)]
struct ThreadDomain {
    base: ibv_td,
    users: Users,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller vouches for the context.
    let hca = unsafe { Context::of(context) }.hca;
    let made = hca.card.alloc_pd().map(|pdn| Domain::new(context, pdn, Kind::Plain { pdn }));
    let pd: *mut ibv_pd = errno::hand_out(made.map_err(|_| libc::ENOMEM));
    if !pd.is_null() {
        // SAFETY: just made.
        NUMBERED.lock().insert(unsafe { Domain::of(pd) }.pdn(), pd.addr());
    }
    pd
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the caller vouches for the domain.
    let domain = unsafe { Domain::of(pd) };
    {
        let mut all = NUMBERED.lock();
        if let Err(errno) = domain.users.none() {
            return errno;
        }
        if let Kind::Plain { pdn } = domain.kind {
            all.remove(&pdn);
        }
    }
    if let Kind::Parent { of, td, .. } = domain.kind {
        // SAFETY: a domain outlives its parent domains.
        unsafe { Domain::of(of) }.users.remove();
        if !td.is_null() {
            // SAFETY: as above.
            unsafe { &*td.cast::<ThreadDomain>() }.users.remove();
        }
    }
    // SAFETY: it is a box of this module that nothing uses any more.
    drop(unsafe { Box::from_raw(pd.cast::<Domain>()) });
    0
}

/// `ibv_alloc_td`
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: the caller vouches for the attributes.
    if unsafe { (*attr).comp_mask } != 0 {
        return errno::null(libc::EINVAL);
    }
    let domain = ThreadDomain { base: ibv_td { context }, users: Users::default() };
    Box::into_raw(Box::new(domain)).cast()
}

/// `ibv_dealloc_td`
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: the caller vouches for the domain.
    let domain = unsafe { &*td.cast::<ThreadDomain>() };
    let idle = domain.users.none();
    if idle.is_ok() {
        // SAFETY: it is a box of this module that nothing uses any more.
        drop(unsafe { Box::from_raw(td.cast::<ThreadDomain>()) });
    }
    code(idle)
}

/// `ibv_alloc_parent_domain`
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller vouches for the attributes.
    let attr = unsafe { attr.read() };
    let known = mask::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | mask::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    if attr.pd.is_null() || !known.contains(attr.comp_mask) {
        return errno::null(libc::EINVAL);
    }
    // SAFETY: the caller vouches for the domain.
    let of = unsafe { Domain::of(attr.pd) };
    if of.is_parent() {
        complain("a parent domain is made of a parent domain");
        return errno::null(libc::EINVAL);
    }
    let domain = Domain::new(context, of.pdn(), Kind::Plain { pdn: 0 });
    let made = Box::into_raw(domain);
    let mut allocator = None;
    if attr.comp_mask.contains(mask::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
        let (Some(alloc), Some(free)) = (attr.alloc, attr.free) else {
            complain("a parent domain has an allocator without functions: rdma-core would call them");
            // SAFETY: nobody else has it.
            drop(unsafe { Box::from_raw(made) });
            return errno::null(libc::EINVAL);
        };
        let has_context = attr.comp_mask.contains(mask::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT);
        let context = if has_context { attr.pd_context } else { ptr::null_mut() };
        allocator = Some(Allocator { domain: made.cast(), context, alloc, free });
    }
    of.users.add();
    if !attr.td.is_null() {
        // SAFETY: the caller vouches for the thread domain.
        unsafe { &*attr.td.cast::<ThreadDomain>() }.users.add();
    }
    // SAFETY: nobody else has it yet.
    unsafe { (*made).kind = Kind::Parent { of: attr.pd, td: attr.td, allocator } };
    made.cast()
}

/// The memory that is requested.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) len: usize,
    pub(crate) align: usize,
    /// `MLX5DV_RES_TYPE_*`
    pub(crate) resource: u64,
    /// Whether the provider relies on the application to have cleared it.
    pub(crate) cleared: bool,
}

/// Memory of a queue, given back when this is dropped.
pub(crate) struct Buffer {
    addr: *mut u8,
    len: usize,
    from: From,
}

enum From {
    Application(Allocator, u64),
    Here { _memory: Memory },
}

impl Buffer {
    /// Asks the allocator of a parent domain; takes memory of this library where there is none, or it does not care.
    ///
    /// # Errors
    /// `EFAULT` for memory that cannot be pinned, `EINVAL` for memory that is not as it must be; where the allocator has
    /// none, what it left in `errno`.
    pub(crate) fn alloc(domain: Option<&Domain>, wanted: Wanted) -> Result<Self, c_int> {
        let Some(allocator) = domain.and_then(Domain::allocator) else { return Self::here(wanted.len) };
        let Allocator { domain, context, alloc, .. } = allocator;
        errno::set(libc::ENOMEM);
        // SAFETY: the application gave the function for this.
        let addr = unsafe { alloc(domain, context, wanted.len, wanted.align, wanted.resource) };
        if addr.addr() == IBV_ALLOCATOR_USE_DEFAULT.cast_unsigned() {
            return Self::here(wanted.len);
        }
        if addr.is_null() {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM));
        }
        let from = From::Application(allocator, wanted.resource);
        let buffer = Self { addr: addr.cast(), len: wanted.len, from };
        region::pin(addr.addr(), wanted.len, true)?;
        buffer.check(wanted)?;
        Ok(buffer)
    }

    fn here(len: usize) -> Result<Self, c_int> {
        let memory = Memory::alloc(len).map_err(|_| libc::ENOMEM)?;
        Ok(Self { addr: memory.addr() as *mut u8, len, from: From::Here { _memory: memory } })
    }

    fn check(&self, wanted: Wanted) -> Result<(), c_int> {
        let Wanted { len, align, resource, cleared } = wanted;
        let resource = resource & 0xffff_ffff;
        if !self.addr.addr().is_multiple_of(align) {
            complain(format!("memory for resource {resource} at {:p} is not aligned to {align}", self.addr));
            return Err(libc::EINVAL);
        }
        if cleared && self.memory(0, len)?.to_vec().iter().any(|&byte| byte != 0) {
            complain(format!("memory for resource {resource} is not zero: rdma-core does not clear it"));
            return Err(libc::EINVAL);
        }
        Ok(())
    }

    /// The address of the byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.addr.wrapping_add(offset)
    }

    /// A part of it as the HCA takes it. It must be gone before the buffer.
    pub(crate) fn memory(&self, offset: usize, len: usize) -> Result<Memory, c_int> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(libc::EINVAL);
        }
        // SAFETY: it was pinned, so it is there, and stays until this is dropped.
        unsafe { Memory::from_raw(self.at(offset), len) }.map_err(|_| libc::EINVAL)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let From::Application(Allocator { domain, context, free, .. }, resource) = self.from {
            // SAFETY: the application gave the function for this, and the memory comes from its sister.
            unsafe { free(domain, context, self.addr.cast(), resource) };
        }
    }
}

/// `struct ibv_ah`, and what is behind it.
#[repr(C)]
struct Handle {
    base: ibv_ah,
    vector: mlx5_wqe_av,
}

/// The hardware address of the port with this GID.
pub(crate) fn mac(gid: &[u8; 16]) -> [u8; 6] {
    [0x02, gid[11], gid[12], gid[13], gid[14], gid[15]]
}

/// The address vector of a handle.
///
/// # Safety
/// It must be one of this library.
pub(crate) unsafe fn vector(ah: *mut ibv_ah) -> *mut mlx5_wqe_av {
    // SAFETY: the caller vouches for it.
    unsafe { &raw mut (*ah.cast::<Handle>()).vector }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> *mut ibv_ah {
    if attr.port_num != PORT || attr.is_global == 0 || attr.grh.sgid_index >= ENTRIES {
        return errno::null(libc::EINVAL);
    }
    // SAFETY: all fields of the union are plain bytes.
    let gid = unsafe { attr.grh.dgid.raw };
    if gid == [0; 16] {
        return errno::null(libc::ETIMEDOUT);
    }
    let vector = mlx5_wqe_av {
        rmac: mac(&gid),
        tclass: attr.grh.traffic_class,
        hop_limit: attr.grh.hop_limit,
        rgid: gid,
        ..mlx5_wqe_av::zeroed()
    };
    // SAFETY: the caller vouches for the domain.
    let context = unsafe { (*pd).context };
    // SAFETY: as above.
    unsafe { Domain::of(pd) }.add_user();
    let base = ibv_ah { context, pd, handle: 0 };
    Box::into_raw(Box::new(Handle { base, vector })).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the caller vouches for it: a box of the function above.
    let handle = unsafe { Box::from_raw(ah.cast::<Handle>()) };
    // SAFETY: a domain with handles cannot be freed.
    unsafe { Domain::of(handle.base.pd) }.remove_user();
    0
}
