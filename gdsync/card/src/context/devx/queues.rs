//! Completion queues, queue pairs and receive memory pools (RMP) in registered memory: created and asked about.
//!
//! Bits that say that the numbers of the memory are valid do not count: UCX leaves them 0, and memory is never named otherwise.

use std::fmt::Debug;
use std::sync::Arc;

use gdsync_device::memory::Memory;
use gdsync_soft::{CardCq, CardQp, CardSrq, CardTransport};
use mlx5_ring::{BB, CQ_DBREC_SIZE, QP_DBREC_SIZE};
use parking_lot::Mutex;
use rdma_core_sys::mlx5::ifc::{
    Field, Opcode, Status, command, cqc, create_cq, create_qp, event, qpc, rmp_wq,
};

use super::firmware::{LOG_MAX_CQ_SZ, LOG_MAX_QP_SZ, Refusal, Response, at_least, opcode, require};
use super::is_event_queue;
use super::umem::Umem;
use crate::context::{Context, Pd};
use crate::hca::{EventSource, Hca};

type Result<T> = std::result::Result<T, Refusal>;

/// What another object uses: it cannot be destroyed before.
type Used = Arc<dyn Debug + Send + Sync>;

/// What a program made.
#[derive(Debug)]
pub(super) enum Object {
    Cq(Cq),
    Qp(Qp),
    Rmp(Rmp),
}

/// Makes what the command says.
pub(super) fn create(context: &Context, input: &[u8]) -> Result<Object> {
    match opcode(input) {
        Opcode::CREATE_CQ => Cq::create(context, input).map(Object::Cq),
        Opcode::CREATE_QP => Qp::create(context, input).map(Object::Qp),
        Opcode::CREATE_RMP => Rmp::create(context, input).map(Object::Rmp),
        other => Err(Refusal::operation(other, "creates nothing here")),
    }
}

impl Object {
    pub(super) fn number(&self) -> u32 {
        match self {
            Self::Cq(cq) => cq.cqn,
            Self::Qp(qp) => qp.qpn,
            Self::Rmp(rmp) => rmp.rmpn,
        }
    }

    pub(super) fn source(&self) -> &Arc<EventSource> {
        match self {
            Self::Cq(cq) => &cq.source,
            Self::Qp(qp) => &qp.source,
            Self::Rmp(rmp) => &rmp.source,
        }
    }

    /// Events that there are of it.
    pub(super) fn events(&self) -> &'static [u16] {
        match self {
            Self::Cq(_) => &[event::COMP, event::CQ_ERROR],
            Self::Qp(_) => &[
                event::WQ_CATAS_ERROR,
                event::WQ_INVAL_REQ_ERROR,
                event::WQ_ACCESS_ERROR,
                event::SRQ_LAST_WQE,
            ],
            Self::Rmp(_) => &[event::SRQ_RQ_LIMIT],
        }
    }

    pub(super) fn query(&self, hca: &Hca, input: &[u8], response: &mut Response) -> Result<()> {
        match (self, opcode(input)) {
            (Self::Cq(cq), Opcode::QUERY_CQ) => {
                same(input, cq.cqn)?;
                response.at_least(command::LONG)?;
                response.put(create_cq::CONTEXT / 8, &cq.context);
                Ok(())
            }
            (Self::Qp(qp), Opcode::QUERY_QP) => {
                query_verbs_qp(hca, qp.qpn, input, response)?;
                response.put(create_qp::CONTEXT / 8, &qp.context.lock());
                set_state(hca, qp.qpn, response)
            }
            (_, other) => Err(Refusal::operation(other, "does not ask for this")),
        }
    }
}

/// Checks that a command names the queue of its object.
pub(super) fn same(input: &[u8], number: u32) -> Result<()> {
    let named = command::NUMBER.get(input);
    if named == number {
        Ok(())
    } else {
        Err(Refusal::resource(format!("{named:#x} instead of {number:#x}")))
    }
}

/// QUERY_QP of a queue pair made by verbs: its state.
pub(super) fn query_verbs_qp(hca: &Hca, qpn: u32, input: &[u8], response: &mut Response) -> Result<()> {
    let opcode = opcode(input);
    if opcode != Opcode::QUERY_QP {
        return Err(Refusal::operation(opcode, "does not ask for a queue pair"));
    }
    same(input, qpn)?;
    response.at_least(command::LONG)?;
    set_state(hca, qpn, response)
}

fn set_state(hca: &Hca, qpn: u32, response: &mut Response) -> Result<()> {
    let state = hca.card.state(qpn).map_err(|error| Refusal::resource(error.to_string()))?;
    // The numbers are those of verbs.
    response.set(qpc::STATE.inside(create_qp::CONTEXT), state.0.into());
    Ok(())
}

/// `len` bytes of the registered memory that two fields name.
fn part(
    context: &Context,
    input: &[u8],
    place: (Field, Field),
    len: usize,
    align: u64,
) -> Result<(Arc<Umem>, Memory)> {
    let (umem, offset) = place;
    let umem = context.umem(umem.get(input))?;
    let memory = umem.part(offset.get64(input), len, align)?;
    Ok((umem, memory))
}

fn limit(error: &dyn ToString) -> Refusal {
    Refusal::new(Status::LIM_ERR, error.to_string())
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq {
    hca: &'static Hca,
    cqn: u32,
    source: Arc<EventSource>,
    /// As it was created.
    context: Vec<u8>,
    _umems: [Arc<Umem>; 2],
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.hca.owners.cqs.remove(self.cqn);
        self.hca.card.destroy_cq(self.cqn);
        self.source.finish();
    }
}

impl Cq {
    fn create(context: &Context, input: &[u8]) -> Result<Self> {
        at_least(input, command::LONG)?;
        let cqc = |field: Field| field.inside(create_cq::CONTEXT);
        require(
            input,
            &[
                (cqc(cqc::CC), 0, "cc"),
                (cqc(cqc::CQE_COMP_EN), 0, "cqe_comp_en"),
                (cqc(cqc::PAGE_OFFSET), 0, "page_offset"),
            ],
        )?;
        let entry = match cqc(cqc::CQE_SZ).get(input) {
            0 => 64,
            1 => 128,
            other => return Err(Refusal::parameter(format!("cqe_sz is {other}"))),
        };
        let log = cqc(cqc::LOG_CQ_SIZE).get(input);
        if log > LOG_MAX_CQ_SZ {
            return Err(limit(&format!("log_cq_size is {log}")));
        }
        let eqn = cqc(cqc::C_EQN).get(input);
        if !is_event_queue(eqn) {
            return Err(Refusal::resource(format!("c_eqn is {eqn:#x}")));
        }
        context.check_uar(cqc(cqc::UAR_PAGE).get(input))?;
        let place = (create_cq::CQ_UMEM_ID, create_cq::CQ_UMEM_OFFSET);
        let (ring_umem, ring) = part(context, input, place, entry << log, 64)?;
        if !ring_umem.is_writable {
            return Err(Refusal::parameter("the ring is in memory that the card may not write to"));
        }
        let place = (cqc(cqc::DBR_UMEM_ID), cqc(cqc::DBR_ADDR));
        let (record_umem, record) = part(context, input, place, CQ_DBREC_SIZE, 8)?;
        let source = Arc::<EventSource>::default();
        let cq = CardCq {
            ring,
            entry,
            record,
            ignore_overrun: cqc(cqc::OI).get(input) == 1,
            nudges: None,
            // Writes to the arm word of the record.
            channel: record_umem.is_writable.then(|| source.clone() as _),
        };
        let cqn = context.hca.card.create_cq(cq).map_err(|error| limit(&error))?;
        context.hca.owners.cqs.add(cqn, &source);
        let bytes = input[create_cq::CONTEXT / 8..create_cq::CONTEXT / 8 + CQC].to_vec();
        Ok(Self { hca: context.hca, cqn, source, context: bytes, _umems: [ring_umem, record_umem] })
    }
}

/// Bytes of a context.
const CQC: usize = 64;
const QPC: usize = 232;

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) hca: &'static Hca,
    pub(super) qpn: u32,
    source: Arc<EventSource>,
    /// As it was created, with what transitions have set.
    pub(super) context: Mutex<Vec<u8>>,
    _pd: Arc<Pd>,
    _cqs: [Used; 2],
    _srq: Option<Used>,
    _umems: [Arc<Umem>; 2],
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.hca.owners.qps.remove(self.qpn);
        self.hca.card.destroy_qp(self.qpn);
        self.source.finish();
    }
}

/// `rq_type`: a receive queue of its own, a shared one, none.
mod rq_type {
    pub(super) const REGULAR: u32 = 0;
    pub(super) const SRQ_RMP: u32 = 1;
    pub(super) const ZERO_SIZE: u32 = 3;
}

impl Qp {
    fn create(context: &Context, input: &[u8]) -> Result<Self> {
        at_least(input, command::LONG)?;
        let qpc = |field: Field| field.inside(create_qp::CONTEXT);
        require(
            input,
            &[
                (qpc(qpc::ST), 0, "st: other queue pairs than RC"),
                (qpc(qpc::NO_SQ), 0, "no_sq"),
                (qpc(qpc::SEND_DBR_MODE), 0, "send_dbr_mode"),
                (qpc(qpc::PAGE_OFFSET), 0, "page_offset"),
            ],
        )?;
        let (log_sq, log_rq) = (qpc(qpc::LOG_SQ_SIZE).get(input), qpc(qpc::LOG_RQ_SIZE).get(input));
        let log_stride = qpc(qpc::LOG_RQ_STRIDE).get(input);
        if log_sq > LOG_MAX_QP_SZ || log_rq > LOG_MAX_QP_SZ || log_stride > 5 {
            return Err(limit(&format!("queues of 2^{log_sq} and 2^{log_rq}, stride {log_stride}")));
        }
        let rq_stride = 16usize << log_stride;
        let srqn = qpc(qpc::SRQN_RMPN).get(input);
        let (rq_len, srq) = match qpc(qpc::RQ_TYPE).get(input) {
            rq_type::REGULAR => (rq_stride << log_rq, None),
            rq_type::SRQ_RMP => (0, Some((srqn, context.shared_receives(srqn)?))),
            rq_type::ZERO_SIZE => (0, None),
            other => return Err(Refusal::parameter(format!("rq_type is {other}"))),
        };
        let place = (create_qp::WQ_UMEM_ID, create_qp::WQ_UMEM_OFFSET);
        // The receive queue is first.
        let (rings, all) = part(context, input, place, rq_len + (BB << log_sq), 64)?;
        let slice = |start, len| all.slice(start, len).map_err(|error| limit(&error));
        let (rq, sq) = (slice(0, rq_len)?, slice(rq_len, BB << log_sq)?);
        let place = (qpc(qpc::DBR_UMEM_ID), qpc(qpc::DBR_ADDR));
        let (record_umem, record) = part(context, input, place, QP_DBREC_SIZE, 8)?;
        let send_cqn = qpc(qpc::CQN_SND).get(input);
        // Without receives it is not looked at, and programs leave it 0.
        let has_receives = rq_len > 0 || srq.is_some();
        let recv_cqn = if has_receives { qpc(qpc::CQN_RCV).get(input) } else { send_cqn };
        let cqs = [context.completions(send_cqn)?, context.completions(recv_cqn)?];
        let pdn = qpc(qpc::PD).get(input);
        let pd = context.pds.find(|pd| pd.pdn == pdn);
        let pd = pd.ok_or_else(|| Refusal::resource(format!("protection domain {pdn:#x} is not there")))?;
        context.check_uar(qpc(qpc::UAR_PAGE).get(input))?;
        let parts = CardQp {
            pdn,
            send_cqn,
            recv_cqn,
            sq,
            rq,
            rq_stride,
            record,
            // libmlx5 before 45 has one page for all queue pairs of DevX, whose doorbells overwrite each other.
            doorbell: context.doorbell(None).map_err(|errno| limit(&errno))?,
            uidx: qpc(qpc::USER_INDEX).get(input),
            transport: CardTransport::Connection,
            srqn: srq.as_ref().map(|(srqn, _)| *srqn),
            flushes_by_doorbell: false,
        };
        let qpn = context.hca.card.create_qp(parts).map_err(|error| limit(&error))?;
        let source = Arc::<EventSource>::default();
        context.hca.owners.qps.add(qpn, &source);
        let bytes = input[create_qp::CONTEXT / 8..create_qp::CONTEXT / 8 + QPC].to_vec();
        Ok(Self {
            hca: context.hca,
            qpn,
            source,
            context: Mutex::new(bytes),
            _pd: pd,
            _cqs: cqs,
            _srq: srq.map(|(_, srq)| srq),
            _umems: [rings, record_umem],
        })
    }
}

/// `MLX5_WQ_TYPE_*`
mod wq_type {
    pub(super) const LINKED_LIST: u32 = 0;
    pub(super) const CYCLIC: u32 = 1;
}

/// A receive memory pool: the shared receive queue of DevX.
#[derive(Debug)]
pub(super) struct Rmp {
    hca: &'static Hca,
    rmpn: u32,
    source: Arc<EventSource>,
    _umems: [Arc<Umem>; 2],
}

impl Drop for Rmp {
    fn drop(&mut self) {
        self.hca.owners.srqs.remove(self.rmpn);
        self.hca.card.destroy_srq(self.rmpn);
        self.source.finish();
    }
}

impl Rmp {
    fn create(context: &Context, input: &[u8]) -> Result<Self> {
        at_least(input, command::LONG)?;
        let is_cyclic = match rmp_wq::WQ_TYPE.get(input) {
            wq_type::LINKED_LIST => false,
            wq_type::CYCLIC => true,
            other => return Err(Refusal::parameter(format!("wq_type is {other}"))),
        };
        let (log, log_stride) = (rmp_wq::LOG_WQ_SZ.get(input), rmp_wq::LOG_WQ_STRIDE.get(input));
        if log > LOG_MAX_QP_SZ || !(5..=9).contains(&log_stride) {
            return Err(limit(&format!("a queue of 2^{log} entries of 2^{log_stride} bytes")));
        }
        let stride = 1usize << log_stride;
        let place = (rmp_wq::WQ_UMEM_ID, rmp_wq::WQ_UMEM_OFFSET);
        let (ring_umem, ring) = part(context, input, place, stride << log, 64)?;
        let place = (rmp_wq::DBR_UMEM_ID, rmp_wq::DBR_ADDR);
        let (record_umem, record) = part(context, input, place, 8, 8)?;
        let made = context.hca.card.create_srq(CardSrq { ring, stride, record, is_cyclic });
        let rmpn = made.map_err(|error| limit(&error))?;
        let source = Arc::<EventSource>::default();
        context.hca.owners.srqs.add(rmpn, &source);
        Ok(Self { hca: context.hca, rmpn, source, _umems: [ring_umem, record_umem] })
    }
}

impl Context {
    /// The completion queue of this number, made by DevX or by verbs.
    fn completions(&self, cqn: u32) -> Result<Used> {
        let made = self.devx.objects.find(|object| matches!(object, Object::Cq(cq) if cq.cqn == cqn));
        let used = made.map(|cq| cq as Used).or_else(|| Some(self.cqs.find(|cq| cq.cqn == cqn)? as Used));
        used.ok_or_else(|| Refusal::resource(format!("completion queue {cqn:#x} is not there")))
    }

    /// The shared receive queue of this number, made by DevX or by verbs.
    fn shared_receives(&self, srqn: u32) -> Result<Used> {
        let made = self.devx.objects.find(|object| matches!(object, Object::Rmp(rmp) if rmp.rmpn == srqn));
        let used =
            made.map(|rmp| rmp as Used).or_else(|| Some(self.srqs.find(|srq| srq.srqn == srqn)? as Used));
        used.ok_or_else(|| Refusal::resource(format!("shared receive queue {srqn:#x} is not there")))
    }

    /// Checks that a doorbell page is one of the program's.
    fn check_uar(&self, page: u32) -> Result<()> {
        if self.has_uar(page) {
            Ok(())
        } else {
            Err(Refusal::resource(format!("no doorbell page {page:#x}")))
        }
    }
}
