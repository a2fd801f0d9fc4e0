//! Translation of WQEs to device requests (`ibv_send_wr`), and of device statuses to CQEs.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;

use rdma_core_sys::verbs::{
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_send_wr_atomic, ibv_send_wr_rdma, ibv_send_wr_wr, ibv_sge,
    ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode,
};
use smallvec::SmallVec;

use gdsync_device::engine::{Rings, Wqe};
use mlx5_ring::{Cqe, CqeOpcode, DataSeg, DecodedOp, DecodedPayload, RemoteAddr, Syndrome};

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
    match op.payload() {
        Some(DecodedPayload::Inline(range)) => Some(range.clone()),
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
            // Refused before.
            (DecodedPayload::Mixed(_), _) => Buffers::new(),
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
            DecodedOp::Nop | DecodedOp::MaskedAtomic { .. } | DecodedOp::Wait { .. } => return None,
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

/// Identifies a request at the device (`wr_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Slot of its queue pair, below 2^14.
    pub(super) index: usize,
    /// Changes with every connection in this slot, so that late completions do not match the next.
    pub(super) generation: u16,
    pub(super) is_receive: bool,
    /// Low bits of its number in its queue.
    pub(super) number: u32,
}

impl Tag {
    pub(super) fn to_wr_id(self) -> u64 {
        let index = (self.index as u64) << 48;
        let is_receive = u64::from(self.is_receive) << 63;
        index | is_receive | u64::from(self.generation) << 32 | u64::from(self.number)
    }

    pub(super) fn from_wr_id(wr_id: u64) -> Self {
        let [i0, i1, g0, g1, number @ ..] = wr_id.to_be_bytes();
        Self {
            index: usize::from(u16::from_be_bytes([i0 & 0x3f, i1])),
            generation: u16::from_be_bytes([g0, g1]),
            is_receive: i0 & 0x80 != 0,
            number: u32::from_be_bytes(number),
        }
    }
}

/// Syndrome of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) syndrome: Syndrome,
    /// Vendor code.
    pub(super) vendor: u8,
}

impl Failure {
    pub(super) const FLUSHED: Self = Self { syndrome: Syndrome::WR_FLUSH_ERR, vendor: 0 };
    pub(super) const REFUSED: Self = Self { syndrome: Syndrome::LOC_QP_OP_ERR, vendor: 0 };
}

/// Syndrome of a status, if cards have one for it.
fn syndrome(status: ibv_wc_status) -> Option<Syndrome> {
    Some(match status {
        ibv_wc_status::IBV_WC_LOC_LEN_ERR => Syndrome::LOC_LEN_ERR,
        ibv_wc_status::IBV_WC_LOC_QP_OP_ERR => Syndrome::LOC_QP_OP_ERR,
        ibv_wc_status::IBV_WC_LOC_PROT_ERR => Syndrome::LOC_PROT_ERR,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Syndrome::WR_FLUSH_ERR,
        ibv_wc_status::IBV_WC_MW_BIND_ERR => Syndrome::MW_BIND_ERR,
        ibv_wc_status::IBV_WC_BAD_RESP_ERR => Syndrome::BAD_RESP_ERR,
        ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => Syndrome::LOC_ACCESS_ERR,
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR | ibv_wc_status::IBV_WC_REM_INV_RD_REQ_ERR => {
            Syndrome::REM_INV_REQ_ERR
        }
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Syndrome::REM_ACCESS_ERR,
        ibv_wc_status::IBV_WC_REM_OP_ERR => Syndrome::REM_OP_ERR,
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR | ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR => {
            Syndrome::RETRY_EXC_ERR
        }
        ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => Syndrome::RNR_RETRY_EXC_ERR,
        ibv_wc_status::IBV_WC_REM_ABORT_ERR => Syndrome::REM_ABORT_ERR,
        _ => return None,
    })
}

/// Result of a request. Statuses unknown to cards become local operation errors.
pub(super) fn outcome(wc: &ibv_wc) -> Result<(), Failure> {
    if wc.status == ibv_wc_status::IBV_WC_SUCCESS {
        return Ok(());
    }
    let vendor = u8::try_from(wc.vendor_err).unwrap_or(u8::MAX);
    Err(Failure { syndrome: syndrome(wc.status).unwrap_or(Syndrome::LOC_QP_OP_ERR), vendor })
}

/// Whether the status has no syndrome of its own.
pub(super) fn is_unnamed(wc: &ibv_wc) -> bool {
    wc.status != ibv_wc_status::IBV_WC_SUCCESS && syndrome(wc.status).is_none()
}

/// CQE of a receive, without QPN and counter.
pub(super) fn received(wc: &ibv_wc) -> Cqe {
    if let Err(Failure { syndrome, vendor }) = outcome(wc) {
        return Cqe { opcode: CqeOpcode::RESP_ERR, syndrome, vendor, ..Cqe::default() };
    }
    let has_imm = wc.wc_flags.contains(ibv_wc_flags::IBV_WC_WITH_IMM);
    let opcode = match wc.opcode {
        ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => CqeOpcode::RESP_WR_IMM,
        _ if has_imm => CqeOpcode::RESP_SEND_IMM,
        _ => CqeOpcode::RESP_SEND,
    };
    let imm = if opcode == CqeOpcode::RESP_SEND { 0 } else { u32::from_be(wc.imm_data) };
    Cqe { opcode, byte_cnt: wc.byte_len, imm, ..Cqe::default() }
}

#[cfg(test)]
mod tests;
