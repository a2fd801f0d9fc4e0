//! Opening the library: the builder, the order in which backends are tried, and the opened library.

use std::fmt;
use std::sync::Arc;

use once_cell::sync::OnceCell;

use crate::backend::Backend;
use crate::backend::dmabuf::DmaBuf;
use crate::backend::gdrdrv::Gdrdrv;
use crate::backend::host::Host;
use crate::backend::rm::Rm;
use crate::cuda::{AllocKind, GpuInfo};
use crate::error::{Error, Refusal, Result};
use crate::fork::Owner;
use crate::mapping::{Mapping, Opened};
use crate::pin::{GpuBuffer, Pin};
use crate::system::System;
use crate::types::{Attribute, BackendKind, PinFlags};

/// `cuMemAlloc` takes smaller allocations from shared blocks of this size, bytes (H200, driver 580).
const SHARED_BLOCK: usize = 2 << 20;

/// The library, opened on one backend. Clones share the backend, which closes with the last clone, pin, mapping and buffer. Any
/// thread may use it; a forked child must open its own.
///
/// Closing frees a little GPU memory, for which CUDA may wait for all work of the GPU; so does an open that fails. See
/// [`GpuBuffer`]. Pins and mappings never wait for that.
#[derive(Clone, Debug)]
pub struct Gdr {
    opened: Arc<Opened>,
    refusals: Arc<[Refusal]>,
}

/// The backend and the refusals of the earlier ones, on one line.
impl fmt::Display for Gdr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.backend())?;
        for refusal in self.refusals() {
            write!(f, "; not {refusal}")?;
        }
        Ok(())
    }
}

impl Gdr {
    fn new(backend: Box<dyn Backend>, refusals: Vec<Refusal>, system: System) -> Self {
        let opened = Arc::new(Opened { backend, system, owner: Owner::this_process() });
        let gdr = Self { opened, refusals: refusals.into() };
        if gdr.backend() == BackendKind::Host {
            tracing::warn!("no GPU: mappings show plain host memory ({gdr})");
        } else {
            tracing::info!("GPU memory is mapped by {gdr}");
        }
        gdr
    }

    /// Opens the first backend of [`BackendKind::ALL`] that works here, or the one that `GDRCOPY_BACKEND` names. Logs the choice
    /// and the refusals of the earlier ones.
    ///
    /// Every backend but `gdrdrv` and `host` initialises CUDA for that, makes a context on a GPU and proves a mapping. A program
    /// that may not need GPU memory, or that forks later, uses [`GdrBuilder::survey`] instead.
    ///
    /// # Errors
    /// As [`GdrBuilder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// A builder, for other choices than those of [`Gdr::open`].
    pub fn builder() -> GdrBuilder {
        GdrBuilder::default()
    }

    /// The backend in use.
    pub fn backend(&self) -> BackendKind {
        self.opened.backend.kind()
    }

    /// Why the backends before it were not used.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Version of the kernel module, `(major, minor)`; none for backends without one.
    pub fn driver_version(&self) -> Option<(u16, u16)> {
        self.opened.backend.driver_version()
    }

    /// A property of the backend.
    ///
    /// # Errors
    /// [`Error::Sys`] of the kernel module.
    pub fn attribute(&self, attribute: Attribute) -> Result<u32> {
        self.opened.backend.attribute(attribute)
    }

    /// The GPUs of this process; none on a machine without CUDA.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::OtherProcess`] in a forked child.
    pub fn gpus(&self) -> Result<Vec<GpuInfo>> {
        self.opened.owner.check()?;
        self.opened.system.cuda().map_or_else(|_| Ok(Vec::new()), |cuda| cuda.devices())
    }

    /// Pins `len` bytes of GPU memory at `addr`: any address and length within one allocation, aligned or not. See
    /// [`PinFlags::WHOLE_PAGES`] for what leaves it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::NotMappable`] and [`Error::BeyondAllocation`] for the range, [`Error::Exhausted`] for
    /// BAR1 space, [`Error::Unsupported`] for what the backend lacks, [`Error::Invalidated`] if the memory was freed meanwhile,
    /// [`Error::OtherProcess`] in a forked child; [`Error::ProofFailed`], [`Error::Cuda`], [`Error::Rm`] and [`Error::Sys`] of the
    /// drivers.
    pub fn pin(&self, addr: u64, len: usize) -> Result<Pin> {
        self.pin_with(addr, len, PinFlags::empty())
    }

    /// Pins with flags.
    ///
    /// # Errors
    /// As [`Gdr::pin`]; [`Error::InvalidArgument`] for unknown flags.
    pub fn pin_with(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Pin> {
        Pin::new(&self.opened, addr, len, flags)
    }

    /// Pins and maps in one step.
    ///
    /// # Errors
    /// As [`Gdr::pin`] and [`Pin::map`].
    pub fn map(&self, addr: u64, len: usize) -> Result<Mapping> {
        self.pin(addr, len)?.map()
    }

    /// Allocates GPU memory for mapping: aligned to GPU pages, in 2 MiB blocks that CUDA does not reuse while a mapping lives, and
    /// with synchronous CUDA copies (`SYNC_MEMOPS`). `device` is a CUDA ordinal. On the host backend this is plain memory.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the GPU is full, [`Error::InvalidArgument`] for a length of 0, [`Error::Cuda`].
    pub fn alloc(&self, device: i32, len: usize) -> Result<GpuBuffer> {
        self.alloc_with(device, len, AllocKind::Malloc)
    }

    /// Allocates memory of a kind; the host backend has only one.
    ///
    /// # Errors
    /// As [`Gdr::alloc`].
    pub fn alloc_with(&self, device: i32, len: usize, kind: AllocKind) -> Result<GpuBuffer> {
        self.opened.owner.check()?;
        if len == 0 || isize::try_from(len).is_err() {
            return Err(Error::invalid("length", len, "at least one byte, at most half the address space"));
        }
        let shared = kind == AllocKind::Malloc && self.backend() != BackendKind::Host;
        let size = if shared { len.next_multiple_of(SHARED_BLOCK) } else { len };
        Ok(GpuBuffer::new(self.opened.backend.allocate_as(device, size, kind)?, len, self.opened.clone()))
    }
}

/// Choices for opening the library. See [`Gdr::builder`].
#[derive(Debug, Default)]
pub struct GdrBuilder {
    backend: Option<BackendKind>,
    allow_volatile: bool,
    require_gpu: bool,
    system: Option<System>,
}

/// The choices of a builder and of the environment.
#[derive(Debug)]
struct Options {
    /// The only backend to try.
    chosen: Option<BackendKind>,
    allow_volatile: bool,
    require_gpu: bool,
    system: System,
}

/// The result of the first backend that did not refuse.
#[derive(Debug)]
struct Selected<T> {
    kind: BackendKind,
    found: T,
    /// The errors of the earlier ones.
    refusals: Vec<Refusal>,
}

impl GdrBuilder {
    /// Tries this backend only; overrides the environment.
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

    /// Does not fall back to plain host memory, unless that backend is named.
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

    /// Opens the library: see [`Gdr::open`].
    ///
    /// # Errors
    /// [`Error::NoBackend`] with the error of every backend that was tried; [`Error::InvalidArgument`] if `GDRCOPY_BACKEND` names
    /// no backend.
    pub fn open(self) -> Result<Gdr> {
        self.options()?.open()
    }

    /// Finds the backend that [`open`](Self::open) would most likely take, without initialising CUDA, which cannot be undone,
    /// costs GPU memory, and stops children forked afterwards from using CUDA. [`Survey::open`] opens later.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn survey(self) -> Result<Survey> {
        Survey::new(self.options()?)
    }

    fn options(self) -> Result<Options> {
        Ok(Options {
            chosen: self.backend.map_or_else(from_environment, |kind| Ok(Some(kind)))?,
            allow_volatile: self.allow_volatile,
            require_gpu: self.require_gpu,
            system: self.system.unwrap_or_else(System::real),
        })
    }
}

/// `GDRCOPY_BACKEND` names a backend; `GDRCOPY_USE_DMABUF_MMAP=1` is GDRCopy's variable for dma-buf.
fn from_environment() -> Result<Option<BackendKind>> {
    if let Some(name) = std::env::var_os("GDRCOPY_BACKEND") {
        return name.to_string_lossy().parse().map(Some);
    }
    let dmabuf = std::env::var("GDRCOPY_USE_DMABUF_MMAP").is_ok_and(|value| value == "1");
    Ok(dmabuf.then_some(BackendKind::DmaBuf))
}

impl Options {
    /// Opens the first backend that works.
    fn open(&self) -> Result<Gdr> {
        // With a GPU, plain memory would hide that the GPU cannot be mapped.
        let selected =
            self.first_that_works(|| self.system.cuda().is_ok(), |kind| self.open_backend(kind))?;
        Ok(Gdr::new(selected.found, selected.refusals, self.system.clone()))
    }

    /// Tries the backends in order. `has_gpu` is called before the host backend is tried.
    fn first_that_works<T>(
        &self,
        has_gpu: impl Fn() -> bool,
        attempt: impl Fn(BackendKind) -> Result<T>,
    ) -> Result<Selected<T>> {
        let kinds = self.chosen.as_ref().map_or(&BackendKind::ALL[..], std::slice::from_ref);
        let mut refusals = Vec::new();
        for &kind in kinds {
            if kind == BackendKind::Host && self.chosen.is_none() && (self.require_gpu || has_gpu()) {
                continue;
            }
            match attempt(kind) {
                Ok(found) => return Ok(Selected { kind, found, refusals }),
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

/// A library that opens at its first use; made by [`GdrBuilder::survey`].
///
/// Before that no mapping is proved, and only the device file of `gdrdrv` is open, which needs no CUDA. Any thread may use it; a
/// forked child must make its own.
#[derive(Debug)]
pub struct Survey {
    options: Options,
    selected: Selected<Found>,
    owner: Owner,
}

/// A backend as the survey found it.
#[derive(Debug)]
enum Found {
    /// Opened: it needs no CUDA.
    Open(Gdr),
    /// Likely to work.
    Likely(OnceCell<Gdr>),
}

impl Survey {
    fn new(options: Options) -> Result<Self> {
        let system = &options.system;
        // When the host backend is tried, the device files of a GPU were missing.
        let selected = options.first_that_works(
            || false,
            |kind| {
                Ok(match kind {
                    BackendKind::Gdrdrv => {
                        let backend = Gdrdrv::open(system, options.allow_volatile)?;
                        // The first backend, so there are no refusals.
                        Found::Open(Gdr::new(Box::new(backend), Vec::new(), system.clone()))
                    }
                    BackendKind::DmaBuf => {
                        DmaBuf::survey(system)?;
                        Found::Likely(OnceCell::new())
                    }
                    BackendKind::Rm => {
                        Rm::survey(system)?;
                        Found::Likely(OnceCell::new())
                    }
                    BackendKind::Host => Found::Likely(OnceCell::new()),
                })
            },
        )?;
        let survey = Self { options, selected, owner: Owner::this_process() };
        if survey.opened().is_none() {
            tracing::info!("likely backend: {survey}");
        }
        Ok(survey)
    }

    /// The library; the first call opens it as [`GdrBuilder::open`] does, perhaps on another backend than
    /// [`backend`](Self::backend) predicted.
    ///
    /// # Errors
    /// [`Error::NoBackend`] with the error of every backend; the next call tries again.
    /// [`Error::OtherProcess`] in a forked child.
    pub fn open(&self) -> Result<&Gdr> {
        // A thread that the child does not have may have been opening.
        self.owner.check()?;
        match &self.selected.found {
            Found::Open(gdr) => Ok(gdr),
            Found::Likely(opened) => opened.get_or_try_init(|| self.options.open()),
        }
    }

    /// The library, if it is open.
    pub fn opened(&self) -> Option<&Gdr> {
        match &self.selected.found {
            Found::Open(gdr) => Some(gdr),
            Found::Likely(opened) => opened.get(),
        }
    }

    /// The backend in use, or the one that is most likely to be.
    pub fn backend(&self) -> BackendKind {
        self.opened().map_or(self.selected.kind, Gdr::backend)
    }

    /// As [`Gdr::driver_version`]; does not open.
    pub fn driver_version(&self) -> Option<(u16, u16)> {
        self.opened().and_then(Gdr::driver_version)
    }

    /// As [`Gdr::attribute`], for the backend that [`backend`](Self::backend) names; does not open.
    ///
    /// # Errors
    /// As [`Gdr::attribute`].
    pub fn attribute(&self, attribute: Attribute) -> Result<u32> {
        match self.opened() {
            Some(gdr) => gdr.attribute(attribute),
            None => Ok(self.selected.kind.attribute(attribute)),
        }
    }
}

/// The backend, whether it is open, and the refusals of the earlier ones, on one line.
impl fmt::Display for Survey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(gdr) = self.opened() {
            return gdr.fmt(f);
        }
        write!(f, "{} (to be opened at first use)", self.selected.kind)?;
        self.selected.refusals.iter().try_for_each(|refusal| write!(f, "; not {refusal}"))
    }
}
