//! The software HCA as a device: the control path, and who may run a step when.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::async_event::AsyncEvents;
use super::cma::CmaPolicy;
use super::core::{Core, QpNumbers};

use super::qp::SoftQp;
use super::receive_staging::ReceiveStaging;
use super::reference::Export;
use super::requester::Requester;
use super::responder::Responder;
use super::rx_hints::RxHints;
use super::staging::Stage;
use super::stuck_copies::StuckCopies;
use super::wire::{Bell, Port};
use gdsync_device::copy_engine::{CopyEngine, Ticket};
use gdsync_device::cuda::GpuCopyEngines;
use gdsync_device::engine::{DoorbellSet, ProgressEngine, ProgressState, ProgressThread, QpTrace, Rings};
use gdsync_device::env::variable;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{
    Access, CqParts, FaultPlan, Gid, HcaStats, Health, MrKeys, OnGpu, Places, Provider, QpAttr, QpParts,
    QpRequest, QpState, TransferPath,
};

/// From here on a copy engine is worth its start. Through a mapping, 32 KiB leave GPU memory in 44 us (H200), and reach it
/// in 1.3 us; a copy engine takes 10 us, most of it to begin.
const BY_REFERENCE: usize = 32 << 10;
/// Keys have 24 bits for the index of a region; the first indices are not used.
const MAX_REGIONS: usize = (1 << 24) - 1024;
/// How long the end of a queue pair or region waits for copies into it, once for each GPU that hangs. Longer than the HCA waits for
/// one.
const PATIENCE: Duration = Duration::from_secs(12);

/// How a software HCA is set up.
#[derive(Clone, Debug)]
pub struct SoftHcaConfig {
    /// Treats what a card would punish as an error (doorbell before record, wrong owner bits, signature, reserved bits).
    pub strict: bool,
    /// Faults from the start.
    pub faults: FaultPlan,
    /// Payload in GPU memory of so many bytes and more is left to a copy engine of the receiver (default 32 KiB; see
    /// [the module](super)).
    pub by_reference: usize,
    /// Which payload in host memory the receiver reads by cross-memory attach.
    pub cma: CmaPolicy,
    /// Memory regions that it takes at a time, at most 2^24 - 1024 (the default).
    pub max_regions: usize,
    /// What moves payload in place of CUDA's copy engines.
    #[doc(hidden)]
    pub copy_engine: Option<Arc<dyn CopyEngine>>,
}

impl Default for SoftHcaConfig {
    fn default() -> Self {
        let faults = FaultPlan::default();
        let (by_reference, cma) = (BY_REFERENCE, CmaPolicy::default());
        Self { strict: false, faults, by_reference, cma, max_regions: MAX_REGIONS, copy_engine: None }
    }
}

impl SoftHcaConfig {
    /// From the environment: `GDSYNC_STRICT=1`, `GDSYNC_FAULTS` as [`FaultPlan`] reads it, `GDSYNC_BY_REFERENCE=bytes`, and
    /// `GDSYNC_CMA` as [`CmaPolicy`] reads it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a value that cannot be read.
    pub fn from_env() -> Result<Self> {
        let strict = match variable("GDSYNC_STRICT").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(Error::invalid("GDSYNC_STRICT", format!("'{other}'"), "0 or 1")),
        };
        let text = variable("GDSYNC_FAULTS").unwrap_or_default();
        let faults = text.parse().map_err(|error| match error {
            Error::InvalidArgument { what, value, expected } => {
                Error::invalid("GDSYNC_FAULTS", format!("'{text}', where {what} is {value}"), expected)
            }
            other => other,
        })?;
        let by_reference = match variable("GDSYNC_BY_REFERENCE") {
            None => BY_REFERENCE,
            Some(text) => text.parse().map_err(|_| {
                Error::invalid("GDSYNC_BY_REFERENCE", format!("'{text}'"), "a number of bytes")
            })?,
        };
        let cma = variable("GDSYNC_CMA").map_or(Ok(CmaPolicy::default()), |text| text.parse())?;
        Ok(Self { strict, faults, by_reference, cma, ..Self::default() })
    }
}

/// A software HCA. Dropping it ends its threads and links.
#[derive(Debug)]
pub struct SoftHca {
    pub(super) shared: Arc<Shared>,
    _service: ProgressThread<Shared>,
}

/// What the service thread shares with everybody who calls in.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) gid: Gid,
    qpns: QpNumbers,
    strict: bool,
    pub(super) core: Mutex<Core>,
    pub(super) rung: DoorbellSet,
    pub(super) rx_hints: RxHints,
    pub(super) port: Port,
    pub(super) bell: Bell,
    duties: ProgressState,
    next_pd: AtomicU64,
    max_regions: usize,
    copy_engine: Arc<dyn CopyEngine>,
    stuck_copies: StuckCopies,
}

impl ProgressEngine for Shared {
    type Core = Core;
    const THREAD: &str = "gdsync-hca";

    fn core(&self) -> &Mutex<Core> {
        &self.core
    }

    fn rung(&self) -> &DoorbellSet {
        &self.rung
    }

    fn duties(&self) -> &ProgressState {
        &self.duties
    }

    fn accept(&self, core: &mut Core) {
        if self.port.has_accepted() {
            for ends in self.port.take_accepted() {
                core.add_link(ends, &self.rx_hints);
            }
        }
    }

    fn has_arrivals(&self) -> bool {
        self.rx_hints.any() || self.port.has_accepted()
    }

    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.bell.sleep(ready, timeout);
    }

    fn wake(&self) {
        self.bell.ring();
    }
}

impl SoftHca {
    pub fn start(config: &SoftHcaConfig) -> Result<Self> {
        Self::start_with(config, None)
    }

    /// As [`SoftHca::start`]; `alarms` is told of what a driver must know.
    pub(super) fn start_with(
        config: &SoftHcaConfig,
        async_events: Option<Arc<dyn AsyncEvents>>,
    ) -> Result<Self> {
        config.faults.check()?;
        let gid = Gid::random()?;
        let bell = Bell::create()?;
        let port = Port::open(gid, bell.clone())?;
        let copy_engine = config.copy_engine.clone().unwrap_or_else(|| Arc::new(GpuCopyEngines::default()));
        let qpns = QpNumbers::random()?;
        let core = Core::new(port.loopback()?, config, copy_engine.clone(), async_events, qpns)?;
        let shared = Arc::new(Shared {
            gid,
            qpns,
            strict: config.strict,
            core: Mutex::new(core),
            rung: DoorbellSet::default(),
            rx_hints: RxHints::default(),
            port,
            bell,
            duties: ProgressState::default(),
            next_pd: AtomicU64::new(0x21),
            max_regions: config.max_regions.min(MAX_REGIONS),
            copy_engine,
            stuck_copies: StuckCopies::default(),
        });
        let service = ProgressThread::start(shared.clone())?;
        Ok(Self { shared, _service: service })
    }

    /// Takes rings into service that belong to no queue pair yet. Returns its number and its first packet sequence number.
    pub(super) fn add_qp(&self, rings: Rings, health: Arc<Health>) -> Result<(u32, u32)> {
        let psn = gdsync_device::random_psn()?;
        let mut qpn = 0;
        let make = |number| {
            qpn = number;
            Box::new(SoftQp {
                rings: Rings { qpn, ..rings },
                health,
                psn,
                state: QpState::RESET,
                access: Access::empty(),
                remote: None,
                link: 0,
                req: Requester::new(psn),
                resp: Responder::default(),
                sends: Stage::default(),
                answers: Stage::default(),
                receive_staging: ReceiveStaging::default(),
                packets: 0,
                active: false,
            })
        };
        self.shared.with(|core| core.add_qp(make))?;
        Ok((qpn, psn))
    }

    /// Before a queue pair is reset or destroyed: the copies into its memory that are under way. None begins from now on.
    fn quiesce(&self, qpn: u32) -> Vec<Ticket> {
        loop {
            match self.shared.with(|core| core.with_qp(qpn, |qp, env| qp.quiesce(env))) {
                None => return Vec::new(),
                Some(Some(copies)) => return copies,
                Some(None) => std::thread::yield_now(),
            }
        }
    }

    /// Whether a doorbell is watched.
    pub fn is_watching(&self) -> bool {
        use gdsync_device::engine::Progress as _;
        self.shared.with(|core| {
            core.step(&self.shared.rung);
            core.is_watching()
        })
    }

    /// The link to `peer`, made if there is none.
    fn link(&self, peer: Gid, timeout: Duration) -> Result<usize> {
        if peer == self.shared.gid {
            return Ok(0);
        }
        let known = self.shared.with(|core| {
            self.shared.accept(core);
            core.link_to(peer)
        });
        if let Some(link) = known {
            return Ok(link);
        }
        // Not under the lock: the peer answers from a thread of its own, but that takes a while.
        let ends = self.shared.port.connect(peer, timeout)?;
        Ok(self.shared.with(|core| core.add_link(ends, &self.shared.rx_hints)))
    }
}

impl Provider for SoftHca {
    fn description(&self) -> &str {
        "software HCA"
    }

    fn wire(&self) -> &str {
        "shared memory"
    }

    fn is_software(&self) -> bool {
        true
    }

    fn gid(&self) -> Gid {
        self.shared.gid
    }

    fn alloc_pd(&self) -> Result<u32> {
        let pdn = self.shared.next_pd.fetch_add(1, Ordering::Relaxed);
        u32::try_from(pdn).map_err(|_| Error::invalid("protection domains", pdn, "fewer than 2^32"))
    }

    fn dealloc_pd(&self, _pdn: u32) {}

    fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys> {
        if let Some(gpu) = memory.gpu() {
            self.shared.copy_engine.adopt(gpu);
        }
        let export = self.shared.copy_engine.export(memory).map(|handle| Export::new(memory, handle));
        let most = self.shared.max_regions;
        let key = self
            .shared
            .with(|core| (core.keys.len() < most).then(|| core.keys.register(pdn, memory, access, export)));
        let key = key.ok_or_else(|| Error::Verbs {
            call: "registering memory",
            subject: format!("{memory:?} on the software HCA"),
            source: Arc::new(std::io::Error::from_raw_os_error(libc::ENOSPC)),
            advice: format!("it has {most} regions, and takes no more: deregister some"),
        })?;
        Ok(MrKeys { lkey: key, rkey: key, is_staged: false })
    }

    fn dereg_mr(&self, keys: MrKeys) {
        let (region, copies) =
            self.shared.with(|core| (core.keys.deregister(keys.lkey), core.copies_on(keys.lkey)));
        if !self.shared.stuck_copies.wait(&copies, Instant::now() + PATIENCE) {
            tracing::error!("a copy into a memory region does not end, and may still happen");
        }
        drop(region);
    }

    fn transfer_path(&self, qpn: u32, lkey: u32, memory: &Memory, len: usize) -> TransferPath {
        self.shared.with(|core| core.transfer_path(self.shared.qpns.index(qpn), lkey, memory, len))
    }

    fn leave_by_reference(&self, bytes: usize) -> Option<usize> {
        Some(self.shared.with(|core| core.leave_by_reference(bytes)))
    }

    fn create_cq(&self, log_entries: u32, ring: OnGpu, places: &Places) -> Result<CqParts> {
        let parts = gdsync_device::engine::cq_parts(log_entries, ring, places)?;
        Ok(self.shared.with(|core| core.cqs.adopt(parts, log_entries)))
    }

    fn destroy_cq(&self, cqn: u32) {
        self.shared.with(|core| core.cqs.destroy(cqn));
    }

    fn create_qp(&self, request: &QpRequest, places: &Places) -> Result<QpParts> {
        if let Some(gpu) = &places.gpu {
            self.shared.copy_engine.adopt(gpu);
        }
        let qp_trace = QpTrace::new(self.shared.gid)?;
        let rings = Rings { qp_trace, ..Rings::alloc(0, request, places)? };
        let (sq, rq) = (rings.sq.clone(), rings.rq.clone());
        let (record, doorbell) = (rings.record.clone(), rings.doorbell.clone());
        let health = Arc::default();
        let (qpn, psn) = self.add_qp(rings, Arc::clone(&health))?;
        let doorbell_watch = Some(self.shared.rung.doorbell_watch(self.shared.qpns.index(qpn)));
        Ok(QpParts { qpn, psn, sq, rq, record, doorbell, health, doorbell_watch })
    }

    fn modify_qp(&self, qpn: u32, attr: &QpAttr, timeout: Duration) -> Result<u32> {
        if attr.state == Some(QpState::RESET) {
            let end = Instant::now() + timeout;
            if !self.quiesce(qpn).iter().all(|copy| copy.wait(end)) {
                let what = "a copy into memory of the queue pair, which may still happen,";
                return Err(Error::Deadline { what, after: timeout });
            }
        }
        let link = attr.remote.map(|remote| self.link(remote.gid, timeout)).transpose()?;
        let result = self.shared.with(|core| {
            if attr.state == Some(QpState::RESET) {
                core.unwatch(qpn, &self.shared.rung);
            }
            let result = core.with_qp(qpn, |qp, env| qp.modify(attr, link, env));
            if attr.state == Some(QpState::RESET) {
                core.drop_dead_links();
            }
            result
        });
        result.unwrap_or_else(|| Err(Error::invalid("QPN", qpn, "a queue pair of this HCA")))
    }

    fn destroy_qp(&self, qpn: u32) {
        if !self.shared.stuck_copies.wait(&self.quiesce(qpn), Instant::now() + PATIENCE) {
            tracing::error!(qpn, "a queue pair is destroyed while a copy into its memory may still happen");
        }
        let qp = self.shared.with(|core| core.remove_qp(qpn, &self.shared.rung));
        drop(qp);
    }

    fn record_may_lag(&self) -> bool {
        !self.shared.strict
    }

    fn ring(&self, qpn: u32) {
        self.shared.ring_doorbell(self.shared.qpns.index(qpn));
    }

    fn watch(&self, qpn: u32, pi: u64) {
        self.shared.watch_doorbell(self.shared.qpns.index(qpn), pi);
    }

    fn attend(&self, cqn: u32) {
        self.shared.attend_to(cqn);
    }

    fn progress(&self) -> bool {
        self.shared.lend_a_step()
    }

    fn has_copied_lately(&self) -> bool {
        self.shared.duties.copied.is_recent()
    }

    fn leave(&self) {
        self.shared.take_over();
    }

    fn inject(&self, plan: FaultPlan) -> Result<()> {
        plan.check()?;
        self.shared.with(|core| core.faults = self.shared.qpns.faults(plan));
        Ok(())
    }

    fn stats(&self) -> HcaStats {
        self.shared.with(|core| core.stats.clone())
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
