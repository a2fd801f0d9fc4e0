//! Queues created by firmware commands, in GPU or host memory.

use std::fmt;
use std::sync::Arc;

use super::Devx;
use super::mailbox::{CqFields, QpFields, create_cq, create_qp, created, queried_state, query_qp};
use super::object::{OF_CQ, OF_QP, Object};
use super::steps::{self, Route, udp_port};
use super::umem::Umem;
use crate::Domain;
use crate::direct::queues::first_lap;
use crate::direct::registers::Uar;
use crate::direct::{Cq, CqObject, Parts, QpObject, resolve};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, host_page};
use gdsync_device::{OnGpu, Places, QpAttr, QpRequest, QpState};
use mlx5_ring::{self as mlx5, BB, CQE_SIZE, SEGMENT};

/// Allocates and registers whole pages for rings; nothing else shares them.
fn pages(devx: &Devx, what: OnGpu, len: usize, places: &Places) -> Result<(Memory, Umem)> {
    let page = host_page();
    let whole = places.alloc(what, len.next_multiple_of(page) + page)?;
    let skip = whole.addr().next_multiple_of(page as u64) - whole.addr();
    let memory = whole.slice(usize::try_from(skip).expect("less than a page"), len)?;
    let umem = Umem::register(&devx.open, devx.mlx5, &memory)?;
    Ok((memory, umem))
}

/// Allocates and registers a doorbell record.
fn record(devx: &Devx, len: usize, places: &Places) -> Result<(Memory, Umem)> {
    let memory = places.alloc(OnGpu::RECORDS, len)?;
    let umem = Umem::register(&devx.open, devx.mlx5, &memory)?;
    Ok((memory, umem))
}

impl Devx {
    /// Creates a completion queue with `1 << log` entries.
    pub(in crate::direct) fn create_cq(&self, log: u32, what: OnGpu, places: &Places) -> Result<Cq> {
        self.check("completion queue entries", log, self.limits.log_max_cq)?;
        let (ring, ring_umem) = pages(self, what, CQE_SIZE << log, places)?;
        let (record, record_umem) = record(self, mlx5::CQ_DBREC_SIZE, places)?;
        first_lap(&ring)?;
        ring.flush()?;
        let uar = self.shared_uar()?;
        let command = create_cq(&CqFields {
            log_entries: log,
            uar_page: uar.page(),
            eqn: self.eqn,
            ring: ring_umem.place(),
            record: record_umem.place(),
        });
        let (object, answer) = Object::create(&self.open, self.mlx5, "completion queue", &command)?;
        let cqn = created(&answer);
        if let Some(channel) = &self.channel {
            channel.subscribe(&object, cqn, OF_CQ);
        }
        tracing::debug!(cqn, ?ring, ?record, "a completion queue by DevX");
        let object = CqObject::Devx { _object: object, _umems: [ring_umem, record_umem], _uar: uar };
        Ok(Cq { object, cqn, ring, record })
    }
}

/// A queue pair.
pub(in crate::direct) struct DevxQp {
    qpn: u32,
    record: Memory,
    // Dropped in this order.
    object: Object,
    _umems: [Umem; 2],
    uar: Option<Arc<Uar>>,
    domain: Arc<Domain>,
    devx: Arc<Devx>,
}

impl fmt::Debug for DevxQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x}", self.qpn)
    }
}

impl Drop for DevxQp {
    fn drop(&mut self) {
        let is_gone = self.object.destroy();
        match self.uar.take() {
            Some(uar) if is_gone => self.devx.uars.release(uar),
            // A register whose queue pair may live is not reused.
            kept => std::mem::forget(kept),
        }
    }
}

impl DevxQp {
    /// Creates a queue pair in RESET.
    pub(in crate::direct) fn create(
        devx: &Arc<Devx>,
        domain: &Arc<Domain>,
        cqs: &[Arc<Cq>; 2],
        request: &QpRequest,
        places: &Places,
    ) -> Result<(Self, Parts)> {
        devx.check("send queue blocks", request.log_sq, devx.limits.log_max_qp)?;
        devx.check("receive queue entries", request.log_rq, devx.limits.log_max_qp)?;
        // The send queue follows the receive queue at a block boundary.
        let rq_len = (request.rq_stride << request.log_rq).max(BB);
        let sq_len = BB << request.log_sq;
        let (rings, rings_umem) = pages(devx, OnGpu::SEND_QUEUE, rq_len + sq_len, places)?;
        let (record, record_umem) = record(devx, mlx5::QP_DBREC_SIZE, places)?;
        let uar = devx.uars.acquire()?;
        let doorbell = devx.registers.doorbell_of(&uar)?;
        let command = create_qp(&QpFields {
            pdn: devx.pdn(domain)?,
            send_cqn: cqs[0].cqn,
            recv_cqn: cqs[1].cqn,
            log_sq: request.log_sq,
            log_rq: (rq_len / request.rq_stride).ilog2(),
            log_rq_stride: (request.rq_stride / SEGMENT).ilog2(),
            uar_page: uar.page(),
            rings: rings_umem.place(),
            record: record_umem.place(),
        });
        let made = Object::create(&devx.open, devx.mlx5, "queue pair", &command);
        let (object, answer) = made.inspect_err(|_| devx.uars.release(uar.clone()))?;
        let qpn = created(&answer);
        if let Some(channel) = &devx.channel {
            channel.subscribe(&object, qpn, OF_QP);
        }
        tracing::debug!(qpn, ?rings, ?record, "a queue pair by DevX");
        let (rq, sq) = (rings.slice(0, rq_len)?, rings.slice(rq_len, sq_len)?);
        let qp = Self {
            qpn,
            record: record.clone(),
            object,
            _umems: [rings_umem, record_umem],
            uar: Some(uar),
            domain: domain.clone(),
            devx: devx.clone(),
        };
        Ok((qp, Parts { sq, rq, record, doorbell }))
    }

    /// Adds the queue pair's state in the card to an error.
    fn explain(&self, error: Error) -> Error {
        let Error::Verbs { call, subject, source, advice } = error else { return error };
        let state = match self.object.query(&query_qp(self.qpn)).map(|answer| queried_state(&answer)) {
            Ok(0) => "RST",
            Ok(1) => "INIT",
            Ok(2) => "RTR",
            Ok(3) => "RTS",
            Ok(6) => "ERR",
            Ok(_) => "another state",
            Err(_) => "a state that it does not tell",
        };
        let subject = format!("{subject} of QP {:#x}, which the card has in {state}", self.qpn);
        Error::Verbs { call, subject, source, advice }
    }
}

impl QpObject for DevxQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn has_failed(&self) -> bool {
        /// ERR in the firmware's numbering.
        const ERR: u32 = 6;
        let answer = self.object.query(&query_qp(self.qpn));
        answer.map_or(true, |answer| queried_state(&answer) == ERR)
    }

    fn modify(&self, from: QpState, psn: u32, attr: &QpAttr) -> Result<()> {
        let to = attr.state.unwrap_or(from);
        let open = &self.devx.open;
        let (raw, given) = open.step(None, psn, attr)?;
        let route = match &attr.remote {
            None => None,
            Some(remote) => {
                let link = open.port().link;
                let kind = steps::known_kind(link, open.gid(), open.name())?;
                let is_ethernet = link == crate::LinkLayer::Ethernet;
                let mac =
                    if is_ethernet { resolve(&self.domain, raw.ah_attr, remote, 0)?.rmac } else { [0; 6] };
                let udp_port = udp_port(self.qpn, remote.qpn);
                Some(Route { attr: raw.ah_attr, link, kind, mac, udp_port })
            }
        };
        let command = steps::command(self.qpn, (from, to), &raw, given, route.as_ref());
        self.object.modify(&command).map_err(|error| self.explain(error))?;
        if to == QpState::RESET {
            // The card restarts at index 0.
            self.record.fill(0, self.record.len(), 0)?;
            self.record.flush()?;
        }
        Ok(())
    }
}
