//! `mmap` of a CUDA dma-buf: no kernel module.

mod pin;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    Allocation, Attribute, Backend, BackendKind, CudaAllocation, PinFlags, Pinned, host_page, locate, proof,
};
use crate::cuda::{AllocKind, Cuda};
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::system::Kernel;
use crate::system::System;
use pin::Pin;

/// The first CUDA whose driver maps dma-bufs of GPUs with memory of their own: 13.3.
const FIRST_CUDA: u32 = 13030;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED` of `cuda.h`.
const CU_DMA_BUF: u32 = 124;
/// Scratch memory for the proof, bytes: more than one 2 MiB page of the GPU.
const SCRATCH: usize = 4 << 20;

/// The driver, found to map what it was asked for.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    machine: Machine,
    owner: Owner,
    tried: Mutex<Tried>,
}

#[derive(Debug, Default)]
struct Tried {
    /// Devices whose mappings were proved: ordinal, and [`PinFlags::FORCE_PCIE`] or none.
    proven: HashSet<(i32, PinFlags)>,
    /// What they were tried with, by ordinal. Kept until the backend closes: to free it, CUDA would wait for all work of
    /// the GPU, be it for a stream that waits for the thread that pins here for the first time.
    scratch: HashMap<i32, CudaAllocation>,
}

/// What pins need.
#[derive(Clone, Debug)]
struct Machine {
    kernel: Arc<dyn Kernel>,
    cuda: Arc<dyn Cuda>,
}

impl DmaBuf {
    /// Whether the driver's version is one that maps dma-bufs; does not initialise CUDA.
    pub(crate) fn survey(system: &System) -> Result<()> {
        let version = system.cuda_version()?;
        if version < FIRST_CUDA {
            return Err(Error::Unsupported {
                what: format!("mmap of a dma-buf (CUDA {}.{})", version / 1000, version % 1000 / 10),
                by: "this NVIDIA driver",
                fix: "update to a driver with CUDA 13.3 or newer, load gdrdrv, or use the rm backend",
            });
        }
        Ok(())
    }

    /// Tries the driver on the first GPU that has dma-bufs; others are tried at their first pin, since that
    /// makes a CUDA context there.
    pub(crate) fn open(system: &System) -> Result<Self> {
        Self::survey(system)?;
        let cuda = system.cuda()?;
        let machine = Machine { kernel: system.kernel.clone(), cuda: cuda.clone() };
        let this = Self { machine, owner: Owner::this_process(), tried: Mutex::default() };
        for gpu in cuda.devices()? {
            if cuda.device_attribute(gpu.ordinal, CU_DMA_BUF)? != 0 {
                this.prove(gpu.ordinal, PinFlags::empty())?;
                return Ok(this);
            }
        }
        Err(no_dma_buf())
    }

    /// What [`Backend::attribute`] gives on every machine.
    pub(crate) fn attribute_of(attribute: Attribute) -> u32 {
        match attribute {
            Attribute::UsePersistentMapping
            | Attribute::SupportPinFlagForcePcie
            | Attribute::UsingDmaBufMmap => 1,
        }
    }

    /// Makes sure that mappings of a device show what CUDA shows.
    fn prove(&self, device: i32, flags: PinFlags) -> Result<()> {
        let flags = flags & PinFlags::FORCE_PCIE;
        let mut tried = self.tried.lock();
        let Tried { proven, scratch } = &mut *tried;
        if proven.contains(&(device, flags)) {
            return Ok(());
        }
        let cuda = &self.machine.cuda;
        if cuda.device_attribute(device, CU_DMA_BUF)? == 0 {
            return Err(no_dma_buf());
        }
        let scratch = match scratch.entry(device) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(CudaAllocation::new(cuda, device, SCRATCH)?),
        };
        // The second pin begins inside the memory, in its second large page.
        for start in [0, SCRATCH / 2 + host_page()] {
            let len = SCRATCH - start;
            let pin = Pin::new(&self.machine, scratch.addr() + start as u64, len, flags)?;
            let range = pin.map_unproven(len)?;
            let offsets = [0, len / 2, len - proof::PROBE];
            proof::nonce(&**cuda, device, pin.va(), &range, &offsets)?;
        }
        proven.insert((device, flags));
        Ok(())
    }
}

fn no_dma_buf() -> Error {
    Error::Unsupported {
        what: "dma-buf".into(),
        by: "this GPU, its driver or this kernel",
        fix: "use NVIDIA's open kernel modules and Linux 5.12 or newer, or another backend",
    }
}

impl Backend for DmaBuf {
    fn kind(&self) -> BackendKind {
        BackendKind::DmaBuf
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        Ok(Self::attribute_of(attribute))
    }

    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>> {
        self.owner.check()?;
        if len == 0 {
            return Err(Error::invalid("length", len, "at least 1"));
        }
        self.prove(locate(&*self.machine.cuda, addr, len, flags)?.memory.device, flags)?;
        Ok(Box::new(Pin::new(&self.machine, addr, len, flags)?))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        self.owner.check()?;
        Ok(Box::new(CudaAllocation::of_kind(&self.machine.cuda, device, len, kind)?))
    }
}
