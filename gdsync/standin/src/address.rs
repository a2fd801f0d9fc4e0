//! The GID table of the port.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::verbs::{ibv_context, ibv_gid, ibv_gid_entry, ibv_gid_type};

use crate::context::Context;
use crate::errno;

/// The port.
pub(crate) const PORT: u8 = 1;
/// Entries of the table, most of them unused.
pub(crate) const ENTRIES: u8 = 128;
/// The entry that leads to peers.
pub(crate) const ROUTED: u8 = 1;

static TELLS_KINDS: AtomicBool = AtomicBool::new(true);

/// From now on the kinds of GIDs are told, or not, as by old kernels.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_gid_kinds(are_told: bool) {
    TELLS_KINDS.store(are_told, Ordering::SeqCst);
}

/// What the index of a GID stands for.
fn entry(context: &Context, index: u32) -> Option<ibv_gid_entry> {
    let (gid, gid_type) = match index {
        0 => {
            // As of a link-local address.
            let mut raw = context.hca.card.gid().0;
            raw[..8].copy_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
            (raw, ibv_gid_type::IBV_GID_TYPE_ROCE_V1)
        }
        1 => (context.hca.card.gid().0, ibv_gid_type::IBV_GID_TYPE_ROCE_V2),
        _ => return None,
    };
    let is_told = TELLS_KINDS.load(Ordering::SeqCst);
    let gid_type = if is_told { gid_type } else { ibv_gid_type(u32::MAX) };
    let gid = ibv_gid { raw: gid };
    Some(ibv_gid_entry { gid, gid_index: index, port_num: PORT.into(), gid_type, ndev_ifindex: 1 })
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    let known = u32::try_from(index).ok().filter(|&index| port == PORT && index < ENTRIES.into());
    let Some(index) = known else {
        errno::set(libc::EINVAL);
        return -1;
    };
    let none = ibv_gid { raw: [0; 16] };
    // SAFETY: the caller vouches for the place.
    unsafe { gid.write(entry(context, index).map_or(none, |entry| entry.gid)) };
    0
}

/// # Safety
/// As the manual page of `ibv_query_gid_ex` asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    out: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    if flags != 0
        || port != PORT.into()
        || index >= ENTRIES.into()
        || entry_size != size_of::<ibv_gid_entry>()
    {
        return libc::EINVAL;
    }
    let Some(entry) = entry(context, index) else { return libc::ENODATA };
    // SAFETY: the caller vouches for the place.
    unsafe { out.write(entry) };
    0
}

/// # Safety
/// As the manual page of `ibv_query_gid_table` asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    if flags != 0 || entry_size != size_of::<ibv_gid_entry>() {
        return -isize::try_from(libc::EINVAL).unwrap_or(1);
    }
    let all: Vec<_> =
        (0..ENTRIES.into()).filter_map(|index| entry(context, index)).take(max_entries).collect();
    // SAFETY: the caller vouches for so many.
    unsafe { entries.copy_from_nonoverlapping(all.as_ptr(), all.len()) };
    all.len().cast_signed()
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    if port != PORT || index != 0 {
        errno::set(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller vouches for the place.
    unsafe { pkey.write(0xffff) };
    0
}
