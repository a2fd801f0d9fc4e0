//! Queue pairs: created with the sizes that libmlx5 gives them (`mlx5_calc_wq_size` and `create_cq` in rdma-core's
//! `providers/mlx5/verbs.c`) and a doorbell each, described, destroyed.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{env, ptr, thread};

use gdsync::hca::{CardDoorbell, CardQp, CardTransport};
use gdsync::memory::{Memory, Word64, host_page};
use gdsync::verbs::{QpAttr, QpState};
use parking_lot::Mutex;
use rdma_core_sys::mlx5::{
    MLX5DV_RES_TYPE_DBR, MLX5DV_RES_TYPE_QP, mlx5dv_qp, mlx5dv_qp_bf, mlx5dv_qp_comp_mask,
    mlx5dv_qp_create_flags as mlx5_flags, mlx5dv_qp_init_attr, mlx5dv_qp_init_attr_mask as mlx5_mask,
    mlx5dv_qp_ring,
};
use rdma_core_sys::verbs::{
    ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_create_flags,
    ibv_qp_create_send_ops_flags as ops, ibv_qp_init_attr, ibv_qp_init_attr_ex,
    ibv_qp_init_attr_mask as mask, ibv_qp_state, ibv_qp_type,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::domain::{Buffer, Domain, Wanted};
use crate::errno;
use crate::errno::complain;
use crate::hca::{Concerned, Hca, Quirk};
use crate::region::PAGE;
use crate::work::Work;

/// `struct ibv_qp`, and what is behind it.
#[repr(C)]
pub(crate) struct Qp {
    base: UnsafeCell<ibv_qp>,
    pub(crate) qpn: u32,
    pub(crate) hca: &'static Hca,
    pub(crate) size: QpSize,
    init: ibv_qp_init_attr,
    /// Payload may come in CQEs: its rings are not given away.
    scatters: bool,
    pub(crate) work: Mutex<Work>,
    /// Takes it to ERR in a moment.
    late: Mutex<Option<JoinHandle<()>>>,
    /// What was given so far.
    pub(crate) attr: Mutex<ibv_qp_attr>,
    /// Its doorbell.
    register: Register,
    /// The one that the application is told of in its place, where nobody looks.
    dead_register: Option<Register>,
    // Given back in this order.
    record: Buffer,
    rings: Buffer,
}

impl Qp {
    /// # Safety
    /// It must be a queue pair of this library.
    pub(crate) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Self {
        // SAFETY: the caller vouches for it.
        unsafe { &*qp.cast() }
    }

    /// The application sees this state.
    pub(crate) fn show_state(&self, state: ibv_qp_state) {
        // SAFETY: the place is in a cell, and applications change queue pairs from one thread at a time.
        unsafe { (*self.base.get()).state = state };
    }

    pub(crate) fn max_send_sge(&self) -> u32 {
        self.init.cap.max_send_sge
    }

    pub(crate) fn signals_all(&self) -> bool {
        self.init.sq_sig_all != 0
    }

    pub(crate) fn sq(&self) -> Result<Memory, c_int> {
        self.rings.memory(self.size.send_offset(), (self.size.blocks * BLOCK) as usize)
    }

    pub(crate) fn rq(&self) -> Result<Memory, c_int> {
        self.rings.memory(0, self.size.send_offset())
    }

    pub(crate) fn record(&self) -> Result<Memory, c_int> {
        self.record.memory(0, 8)
    }

    /// Writes a doorbell.
    pub(crate) fn write_doorbell(&self, doorbell: u64) {
        self.register.word().store(doorbell);
    }

    /// Has the HCA look at the queue pair. Without locks: what it finds may be an event of this or another one.
    pub(crate) fn have_looked(&self) {
        self.hca.card.ring(self.qpn);
    }

    /// Has the HCA take it to ERR within 10 ms.
    pub(crate) fn fail_late(&self) {
        let (hca, qpn) = (self.hca, self.qpn);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let delay = Duration::from_nanos(u64::from(since.subsec_nanos()) * 7919 % 10_000_000);
        let fail = move || {
            thread::sleep(delay);
            // It may have failed by itself meanwhile.
            _ = hca.card.modify_qp(qpn, &QpAttr::to(QpState::ERR), None, delay);
        };
        *self.late.lock() = Some(thread::spawn(fail));
    }

    /// Waits until the HCA has done that.
    pub(crate) fn finish(&self) {
        if let Some(late) = self.late.lock().take() {
            _ = late.join();
        }
    }

    /// It was reset: what was posted is forgotten, and what had completed is not told.
    pub(crate) fn forget(&self) {
        // SAFETY: completion queues outlive their queue pairs.
        let sends = unsafe { Cq::of(self.init.send_cq) }.count(self.qpn)[0];
        // SAFETY: as above.
        let receives = unsafe { Cq::of(self.init.recv_cq) }.count(self.qpn)[1];
        self.work.lock().forget([sends, receives]);
    }

    /// Whether payload may come in CQEs.
    pub(crate) fn scatters(&self) -> bool {
        self.scatters
    }

    /// `mlx5dv_init_obj`, where `asked` is what the application would know besides.
    pub(crate) fn describe(&self, asked: mlx5dv_qp_comp_mask) -> mlx5dv_qp {
        let ring = |offset: usize, wqe_cnt: u32, stride: u32| mlx5dv_qp_ring {
            buf: self.rings.at(offset).cast(),
            wqe_cnt,
            stride,
        };
        mlx5dv_qp {
            dbrec: self.record.at(0).cast(),
            sq: ring(self.size.send_offset(), self.size.blocks, BLOCK),
            rq: ring(0, self.size.receives, self.size.stride),
            bf: mlx5dv_qp_bf {
                reg: self.dead_register.as_ref().unwrap_or(&self.register).at().cast(),
                size: 256,
            },
            comp_mask: asked.intersection(mlx5dv_qp_comp_mask::MLX5DV_QP_MASK_UAR_MMAP_OFFSET),
            ..mlx5dv_qp::zeroed()
        }
    }
}

/// The provider's own flags. Returns whether payload may come in CQEs.
fn check_mlx5(mlx5: Option<&mlx5dv_qp_init_attr>) -> Result<bool, c_int> {
    let mut scatters = env::var_os("MLX5_SCATTER_TO_CQE").is_none_or(|value| value != "0");
    if let Some(mlx5) = mlx5 {
        if !mlx5_mask::MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS.contains(mlx5.comp_mask) {
            return Err(libc::EINVAL);
        }
        if mlx5.comp_mask.contains(mlx5_mask::MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS) {
            let flags = mlx5.create_flags;
            let (disable, allow) = (
                mlx5_flags::MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE,
                mlx5_flags::MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE,
            );
            if flags.contains(disable | allow) || !(disable | allow).contains(flags) {
                return Err(libc::EINVAL);
            }
            scatters = (scatters || flags.contains(allow)) && !flags.contains(disable);
        }
    }
    if scatters && mlx5.is_some() {
        complain(
            "a queue pair may scatter payload to CQEs: create it with MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE",
        );
        return Err(libc::ENOTSUP);
    }
    Ok(scatters)
}

/// `create_qp` of the provider.
pub(crate) unsafe fn create(
    context: *mut ibv_context,
    attr: &mut ibv_qp_init_attr_ex,
    mlx5: Option<&mlx5dv_qp_init_attr>,
) -> Result<Box<Qp>, c_int> {
    let known = mask::IBV_QP_INIT_ATTR_PD
        | mask::IBV_QP_INIT_ATTR_CREATE_FLAGS
        | mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let has_flags = attr.comp_mask.contains(mask::IBV_QP_INIT_ATTR_CREATE_FLAGS);
    if !known.contains(attr.comp_mask)
        || !attr.comp_mask.contains(mask::IBV_QP_INIT_ATTR_PD)
        || attr.pd.is_null()
        || has_flags && attr.create_flags != ibv_qp_create_flags::empty()
    {
        return Err(libc::EINVAL);
    }
    if attr.qp_type != ibv_qp_type::IBV_QPT_RC || !attr.srq.is_null() {
        return Err(libc::EOPNOTSUPP);
    }
    let scatters = check_mlx5(mlx5)?;
    let has_ops = attr.comp_mask.contains(mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
    let size = QpSize::of(&attr.cap, has_ops.then_some(attr.send_ops_flags))?;
    if attr.send_cq.is_null() || attr.recv_cq.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for the context.
    let owner = unsafe { Context::of(context) };
    // SAFETY: the caller vouches for the domain.
    let domain = unsafe { Domain::of(attr.pd) };
    // SAFETY: the caller vouches for the queues.
    let send_cq = unsafe { Cq::of(attr.send_cq) };
    // SAFETY: as above.
    let recv_cq = unsafe { Cq::of(attr.recv_cq) };

    let wanted = Wanted {
        len: size.bytes().next_multiple_of(size.align()),
        align: size.align(),
        resource: MLX5DV_RES_TYPE_QP,
        cleared: true,
    };
    let rings = Buffer::alloc(Some(domain), wanted)?;
    let wanted = Wanted { len: 8, align: 8, resource: MLX5DV_RES_TYPE_DBR, cleared: true };
    let record = Buffer::alloc(Some(domain), wanted)?;
    let register = Register::alloc()?;
    let dead_register = Quirk::Deaf.is_on().then(Register::alloc).transpose()?;
    // A queue that nobody asked for is one that nobody fills.
    let ring = |offset: usize, len: u32, least: usize| {
        let bytes = len as usize;
        if bytes > 0 { rings.memory(offset, bytes) } else { Memory::alloc(least).map_err(|_| libc::ENOMEM) }
    };
    let rq_stride = size.stride.max(16);
    let parts = CardQp {
        pdn: domain.pdn(),
        send_cqn: send_cq.cqn,
        recv_cqn: recv_cq.cqn,
        sq: ring(size.send_offset(), size.blocks * BLOCK, BLOCK as usize)?,
        rq: ring(0, size.receives * size.stride, rq_stride as usize)?,
        rq_stride: rq_stride as usize,
        record: record.memory(0, 8)?,
        doorbell: CardDoorbell::Register(register.word()),
        uidx: 0,
        transport: CardTransport::Connection,
        srqn: None,
        flushes_by_doorbell: Quirk::FlushesByDoorbell.is_on(),
    };
    let qpn = owner.hca.card.create_qp(parts).map_err(|_| libc::ENOMEM)?;

    attr.cap = size.cap;
    for cq in [send_cq, recv_cq] {
        cq.users.add();
    }
    domain.add_user();
    let base = ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd: attr.pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        handle: qpn,
        qp_num: qpn,
        state: ibv_qp_state::IBV_QPS_RESET,
        qp_type: attr.qp_type,
        ..ibv_qp::zeroed()
    };
    let init = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: ptr::null_mut(),
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    let qp = Box::new(Qp {
        base: UnsafeCell::new(base),
        qpn,
        hca: owner.hca,
        size,
        init,
        scatters,
        work: Mutex::default(),
        late: Mutex::default(),
        attr: Mutex::new(ibv_qp_attr { cap: attr.cap, ..ibv_qp_attr::zeroed() }),
        register,
        dead_register,
        record,
        rings,
    });
    let element = ptr::from_ref(&*qp).addr();
    owner.hca.roster.qps.add(qpn, Concerned { events: owner.events.clone(), element });
    Ok(qp)
}

/// `ibv_create_qp_ex`
pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: the caller vouches for the attributes.
    let attr = unsafe { &mut *attr };
    // SAFETY: as above.
    errno::hand_out(unsafe { create(context, attr, None) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller vouches for the domain.
    let context = unsafe { (*pd).context };
    // SAFETY: the caller vouches for the attributes.
    let given = unsafe { &mut *attr };
    let mut extended = ibv_qp_init_attr_ex {
        qp_context: given.qp_context,
        send_cq: given.send_cq,
        recv_cq: given.recv_cq,
        srq: given.srq,
        cap: given.cap,
        qp_type: given.qp_type,
        sq_sig_all: given.sq_sig_all,
        comp_mask: mask::IBV_QP_INIT_ATTR_PD,
        pd,
        ..ibv_qp_init_attr_ex::zeroed()
    };
    // SAFETY: as above.
    let made = unsafe { create(context, &mut extended, None) };
    given.cap = extended.cap;
    errno::hand_out(made)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_qp(
    qp: &Qp,
    attr: *mut ibv_qp_attr,
    _attr_mask: ibv_qp_attr_mask,
    init_attr: &mut MaybeUninit<ibv_qp_init_attr>,
) -> c_int {
    let Ok(state) = qp.hca.card.state(qp.qpn) else { return libc::EINVAL };
    let state = ibv_qp_state(u32::from(state.0));
    qp.show_state(state);
    let answer = ibv_qp_attr { qp_state: state, cur_qp_state: state, ..*qp.attr.lock() };
    // SAFETY: the caller vouches for the place.
    unsafe { attr.write(answer) };
    init_attr.write(qp.init);
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller vouches for it: a box of this module.
    let qp = unsafe { Box::from_raw(qp.cast::<Qp>()) };
    qp.finish();
    qp.hca.card.destroy_qp(qp.qpn);
    qp.hca.roster.qps.remove(qp.qpn);
    let ibv_qp { send_cq, recv_cq, pd, .. } = qp.base.into_inner();
    for cq in [send_cq, recv_cq] {
        // SAFETY: a completion queue with queue pairs cannot be destroyed.
        unsafe { Cq::of(cq) }.users.remove();
    }
    drop(qp.record);
    drop(qp.rings);
    // SAFETY: a domain with queue pairs cannot be freed.
    unsafe { Domain::of(pd) }.remove_user();
    0
}

/// Bytes of a doorbell page of the card, of which a page of the host may have several.
const UAR: usize = 4096;
/// Where the first doorbell lies in its page.
const REGISTER: usize = 0x800;

static IDLE: Mutex<Vec<Memory>> = Mutex::new(Vec::new());

/// A page with one doorbell in use.
#[derive(Debug)]
pub(crate) struct Register(Memory);

impl Register {
    /// # Errors
    /// `ENOMEM`
    pub(crate) fn alloc() -> Result<Self, c_int> {
        let mut idle = IDLE.lock();
        if idle.is_empty() {
            let page = Memory::alloc(host_page()).map_err(|_| libc::ENOMEM)?;
            let uars = (0..page.len() / UAR).rev();
            idle.extend(uars.map(|n| page.slice(n * UAR, UAR).expect("it lies in the page")));
        }
        Ok(Self(idle.pop().expect("a page of the host has at least one")))
    }

    /// The address of the page.
    pub(crate) fn page(&self) -> *mut u8 {
        self.0.addr() as *mut u8
    }

    /// The address of the doorbell.
    pub(crate) fn at(&self) -> *mut u8 {
        self.page().wrapping_add(REGISTER)
    }

    /// The doorbell.
    pub(crate) fn word(&self) -> Word64 {
        self.0.word64(REGISTER).expect("a doorbell lies in its page")
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        IDLE.lock().push(self.0.clone());
    }
}

/// Bytes of a block of the send queue.
pub(crate) const BLOCK: u32 = 64;
/// Bytes of a CQE.
pub(crate) const CQE: usize = 64;
/// Bytes of the largest send.
const MAX_SEND: u32 = 1024;
/// Bytes of the largest receive.
const MAX_RECEIVE: u32 = 512;
/// Blocks of the largest send queue.
const MAX_BLOCKS: u32 = 32768;
/// Entries of the largest receive queue.
pub(crate) const MAX_RECEIVES: u32 = 32768;
/// Entries of the largest completion queue.
pub(crate) const MAX_CQES: u32 = 1 << 22;
/// Buffers of the largest send.
pub(crate) const MAX_SGES: u8 = 30;

/// What a queue pair is laid out as: the receive queue, and the send queue behind it.
#[derive(Clone, Copy)]
pub(crate) struct QpSize {
    /// Blocks of the send queue.
    pub(crate) blocks: u32,
    /// Entries of the receive queue.
    pub(crate) receives: u32,
    /// Bytes of an entry.
    pub(crate) stride: u32,
    /// What the application is told that it has.
    pub(crate) cap: ibv_qp_cap,
}

/// Bytes of a send beside its buffers, for the largest of the operations (`_sq_overhead`).
fn overhead(operations: ops) -> u32 {
    let (control, remote, atomic) = (16, 16, 16);
    let (umr, key, list) = (48, 64, 64);
    let mut size = control;
    let rdma = ops::IBV_QP_EX_WITH_RDMA_WRITE
        | ops::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | ops::IBV_QP_EX_WITH_RDMA_READ;
    if operations.intersects(rdma) {
        size = size.max(control + remote);
    }
    if operations
        .intersects(ops::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | ops::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
    {
        size = size.max(control + remote + atomic);
    }
    if operations.intersects(ops::IBV_QP_EX_WITH_BIND_MW | ops::IBV_QP_EX_WITH_LOCAL_INV) {
        size = size.max(control + umr + key + list);
    }
    size
}

/// The operations of a queue pair whose creator names none.
fn all_operations() -> ops {
    ops::all().difference(ops::IBV_QP_EX_WITH_TSO | ops::IBV_QP_EX_WITH_ATOMIC_WRITE)
}

fn power_of_two(value: u32) -> Result<u32, c_int> {
    value.checked_next_power_of_two().ok_or(libc::EINVAL)
}

impl QpSize {
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn of(cap: &ibv_qp_cap, operations: Option<ops>) -> Result<Self, c_int> {
        let mut size = Self {
            blocks: 0,
            receives: 0,
            stride: 1,
            cap: ibv_qp_cap { max_send_wr: 0, max_recv_wr: 0, max_recv_sge: 0, ..*cap },
        };
        if cap.max_send_wr > 0 {
            size.sends(cap, overhead(operations.unwrap_or_else(all_operations)))?;
        }
        if cap.max_recv_wr > 0 {
            size.receives(cap)?;
        }
        Ok(size)
    }

    fn sends(&mut self, cap: &ibv_qp_cap, overhead: u32) -> Result<(), c_int> {
        if cap.max_send_sge > (MAX_SEND - overhead) / 16 || cap.max_inline_data > MAX_SEND {
            return Err(libc::EINVAL);
        }
        let in_line = if cap.max_inline_data > 0 {
            overhead + (4 + cap.max_inline_data).next_multiple_of(16)
        } else {
            0
        };
        let wqe = (overhead + 16 * cap.max_send_sge).max(in_line);
        if wqe > MAX_SEND || cap.max_send_wr > 0x7fff_ffff / MAX_SEND {
            return Err(libc::EINVAL);
        }
        let wqe = wqe.next_multiple_of(BLOCK);
        let bytes = power_of_two(cap.max_send_wr * wqe)?;
        self.blocks = bytes / BLOCK;
        self.cap.max_send_wr = bytes / wqe;
        self.cap.max_inline_data = wqe - overhead - 4;
        if self.blocks > MAX_BLOCKS { Err(libc::EINVAL) } else { Ok(()) }
    }

    fn receives(&mut self, cap: &ibv_qp_cap) -> Result<(), c_int> {
        if cap.max_recv_wr > MAX_RECEIVES || cap.max_recv_sge > MAX_RECEIVE / 16 {
            return Err(libc::EINVAL);
        }
        self.stride = power_of_two(16 * cap.max_recv_sge.max(1))?;
        let bytes = (power_of_two(cap.max_recv_wr)? * self.stride).max(BLOCK);
        self.receives = bytes / self.stride;
        self.cap.max_recv_wr = self.receives;
        self.cap.max_recv_sge = self.stride / 16;
        Ok(())
    }

    /// Where the send queue begins.
    pub(crate) fn send_offset(&self) -> usize {
        self.receives as usize * self.stride as usize
    }

    /// Bytes of both queues.
    pub(crate) fn bytes(&self) -> usize {
        self.send_offset() + self.blocks as usize * BLOCK as usize
    }

    /// The alignment that an allocator is asked for (`mlx5_set_custom_qp_alignment`).
    pub(crate) fn align(&self) -> usize {
        let pages = self.bytes().next_multiple_of(PAGE).next_power_of_two();
        let block = if self.blocks > 0 { BLOCK as usize } else { 1 };
        block.max(self.stride as usize).max(pages / 64)
    }
}

/// Entries of a completion queue for which `cqe` are asked.
///
/// # Errors
/// `EINVAL`.
pub(crate) fn cq_entries(cqe: u32) -> Result<u32, c_int> {
    if cqe == 0 || cqe >= MAX_CQES {
        return Err(libc::EINVAL);
    }
    power_of_two(cqe + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region as pages;

    #[test]
    fn pages_that_nobody_uses_stay_mapped() {
        let registers: Vec<_> = (0..8).map(|_| Register::alloc().unwrap()).collect();
        let addrs: Vec<_> = registers.iter().map(|register| register.page().addr()).collect();
        drop(registers);
        assert!(addrs.iter().all(|addr| pages::pin(*addr, UAR, true) == Ok(())));
    }
}
