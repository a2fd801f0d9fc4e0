//! The choices of a program that opens the library, and the ladder of backends that is tried for them.

use crate::backend::dmabuf::DmaBuf;
use crate::backend::gdrdrv::Gdrdrv;
use crate::backend::host::Host;
use crate::backend::rm::Rm;
use crate::backend::{Backend, BackendKind};
use crate::error::{Error, Refusal, Result};
use crate::gdr::Gdr;
use crate::survey::Survey;
use crate::system::System;

/// How to open. See [`Gdr::builder`].
#[derive(Debug, Default)]
pub struct GdrBuilder {
    backend: Option<BackendKind>,
    allow_volatile: bool,
    require_gpu: bool,
    system: Option<System>,
}

/// The same with the environment read.
#[derive(Debug)]
pub(crate) struct Ladder {
    /// This backend or none.
    chosen: Option<BackendKind>,
    pub(crate) allow_volatile: bool,
    require_gpu: bool,
    pub(crate) system: System,
}

/// What the first backend gave that did not refuse.
#[derive(Debug)]
pub(crate) struct Rung<T> {
    pub(crate) kind: BackendKind,
    pub(crate) found: T,
    /// Why the earlier ones did not serve.
    pub(crate) refusals: Vec<Refusal>,
}

impl GdrBuilder {
    /// Uses this backend or none, whatever the environment says.
    #[must_use]
    pub fn backend(mut self, kind: BackendKind) -> Self {
        self.backend = Some(kind);
        self
    }

    /// Accepts a `gdrdrv` whose mappings vanish when the GPU memory is freed: a later access kills the
    /// process with `SIGBUS`. Without this such a module is refused.
    #[must_use]
    pub fn allow_volatile(mut self) -> Self {
        self.allow_volatile = true;
        self
    }

    /// Uses no plain host memory in place of a GPU, unless that backend is asked for by name.
    #[must_use]
    pub fn require_gpu(mut self) -> Self {
        self.require_gpu = true;
        self
    }

    /// Opens on this system in place of [`System::real`].
    #[must_use]
    pub fn system(mut self, system: System) -> Self {
        self.system = Some(system);
        self
    }

    /// Opens the library, at once: see [`Gdr::open`].
    ///
    /// # Errors
    /// [`Error::NoBackend`] with the reason of every backend that was tried, [`Error::InvalidArgument`] for a
    /// `GDRCOPY_BACKEND` that does not exist.
    pub fn open(self) -> Result<Gdr> {
        self.ladder()?.open()
    }

    /// Finds out which backend [`open`](Self::open) would most probably take, without initialising CUDA: that cannot be
    /// undone, costs GPU memory, and keeps children that are forked afterwards from using CUDA.
    /// [`Survey::open`] opens when the time has come.
    ///
    /// # Errors
    /// [`Error::NoBackend`] with the reason of every backend if none can serve; else as [`open`](Self::open).
    pub fn survey(self) -> Result<Survey> {
        Survey::new(self.ladder()?)
    }

    fn ladder(self) -> Result<Ladder> {
        Ok(Ladder {
            chosen: self.backend.map_or_else(from_environment, |kind| Ok(Some(kind)))?,
            allow_volatile: self.allow_volatile,
            require_gpu: self.require_gpu,
            system: self.system.unwrap_or_else(System::real),
        })
    }
}

/// `GDRCOPY_BACKEND` names a backend; `GDRCOPY_USE_DMABUF_MMAP=1` is GDRCopy's way to ask for dma-buf.
fn from_environment() -> Result<Option<BackendKind>> {
    if let Some(name) = std::env::var_os("GDRCOPY_BACKEND") {
        return name.to_string_lossy().parse().map(Some);
    }
    let dmabuf = std::env::var("GDRCOPY_USE_DMABUF_MMAP").is_ok_and(|value| value == "1");
    Ok(dmabuf.then_some(BackendKind::DmaBuf))
}

impl Ladder {
    /// Opens the first backend that works.
    pub(crate) fn open(&self) -> Result<Gdr> {
        // Where there is a GPU, plain memory would only hide that it cannot be mapped.
        let rung = self.climb(|| self.system.cuda().is_ok(), |kind| self.open_backend(kind))?;
        Ok(Gdr::new(rung.found, rung.refusals, self.system.clone()))
    }

    /// Tries the backends in their order. `has_gpu` is asked when plain memory's turn has come.
    pub(crate) fn climb<T>(
        &self,
        has_gpu: impl Fn() -> bool,
        attempt: impl Fn(BackendKind) -> Result<T>,
    ) -> Result<Rung<T>> {
        let kinds = self.chosen.as_ref().map_or(&BackendKind::LADDER[..], std::slice::from_ref);
        let mut refusals = Vec::new();
        for &kind in kinds {
            if kind == BackendKind::Host && self.chosen.is_none() && (self.require_gpu || has_gpu()) {
                continue;
            }
            match attempt(kind) {
                Ok(found) => return Ok(Rung { kind, found, refusals }),
                Err(error) => refusals.push(Refusal { backend: kind, error }),
            }
        }
        Err(Error::NoBackend(refusals))
    }

    fn open_backend(&self, kind: BackendKind) -> Result<Box<dyn Backend>> {
        let system = &self.system;
        Ok(match kind {
            BackendKind::Gdrdrv => Box::new(Gdrdrv::open(system, self.allow_volatile)?),
            BackendKind::DmaBuf => Box::new(DmaBuf::open(system)?),
            BackendKind::Rm => Box::new(Rm::open(system)?),
            BackendKind::Host => Box::new(Host::open(system)?),
        })
    }
}
