//! Open devices, what they say of themselves, and the GID table of the port.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::verbs::{
    ibv_atomic_cap, ibv_context, ibv_context_ops, ibv_device, ibv_device_attr, ibv_device_attr_ex,
    ibv_device_cap_flags, ibv_gid, ibv_gid_entry, ibv_gid_type, ibv_link_layer, ibv_mtu, ibv_port_attr,
    ibv_port_cap_flags, ibv_port_state, ibv_qp, ibv_query_device_ex_input, ibv_wr_opcode, verbs_context,
};

use crate::events::Events;
use crate::hca::Hca;
use crate::modify::MAX_RD_ATOMIC;
use crate::qp::{MAX_CQES, MAX_RECEIVES, MAX_SGES};
use crate::{cq, domain, errno, events, hca, qp, work};

/// What the port's network allows.
pub(crate) const ACTIVE_MTU: ibv_mtu = ibv_mtu::IBV_MTU_1024;

static ATOMICS: AtomicBool = AtomicBool::new(true);

/// Whether there are atomics.
pub(crate) fn has_atomics() -> bool {
    ATOMICS.load(Ordering::SeqCst)
}

/// From now on there are atomics, or none: no queue pair may allow them to peers.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_atomics(are_there: u32) {
    ATOMICS.store(are_there != 0, Ordering::SeqCst);
}

/// `struct verbs_context`, and what is behind it.
#[repr(C)]
pub(crate) struct Context {
    base: UnsafeCell<verbs_context>,
    pub(crate) hca: &'static Hca,
    pub(crate) events: Arc<Events>,
}

impl Context {
    /// # Safety
    /// It must be a context of this library.
    pub(crate) unsafe fn of<'a>(context: *mut ibv_context) -> &'a Self {
        let whole = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<Self>();
        // SAFETY: the caller vouches for it.
        unsafe { &*whole }
    }

    /// Opens the device.
    pub(crate) fn open(device: *mut ibv_device) -> Result<*mut ibv_context, c_int> {
        let hca = Hca::get()?;
        let events = Arc::new(Events::new()?);
        let ops = ibv_context_ops {
            poll_cq: Some(cq::poll_cq),
            req_notify_cq: Some(events::req_notify_cq),
            post_send: Some(work::post_send),
            post_recv: Some(work::post_recv),
            ..ibv_context_ops::zeroed()
        };
        let context = ibv_context {
            device,
            ops,
            cmd_fd: -1,
            async_fd: events.fd(),
            num_comp_vectors: 1,
            abi_compat: usize::MAX as *mut c_void,
            ..ibv_context::zeroed()
        };
        let base = verbs_context {
            query_port: Some(query_port),
            alloc_parent_domain: Some(domain::alloc_parent_domain),
            dealloc_td: Some(domain::dealloc_td),
            alloc_td: Some(domain::alloc_td),
            create_cq_ex: Some(cq::create_cq_ex),
            query_device_ex: Some(query_device_ex),
            create_qp_ex: Some(qp::create_qp_ex),
            sz: size_of::<verbs_context>(),
            context,
            ..verbs_context::zeroed()
        };
        let whole = Box::into_raw(Box::new(Self { base: UnsafeCell::new(base), hca, events }));
        Ok(whole.wrapping_byte_add(offset_of!(verbs_context, context)).cast())
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    Context::open(device).unwrap_or_else(errno::null)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let whole = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<Context>();
    // SAFETY: the caller vouches for it: a box of this module.
    drop(unsafe { Box::from_raw(whole) });
    0
}

fn attributes(context: &Context) -> ibv_device_attr {
    let mut fw_ver = [0; 64];
    for (to, from) in fw_ver.iter_mut().zip(b"16.35.2000") {
        *to = from.cast_signed();
    }
    let guid = hca::guid(context.hca);
    ibv_device_attr {
        fw_ver,
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: u64::MAX,
        page_size_cap: !0xfff,
        vendor_id: 0x2c9,
        vendor_part_id: 4119,
        max_qp: 16384,
        max_qp_wr: MAX_RECEIVES.cast_signed(),
        device_cap_flags: ibv_device_cap_flags::IBV_DEVICE_RC_RNR_NAK_GEN,
        max_sge: MAX_SGES.into(),
        max_sge_rd: MAX_SGES.into(),
        max_cq: 1 << 24,
        max_cqe: MAX_CQES.cast_signed() - 1,
        max_mr: 1 << 24,
        max_pd: 1 << 24,
        max_qp_rd_atom: MAX_RD_ATOMIC.into(),
        max_qp_init_rd_atom: MAX_RD_ATOMIC.into(),
        max_res_rd_atom: 16384 * i32::from(MAX_RD_ATOMIC),
        atomic_cap: if has_atomics() {
            ibv_atomic_cap::IBV_ATOMIC_HCA
        } else {
            ibv_atomic_cap::IBV_ATOMIC_NONE
        },
        max_ah: i32::MAX,
        max_pkeys: 1,
        local_ca_ack_delay: 16,
        phys_port_cnt: 1,
        ..ibv_device_attr::zeroed()
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: &mut MaybeUninit<ibv_device_attr>,
) -> c_int {
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    attr.write(attributes(context));
    0
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    let all = ibv_device_attr_ex {
        orig_attr: attributes(context),
        completion_timestamp_mask: u64::MAX,
        hca_core_clock: 1_000_000,
        phys_port_cnt_ex: 1,
        ..ibv_device_attr_ex::zeroed()
    };
    let size = size.min(size_of::<ibv_device_attr_ex>());
    // SAFETY: the caller vouches for so many bytes.
    unsafe { attr.cast::<u8>().copy_from_nonoverlapping((&raw const all).cast(), size) };
    0
}

/// What the port says, as far as `size` bytes of it are wanted.
unsafe extern "C" fn query_port(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    if port != PORT {
        return libc::EINVAL;
    }
    let all = ibv_port_attr {
        state: ibv_port_state::IBV_PORT_ACTIVE,
        max_mtu: ibv_mtu::IBV_MTU_4096,
        active_mtu: ACTIVE_MTU,
        gid_tbl_len: ENTRIES.into(),
        port_cap_flags: ibv_port_cap_flags::IBV_PORT_CM_SUP | ibv_port_cap_flags::IBV_PORT_IP_BASED_GIDS,
        max_msg_sz: 1 << 30,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        active_width: 2,
        active_speed: 32,
        phys_state: 5,
        link_layer: ibv_link_layer::IBV_LINK_LAYER_ETHERNET,
        ..ibv_port_attr::zeroed()
    };
    let size = size.min(size_of::<ibv_port_attr>());
    // SAFETY: the caller vouches for so many bytes.
    unsafe { attr.cast::<u8>().copy_from_nonoverlapping((&raw const all).cast(), size) };
    0
}

/// Writes the older, shorter structure.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut c_void,
) -> c_int {
    let size = offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: the caller vouches for the arguments.
    unsafe { query_port(context, port, attr.cast(), size) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    // The software HCA writes payload in order, but a card need not.
    0
}

/// The port.
pub(crate) const PORT: u8 = 1;
/// Entries of the table, most of them unused.
pub(crate) const ENTRIES: u8 = 128;
/// The entry that leads to peers.
pub(crate) const ROUTED: u8 = 1;

static TELLS_KINDS: AtomicBool = AtomicBool::new(true);

/// From now on the kinds of GIDs are told, or not, as by old kernels.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_gid_kinds(are_told: u32) {
    TELLS_KINDS.store(are_told != 0, Ordering::SeqCst);
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

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    out: &mut MaybeUninit<ibv_gid_entry>,
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
    out.write(entry);
    0
}

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

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: &mut MaybeUninit<u16>,
) -> c_int {
    if port != PORT || index != 0 {
        errno::set(libc::EINVAL);
        return -1;
    }
    pkey.write(0xffff);
    0
}
