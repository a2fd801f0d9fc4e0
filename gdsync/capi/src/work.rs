//! Work requests and completions of libibverbs, as those of this library.

use std::ffi::c_int;

use gdsync::mlx5::{AddressVector, CqeOpcode, Opcode, Payload, SendOp, Syndrome, WqeFlags};
use gdsync::rdma::direct::address_vector;
use gdsync::verbs::{RecvWr, RemoteAddr, SendWr, Sender, Sge, Wc};
use rdma_core_sys::verbs::{
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status,
    ibv_wr_opcode,
};
use smallvec::SmallVec;

use crate::guard::{Error, Result, non_null};

/// Buffers of a request that are stored inline.
type Sges = SmallVec<[Sge; 4]>;

/// More than any queue pair takes.
const MAX_SGES: usize = 32;

pub(crate) fn is_signalled(wr: &ibv_send_wr) -> bool {
    wr.send_flags.contains(ibv_send_flags::IBV_SEND_SIGNALED)
}

/// The buffers of a list of the program.
fn sges(list: *const ibv_sge, count: c_int) -> Result<Sges> {
    let refuse = || Error::invalid("num_sge", count, "0 to 32, and a list of as many");
    let count = usize::try_from(count).ok().filter(|&count| count <= MAX_SGES).ok_or_else(refuse)?;
    if count == 0 {
        return Ok(Sges::new());
    }
    if list.is_null() {
        return Err(refuse());
    }
    // SAFETY: the program passes so many.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    Ok(list.iter().map(|sge| Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey }).collect())
}

/// Calls `post` with a send of the program, on a queue pair of datagrams if `is_datagram`.
pub(crate) fn with_send<T>(
    wr: &ibv_send_wr,
    is_datagram: bool,
    post: impl FnOnce(&SendWr<'_>) -> Result<T>,
) -> Result<T> {
    let sges = sges(wr.sg_list, wr.num_sge)?;
    let mut bytes = SmallVec::<[u8; 64]>::new();
    let is_inline = wr.send_flags.contains(ibv_send_flags::IBV_SEND_INLINE);
    let mut payload = Payload::Sges(&sges);
    if is_inline {
        for sge in &sges {
            let len = sge.len as usize;
            if bytes.len() + len > 512 {
                return Err(Error::invalid(
                    "inline data length",
                    bytes.len() + len,
                    "at most the QP's max_inline_data",
                ));
            }
            let from =
                usize::try_from(sge.addr).map_or(std::ptr::null(), std::ptr::with_exposed_provenance::<u8>);
            if len > 0 {
                // SAFETY: the program passes readable bytes.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from, len) });
            }
        }
        payload = Payload::Inline(&bytes);
    }
    let imm = Some(u32::from_be(wr.imm_data));
    let remote = || {
        // SAFETY: every bit pattern is valid, and the operation says that the program has set this part.
        let rdma = unsafe { wr.wr.rdma };
        RemoteAddr { addr: rdma.remote_addr, rkey: rdma.rkey }
    };
    let atomic = || {
        // SAFETY: every bit pattern is valid, and the operation says that the program has set this part.
        let atomic = unsafe { wr.wr.atomic };
        let result = sges.first().copied().filter(|_| sges.len() == 1 && !is_inline);
        let result =
            result.ok_or_else(|| Error::invalid("num_sge of an atomic", sges.len(), "1, not inline"))?;
        Ok::<_, Error>((RemoteAddr { addr: atomic.remote_addr, rkey: atomic.rkey }, atomic, result))
    };
    let mut to = AddressVector::default();
    if is_datagram {
        // SAFETY: every bit pattern is valid, and the program sets this part for such a queue pair.
        let ud = unsafe { wr.wr.ud };
        // SAFETY: the program passes a handle of its device.
        to = unsafe { address_vector(non_null("wr.ud.ah", ud.ah)?, ud.remote_qpn, ud.remote_qkey) }?;
    }
    let op = match wr.opcode {
        ibv_wr_opcode::IBV_WR_SEND if is_datagram => SendOp::Datagram { to: &to, payload, imm: None },
        ibv_wr_opcode::IBV_WR_SEND_WITH_IMM if is_datagram => SendOp::Datagram { to: &to, payload, imm },
        ibv_wr_opcode::IBV_WR_SEND => SendOp::Send { payload, imm: None },
        ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => SendOp::Send { payload, imm },
        ibv_wr_opcode::IBV_WR_RDMA_WRITE => SendOp::Write { remote: remote(), payload, imm: None },
        ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::Write { remote: remote(), payload, imm },
        ibv_wr_opcode::IBV_WR_RDMA_READ if !is_inline => SendOp::Read { remote: remote(), sges: &sges },
        ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP => {
            let (remote, atomic, result) = atomic()?;
            SendOp::CompareSwap { remote, compare: atomic.compare_add, swap: atomic.swap, result }
        }
        ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => {
            let (remote, atomic, result) = atomic()?;
            SendOp::FetchAdd { remote, add: atomic.compare_add, result }
        }
        other => {
            return Err(Error::invalid(
                "opcode",
                other.0,
                "a send, write, read or atomic; only the first two inline",
            ));
        }
    };
    let fence = wr.send_flags.contains(ibv_send_flags::IBV_SEND_FENCE);
    let solicited = wr.send_flags.contains(ibv_send_flags::IBV_SEND_SOLICITED);
    post(&SendWr { wr_id: wr.wr_id, op, flags: WqeFlags { fence, solicited } })
}

/// Calls `post` with a receive of the program.
pub(crate) fn with_recv<T>(wr: &ibv_recv_wr, post: impl FnOnce(&RecvWr<'_>) -> Result<T>) -> Result<T> {
    let sges = sges(wr.sg_list, wr.num_sge)?;
    post(&RecvWr::new(&sges).id(wr.wr_id))
}

/// A completion for the program; of a datagram also who sent it.
pub(crate) fn completion(wc: &Wc, sender: Option<Sender>) -> ibv_wc {
    let mut out = ibv_wc::zeroed();
    out.wr_id = wc.wr_id;
    out.status = status(wc.syndrome);
    out.vendor_err = wc.vendor.into();
    out.byte_len = wc.byte_len;
    out.qp_num = wc.qpn;
    out.opcode = match (wc.opcode, wc.send_opcode) {
        (CqeOpcode::RESP_WR_IMM, _) => ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
        _ if !wc.is_send() => ibv_wc_opcode::IBV_WC_RECV,
        (_, Opcode::RDMA_WRITE | Opcode::RDMA_WRITE_IMM) => ibv_wc_opcode::IBV_WC_RDMA_WRITE,
        (_, Opcode::RDMA_READ) => ibv_wc_opcode::IBV_WC_RDMA_READ,
        (_, Opcode::ATOMIC_CS) => ibv_wc_opcode::IBV_WC_COMP_SWAP,
        (_, Opcode::ATOMIC_FA) => ibv_wc_opcode::IBV_WC_FETCH_ADD,
        _ => ibv_wc_opcode::IBV_WC_SEND,
    };
    if let Some(imm) = wc.imm {
        out.imm_data = imm.to_be();
        out.wc_flags |= ibv_wc_flags::IBV_WC_WITH_IMM;
    }
    if let Some(sender) = sender {
        (out.src_qp, out.slid, out.sl) = (sender.qpn, sender.lid, sender.sl);
        if sender.has_grh {
            out.wc_flags |= ibv_wc_flags::IBV_WC_GRH;
        }
    }
    out
}

fn status(syndrome: Option<Syndrome>) -> ibv_wc_status {
    match syndrome {
        None => ibv_wc_status::IBV_WC_SUCCESS,
        Some(Syndrome::LOC_LEN_ERR) => ibv_wc_status::IBV_WC_LOC_LEN_ERR,
        Some(Syndrome::LOC_QP_OP_ERR | Syndrome::COPY_TIMEOUT) => ibv_wc_status::IBV_WC_LOC_QP_OP_ERR,
        Some(Syndrome::LOC_PROT_ERR) => ibv_wc_status::IBV_WC_LOC_PROT_ERR,
        Some(Syndrome::WR_FLUSH_ERR) => ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
        Some(Syndrome::MW_BIND_ERR) => ibv_wc_status::IBV_WC_MW_BIND_ERR,
        Some(Syndrome::BAD_RESP_ERR) => ibv_wc_status::IBV_WC_BAD_RESP_ERR,
        Some(Syndrome::LOC_ACCESS_ERR) => ibv_wc_status::IBV_WC_LOC_ACCESS_ERR,
        Some(Syndrome::REM_INV_REQ_ERR) => ibv_wc_status::IBV_WC_REM_INV_REQ_ERR,
        Some(Syndrome::REM_ACCESS_ERR) => ibv_wc_status::IBV_WC_REM_ACCESS_ERR,
        Some(Syndrome::REM_OP_ERR) => ibv_wc_status::IBV_WC_REM_OP_ERR,
        Some(Syndrome::RETRY_EXC_ERR) => ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
        Some(Syndrome::RNR_RETRY_EXC_ERR) => ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR,
        Some(Syndrome::REM_ABORT_ERR) => ibv_wc_status::IBV_WC_REM_ABORT_ERR,
        Some(_) => ibv_wc_status::IBV_WC_GENERAL_ERR,
    }
}
