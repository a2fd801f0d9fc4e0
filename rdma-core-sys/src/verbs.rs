//! libibverbs: `infiniband/verbs.h`.

mod constants;
mod inline;
mod records;

use std::ffi::{c_char, c_int, c_uint, c_void};

pub use constants::*;
pub use inline::*;
pub use records::*;

use crate::abi::{Constant, Layout};
use crate::load::{Installed, entry_points};

pub(crate) const LAYOUTS: &[&[Layout]] = &[records::RECORDS];

pub(crate) const CONSTANT_LISTS: &[&[Constant]] =
    &[constants::ENUMERATIONS, constants::CONSTANTS, constants::FLAGS];

const LIBIBVERBS: Installed = Installed {
    name: "libibverbs.so.1",
    variable: "GDSYNC_LIBIBVERBS",
    packages: "libibverbs1 (Debian, Ubuntu) or libibverbs (Fedora, RHEL)",
    project: "rdma-core",
};

/// The release whose functions are taken for granted.
const OLDEST: &str = "20";

entry_points! {
    /// The functions of libibverbs. `GDSYNC_LIBIBVERBS` in the environment names another library than the installed one.
    ///
    /// Those from later releases are options here.
    Verbs from LIBIBVERBS;

    always {
        ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list(list: *mut *mut ibv_device);
        ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
        ibv_get_device_guid(device: *mut ibv_device) -> u64;
        ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
        ibv_close_device(context: *mut ibv_context) -> c_int;
        ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        ibv_ack_async_event(event: *mut ibv_async_event);
        ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut c_void) -> c_int;
        ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
        ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
        ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
        ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: ibv_access_flags) -> *mut ibv_mr;
        ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
        ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
        ibv_create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void,
            channel: *mut ibv_comp_channel, comp_vector: c_int) -> *mut ibv_cq;
        ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
        ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int;
        ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint);
        ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: ibv_qp_attr_mask) -> c_int;
        ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: ibv_qp_attr_mask,
            init_attr: *mut ibv_qp_init_attr) -> c_int;
        ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
        ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
        ibv_fork_init() -> c_int;
        ibv_node_type_str(node_type: ibv_node_type) -> *const c_char;
        ibv_port_state_str(port_state: ibv_port_state) -> *const c_char;
        ibv_event_type_str(event: ibv_event_type) -> *const c_char;
        ibv_wc_status_str(status: ibv_wc_status) -> *const c_char;
    }

    since {
        "28" ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64,
            access: ibv_access_flags) -> *mut ibv_mr;
        "30" ibv_get_device_index(device: *mut ibv_device) -> c_int;
        "32" _ibv_query_gid_table(context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize,
            flags: u32, entry_size: usize) -> isize;
        "34" ibv_reg_dmabuf_mr(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int,
            access: ibv_access_flags) -> *mut ibv_mr;
        "35" ibv_is_fork_initialized() -> ibv_fork_status;
        "36" ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: ibv_wr_opcode, flags: u32) -> c_int;
    }
}
