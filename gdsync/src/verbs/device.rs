//! Devices, contexts and protection domains.

use std::fmt;
use std::sync::Arc;

use super::attr::Access;
use super::cq::Cq;
use super::mr::Mr;
use super::placement::{OnGpu, Places};
use super::provider::Provider;
use super::qp::QpBuilder;
use super::transfer_path::Staging;
use super::visibility::WritableGpus;
use crate::cuda::Gpu;
use crate::direct::{Direct, probe, reach, self_test};
use crate::env::variable;
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;
use crate::hca::{FaultPlan, Gid, HcaStats, SoftHca, SoftHcaConfig};
use crate::memory::Memory;
use crate::proxy::Proxy;
use crate::rdma::{self, DeviceConfig, NearGpu, Port, Route, Survey};
use crate::recorder::Log;

/// Name of the software HCA.
const SOFT: &str = "soft0";

/// An RDMA device that can be opened: one of the machine, or the software HCA, which is always there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Soft,
    Rdma(Box<Survey>),
}

impl Device {
    /// All devices of this machine, the software HCA `soft0` last. Quick, and nothing else where there is no libibverbs.
    pub fn list() -> Vec<Device> {
        let rdma = rdma::survey().into_iter().map(|survey| Device(Kind::Rdma(Box::new(survey))));
        rdma.chain([Device(Kind::Soft)]).collect()
    }

    /// The device called `name`, or the one `GDSYNC_DEVICE` names, or the first usable one among those nearest to a GPU. Where
    /// no device of the machine can be used, that is `soft0`; a log line says why.
    ///
    /// # Errors
    /// [`Error::NoDevice`] lists the devices there are; [`Error::Library`] where `GDSYNC_LIBIBVERBS` or `GDSYNC_LIBMLX5` names what
    /// cannot be loaded, unless it is `soft0` that is asked for.
    pub fn find(name: Option<&str>) -> Result<Device> {
        let wanted = name.map(str::to_owned).or_else(|| variable("GDSYNC_DEVICE"));
        match wanted {
            Some(wanted) if wanted == SOFT => Ok(Device(Kind::Soft)),
            Some(wanted) => {
                rdma::check_named()?;
                let all = Self::list();
                let available = || all.iter().map(Device::name).collect::<Vec<_>>().join(", ");
                let found = all.iter().find(|device| device.name() == wanted).cloned();
                found.ok_or_else(|| Error::NoDevice { name: wanted, available: available() })
            }
            None if DeviceConfig::from_env()?.route == Some(Route::Soft) => Ok(Device(Kind::Soft)),
            None => Self::preferred(None),
        }
    }

    /// The usable device nearest to this GPU, unless `GDSYNC_DEVICE` names one: see [`Device::find`].
    ///
    /// # Errors
    /// As [`Device::find`].
    pub fn near(gpu: &Gpu) -> Result<Device> {
        let is_chosen =
            variable("GDSYNC_DEVICE").is_some() || variable("GDSYNC_PATH").as_deref() == Some("soft");
        if is_chosen { Self::find(None) } else { Self::preferred(gpu.pci_address()) }
    }

    fn preferred(gpu: Option<&str>) -> Result<Device> {
        rdma::check_named()?;
        let mut devices = rdma::survey();
        if let Some(at) = rdma::preferred(&devices, gpu) {
            return Ok(Device(Kind::Rdma(Box::new(devices.swap_remove(at)))));
        }
        for device in &devices {
            let why = device.refusal().unwrap_or_default();
            tracing::info!(device = %device.name, why, "an RDMA device that cannot be used");
        }
        tracing::info!("the software HCA is used: no RDMA device of this machine can be");
        Ok(Device(Kind::Soft))
    }

    /// The device's name, such as `mlx5_0`, or `soft0`.
    pub fn name(&self) -> &str {
        match &self.0 {
            Kind::Soft => SOFT,
            Kind::Rdma(survey) => &survey.name,
        }
    }

    /// Whether it is the software HCA.
    pub fn is_software(&self) -> bool {
        self.0 == Kind::Soft
    }

    fn survey(&self) -> Option<&Survey> {
        if let Kind::Rdma(survey) = &self.0 { Some(survey) } else { None }
    }

    /// The PCI address of its card, `domain:bus:device.function` in lower-case hexadecimal; that of the network card below a
    /// software RDMA device. `None` where there is none.
    pub fn pci_address(&self) -> Option<&str> {
        Some(&self.survey()?.place.as_ref()?.address)
    }

    /// The NUMA node of its card, if the kernel knows it.
    pub fn numa_node(&self) -> Option<u32> {
        self.survey()?.place.as_ref()?.numa
    }

    /// Its ports; none of the software HCA.
    pub fn ports(&self) -> &[Port] {
        self.survey().map_or(&[], |survey| &survey.ports)
    }

    /// The machine's GPUs, the nearest to its card first; none where it has no card.
    pub fn gpus(&self) -> &[NearGpu] {
        self.survey().map_or(&[], |survey| &survey.gpus)
    }

    /// Why it cannot be used, if so, with the fix.
    pub fn refusal(&self) -> Option<String> {
        self.survey()?.refusal()
    }

    /// Opens the device as the environment says: see [`DeviceConfig`]. On the software HCA, faults in `GDSYNC_FAULTS` are
    /// injected from the start: see [`FaultPlan`].
    ///
    /// # Errors
    /// As [`Device::open_with`].
    pub fn open(&self) -> Result<Context> {
        self.open_with(&DeviceConfig::from_env()?)
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::Library`], [`Error::Verbs`] and [`Error::Device`] of an RDMA device; [`Error::Sys`] when the system refuses
    /// memory, sockets or a thread.
    pub fn open_with(&self, config: &DeviceConfig) -> Result<Context> {
        match (&self.0, config.route) {
            (Kind::Soft, Some(route @ (Route::Direct | Route::Proxy))) => {
                let expected = "soft, which is the only one of soft0: name another device in GDSYNC_DEVICE, or no route in GDSYNC_PATH";
                Err(Error::invalid("route", route, expected))
            }
            (Kind::Soft, _) | (_, Some(Route::Soft)) => Context::soft(&SoftHcaConfig::from_env()?),
            (Kind::Rdma(survey), _) => connect(survey, config),
        }
    }
}

/// Opens an RDMA device: the card reads the rings itself if a test request shows that it does, all who are to ring can, and it reaches the
/// memory of GPUs. Otherwise a thread does, which also stages what the card does not reach.
fn connect(survey: &Survey, config: &DeviceConfig) -> Result<Context> {
    let open = rdma::Open::device(&survey.name, config)?;
    let SoftHcaConfig { strict, faults, .. } = SoftHcaConfig::from_env()?;
    let direct = || {
        let gpus = config.gpu.clone().map_or_else(Gpu::opened, |gpu| vec![gpu]);
        let direct = Direct::start(&open)?;
        direct.inject(faults.clone())?;
        let context = Context::with(Arc::new(direct), None)?;
        if config.route.is_none() {
            let tested = self_test(&context.alloc_pd()?);
            tested.inspect_err(|error| {
                let device = open.name();
                tracing::warn!(device, %error, "the card is not used directly: its self-test failed");
            })?;
        }
        for gpu in &gpus {
            let pd = context.alloc_pd()?;
            context.provider.admit(gpu, &mut || probe(&pd, gpu))?;
            if config.route.is_none() {
                reach(&pd, gpu)?;
            }
        }
        Ok(context)
    };
    let not_direct = match config.route {
        Some(Route::Direct) => return direct(),
        Some(_) => "another route was asked for (GDSYNC_PATH)".into(),
        None => match direct() {
            Ok(context) => return Ok(context),
            Err::<_, Error>(why) => why.to_string(),
        },
    };
    tracing::info!(device = open.name(), why = not_direct, "a thread reads the rings in place of the card");
    let proxy = Proxy::start(open, strict)?;
    proxy.inject(faults)?;
    Context::with(Arc::new(proxy), Some(not_direct.into()))
}

/// An open device. Clones share it.
#[derive(Clone)]
pub struct Context {
    provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    /// Why an RDMA device does not read the rings itself.
    not_direct: Option<Arc<str>>,
    /// While it is open, the process has a recording.
    log: Log,
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
    /// An open device that a test has made.
    #[cfg(test)]
    pub(crate) fn over(provider: Arc<dyn Provider>) -> Self {
        Self { provider, fork_guard: ForkGuard::default(), not_direct: None, log: Log::default() }
    }

    fn with(provider: Arc<dyn Provider>, not_direct: Option<Arc<str>>) -> Result<Self> {
        Ok(Self { provider, fork_guard: ForkGuard::default(), not_direct, log: Log::open()? })
    }

    /// Opens a software HCA with a configuration of its own.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn soft(config: &SoftHcaConfig) -> Result<Self> {
        Self::with(Arc::new(SoftHca::start(config)?), None)
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
        Ok(Pd(Arc::new(PdInner { provider, fork_guard, pdn, writable_gpus, _log: log })))
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
    provider: Arc<dyn Provider>,
    fork_guard: ForkGuard,
    pdn: u32,
    writable_gpus: WritableGpus,
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
