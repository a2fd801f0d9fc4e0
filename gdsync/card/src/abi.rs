//! The kernel's binary interface: structures of the write commands (`rdma/ib_user_verbs.h`, `rdma/mlx5-abi.h`) and of
//! the ioctl (`rdma/rdma_user_ioctl_cmds.h`), under their names in C.

/// A structure of integers without padding, which any bytes are a value of.
///
/// # Safety
/// The type must be `repr(C)`, have no padding, and consist of integers.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: an integer.
unsafe impl Plain for u32 {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}

/// The bytes of a structure.
pub(crate) fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `Plain` has no padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// The structure at the start of these bytes; what they do not reach is 0.
pub(crate) fn read_padded<T: Plain>(bytes: &[u8]) -> T {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let len = bytes.len().min(size_of::<T>());
    // SAFETY: both ranges have `len` bytes, and a local variable overlaps nothing.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.as_mut_ptr().cast(), len) };
    // SAFETY: all bytes are initialized, and any bytes are a value of `T`.
    unsafe { value.assume_init() }
}

/// Bytes of a structure, for the response that says how long it is.
pub(crate) const fn length<T: Plain>() -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "structures are short")]
    let length = size_of::<T>() as u32;
    length
}

/// A structure for the test that compares it with the headers: name, size, and the offset of each field.
#[cfg(test)]
pub(crate) type Layout = (&'static str, usize, &'static [(&'static str, usize)]);

macro_rules! structures {
    ($($name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            #[allow(non_camel_case_types, reason = "the names in C")]
            pub(crate) struct $name {
                $(pub(crate) $field: $type,)*
            }

            const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "padding");

            // SAFETY: the fields are integers or made of them, and the line above proves that nothing lies between.
            unsafe impl Plain for $name {}

            impl Default for $name {
                fn default() -> Self {
                    read_padded(&[])
                }
            }
        )*

        #[cfg(test)]
        pub(crate) const LAYOUTS: &[Layout] = &[
            $((stringify!($name), size_of::<$name>(), &[
                $((stringify!($field), std::mem::offset_of!($name, $field)),)*
            ]),)*
        ];
    };
}

structures! {
    ib_uverbs_cmd_hdr { command: u32, in_words: u16, out_words: u16, }
    ib_uverbs_ex_cmd_hdr {
        response: u64, provider_in_words: u16, provider_out_words: u16, cmd_hdr_reserved: u32,
    }
    ib_uverbs_async_event_desc { element: u64, event_type: u32, reserved: u32, }
    ib_uverbs_get_context { response: u64, }
    ib_uverbs_get_context_resp { async_fd: u32, num_comp_vectors: u32, }
    mlx5_ib_alloc_ucontext_req_v2 {
        total_num_bfregs: u32, num_low_latency_bfregs: u32, flags: u32, comp_mask: u32,
        max_cqe_version: u8, reserved0: u8, reserved1: u16, reserved2: u32, lib_caps: u64,
    }
    mlx5_ib_alloc_ucontext_resp {
        qp_tab_size: u32, bf_reg_size: u32, tot_bfregs: u32, cache_line_size: u32,
        max_sq_desc_sz: u16, max_rq_desc_sz: u16, max_send_wqebb: u32, max_recv_wr: u32,
        max_srq_recv_wr: u32, num_ports: u16, flow_action_flags: u16, comp_mask: u32,
        response_length: u32, cqe_version: u8, cmds_supp_uhw: u8, eth_min_inline: u8,
        clock_info_versions: u8, hca_core_clock_offset: u64, log_uar_size: u32,
        num_uars_per_page: u32, num_dyn_bfregs: u32, dump_fill_mkey: u32,
    }
    ib_uverbs_query_device { response: u64, }
    ib_uverbs_query_device_resp {
        fw_ver: u64, node_guid: u64, sys_image_guid: u64, max_mr_size: u64, page_size_cap: u64,
        vendor_id: u32, vendor_part_id: u32, hw_ver: u32, max_qp: u32, max_qp_wr: u32,
        device_cap_flags: u32, max_sge: u32, max_sge_rd: u32, max_cq: u32, max_cqe: u32, max_mr: u32,
        max_pd: u32, max_qp_rd_atom: u32, max_ee_rd_atom: u32, max_res_rd_atom: u32,
        max_qp_init_rd_atom: u32, max_ee_init_rd_atom: u32, atomic_cap: u32, max_ee: u32, max_rdd: u32,
        max_mw: u32, max_raw_ipv6_qp: u32, max_raw_ethy_qp: u32, max_mcast_grp: u32,
        max_mcast_qp_attach: u32, max_total_mcast_qp_attach: u32, max_ah: u32, max_fmr: u32,
        max_map_per_fmr: u32, max_srq: u32, max_srq_wr: u32, max_srq_sge: u32, max_pkeys: u16,
        local_ca_ack_delay: u8, phys_port_cnt: u8, reserved: [u8; 4],
    }
    ib_uverbs_ex_query_device { comp_mask: u32, reserved: u32, }
    ib_uverbs_ex_query_device_resp {
        base: ib_uverbs_query_device_resp, comp_mask: u32, response_length: u32, odp_caps: [u64; 3],
        timestamp_mask: u64, hca_core_clock: u64, device_cap_flags_ex: u64, rss_caps: [u32; 4],
        max_wq_type_rq: u32, raw_packet_caps: u32, tm_caps: [u32; 6], cq_moderation_caps: [u16; 4],
        max_dm_size: u64, xrc_odp_caps: u32, reserved: u32,
    }
    ib_uverbs_query_port { response: u64, port_num: u8, reserved: [u8; 7], }
    ib_uverbs_query_port_resp {
        port_cap_flags: u32, max_msg_sz: u32, bad_pkey_cntr: u32, qkey_viol_cntr: u32, gid_tbl_len: u32,
        pkey_tbl_len: u16, lid: u16, sm_lid: u16, state: u8, max_mtu: u8, active_mtu: u8, lmc: u8,
        max_vl_num: u8, sm_sl: u8, subnet_timeout: u8, init_type_reply: u8, active_width: u8,
        active_speed: u8, phys_state: u8, link_layer: u8, flags: u8, reserved: u8,
    }
    ib_uverbs_alloc_pd { response: u64, }
    ib_uverbs_alloc_pd_resp { pd_handle: u32, }
    mlx5_ib_alloc_pd_resp { pdn: u32, }
    ib_uverbs_dealloc_pd { pd_handle: u32, }
    ib_uverbs_reg_mr {
        response: u64, start: u64, length: u64, hca_va: u64, pd_handle: u32, access_flags: u32,
    }
    ib_uverbs_reg_mr_resp { mr_handle: u32, lkey: u32, rkey: u32, }
    ib_uverbs_rereg_mr {
        response: u64, mr_handle: u32, flags: u32, start: u64, length: u64, hca_va: u64, pd_handle: u32,
        access_flags: u32,
    }
    ib_uverbs_rereg_mr_resp { lkey: u32, rkey: u32, }
    ib_uverbs_dereg_mr { mr_handle: u32, }
    ib_uverbs_create_comp_channel { response: u64, }
    ib_uverbs_create_comp_channel_resp { fd: u32, }
    ib_uverbs_create_cq {
        response: u64, user_handle: u64, cqe: u32, comp_vector: u32, comp_channel: i32, reserved: u32,
    }
    ib_uverbs_ex_create_cq {
        user_handle: u64, cqe: u32, comp_vector: u32, comp_channel: i32, comp_mask: u32, flags: u32,
        reserved: u32,
    }
    ib_uverbs_create_cq_resp { cq_handle: u32, cqe: u32, }
    ib_uverbs_ex_create_cq_resp { base: ib_uverbs_create_cq_resp, comp_mask: u32, response_length: u32, }
    mlx5_ib_create_cq {
        buf_addr: u64, db_addr: u64, cqe_size: u32, cqe_comp_en: u8, cqe_comp_res_format: u8, flags: u16,
        uar_page_index: u16, reserved0: u16, reserved1: u32,
    }
    mlx5_ib_create_cq_resp { cqn: u32, reserved: u32, }
    ib_uverbs_resize_cq { response: u64, cq_handle: u32, cqe: u32, }
    ib_uverbs_resize_cq_resp { cqe: u32, reserved: u32, }
    mlx5_ib_resize_cq { buf_addr: u64, cqe_size: u16, reserved0: u16, reserved1: u32, }
    ib_uverbs_destroy_cq { response: u64, cq_handle: u32, reserved: u32, }
    ib_uverbs_destroy_cq_resp { comp_events_reported: u32, async_events_reported: u32, }
    ib_uverbs_global_route {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8,
    }
    ib_uverbs_ah_attr {
        grh: ib_uverbs_global_route, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8,
        port_num: u8, reserved: u8,
    }
    ib_uverbs_create_qp {
        response: u64, user_handle: u64, pd_handle: u32, send_cq_handle: u32, recv_cq_handle: u32,
        srq_handle: u32, max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32,
        max_inline_data: u32, sq_sig_all: u8, qp_type: u8, is_srq: u8, reserved: u8,
    }
    ib_uverbs_ex_create_qp {
        user_handle: u64, pd_handle: u32, send_cq_handle: u32, recv_cq_handle: u32, srq_handle: u32,
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32,
        sq_sig_all: u8, qp_type: u8, is_srq: u8, reserved: u8, comp_mask: u32, create_flags: u32,
        rwq_ind_tbl_handle: u32, source_qpn: u32,
    }
    ib_uverbs_create_qp_resp {
        qp_handle: u32, qpn: u32, max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32,
        max_recv_sge: u32, max_inline_data: u32, reserved: u32,
    }
    ib_uverbs_ex_create_qp_resp { base: ib_uverbs_create_qp_resp, comp_mask: u32, response_length: u32, }
    mlx5_ib_create_qp {
        buf_addr: u64, db_addr: u64, sq_wqe_count: u32, rq_wqe_count: u32, rq_wqe_shift: u32, flags: u32,
        uidx: u32, bfreg_index: u32, sq_buf_addr: u64, ece_options: u32, dci_streams: [u8; 2],
        reserved: u16,
    }
    mlx5_ib_create_qp_resp {
        bfreg_index: u32, ece_options: u32, comp_mask: u32, tirn: u32, tisn: u32, rqn: u32, sqn: u32,
        reserved1: u32, tir_icm_addr: u64,
    }
    ib_uverbs_qp_dest {
        dgid: [u8; 16], flow_label: u32, dlid: u16, reserved: u16, sgid_index: u8, hop_limit: u8,
        traffic_class: u8, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8,
    }
    ib_uverbs_query_qp { response: u64, qp_handle: u32, attr_mask: u32, }
    ib_uverbs_query_qp_resp {
        dest: ib_uverbs_qp_dest, alt_dest: ib_uverbs_qp_dest, max_send_wr: u32, max_recv_wr: u32,
        max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, qkey: u32, rq_psn: u32, sq_psn: u32,
        dest_qp_num: u32, qp_access_flags: u32, pkey_index: u16, alt_pkey_index: u16, qp_state: u8,
        cur_qp_state: u8, path_mtu: u8, path_mig_state: u8, sq_draining: u8, max_rd_atomic: u8,
        max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8,
        rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, sq_sig_all: u8, reserved: [u8; 5],
    }
    ib_uverbs_modify_qp {
        dest: ib_uverbs_qp_dest, alt_dest: ib_uverbs_qp_dest, qp_handle: u32, attr_mask: u32, qkey: u32,
        rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, pkey_index: u16,
        alt_pkey_index: u16, qp_state: u8, cur_qp_state: u8, path_mtu: u8, path_mig_state: u8,
        en_sqd_async_notify: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8,
        port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8,
        reserved: [u8; 2],
    }
    ib_uverbs_ex_modify_qp { base: ib_uverbs_modify_qp, rate_limit: u32, reserved: u32, }
    ib_uverbs_ex_modify_qp_resp { comp_mask: u32, response_length: u32, }
    ib_uverbs_destroy_qp { response: u64, qp_handle: u32, reserved: u32, }
    ib_uverbs_destroy_qp_resp { events_reported: u32, }
    ib_uverbs_create_ah {
        response: u64, user_handle: u64, pd_handle: u32, reserved: u32, attr: ib_uverbs_ah_attr,
    }
    ib_uverbs_create_ah_resp { ah_handle: u32, }
    mlx5_ib_create_ah_resp { response_length: u32, dmac: [u8; 6], reserved: [u8; 6], }
    ib_uverbs_destroy_ah { ah_handle: u32, }
    ib_uverbs_create_srq {
        response: u64, user_handle: u64, pd_handle: u32, max_wr: u32, max_sge: u32, srq_limit: u32,
    }
    mlx5_ib_create_srq {
        buf_addr: u64, db_addr: u64, flags: u32, reserved0: u32, uidx: u32, reserved1: u32,
    }
    ib_uverbs_create_srq_resp { srq_handle: u32, max_wr: u32, max_sge: u32, srqn: u32, }
    mlx5_ib_create_srq_resp { srqn: u32, reserved: u32, }
    ib_uverbs_modify_srq { srq_handle: u32, attr_mask: u32, max_wr: u32, srq_limit: u32, }
    ib_uverbs_query_srq { response: u64, srq_handle: u32, reserved: u32, }
    ib_uverbs_query_srq_resp { max_wr: u32, max_sge: u32, srq_limit: u32, reserved: u32, }
    ib_uverbs_destroy_srq { response: u64, srq_handle: u32, reserved: u32, }
    ib_uverbs_destroy_srq_resp { events_reported: u32, }
    ib_uverbs_ioctl_hdr {
        length: u16, object_id: u16, method_id: u16, num_attrs: u16, reserved1: u64, driver_id: u32,
        reserved2: u32,
    }
    ib_uverbs_attr { attr_id: u16, len: u16, flags: u16, attr_data: u16, data: u64, }
    ib_uverbs_gid_entry { gid: [u64; 2], gid_index: u32, port_num: u32, gid_type: u32, netdev_ifindex: u32, }
}

/// A list of numbers under their names in C.
macro_rules! constants {
    ($list:ident: $type:ty; $($name:ident = $value:expr,)*) => {
        $(pub(crate) const $name: $type = $value;)*
        #[cfg(test)]
        pub(crate) const $list: &[(&str, u64)] = &[$((stringify!($name), $value as u64),)*];
    };
}

constants! { COMMANDS: u32;
    IB_USER_VERBS_CMD_GET_CONTEXT = 0,
    IB_USER_VERBS_CMD_QUERY_DEVICE = 1,
    IB_USER_VERBS_CMD_QUERY_PORT = 2,
    IB_USER_VERBS_CMD_ALLOC_PD = 3,
    IB_USER_VERBS_CMD_DEALLOC_PD = 4,
    IB_USER_VERBS_CMD_CREATE_AH = 5,
    IB_USER_VERBS_CMD_DESTROY_AH = 8,
    IB_USER_VERBS_CMD_REG_MR = 9,
    IB_USER_VERBS_CMD_REREG_MR = 11,
    IB_USER_VERBS_CMD_DEREG_MR = 13,
    IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL = 17,
    IB_USER_VERBS_CMD_CREATE_CQ = 18,
    IB_USER_VERBS_CMD_RESIZE_CQ = 19,
    IB_USER_VERBS_CMD_DESTROY_CQ = 20,
    IB_USER_VERBS_CMD_CREATE_QP = 24,
    IB_USER_VERBS_CMD_QUERY_QP = 25,
    IB_USER_VERBS_CMD_MODIFY_QP = 26,
    IB_USER_VERBS_CMD_DESTROY_QP = 27,
    IB_USER_VERBS_CMD_ATTACH_MCAST = 30,
    IB_USER_VERBS_CMD_DETACH_MCAST = 31,
    IB_USER_VERBS_CMD_CREATE_SRQ = 32,
    IB_USER_VERBS_CMD_MODIFY_SRQ = 33,
    IB_USER_VERBS_CMD_QUERY_SRQ = 34,
    IB_USER_VERBS_CMD_DESTROY_SRQ = 35,
    IB_USER_VERBS_CMD_FLAG_EXTENDED = 0x8000_0000,
}

// Methods and attributes of the driver begin at 0x1000 in each object.
constants! { IOCTL: u16;
    UVERBS_OBJECT_DEVICE = 0,
    UVERBS_METHOD_QUERY_GID_TABLE = 5,
    UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE = 0,
    UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES = 2,
    UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES = 3,
    UVERBS_METHOD_QUERY_GID_ENTRY = 6,
    UVERBS_ATTR_QUERY_GID_ENTRY_PORT = 0,
    UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX = 1,
    UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY = 3,
    UVERBS_OBJECT_MR = 7,
    UVERBS_METHOD_REG_DMABUF_MR = 4,
    UVERBS_ATTR_REG_DMABUF_MR_HANDLE = 0,
    UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE = 1,
    UVERBS_ATTR_REG_DMABUF_MR_OFFSET = 2,
    UVERBS_ATTR_REG_DMABUF_MR_LENGTH = 3,
    UVERBS_ATTR_REG_DMABUF_MR_IOVA = 4,
    UVERBS_ATTR_REG_DMABUF_MR_FD = 5,
    UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS = 6,
    UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY = 7,
    UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY = 8,
    MLX5_IB_OBJECT_DEVX = 0x1000,
    MLX5_IB_METHOD_DEVX_OTHER = 0x1000,
    MLX5_IB_ATTR_DEVX_OTHER_CMD_IN = 0x1000,
    MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT = 0x1001,
    MLX5_IB_METHOD_DEVX_QUERY_UAR = 0x1001,
    MLX5_IB_ATTR_DEVX_QUERY_UAR_USER_IDX = 0x1000,
    MLX5_IB_ATTR_DEVX_QUERY_UAR_DEV_IDX = 0x1001,
    MLX5_IB_METHOD_DEVX_QUERY_EQN = 0x1002,
    MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC = 0x1000,
    MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN = 0x1001,
    MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT = 0x1003,
    MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE = 0x1000,
    MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE = 0x1001,
    MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST = 0x1002,
    MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM = 0x1003,
    MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE = 0x1004,
    MLX5_IB_OBJECT_DEVX_OBJ = 0x1001,
    MLX5_IB_METHOD_DEVX_OBJ_CREATE = 0x1000,
    MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE = 0x1000,
    MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN = 0x1001,
    MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT = 0x1002,
    MLX5_IB_METHOD_DEVX_OBJ_DESTROY = 0x1001,
    MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE = 0x1000,
    MLX5_IB_METHOD_DEVX_OBJ_MODIFY = 0x1002,
    MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE = 0x1000,
    MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN = 0x1001,
    MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT = 0x1002,
    MLX5_IB_METHOD_DEVX_OBJ_QUERY = 0x1003,
    MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE = 0x1000,
    MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN = 0x1001,
    MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT = 0x1002,
    MLX5_IB_OBJECT_DEVX_UMEM = 0x1002,
    MLX5_IB_METHOD_DEVX_UMEM_REG = 0x1000,
    MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE = 0x1000,
    MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR = 0x1001,
    MLX5_IB_ATTR_DEVX_UMEM_REG_LEN = 0x1002,
    MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS = 0x1003,
    MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID = 0x1004,
    MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP = 0x1005,
    MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD = 0x1006,
    MLX5_IB_METHOD_DEVX_UMEM_DEREG = 0x1001,
    MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE = 0x1000,
    MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD = 0x1005,
    MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC = 0x1000,
    MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE = 0x1000,
    MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS = 0x1001,
    MLX5_IB_OBJECT_UAR = 0x1008,
    MLX5_IB_METHOD_UAR_OBJ_ALLOC = 0x1000,
    MLX5_IB_METHOD_UAR_OBJ_DESTROY = 0x1001,
    MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE = 0x1000,
    MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE = 0x1001,
    MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET = 0x1002,
    MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH = 0x1003,
    MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID = 0x1004,
    MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE = 0x1000,
}

/// Against the headers of the kernel, if they are installed.
#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::process::Command;

    use super::{COMMANDS, IOCTL, LAYOUTS};

    const HEADERS: &str = "\
#include <stdio.h>
#include <stddef.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
";

    #[test]
    fn declarations_are_those_of_the_headers() {
        let mut program = format!("{HEADERS}int main(void) {{\n");
        let mut expected = String::new();
        for (name, size, fields) in LAYOUTS {
            writeln!(program, "printf(\"{name} %zu\\n\", sizeof(struct {name}));").unwrap();
            writeln!(expected, "{name} {size}").unwrap();
            for (field, offset) in *fields {
                writeln!(program, "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field}));")
                    .unwrap();
                writeln!(expected, "{name}.{field} {offset}").unwrap();
            }
        }
        for (name, value) in COMMANDS.iter().chain(IOCTL) {
            writeln!(program, "printf(\"{name} %llu\\n\", (unsigned long long)({name}));").unwrap();
            writeln!(expected, "{name} {value}").unwrap();
        }
        program.push_str("return 0;\n}\n");

        let dir = std::env::temp_dir().join(format!("card-abi-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (source, binary) = (dir.join("probe.c"), dir.join("probe"));
        std::fs::write(&source, program).unwrap();
        let built = Command::new("cc").arg("-w").arg("-o").arg(&binary).arg(&source).output();
        let output = match built {
            Ok(built) if built.status.success() => Command::new(&binary).output().unwrap(),
            Ok(built) => {
                let text = String::from_utf8_lossy(&built.stderr).into_owned();
                std::fs::remove_dir_all(&dir).unwrap();
                assert!(text.contains("rdma/"), "{text}");
                eprintln!("skipped: the headers of the kernel are not installed: {text}");
                return;
            }
            Err(error) => {
                std::fs::remove_dir_all(&dir).unwrap();
                eprintln!("skipped: there is no C compiler: {error}");
                return;
            }
        };
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }
}
