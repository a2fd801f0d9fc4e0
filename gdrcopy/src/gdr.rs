//! The opened library: which backend serves, and why not an earlier one.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Attribute, Backend, BackendKind, PinFlags};
use crate::buffer::GpuBuffer;
use crate::builder::GdrBuilder;
use crate::cuda::{AllocKind, Cuda, GpuInfo};
use crate::error::{Error, Refusal, Result};
use crate::fork::Owner;
use crate::mapping::Mapping;
use crate::pin::Pin;
use crate::system::System;

/// `cuMemAlloc` serves what is smaller out of blocks of this size, bytes (seen on an H200 with driver 580).
const SHARED_BLOCK: usize = 2 << 20;

/// The library, opened on one backend. Cloning is cheap; the backend lives until the last clone, pin,
/// mapping and buffer is gone. Any thread may use it; a forked child must open for itself.
///
/// Closing frees a little GPU memory, for which CUDA may wait for all work of the GPU, and so does opening that fails: see
/// [`GpuBuffer`]. Pins and mappings never wait for that.
#[derive(Clone, Debug)]
pub struct Gdr(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    backend: Box<dyn Backend>,
    refusals: Vec<Refusal>,
    system: System,
    owner: Owner,
}

/// The backend and why the earlier ones were not used, on one line.
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
    /// Takes a backend into use.
    pub(crate) fn new(backend: Box<dyn Backend>, refusals: Vec<Refusal>, system: System) -> Self {
        let gdr = Self(Arc::new(Inner { backend, refusals, system, owner: Owner::this_process() }));
        if gdr.backend() == BackendKind::Host {
            tracing::warn!("no GPU: mappings show plain host memory ({gdr})");
        } else {
            tracing::info!("GPU memory is mapped by {gdr}");
        }
        gdr
    }

    /// Opens the best backend of this machine, in the order of [`BackendKind::LADDER`], or the one that
    /// `GDRCOPY_BACKEND` names. Logs once which it is and why not an earlier one.
    ///
    /// Every backend but `gdrdrv` and `host` initialises CUDA for that, makes a context on a GPU and tries a mapping.
    /// A program that does not know yet whether it needs any of this, or that may fork, takes
    /// [`GdrBuilder::survey`] instead.
    ///
    /// # Errors
    /// As [`GdrBuilder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// Opens with choices of your own.
    pub fn builder() -> GdrBuilder {
        GdrBuilder::default()
    }

    /// The backend in use.
    pub fn backend(&self) -> BackendKind {
        self.0.backend.kind()
    }

    /// Why the backends before it in the ladder were not used.
    pub fn refusals(&self) -> &[Refusal] {
        &self.0.refusals
    }

    /// Version of the kernel module, `(major, minor)`; none for backends without one.
    pub fn driver_version(&self) -> Option<(u16, u16)> {
        self.0.backend.driver_version()
    }

    /// A property of the backend.
    ///
    /// # Errors
    /// What the backend says.
    pub fn attribute(&self, attribute: Attribute) -> Result<u32> {
        self.0.backend.attribute(attribute)
    }

    /// The GPUs of this process; none on a machine without CUDA.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::OtherProcess`] in a forked child.
    pub fn gpus(&self) -> Result<Vec<GpuInfo>> {
        self.0.owner.check()?;
        self.0.system.cuda().map_or_else(|_| Ok(Vec::new()), |cuda| cuda.devices())
    }

    /// Pins `len` bytes of GPU memory at `addr`: any address and length within one allocation, aligned or not. See
    /// [`PinFlags::WHOLE_PAGES`] for what leaves it.
    ///
    /// # Errors
    /// What is wrong with the range, or what the backend lacks.
    pub fn pin(&self, addr: u64, len: usize) -> Result<Pin> {
        self.pin_with(addr, len, PinFlags::empty())
    }

    /// Pins with flags.
    ///
    /// # Errors
    /// As [`Gdr::pin`]; [`Error::InvalidArgument`] for unknown flags.
    pub fn pin_with(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Pin> {
        self.0.owner.check()?;
        if !PinFlags::all().contains(flags) {
            return Err(Error::invalid("pin flags", flags.bits(), "a combination of PinFlags"));
        }
        if addr == 0 {
            return Err(Error::invalid("GPU address", 0, "an address that CUDA handed out"));
        }
        if len == 0 || addr.checked_add(len as u64).is_none() || isize::try_from(len).is_err() {
            return Err(Error::invalid("length", len, "one byte to the rest of the allocation"));
        }
        Ok(Pin::new(self.0.backend.pin(addr, len, flags)?, addr, len, self.clone()))
    }

    /// Pins and maps in one step.
    ///
    /// # Errors
    /// As [`Gdr::pin`] and [`Pin::map`].
    pub fn map(&self, addr: u64, len: usize) -> Result<Mapping> {
        self.pin(addr, len)?.map()
    }

    /// Allocates GPU memory that is made for mapping: aligned to GPU pages, in 2 MiB blocks that CUDA gives to nobody else
    /// while a mapping lives, and CUDA copies on it are synchronous (`SYNC_MEMOPS`). `device` is a CUDA ordinal. On the
    /// host backend this is plain memory.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the GPU is full, [`Error::InvalidArgument`] for a length of 0, [`Error::Cuda`].
    pub fn alloc(&self, device: i32, len: usize) -> Result<GpuBuffer> {
        self.alloc_with(device, len, AllocKind::Malloc)
    }

    /// Allocates in a way of your choice; the host backend has only one.
    ///
    /// # Errors
    /// As [`Gdr::alloc`].
    pub fn alloc_with(&self, device: i32, len: usize, kind: AllocKind) -> Result<GpuBuffer> {
        self.0.owner.check()?;
        if len == 0 || isize::try_from(len).is_err() {
            return Err(Error::invalid("length", len, "at least one byte, at most half the address space"));
        }
        let shared = kind == AllocKind::Malloc && self.backend() != BackendKind::Host;
        let size = if shared { len.next_multiple_of(SHARED_BLOCK) } else { len };
        Ok(GpuBuffer::new(self.0.backend.allocate_as(device, size, kind)?, len, self.clone()))
    }

    /// The CUDA driver that knows the memory; none on the host backend, which does without.
    pub(crate) fn cuda(&self) -> Option<&Arc<dyn Cuda>> {
        if self.backend() == BackendKind::Host { None } else { self.0.system.cuda().ok() }
    }
}
