//! Translation of WQEs to device requests (`ibv_send_wr`), and of device statuses to CQEs.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;

use rdma_core_sys::verbs::{
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_send_wr_atomic, ibv_send_wr_rdma, ibv_send_wr_wr, ibv_sge,
    ibv_wr_opcode,
};
use smallvec::SmallVec;

use gdsync_device::engine::{Rings, Wqe};
use mlx5_ring::{DataSeg, DecodedOp, DecodedPayload, RemoteAddr};

/// A send request.
#[derive(Debug)]
pub(super) struct Request {
    opcode: ibv_wr_opcode,
    flags: ibv_send_flags,
    imm: u32,
    target: Target,
    payload: Buffers,
}

/// Remote operands of an operation.
#[derive(Clone, Copy, Debug)]
enum Target {
    None,
    Memory(RemoteAddr),
    /// Compare or add, and swap operands.
    Word(RemoteAddr, u64, u64),
}

/// SGEs of a request.
pub(super) type Buffers = SmallVec<[ibv_sge; 4]>;

/// Source of a WQE's inline bytes.
pub(super) enum Inline {
    /// The WQE, while it is posted.
    Now,
    /// These SGEs, when the device executes it.
    Later(Buffers),
}

/// An SGE for the device.
pub(super) fn sge(seg: DataSeg) -> ibv_sge {
    ibv_sge { addr: seg.addr, length: seg.len, lkey: seg.lkey }
}

/// Inline bytes of a send in its WQE.
pub(super) fn inline_bytes(op: &DecodedOp) -> Option<Range<usize>> {
    match op {
        DecodedOp::Send { payload: DecodedPayload::Inline(range), .. }
        | DecodedOp::Write { payload: DecodedPayload::Inline(range), .. } => Some(range.clone()),
        _ => None,
    }
}

/// SGEs for the bytes `range` of the WQE at block `begin` in the ring, which is registered with `lkey`.
pub(super) fn in_ring(rings: &Rings, begin: u64, range: Range<usize>, lkey: u32) -> Buffers {
    let size = rings.sq.len();
    let mut at = (rings.offset(begin) + range.start) % size;
    let mut left = range.len();
    let mut buffers = Buffers::new();
    while left > 0 {
        let part = left.min(size - at);
        let length = u32::try_from(part).expect("a WQE is short");
        buffers.push(ibv_sge { addr: rings.sq.addr() + at as u64, length, lkey });
        (at, left) = (0, left - part);
    }
    buffers
}

impl Request {
    /// The request for `wqe`, which was decoded to `op`; `None` for a NOP. `inline` is the source of inline bytes.
    /// Every request is signaled.
    pub(super) fn of(op: &DecodedOp, wqe: &Wqe, inline: Inline) -> Option<Self> {
        let bytes = wqe.as_bytes();
        let mut flags = ibv_send_flags::IBV_SEND_SIGNALED;
        if wqe.ctrl.fence() {
            flags |= ibv_send_flags::IBV_SEND_FENCE;
        }
        if wqe.ctrl.solicited() {
            flags |= ibv_send_flags::IBV_SEND_SOLICITED;
        }
        let payload = |payload: &DecodedPayload| match (payload, inline) {
            (DecodedPayload::Sges(list), _) => list.iter(bytes).map(sge).collect(),
            (DecodedPayload::Inline(_), Inline::Later(buffers)) => buffers,
            (DecodedPayload::Inline(range), Inline::Now) => {
                let bytes = bytes.get(range.clone()).unwrap_or_default();
                if bytes.is_empty() {
                    return Buffers::new();
                }
                flags |= ibv_send_flags::IBV_SEND_INLINE;
                let length = u32::try_from(bytes.len()).expect("a WQE is short");
                Buffers::from_slice(&[ibv_sge { addr: bytes.as_ptr() as u64, length, lkey: 0 }])
            }
        };
        let (opcode, imm, target, payload) = match op {
            DecodedOp::Nop => return None,
            DecodedOp::Send { payload: data, imm: None } => {
                (ibv_wr_opcode::IBV_WR_SEND, 0, Target::None, payload(data))
            }
            DecodedOp::Send { payload: data, imm: Some(imm) } => {
                (ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, *imm, Target::None, payload(data))
            }
            DecodedOp::Write { remote, payload: data, imm: None } => {
                (ibv_wr_opcode::IBV_WR_RDMA_WRITE, 0, Target::Memory(*remote), payload(data))
            }
            DecodedOp::Write { remote, payload: data, imm: Some(imm) } => {
                (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, *imm, Target::Memory(*remote), payload(data))
            }
            DecodedOp::Read { remote, sges } => {
                let buffers = sges.iter(bytes).map(sge).collect();
                (ibv_wr_opcode::IBV_WR_RDMA_READ, 0, Target::Memory(*remote), buffers)
            }
            DecodedOp::CompareSwap { remote, compare, swap, result } => (
                ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP,
                0,
                Target::Word(*remote, *compare, *swap),
                Buffers::from_slice(&[sge(*result)]),
            ),
            DecodedOp::FetchAdd { remote, add, result } => (
                ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
                0,
                Target::Word(*remote, *add, 0),
                Buffers::from_slice(&[sge(*result)]),
            ),
        };
        Some(Self { opcode, flags, imm, target, payload })
    }

    /// Number of SGEs.
    pub(super) fn buffers(&self) -> usize {
        self.payload.len()
    }

    /// Its SGEs.
    pub(super) fn buffers_mut(&mut self) -> &mut Buffers {
        &mut self.payload
    }

    /// For `ibv_post_send`. Points into this request, and into the WQE for inline data.
    pub(super) fn as_send_wr(&mut self, wr_id: u64) -> ibv_send_wr {
        let wr = match self.target {
            Target::None => ibv_send_wr::zeroed().wr,
            Target::Memory(RemoteAddr { addr, rkey }) => {
                ibv_send_wr_wr { rdma: ibv_send_wr_rdma { remote_addr: addr, rkey } }
            }
            Target::Word(RemoteAddr { addr, rkey }, compare_add, swap) => {
                ibv_send_wr_wr { atomic: ibv_send_wr_atomic { remote_addr: addr, compare_add, swap, rkey } }
            }
        };
        ibv_send_wr {
            wr_id,
            sg_list: self.payload.as_mut_ptr(),
            num_sge: count(&self.payload),
            opcode: self.opcode,
            send_flags: self.flags,
            imm_data: self.imm.to_be(),
            wr,
            ..ibv_send_wr::zeroed()
        }
    }
}

/// For `ibv_post_recv`. Points to the SGEs.
pub(super) fn recv_wr(wr_id: u64, buffers: &mut Buffers) -> ibv_recv_wr {
    ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: buffers.as_mut_ptr(), num_sge: count(buffers) }
}

fn count(buffers: &Buffers) -> c_int {
    c_int::try_from(buffers.len()).expect("a WQE has few buffers")
}

#[cfg(test)]
mod tests;
