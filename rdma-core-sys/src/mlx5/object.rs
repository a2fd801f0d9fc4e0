//! What queues are in memory: `mlx5dv_init_obj`.

use std::ffi::c_void;

use libc::off_t;

use crate::abi::{flag_sets, plain_constants, records};
use crate::verbs::{ibv_ah, ibv_cq, ibv_pd, ibv_qp, ibv_srq};

plain_constants! {
    CONSTANTS;

    /// `MLX5_RCV_DBR`: the receive queue's word of a doorbell record.
    MLX5_RCV_DBR: usize = 0;
    /// `MLX5_SND_DBR`: the send queue's.
    MLX5_SND_DBR: usize = 1;
}

flag_sets! {
    FLAGS;

    /// `enum mlx5dv_obj_type`
    flags mlx5dv_obj_type: u64 {
        MLX5DV_OBJ_QP = 1 << 0,
        MLX5DV_OBJ_CQ = 1 << 1,
        MLX5DV_OBJ_SRQ = 1 << 2,
        MLX5DV_OBJ_RWQ = 1 << 3,
        MLX5DV_OBJ_DM = 1 << 4,
        MLX5DV_OBJ_AH = 1 << 5,
        MLX5DV_OBJ_PD = 1 << 6,
    }

    /// `enum mlx5dv_qp_comp_mask`: what is asked for and what was written.
    flags mlx5dv_qp_comp_mask: u64 {
        MLX5DV_QP_MASK_UAR_MMAP_OFFSET = 1 << 0,
        MLX5DV_QP_MASK_RAW_QP_HANDLES = 1 << 1,
        MLX5DV_QP_MASK_RAW_QP_TIR_ADDR = 1 << 2,
    }

    /// `enum mlx5dv_srq_comp_mask`
    flags mlx5dv_srq_comp_mask: u64 {
        MLX5DV_SRQ_MASK_SRQN = 1 << 0,
    }
}

records! {
    RECORDS;

    /// A ring of [`mlx5dv_qp`].
    struct mlx5dv_qp_ring("typeof(((struct mlx5dv_qp *)0)->sq)") {
        buf: *mut c_void,
        /// A power of two.
        wqe_cnt: u32,
        /// Bytes from entry to entry.
        stride: u32,
    }

    /// The doorbell of [`mlx5dv_qp`].
    struct mlx5dv_qp_bf("typeof(((struct mlx5dv_qp *)0)->bf)") {
        reg: *mut c_void,
        /// Bytes of each half of the register, 0 where it takes no more than a doorbell.
        size: u32,
    }

    /// `struct mlx5dv_qp`: a queue pair in memory.
    struct mlx5dv_qp grows {
        /// Two big-endian words, [`MLX5_RCV_DBR`] and [`MLX5_SND_DBR`].
        dbrec: *mut u32,
        sq: mlx5dv_qp_ring,
        rq: mlx5dv_qp_ring,
        bf: mlx5dv_qp_bf,
        comp_mask: mlx5dv_qp_comp_mask,
        uar_mmap_offset: off_t,
        tirn: u32,
        tisn: u32,
        rqn: u32,
        sqn: u32,
        tir_icm_addr: u64,
    }

    /// `struct mlx5dv_cq`: a completion queue in memory. It now is the caller's to poll.
    struct mlx5dv_cq grows {
        buf: *mut c_void,
        /// Two big-endian words: consumer index and arm.
        dbrec: *mut u32,
        /// A power of two.
        cqe_cnt: u32,
        /// Bytes.
        cqe_size: u32,
        cq_uar: *mut c_void,
        cqn: u32,
        comp_mask: u64,
    }

    /// `struct mlx5dv_srq`: a shared receive queue in memory.
    struct mlx5dv_srq grows {
        buf: *mut c_void,
        dbrec: *mut u32,
        stride: u32,
        head: u32,
        tail: u32,
        comp_mask: mlx5dv_srq_comp_mask,
        srqn: u32,
    }

    /// `struct mlx5dv_ah`: an address in memory.
    struct mlx5dv_ah grows {
        av: *mut mlx5_wqe_av,
        comp_mask: u64,
    }

    /// `struct mlx5dv_pd`: the number of a protection domain.
    struct mlx5dv_pd grows {
        pdn: u32,
        comp_mask: u64,
    }

    /// `struct mlx5_wqe_av`: the address of a peer, in network byte order.
    struct mlx5_wqe_av {
        /// A Q_Key in its first half, or the key of a DC target.
        key: u64,
        dqp_dct: u32,
        stat_rate_sl: u8,
        fl_mlid: u8,
        rlid: u16,
        reserved0: [u8; 4],
        rmac: [u8; 6],
        tclass: u8,
        hop_limit: u8,
        grh_gid_fl: u32,
        rgid: [u8; 16],
    }

    /// The queue pair of [`mlx5dv_obj`].
    struct mlx5dv_obj_qp("typeof(((struct mlx5dv_obj *)0)->qp)") {
        r#in: *mut ibv_qp,
        out: *mut mlx5dv_qp,
    }

    /// The completion queue of [`mlx5dv_obj`].
    struct mlx5dv_obj_cq("typeof(((struct mlx5dv_obj *)0)->cq)") {
        r#in: *mut ibv_cq,
        out: *mut mlx5dv_cq,
    }

    /// The shared receive queue of [`mlx5dv_obj`].
    struct mlx5dv_obj_srq("typeof(((struct mlx5dv_obj *)0)->srq)") {
        r#in: *mut ibv_srq,
        out: *mut mlx5dv_srq,
    }

    /// An object of [`mlx5dv_obj`] that is not declared here.
    struct mlx5dv_obj_other("typeof(((struct mlx5dv_obj *)0)->rwq)") {
        r#in: *mut c_void,
        out: *mut c_void,
    }

    /// The address of [`mlx5dv_obj`].
    struct mlx5dv_obj_ah("typeof(((struct mlx5dv_obj *)0)->ah)") {
        r#in: *mut ibv_ah,
        out: *mut mlx5dv_ah,
    }

    /// The protection domain of [`mlx5dv_obj`].
    struct mlx5dv_obj_pd("typeof(((struct mlx5dv_obj *)0)->pd)") {
        r#in: *mut ibv_pd,
        out: *mut mlx5dv_pd,
    }

    /// `struct mlx5dv_obj`: objects of verbs, and where to write what they are in memory.
    struct mlx5dv_obj grows {
        qp: mlx5dv_obj_qp,
        cq: mlx5dv_obj_cq,
        srq: mlx5dv_obj_srq,
        rwq: mlx5dv_obj_other,
        dm: mlx5dv_obj_other,
        ah: mlx5dv_obj_ah,
        pd: mlx5dv_obj_pd,
    }
}
