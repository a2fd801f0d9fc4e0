//! Queues in GPU memory, created by firmware commands (DevX).
//!
//! Verbs objects must have their queues in host memory. Objects created by commands may have them in any memory that
//! the card can access, such as GPU memory by dma-buf. In return, everything that libibverbs does for a queue pair is
//! done here: path resolution, transitions, doorbell pages.
//!
//! It is used only when a queue pair requests GPU memory (`OnGpu`). Then its completion queues and itself are created
//! by commands, including parts in host memory. Shared completion queues may be verbs objects.
//!
//! Asynchronous events of these objects come through a channel of their own ([`EventChannel`]). Without it, a queue pair that
//! fails without a CQE is noticed by its flushes.

mod mailbox;
mod object;
mod queues;
mod steps;
mod umem;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{mlx5dv_context, mlx5dv_context_flags, mlx5dv_obj, mlx5dv_obj_type, mlx5dv_pd};

use self::mailbox::Limits;
pub(super) use self::object::EventChannel;
pub(super) use self::object::Object;
use self::object::ask;
pub(super) use self::queues::DevxQp;
pub(super) use self::umem::Umem;
use super::registers::{Registers, Uar, Uars};
use crate::explain::{Call, failed};
use crate::{Domain, Open};
use gdsync_device::error::{Error, Result};

/// A device with DevX.
pub(super) struct Devx {
    open: Arc<Open>,
    mlx5: &'static Mlx5,
    limits: Limits,
    /// Event queue that completion queues must name. They are never armed, so it stays empty.
    eqn: u32,
    uars: Uars,
    /// Doorbell page that completion queues must name. Never written.
    cq_uar: Mutex<Option<Arc<Uar>>>,
    registers: Arc<Registers>,
    channel: Option<Arc<EventChannel>>,
}

impl fmt::Debug for Devx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevX of {:?}: {:?}", self.open, self.limits)
    }
}

impl Devx {
    /// Queries the device's capabilities.
    ///
    /// # Errors
    /// [`Error::Verbs`] without DevX; [`Error::Device`] for an old CQE format.
    pub(super) fn new(
        open: &Arc<Open>,
        mlx5: &'static Mlx5,
        registers: &Arc<Registers>,
        channel: Option<Arc<EventChannel>>,
    ) -> Result<Self> {
        let limits = Limits::of(&ask(open, mlx5, &mailbox::query_hca_cap())?);
        let mut result = mlx5dv_context::zeroed();
        // SAFETY: the device is open and `result` is writable.
        let errno = unsafe { mlx5.mlx5dv_query_device(open.context().as_ptr(), &raw mut result) };
        if errno != 0 {
            return Err(failed("mlx5dv_query_device", open.name(), &Call::Other, errno));
        }
        if !result.flags.contains(mlx5dv_context_flags::MLX5DV_CONTEXT_FLAGS_CQE_V1) {
            let why = "its completions have an old format (cqe_version 0): update the firmware, or leave the queues in host \
                       memory (OnGpu::empty())";
            return Err(Error::Device { device: open.name().to_owned(), why: why.into() });
        }
        let mut eqn = 0;
        // SAFETY: the device is open and `eqn` is writable; vector 0 always exists.
        let errno = unsafe { mlx5.mlx5dv_devx_query_eqn(open.context().as_ptr(), 0, &raw mut eqn) };
        if errno != 0 {
            return Err(failed("mlx5dv_devx_query_eqn", open.name(), &Call::Other, errno));
        }
        tracing::debug!(device = open.name(), ?limits, eqn, "DevX");
        let (uars, registers) = (Uars::new(open, mlx5), registers.clone());
        Ok(Self { open: open.clone(), mlx5, limits, eqn, uars, cq_uar: Mutex::default(), registers, channel })
    }

    /// Checks a size against the card's limit.
    fn check(&self, what: &'static str, log: u32, most: u32) -> Result<()> {
        if log <= most {
            return Ok(());
        }
        let why = format!("it has no more than {} {what}, {} are asked for", 1u64 << most, 1u64 << log);
        Err(Error::Device { device: self.open.name().to_owned(), why })
    }

    fn shared_uar(&self) -> Result<Arc<Uar>> {
        let mut shared = self.cq_uar.lock();
        if let Some(uar) = &*shared {
            return Ok(uar.clone());
        }
        Ok(shared.insert(self.uars.acquire()?).clone())
    }

    /// Firmware number of a protection domain.
    fn pdn(&self, domain: &Domain) -> Result<u32> {
        let mut result = mlx5dv_pd::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.pd.r#in = domain.raw().as_ptr();
        object.pd.out = &raw mut result;
        // SAFETY: the object and the output match the object type.
        let errno = unsafe { self.mlx5.mlx5dv_init_obj(&raw mut object, mlx5dv_obj_type::MLX5DV_OBJ_PD) };
        if errno == 0 {
            Ok(result.pdn)
        } else {
            Err(failed("mlx5dv_init_obj", self.open.name(), &Call::Other, errno))
        }
    }
}
