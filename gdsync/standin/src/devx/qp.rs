//! CREATE_QP and QUERY_QP.

use std::sync::Arc;

use gdsync::hca::CardQp;
use rdma_core_sys::mlx5::devx_set;

use super::cq::Used;
use super::memory::{Page, Umem};
use super::status::{Refusal, refuse};
use super::{Input, LOG_MAX_QP, LONG, SHORT, long_enough};
use crate::domain;
use crate::hca::Hca;
use crate::quirks::Quirk;

/// `MLX5_CMD_OP_CREATE_QP`
pub(super) const CREATE: u32 = 0x500;
/// `MLX5_CMD_OP_QUERY_QP`
const QUERY: u32 = 0x50b;
/// Where the context begins.
pub(super) const CONTEXT: usize = 0xc0;

/// A queue pair in registered memory.
pub(super) struct DevxQp {
    qpn: u32,
    pub(super) hca: &'static Hca,
    pdn: u32,
    page: Arc<Page>,
    _cqs: [Used; 2],
    _umems: [Arc<Umem>; 2],
}

impl DevxQp {
    pub(super) fn create(hca: &'static Hca, input: &Input<'_>) -> Result<Self, Refusal> {
        input.require(&[
            (CONTEXT + 0x08, 8, 0, "st"),
            (CONTEXT + 0x13, 2, 3, "pm_state"),
            (CONTEXT + 0x50, 1, 0, "no_sq"),
            (CONTEXT + 0x80, 2, 0, "send_dbr_mode"),
            (CONTEXT + 0xa3, 5, 0, "log_page_size"),
            (CONTEXT + 0x494, 6, 0, "page_offset"),
            (CONTEXT + 0x565, 3, 0, "rq_type"),
            (CONTEXT + 0x630, 8, 0, "cs_req: payload in CQEs"),
            (CONTEXT + 0x638, 8, 0, "cs_res: payload in CQEs"),
            (CONTEXT + 0x683, 1, 1, "dbr_umem_valid"),
            (0x860, 1, 1, "wq_umem_valid"),
        ])?;
        let (log_sq, log_rq) = (input.get(CONTEXT + 0x51, 4), input.get(CONTEXT + 0x49, 4));
        let log_stride = input.get(CONTEXT + 0x4d, 3);
        if log_sq > LOG_MAX_QP || log_rq > LOG_MAX_QP || log_stride > 5 {
            return Err(refuse::limit(
                0x40,
                format!("queues of 2^{log_sq} and 2^{log_rq}, stride {log_stride}"),
            ));
        }
        let rq_stride = 16usize << log_stride;
        let (rq_len, sq_len) = (rq_stride << log_rq, 64usize << log_sq);
        let rings = Umem::find(input.get(0x840, 32))?;
        let record_umem = Umem::find(input.get(CONTEXT + 0x720, 32))?;
        let offset = input.get64(0x800);
        // The receive queue is first; both begin at blocks.
        let rq = rings.part(offset, rq_len, 64)?;
        let sq = rings.part(offset.saturating_add(rq_len as u64), sq_len, 64)?;
        let record = record_umem.part(input.get64(CONTEXT + 0x500), 8, 8)?;
        let send_cq = Used::find(hca, input.get(CONTEXT + 0x3e8, 24))?;
        let recv_cq = Used::find(hca, input.get(CONTEXT + 0x4e8, 24))?;
        let pdn = input.get(CONTEXT + 0x28, 24);
        if domain::numbered(pdn, domain::Domain::add_user).is_none() {
            return Err(refuse::resource(0x41, format!("protection domain {pdn:#x} is not there")));
        }
        let page = Page::find(input.get(CONTEXT + 0x68, 24)).inspect_err(|_| leave(pdn))?;
        let doorbell = page.take().inspect_err(|_| leave(pdn))?;
        let parts = CardQp {
            pdn,
            send_cqn: send_cq.cqn(),
            recv_cqn: recv_cq.cqn(),
            sq,
            rq,
            rq_stride,
            record,
            doorbell,
            flushes_by_doorbell: Quirk::FlushesByDoorbell.is_on(),
        };
        let made = hca.card.create_qp(parts).map_err(|error| refuse::limit(0x42, error.to_string()));
        let qpn = made.inspect_err(|_| {
            leave(pdn);
            page.release();
        })?;
        Ok(Self { qpn, hca, pdn, page, _cqs: [send_cq, recv_cq], _umems: [rings, record_umem] })
    }

    pub(super) fn qpn(&self) -> u32 {
        self.qpn
    }

    pub(super) fn query(&self, input: &[u8], output: &mut [u8]) -> Result<(), Refusal> {
        let opcode = Input(input).opcode();
        if opcode != QUERY {
            return Err(refuse::operation(0x43, format!("command {opcode:#x} asks for nothing here")));
        }
        long_enough(input, SHORT, output, LONG)?;
        let state = self.hca.card.state(self.qpn).map_err(|_| refuse::state())?;
        output.fill(0);
        // The numbers are those of verbs.
        devx_set(output, CONTEXT, 4, state.0.into());
        Ok(())
    }
}

fn leave(pdn: u32) {
    domain::numbered(pdn, domain::Domain::remove_user);
}

impl Drop for DevxQp {
    fn drop(&mut self) {
        self.hca.card.destroy_qp(self.qpn);
        self.page.release();
        leave(self.pdn);
    }
}
