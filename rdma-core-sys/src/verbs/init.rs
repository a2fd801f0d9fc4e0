//! What objects are created with, and the attributes of queue pairs.

use std::ffi::{c_int, c_uint, c_void};

use super::*;
use crate::abi::records;

/// `alloc` of [`ibv_parent_domain_init_attr`]: domain, its context, bytes, alignment, type of the resource.
pub type ibv_domain_alloc = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void;

/// `free` of [`ibv_parent_domain_init_attr`]: domain, its context, memory, type of the resource.
pub type ibv_domain_free = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, u64);

records! {
    RECORDS;

    /// `struct ibv_td_init_attr`
    struct ibv_td_init_attr {
        comp_mask: u32,
    }

    /// `struct ibv_parent_domain_init_attr`
    struct ibv_parent_domain_init_attr {
        pd: *mut ibv_pd,
        /// Null for none.
        td: *mut ibv_td,
        comp_mask: ibv_parent_domain_init_attr_mask,
        /// May return [`IBV_ALLOCATOR_USE_DEFAULT`].
        alloc: Option<ibv_domain_alloc>,
        free: Option<ibv_domain_free>,
        pd_context: *mut c_void,
    }

    /// `struct ibv_cq_init_attr_ex`
    struct ibv_cq_init_attr_ex grows {
        /// Entries at least.
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: u32,
        wc_flags: ibv_create_cq_wc_flags,
        comp_mask: ibv_cq_init_attr_mask,
        flags: ibv_create_cq_attr_flags,
        parent_domain: *mut ibv_pd,
    }

    /// `struct ibv_qp_cap`: requests and granted sizes.
    struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        /// Bytes.
        max_inline_data: u32,
    }

    /// `struct ibv_qp_init_attr`
    struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
    }

    /// `struct ibv_rx_hash_conf`
    struct ibv_rx_hash_conf {
        rx_hash_function: u8,
        rx_hash_key_len: u8,
        rx_hash_key: *mut u8,
        rx_hash_fields_mask: u64,
    }

    /// `struct ibv_qp_init_attr_ex`
    struct ibv_qp_init_attr_ex grows {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
        comp_mask: ibv_qp_init_attr_mask,
        pd: *mut ibv_pd,
        xrcd: *mut c_void,
        create_flags: ibv_qp_create_flags,
        max_tso_header: u16,
        rwq_ind_tbl: *mut c_void,
        rx_hash_conf: ibv_rx_hash_conf,
        source_qpn: u32,
        send_ops_flags: ibv_qp_create_send_ops_flags,
    }

    /// `struct ibv_qp_attr`
    struct ibv_qp_attr {
        qp_state: ibv_qp_state,
        cur_qp_state: ibv_qp_state,
        path_mtu: ibv_mtu,
        path_mig_state: ibv_mig_state,
        qkey: u32,
        /// 24 bits.
        rq_psn: u32,
        /// 24 bits.
        sq_psn: u32,
        /// 24 bits.
        dest_qp_num: u32,
        qp_access_flags: ibv_access_flags,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        /// 5 bits: 12 is 0.64 ms.
        min_rnr_timer: u8,
        port_num: u8,
        /// 5 bits: 4.096 µs · 2^timeout, 0 for never.
        timeout: u8,
        /// 3 bits.
        retry_cnt: u8,
        /// 3 bits: 7 is without end.
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        /// kbit/s
        rate_limit: u32,
    }

    /// `struct ibv_mw_bind_info`
    struct ibv_mw_bind_info {
        mr: *mut ibv_mr,
        addr: u64,
        length: u64,
        mw_access_flags: c_uint,
    }
}
