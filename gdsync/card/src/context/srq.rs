//! Shared receive queues.

use std::sync::Arc;

use gdsync_soft::CardSrq;
use rustix::io::Errno;

use super::device::{MAX_QP_WR, MAX_SRQ_SGE};
use super::memory::ring;
use super::{Context, Pd, Result};
use crate::abi::{
    ib_uverbs_create_srq, ib_uverbs_create_srq_resp, ib_uverbs_destroy_srq, ib_uverbs_destroy_srq_resp,
    ib_uverbs_modify_srq, ib_uverbs_query_srq, ib_uverbs_query_srq_resp, mlx5_ib_create_srq,
    mlx5_ib_create_srq_resp,
};
use crate::command::Command;
use crate::hca::{EventSource, Hca};
use crate::user::User;

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    hca: &'static Hca,
    pub(super) srqn: u32,
    source: Arc<EventSource>,
    max_wr: u32,
    max_sge: u32,
    _pd: Arc<Pd>,
}

impl Drop for Srq {
    fn drop(&mut self) {
        self.hca.owners.srqs.remove(self.srqn);
        self.hca.card.destroy_srq(self.srqn);
    }
}

/// `IB_SRQ_MAX_WR`
const MAX_WR: u32 = 1;
/// `IB_SRQ_LIMIT`
const LIMIT: u32 = 1 << 1;
/// Bytes of a segment of a WQE: the link to the next one, or a scatter entry.
const SEGMENT: usize = 16;

impl Context {
    pub(super) fn create_srq(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_create_srq = command.request()?;
        command.check_response::<ib_uverbs_create_srq_resp>()?;
        let driver: mlx5_ib_create_srq = command.driver_request::<ib_uverbs_create_srq, _>();
        let ib_uverbs_create_srq { max_wr, max_sge, .. } = request;
        if max_wr >= MAX_QP_WR || max_sge > MAX_SRQ_SGE || driver.flags != 0 {
            return Err(Errno::INVAL);
        }
        // As libmlx5 lays it out (`mlx5_ib_create_srq` of the kernel): one entry is never used.
        let entries = (max_wr as usize + 1).next_power_of_two();
        let stride = (SEGMENT * (1 + max_sge as usize)).next_power_of_two().max(2 * SEGMENT);
        let pd = self.pds.get(request.pd_handle)?;
        let memory = ring(driver.buf_addr, entries * stride, 64)?;
        let record = ring(driver.db_addr, 8, 8)?;
        let source = self.event_source(request.user_handle)?;
        let made = self.hca.card.create_srq(CardSrq { ring: memory, stride, record, is_cyclic: false });
        let srqn = made.map_err(|_| Errno::NOMEM)?;
        self.hca.owners.srqs.add(srqn, &source);
        let number = |n: usize| u32::try_from(n).map_err(|_| Errno::INVAL);
        let srq = Srq {
            hca: self.hca,
            srqn,
            source,
            max_wr: number(entries - 1)?,
            max_sge: number(stride / SEGMENT - 1)?,
            _pd: pd,
        };
        let srq_handle = self.new_handle();
        let core = ib_uverbs_create_srq_resp { srq_handle, max_wr: srq.max_wr, max_sge: srq.max_sge, srqn };
        command.respond_both(user, &core, &mlx5_ib_create_srq_resp { srqn, reserved: 0 })?;
        self.srqs.add(srq_handle, Arc::new(srq));
        Ok(())
    }

    pub(super) fn modify_srq(&self, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_modify_srq = command.request()?;
        let srq = self.srqs.get(request.srq_handle)?;
        if request.attr_mask & MAX_WR != 0 {
            return Err(Errno::INVAL);
        }
        if request.attr_mask & LIMIT != 0 {
            if request.srq_limit > srq.max_wr {
                return Err(Errno::INVAL);
            }
            self.hca.card.set_srq_limit(srq.srqn, request.srq_limit);
        }
        Ok(())
    }

    pub(super) fn query_srq(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_query_srq = command.request()?;
        let srq = self.srqs.get(request.srq_handle)?;
        let (max_wr, max_sge, srq_limit) = (srq.max_wr, srq.max_sge, self.hca.card.srq_limit(srq.srqn));
        command.respond(user, &ib_uverbs_query_srq_resp { max_wr, max_sge, srq_limit, reserved: 0 })
    }

    pub(super) fn destroy_srq(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_destroy_srq = command.request()?;
        command.check_response::<ib_uverbs_destroy_srq_resp>()?;
        let srq = self.srqs.remove(request.srq_handle)?;
        let source = srq.source.clone();
        drop(srq);
        command.respond(user, &ib_uverbs_destroy_srq_resp { events_reported: source.finish().asynchronous })
    }
}
