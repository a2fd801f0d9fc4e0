//! Protection domains, thread domains, and parent domains with an allocator.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::verbs::{
    ibv_context, ibv_domain_alloc, ibv_domain_free, ibv_parent_domain_init_attr,
    ibv_parent_domain_init_attr_mask as mask, ibv_pd, ibv_td, ibv_td_init_attr,
};

use crate::complaint::complain;
use crate::context::Context;
use crate::errno::{self, code};

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

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller vouches for the context.
    let hca = unsafe { Context::of(context) }.hca;
    let made = hca.card.alloc_pd().map(|pdn| Domain::new(context, pdn, Kind::Plain { pdn }));
    errno::hand_out(made.map_err(|_| libc::ENOMEM))
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the caller vouches for the domain.
    let domain = unsafe { Domain::of(pd) };
    if let Err(errno) = domain.users.none() {
        return errno;
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
