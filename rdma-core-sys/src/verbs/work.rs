//! Work requests and completions.

use std::ffi::{c_int, c_void};

use super::*;
use crate::abi::records;

records! {
    RECORDS;

    /// `struct ibv_sge`: a piece of registered memory.
    struct ibv_sge {
        addr: u64,
        /// Bytes.
        length: u32,
        lkey: u32,
    }

    /// `struct ibv_send_wr`: a request to send.
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
        other("bind_mw"): ibv_send_wr_other,
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

    /// What is bound to a memory window.
    struct ibv_send_wr_bind_mw("typeof(((struct ibv_send_wr *)0)->bind_mw)") {
        mw: *mut c_void,
        rkey: u32,
        bind_info: ibv_mw_bind_info,
    }

    /// The header of a segmented packet.
    struct ibv_send_wr_tso("typeof(((struct ibv_send_wr *)0)->tso)") {
        hdr: *mut c_void,
        hdr_sz: u16,
        mss: u16,
    }

    /// The last union of a request, without a name in C: as large as its largest part.
    union ibv_send_wr_other("typeof(((struct ibv_send_wr *)0)->bind_mw)") {
        bind_mw("mw"): ibv_send_wr_bind_mw,
        tso("mw"): ibv_send_wr_tso,
    }

    /// `struct ibv_recv_wr`: a request to receive.
    struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    /// `struct ibv_wc`: a completion.
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
