//! Ring formats of mlx5: WQEs, CQEs, doorbell records and doorbells, byte for byte.
//!
//! The code that posts encodes with this crate; the software HCA decodes with it. It holds pure functions over bytes:
//! callers own the memory and order the writes.
//!
//! Sources are rdma-core's mlx5 provider (`providers/mlx5/mlx5dv.h` for layouts and constants, `qp.c` and `cq.c` for
//! the rules) and the Programmer's Reference Manual of the adapters. Fields are big-endian in memory. Words that a CPU
//! or GPU loads or stores whole (doorbell records, the doorbell, the last word of a CQE) are native integers with the
//! right bytes in memory.
//!
//! | file | object |
//! |---|---|
//! | `opcode` | opcodes and error syndromes |
//! | `segment` | 16-byte segments, and receive WQEs |
//! | `ctrl` | the control segment, first in every send WQE |
//! | `address_vector` | the address of a datagram |
//! | `wqe` | send operations and encoded send WQEs |
//! | `encode` | encoding of send WQEs |
//! | `atomic` | atomic operations on chosen bits |
//! | `decode` | decoding of send WQEs, with the errors a card reports and violations it may tolerate |
//! | `datagram` | WQEs of datagram queue pairs (UD) |
//! | `cqe` | CQEs and their owner bit |
//! | `doorbell` | doorbell records and the doorbell register |
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

#[cfg(not(target_endian = "little"))]
compile_error!("only little-endian hosts are supported, because GPUs share words with the host");

mod address_vector;
mod atomic;
mod cqe;
mod ctrl;
mod datagram;
mod decode;
mod doorbell;
mod encode;
mod opcode;
mod segment;
#[cfg(test)]
mod strategies;
#[cfg(test)]
mod tests;
mod wqe;

pub use address_vector::AddressVector;
pub use atomic::{MaskedAtomic, MaskedOp};
pub use cqe::{
    CQE_OP_OWN_OFFSET, CQE_SIZE, Cond, Cqe, INITIAL_CQE, lap, op_own_word, owned_by_software, wait_condition,
};
pub use ctrl::{
    CE_ALWAYS, CE_MASK, CTRL_IMM_OFFSET, Ctrl, FM_FENCE, FM_FENCE_AND_INITIATOR_SMALL, FM_INITIATOR_SMALL,
    FM_MASK, FM_STRONG_ORDERING, SOLICITED, blocks, decode_ctrl, nop_like, set_index,
};
pub use datagram::decode_datagram;
pub use decode::{
    DecodeError, DecodedOp, DecodedPayload, MixedList, PayloadPart, SgeList, decode_body, strict_violations,
};
pub use doorbell::{
    BF_OFFSET, CQ_DBREC_ARM, CQ_DBREC_CI, CQ_DBREC_SIZE, CqArm, Doorbell, EMPTY, NEVER_ARMED, QP_DBREC_RECV,
    QP_DBREC_SEND, QP_DBREC_SIZE, cq_ci_record, doorbell_word, extend16, extend24, low16, next_pi_doorbell,
    record_to_u16, record_to_u24, recv_record, send_record,
};
pub use encode::{encode, encode_into};
pub use opcode::{CqeOpcode, Opcode, Syndrome};
pub use segment::{
    DataSeg, INLINE, INVALID_LKEY, InvalidRemoteAddr, MAX_MESSAGE, RemoteAddr, SEGMENT, SRQ_LINK, WqeError,
    decode_recv, encode_recv, recv_stride, srq_next,
};
pub use wqe::{BB, MAX_DS, MAX_QPN, MAX_WQE_BYTES, Payload, SendOp, WqeBytes, WqeFlags};
