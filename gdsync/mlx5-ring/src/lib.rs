//! The ring formats of mlx5, byte for byte: work requests, completions, doorbell records, doorbells.
//!
//! Both sides use this module: the code that posts encodes with it, the software HCA decodes with it.
//! It holds pure functions over bytes; who owns the memory, and in which order it is written, is
//! decided elsewhere.
//!
//! The facts come from rdma-core's mlx5 provider (`providers/mlx5/mlx5dv.h` for the layouts and
//! constants, `qp.c` and `cq.c` for the rules) and, where those are silent, from the Programmer's
//! Reference Manual of the adapters. Fields are big-endian in memory. Words that a CPU or a GPU loads
//! or stores whole (doorbell records, the doorbell, the last word of a completion) are given as native
//! integers that have the right bytes in memory.
//!
//! | file | object |
//! |---|---|
//! | `opcode` | operation codes and error syndromes |
//! | `segment` | the 16-byte segments that hold addresses |
//! | `ctrl` | the control segment, first in every send WQE |
//! | `wqe` | send WQEs: what can be asked for, and the bytes it becomes |
//! | `encode` | building a send WQE |
//! | `decode` | taking a send WQE apart, and what a card would punish in it |
//! | `strict` | what a card may tolerate, but no correct producer writes |
//! | `rq` | receive WQEs |
//! | `cqe` | completions and who owns them |
//! | `doorbell` | doorbell records and the doorbell register |
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

#[cfg(not(target_endian = "little"))]
compile_error!("GPUs and the words they exchange with the CPU are little-endian: so must the host be");

mod cond;
mod cqe;
mod ctrl;
mod decode;
mod doorbell;
mod encode;
mod error;
mod opcode;
mod rq;
mod segment;
#[cfg(test)]
mod strategies;
mod strict;
#[cfg(test)]
mod tests;
mod wqe;

pub use cond::Cond;
pub use cqe::{
    CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, INITIAL_CQE, lap, op_own_word, owned_by_software, wait_condition,
};
pub use ctrl::{
    CE_ALWAYS, CE_MASK, Ctrl, FM_FENCE, FM_FENCE_AND_INITIATOR_SMALL, FM_INITIATOR_SMALL, FM_MASK,
    FM_STRONG_ORDERING, SOLICITED, blocks, decode_ctrl, nop_like, set_index,
};
pub use decode::{DecodeError, DecodedOp, DecodedPayload, SgeList, decode_body};
pub use doorbell::{
    BF_OFFSET, CQ_DBREC_CI, CQ_DBREC_SIZE, Doorbell, EMPTY, QP_DBREC_RECV, QP_DBREC_SEND, QP_DBREC_SIZE,
    cq_ci_record, doorbell_word, extend16, extend24, low16, next_pi_doorbell, record_to_u16, record_to_u24,
    recv_record, send_record,
};
pub use encode::{Short, encode, encode_into, encode_short};
pub use error::WqeError;
pub use opcode::{CqeOpcode, Opcode, Syndrome};
pub use rq::{decode_recv, encode_recv, recv_stride};
pub use segment::{DataSeg, INLINE, INVALID_LKEY, MAX_MESSAGE, RemoteAddr, SEGMENT};
pub use strict::strict_violations;
pub use wqe::{BB, MAX_DS, MAX_QPN, MAX_WQE_BYTES, Payload, SendOp, WqeBytes, WqeFlags};
