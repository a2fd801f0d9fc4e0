//! Open devices and protection domains.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::cq::Cq;
use super::mr::{Mr, WritableGpus};
use super::old_keys::OldKeys;
use super::qp::QpBuilder;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::Memory;
use gdsync_device::recorder::Log;
use gdsync_device::{Access, FaultPlan, Gid, HcaStats, OnGpu, Places, Provider, QpAddress, Staging};
use gdsync_shm::Backoff;
use gdsync_soft::{SoftHca, SoftHcaConfig};
use mlx5_ring::AddressVector;

/// An open device. Clones share it.
#[derive(Clone)]
pub struct Context {
    pub(crate) provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    /// Why a card does not read the rings itself.
    not_direct: Option<Arc<str>>,
    /// Keeps the flight recorder open.
    log: Log,
    probe: GpuProbe,
}

/// Tests whether a GPU can ring the doorbells of a device.
pub(crate) type GpuProbe = fn(&Pd, &Gpu) -> Result<()>;

/// The probe of devices whose doorbells are host memory.
fn needs_no_probe(_: &Pd, _: &Gpu) -> Result<()> {
    Ok(())
}

impl Drop for Context {
    fn drop(&mut self) {
        // Leaks the provider in a forked child, which must not close it.
        self.fork_guard.may_end(&self.provider);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.gid())
    }
}

impl Context {
    /// A context over an application-defined device.
    pub fn over(provider: Arc<dyn Provider>) -> Self {
        Self {
            provider,
            fork_guard: ForkGuard::default(),
            not_direct: None,
            log: Log::default(),
            probe: needs_no_probe,
        }
    }

    pub(crate) fn with(
        provider: Arc<dyn Provider>,
        not_direct: Option<Arc<str>>,
        probe: GpuProbe,
    ) -> Result<Self> {
        Ok(Self { provider, fork_guard: ForkGuard::default(), not_direct, log: Log::open()?, probe })
    }

    /// Opens a software HCA with its own configuration.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a bad configuration;
    /// [`Error::Sys`](crate::Error::Sys) when the system lacks memory, files or threads.
    pub fn soft(config: &SoftHcaConfig) -> Result<Self> {
        Self::with(Arc::new(SoftHca::start(config)?), None, needs_no_probe)
    }

    /// Describes for reports which device consumes the rings.
    pub fn description(&self) -> &str {
        self.provider.description()
    }

    /// Why a CPU thread reads the rings instead of the card, and the fix where there is one. `None` where the card
    /// reads them, and for the software HCA.
    pub fn not_direct(&self) -> Option<&str> {
        self.not_direct.as_deref()
    }

    /// Describes the transport to peers, for reports.
    pub fn wire(&self) -> &str {
        self.provider.wire()
    }

    /// Whether it is a software HCA.
    pub fn is_software(&self) -> bool {
        self.provider.is_software()
    }

    /// Whether its peers may be on other hosts: not those of the software HCA over shared memory.
    pub fn reaches_other_hosts(&self) -> bool {
        self.provider.reaches_other_hosts()
    }

    /// The address of the HCA.
    pub fn gid(&self) -> Gid {
        self.provider.gid()
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// Errors of the device: [`Error::Verbs`](crate::Error::Verbs) or [`Error::Sys`](crate::Error::Sys).
    pub fn alloc_pd(&self) -> Result<Pd> {
        self.fork_guard.check()?;
        Ok(self.pd(self.provider.alloc_pd()?))
    }

    /// Protection domain `pdn` of the provider, which the result frees.
    pub(crate) fn pd(&self, pdn: u32) -> Pd {
        let (provider, fork_guard) = (self.provider.clone(), self.fork_guard);
        let (writable_gpus, old_keys) = Default::default();
        let (probe, _log) = (self.probe, self.log.clone());
        Pd(Arc::new(PdInner { provider, fork_guard, pdn, writable_gpus, old_keys, probe, _log }))
    }

    /// Creates a completion queue that queue pairs can share and the CPU polls.
    ///
    /// `entries`, 1 to 4194304, is rounded up to a power of two. It limits the outstanding work requests of all its
    /// queues together.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) or [`Error::Sys`](crate::Error::Sys).
    pub fn create_cq(&self, entries: usize) -> Result<Cq> {
        self.fork_guard.check()?;
        Cq::create(
            self.provider.clone(),
            entries,
            OnGpu::empty(),
            &Places::default(),
            self.log.clone().on(self.gid()),
        )
    }

    /// Sets the fault plan of the software HCA. The default plan injects none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a probability outside 0 to 1.
    pub fn inject(&self, plan: FaultPlan) -> Result<()> {
        self.provider.inject(plan)
    }

    /// Statistics: all counters on the software HCA; doorbells, WQEs and violations on the CPU proxy; zeros on a card.
    pub fn stats(&self) -> HcaStats {
        self.provider.stats()
    }

    /// Sets the size from which the software HCA leaves GPU payload to the receiver's copy engine: see
    /// [`SoftHcaConfig::by_reference`]. Returns the previous value; `None` on other devices.
    pub fn set_by_reference(&self, bytes: usize) -> Option<usize> {
        self.provider.set_by_reference(bytes)
    }

    /// Sets whether GPU memory registered from now on is staged on the CPU proxy. A copy engine then copies payload to
    /// pinned host memory before the device gets a request, and from there before a completion announces it. Peers
    /// cannot access staged memory: see [`Mr::remote`]. Returns the previous value, initially [`Staging::Refused`];
    /// `None` on other devices.
    pub fn stage(&self, which: Staging) -> Option<Staging> {
        self.provider.stage(which)
    }

    /// Runs device work on the calling thread, as every poll does. Returns whether there was any.
    pub fn progress(&self) -> bool {
        self.provider.progress()
    }
}

/// A protection domain. Its memory regions and queue pairs work together. Clones share it.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    pub(crate) provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    pdn: u32,
    writable_gpus: WritableGpus,
    old_keys: Arc<OldKeys>,
    probe: GpuProbe,
    _log: Log,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        if self.fork_guard.may_end(&self.provider) {
            self.provider.dealloc_pd(self.pdn);
        }
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PD {:#x}", self.0.pdn)
    }
}

impl Pd {
    /// Tests whether this GPU can ring the doorbells of the device.
    pub(crate) fn probe(&self, gpu: &Gpu) -> Result<()> {
        (self.0.probe)(self, gpu)
    }

    pub(crate) fn provider(&self) -> &Arc<dyn Provider> {
        &self.0.provider
    }

    pub(crate) fn pdn(&self) -> u32 {
        self.0.pdn
    }

    /// The GPUs whose memory its queue pairs may write.
    pub(super) fn writable_gpus(&self) -> &WritableGpus {
        &self.0.writable_gpus
    }

    /// Keys of regions that were deregistered.
    pub(super) fn old_keys(&self) -> &Arc<OldKeys> {
        &self.0.old_keys
    }

    pub(crate) fn is_here(&self) -> bool {
        self.0.fork_guard.is_here()
    }

    /// Refuses a forked child of the process that opened the device.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.0.fork_guard.check()
    }

    /// Registers memory for use in work requests.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE,
    /// as in `ibv_reg_mr`; errors of the device.
    pub fn register(&self, memory: &Memory, access: Access) -> Result<Mr> {
        Mr::register(self.clone(), memory, access)
    }

    /// The address of a [datagram](QpBuilder::datagrams) queue pair that has this Q_Key. The first PSN of `to` does not matter.
    ///
    /// # Errors
    /// [`Error::Peer`](crate::Error::Peer) if it cannot be reached from this port; [`Error::Unsupported`](crate::Error::Unsupported)
    /// on a device without datagrams; [`Error::Verbs`](crate::Error::Verbs).
    pub fn datagram_address(&self, to: &QpAddress, qkey: u32) -> Result<AddressVector> {
        self.provider().datagram_address(self.pdn(), to, qkey)
    }

    /// Blocks until all that was made in it is gone, also what streams kept, and frees it; with the last domain also the device.
    /// All other clones must be gone.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`; it is then freed with the last object in it.
    pub fn close(self, timeout: Duration) -> Result<()> {
        let is_last = || Arc::strong_count(&self.0) == 1 && Arc::strong_count(&self.0.provider) == 1;
        wait_until_gone(timeout, "freeing a protection domain", is_last)
    }

    /// Starts building a queue pair.
    pub fn build_qp(&self) -> QpBuilder {
        QpBuilder::new(self.clone())
    }
}

/// Blocks until objects that streams keep are gone.
pub(crate) fn wait_until_gone(
    timeout: Duration,
    what: &'static str,
    is_gone: impl Fn() -> bool,
) -> Result<()> {
    let backoff = Backoff::new(Duration::from_micros(50));
    while !is_gone() {
        let waited = backoff.waited();
        if waited >= timeout {
            let awaited = "a stream that has work with it; synchronize the stream first";
            return Err(Error::late(what, timeout, awaited));
        }
        if !backoff.spin_after(waited) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    Ok(())
}
