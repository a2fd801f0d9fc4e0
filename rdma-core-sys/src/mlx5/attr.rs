//! What contexts and queues are created with, and what a device says of itself.

use std::ffi::c_void;

use crate::abi::{enumerations, flag_sets, plain_constants, records};
use crate::verbs::{ibv_odp_transport_cap_bits, ibv_pd};

plain_constants! {
    CONSTANTS;

    /// `MLX5DV_RES_TYPE_QP`: the buffer of a queue pair is asked for; first the receive queue, then the send queue.
    MLX5DV_RES_TYPE_QP: u64 = 1 << 32 | 1;
    /// `MLX5DV_RES_TYPE_RWQ`: that of a receive queue without a queue pair.
    MLX5DV_RES_TYPE_RWQ: u64 = 1 << 32 | 2;
    /// `MLX5DV_RES_TYPE_DBR`: a doorbell record.
    MLX5DV_RES_TYPE_DBR: u64 = 1 << 32 | 3;
    /// `MLX5DV_RES_TYPE_SRQ`: the buffer of a shared receive queue.
    MLX5DV_RES_TYPE_SRQ: u64 = 1 << 32 | 4;
    /// `MLX5DV_RES_TYPE_CQ`: that of a completion queue.
    MLX5DV_RES_TYPE_CQ: u64 = 1 << 32 | 5;
}

enumerations! {
    ENUMERATIONS;

    /// `enum mlx5dv_set_ctx_attr_type`
    enum mlx5dv_set_ctx_attr_type: u32 {
        MLX5DV_CTX_ATTR_BUF_ALLOCATORS = 1,
    }

    /// `enum mlx5dv_dc_type`
    enum mlx5dv_dc_type: u32 {
        MLX5DV_DCTYPE_DCT = 1,
        MLX5DV_DCTYPE_DCI = 2,
    }
}

flag_sets! {
    FLAGS;

    /// `enum mlx5dv_context_comp_mask`: what [`Mlx5::mlx5dv_query_device`](super::Mlx5::mlx5dv_query_device) is asked
    /// for, and what it wrote. Bits without a name here must stay 0: the structure ends before their fields.
    flags mlx5dv_context_comp_mask: u64 {
        MLX5DV_CONTEXT_MASK_CQE_COMPRESION = 1 << 0,
        MLX5DV_CONTEXT_MASK_SWP = 1 << 1,
        MLX5DV_CONTEXT_MASK_STRIDING_RQ = 1 << 2,
        MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS = 1 << 3,
        MLX5DV_CONTEXT_MASK_DYN_BFREGS = 1 << 4,
        MLX5DV_CONTEXT_MASK_CLOCK_INFO_UPDATE = 1 << 5,
        MLX5DV_CONTEXT_MASK_FLOW_ACTION_FLAGS = 1 << 6,
        MLX5DV_CONTEXT_MASK_DC_ODP_CAPS = 1 << 7,
        MLX5DV_CONTEXT_MASK_HCA_CORE_CLOCK = 1 << 8,
        MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS = 1 << 9,
        MLX5DV_CONTEXT_MASK_SIGNATURE_OFFLOAD = 1 << 10,
        MLX5DV_CONTEXT_MASK_DCI_STREAMS = 1 << 11,
        MLX5DV_CONTEXT_MASK_WR_MEMCPY_LENGTH = 1 << 12,
        MLX5DV_CONTEXT_MASK_CRYPTO_OFFLOAD = 1 << 13,
    }

    /// `enum mlx5dv_context_flags` of [`mlx5dv_context`]
    flags mlx5dv_context_flags: u64 {
        MLX5DV_CONTEXT_FLAGS_CQE_V1 = 1 << 0,
        MLX5DV_CONTEXT_FLAGS_OBSOLETE = 1 << 1,
        MLX5DV_CONTEXT_FLAGS_MPW_ALLOWED = 1 << 2,
        MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW = 1 << 3,
        MLX5DV_CONTEXT_FLAGS_CQE_128B_COMP = 1 << 4,
        MLX5DV_CONTEXT_FLAGS_CQE_128B_PAD = 1 << 5,
        MLX5DV_CONTEXT_FLAGS_PACKET_BASED_CREDIT_MODE = 1 << 6,
        MLX5DV_CONTEXT_FLAGS_REAL_TIME_TS = 1 << 7,
    }

    /// `enum mlx5dv_context_attr_flags`
    flags mlx5dv_context_attr_flags: u32 {
        MLX5DV_CONTEXT_FLAGS_DEVX = 1 << 0,
    }

    /// `enum mlx5dv_cq_init_attr_mask`
    flags mlx5dv_cq_init_attr_mask: u64 {
        MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE = 1 << 0,
        MLX5DV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 1,
        MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE = 1 << 2,
    }

    /// `enum mlx5dv_cq_init_attr_flags`
    flags mlx5dv_cq_init_attr_flags: u32 {
        MLX5DV_CQ_INIT_ATTR_FLAGS_CQE_PAD = 1 << 0,
    }

    /// `enum mlx5dv_qp_init_attr_mask`
    flags mlx5dv_qp_init_attr_mask: u64 {
        MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS = 1 << 0,
        MLX5DV_QP_INIT_ATTR_MASK_DC = 1 << 1,
        MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS = 1 << 2,
        MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS = 1 << 3,
    }

    /// `enum mlx5dv_qp_create_flags`
    flags mlx5dv_qp_create_flags: u32 {
        MLX5DV_QP_CREATE_TUNNEL_OFFLOADS = 1 << 0,
        MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_UC = 1 << 1,
        MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_MC = 1 << 2,
        MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE = 1 << 3,
        MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE = 1 << 4,
        MLX5DV_QP_CREATE_PACKET_BASED_CREDIT_MODE = 1 << 5,
        MLX5DV_QP_CREATE_SIG_PIPELINING = 1 << 6,
        MLX5DV_QP_CREATE_OOO_DP = 1 << 7,
    }

    /// `enum mlx5dv_qp_create_send_ops_flags`
    flags mlx5dv_qp_create_send_ops_flags: u64 {
        MLX5DV_QP_EX_WITH_MR_INTERLEAVED = 1 << 0,
        MLX5DV_QP_EX_WITH_MR_LIST = 1 << 1,
        MLX5DV_QP_EX_WITH_MKEY_CONFIGURE = 1 << 2,
        MLX5DV_QP_EX_WITH_RAW_WQE = 1 << 3,
        MLX5DV_QP_EX_WITH_MEMCPY = 1 << 4,
    }
}

records! {
    RECORDS;

    /// `struct mlx5dv_cqe_comp_caps`
    struct mlx5dv_cqe_comp_caps {
        max_num: u32,
        supported_format: u32,
    }

    /// `struct mlx5dv_sw_parsing_caps`
    struct mlx5dv_sw_parsing_caps {
        sw_parsing_offloads: u32,
        supported_qpts: u32,
    }

    /// `struct mlx5dv_striding_rq_caps`
    struct mlx5dv_striding_rq_caps {
        min_single_stride_log_num_of_bytes: u32,
        max_single_stride_log_num_of_bytes: u32,
        min_single_wqe_log_num_of_strides: u32,
        max_single_wqe_log_num_of_strides: u32,
        supported_qpts: u32,
    }

    /// `struct mlx5dv_dci_streams_caps`
    struct mlx5dv_dci_streams_caps {
        max_log_num_concurent: u8,
        max_log_num_errored: u8,
    }

    /// `struct mlx5dv_sig_caps`
    struct mlx5dv_sig_caps {
        block_size: u64,
        block_prot: u32,
        t10dif_bg: u16,
        crc_type: u16,
    }

    /// `struct mlx5dv_crypto_caps`
    struct mlx5dv_crypto_caps {
        failed_selftests: u16,
        crypto_engines: u8,
        wrapped_import_method: u8,
        log_max_num_deks: u8,
        flags: u32,
    }

    /// `struct mlx5dv_context`: what a device says of itself.
    struct mlx5dv_context grows {
        version: u8,
        flags: mlx5dv_context_flags,
        comp_mask: mlx5dv_context_comp_mask,
        cqe_comp_caps: mlx5dv_cqe_comp_caps,
        sw_parsing_caps: mlx5dv_sw_parsing_caps,
        striding_rq_caps: mlx5dv_striding_rq_caps,
        tunnel_offloads_caps: u32,
        /// Doorbell registers that thread domains may have.
        max_dynamic_bfregs: u32,
        max_clock_info_update_nsec: u64,
        flow_action_flags: u32,
        dc_odp_caps: ibv_odp_transport_cap_bits,
        hca_core_clock: *mut c_void,
        num_lag_ports: u8,
        sig_caps: mlx5dv_sig_caps,
        dci_streams_caps: mlx5dv_dci_streams_caps,
        max_wr_memcpy_length: usize,
        crypto_caps: mlx5dv_crypto_caps,
    }

    /// `struct mlx5dv_context_attr`: how a device is opened.
    struct mlx5dv_context_attr grows {
        flags: mlx5dv_context_attr_flags,
        comp_mask: u64,
    }

    /// `struct mlx5dv_ctx_allocators`: the allocator of a context's queues.
    struct mlx5dv_ctx_allocators {
        alloc: Option<unsafe extern "C" fn(usize, *mut c_void) -> *mut c_void>,
        free: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
        data: *mut c_void,
    }

    /// `struct mlx5dv_cq_init_attr`
    struct mlx5dv_cq_init_attr {
        comp_mask: mlx5dv_cq_init_attr_mask,
        cqe_comp_res_format: u8,
        flags: mlx5dv_cq_init_attr_flags,
        /// Bytes.
        cqe_size: u16,
    }

    /// `struct mlx5dv_dci_streams`
    struct mlx5dv_dci_streams {
        log_num_concurent: u8,
        log_num_errored: u8,
    }

    /// The second half of [`mlx5dv_dc_init_attr`].
    union mlx5dv_dc_init_attr_of("typeof(((struct mlx5dv_dc_init_attr *)0)->dct_access_key)") {
        dct_access_key(""): u64,
        dci_streams(""): mlx5dv_dci_streams,
    }

    /// `struct mlx5dv_dc_init_attr`
    struct mlx5dv_dc_init_attr {
        dc_type: mlx5dv_dc_type,
        of("dct_access_key"): mlx5dv_dc_init_attr_of,
    }

    /// `struct mlx5dv_qp_init_attr`
    struct mlx5dv_qp_init_attr {
        comp_mask: mlx5dv_qp_init_attr_mask,
        create_flags: mlx5dv_qp_create_flags,
        dc_init_attr: mlx5dv_dc_init_attr,
        send_ops_flags: mlx5dv_qp_create_send_ops_flags,
    }

    /// `struct mlx5dv_mkey_init_attr`
    struct mlx5dv_mkey_init_attr {
        pd: *mut ibv_pd,
        create_flags: u32,
        max_entries: u16,
    }

    /// `struct mlx5dv_mkey`
    struct mlx5dv_mkey {
        lkey: u32,
        rkey: u32,
    }
}
