//! Open devices and protection domains.

use std::fmt;
use std::sync::Arc;

use super::cq::Cq;
use super::mr::{Mr, WritableGpus};
use super::qp::QpBuilder;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::Result;
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::Memory;
use gdsync_device::recorder::Log;
use gdsync_device::{Access, FaultPlan, Gid, HcaStats, OnGpu, Places, Provider, Staging};
use gdsync_soft::{SoftHca, SoftHcaConfig};

/// An open device. Clones share it.
#[derive(Clone)]
pub struct Context {
    pub(crate) provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    /// Why an RDMA device does not read the rings itself.
    not_direct: Option<Arc<str>>,
    /// While it is open, the process has a recording.
    log: Log,
    probe: GpuProbe,
}

/// Tests whether a GPU can ring the doorbells of a device.
pub(crate) type GpuProbe = fn(&Pd, &Gpu) -> Result<()>;

/// Of a device whose doorbells are memory of the host.
fn needs_no_probe(_: &Pd, _: &Gpu) -> Result<()> {
    Ok(())
}

impl Drop for Context {
    fn drop(&mut self) {
        // Nothing of its own: it is the provider that a child must not end.
        self.fork_guard.may_end(&self.provider);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.gid())
    }
}

impl Context {
    /// A context over a device of the application's own.
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

    /// Opens a software HCA with a configuration of its own.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn soft(config: &SoftHcaConfig) -> Result<Self> {
        Self::with(Arc::new(SoftHca::start(config)?), None, needs_no_probe)
    }

    /// A description of the device for reports: what consumes the rings.
    pub fn description(&self) -> &str {
        self.provider.description()
    }

    /// Why a thread reads the rings of an RDMA device in place of the card, with the fix where there is one; `None` where the
    /// card reads them, and for the software HCA.
    pub fn not_direct(&self) -> Option<&str> {
        self.not_direct.as_deref()
    }

    /// How bytes travel to a peer, for reports.
    pub fn wire(&self) -> &str {
        self.provider.wire()
    }

    /// Whether it is a software HCA.
    pub fn is_software(&self) -> bool {
        self.provider.is_software()
    }

    /// The address of the HCA.
    pub fn gid(&self) -> Gid {
        self.provider.gid()
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// From the device.
    pub fn alloc_pd(&self) -> Result<Pd> {
        self.fork_guard.check()?;
        let (provider, fork_guard, pdn) = (self.provider.clone(), self.fork_guard, self.provider.alloc_pd()?);
        let (writable_gpus, log) = (WritableGpus::default(), self.log.clone());
        Ok(Pd(Arc::new(PdInner { provider, fork_guard, pdn, writable_gpus, probe: self.probe, _log: log })))
    }

    /// Creates a completion queue for sharing between queue pairs, polled by the CPU.
    ///
    /// `entries`, 1 to 4194304, is rounded up to a power of two. It bounds the work requests outstanding on all its queues.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Sys`].
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

    /// Injects faults into the software HCA until the next call; the default plan has none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a probability outside 0 to 1.
    pub fn inject(&self, plan: FaultPlan) -> Result<()> {
        self.provider.inject(plan)
    }

    /// What the software HCA has counted; on the CPU proxy doorbells, WQEs and violations, on a card nothing.
    pub fn stats(&self) -> HcaStats {
        self.provider.stats()
    }

    /// Has the software HCA leave payload in GPU memory of so many bytes and more to copy engines of receivers from now on: see
    /// [`SoftHcaConfig::by_reference`]. Returns from how many it was; `None` from other devices, which have no choice.
    pub fn leave_by_reference(&self, bytes: usize) -> Option<usize> {
        self.provider.leave_by_reference(bytes)
    }

    /// Has GPU memory that is registered from now on staged, or not, where a thread posts to an RDMA device: a copy engine brings
    /// payload to pinned host memory of the same size before the device gets a request, and from there before a completion tells of
    /// what came. Peers cannot name such memory: see [`Mr::remote`]. Returns which it was, [`Staging::Refused`] in the beginning;
    /// `None` from other devices, which have no choice.
    pub fn stage(&self, which: Staging) -> Option<Staging> {
        self.provider.stage(which)
    }

    /// Runs device work on the calling thread, as every poll does. Returns whether there was any.
    pub fn progress(&self) -> bool {
        self.provider.progress()
    }
}

/// A protection domain: memory regions and queue pairs of one domain work together. Clones share it.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    pub(crate) provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    pdn: u32,
    writable_gpus: WritableGpus,
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

    /// Where its queue pairs may write GPU memory.
    pub(super) fn writable_gpus(&self) -> &WritableGpus {
        &self.0.writable_gpus
    }

    pub(crate) fn is_here(&self) -> bool {
        self.0.fork_guard.is_here()
    }

    /// Refuses a forked child of the process that opened the device.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.0.fork_guard.check()
    }

    /// Registers memory, so that work requests can name it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, as `ibv_reg_mr` refuses it.
    pub fn register(&self, memory: &Memory, access: Access) -> Result<Mr> {
        Mr::register(self.clone(), memory, access)
    }

    /// Starts building a queue pair.
    pub fn build_qp(&self) -> QpBuilder {
        QpBuilder::new(self.clone())
    }
}
