//! The steps of a queue pair from RESET to RTS, with all that a card is told.

use rdma_core_sys::verbs::*;

pub(crate) type Step = (ibv_qp_attr, ibv_qp_attr_mask);

pub(crate) fn all_access() -> ibv_access_flags {
    ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
        | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
        | ibv_access_flags::IBV_ACCESS_REMOTE_READ
        | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC
}

pub(crate) fn to(state: ibv_qp_state) -> Step {
    (ibv_qp_attr { qp_state: state, ..ibv_qp_attr::zeroed() }, ibv_qp_attr_mask::IBV_QP_STATE)
}

pub(crate) fn to_init() -> Step {
    let (attr, mask) = to(ibv_qp_state::IBV_QPS_INIT);
    let mask = mask
        | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
        | ibv_qp_attr_mask::IBV_QP_PORT
        | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
    (ibv_qp_attr { qp_access_flags: all_access(), port_num: 1, ..attr }, mask)
}

/// First packet sequence number of every queue pair here.
const PSN: u32 = 0x12_3456;

pub(crate) fn to_rtr(gid: ibv_gid, qpn: u32) -> Step {
    let (attr, mask) = to(ibv_qp_state::IBV_QPS_RTR);
    let mask = mask
        | ibv_qp_attr_mask::IBV_QP_AV
        | ibv_qp_attr_mask::IBV_QP_PATH_MTU
        | ibv_qp_attr_mask::IBV_QP_DEST_QPN
        | ibv_qp_attr_mask::IBV_QP_RQ_PSN
        | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
    let grh = ibv_global_route { dgid: gid, sgid_index: 1, hop_limit: 64, ..ibv_global_route::zeroed() };
    let attr = ibv_qp_attr {
        ah_attr: ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() },
        path_mtu: ibv_mtu::IBV_MTU_1024,
        dest_qp_num: qpn,
        rq_psn: PSN,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 1,
        ..attr
    };
    (attr, mask)
}

pub(crate) fn to_rts() -> Step {
    let (attr, mask) = to(ibv_qp_state::IBV_QPS_RTS);
    let mask = mask
        | ibv_qp_attr_mask::IBV_QP_TIMEOUT
        | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
        | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
        | ibv_qp_attr_mask::IBV_QP_SQ_PSN
        | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
    let attr =
        ibv_qp_attr { timeout: 14, retry_cnt: 7, rnr_retry: 7, sq_psn: PSN, max_rd_atomic: 16, ..attr };
    (attr, mask)
}
