//! Devices, contexts and protection domains.

use std::fmt;
use std::sync::Arc;

use super::attr::Access;
use super::cq::Cq;
use super::mr::Mr;
use super::placement::{OnGpu, Places};
use super::provider::Provider;
use super::qp::QpBuilder;
use crate::env::variable;
use crate::error::{Error, Result};
use crate::hca::{FaultPlan, Gid, HcaStats, SoftHca, SoftHcaConfig};
use crate::memory::Memory;

/// Name of the software HCA.
const SOFT: &str = "soft0";

/// An RDMA device that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    name: String,
}

impl Device {
    /// All devices of this machine. This release knows the software HCA, which is always there.
    pub fn list() -> Vec<Device> {
        vec![Device { name: SOFT.into() }]
    }

    /// The device called `name`, or the one `GDSYNC_DEVICE` names, or the first.
    ///
    /// # Errors
    /// [`Error::NoDevice`] lists the devices there are.
    pub fn find(name: Option<&str>) -> Result<Device> {
        let wanted = name.map(str::to_owned).or_else(|| variable("GDSYNC_DEVICE"));
        let mut all = Self::list();
        let Some(wanted) = wanted else { return Ok(all.swap_remove(0)) };
        match all.iter().find(|d| d.name == wanted) {
            Some(device) => Ok(device.clone()),
            None => {
                let available = all.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
                Err(Error::NoDevice { name: wanted, available })
            }
        }
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens the device. Faults in `GDSYNC_FAULTS` are injected from the start: see [`FaultPlan`].
    ///
    /// # Errors
    /// [`Error::Sys`] when the system refuses memory, sockets or a thread.
    pub fn open(&self) -> Result<Context> {
        Context::soft(&SoftHcaConfig::from_env()?)
    }
}

/// An open device. Clones share it.
#[derive(Clone)]
pub struct Context {
    provider: Arc<dyn Provider>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.gid())
    }
}

impl Context {
    /// Opens a software HCA with a configuration of its own.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn soft(config: &SoftHcaConfig) -> Result<Self> {
        Ok(Self { provider: Arc::new(SoftHca::start(config)?) })
    }

    /// A description of the device for reports: what consumes the rings.
    pub fn description(&self) -> &'static str {
        "software HCA"
    }

    /// How bytes travel to a peer.
    pub fn wire(&self) -> &'static str {
        "shared memory"
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
        let pdn = self.provider.alloc_pd()?;
        Ok(Pd(Arc::new(PdInner { provider: self.provider.clone(), pdn })))
    }

    /// Creates a completion queue for sharing between queue pairs, polled by the CPU.
    ///
    /// `entries`, 1 to 4194304, is rounded up to a power of two. It bounds the work requests outstanding on all its queues.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Sys`].
    pub fn create_cq(&self, entries: usize) -> Result<Cq> {
        Cq::create(self.provider.clone(), entries, OnGpu::empty(), &Places::default())
    }

    /// Injects faults into the software HCA until the next call; the default plan has none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a probability outside 0 to 1.
    pub fn inject(&self, plan: FaultPlan) -> Result<()> {
        self.provider.inject(plan)
    }

    /// What the software HCA has counted.
    pub fn stats(&self) -> HcaStats {
        self.provider.stats()
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
    pdn: u32,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        self.provider.dealloc_pd(self.pdn);
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
