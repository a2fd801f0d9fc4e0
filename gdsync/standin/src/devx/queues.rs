//! Completion queues and queue pairs in registered memory: CREATE_CQ, CREATE_QP, QUERY_QP, and the transitions.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use gdsync::Error;
use gdsync::hca::{CardCq, CardDoorbell, CardQp, CardTransport, Gid};
use gdsync::verbs::{Access, QpAddress, QpAttr, QpState};
use parking_lot::Mutex;
use rdma_core_sys::mlx5::devx_set;

use crate::context::{ACTIVE_MTU, PORT, ROUTED, has_atomics};
use crate::cq::Cq;
use crate::devx::memory::{Page, Umem};
use crate::devx::{EQN, Input, LOG_MAX_CQ, LOG_MAX_QP, LONG, Refusal, SHORT, long_enough, refuse};
use crate::domain;
use crate::domain::Users;
use crate::errno::complain;
use crate::hca::{Hca, Quirk};
use crate::modify::MAX_RD_ATOMIC;

/// `MLX5_CMD_OP_CREATE_CQ`
pub(super) const CREATE_CQ: u32 = 0x400;

/// Those there are.
static ALL: Mutex<BTreeMap<u32, Arc<Users>>> = Mutex::new(BTreeMap::new());

/// A completion queue in registered memory.
pub(super) struct DevxCq {
    cqn: u32,
    hca: &'static Hca,
    _umems: [Arc<Umem>; 2],
}

impl DevxCq {
    pub(super) fn create(hca: &'static Hca, input: &Input<'_>) -> Result<Self, Refusal> {
        let context = 0x80;
        input.require(&[
            (context + 0x06, 1, 1, "dbr_umem_valid"),
            (context + 0x08, 3, 0, "cqe_sz"),
            (context + 0x0b, 1, 0, "cc"),
            (context + 0x11, 1, 0, "cqe_comp_en"),
            (context + 0x54, 6, 0, "page_offset"),
            (context + 0xc3, 5, 0, "log_page_size"),
            (context + 0xb8, 8, EQN, "c_eqn"),
            (0x2e0, 1, 1, "cq_umem_valid"),
        ])?;
        let log = input.get(context + 0x63, 5);
        if log > LOG_MAX_CQ {
            return Err(refuse::limit(0x30, format!("log_cq_size is {log}")));
        }
        // Any page that there is: nobody arms the queue.
        Page::find(input.get(context + 0x68, 24))?;
        let ring_umem = Umem::find(input.get(0x2c0, 32))?;
        let record_umem = Umem::find(input.get(context + 0x20, 32))?;
        let ring = ring_umem.part(input.get64(0x280), 64 << log, 64)?;
        let record = record_umem.part(input.get64(context + 0x1c0), 8, 8)?;
        let ignore_overrun = input.get(context + 0x0e, 1) == 1;
        let cq = CardCq { ring, entry: 64, record, ignore_overrun, nudges: None, channel: None };
        let cqn = hca.card.create_cq(cq).map_err(|error| refuse::limit(0x31, error.to_string()))?;
        // Its owner alone polls it.
        hca.card.read_by_owner(cqn);
        ALL.lock().insert(cqn, Arc::default());
        Ok(Self { cqn, hca, _umems: [ring_umem, record_umem] })
    }

    pub(super) fn cqn(&self) -> u32 {
        self.cqn
    }

    /// It is to be destroyed.
    pub(super) fn leave(&self) -> Result<(), c_int> {
        let mut all = ALL.lock();
        if let Some(users) = all.get(&self.cqn) {
            users.none()?;
        }
        all.remove(&self.cqn);
        Ok(())
    }
}

impl Drop for DevxCq {
    fn drop(&mut self) {
        self.hca.card.destroy_cq(self.cqn);
    }
}

/// A queue that a queue pair uses, of either kind.
pub(super) struct Used {
    cqn: u32,
    hca: &'static Hca,
}

impl Used {
    pub(super) fn find(hca: &'static Hca, cqn: u32) -> Result<Self, Refusal> {
        let used = Self { cqn, hca };
        if used.with(Users::add).is_some() {
            return Ok(used);
        }
        // It is not counted, so not to be given back.
        std::mem::forget(used);
        Err(refuse::resource(0x31, format!("completion queue {cqn:#x} is not there")))
    }

    pub(super) fn cqn(&self) -> u32 {
        self.cqn
    }

    fn with(&self, f: impl Fn(&Users)) -> Option<()> {
        if let Some(users) = ALL.lock().get(&self.cqn) {
            f(users);
            return Some(());
        }
        self.hca.roster.cqs.with(self.cqn, |cq| {
            // SAFETY: it is in the list, so it is there.
            f(&unsafe { Cq::of(cq as *mut _) }.users);
            Some(())
        })
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        self.with(Users::remove);
    }
}

/// `MLX5_CMD_OP_CREATE_QP`
pub(super) const CREATE_QP: u32 = 0x500;
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
            doorbell: CardDoorbell::Register(doorbell),
            uidx: 0,
            transport: CardTransport::Connection,
            srqn: None,
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

const RST2INIT: u32 = 0x502;
const INIT2RTR: u32 = 0x503;
const RTR2RTS: u32 = 0x504;
const RTS2RTS: u32 = 0x505;
const TO_ERR: u32 = 0x507;
const TO_RST: u32 = 0x50a;
const INIT2INIT: u32 = 0x50e;

/// Optional parameters: rights, and the pause of a sender.
const RIGHTS: u32 = 1 << 1 | 1 << 2 | 1 << 3;
const RNR_TIMEOUT: u32 = 1 << 6;
/// Where the primary path begins.
const PATH: usize = CONTEXT + 0xc0;
/// How long a peer may take to be found.
const PATIENCE: Duration = Duration::from_secs(10);

/// Takes a queue pair through the step that the mailbox names.
pub(super) fn run(qp: &DevxQp, mailbox: &[u8]) -> Result<(), Refusal> {
    let input = &Input(mailbox);
    let opcode = input.opcode();
    let state = qp.hca.card.state(qp.qpn()).map_err(|_| refuse::state())?;
    let (from, to) = match opcode {
        RST2INIT => (QpState::RESET, QpState::INIT),
        INIT2INIT => (QpState::INIT, QpState::INIT),
        INIT2RTR => (QpState::INIT, QpState::RTR),
        RTR2RTS => (QpState::RTR, QpState::RTS),
        RTS2RTS => (QpState::RTS, QpState::RTS),
        TO_ERR => (state, QpState::ERR),
        TO_RST => (state, QpState::RESET),
        _ => return Err(refuse::operation(0x50, format!("command {opcode:#x} changes no queue pair"))),
    };
    if state != from {
        return Err(refuse::state());
    }
    let (mut attr, mut psn) = (QpAttr::to(to), None);
    if !matches!(opcode, TO_ERR | TO_RST) {
        if mailbox.len() < LONG {
            return Err(refuse::length(true));
        }
        input.require(&[(CONTEXT + 0x13, 2, 3, "pm_state")])?;
        let optional = input.get(0x80, 32);
        if optional & !(RIGHTS | RNR_TIMEOUT) != 0 {
            return Err(refuse::parameter(0x51, format!("opt_param_mask is {optional:#x}")));
        }
        if opcode == RST2INIT || optional & RIGHTS != 0 {
            attr = attr.access(rights(input)?);
        }
        if opcode == INIT2RTR || optional & RNR_TIMEOUT != 0 {
            attr = attr.min_rnr_timer(narrow(input.get(CONTEXT + 0x4a3, 5)));
        }
    }
    match opcode {
        RST2INIT => {
            input.require(&[
                (PATH + 0x128, 8, PORT.into(), "vhca_port_num"),
                (PATH + 0x10, 16, 0, "pkey_index"),
            ])?;
        }
        INIT2RTR => {
            input.require(&[(CONTEXT + 0x43, 5, 30, "log_msg_max")])?;
            let mtu = input.get(CONTEXT + 0x40, 3);
            if !(1..=ACTIVE_MTU.0).contains(&mtu) {
                return Err(refuse::parameter(0x52, format!("mtu is {mtu}")));
            }
            let outstanding = outstanding(input.get(CONTEXT + 0x488, 3))?;
            attr = attr.remote(remote(input)?).path_mtu(128 << mtu).max_dest_rd_atomic(outstanding);
        }
        RTR2RTS => {
            let outstanding = outstanding(input.get(CONTEXT + 0x388, 3))?;
            attr = attr
                .timeout(narrow(input.get(PATH + 0x40, 5)))
                .retry_cnt(narrow(input.get(CONTEXT + 0x38d, 3)))
                .rnr_retry(narrow(input.get(CONTEXT + 0x390, 3)))
                .max_rd_atomic(outstanding);
            psn = Some(input.get(CONTEXT + 0x3c8, 24));
        }
        _ => {}
    }
    qp.hca.card.modify_qp(qp.qpn(), &attr, psn, PATIENCE).map_err(|error| refused(&error))
}

/// A field of fewer than eight bits.
fn narrow(field: u32) -> u8 {
    u8::try_from(field).unwrap_or(u8::MAX)
}

/// READs and atomics, of which the field is the logarithm.
fn outstanding(log: u32) -> Result<u8, Refusal> {
    let count = 1u8.checked_shl(log).filter(|&count| count != 0 && count <= MAX_RD_ATOMIC);
    count.ok_or_else(|| refuse::limit(0x53, format!("2^{log} READs outstanding")))
}

fn rights(input: &Input<'_>) -> Result<Access, Refusal> {
    let mut access = Access::LOCAL_WRITE;
    let (read, write, atomic) = (0x490, 0x491, 0x492);
    access.set(Access::REMOTE_READ, input.get(CONTEXT + read, 1) == 1);
    access.set(Access::REMOTE_WRITE, input.get(CONTEXT + write, 1) == 1);
    if input.get(CONTEXT + atomic, 1) == 1 {
        if !has_atomics() {
            return Err(refuse::parameter(0x58, "rae is set: the device has no atomics"));
        }
        input.require(&[(CONTEXT + 0x48c, 4, 3, "atomic_mode")])?;
        access |= Access::REMOTE_ATOMIC;
    }
    Ok(access)
}

/// The peer that the path names.
fn remote(input: &Input<'_>) -> Result<QpAddress, Refusal> {
    let mut gid = [0; 16];
    for (n, byte) in gid.iter_mut().enumerate() {
        *byte = narrow(input.get(PATH + 0x80 + 8 * n, 8));
    }
    let mut mac = [0; 6];
    for (n, byte) in mac.iter_mut().enumerate() {
        *byte = narrow(input.get(PATH + 0x130 + 8 * n, 8));
    }
    input.require(&[
        (PATH + 0x128, 8, PORT.into(), "vhca_port_num"),
        (PATH + 0x48, 8, ROUTED.into(), "src_addr_index: GID index 1 is RoCE v2"),
    ])?;
    if input.get(PATH + 0x58, 8) == 0 {
        return Err(refuse::parameter(0x54, "a path with hop_limit 0 ends at the first router"));
    }
    if mac != domain::mac(&gid) {
        return Err(refuse::parameter(0x55, format!("rmac {mac:x?} is not that of the peer")));
    }
    if input.get(PATH + 0x110, 16) < 0xc000 {
        return Err(refuse::parameter(0x56, "udp_sport is below those of RoCE v2"));
    }
    let (qpn, psn) = (input.get(CONTEXT + 0xa8, 24), input.get(CONTEXT + 0x4a8, 24));
    Ok(QpAddress::new(Gid(gid), qpn, psn))
}

/// Why the HCA did not do it: a peer that is gone is no fault of the caller's.
fn refused(error: &Error) -> Refusal {
    match error {
        Error::Peer { .. } | Error::Deadline { .. } => {
            complain(format!("DevX: the peer of a queue pair: {error}"));
            refuse::state()
        }
        _ => refuse::parameter(0x57, error.to_string()),
    }
}
