//! `ibv_poll_cq`: CQEs as work completions.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use gdsync::mlx5::{self, CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, CqeOpcode, Opcode, Syndrome};
use rdma_core_sys::verbs::{
    ibv_cq, ibv_wc, ibv_wc_flags as flags, ibv_wc_opcode as opcode, ibv_wc_status as status,
};

use crate::complaint::complain;
use crate::cq::Cq;
use crate::qp::Qp;

impl Cq {
    /// Completion `n`, if it is there.
    fn at(&self, n: u64) -> Option<Cqe> {
        let (ring, log) = (self.ring().ok()?, self.entries.ilog2());
        let slot = usize::try_from(n & (u64::from(self.entries) - 1)).ok()? * CQE_SIZE;
        let word = ring.atomic32(slot + CQE_OP_OWN_OFFSET).ok()?.load(Ordering::Acquire);
        mlx5::owned_by_software(word, n, log).then(|| {
            let mut bytes = [0; CQE_SIZE];
            ring.read(slot, &mut bytes).expect("CQEs lie in the ring");
            Cqe::decode(&bytes)
        })
    }

    /// Whether a completion waits to be polled.
    pub(crate) fn has_any(&self) -> bool {
        self.at(*self.polled.lock()).is_some()
    }

    /// How many completions of a queue pair wait to be polled: of sends, and of receives.
    pub(crate) fn count(&self, qpn: u32) -> [u64; 2] {
        let polled = self.polled.lock();
        let mut counts = [0; 2];
        for cqe in (*polled..).map_while(|n| self.at(n)).take(self.entries as usize) {
            if cqe.qpn == qpn {
                counts[usize::from(!is_send(cqe.opcode))] += 1;
            }
        }
        counts
    }

    /// Takes the next completion that says anything.
    fn take(&self, polled: &mut u64) -> Option<ibv_wc> {
        loop {
            let cqe = self.at(*polled)?;
            *polled += 1;
            if let Some(wc) = self.hca.roster.with_qp(cqe.qpn, |qp| {
                // SAFETY: it stays on the list while it exists.
                unsafe { Qp::of(qp) }.completed(&cqe)
            }) {
                return Some(wc);
            }
        }
    }
}

fn is_send(kind: CqeOpcode) -> bool {
    matches!(kind, CqeOpcode::REQ | CqeOpcode::REQ_ERR)
}

impl Qp {
    /// What a CQE means, if it is of a request that wants to be told of.
    fn completed(&self, cqe: &Cqe) -> Option<ibv_wc> {
        let is_send = is_send(cqe.opcode);
        let mut work = self.work.lock();
        let stale = &mut work.stale[usize::from(!is_send)];
        if *stale > 0 {
            *stale -= 1;
            return None;
        }
        let failed = matches!(cqe.opcode, CqeOpcode::REQ_ERR | CqeOpcode::RESP_ERR);
        let wr_id = if is_send {
            let sent = work.sent(cqe.wqe_counter)?;
            (sent.signaled || failed).then_some(sent.wr_id)?
        } else {
            work.received()?
        };
        let (kind, wc_flags) = meaning(cqe);
        Some(ibv_wc {
            wr_id,
            status: if failed { reason(cqe.syndrome) } else { status::IBV_WC_SUCCESS },
            opcode: kind,
            vendor_err: cqe.vendor.into(),
            byte_len: cqe.byte_cnt,
            imm_data: cqe.imm.to_be(),
            qp_num: self.qpn,
            wc_flags,
            ..ibv_wc::zeroed()
        })
    }
}

fn meaning(cqe: &Cqe) -> (opcode, flags) {
    let plain = flags::empty();
    match (cqe.opcode, cqe.send_opcode) {
        (CqeOpcode::RESP_WR_IMM, _) => (opcode::IBV_WC_RECV_RDMA_WITH_IMM, flags::IBV_WC_WITH_IMM),
        (CqeOpcode::RESP_SEND_IMM, _) => (opcode::IBV_WC_RECV, flags::IBV_WC_WITH_IMM),
        (CqeOpcode::RESP_SEND | CqeOpcode::RESP_ERR, _) => (opcode::IBV_WC_RECV, plain),
        (_, Opcode::RDMA_WRITE | Opcode::RDMA_WRITE_IMM) => (opcode::IBV_WC_RDMA_WRITE, plain),
        (_, Opcode::RDMA_READ) => (opcode::IBV_WC_RDMA_READ, plain),
        (_, Opcode::ATOMIC_CS) => (opcode::IBV_WC_COMP_SWAP, plain),
        (_, Opcode::ATOMIC_FA) => (opcode::IBV_WC_FETCH_ADD, plain),
        _ => (opcode::IBV_WC_SEND, plain),
    }
}

fn reason(syndrome: Syndrome) -> status {
    match syndrome {
        Syndrome::LOC_LEN_ERR => status::IBV_WC_LOC_LEN_ERR,
        Syndrome::LOC_QP_OP_ERR => status::IBV_WC_LOC_QP_OP_ERR,
        Syndrome::LOC_PROT_ERR => status::IBV_WC_LOC_PROT_ERR,
        Syndrome::WR_FLUSH_ERR => status::IBV_WC_WR_FLUSH_ERR,
        Syndrome::BAD_RESP_ERR => status::IBV_WC_BAD_RESP_ERR,
        Syndrome::LOC_ACCESS_ERR => status::IBV_WC_LOC_ACCESS_ERR,
        Syndrome::REM_INV_REQ_ERR => status::IBV_WC_REM_INV_REQ_ERR,
        Syndrome::REM_ACCESS_ERR => status::IBV_WC_REM_ACCESS_ERR,
        Syndrome::REM_OP_ERR => status::IBV_WC_REM_OP_ERR,
        Syndrome::RETRY_EXC_ERR => status::IBV_WC_RETRY_EXC_ERR,
        Syndrome::RNR_RETRY_EXC_ERR => status::IBV_WC_RNR_RETRY_EXC_ERR,
        Syndrome::REM_ABORT_ERR => status::IBV_WC_REM_ABORT_ERR,
        _ => status::IBV_WC_GENERAL_ERR,
    }
}

/// `ibv_poll_cq`
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches for the queue.
    let cq = unsafe { Cq::of(cq) };
    if cq.is_described() {
        complain(
            "a completion queue is polled by the library and by its owner: mlx5dv_init_obj gave it away",
        );
        return -libc::EINVAL;
    }
    let mut polled = cq.polled.lock();
    let mut count = 0;
    while count < num_entries {
        let Some(completion) = cq.take(&mut polled) else { break };
        let place = wc.wrapping_offset(count as isize);
        // SAFETY: the caller vouches for so many.
        unsafe { place.write(completion) };
        count += 1;
    }
    cq.consumed(*polled);
    count
}
