//! No module: the NVIDIA driver's resource-manager interface.
//!
//! The driver maps GPU memory for the CPU when one of its clients asks for it. CUDA is such a client. This
//! backend is another one, in the same process: it gets a handle of its own for CUDA's memory object and
//! asks the driver to map that.
//!
//! - `cuMemCreate` memory is exported by CUDA as a file descriptor and imported.
//! - `cuMemAlloc` memory is duplicated from CUDA's client, whose handles stand in the CUDA IPC handle. The
//!   layout of that handle is not documented, so every number is compared with what CUDA says.
//! - Stream-ordered pool memory has neither and is refused.
//!
//! The interface is not documented for use by others either, so nothing is believed: a route is proved with
//! memory of our own at its first use on each GPU, in both directions, and each mapping of the user's memory
//! is compared with what CUDA shows before it is handed out. The user's memory is never written for that,
//! because a running kernel's result could be lost; so there, equal bytes in other places go unnoticed.
//! A mapping of a pin's first pages that ends before the byte asked for has nothing to compare. Of a range that leaves
//! its allocation ([`PinFlags::WHOLE_PAGES`]), the part in the first allocation is compared.
//!
//! A pin holds the memory: after a free the mapping shows the old bytes. Mappings are write-combined BAR1
//! mappings; each takes one open file.
//!
//! Facts measured on an H200 with the driver 580.159.04.

pub(crate) mod abi;
mod client;
mod gpu;
mod handle;
mod mapping;
mod pin;
mod proof;
pub(crate) mod status;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    Allocation, Attribute, Backend, BackendKind, CudaAllocation, GPU_PAGE, PinFlags, Pinned, locate,
};
use crate::cuda::{AllocKind, Cuda, MemoryKind};
use crate::error::{Error, Result};
use crate::system::System;
use client::Client;
use gpu::Gpu;
use pin::RmPin;

/// How memory of a kind comes to a handle of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// Duplicated from CUDA's client.
    Malloc,
    /// Exported and imported.
    Vmm,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malloc => "cuMemAlloc",
            Self::Vmm => "cuMemCreate",
        })
    }
}

/// The backend.
#[derive(Debug)]
pub(crate) struct Rm {
    cuda: Arc<dyn Cuda>,
    /// By CUDA ordinal, opened at first use. Dropped before the client.
    gpus: Mutex<HashMap<i32, Arc<Gpu>>>,
    client: Arc<Client>,
}

impl Rm {
    /// Whether there is CUDA and the driver takes clients; does not initialise CUDA.
    pub(crate) fn survey(system: &System) -> Result<()> {
        system.cuda_version()?;
        Client::open(system.kernel.clone()).map(drop)
    }

    /// What [`Backend::attribute`] gives on every machine.
    pub(crate) fn attribute_of(attribute: Attribute) -> u32 {
        match attribute {
            Attribute::UsePersistentMapping | Attribute::SupportPinFlagForcePcie => 1,
            Attribute::UsingDmaBufMmap => 0,
        }
    }

    /// Opens the driver and proves that `cuMemAlloc` memory of the first GPU can be mapped.
    ///
    /// # Errors
    /// Why it does not work here.
    pub(crate) fn open(system: &System) -> Result<Self> {
        let cuda = system.cuda()?.clone();
        let client = Client::open(system.kernel.clone())?;
        let first = cuda.devices()?.first().map(|gpu| gpu.ordinal).ok_or_else(|| Error::Unsupported {
            what: "mapping GPU memory".into(),
            by: "this machine: CUDA shows no GPU",
            fix: "look at CUDA_VISIBLE_DEVICES, or use the host backend",
        })?;
        let this = Self { cuda, gpus: Mutex::default(), client };
        let gpu = this.gpu(first)?;
        gpu.proof(Route::Malloc).require(&gpu, &this.cuda, Route::Malloc)?;
        Ok(this)
    }

    fn gpu(&self, ordinal: i32) -> Result<Arc<Gpu>> {
        let mut gpus = self.gpus.lock();
        if let Some(gpu) = gpus.get(&ordinal) {
            return Ok(gpu.clone());
        }
        let info = self.cuda.devices()?.into_iter().find(|gpu| gpu.ordinal == ordinal);
        let info = info.ok_or_else(|| Error::invalid("device", ordinal, "a CUDA device of this process"))?;
        let gpu = Arc::new(Gpu::open(&self.client, &*self.cuda, &info)?);
        gpus.insert(ordinal, gpu.clone());
        Ok(gpu)
    }
}

impl Backend for Rm {
    fn kind(&self) -> BackendKind {
        BackendKind::Rm
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        Ok(Self::attribute_of(attribute))
    }

    /// [`PinFlags::FORCE_PCIE`] changes nothing: mappings always go through BAR1.
    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>> {
        self.client.check_owner()?;
        if len == 0 {
            return Err(Error::invalid("length", len, "at least one byte"));
        }
        let part = locate(&*self.cuda, addr, len, flags)?;
        let route = match part.memory.kind {
            MemoryKind::Malloc => Route::Malloc,
            MemoryKind::Vmm => Route::Vmm,
            _ => {
                return Err(Error::NotMappable {
                    addr,
                    found: "memory of a stream-ordered pool, which has no handle to share",
                    fix: "allocate with cuMemAlloc or cuMemCreate, or use the gdrdrv or dmabuf backend",
                });
            }
        };
        let gpu = self.gpu(part.memory.device)?;
        gpu.proof(route).require(&gpu, &self.cuda, route)?;
        Ok(Box::new(RmPin::new(&gpu, &self.cuda, part, addr, len)?))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        Ok(Box::new(CudaAllocation::of_kind(&self.cuda, device, len, kind)?))
    }
}
