//! The software HCA as a [`Provider`]: control path and progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::async_event::AsyncEvents;
use crate::config::{MAX_REGIONS, SoftHcaConfig};
use crate::core::{Core, QpNumbers};
use crate::packet::Export;
use crate::peers::Connector;
use crate::qp::SoftQp;
use crate::qp::datagram::Datagrams;
use crate::qp::requester::Requester;
use crate::qp::responder::Responder;
use crate::qp::staging::{ReceiveStaging, Stage};
use crate::wire::{
    Endpoint, Event, EventCount, HcaPort, Peer, Port, RxHints, Sockets, TCP, TcpPort, loopback,
};
use gdsync_device::DoorbellSet;
use gdsync_device::copy_engine::{CopyEngine, Ticket};
use gdsync_device::cuda::GpuCopyEngines;
use gdsync_device::engine::{ProgressEngine, ProgressState, ProgressThread, QpTrace, Rings};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{
    Access, CqParts, FaultPlan, Gid, HcaStats, Health, MrKeys, OnGpu, Places, Provider, QpAddress, QpAttr,
    QpParts, QpRequest, QpState, TransferPath,
};
use gdsync_shm::back_off;

/// Between two looks whether the peer's own connection has come.
const CROSSED_PAUSE: Duration = Duration::from_micros(200);

/// A software HCA. Dropping it ends its threads and links.
#[derive(Debug)]
pub struct SoftHca {
    pub(super) shared: Arc<Shared>,
    _service: ProgressThread<Shared>,
    /// Makes the links of a card.
    _connector: Option<Connector>,
}

/// What queue pairs of a card have besides rings.
#[derive(Debug, Default)]
pub(super) struct Role {
    /// User index, written into every CQE.
    pub(super) uidx: u32,
    /// Shared receive queue.
    pub(super) srqn: Option<u32>,
    /// Sends and receives datagrams.
    pub(super) datagrams: Option<Box<Datagrams>>,
}

/// State shared by the service thread and callers.
#[derive(Debug)]
pub(super) struct Shared {
    /// As its links know it.
    pub(super) own: Peer,
    qpns: QpNumbers,
    strict: bool,
    /// In the role of a card, whose doorbells are all watched.
    is_card: bool,
    pub(super) core: Mutex<Core>,
    pub(super) doorbells: DoorbellSet,
    pub(super) rx_hints: RxHints,
    pub(super) port: HcaPort,
    pub(super) event: Event,
    progress: ProgressState,
    next_pd: AtomicU64,
    max_regions: usize,
    copy_engine: Arc<dyn CopyEngine>,
    stuck_copies: StuckCopies,
    /// How long destroying a queue pair or region waits for copies into it, per hung GPU.
    copy_timeout: Duration,
}

impl ProgressEngine for Shared {
    type Core = Core;
    const THREAD: &str = "gdsync-hca";

    fn core(&self) -> &Mutex<Core> {
        &self.core
    }

    fn doorbells(&self) -> &DoorbellSet {
        &self.doorbells
    }

    fn progress_state(&self) -> &ProgressState {
        &self.progress
    }

    fn prepare_thread(&self) {
        if self.is_card {
            own_thread_is_a_card();
        }
    }

    fn close(&self) {
        self.port.close();
    }

    fn accept(&self, core: &mut Core) {
        if self.port.has_accepted() {
            for ends in self.port.take_accepted() {
                core.add_link(ends);
            }
        }
    }

    fn has_arrivals(&self) -> bool {
        self.rx_hints.any() || self.port.has_accepted() || self.sockets().is_some_and(Sockets::is_ready)
    }

    fn may_have_arrivals(&self) -> bool {
        // A step asks the sockets, at the same cost.
        self.rx_hints.any()
            || self.port.has_accepted()
            || self.sockets().is_some_and(|sockets| sockets.links() > 0)
    }

    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.event.sleep(ready, timeout);
    }

    fn wake(&self) {
        self.event.notify();
    }
}

impl Shared {
    fn sockets(&self) -> Option<&Sockets> {
        if let Event::Sockets(sockets) = &self.event { Some(sockets) } else { None }
    }
}

impl SoftHca {
    /// Starts a software HCA.
    ///
    /// # Errors
    /// [`Error::Sys`] when a thread, socket or shared memory cannot be created; [`Error::InvalidArgument`] for an invalid
    /// fault plan.
    pub fn start(config: &SoftHcaConfig) -> Result<Self> {
        Self::start_with(config, None)
    }

    /// As [`SoftHca::start`], with a listener for asynchronous events.
    pub(super) fn start_with(
        config: &SoftHcaConfig,
        async_events: Option<Arc<dyn AsyncEvents>>,
    ) -> Result<Self> {
        config.faults.check()?;
        let (own, port, event, rx_hints) = match config.tcp {
            Some(address) => {
                let fabric = config.fabric.as_deref();
                let endpoint = fabric.map(|name| Endpoint::open(name, address)).transpose()?;
                let port = TcpPort::open(address, endpoint)?;
                let event = Event::Sockets(port.sockets().clone());
                (port.own(), HcaPort::Tcp(port), event, RxHints::default())
            }
            None => {
                let gid = config.gid.map_or_else(Gid::random, Ok)?;
                let event = EventCount::create()?;
                let port = Port::open(gid, event.clone(), async_events.is_some())?;
                let rx_hints = port.rx_hints();
                (Peer::near(gid), HcaPort::Memory(port), Event::Memory(event), rx_hints)
            }
        };
        let copy_engine = config.copy_engine.clone().unwrap_or_else(|| Arc::new(GpuCopyEngines::default()));
        let qpns = QpNumbers::random()?;
        let listener = async_events.clone();
        let loopback = loopback(own, event.clone())?;
        let sockets = match &event {
            Event::Sockets(sockets) => Some(sockets.clone()),
            Event::Memory(_) => None,
        };
        let core = Core::new(loopback, sockets, config, copy_engine.clone(), listener, qpns)?;
        let shared = Arc::new(Shared {
            own,
            qpns,
            strict: config.strict,
            is_card: async_events.is_some(),
            core: Mutex::new(core),
            doorbells: DoorbellSet::default(),
            rx_hints,
            port,
            event,
            progress: ProgressState::default(),
            next_pd: AtomicU64::new(0x21),
            max_regions: config.max_regions.min(MAX_REGIONS),
            copy_engine,
            stuck_copies: StuckCopies::default(),
            // A copy's own limit passes first.
            copy_timeout: config.copy_limit() * 6 / 5,
        });
        let service = ProgressThread::start(shared.clone())?;
        let connector = shared.is_card.then(|| connector(&shared)).transpose()?;
        Ok(Self { shared, _service: service, _connector: connector })
    }

    /// Adds a queue pair over `rings`, in the role of `role`. Returns its QPN and first PSN.
    pub(super) fn add_qp(&self, rings: Rings, health: Arc<Health>, role: Role) -> Result<(u32, u32)> {
        self.shared.progress.watch_health(Shared::THREAD, &health)?;
        let psn = gdsync_device::random_psn()?;
        let mut qpn = 0;
        let make = |number| {
            qpn = number;
            Box::new(SoftQp {
                rings: Rings { qpn, ..rings },
                uidx: role.uidx,
                srqn: role.srqn,
                datagrams: role.datagrams,
                health,
                psn,
                state: QpState::RESET,
                access: Access::empty(),
                remote: None,
                peer: None,
                link: 0,
                req: Requester::new(psn),
                resp: Responder::default(),
                sends: Stage::default(),
                responses: Stage::default(),
                receive_staging: ReceiveStaging::default(),
                packets: 0,
                active: false,
            })
        };
        self.shared.with(|core| core.add_qp(make))?;
        Ok((qpn, psn))
    }

    /// The handle of memory for peers. Tells the copy engine about its GPU.
    fn export(&self, memory: &Memory) -> Option<Arc<Export>> {
        if let Some(gpu) = memory.gpu() {
            self.shared.copy_engine.adopt(gpu);
        }
        self.shared.copy_engine.export(memory).map(|handle| Export::new(memory, handle))
    }

    /// Replaces the region of a key. Nothing uses the old one afterwards.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown key.
    pub(crate) fn replace_region(
        &self,
        key: u32,
        pdn: u32,
        memory: &Memory,
        iova: u64,
        access: Access,
    ) -> Result<()> {
        let export = self.export(memory);
        let old = self.shared.with(|core| core.keys.replace(key, pdn, memory, iova, access, export));
        let old = old.ok_or_else(|| Error::invalid("memory key", key, "one of this HCA"))?;
        self.end_region(key, old);
        Ok(())
    }

    /// Drops a region once nothing uses it.
    fn end_region(&self, key: u32, region: impl Sized) {
        let copies = self.shared.with(|core| core.copies_on(key));
        while !self.shared.with(|core| core.revoke(key)) {
            std::thread::yield_now();
        }
        if !self.shared.stuck_copies.wait(&copies, Instant::now() + self.shared.copy_timeout) {
            tracing::error!(
                "a copy into a deregistered memory region has not ended and may still write to it"
            );
        }
        drop(region);
    }

    /// Stops new copies into a queue pair's memory and returns those in progress.
    fn quiesce(&self, qpn: u32) -> Vec<Ticket> {
        loop {
            match self.shared.with(|core| core.with_qp(qpn, |qp, env| qp.quiesce(env))) {
                None => return Vec::new(),
                Some(Some(copies)) => return copies,
                Some(None) => std::thread::yield_now(),
            }
        }
    }

    /// Whether any doorbell is polled.
    pub fn is_watching(&self) -> bool {
        use gdsync_device::engine::Progress as _;
        self.shared.with(|core| {
            core.step(&self.shared.doorbells);
            core.is_watching()
        })
    }

    /// Index of the link to `peer`; connects if there is none.
    fn link(&self, peer: Peer, timeout: Duration) -> Result<usize> {
        if peer == self.shared.own {
            return Ok(0);
        }
        let deadline = Instant::now() + timeout;
        loop {
            let known = self.shared.with(|core| {
                self.shared.accept(core);
                core.link_to(peer)
            });
            if let Some(link) = known {
                return Ok(link);
            }
            // Without the lock: the handshake with the peer's thread takes a while.
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(ends) = self.shared.port.connect(peer, left)? {
                return Ok(self.shared.with(|core| core.add_link(ends)));
            }
            if left.is_zero() {
                let why = "its own connection to this process has not come; repeat the call".into();
                return Err(Error::Peer { peer: peer.to_string(), why });
            }
            std::thread::sleep(CROSSED_PAUSE);
        }
    }

    /// Registers memory under this address of its first byte in work requests. Returns its key.
    pub(crate) fn register(&self, pdn: u32, memory: &Memory, iova: u64, access: Access) -> Result<u32> {
        let failed = |errno, advice| Error::Verbs {
            call: "registering memory",
            subject: format!("{memory:?} on the software HCA"),
            source: Arc::new(std::io::Error::from_raw_os_error(errno)),
            advice,
        };
        if !memory.is_readable() {
            let (addr, len) = (memory.addr(), memory.len());
            return Err(failed(
                libc::EFAULT,
                format!("{len} bytes at {addr:#x} are not all mapped, or not readable"),
            ));
        }
        let export = self.export(memory);
        let most = self.shared.max_regions;
        let key = self.shared.with(|core| {
            (core.keys.len() < most).then(|| core.keys.register(pdn, memory, iova, access, export))
        });
        key.ok_or_else(|| failed(libc::ENOSPC, format!("all {most} regions are in use; deregister some")))
    }
}

impl Provider for SoftHca {
    fn description(&self) -> &str {
        "software HCA"
    }

    fn wire(&self) -> &str {
        match &self.shared.port {
            HcaPort::Memory(_) => "shared memory",
            HcaPort::Tcp(_) => {
                self.shared.sockets().and_then(Sockets::endpoint).map_or(TCP, |endpoint| endpoint.carrier())
            }
        }
    }

    fn reaches_other_hosts(&self) -> bool {
        matches!(self.shared.port, HcaPort::Tcp(_))
    }

    fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        let Peer { gid, port } = self.shared.own;
        QpAddress::new(gid, qpn, psn).with_lid(port)
    }

    fn is_software(&self) -> bool {
        true
    }

    fn gid(&self) -> Gid {
        self.shared.own.gid
    }

    fn alloc_pd(&self) -> Result<u32> {
        let pdn = self.shared.next_pd.fetch_add(1, Ordering::Relaxed);
        u32::try_from(pdn).map_err(|_| Error::invalid("protection domains", pdn, "fewer than 2^32"))
    }

    fn dealloc_pd(&self, _pdn: u32) {}

    fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys> {
        let key = self.register(pdn, memory, memory.addr(), access)?;
        Ok(MrKeys { lkey: key, rkey: key, is_staged: false })
    }

    fn dereg_mr(&self, keys: MrKeys) {
        let region = self.shared.with(|core| core.keys.deregister(keys.lkey));
        self.end_region(keys.lkey, region);
    }

    fn transfer_path(&self, qpn: u32, lkey: u32, memory: &Memory, len: usize) -> TransferPath {
        self.shared.with(|core| core.transfer_path(self.shared.qpns.index(qpn), lkey, memory, len))
    }

    fn set_by_reference(&self, bytes: usize) -> Option<usize> {
        Some(self.shared.with(|core| core.set_by_reference(bytes)))
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
        let qp_trace = QpTrace::new(self.shared.own.gid)?;
        let (rings, doorbell) = Rings::alloc(0, request, places)?;
        let rings = Rings { qp_trace, ..rings };
        let (sq, rq, record) = (rings.sq.clone(), rings.rq.clone(), rings.record.clone());
        let health = Arc::default();
        let (qpn, psn) = self.add_qp(rings, Arc::clone(&health), Role::default())?;
        let doorbell_watch = Some(self.shared.doorbells.doorbell_watch(self.shared.qpns.index(qpn)));
        Ok(QpParts { qpn, psn, sq, rq, record, doorbell, health, doorbell_watch })
    }

    fn modify_qp(&self, qpn: u32, attr: &QpAttr, timeout: Duration) -> Result<u32> {
        if attr.state == Some(QpState::RESET) {
            let end = Instant::now() + timeout;
            if !self.quiesce(qpn).iter().all(|copy| copy.wait(end)) {
                let awaited = "the copy engine of a GPU; if it hangs, `dmesg` has an Xid";
                let what = format!("a copy into memory of QP {qpn:#x}");
                return Err(Error::late(what, timeout, awaited));
            }
        }
        // A card finds out by its packets whether there is a peer.
        let remote = attr.remote.filter(|_| !self.shared.is_card);
        let peer_of = |remote: QpAddress| self.shared.port.peer_of(&remote);
        let link = remote.map(|remote| self.link(peer_of(remote), timeout)).transpose()?;
        let peer = attr.remote.map(|remote| (peer_of(remote), link));
        let result = self.shared.with(|core| {
            if attr.state == Some(QpState::RESET) {
                core.unwatch(qpn, &self.shared.doorbells);
            }
            let result = core.with_qp(qpn, |qp, env| qp.modify(attr, peer, env));
            if attr.state == Some(QpState::RESET) {
                core.drop_dead_links();
            }
            result
        });
        result.unwrap_or_else(|| Err(Error::invalid("QPN", qpn, "a queue pair of this HCA")))
    }

    fn destroy_qp(&self, qpn: u32) {
        if !self.shared.stuck_copies.wait(&self.quiesce(qpn), Instant::now() + self.shared.copy_timeout) {
            tracing::error!(
                qpn,
                "a copy into memory of a destroyed queue pair has not ended and may still write to it"
            );
        }
        let qp = self.shared.with(|core| core.remove_qp(qpn, &self.shared.doorbells));
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
        self.shared.run_step()
    }

    fn has_copied_recently(&self) -> bool {
        self.shared.progress.copied.is_recent()
    }

    fn end_polling(&self) {
        self.shared.take_over();
    }

    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        self.shared.sleep_between_steps(ready, timeout)
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

/// How long a peer of a card may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts the thread that makes the links of a card.
fn connector(shared: &Arc<Shared>) -> Result<Connector> {
    let requests = shared.with(|core| core.peers.requests());
    let own = shared.clone();
    Connector::start(requests, shared.progress.fork_guard, move |peer| {
        let ends = own.port.connect(Peer::near(peer), PATIENCE);
        own.with(|core| {
            let has_link = ends.is_ok();
            match ends {
                Ok(ends) => drop(ends.map(|ends| core.add_link(ends))),
                Err(error) => tracing::debug!(%error, "software HCA: packets for this peer are lost"),
            }
            core.peers.tried(peer, has_link);
        });
        own.wake();
    })
}

/// Lets the calling thread run as soon as its sleep ends, also on a core where a program spins. A card does not wait for a
/// time slice either.
fn own_thread_is_a_card() {
    // Both affect only the calling thread. The priority may be refused; then wake-ups are later.
    let _ = rustix::process::setpriority_process(None, -20);
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}

/// Copies that did not end by their deadline.
#[derive(Debug, Default)]
pub(super) struct StuckCopies(Mutex<Vec<Ticket>>);

impl StuckCopies {
    /// Waits for `copies` until `deadline`. Skips copies that are stuck, or queued behind a stuck one. Returns whether
    /// all are over.
    pub(super) fn wait(&self, copies: &[Ticket], deadline: Instant) -> bool {
        // No short circuit: copies on other GPUs may still end.
        copies.iter().filter(|copy| !self.wait_for(copy, deadline)).count() == 0
    }

    fn wait_for(&self, copy: &Ticket, deadline: Instant) -> bool {
        let start = Instant::now();
        while !copy.is_over() {
            // The queue position is known only after the copy starts, and other threads may find stuck copies
            // meanwhile.
            if self.is_stuck(copy) {
                return false;
            }
            let now = Instant::now();
            if now >= deadline {
                self.0.lock().push(copy.clone());
                return false;
            }
            back_off(now - start, deadline - now);
        }
        true
    }

    /// Whether `copy` is stuck or queued behind a stuck copy.
    fn is_stuck(&self, copy: &Ticket) -> bool {
        let mut stuck = self.0.lock();
        stuck.retain(|copy| !copy.is_over());
        !copy.is_over() && stuck.iter().any(|stuck| copy.is_behind(stuck))
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
