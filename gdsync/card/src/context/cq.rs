//! Completion queues and completion channels.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use gdsync_device::memory::Memory;
use gdsync_soft::CardCq;
use mlx5_ring::CQ_DBREC_SIZE;
use rustix::io::Errno;

use super::device::{MAX_CQE, VECTORS};
use super::memory::ring;
use super::{Context, Events, Result};
use crate::abi::{
    Plain, ib_uverbs_create_comp_channel, ib_uverbs_create_comp_channel_resp, ib_uverbs_create_cq,
    ib_uverbs_create_cq_resp, ib_uverbs_destroy_cq, ib_uverbs_destroy_cq_resp, ib_uverbs_ex_create_cq,
    ib_uverbs_ex_create_cq_resp, ib_uverbs_resize_cq, ib_uverbs_resize_cq_resp, length, mlx5_ib_create_cq,
    mlx5_ib_create_cq_resp, mlx5_ib_resize_cq,
};
use crate::command::Command;
use crate::events::EventPipe;
use crate::hca::{EventKind, EventSource, Hca, Reported};
use crate::user::User;

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq {
    hca: &'static Hca,
    pub(super) cqn: u32,
    /// Bytes of an entry.
    entry: usize,
    source: Arc<EventSource>,
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.hca.owners.cqs.remove(self.cqn);
        self.hca.card.destroy_cq(self.cqn);
    }
}

/// `MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX`; the others ask for what is not there.
const UAR_PAGE_INDEX: u16 = 1 << 1;
/// `IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION`, `IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN`
const KNOWN_FLAGS: u32 = 1 | 1 << 1;

impl Context {
    pub(super) fn create_channel(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let _: ib_uverbs_create_comp_channel = command.request()?;
        command.check_response::<ib_uverbs_create_comp_channel_resp>()?;
        let (pipe, program) = EventPipe::new(8)?;
        command
            .respond(user, &ib_uverbs_create_comp_channel_resp { fd: program.as_raw_fd().cast_unsigned() })?;
        self.add_channel(Events::Completions, Arc::new(pipe), program);
        Ok(())
    }

    pub(super) fn create_cq(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_create_cq = command.request()?;
        command.check_response::<ib_uverbs_create_cq_resp>()?;
        let ib_uverbs_create_cq { user_handle, cqe, comp_vector, comp_channel, .. } = request;
        let wanted =
            ib_uverbs_ex_create_cq { user_handle, cqe, comp_vector, comp_channel, ..Default::default() };
        self.make_cq::<ib_uverbs_create_cq, _>(user, command, &wanted, |core| core)
    }

    pub(super) fn create_cq_extended(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_ex_create_cq = command.request()?;
        if request.comp_mask != 0 || request.reserved != 0 || self.hca.modes.no_cq_ex {
            return Err(Errno::INVAL);
        }
        if request.flags & !KNOWN_FLAGS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let response_length = length::<ib_uverbs_ex_create_cq_resp>();
        self.make_cq::<ib_uverbs_ex_create_cq, _>(user, command, &request, |base| {
            ib_uverbs_ex_create_cq_resp { base, comp_mask: 0, response_length }
        })
    }

    /// Both forms of the command: the driver's part is behind `C`, and the core's response is made of that of the old form.
    fn make_cq<C: Plain, R: Plain>(
        &self,
        user: &dyn User,
        command: &Command<'_>,
        wanted: &ib_uverbs_ex_create_cq,
        core: impl FnOnce(ib_uverbs_create_cq_resp) -> R,
    ) -> Result<()> {
        let driver: mlx5_ib_create_cq = command.driver_request::<C, _>();
        let entry = driver.cqe_size as usize;
        let odd = driver.flags & !UAR_PAGE_INDEX != 0 || driver.cqe_comp_en != 0;
        if odd || !matches!(entry, 64 | 128) || wanted.cqe > MAX_CQE || wanted.comp_vector >= VECTORS {
            return Err(Errno::INVAL);
        }
        let channel = match wanted.comp_channel {
            -1 => None,
            fd => Some(self.channel(Events::Completions, fd)?),
        };
        let buffer = buffer(driver.buf_addr, wanted.cqe, entry)?;
        let record = ring(driver.db_addr, CQ_DBREC_SIZE, 8)?;
        let source = self.event_source(wanted.user_handle)?;
        if let Some(channel) = &channel {
            source.subscribe(EventKind::Completions, channel, wanted.user_handle);
        }
        let cqn = self.hca.card.create_cq(CardCq {
            ring: buffer,
            entry,
            record,
            // UCX writes no consumer counters.
            ignore_overrun: true,
            nudges: None,
            channel: channel.map(|_| source.clone() as _),
        });
        let cqn = cqn.map_err(|_| Errno::NOMEM)?;
        self.hca.owners.cqs.add(cqn, &source);
        let (cq, cq_handle) = (Cq { hca: self.hca, cqn, entry, source }, self.new_handle());
        let core = core(ib_uverbs_create_cq_resp { cq_handle, cqe: wanted.cqe });
        command.respond_both(user, &core, &mlx5_ib_create_cq_resp { cqn, reserved: 0 })?;
        self.cqs.add(cq_handle, Arc::new(cq));
        Ok(())
    }

    pub(super) fn resize_cq(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_resize_cq = command.request()?;
        command.check_response::<ib_uverbs_resize_cq_resp>()?;
        let driver: mlx5_ib_resize_cq = command.driver_request::<ib_uverbs_resize_cq, _>();
        let cq = self.cqs.get(request.cq_handle)?;
        // libmlx5 does not change the size of entries.
        if !(1..=MAX_CQE).contains(&request.cqe) || usize::from(driver.cqe_size) != cq.entry {
            return Err(Errno::INVAL);
        }
        let buffer = buffer(driver.buf_addr, request.cqe, cq.entry)?;
        self.hca.card.resize_cq(cq.cqn, buffer).map_err(|_| Errno::INVAL)?;
        command.respond(user, &ib_uverbs_resize_cq_resp { cqe: request.cqe, reserved: 0 })
    }

    pub(super) fn destroy_cq(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_destroy_cq = command.request()?;
        command.check_response::<ib_uverbs_destroy_cq_resp>()?;
        let cq = self.cqs.remove(request.cq_handle)?;
        let source = cq.source.clone();
        drop(cq);
        let Reported { completions, asynchronous } = source.finish();
        let response = ib_uverbs_destroy_cq_resp {
            comp_events_reported: completions,
            async_events_reported: asynchronous,
        };
        command.respond(user, &response)
    }
}

/// The ring of a queue of more than `cqe` entries.
fn buffer(addr: u64, cqe: u32, entry: usize) -> Result<Memory> {
    ring(addr, (cqe as usize + 1).next_power_of_two() * entry, 64)
}
