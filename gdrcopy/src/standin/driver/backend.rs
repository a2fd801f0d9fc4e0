//! CPU mappings of the simulated GPUs' memory.

use std::sync::Arc;

use super::memory::{Kind, Region, find};
use crate::backend::host::Host;
use crate::backend::{
    Allocation, Attribute, Backend, BackendKind, CudaAllocation, MappingType, PinFlags, Pinned, host_page,
    inside,
};
use crate::cpu_range::CpuRange;
use crate::cuda::{AllocKind, Cuda, InstalledOn};
use crate::error::{Error, Result};
use crate::gdr::Gdr;
use crate::kernel::Linux;
use crate::system::System;

/// The library on this driver: it allocates with `cuMemAlloc` on both GPUs and maps that memory at addresses of its own,
/// freed memory until it is unpinned. It calls itself the host backend.
///
/// # Errors
/// [`Error::Cuda`] where the driver was told to fail.
pub fn gdr() -> Result<Gdr> {
    let system = System::with(Arc::new(Linux), InstalledOn(super::api()));
    let cuda = system.cuda()?.clone();
    Ok(Gdr::new(Box::new(Simulated { cuda }), Vec::new(), system))
}

/// The backend.
#[derive(Debug)]
struct Simulated {
    cuda: Arc<dyn Cuda>,
}

impl Backend for Simulated {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        Ok(Host::attribute_of(attribute))
    }

    fn pin(&self, addr: u64, len: usize, _flags: PinFlags) -> Result<Box<dyn Pinned>> {
        let unknown = || Error::NotMappable {
            addr,
            found: "no memory of the simulated driver",
            fix: "allocate with cuMemAlloc of the simulated driver",
        };
        let start = usize::try_from(addr).map_err(|_| unknown())?;
        let memory = find(start, 1).filter(|region| region.kind == Kind::Device).ok_or_else(unknown)?;
        if !memory.contains(start, len) {
            return Err(Error::BeyondAllocation { addr, len, base: memory.start as u64, size: memory.len });
        }
        let offset = (start - memory.start) / host_page() * host_page();
        let pinned_len = (start + len).next_multiple_of(host_page()) - memory.start - offset;
        Ok(Box::new(Pin { memory, offset, pinned_len }))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        Ok(Box::new(CudaAllocation::of_kind(&self.cuda, device, len, kind)?))
    }
}

/// Pages of memory, whatever becomes of the allocation.
struct Pin {
    memory: Arc<Region>,
    offset: usize,
    pinned_len: usize,
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pin({:#x}, {} B)", self.va(), self.pinned_len)
    }
}

impl Pinned for Pin {
    fn va(&self) -> u64 {
        (self.memory.start + self.offset) as u64
    }

    fn pinned_len(&self) -> usize {
        self.pinned_len
    }

    fn page_size(&self) -> u32 {
        u32::try_from(host_page()).expect("pages are small")
    }

    fn map(&self, len: usize, _request: Option<MappingType>) -> Result<CpuRange> {
        inside(0, len, self.pinned_len)?;
        let len = len.max(1).next_multiple_of(host_page());
        self.memory.map(self.offset, len).expect("memory of a GPU is the driver's")
    }

    fn unpin(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
