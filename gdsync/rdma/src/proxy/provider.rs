//! The proxy as a [`Provider`]: control path, shared state, events and sleeping.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rdma_core_sys::verbs::ibv_event_type;

use super::core::Core;
use super::device::{Capacity, Channel, DeviceLimits, DeviceQp};
use super::qp::{DRAIN, ProxyQp};
use super::staging::Shadow;
use crate::{Domain, Event, Events, Objects, Open, Region};
use gdsync_device::DoorbellSet;
use gdsync_device::cuda::Gpu;
use gdsync_device::engine::{
    Progress, ProgressEngine, ProgressState, ProgressThread, QpTrace, Rings, cq_parts,
};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{
    Access, CqParts, Gid, HcaStats, Health, MrKeys, OnGpu, Places, Provider, QpAddress, QpAttr, QpParts,
    QpRequest, QpState, Staging, TransferPath, Transport, random_psn,
};
use gdsync_shm::event_count;

/// A proxy over an open device. Dropping it ends its threads.
#[derive(Debug)]
pub struct Proxy {
    // First field, so that the threads end first.
    _events: Events,
    _service: ProgressThread<Shared>,
    objects: Objects,
    strict: bool,
    limits: DeviceLimits,
    /// Which GPU memory is staged.
    staging: Mutex<Staging>,
    /// Whether staging was logged.
    logged_staging: Once,
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
        Self::start_within(open, strict, DeviceLimits::ALL)
    }

    /// As [`Proxy::start`], with upper limits for requests to the device.
    pub(super) fn start_within(open: Arc<Open>, strict: bool, limits: DeviceLimits) -> Result<Self> {
        let (description, wire) = (format!("CPU proxy of {}", open.name()), open.link());
        let shared = Arc::new(Shared::new(open.clone(), strict)?);
        let listener = shared.clone();
        Ok(Self {
            _events: Events::read(&open, None, move |event| listener.handle_event(event))?,
            _service: ProgressThread::start(shared.clone())?,
            objects: Objects::new(&open),
            strict,
            limits,
            staging: Mutex::default(),
            logged_staging: Once::new(),
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
        self.logged_staging.call_once(|| {
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
                core.step(self.shared.doorbells());
                let stages = !core.shadows.is_empty();
                core.with(place, |qp, env| {
                    if stages && !matches!(qp.state, QpState::RESET | QpState::ERR) {
                        qp.fail(None, env);
                    }
                    if had_its_time && qp.state == QpState::ERR {
                        qp.force(env);
                    }
                    qp.state != QpState::ERR || qp.is_idle()
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
        if let Some(error) = memory.1.and_then(|shadow| shadow.wait_for_copies()?.failure(self.open().name()))
        {
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
        let wanted = Capacity::wanted(self.open(), request, self.limits);
        let room = wanted.sends + wanted.receives;
        // Under the lock: the queue must not move while it is registered.
        let (queue, device) = self.shared.with(|core| {
            let queue = core.reserve(room)?;
            let device = DeviceQp::create(&domain, core.queue(queue), wanted);
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
            let (rings, doorbell) = Rings::alloc(qpn, request, places)?;
            let rings = Rings { qp_trace: QpTrace::new(self.gid())?, ..rings };
            let region = self.register_ring(&domain, &device, &rings)?;
            Ok((rings, doorbell, region, random_psn()?))
        };
        let (rings, doorbell, region, psn) = make().map_err(release)?;
        let health: Arc<Health> = Arc::default();
        // The device gets each receive from the proxy.
        health.request_receive_calls();
        self.shared.progress_state.watch_health(Shared::THREAD, &health).map_err(release)?;
        let (sq, rq) = (rings.sq.clone(), rings.rq.clone());
        let record = rings.record.clone();
        let own = Arc::clone(&health);
        let make = |place| ProxyQp::new(device, (queue, room), rings, region, psn, own, place);
        let place = self.shared.with(|core| core.add_qp(make)).map_err(release)?;
        self.shared.insert(qpn, place);
        let doorbell_watch = Some(self.shared.doorbells().doorbell_watch(place));
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
                core.unwatch(place, self.shared.doorbells());
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
        let Some(place) = self.shared.forget(qpn) else { return };
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
        let Some(qp) = self.shared.with(|core| core.remove_qp(place, self.shared.doorbells())) else {
            return;
        };
        if let Err(error) = qp.staged.check(self.open().name()) {
            tracing::error!(qpn, %error, "a queue pair ends while a copy may write its memory");
        }
        let (queue, room) = qp.room;
        // Without the lock, because the device may take long.
        drop(qp);
        self.shared.with(|core| core.release(queue, room));
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
        self.shared.run_step()
    }

    fn has_copied_recently(&self) -> bool {
        self.shared.progress_state().copied.is_recent()
    }

    fn end_polling(&self) {
        self.shared.take_over();
    }

    fn stats(&self) -> HcaStats {
        self.shared.with(|core| core.stats.clone())
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) core: Mutex<Core>,
    pub(super) open: Arc<Open>,
    doorbells: DoorbellSet,
    pub(super) progress_state: ProgressState,
    event: EventCount,
    channel: Arc<Channel>,
    /// Requests at the device.
    outstanding: Arc<AtomicUsize>,
    /// Slots of queue pairs, by QPN.
    places: RwLock<HashMap<u32, usize>>,
}

impl Shared {
    pub(super) fn new(open: Arc<Open>, strict: bool) -> Result<Self> {
        let channel = Arc::new(Channel::create(&open)?);
        let outstanding = Arc::<AtomicUsize>::default();
        let core = Core::new(channel.clone(), open.clone(), outstanding.clone(), strict);
        Ok(Self {
            core: Mutex::new(core),
            open,
            doorbells: DoorbellSet::default(),
            progress_state: ProgressState::default(),
            event: EventCount::create()?,
            channel,
            outstanding,
            places: RwLock::default(),
        })
    }

    /// Slot of a queue pair.
    pub(super) fn place(&self, qpn: u32) -> Option<usize> {
        self.places.read().get(&qpn).copied()
    }

    pub(super) fn insert(&self, qpn: u32, place: usize) {
        self.places.write().insert(qpn, place);
    }

    pub(super) fn forget(&self, qpn: u32) -> Option<usize> {
        self.places.write().remove(&qpn)
    }

    /// Handles an asynchronous event of the device.
    pub(super) fn handle_event(&self, event: Event) {
        let place = match event {
            Event::QueuePair { qpn, .. } => match self.place(qpn) {
                Some(place) => Some(place),
                // Destroyed meanwhile.
                None => return,
            },
            Event::CompletionQueue(_) | Event::Device | Event::Port { .. } => None,
        };
        if let Some(cause) = event.cause(&self.open).or_else(|| self.is_unplugged(event)) {
            self.with(|core| {
                core.break_qps(place, &cause);
                if event == Event::Device {
                    core.force();
                }
            });
            self.wake();
        }
    }

    /// Error for the loss of the port in use.
    fn is_unplugged(&self, event: Event) -> Option<Error> {
        let Event::Port { number, kind: ibv_event_type::IBV_EVENT_PORT_ERR } = event else { return None };
        let why = format!(
            "port {number} went down (IBV_EVENT_PORT_ERR): check the cable and the peer's port, then reset and connect again"
        );
        let device = self.open.name().to_owned();
        (number == self.open.port().number).then_some(Error::Device { device, why })
    }
}

impl ProgressEngine for Shared {
    type Core = Core;
    const THREAD: &str = "gdsync-proxy";

    fn core(&self) -> &Mutex<Core> {
        &self.core
    }

    fn doorbells(&self) -> &DoorbellSet {
        &self.doorbells
    }

    fn progress_state(&self) -> &ProgressState {
        &self.progress_state
    }

    fn has_arrivals(&self) -> bool {
        false
    }

    /// The device's queues are polled under the lock.
    fn may_have_arrivals(&self) -> bool {
        self.outstanding.load(Ordering::Relaxed) > 0
    }

    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let ready = || {
            let Some(mut core) = self.core.try_lock() else { return true };
            core.arm();
            let worked = core.poll();
            self.unlock(core);
            worked || ready()
        };
        if self.event.sleep(self.channel.fd(), &ready, timeout) {
            self.with(Core::take_events);
        }
    }

    fn wake(&self) {
        self.event.notify();
    }
}

/// One thread sleeps; any thread notifies.
#[derive(Debug)]
pub(super) struct EventCount {
    sleepers: AtomicU32,
    sequence: AtomicU32,
    /// Eventfd, readable when notified since the sleeper announced itself.
    fd: OwnedFd,
}

impl EventCount {
    pub(super) fn create() -> Result<Self> {
        let fd = gdsync_device::eventfd()?;
        Ok(Self { sleepers: AtomicU32::new(0), sequence: AtomicU32::new(0), fd })
    }

    /// Wakes the sleeper. Without one this costs a fence and a load.
    pub(super) fn notify(&self) {
        if event_count::notify(&self.sleepers, &self.sequence) {
            gdsync_device::signal_eventfd(&self.fd);
        }
    }

    /// Sleeps unless `ready`, until notified, until `other` is readable, or for `timeout`. May wake spuriously. Returns
    /// whether `other` is readable.
    pub(super) fn sleep(&self, other: RawFd, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        event_count::announce(&self.sleepers, &self.sequence);
        if ready() {
            return false;
        }
        let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [entry(self.fd.as_raw_fd()), entry(other)];
        let time = libc::timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the array has two entries, and the timeout is on the stack; no signal mask is set.
        let poll =
            |fds: &mut [_; 2]| unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const time, ptr::null()) };
        let mut woken = poll(&mut fds);
        if woken > 0 && fds[0].revents == 0 && fds[1].revents & libc::POLLIN == 0 {
            // The channel of a device that is gone has an error for ever.
            fds[1] = entry(-1);
            woken = poll(&mut fds);
        }
        if woken > 0 && fds[0].revents != 0 {
            gdsync_device::clear_eventfd(&self.fd);
        }
        woken > 0 && fds[1].revents & libc::POLLIN != 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn no_notification_is_lost() {
        let event = Arc::new(EventCount::create().unwrap());
        let work = Arc::new(AtomicU64::new(0));
        let (ringer, published) = (event.clone(), work.clone());
        let thread = std::thread::spawn(move || {
            for n in 1..=2000 {
                published.store(n, Ordering::Release);
                ringer.notify();
                if n % 200 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let quiet = EventCount::create().unwrap();
        let start = Instant::now();
        let mut seen = 0;
        while seen < 2000 {
            event.sleep(quiet.fd.as_raw_fd(), &|| work.load(Ordering::Acquire) > seen, PATIENCE);
            seen = work.load(Ordering::Acquire);
            assert!(start.elapsed() < PATIENCE, "a ring was lost");
        }
        thread.join().unwrap();
    }

    #[test]
    fn other_descriptor_and_timeout_wake_the_sleeper() {
        let (event, other) = (EventCount::create().unwrap(), EventCount::create().unwrap());
        let fd = other.fd.as_raw_fd();
        let start = Instant::now();
        assert!(!event.sleep(fd, &|| false, Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(19));
        other.sleepers.store(1, Ordering::Release);
        other.notify();
        assert!(event.sleep(fd, &|| false, PATIENCE));
        assert!(start.elapsed() < PATIENCE);
    }

    #[test]
    fn lost_device_does_not_keep_the_sleeper_awake() {
        let event = EventCount::create().unwrap();
        // Polls as the channel of a device that is gone: an error, and nothing to read.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let start = Instant::now();
        assert!(!event.sleep(writer.as_raw_fd(), &|| false, Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(19));
        event.sleepers.store(1, Ordering::Release);
        event.notify();
        assert!(!event.sleep(writer.as_raw_fd(), &|| false, PATIENCE));
        assert!(start.elapsed() < PATIENCE);
    }
}
