//! mlx5 cards that read the rings directly, through verbs objects in our memory.
//!
//! libibverbs and libmlx5 create the queues and change their states; sends and waits do not call them. Queues in GPU
//! memory are created by firmware commands; see `devx`. Other queues lie in host memory, mapped for GPUs too. The
//! doorbell is a register of the card, which a GPU may write if the NVIDIA driver permits. So CPU threads and GPU
//! streams trigger and wait in the same way.
//!
//! # Deviations from libmlx5's defaults
//!
//! - Payload never goes into a CQE (`MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE`): waiters expect it in memory.
//! - CQEs start with owner 1, not 0, which would satisfy the first waits at once.
//! - Overrun is not checked: each posted request has a reserved CQE slot.
//! - Each queue pair has its own doorbell register (a thread domain), while the card has some left.
//!
//! Completions raise no events; waiters poll. A thread reads asynchronous events and records failures without a CQE as
//! the error of the queue pair.

mod devx;
mod queues;
mod registers;
mod rings;

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mlx5_ring::AddressVector;
use parking_lot::Mutex;
use rdma_core_sys::Mlx5;
use rdma_core_sys::verbs::{ibv_ah, ibv_ah_attr, ibv_cq, ibv_pd, ibv_qp};

use self::devx::{Devx, DevxQp, EventChannel, Object, Umem};
use self::queues::{VerbsCq, VerbsQp};
use self::registers::{Registers, Uar};
use crate::explain::{Call, failed, last_errno};
use crate::{Domain, Event, EventSource, Events, FailedCq, HealthMap, Objects, Open};
use gdsync_device::CqEvent;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64};
use gdsync_device::{
    Access, CqParts, Gid, MrKeys, NO_DATAGRAMS, OnGpu, Places, Provider, QpAddress, QpAttr, QpParts,
    QpRequest, QpState, TransferPath, random_psn,
};
use rdma_core_sys::mlx5::{mlx5_wqe_av, mlx5dv_ah, mlx5dv_obj, mlx5dv_obj_type};

/// An mlx5 card.
pub struct Direct {
    /// First field, so that its thread ends before the rest is dropped. `None` on a device that the application has opened:
    /// it reads the events.
    _events: Option<Events>,
    shared: Arc<Shared>,
    mlx5: &'static Mlx5,
    objects: Objects,
    cqs: Mutex<HashMap<u32, Arc<Cq>>>,
    registers: Arc<Registers>,
    /// GPUs that ring doorbells, by context.
    admitted: Mutex<Vec<usize>>,
    /// Created for the first queue in GPU memory.
    devx: Mutex<Option<Arc<Devx>>>,
    /// Event channel of DevX objects.
    channel: Option<Arc<EventChannel>>,
    /// Domain for the memory of completion queues, which belong to none.
    base: Arc<Domain>,
    open: Arc<Open>,
    description: String,
    wire: String,
}

/// State of the event thread.
#[derive(Debug, Default)]
struct Shared {
    healths: HealthMap,
    qps: Mutex<HashMap<u32, Arc<Qp>>>,
}

impl Shared {
    /// Queue pair of an event, if it concerns one.
    fn qp_of(&self, event: Event) -> Option<Arc<Qp>> {
        let Event::QueuePair { qpn, .. } = event else { return None };
        self.qps.lock().get(&qpn).cloned()
    }
}

/// A completion queue.
struct Cq {
    /// First field: dropped before the memory.
    object: CqObject,
    cqn: u32,
    ring: Memory,
    record: Memory,
}

/// The object in the card.
enum CqObject {
    Verbs(VerbsCq),
    Devx { _object: Object, _umems: [Umem; 2], _uar: Arc<Uar> },
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CQ {:#x}", self.cqn)
    }
}

impl Cq {
    fn is(&self, failed: FailedCq) -> bool {
        match (&self.object, failed) {
            (CqObject::Verbs(cq), FailedCq::Object(at)) => cq.raw().addr().get() == at,
            (CqObject::Devx { .. }, FailedCq::Number(number)) => self.cqn == number,
            _ => false,
        }
    }

    /// The verbs object, which queue pairs of libmlx5 need.
    fn verbs(&self) -> Result<NonNull<ibv_cq>> {
        match &self.object {
            CqObject::Verbs(cq) => Ok(cq.raw()),
            CqObject::Devx { .. } => Err(Error::Unsupported {
                what: "a completion queue made for GPU memory, shared with a queue pair whose queues are in host memory",
                by: "mlx5 cards",
                fix: "build the queue pair with on_gpu too, or share a queue of Context::create_cq",
            }),
        }
    }
}

/// A queue pair.
#[derive(Debug)]
struct Qp {
    /// First field: dropped before the completion queues.
    object: Box<dyn QpObject>,
    /// State and first PSN.
    state: Mutex<(QpState, u32)>,
    cqs: [Arc<Cq>; 2],
}

/// A queue pair's object in the card: verbs or DevX.
trait QpObject: Send + Sync + fmt::Debug {
    fn qpn(&self) -> u32;

    /// Whether it is in ERR. The caller locks out resets.
    fn has_failed(&self) -> bool;

    /// Applies a checked transition from state `from`; `psn` is the first PSN.
    fn modify(&self, from: QpState, psn: u32, attr: &QpAttr) -> Result<()>;

    /// The object of libibverbs, if it is one.
    fn raw(&self) -> Option<NonNull<ibv_qp>> {
        None
    }

    /// Whether messages are written in address order, if known.
    fn writes_in_order(&self) -> Option<bool> {
        None
    }
}

/// Memory of a queue pair.
struct Parts {
    sq: Memory,
    rq: Memory,
    record: Memory,
    doorbell: Word64,
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Direct({:?})", self.open)
    }
}

impl Direct {
    /// Uses an open device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless it is an mlx5 card; [`Error::Library`] without libmlx5; [`Error::Verbs`] if a call
    /// fails.
    pub fn start(open: &Arc<Open>) -> Result<Self> {
        let mlx5 = Mlx5::load()?;
        if !open.is_mlx5(mlx5) {
            return Err(Error::Unsupported {
                what: "reading rings by itself (GDSYNC_PATH=direct)",
                by: "a device that is no mlx5 card",
                fix: if open.is_adopted() {
                    "open an mlx5 card, or the emulated one (gdasync card)"
                } else {
                    "leave GDSYNC_PATH unset, or use proxy"
                },
            });
        }
        let base = Arc::new(open.alloc_pd()?);
        let shared = Arc::<Shared>::default();
        let channel = EventChannel::open(open, mlx5);
        let events = if open.is_adopted() {
            None
        } else {
            let (open, shared) = (open.clone(), shared.clone());
            let more = channel.clone().map(|channel| channel as Arc<dyn EventSource>);
            Events::read(&open.clone(), more, move |event| {
                let uses = |qpn: u32, failed| {
                    shared.qps.lock().get(&qpn).is_some_and(|qp| qp.cqs.iter().any(|cq| cq.is(failed)))
                };
                let record = || shared.healths.record(&open, event, uses);
                match shared.qp_of(event) {
                    Some(qp) => {
                        // The lock keeps resets out: the event may be of before one.
                        let _state = qp.state.lock();
                        if qp.object.has_failed() {
                            record();
                        }
                    }
                    None => record(),
                }
            })?
            .into()
        };
        Ok(Self {
            _events: events,
            shared,
            mlx5,
            objects: Objects::new(open),
            cqs: Mutex::default(),
            registers: Arc::new(Registers::new(open)),
            admitted: Mutex::default(),
            devx: Mutex::default(),
            channel,
            base,
            open: open.clone(),
            description: format!("mlx5 card {}", open.name()),
            wire: open.link(),
        })
    }

    /// Uses a protection domain that the application has allocated, until [`Provider::dealloc_pd`]; it is not freed then.
    ///
    /// # Safety
    /// It must be one of the open device, and outlive `self` and all that is made in it.
    pub unsafe fn adopt_pd(&self, pd: NonNull<ibv_pd>) -> u32 {
        // SAFETY: as the caller promises.
        unsafe { self.objects.adopt_pd(pd) }
    }

    fn cq(&self, cqn: u32) -> Result<Arc<Cq>> {
        let found = self.cqs.lock().get(&cqn).cloned();
        found.ok_or_else(|| Error::invalid("completion queue", cqn, "one of this device"))
    }

    fn qp(&self, qpn: u32) -> Result<Arc<Qp>> {
        let found = self.shared.qps.lock().get(&qpn).cloned();
        found.ok_or_else(|| Error::invalid("QPN", qpn, "a queue pair of this device"))
    }

    /// DevX, if the device supports it.
    fn devx(&self) -> Result<Arc<Devx>> {
        let mut known = self.devx.lock();
        if let Some(devx) = &*known {
            return Ok(devx.clone());
        }
        let devx = Devx::new(&self.open, self.mlx5, &self.registers, self.channel.clone())?;
        Ok(known.insert(Arc::new(devx)).clone())
    }
}

/// Whether a queue must lie where the kernel cannot pin memory for verbs objects.
fn needs_devx(places: &Places) -> bool {
    places.gpu.is_some() && !places.on_gpu.is_empty()
}

impl Provider for Direct {
    fn description(&self) -> &str {
        &self.description
    }

    fn wire(&self) -> &str {
        &self.wire
    }

    fn gid(&self) -> Gid {
        self.open.gid().gid
    }

    fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        self.open.address(qpn, psn)
    }

    fn alloc_pd(&self) -> Result<u32> {
        self.objects.alloc_pd()
    }

    fn dealloc_pd(&self, pdn: u32) {
        self.objects.dealloc_pd(pdn);
    }

    fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys> {
        self.objects.reg_mr(pdn, memory, access)
    }

    fn dereg_mr(&self, keys: MrKeys) {
        self.objects.dereg_mr(keys);
    }

    fn transfer_path(&self, _qpn: u32, lkey: u32, _memory: &Memory, _len: usize) -> TransferPath {
        self.objects.transfer_path(lkey)
    }

    fn create_cq(&self, log_entries: u32, ring: OnGpu, places: &Places) -> Result<CqParts> {
        let cq = if needs_devx(places) {
            self.devx()?.create_cq(log_entries, ring, places)?
        } else {
            VerbsCq::create(self.mlx5, &self.base, log_entries, places)?
        };
        let (cqn, ring, record) = (cq.cqn, cq.ring.clone(), cq.record.clone());
        self.cqs.lock().insert(cqn, Arc::new(cq));
        Ok(CqParts { cqn, ring, record, event: Arc::new(CqEvent::silent()) })
    }

    fn destroy_cq(&self, cqn: u32) {
        let cq = self.cqs.lock().remove(&cqn);
        drop(cq);
    }

    fn create_qp(&self, request: &QpRequest, places: &Places) -> Result<QpParts> {
        let (domain, psn) = (self.objects.domain(request.pdn)?, random_psn()?);
        let cqs = [self.cq(request.send_cqn)?, self.cq(request.recv_cqn)?];
        let (object, parts): (Box<dyn QpObject>, _) = if needs_devx(places) {
            if request.qkey.is_some() {
                return Err(NO_DATAGRAMS);
            }
            let (qp, parts) = DevxQp::create(&self.devx()?, &domain, &cqs, request, places)?;
            (Box::new(qp), parts)
        } else {
            let cqs = [cqs[0].verbs()?, cqs[1].verbs()?];
            let (qp, parts) = VerbsQp::create(self.mlx5, &domain, &self.registers, cqs, request, places)?;
            (Box::new(qp), parts)
        };
        let qpn = object.qpn();
        let Parts { sq, rq, record, doorbell } = parts;
        if let Some(gpu) = &places.gpu {
            doorbell.memory().gpu_addr(gpu)?;
        }
        let health = Arc::default();
        self.shared.healths.add(qpn, &health);
        let qp = Qp { object, state: Mutex::new((QpState::RESET, psn)), cqs };
        self.shared.qps.lock().insert(qpn, Arc::new(qp));
        Ok(QpParts { qpn, psn, sq, rq, record, doorbell, health, doorbell_watch: None })
    }

    fn has_datagrams(&self) -> bool {
        true
    }

    fn datagram_address(&self, pdn: u32, to: &QpAddress, qkey: u32) -> Result<AddressVector> {
        let domain = self.objects.domain(pdn)?;
        resolve(&domain, self.open.route(to)?, to, qkey)
    }

    fn modify_qp(&self, qpn: u32, attr: &QpAttr, _timeout: Duration) -> Result<u32> {
        let (fresh, qp) = (random_psn()?, self.qp(qpn)?);
        let mut state = qp.state.lock();
        let (from, psn) = *state;
        qp.object.modify(from, psn, attr)?;
        let to = attr.state.unwrap_or(from);
        *state = (to, if to == QpState::RESET { fresh } else { psn });
        Ok(state.1)
    }

    fn raw_qp(&self, qpn: u32) -> Option<NonNull<ibv_qp>> {
        self.qp(qpn).ok()?.object.raw()
    }

    fn destroy_qp(&self, qpn: u32) {
        self.shared.healths.remove(qpn);
        let qp = self.shared.qps.lock().remove(&qpn);
        drop(qp);
    }

    fn rd_atomic(&self) -> u8 {
        self.open.rd_atomic()
    }

    fn rights(&self) -> Access {
        self.open.rights()
    }

    fn writes_in_order(&self, qpn: u32) -> Option<bool> {
        self.qp(qpn).ok()?.object.writes_in_order()
    }

    fn record_may_lag(&self) -> bool {
        false
    }

    fn reads_by_itself(&self) -> bool {
        true
    }

    fn admit(&self, gpu: &Gpu, probe: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let context = gpu.raw_context();
        if self.admitted.lock().contains(&context) {
            return Ok(());
        }
        probe()?;
        self.admitted.lock().push(context);
        Ok(())
    }
}

/// The address of queue pair `qpn`, which has this Q_Key, behind an address handle.
///
/// # Errors
/// [`Error::Library`] without libmlx5; [`Error::Verbs`] if it does not
/// know the handle.
///
/// # Safety
/// The handle must be one of a device of libmlx5, and stay during the call.
pub unsafe fn address_vector(ah: NonNull<ibv_ah>, qpn: u32, qkey: u32) -> Result<AddressVector> {
    let mut out = mlx5dv_ah::zeroed();
    let mut object = mlx5dv_obj::zeroed();
    object.ah.r#in = ah.as_ptr();
    object.ah.out = &raw mut out;
    // SAFETY: the object and the output match the object type.
    let errno = unsafe { Mlx5::load()?.mlx5dv_init_obj(&mut object, mlx5dv_obj_type::MLX5DV_OBJ_AH) };
    if errno != 0 {
        return Err(failed("mlx5dv_init_obj", "an address handle", &Call::Other, errno));
    }
    // SAFETY: part of the handle.
    let mlx5_wqe_av { stat_rate_sl, fl_mlid, rlid, rmac, tclass, hop_limit, grh_gid_fl, rgid, .. } =
        unsafe { *out.av };
    let grh = u32::from_be(grh_gid_fl);
    let [sgid_index, ..] = (grh << 4).to_be_bytes();
    Ok(AddressVector {
        qkey,
        qpn,
        sl: stat_rate_sl & 0xf,
        static_rate: stat_rate_sl >> 4,
        src_path_bits: fl_mlid & 0x7f,
        rlid: u16::from_be(rlid),
        rmac,
        tclass,
        hop_limit,
        has_grh: grh >> 30 & 1 == 1,
        sgid_index,
        flow_label: grh & 0xf_ffff,
        rgid,
    })
}

/// The address of a peer, which the kernel resolves.
///
/// # Errors
/// [`Error::Verbs`] if it has none.
fn resolve(domain: &Domain, mut route: ibv_ah_attr, to: &QpAddress, qkey: u32) -> Result<AddressVector> {
    let open = domain.open();
    // SAFETY: the domain is allocated and the attributes are initialized.
    let ah = unsafe { open.verbs().ibv_create_ah(domain.raw().as_ptr(), &raw mut route) };
    let Some(ah) = NonNull::new(ah) else {
        let errno = last_errno();
        let error = failed("ibv_create_ah", format!("{to} from {}", open.name()), &Call::Other, errno);
        let Error::Verbs { call, subject, source, .. } = error else { return Err(error) };
        let port = open.port().number;
        let advice = format!(
            "{to} has no address on the link of port {port}: check that `ping` reaches it from GID index {}, or choose \
             another (GDSYNC_GID_INDEX, GDSYNC_PORT)",
            open.gid_index()
        );
        return Err(Error::Verbs { call, subject, source, advice });
    };
    // SAFETY: just created.
    let vector = unsafe { address_vector(ah, to.qpn, qkey) };
    // SAFETY: created here, destroyed only here: requests hold the whole address.
    let errno = unsafe { open.verbs().ibv_destroy_ah(ah.as_ptr()) };
    if errno != 0 {
        tracing::error!(device = open.name(), errno, "an address handle was not destroyed");
    }
    vector
}
