//! The entry points of librdmacm.

use std::ffi::{c_int, c_void};

use libc::sockaddr;

use super::*;
use crate::library::Installed;
use crate::table::entry_points;

const LIBRDMACM: Installed = Installed {
    name: "librdmacm.so.1",
    variable: "GDSYNC_LIBRDMACM",
    packages: "librdmacm1 (Debian, Ubuntu) or librdmacm (Fedora, RHEL)",
};

/// The release whose functions are taken for granted.
const OLDEST: &str = "20";

entry_points! {
    /// The functions of librdmacm. `GDSYNC_LIBRDMACM` in the environment names another library than the installed one.
    ///
    /// It belongs to the libibverbs of the same installation.
    RdmaCm from LIBRDMACM;

    always {
        rdma_create_event_channel() -> *mut rdma_event_channel;
        rdma_destroy_event_channel(channel: *mut rdma_event_channel);
        rdma_create_id(channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void,
            ps: rdma_port_space) -> c_int;
        rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
        rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
        rdma_resolve_addr(id: *mut rdma_cm_id, src_addr: *mut sockaddr, dst_addr: *mut sockaddr, timeout_ms: c_int)
            -> c_int;
        rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
        rdma_connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int;
        rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
        rdma_accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int;
        rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> c_int;
        rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
        rdma_get_src_port(id: *mut rdma_cm_id) -> u16;
    }

    since {}
}
