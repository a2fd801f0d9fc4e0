//! Completion queues, and `ibv_poll_cq`.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdsync::hca::{CardCq, GpuNudge};
use gdsync::memory::Memory;
use gdsync::mlx5;
use gdsync::mlx5::{CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, CqeOpcode, Opcode, Syndrome};
use parking_lot::Mutex;
use rdma_core_sys::mlx5::{
    MLX5DV_RES_TYPE_CQ, MLX5DV_RES_TYPE_DBR, mlx5dv_cq, mlx5dv_cq_init_attr, mlx5dv_cq_init_attr_mask,
};
use rdma_core_sys::verbs::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_cq_init_attr_mask as mask,
    ibv_create_cq_attr_flags as flags, ibv_create_cq_wc_flags as wc_flags, ibv_pd, ibv_wc, ibv_wc_flags,
    ibv_wc_opcode as opcode, ibv_wc_status as status,
};

use crate::context::Context;
use crate::domain::{Buffer, Domain, Users, Wanted};
use crate::errno::complain;
use crate::events::{Channel, DoorbellWatch};
use crate::hca::{Concerned, Hca, Quirk};
use crate::qp::{CQE, Qp};
use crate::region::PAGE;
use crate::{errno, qp};

/// What the provider writes into the last byte of every CQE: no operation, and the owner of the first lap.
const FRESH: u8 = 0xf0;

/// `struct ibv_cq_ex`, and what is behind it.
#[repr(C)]
pub(crate) struct Cq {
    base: UnsafeCell<ibv_cq_ex>,
    pub(crate) users: Users,
    pub(crate) cqn: u32,
    pub(crate) entries: u32,
    pub(crate) hca: &'static Hca,
    /// Completions that were polled.
    pub(crate) polled: Mutex<u64>,
    /// Its ring was given away: it is polled by its owner.
    described: AtomicBool,
    channel: *mut ibv_comp_channel,
    pub(crate) watch: Option<Arc<DoorbellWatch>>,
    domain: *mut ibv_pd,
    // Given back in this order.
    record: Buffer,
    ring: Buffer,
}

impl Cq {
    /// # Safety
    /// It must be a queue of this library.
    pub(crate) unsafe fn of<'a>(cq: *mut ibv_cq) -> &'a Self {
        // SAFETY: the caller vouches for it.
        unsafe { &*cq.cast() }
    }

    /// Whether its ring was given away.
    pub(crate) fn is_described(&self) -> bool {
        self.described.load(Ordering::Relaxed)
    }

    pub(crate) fn ring(&self) -> Result<Memory, c_int> {
        self.ring.memory(0, self.entries as usize * CQE)
    }

    /// Tells the HCA how many completions were polled.
    pub(crate) fn consumed(&self, polled: u64) {
        if let Ok(record) = self.record.memory(0, 8)
            && let Ok(word) = record.atomic32(mlx5::CQ_DBREC_CI)
        {
            word.store(mlx5::cq_ci_record(polled), Ordering::Release);
        }
    }

    /// `mlx5dv_init_obj`: from now on its owner polls it, and may look at the owner bit alone.
    pub(crate) fn describe(&self) -> mlx5dv_cq {
        self.described.store(true, Ordering::Relaxed);
        self.hca.card.read_by_owner(self.cqn);
        mlx5dv_cq {
            buf: self.ring.at(0).cast(),
            dbrec: self.record.at(0).cast(),
            cqe_cnt: self.entries,
            cqe_size: 64,
            cq_uar: ptr::null_mut(),
            cqn: self.cqn,
            comp_mask: 0,
        }
    }
}

/// `create_cq` of the provider.
pub(crate) unsafe fn create(
    context: *mut ibv_context,
    attr: &ibv_cq_init_attr_ex,
    mlx5: Option<&mlx5dv_cq_init_attr>,
) -> Result<Box<Cq>, c_int> {
    let domain_mask = match Quirk::OldLibrary.is_on() {
        true => mask::empty(),
        false => mask::IBV_CQ_INIT_ATTR_MASK_PD,
    };
    let known = mask::IBV_CQ_INIT_ATTR_MASK_FLAGS | domain_mask;
    if !known.contains(attr.comp_mask) {
        return Err(libc::EINVAL);
    }
    let mut ignore_overrun = false;
    if attr.comp_mask.contains(mask::IBV_CQ_INIT_ATTR_MASK_FLAGS) {
        ignore_overrun = attr.flags.contains(flags::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN);
        let known = flags::IBV_CREATE_CQ_ATTR_SINGLE_THREADED | flags::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        if !known.contains(attr.flags) {
            return Err(libc::EINVAL);
        }
    }
    if !wc_flags::IBV_CREATE_CQ_SUP_WC_FLAGS.contains(attr.wc_flags) {
        return Err(libc::ENOTSUP);
    }
    if let Some(mlx5) = mlx5
        && mlx5.comp_mask != mlx5dv_cq_init_attr_mask::empty()
        && !(mlx5.comp_mask == mlx5dv_cq_init_attr_mask::MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE
            && mlx5.cqe_size == 64)
    {
        complain("a completion queue is asked for with compressed, padded or large CQEs");
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for the context.
    let owner = unsafe { Context::of(context) };
    if attr.comp_vector != 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for the channel.
    let channel = (!attr.channel.is_null()).then(|| unsafe { Channel::of(attr.channel) });
    let watch = channel.map(|channel| Arc::new(DoorbellWatch::new(channel.events.clone())));
    let has_domain = attr.comp_mask.contains(mask::IBV_CQ_INIT_ATTR_MASK_PD);
    let domain_of = if has_domain { attr.parent_domain } else { ptr::null_mut() };
    // SAFETY: the caller vouches for the domain.
    let domain = has_domain.then(|| unsafe { Domain::of(domain_of) });
    if domain.is_some_and(|domain| !domain.is_parent()) {
        return Err(libc::EINVAL);
    }
    let entries = qp::cq_entries(attr.cqe)?;
    let bytes = entries as usize * CQE;
    let wanted = Wanted {
        len: bytes.next_multiple_of(PAGE),
        align: PAGE,
        resource: MLX5DV_RES_TYPE_CQ,
        cleared: false,
    };
    let ring = Buffer::alloc(domain, wanted)?;
    let cqes = ring.memory(0, bytes)?;
    for n in 0..entries as usize {
        cqes.write(n * CQE + CQE - 1, &[FRESH]).map_err(|_| libc::EFAULT)?;
    }
    let wanted = Wanted { len: 8, align: 8, resource: MLX5DV_RES_TYPE_DBR, cleared: false };
    let record = Buffer::alloc(domain, wanted)?;
    let words = record.memory(0, 8)?;
    words.write(0, &[0; 8]).map_err(|_| libc::EFAULT)?;

    let nudges = watch.clone().map(|watch| watch as Arc<dyn GpuNudge>);
    let cq = CardCq { ring: cqes, entry: CQE, record: words, ignore_overrun, nudges, channel: None };
    let cqn = owner.hca.card.create_cq(cq).map_err(|_| libc::EFAULT)?;
    channel.inspect(|channel| channel.users.add());
    let base = ibv_cq_ex {
        context,
        channel: attr.channel,
        cq_context: attr.cq_context,
        handle: cqn,
        cqe: entries.cast_signed() - 1,
        ..ibv_cq_ex::zeroed()
    };
    domain.inspect(|domain| domain.add_user());
    let cq = Box::new(Cq {
        base: UnsafeCell::new(base),
        users: Users::default(),
        cqn,
        entries,
        hca: owner.hca,
        polled: Mutex::default(),
        described: AtomicBool::new(false),
        channel: attr.channel,
        watch,
        domain: domain_of,
        record,
        ring,
    });
    let element = ptr::from_ref(&*cq).addr();
    if let Some(watch) = &cq.watch {
        watch.element.store(element, Ordering::SeqCst);
    }
    owner.hca.roster.cqs.add(cqn, Concerned { events: owner.events.clone(), element });
    Ok(cq)
}

/// `ibv_create_cq_ex`
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the caller vouches for the attributes.
    let attr = unsafe { &*attr };
    // SAFETY: as above.
    errno::hand_out(unsafe { create(context, attr, None) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let (Ok(cqe), Ok(comp_vector)) = (u32::try_from(cqe), u32::try_from(comp_vector)) else {
        return errno::null(libc::EINVAL);
    };
    let attr = ibv_cq_init_attr_ex { cqe, cq_context, channel, comp_vector, ..ibv_cq_init_attr_ex::zeroed() };
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { create(context, &attr, None) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the caller vouches for the queue.
    if let Err(errno) = unsafe { Cq::of(cq) }.users.none() {
        return errno;
    }
    // SAFETY: it is a box of this module that nothing uses any more.
    let cq = unsafe { Box::from_raw(cq.cast::<Cq>()) };
    cq.hca.card.destroy_cq(cq.cqn);
    cq.hca.roster.cqs.remove(cq.cqn);
    if let Some(watch) = &cq.watch {
        watch.events.forget(ptr::from_ref(&*cq).addr());
    }
    let (domain, channel) = (cq.domain, cq.channel);
    drop(cq);
    if !channel.is_null() {
        // SAFETY: a channel with queues cannot be destroyed.
        unsafe { Channel::of(channel) }.users.remove();
    }
    if !domain.is_null() {
        // SAFETY: a domain with queues cannot be freed.
        unsafe { Domain::of(domain) }.remove_user();
    }
    0
}

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
            if let Some(wc) = self.hca.roster.qps.with(cqe.qpn, |qp| {
                // SAFETY: it stays on the list while it exists.
                unsafe { Qp::of(qp as *mut _) }.completed(&cqe)
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

fn meaning(cqe: &Cqe) -> (opcode, ibv_wc_flags) {
    let plain = ibv_wc_flags::empty();
    match (cqe.opcode, cqe.send_opcode) {
        (CqeOpcode::RESP_WR_IMM, _) => (opcode::IBV_WC_RECV_RDMA_WITH_IMM, ibv_wc_flags::IBV_WC_WITH_IMM),
        (CqeOpcode::RESP_SEND_IMM, _) => (opcode::IBV_WC_RECV, ibv_wc_flags::IBV_WC_WITH_IMM),
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
