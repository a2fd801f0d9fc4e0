//! The client's allocator: notes what it is asked for, and misbehaves on demand.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use parking_lot::Mutex;
use rdma_core_sys::verbs::{IBV_ALLOCATOR_USE_DEFAULT, ibv_pd};

/// What it does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Conduct {
    #[default]
    Good,
    /// Leaves it to the library.
    Declines,
    /// Has none.
    Empty,
    /// Gives memory that was used before.
    Dirty,
    /// Gives memory that begins in the middle of a word.
    Askew,
    /// Gives an address where nothing is.
    Nowhere,
    /// Gives memory that cannot be written.
    ReadOnly,
}

/// One call: bytes, alignment, resource.
pub(crate) type Request = (usize, usize, u64);

#[derive(Debug, Default)]
pub(crate) struct Arena {
    pub(crate) conduct: Mutex<Conduct>,
    pub(crate) requests: Mutex<Vec<Request>>,
    /// Address, mapping, length and resource of what is lent.
    live: Mutex<HashMap<usize, (usize, usize, u64)>>,
    /// Resources in the order they came back.
    pub(crate) returned: Mutex<Vec<u64>>,
}

impl Arena {
    pub(crate) fn live(&self) -> usize {
        self.live.lock().len()
    }
}

/// Room before and behind, so that "askew" stays inside.
const MARGIN: usize = 4096;

pub(crate) unsafe extern "C" fn alloc(
    _pd: *mut ibv_pd,
    context: *mut c_void,
    size: usize,
    align: usize,
    resource: u64,
) -> *mut c_void {
    // SAFETY: the context is the arena, which outlives its domains.
    let arena = unsafe { &*context.cast::<Arena>() };
    arena.requests.lock().push((size, align, resource));
    let conduct = *arena.conduct.lock();
    match conduct {
        Conduct::Declines => return IBV_ALLOCATOR_USE_DEFAULT as *mut c_void,
        Conduct::Empty => return ptr::null_mut(),
        // The first page is never mapped.
        Conduct::Nowhere => return align.max(64) as *mut c_void,
        _ => {}
    }
    let len = size + align + MARGIN;
    let protection = match conduct {
        Conduct::ReadOnly => libc::PROT_READ,
        _ => libc::PROT_READ | libc::PROT_WRITE,
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping touches no existing memory.
    let mapping = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    if mapping == libc::MAP_FAILED {
        return ptr::null_mut();
    }
    let mut addr = mapping.addr().next_multiple_of(align);
    match conduct {
        Conduct::Askew => addr += 2,
        // SAFETY: the byte lies inside the mapping.
        Conduct::Dirty => unsafe { (addr as *mut u8).wrapping_add(size - 1).write(1) },
        _ => {}
    }
    arena.live.lock().insert(addr, (mapping.addr(), len, resource));
    addr as *mut c_void
}

pub(crate) unsafe extern "C" fn free(
    _pd: *mut ibv_pd,
    context: *mut c_void,
    addr: *mut c_void,
    resource: u64,
) {
    // SAFETY: the context is the arena, which outlives its domains.
    let arena = unsafe { &*context.cast::<Arena>() };
    arena.returned.lock().push(resource);
    let Some((mapping, len, lent_as)) = arena.live.lock().remove(&addr.addr()) else {
        // "Nowhere" was not lent.
        return;
    };
    assert_eq!(lent_as, resource, "memory comes back as what it went out");
    // SAFETY: it was mapped above, and nobody uses it any more.
    unsafe { libc::munmap(mapping as *mut c_void, len) };
}
