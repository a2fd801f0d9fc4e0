//! Queue pairs and address handles: made, queried, destroyed.

use std::sync::Arc;

use gdsync_device::memory::Memory;
use gdsync_device::mtu_bytes;
use gdsync_soft::{CardDoorbell, CardQp, CardTransport};
use mlx5_ring::QP_DBREC_SIZE;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::cq::Cq;
use super::device::{MAX_QP_WR, MAX_RECV_SGE, MAX_SGE, MTU};
use super::memory::ring;
use super::srq::Srq;
use super::{Context, Pd, Result};
use crate::abi::{
    Plain, ib_uverbs_create_ah, ib_uverbs_create_ah_resp, ib_uverbs_create_qp, ib_uverbs_create_qp_resp,
    ib_uverbs_destroy_ah, ib_uverbs_destroy_qp, ib_uverbs_destroy_qp_resp, ib_uverbs_ex_create_qp,
    ib_uverbs_ex_create_qp_resp, ib_uverbs_modify_qp, ib_uverbs_query_qp, ib_uverbs_query_qp_resp, length,
    mlx5_ib_create_ah_resp, mlx5_ib_create_qp, mlx5_ib_create_qp_resp,
};
use crate::address::Port;
use crate::command::Command;
use crate::hca::{EventSource, Hca, PortNetwork};
use crate::user::User;

/// `enum ib_qp_type`, those that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QpType {
    Rc = 2,
    Ud = 4,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) hca: &'static Hca,
    pub(super) qpn: u32,
    pub(super) kind: QpType,
    pub(super) source: Arc<EventSource>,
    /// The response to its creation.
    created: ib_uverbs_create_qp_resp,
    /// Entries of the receive queue and of each scatter list, for QUERY_QP.
    receives: (u32, u32),
    sq_sig_all: u8,
    /// The attributes set so far, for QUERY_QP.
    pub(super) attr: Mutex<ib_uverbs_modify_qp>,
    _pd: Arc<Pd>,
    _cqs: [Arc<Cq>; 2],
    _srq: Option<Arc<Srq>>,
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.hca.owners.qps.remove(self.qpn);
        self.hca.card.destroy_qp(self.qpn);
    }
}

/// An address handle. The card needs none: libmlx5 writes the address into each request.
#[derive(Debug)]
pub(super) struct Ah {
    _pd: Arc<Pd>,
}

/// Flags that change nothing here: `MLX5_QP_FLAG_SCATTER_CQE`, `MLX5_QP_FLAG_BFREG_INDEX`,
/// `MLX5_QP_FLAG_ALLOW_SCATTER_CQE`, `MLX5_QP_FLAG_UAR_PAGE_INDEX`.
const KNOWN_FLAGS: u32 = 1 << 1 | 1 << 3 | 1 << 8 | UAR_PAGE_INDEX;
const UAR_PAGE_INDEX: u32 = 1 << 10;

impl Context {
    pub(super) fn create_qp(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_create_qp = command.request()?;
        command.check_response::<ib_uverbs_create_qp_resp>()?;
        // The extended form has the same fields behind the response.
        let wanted = ib_uverbs_ex_create_qp {
            user_handle: request.user_handle,
            pd_handle: request.pd_handle,
            send_cq_handle: request.send_cq_handle,
            recv_cq_handle: request.recv_cq_handle,
            srq_handle: request.srq_handle,
            max_send_wr: request.max_send_wr,
            max_recv_wr: request.max_recv_wr,
            max_send_sge: request.max_send_sge,
            max_recv_sge: request.max_recv_sge,
            max_inline_data: request.max_inline_data,
            sq_sig_all: request.sq_sig_all,
            qp_type: request.qp_type,
            is_srq: request.is_srq,
            ..Default::default()
        };
        self.make_qp::<ib_uverbs_create_qp, _>(user, command, &wanted, |core| core)
    }

    pub(super) fn create_qp_extended(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_ex_create_qp = command.request()?;
        if request.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        if request.create_flags != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let response_length = length::<ib_uverbs_ex_create_qp_resp>();
        self.make_qp::<ib_uverbs_ex_create_qp, _>(user, command, &request, |base| {
            ib_uverbs_ex_create_qp_resp { base, comp_mask: 0, response_length }
        })
    }

    /// Both forms of the command: the driver's part is behind `C`, and the core's response is made of that of the old form.
    fn make_qp<C: Plain, R: Plain>(
        &self,
        user: &dyn User,
        command: &Command<'_>,
        wanted: &ib_uverbs_ex_create_qp,
        core: impl FnOnce(ib_uverbs_create_qp_resp) -> R,
    ) -> Result<()> {
        let driver: mlx5_ib_create_qp = command.driver_request::<C, _>();
        let kind = match wanted.qp_type {
            2 => QpType::Rc,
            4 => QpType::Ud,
            // UC, raw packets, XRC, and what a driver names (DCT, DCI).
            3 | 8..=10 | 0xff => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        };
        if driver.flags & !KNOWN_FLAGS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let excessive = wanted.max_send_wr > MAX_QP_WR || wanted.max_recv_wr > MAX_QP_WR;
        if excessive || wanted.max_send_sge > MAX_SGE || wanted.max_recv_sge > MAX_RECV_SGE {
            return Err(Errno::INVAL);
        }
        let pd = self.pds.get(wanted.pd_handle)?;
        let send_cq = self.cqs.get(wanted.send_cq_handle)?;
        let recv_cq = self.cqs.get(wanted.recv_cq_handle)?;
        let srq = (wanted.is_srq != 0).then(|| self.srqs.get(wanted.srq_handle)).transpose()?;
        let rings = Rings::of(&driver)?;
        let page = (driver.flags & UAR_PAGE_INDEX != 0).then_some(driver.bfreg_index);
        let doorbell = self.doorbell(page)?;
        let receives = match driver.rq_wqe_count {
            0 => (0, 0),
            entries => (entries, (1 << driver.rq_wqe_shift) / 16),
        };
        let port = self.hca.port;
        let transport = match kind {
            QpType::Rc => CardTransport::Connection,
            QpType::Ud => CardTransport::Datagrams {
                mtu: mtu_bytes(MTU).unwrap_or(256),
                network: Arc::new(PortNetwork(port)),
            },
        };
        let qp = CardQp {
            pdn: pd.pdn,
            send_cqn: send_cq.cqn,
            recv_cqn: recv_cq.cqn,
            sq: rings.sq,
            rq: rings.rq,
            rq_stride: rings.stride,
            record: rings.record,
            doorbell,
            uidx: driver.uidx,
            transport,
            srqn: srq.as_ref().map(|srq| srq.srqn),
            flushes_by_doorbell: self.hca.modes.flush_by_doorbell,
        };
        let source = self.event_source(wanted.user_handle)?;
        let qpn = self.hca.card.create_qp(qp).map_err(|_| Errno::NOMEM)?;
        self.hca.owners.qps.add(qpn, &source);
        let created = ib_uverbs_create_qp_resp {
            qp_handle: self.new_handle(),
            qpn,
            max_send_wr: wanted.max_send_wr,
            max_recv_wr: wanted.max_recv_wr,
            max_send_sge: wanted.max_send_sge,
            max_recv_sge: wanted.max_recv_sge,
            max_inline_data: wanted.max_inline_data,
            reserved: 0,
        };
        let qp = Qp {
            hca: self.hca,
            qpn,
            kind,
            source,
            created,
            receives,
            sq_sig_all: wanted.sq_sig_all,
            attr: Mutex::default(),
            _pd: pd,
            _cqs: [send_cq, recv_cq],
            _srq: srq,
        };
        // No doorbell register was chosen: the program has its own.
        let driver = mlx5_ib_create_qp_resp { bfreg_index: u32::MAX, ..Default::default() };
        command.respond_both(user, &core(created), &driver)?;
        self.qps.add(created.qp_handle, Arc::new(qp));
        Ok(())
    }

    /// Where the doorbells of a new queue pair are found: `page` is that of its register, unless others share it.
    pub(super) fn doorbell(&self, page: Option<u32>) -> Result<CardDoorbell> {
        if self.hca.is_next_deaf() {
            // One that nobody knows.
            let lost = Memory::alloc(8).and_then(|memory| memory.word64(0)).map_err(|_| Errno::NOMEM)?;
            return Ok(CardDoorbell::Register(lost));
        }
        match page.filter(|_| self.hca.modes.reads_registers()) {
            Some(page) => self.registers(page).map(CardDoorbell::Shared),
            None => Ok(CardDoorbell::Record),
        }
    }

    pub(super) fn query_qp(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_query_qp = command.request()?;
        command.check_response::<ib_uverbs_query_qp_resp>()?;
        let qp = self.qps.get(request.qp_handle)?;
        let state = qp.hca.card.state(qp.qpn).map_err(|_| Errno::INVAL)?.0;
        let attr = *qp.attr.lock();
        // The program knows its send queue better, and libmlx5 answers by itself.
        let (caps, (max_recv_wr, max_recv_sge)) = (qp.created, qp.receives);
        let response = ib_uverbs_query_qp_resp {
            dest: attr.dest,
            alt_dest: attr.alt_dest,
            max_send_wr: caps.max_send_wr,
            max_recv_wr,
            max_send_sge: caps.max_send_sge,
            max_recv_sge,
            max_inline_data: caps.max_inline_data,
            qkey: attr.qkey,
            rq_psn: attr.rq_psn,
            sq_psn: attr.sq_psn,
            dest_qp_num: attr.dest_qp_num,
            qp_access_flags: attr.qp_access_flags,
            pkey_index: attr.pkey_index,
            qp_state: state,
            cur_qp_state: state,
            path_mtu: attr.path_mtu,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            port_num: attr.port_num,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            sq_sig_all: qp.sq_sig_all,
            ..Default::default()
        };
        command.respond(user, &response)
    }

    pub(super) fn destroy_qp(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_destroy_qp = command.request()?;
        command.check_response::<ib_uverbs_destroy_qp_resp>()?;
        let qp = self.qps.remove(request.qp_handle)?;
        let source = qp.source.clone();
        drop(qp);
        command.respond(user, &ib_uverbs_destroy_qp_resp { events_reported: source.finish().asynchronous })
    }

    pub(super) fn create_ah(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_create_ah = command.request()?;
        command.check_response::<ib_uverbs_create_ah_resp>()?;
        let pd = self.pds.get(request.pd_handle)?;
        self.check_path(&request.attr.into())?;
        let ah_handle = self.new_handle();
        let [.., a, b, c] = request.attr.grh.dgid;
        let peer = Port { link: self.hca.port.link, number: u32::from_be_bytes([0, a, b, c]) };
        let driver = mlx5_ib_create_ah_resp {
            response_length: length::<mlx5_ib_create_ah_resp>(),
            dmac: peer.mac(),
            reserved: [0; 6],
        };
        command.respond_both(user, &ib_uverbs_create_ah_resp { ah_handle }, &driver)?;
        self.ahs.add(ah_handle, Arc::new(Ah { _pd: pd }));
        Ok(())
    }

    pub(super) fn destroy_ah(&self, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_destroy_ah = command.request()?;
        self.ahs.remove(request.ah_handle).map(drop)
    }
}

/// The rings of a queue pair as libmlx5 lays them out: receives first, sends behind.
struct Rings {
    sq: Memory,
    rq: Memory,
    stride: usize,
    record: Memory,
}

impl Rings {
    fn of(driver: &mlx5_ib_create_qp) -> Result<Self> {
        let size = |count: u32, shift: u32, most: usize| {
            let (count, stride) = (count as usize, 1usize.checked_shl(shift).unwrap_or(0));
            let valid = count == 0 || count.is_power_of_two() && (16..=512).contains(&stride);
            (valid && count <= most).then_some((count, stride)).ok_or(Errno::INVAL)
        };
        // The record counts to 2^16, where a full ring would look empty.
        let (blocks, block) = size(driver.sq_wqe_count, 6, 1 << 15)?;
        let (receives, stride) = size(driver.rq_wqe_count, driver.rq_wqe_shift, 1 << 15)?;
        let sends = driver.buf_addr.checked_add((receives * stride) as u64).ok_or(Errno::FAULT)?;
        let record = ring(driver.db_addr, QP_DBREC_SIZE, 8)?;
        // The card replaces an empty ring: a queue that the program does not use.
        let part = |addr, len| match len {
            0 => record.slice(0, 0).map_err(|_| Errno::FAULT),
            _ => ring(addr, len, 64),
        };
        let (rq, sq) = (part(driver.buf_addr, receives * stride)?, part(sends, blocks * block)?);
        Ok(Self { sq, rq, stride, record })
    }
}
