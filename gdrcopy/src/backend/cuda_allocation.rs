//! GPU memory from CUDA.

use std::sync::Arc;

use super::Allocation;
use crate::cuda::{AllocKind, Cuda};
use crate::error::Result;
use crate::fork::Owner;

/// CUDA memory, copied by the GPU's copy engines; freed when dropped.
#[derive(Debug)]
pub(crate) struct CudaAllocation {
    cuda: Arc<dyn Cuda>,
    device: i32,
    addr: u64,
    len: usize,
    owner: Owner,
}

impl CudaAllocation {
    pub(crate) fn new(cuda: &Arc<dyn Cuda>, device: i32, len: usize) -> Result<Self> {
        Self::of_kind(cuda, device, len, AllocKind::Malloc)
    }

    pub(crate) fn of_kind(cuda: &Arc<dyn Cuda>, device: i32, len: usize, kind: AllocKind) -> Result<Self> {
        let addr = cuda.alloc(device, len, kind)?;
        Ok(Self { cuda: cuda.clone(), device, addr, len, owner: Owner::this_process() })
    }

    /// The GPU address of a part.
    fn part(&self, offset: usize, len: usize) -> Result<u64> {
        self.owner.check()?;
        super::inside(offset, len, self.len)?;
        Ok(self.addr + offset as u64)
    }
}

impl Allocation for CudaAllocation {
    fn addr(&self) -> u64 {
        self.addr
    }

    fn len(&self) -> usize {
        self.len
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        let dst = self.part(offset, data.len())?;
        // SAFETY: a slice of that length.
        unsafe { self.cuda.copy_to_device(self.device, dst, data.as_ptr(), data.len()) }
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let src = self.part(offset, out.len())?;
        // SAFETY: a slice of that length.
        unsafe { self.cuda.copy_from_device(self.device, out.as_mut_ptr(), src, out.len()) }
    }
}

impl Drop for CudaAllocation {
    fn drop(&mut self) {
        // CUDA does not work in a forked child, and the memory is the parent's.
        if !self.owner.is_caller() {
            return;
        }
        // SAFETY: allocated by `new`; only mappings may still show it.
        if let Err(error) = unsafe { self.cuda.free(self.addr) } {
            tracing::warn!(%error, "GPU memory at {:#x} not freed", self.addr);
        }
    }
}
