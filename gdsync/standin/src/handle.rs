//! Address handles: the peer's hardware address, as a kernel resolves it.

use std::ffi::c_int;

use rdma_core_sys::mlx5::mlx5_wqe_av;
use rdma_core_sys::verbs::{ibv_ah, ibv_ah_attr, ibv_pd};

use crate::address::{ENTRIES, PORT};
use crate::domain::Domain;
use crate::errno;

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

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller vouches for the attributes.
    let attr = unsafe { &*attr };
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

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the caller vouches for it: a box of the function above.
    let handle = unsafe { Box::from_raw(ah.cast::<Handle>()) };
    // SAFETY: a domain with handles cannot be freed.
    unsafe { Domain::of(handle.base.pd) }.remove_user();
    0
}
