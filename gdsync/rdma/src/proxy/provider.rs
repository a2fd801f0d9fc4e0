//! The proxy as a [`Provider`]: control path, shared state, events and sleeping.

use std::collections::HashMap;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::device::{DeviceQp, Granted, Most};
use super::qp::{DRAIN, ProxyQp};
use super::shadow::Shadow;
use super::shared::Shared;
use crate::{Domain, Events, Objects, Open, Region};
use gdsync_device::cuda::Gpu;
use gdsync_device::engine::{Progress, ProgressEngine, ProgressThread, QpTrace, Rings, cq_parts};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{
    Access, CqParts, FaultPlan, Gid, HcaStats, Health, MrKeys, OnGpu, Places, Provider, QpAddress, QpAttr,
    QpParts, QpRequest, QpState, Staging, TransferPath, Transport, random_psn,
};

/// A proxy over an open device. Dropping it ends its threads.
#[derive(Debug)]
pub struct Proxy {
    // First field, so that the threads end first.
    _events: Events,
    _service: ProgressThread<Shared>,
    objects: Objects,
    /// Reserved completion queue entries by QPN: queue and number.
    rooms: Mutex<HashMap<u32, (usize, u32)>>,
    strict: bool,
    most: Most,
    /// Which GPU memory is staged.
    staging: Mutex<Staging>,
    /// Whether staging was logged.
    told: Once,
    shared: Arc<Shared>,
    description: String,
    wire: String,
}

impl Proxy {
    /// Starts a proxy. `strict` reports driver mistakes that a card punishes, as in the software HCA.
    ///
    /// # Errors
    /// [`Error::Verbs`] or [`Error::Sys`] when a queue, descriptor or thread cannot be created.
    pub fn start(open: Arc<Open>, strict: bool) -> Result<Self> {
        Self::start_within(open, strict, Most::ALL)
    }

    /// As [`Proxy::start`], with upper limits for requests to the device.
    pub(super) fn start_within(open: Arc<Open>, strict: bool, most: Most) -> Result<Self> {
        let (description, wire) = (format!("CPU proxy of {}", open.name()), open.link());
        let shared = Arc::new(Shared::new(open.clone(), strict)?);
        let listener = shared.clone();
        Ok(Self {
            _events: Events::read(&open, None, move |event| listener.tell(event))?,
            _service: ProgressThread::start(shared.clone())?,
            objects: Objects::new(&open),
            rooms: Mutex::default(),
            strict,
            most,
            staging: Mutex::default(),
            told: Once::new(),
            shared,
            description,
            wire,
        })
    }

    fn open(&self) -> &Arc<Open> {
        &self.shared.open
    }

    fn place(&self, qpn: u32) -> Result<usize> {
        self.shared.place(qpn).ok_or_else(|| no_qp(qpn))
    }

    /// Registers the send queue with the device if it must read inline data there.
    fn register_ring(
        &self,
        domain: &Arc<Domain>,
        device: &DeviceQp,
        rings: &Rings,
    ) -> Result<Option<Region>> {
        let wanted = rings.request.max_inline > device.granted.inline;
        wanted.then(|| Region::register(domain, &rings.sq, Access::empty())).transpose()
    }

    /// Registers pinned host memory in place of GPU memory, which failed because of `why`. The device writes it only.
    fn register_shadow(
        &self,
        pdn: u32,
        memory: &Memory,
        access: Access,
        (gpu, why): (&Gpu, String),
    ) -> Result<MrKeys> {
        let host = Memory::alloc(memory.len())?;
        host.gpu_addr(gpu)?;
        let engine = gpu.engine()?;
        let keys = self.objects.reg_mr(pdn, &host, access & Access::LOCAL_WRITE)?;
        self.told.call_once(|| {
            tracing::warn!(
                device = self.open().name(),
                %why,
                "GPU memory is staged in pinned host memory: the device does not read and write it by itself"
            );
        });
        let shadow = Shadow::new(memory.clone(), host, engine, why);
        self.shared.with(|core| core.shadows.add(keys.lkey, shadow));
        Ok(MrKeys { is_staged: true, ..keys })
    }

    /// Prepares a reset or the end of a queue pair in ERR: waits until the device has returned its requests or ran out
    /// of time, and until copies have ended or timed out.
    fn drain(&self, place: usize, timeout: Duration) {
        let end = Instant::now() + timeout.min(DRAIN);
        loop {
            let had_its_time = Instant::now() >= end;
            let is_over = self.shared.with(|core| {
                core.step(self.shared.rung());
                let stages = !core.shadows.is_empty();
                core.with(place, |qp, env| {
                    if stages && !matches!(qp.state, QpState::RESET | QpState::ERR) {
                        qp.fail(None, env);
                    }
                    if had_its_time && qp.state == QpState::ERR {
                        qp.force(env);
                    }
                    qp.state != QpState::ERR || qp.is_quiet()
                })
            });
            if is_over != Some(false) {
                return;
            }
            std::thread::yield_now();
        }
    }
}

fn no_qp(qpn: u32) -> Error {
    Error::invalid("QPN", qpn, "a queue pair of this device")
}

impl Provider for Proxy {
    fn description(&self) -> &str {
        &self.description
    }

    fn wire(&self) -> &str {
        &self.wire
    }

    fn gid(&self) -> Gid {
        self.open().gid().gid
    }

    fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        self.open().address(qpn, psn)
    }

    fn alloc_pd(&self) -> Result<u32> {
        self.objects.alloc_pd()
    }

    fn dealloc_pd(&self, pdn: u32) {
        self.objects.dealloc_pd(pdn);
    }

    fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys> {
        let staging = *self.staging.lock();
        let why = match (memory.gpu(), staging) {
            (Some(gpu), Staging::Always) => {
                (gpu, "it was asked for (Context::stage, MP_GPU_PATH)".to_owned())
            }
            (gpu, _) => match (self.objects.reg_mr(pdn, memory, access), gpu) {
                (Err(error), Some(gpu)) if staging == Staging::Refused && !error.is_exhausted() => {
                    (gpu, error.to_string())
                }
                (other, _) => {
                    let keys = other?;
                    if memory.needs_flush() {
                        self.shared.with(|core| core.unseen.push((keys.lkey, memory.clone())));
                    }
                    return Ok(keys);
                }
            },
        };
        self.register_shadow(pdn, memory, access, why)
    }

    fn stage(&self, which: Staging) -> Option<Staging> {
        Some(std::mem::replace(&mut *self.staging.lock(), which))
    }

    fn dereg_mr(&self, keys: MrKeys) {
        let memory = self.shared.with(|core| {
            let at = core.unseen.iter().position(|(key, _)| *key == keys.lkey);
            (at.map(|at| core.unseen.swap_remove(at)), core.shadows.remove(keys.lkey))
        });
        self.objects.dereg_mr(keys);
        // The application may free its memory when this returns.
        if let Some(error) = memory.1.and_then(|shadow| shadow.settle()?.failure(self.open().name())) {
            tracing::error!(%error, "a region ends while a copy may write its memory");
        }
    }

    fn transfer_path(&self, _qpn: u32, lkey: u32, _memory: &Memory, _len: usize) -> TransferPath {
        let staged = self.shared.with(|core| core.shadows.why(lkey).map(str::to_owned));
        staged.map_or_else(
            || self.objects.transfer_path(lkey),
            |why| TransferPath::new(Transport::Staging, why),
        )
    }

    fn create_cq(&self, log_entries: u32, ring: OnGpu, places: &Places) -> Result<CqParts> {
        let parts = cq_parts(log_entries, ring, places)?;
        Ok(self.shared.with(|core| core.cqs.adopt(parts, log_entries)))
    }

    fn destroy_cq(&self, cqn: u32) {
        self.shared.with(|core| core.cqs.destroy(cqn));
    }

    fn create_qp(&self, request: &QpRequest, places: &Places) -> Result<QpParts> {
        let domain = self.objects.domain(request.pdn)?;
        let wish = Granted::wish(self.open(), request, self.most);
        let room = wish.sends + wish.receives;
        // Under the lock: the queue must not move while it is registered.
        let (queue, device) = self.shared.with(|core| {
            let queue = core.reserve(room)?;
            let device = DeviceQp::create(&domain, core.queue(queue), wish);
            if device.is_err() {
                core.release(queue, room);
            }
            Ok::<_, Error>((queue, device?))
        })?;
        let qpn = device.qpn();
        let release = |error| {
            self.shared.with(|core| core.release(queue, room));
            error
        };
        let make = || {
            let rings = Rings { qp_trace: QpTrace::new(self.gid())?, ..Rings::alloc(qpn, request, places)? };
            let region = self.register_ring(&domain, &device, &rings)?;
            Ok((rings, region, random_psn()?))
        };
        let (rings, region, psn) = make().map_err(release)?;
        let health: Arc<Health> = Arc::default();
        self.shared.duties.watch_health(Shared::THREAD, &health)?;
        let (sq, rq) = (rings.sq.clone(), rings.rq.clone());
        let (record, doorbell) = (rings.record.clone(), rings.doorbell.clone());
        let free_list = Arc::clone(&health);
        let make = |place| ProxyQp::new(device, rings, region, psn, free_list, place);
        let place = self.shared.with(|core| core.add_qp(make)).map_err(release)?;
        self.shared.insert(qpn, place);
        self.rooms.lock().insert(qpn, (queue, room));
        let doorbell_watch = Some(self.shared.rung().doorbell_watch(place));
        Ok(QpParts { qpn, psn, sq, rq, record, doorbell, health, doorbell_watch })
    }

    fn modify_qp(&self, qpn: u32, attr: &QpAttr, timeout: Duration) -> Result<u32> {
        let place = self.place(qpn)?;
        let is_reset = attr.state == Some(QpState::RESET);
        if is_reset {
            self.drain(place, timeout);
        }
        let result = self.shared.with(|core| {
            if is_reset {
                core.unwatch(place, self.shared.rung());
            }
            let result = core.with(place, |qp, env| qp.modify(attr, env));
            // Completions of the former connection would occupy room.
            core.poll();
            result
        });
        // Earlier receives or a flush may complete without another wake-up.
        self.shared.wake();
        result.ok_or_else(|| no_qp(qpn))?
    }

    fn destroy_qp(&self, qpn: u32) {
        let Some(place) = self.shared.place(qpn) else { return };
        self.shared.forget(qpn);
        let stages = self.shared.with(|core| {
            let stages = !core.shadows.is_empty();
            if stages {
                core.with(place, |qp, _| qp.is_ending = true);
            }
            stages
        });
        if stages {
            self.drain(place, DRAIN);
        }
        let qp = self.shared.with(|core| core.remove_qp(place, self.shared.rung()));
        if let Some(Err(error)) = qp.as_ref().map(|qp| qp.staged.check(self.open().name())) {
            tracing::error!(qpn, %error, "a queue pair ends while a copy may write its memory");
        }
        // Without the lock, because the device may take long.
        drop(qp);
        if let Some((queue, room)) = self.rooms.lock().remove(&qpn) {
            self.shared.with(|core| core.release(queue, room));
        }
    }

    fn rd_atomic(&self) -> u8 {
        self.open().rd_atomic()
    }

    fn rights(&self) -> Access {
        self.open().rights()
    }

    fn record_may_lag(&self) -> bool {
        !self.strict
    }

    fn ring(&self, qpn: u32) {
        if let Some(place) = self.shared.place(qpn) {
            self.shared.ring_doorbell(place);
        }
    }

    fn watch(&self, qpn: u32, pi: u64) {
        if let Some(place) = self.shared.place(qpn) {
            self.shared.watch_doorbell(place, pi);
        }
    }

    fn attend(&self, cqn: u32) {
        self.shared.attend_to(cqn);
    }

    fn progress(&self) -> bool {
        self.shared.lend_a_step()
    }

    fn has_copied_lately(&self) -> bool {
        self.shared.duties().copied.is_recent()
    }

    fn leave(&self) {
        self.shared.take_over();
    }

    fn inject(&self, plan: FaultPlan) -> Result<()> {
        plan.check()?;
        if plan == FaultPlan::default() {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: "a fault plan",
            by: "the CPU proxy, whose packets are the device's",
            fix: "inject faults on soft0, or drop packets of the device's network (`tc qdisc add dev DEV root netem loss 1%`)",
        })
    }

    fn stats(&self) -> HcaStats {
        self.shared.with(|core| core.stats.clone())
    }
}
