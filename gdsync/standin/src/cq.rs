//! Completion queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdsync::hca::GpuNudge;
use gdsync::memory::Memory;
use gdsync::mlx5;
use parking_lot::Mutex;
use rdma_core_sys::mlx5::{
    MLX5DV_RES_TYPE_CQ, MLX5DV_RES_TYPE_DBR, mlx5dv_cq, mlx5dv_cq_init_attr, mlx5dv_cq_init_attr_mask,
};
use rdma_core_sys::verbs::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_cq_init_attr_mask as mask,
    ibv_create_cq_attr_flags as flags, ibv_create_cq_wc_flags as wc_flags, ibv_pd,
};

use crate::buffer::{Buffer, Wanted};
use crate::complaint::complain;
use crate::context::Context;
use crate::domain::{Domain, Users};
use crate::errno;
use crate::hca::{Concerned, Hca};
use crate::notify::{Channel, DoorbellWatch};
use crate::pages::PAGE;
use crate::quirks::Quirk;
use crate::sizes::{self, CQE};

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
    pub(crate) notice: Option<Arc<DoorbellWatch>>,
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
    let notice = channel.map(|channel| Arc::new(DoorbellWatch::new(channel.events.clone())));
    let has_domain = attr.comp_mask.contains(mask::IBV_CQ_INIT_ATTR_MASK_PD);
    let domain_of = if has_domain { attr.parent_domain } else { ptr::null_mut() };
    // SAFETY: the caller vouches for the domain.
    let domain = has_domain.then(|| unsafe { Domain::of(domain_of) });
    if domain.is_some_and(|domain| !domain.is_parent()) {
        return Err(libc::EINVAL);
    }
    let entries = sizes::cq_entries(attr.cqe)?;
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

    let nudger = notice.clone().map(|notice| notice as Arc<dyn GpuNudge>);
    let cqn = owner.hca.card.create_cq(cqes, words, ignore_overrun, nudger);
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
        notice,
        domain: domain_of,
        record,
        ring,
    });
    let element = ptr::from_ref(&*cq).addr();
    if let Some(notice) = &cq.notice {
        notice.element.store(element, Ordering::SeqCst);
    }
    owner.hca.roster.add_cq(cqn, Concerned { events: owner.events.clone(), element });
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

/// # Safety
/// As its manual page asks.
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

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the caller vouches for the queue.
    if let Err(errno) = unsafe { Cq::of(cq) }.users.none() {
        return errno;
    }
    // SAFETY: it is a box of this module that nothing uses any more.
    let cq = unsafe { Box::from_raw(cq.cast::<Cq>()) };
    cq.hca.card.destroy_cq(cq.cqn);
    cq.hca.roster.remove_cq(cq.cqn);
    if let Some(notice) = &cq.notice {
        notice.events.forget(ptr::from_ref(&*cq).addr());
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
