//! Structures of `infiniband/verbs.h`: attributes, devices and contexts, objects, work requests and completions.

use std::ffi::{c_char, c_int, c_void};

use libc::{pthread_cond_t, pthread_mutex_t};

use super::*;
use crate::abi::{Unused, records};

/// `alloc` of [`ibv_parent_domain_init_attr`]: domain, its context, bytes, alignment, type of the resource.
pub type ibv_domain_alloc = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void;

/// `free` of [`ibv_parent_domain_init_attr`]: domain, its context, memory, type of the resource.
pub type ibv_domain_free = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, u64);

records! {
    RECORDS;

    /// An address, in network byte order.
    union ibv_gid {
        raw: [u8; 16],
        global: ibv_gid_global,
    }

    /// The halves of a GID.
    struct ibv_gid_global("typeof(((union ibv_gid *)0)->global)") {
        /// Big-endian.
        subnet_prefix: u64,
        /// Big-endian.
        interface_id: u64,
    }

    /// One entry of a GID table.
    struct ibv_gid_entry {
        gid: ibv_gid,
        gid_index: u32,
        port_num: u32,
        gid_type: ibv_gid_type,
        /// Index of the network interface, 0 for none.
        ndev_ifindex: u32,
    }

    struct ibv_device_attr {
        fw_ver: [c_char; 64],
        /// Big-endian.
        node_guid: u64,
        /// Big-endian.
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: ibv_device_cap_flags,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int,
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: ibv_atomic_cap,
        _of_datagrams("max_ee"): [c_int; 8],
        max_ah: c_int,
        _of_fmr_and_srq("max_fmr"): [c_int; 5],
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }

    struct ibv_query_device_ex_input {
        comp_mask: u32,
    }

    /// The library writes no more than the size that [`Verbs::query_device_ex`] passes.
    struct ibv_device_attr_ex grows {
        orig_attr: ibv_device_attr,
        comp_mask: u32,
        _odp_caps("odp_caps"): [u64; 3],
        completion_timestamp_mask: u64,
        /// kHz
        hca_core_clock: u64,
        /// Of offloads, and of PCI atomics.
        _other_caps("device_cap_flags_ex"): [u64; 14],
        xrc_odp_caps: u32,
        phys_port_cnt_ex: u32,
    }

    /// The library writes no more than the size that [`Verbs::query_port`] passes.
    struct ibv_port_attr grows {
        state: ibv_port_state,
        max_mtu: ibv_mtu,
        active_mtu: ibv_mtu,
        gid_tbl_len: c_int,
        port_cap_flags: ibv_port_cap_flags,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        /// 1, 2, 4, 8 and 16 for 1x, 4x, 8x, 12x and 2x.
        active_width: u8,
        /// 1 SDR, 2 DDR, 4 QDR, 8 FDR10, 16 FDR, 32 EDR, 64 HDR, 128 NDR.
        active_speed: u8,
        /// 3 disabled, 5 link up.
        phys_state: u8,
        link_layer: ibv_link_layer,
        flags: ibv_port_flags,
        port_cap_flags2: u16,
    }

    /// The network part of an address.
    struct ibv_global_route {
        dgid: ibv_gid,
        /// 20 bits.
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }

    /// An address.
    struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        /// `enum ibv_rate`.
        static_rate: u8,
        /// 1 where `grh` counts; always with Ethernet.
        is_global: u8,
        port_num: u8,
    }

    struct ibv_device {
        _ops: [Unused; 2],
        node_type: ibv_node_type,
        transport_type: ibv_transport_type,
        /// Of the kernel, such as `mlx5_0`.
        name: [c_char; IBV_SYSFS_NAME_MAX],
        /// Such as `uverbs0`.
        dev_name: [c_char; IBV_SYSFS_NAME_MAX],
        dev_path: [c_char; IBV_SYSFS_PATH_MAX],
        ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
    }

    /// Those functions of the driver that every context has.
    struct ibv_context_ops {
        _before_poll_cq("_compat_query_device"): [Unused; 11],
        poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
        req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
        _before_post_send("_compat_cq_event"): [Unused; 12],
        post_send: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
        post_recv: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        _after_post_recv("_compat_create_ah"): [Unused; 5],
    }

    /// An open device.
    struct ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        /// Readable when there is an asynchronous event.
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: pthread_mutex_t,
        abi_compat: *mut c_void,
    }

    /// The context with the functions that came later. New ones are put in front, and
    /// `sz` says from where on there are any.
    struct verbs_context grows_in_front {
        query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
        _before_alloc_parent_domain("advise_mr"): [Unused; 13],
        alloc_parent_domain:
            Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
        dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
        alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
        _before_create_cq_ex("modify_cq"): [Unused; 8],
        create_cq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
        _priv("priv"): *mut c_void,
        query_device_ex: Option<
            unsafe extern "C" fn(
                *mut ibv_context,
                *const ibv_query_device_ex_input,
                *mut ibv_device_attr_ex,
                usize,
            ) -> c_int,
        >,
        _before_create_qp_ex("ibv_destroy_flow"): [Unused; 5],
        create_qp_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
        _after_create_qp_ex("get_srq_num"): [Unused; 4],
        _placeholder3("_ABI_placeholder3"): u64,
        /// Bytes of this structure as the library knows it.
        sz: usize,
        context: ibv_context,
    }

    /// A protection domain.
    struct ibv_pd {
        context: *mut ibv_context,
        handle: u32,
    }

    /// A thread domain.
    struct ibv_td {
        context: *mut ibv_context,
    }

    /// A memory region.
    struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }

    /// An address handle.
    struct ibv_ah {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        handle: u32,
    }

    /// Where completion events arrive.
    struct ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }

    /// A completion queue.
    struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        /// Entries that are free to use.
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }

    /// A completion queue with functions that read a completion, which nothing here calls. The first fields are those of
    /// [`ibv_cq`].
    struct ibv_cq_ex grows {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
        comp_mask: u32,
        status: ibv_wc_status,
        wr_id: u64,
        _functions("start_poll"): [Unused; 18],
    }

    /// A queue pair.
    struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        handle: u32,
        qp_num: u32,
        state: ibv_qp_state,
        qp_type: ibv_qp_type,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }

    struct ibv_async_event {
        element: ibv_async_event_element,
        event_type: ibv_event_type,
    }

    /// What an asynchronous event concerns.
    union ibv_async_event_element("typeof(((struct ibv_async_event *)0)->element)") {
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
        srq: *mut c_void,
        wq: *mut c_void,
        port_num: c_int,
    }

    struct ibv_td_init_attr {
        comp_mask: u32,
    }

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

    /// Requests and granted sizes.
    struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        /// Bytes.
        max_inline_data: u32,
    }

    struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
    }

    struct ibv_qp_init_attr_ex grows {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
        comp_mask: ibv_qp_init_attr_mask,
        pd: *mut ibv_pd,
        xrcd: *mut c_void,
        create_flags: ibv_qp_create_flags,
        max_tso_header: u16,
        rwq_ind_tbl: *mut c_void,
        _rx_hash_conf("rx_hash_conf"): [u64; 3],
        source_qpn: u32,
        send_ops_flags: ibv_qp_create_send_ops_flags,
    }

    struct ibv_qp_attr {
        qp_state: ibv_qp_state,
        cur_qp_state: ibv_qp_state,
        path_mtu: ibv_mtu,
        path_mig_state: u32,
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

    /// A piece of registered memory.
    struct ibv_sge {
        addr: u64,
        /// Bytes.
        length: u32,
        lkey: u32,
    }

    /// A request to send.
    struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: ibv_wr_opcode,
        send_flags: ibv_send_flags,
        /// The immediate, big-endian, or the key to invalidate.
        imm_data: u32,
        wr: ibv_send_wr_wr,
        /// Of XRC queue pairs.
        remote_srqn("qp_type.xrc.remote_srqn"): u32,
        /// Of memory windows and segmentation.
        _other("bind_mw"): [u64; 6],
    }

    /// `wr` of a request: what the operation names at the peer.
    union ibv_send_wr_wr("typeof(((struct ibv_send_wr *)0)->wr)") {
        rdma: ibv_send_wr_rdma,
        atomic: ibv_send_wr_atomic,
        ud: ibv_send_wr_ud,
    }

    /// The target of a write or the source of a read.
    struct ibv_send_wr_rdma("typeof(((struct ibv_send_wr *)0)->wr.rdma)") {
        remote_addr: u64,
        rkey: u32,
    }

    /// The target of an atomic and its operands.
    struct ibv_send_wr_atomic("typeof(((struct ibv_send_wr *)0)->wr.atomic)") {
        remote_addr: u64,
        /// What is compared with, or added.
        compare_add: u64,
        swap: u64,
        rkey: u32,
    }

    /// The addressee of a datagram.
    struct ibv_send_wr_ud("typeof(((struct ibv_send_wr *)0)->wr.ud)") {
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    }

    /// A request to receive.
    struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    /// A completion.
    struct ibv_wc {
        wr_id: u64,
        status: ibv_wc_status,
        opcode: ibv_wc_opcode,
        vendor_err: u32,
        byte_len: u32,
        /// The immediate, big-endian, or the key that was invalidated.
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: ibv_wc_flags,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }
}
