//! Enumerations, flags and constants of `infiniband/verbs.h`.

use std::ffi::{c_int, c_uint};

use crate::abi::{enumerations, flag_sets, plain_constants};

enumerations! {
    ENUMERATIONS;

    /// What the entry of a GID table stands for.
    enum ibv_gid_type: u32 {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V1 = 1,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }

    enum ibv_node_type: c_int {
        IBV_NODE_CA = 1,
    }

    enum ibv_transport_type: c_int {
        IBV_TRANSPORT_IB = 0,
        IBV_TRANSPORT_IWARP = 1,
    }

    enum ibv_fork_status: u32 {
        IBV_FORK_ENABLED = 1,
        IBV_FORK_UNNEEDED = 2,
    }

    enum ibv_atomic_cap: u32 {
        IBV_ATOMIC_NONE = 0,
        IBV_ATOMIC_HCA = 1,
    }

    enum ibv_mtu: u32 {
        IBV_MTU_256 = 1,
        IBV_MTU_512 = 2,
        IBV_MTU_1024 = 3,
        IBV_MTU_2048 = 4,
        IBV_MTU_4096 = 5,
    }

    enum ibv_port_state: u32 {
        IBV_PORT_ACTIVE = 4,
    }

    /// The link layer of a port, an enumeration without a name.
    enum ibv_link_layer: u8 {
        IBV_LINK_LAYER_ETHERNET = 2,
    }

    enum ibv_event_type: u32 {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }

    enum ibv_wc_status: u32 {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
        IBV_WC_TM_ERR = 22,
        IBV_WC_TM_RNDV_INCOMPLETE = 23,
    }

    enum ibv_wc_opcode: u32 {
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4,
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }

    enum ibv_qp_type: u32 {
        IBV_QPT_RC = 2,
        IBV_QPT_UD = 4,
    }

    enum ibv_qp_state: u32 {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_ERR = 6,
    }

    enum ibv_wr_opcode: u32 {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
    }
}

plain_constants! {
    CONSTANTS;

    /// `IBV_SYSFS_NAME_MAX`: bytes of a device's name, with its terminator.
    IBV_SYSFS_NAME_MAX: usize = 64;
    /// `IBV_SYSFS_PATH_MAX`: bytes of a path, with its terminator.
    IBV_SYSFS_PATH_MAX: usize = 256;
    /// `IBV_ALLOCATOR_USE_DEFAULT`: what an allocator returns to have the library allocate by itself.
    IBV_ALLOCATOR_USE_DEFAULT: isize = -1;
}

flag_sets! {
    FLAGS;

    flags ibv_device_cap_flags: c_uint {
        IBV_DEVICE_RC_RNR_NAK_GEN = 1 << 12,
    }

    flags ibv_port_cap_flags: u32 {
        IBV_PORT_CM_SUP = 1 << 16,
        IBV_PORT_IP_BASED_GIDS = 1 << 26,
    }

    /// Flags of `ibv_port_attr.flags`.
    flags ibv_port_flags: u8 {
        IBV_QPF_GRH_REQUIRED = 1 << 0,
    }

    /// Who may do what with a memory region. From `IBV_ACCESS_RELAXED_ORDERING` on they are
    /// optional, and a kernel that does not know them ignores them.
    flags ibv_access_flags: c_uint {
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2,
        IBV_ACCESS_REMOTE_ATOMIC = 1 << 3,
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
        IBV_ACCESS_OPTIONAL_RANGE = 0x3ff0_0000,
    }

    flags ibv_wc_flags: c_uint {
        IBV_WC_GRH = 1 << 0,
        IBV_WC_WITH_IMM = 1 << 1,
    }

    /// What a poll of an extended CQ can read.
    flags ibv_create_cq_wc_flags: u64 {
        IBV_CREATE_CQ_SUP_WC_FLAGS = 0xfff,
    }

    flags ibv_cq_init_attr_mask: u32 {
        IBV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 0,
        IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1,
    }

    flags ibv_create_cq_attr_flags: u32 {
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1 << 0,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1,
    }

    flags ibv_parent_domain_init_attr_mask: u32 {
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1 << 0,
        IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 1 << 1,
    }

    flags ibv_qp_init_attr_mask: u32 {
        IBV_QP_INIT_ATTR_PD = 1 << 0,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6,
    }

    flags ibv_qp_create_flags: u32 {
    }

    flags ibv_qp_create_send_ops_flags: u64 {
        IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0,
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1,
        IBV_QP_EX_WITH_SEND = 1 << 2,
        IBV_QP_EX_WITH_RDMA_READ = 1 << 4,
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 1 << 5,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 1 << 6,
        IBV_QP_EX_WITH_LOCAL_INV = 1 << 7,
        IBV_QP_EX_WITH_BIND_MW = 1 << 8,
        IBV_QP_EX_WITH_TSO = 1 << 10,
        IBV_QP_EX_WITH_ATOMIC_WRITE = 1 << 12,
    }

    flags ibv_qp_attr_mask: u32 {
        IBV_QP_STATE = 1 << 0,
        IBV_QP_CUR_STATE = 1 << 1,
        IBV_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
        IBV_QP_ACCESS_FLAGS = 1 << 3,
        IBV_QP_PKEY_INDEX = 1 << 4,
        IBV_QP_PORT = 1 << 5,
        IBV_QP_QKEY = 1 << 6,
        IBV_QP_AV = 1 << 7,
        IBV_QP_PATH_MTU = 1 << 8,
        IBV_QP_TIMEOUT = 1 << 9,
        IBV_QP_RETRY_CNT = 1 << 10,
        IBV_QP_RNR_RETRY = 1 << 11,
        IBV_QP_RQ_PSN = 1 << 12,
        IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
        IBV_QP_ALT_PATH = 1 << 14,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
        IBV_QP_SQ_PSN = 1 << 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
        IBV_QP_PATH_MIG_STATE = 1 << 18,
        IBV_QP_CAP = 1 << 19,
        IBV_QP_DEST_QPN = 1 << 20,
    }

    flags ibv_send_flags: c_uint {
        IBV_SEND_FENCE = 1 << 0,
        IBV_SEND_SIGNALED = 1 << 1,
        IBV_SEND_SOLICITED = 1 << 2,
        IBV_SEND_INLINE = 1 << 3,
    }
}
