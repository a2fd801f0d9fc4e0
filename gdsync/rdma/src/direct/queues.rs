//! Queues of a card in host memory, as verbs objects.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{
    mlx5dv_cq, mlx5dv_obj, mlx5dv_obj_type, mlx5dv_qp, mlx5dv_qp_create_flags, mlx5dv_qp_init_attr,
    mlx5dv_qp_init_attr_mask,
};
use rdma_core_sys::verbs::{
    ibv_cq, ibv_cq_ex_to_cq, ibv_cq_init_attr_ex, ibv_cq_init_attr_mask, ibv_create_cq_attr_flags,
    ibv_create_cq_ex, ibv_qp, ibv_qp_init_attr_ex, ibv_qp_init_attr_mask, ibv_qp_type,
};

use super::registers::{Registers, ThreadDomain};
use super::rings::RingDomain;
use super::{Cq, CqObject, Parts, QpObject};
use crate::Raw;
use crate::explain::{Asked, Call, Memlock, failed, failed_last};
use crate::{Domain, Open};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{Places, QpAttr, QpRequest, QpState};
use mlx5_ring::{self as mlx5, BB, CQE_SIZE, INITIAL_CQE};

/// The verbs object of a completion queue, whose ring is read directly: libmlx5 does not poll it. Dropped after the queue pairs that
/// use it, and before the domain of its memory.
pub(super) struct VerbsCq {
    open: Arc<Open>,
    raw: Raw<ibv_cq>,
    domain: RingDomain,
}

impl Drop for VerbsCq {
    fn drop(&mut self) {
        // SAFETY: created here, destroyed only here, after its queue pairs.
        let errno = unsafe { self.open.verbs().ibv_destroy_cq(self.raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(device = self.open.name(), errno, "a completion queue was not destroyed");
        }
    }
}

/// Checks a created verbs object; prefers the error of the ring allocator.
fn made<T>(raw: *mut T, domain: &RingDomain, error: impl FnOnce() -> Error) -> Result<NonNull<T>> {
    // First, because it reads `errno`.
    NonNull::new(raw).ok_or_else(|| {
        let error = error();
        domain.take_failure().unwrap_or(error)
    })
}

impl VerbsCq {
    /// Creates a queue with at least `1 << log` entries.
    pub(super) fn create(mlx5: &Mlx5, base: &Arc<Domain>, log: u32, places: &Places) -> Result<Cq> {
        let open = base.open();
        let domain = RingDomain::new(base, None, places)?;
        let entries = (1u32 << log) - 1;
        let mut attr = ibv_cq_init_attr_ex::zeroed();
        // The driver adds one and rounds up to a power of two.
        attr.cqe = entries.max(1);
        attr.comp_mask = ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_FLAGS
            | ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_PD;
        // Each posted request has a reserved CQE slot.
        attr.flags = ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        attr.parent_domain = domain.raw().as_ptr();
        // SAFETY: the device is open and the attributes are initialized.
        let raw = unsafe { ibv_create_cq_ex(open.context().as_ptr(), &raw mut attr) };
        let raw = made(ibv_cq_ex_to_cq(raw), &domain, || {
            let most = u64::try_from(open.attr().max_cqe).unwrap_or(0);
            let errno = std::io::Error::last_os_error().raw_os_error();
            if errno == Some(libc::EINVAL) && u64::from(entries) <= most {
                return Error::Unsupported {
                    what: "a completion queue in memory of the application",
                    by: "the installed libmlx5",
                    fix: "install rdma-core 31 or newer, 33 for virtual functions; GDSYNC_PATH=proxy works without",
                };
            }
            let call = Call::CreateCq { entries: entries.into(), most, memlock: Memlock::here() };
            failed_last("ibv_create_cq_ex", open.name(), &call)
        })?;
        Self { open: open.clone(), raw: Raw(raw), domain }.read(mlx5, log)
    }

    pub(super) fn raw(&self) -> NonNull<ibv_cq> {
        *self.raw
    }

    /// Finds its ring and initializes the CQEs for waits.
    fn read(self, mlx5: &Mlx5, log: u32) -> Result<Cq> {
        let mut out = mlx5dv_cq::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.cq.r#in = self.raw.as_ptr();
        object.cq.out = &raw mut out;
        init(mlx5, &self.open, &mut object, mlx5dv_obj_type::MLX5DV_OBJ_CQ)?;
        let refuse = |why: String| Err(Error::Device { device: self.open.name().to_owned(), why });
        let (size, count) = (out.cqe_size as usize, out.cqe_cnt as usize);
        if size != CQE_SIZE {
            return refuse(format!("its completions have {size} bytes, 64 are needed: unset MLX5_CQE_SIZE"));
        }
        if !count.is_power_of_two() || count < 1 << log {
            return refuse(format!(
                "libmlx5 made a completion queue of {count} entries where {} were asked for",
                1 << log
            ));
        }
        let ring = self.domain.find(out.buf, count * CQE_SIZE, "completion queue")?;
        let record = self.domain.find(out.dbrec.cast(), mlx5::CQ_DBREC_SIZE, "doorbell record")?;
        // rdma-core leaves owner 0, which would satisfy waits of the first lap. The card writes nothing before a queue
        // pair leaves INIT.
        first_lap(&ring)?;
        Ok(Cq { object: CqObject::Verbs(self), cqn: out.cqn, ring, record })
    }
}

fn init(mlx5: &Mlx5, open: &Open, object: &mut mlx5dv_obj, kind: mlx5dv_obj_type) -> Result<()> {
    // SAFETY: the object and the output match the object type.
    let errno = unsafe { mlx5.mlx5dv_init_obj(object, kind) };
    if errno == 0 { Ok(()) } else { Err(failed("mlx5dv_init_obj", open.name(), &Call::Other, errno)) }
}

/// A queue pair of the card.
pub(super) struct VerbsQp {
    raw: Raw<ibv_qp>,
    qpn: u32,
    /// Q_Key of a datagram queue pair.
    qkey: Option<u32>,
    domain: Option<RingDomain>,
    thread_domain: Option<ThreadDomain>,
    registers: Arc<Registers>,
    base: Arc<Domain>,
}

impl fmt::Debug for VerbsQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x}", self.qpn)
    }
}

impl Drop for VerbsQp {
    fn drop(&mut self) {
        let open = self.base.open();
        // SAFETY: created here, destroyed only here.
        let errno = unsafe { open.verbs().ibv_destroy_qp(self.raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(qp = ?self, errno, "a queue pair was not destroyed");
            // A register whose queue pair may live is not reused.
            std::mem::forget((self.domain.take(), self.thread_domain.take()));
        }
        drop(self.domain.take());
        if let Some(thread_domain) = self.thread_domain.take() {
            self.registers.release(thread_domain);
        }
    }
}

/// Blocks that libmlx5 reserves per request of a queue pair that may bind memory windows.
const BLOCKS_PER_REQUEST: u32 = 4;

impl VerbsQp {
    /// Creates a queue pair in RESET with at least the requested send queue.
    pub(super) fn create(
        mlx5: &Mlx5,
        base: &Arc<Domain>,
        registers: &Arc<Registers>,
        cqs: [NonNull<ibv_cq>; 2],
        request: &QpRequest,
        places: &Places,
    ) -> Result<(Self, Parts)> {
        let wanted = 1u32 << request.log_sq;
        let mut sends = wanted.div_ceil(BLOCKS_PER_REQUEST);
        loop {
            let made = Self::attempt(mlx5, base, registers, cqs, request, sends, places)?;
            // Other releases may reserve less.
            if made.1.sq.len() / BB >= wanted as usize || sends >= wanted {
                return Ok(made);
            }
            sends *= 2;
        }
    }

    fn attempt(
        mlx5: &Mlx5,
        base: &Arc<Domain>,
        registers: &Arc<Registers>,
        [send_cq, recv_cq]: [NonNull<ibv_cq>; 2],
        request: &QpRequest,
        sends: u32,
        places: &Places,
    ) -> Result<(Self, Parts)> {
        let open = base.open();
        let thread_domain = registers.acquire();
        let domain = RingDomain::new(base, thread_domain.as_ref().map(ThreadDomain::td), places)?;
        let receives = 1u32 << request.log_rq;
        let recv_sges = u32::try_from(request.rq_stride / mlx5::SEGMENT).unwrap_or(u32::MAX);
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        attr.send_cq = send_cq.as_ptr();
        attr.recv_cq = recv_cq.as_ptr();
        attr.cap.max_send_wr = sends;
        attr.cap.max_recv_wr = receives;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = recv_sges;
        attr.qp_type = if request.qkey.is_some() { ibv_qp_type::IBV_QPT_UD } else { ibv_qp_type::IBV_QPT_RC };
        attr.sq_sig_all = 1;
        attr.comp_mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD;
        attr.pd = domain.raw().as_ptr();
        let mut special = mlx5dv_qp_init_attr::zeroed();
        special.comp_mask = mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS;
        // Payload always goes to memory, even if it fits in the CQE.
        special.create_flags = mlx5dv_qp_create_flags::MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE;
        // SAFETY: the device is open and the attributes are initialized.
        let raw = unsafe { mlx5.mlx5dv_create_qp(open.context().as_ptr(), &raw mut attr, &raw mut special) };
        let raw = made(raw, &domain, || {
            let limit = |most: i32| u64::try_from(most).unwrap_or(0);
            let asked = |what, value: u32, most| Asked { what, value: value.into(), most: limit(most) };
            let asked = vec![
                asked("max_send_wr", sends, open.attr().max_qp_wr),
                asked("max_recv_wr", receives, open.attr().max_qp_wr),
                asked("max_recv_sge", recv_sges, open.attr().max_sge),
            ];
            failed_last("mlx5dv_create_qp", open.name(), &Call::CreateQp { asked, memlock: Memlock::here() })
        })?;
        // SAFETY: `qp` was just created.
        let qpn = unsafe { (*raw.as_ptr()).qp_num };
        let qp = Self {
            raw: Raw(raw),
            qpn,
            qkey: request.qkey,
            domain: Some(domain),
            thread_domain,
            registers: registers.clone(),
            base: base.clone(),
        };
        let parts = qp.read(mlx5, request)?;
        Ok((qp, parts))
    }

    /// Finds its rings and doorbell register.
    fn read(&self, mlx5: &Mlx5, request: &QpRequest) -> Result<Parts> {
        let open = self.base.open();
        let mut out = mlx5dv_qp::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.qp.r#in = self.raw.as_ptr();
        object.qp.out = &raw mut out;
        init(mlx5, open, &mut object, mlx5dv_obj_type::MLX5DV_OBJ_QP)?;
        let domain = self.domain.as_ref().expect("only taken when it is dropped");
        let strides = (out.sq.stride as usize, out.rq.stride as usize);
        if strides != (BB, request.rq_stride) {
            let why = format!(
                "its queues have strides of {} and {} bytes where {BB} and {} are needed",
                strides.0, strides.1, request.rq_stride
            );
            return Err(Error::Device { device: open.name().to_owned(), why });
        }
        let ring = |at: *mut c_void, count: u32, stride: usize, what| {
            if !count.is_power_of_two() {
                let why = format!("libmlx5 made a {what} of {count} entries, which is no power of two");
                return Err(Error::Device { device: open.name().to_owned(), why });
            }
            domain.find(at, count as usize * stride, what)
        };
        Ok(Parts {
            sq: ring(out.sq.buf, out.sq.wqe_cnt, BB, "send queue")?,
            rq: ring(out.rq.buf, out.rq.wqe_cnt, strides.1, "receive queue")?,
            record: domain.find(out.dbrec.cast(), mlx5::QP_DBREC_SIZE, "doorbell record")?,
            doorbell: self.registers.doorbell(out.bf.reg)?,
        })
    }
}

impl QpObject for VerbsQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn has_failed(&self) -> bool {
        // SAFETY: the queue pair lives until `self` is dropped.
        unsafe { self.base.open().has_failed(self.raw.as_ptr()) }
    }

    fn modify(&self, from: QpState, psn: u32, attr: &QpAttr) -> Result<()> {
        // As libibverbs knows it: programs change it by the raw queue pair too.
        // SAFETY: the queue pair lives until `self` is dropped, and the caller locks out other changes.
        let known = unsafe { (*self.raw.as_ptr()).state };
        let from = u8::try_from(known.0).map_or(from, QpState);
        // SAFETY: the queue pair lives until `self` is dropped.
        unsafe { self.base.open().modify(self.raw.as_ptr(), self.qpn, self.qkey, psn, from, attr) }
    }

    fn raw(&self) -> Option<NonNull<ibv_qp>> {
        Some(*self.raw)
    }

    fn writes_in_order(&self) -> Option<bool> {
        // SAFETY: the queue pair lives until `self` is dropped.
        unsafe { self.base.open().writes_in_order(self.raw.as_ptr()) }
    }
}

/// Initializes all CQEs for waits of the first lap.
pub(super) fn first_lap(ring: &Memory) -> Result<()> {
    (0..ring.len() / CQE_SIZE).try_for_each(|slot| ring.write(slot * CQE_SIZE, &INITIAL_CQE))
}
