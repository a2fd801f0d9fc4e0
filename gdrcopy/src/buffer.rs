//! GPU memory that is made for mapping.

use crate::backend::{Allocation, inside};
use crate::error::Result;
use crate::gdr::Gdr;
use crate::mapping::Mapping;
use crate::pin::Pin;

/// GPU memory of our own; freed when dropped. Pins and mappings of it may live longer and then show the old bytes.
///
/// To free memory CUDA may wait for all work of the GPU: do not drop this while a stream waits for something that the
/// dropping thread has yet to do.
#[derive(Debug)]
pub struct GpuBuffer {
    // Declared first: freed before the backend closes.
    allocation: Box<dyn Allocation>,
    /// Bytes asked for; there may be more.
    len: usize,
    gdr: Gdr,
}

impl GpuBuffer {
    pub(crate) fn new(allocation: Box<dyn Allocation>, len: usize, gdr: Gdr) -> Self {
        Self { allocation, len, gdr }
    }

    /// The GPU address (`CUdeviceptr`).
    pub fn addr(&self) -> u64 {
        self.allocation.addr()
    }

    /// Its length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Pins all of it.
    ///
    /// # Errors
    /// As [`Gdr::pin`].
    pub fn pin(&self) -> Result<Pin> {
        self.gdr.pin(self.addr(), self.len())
    }

    /// Pins and maps all of it.
    ///
    /// # Errors
    /// As [`Gdr::pin`] and [`Pin::map`].
    pub fn map(&self) -> Result<Mapping> {
        self.pin()?.map()
    }

    /// Writes by CUDA's copy engine; in place on return.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::Cuda`](crate::Error::Cuda), and for up to 256 KiB
    /// [`Error::Timeout`](crate::Error::Timeout) where the application's waiting streams hold up the whole GPU. Then
    /// the bytes may still arrive, at any later time. A longer copy goes on waiting.
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> Result<()> {
        inside(offset, data.len(), self.len)?;
        self.allocation.write(offset, data)
    }

    /// Reads by CUDA's copy engine.
    ///
    /// # Errors
    /// As [`GpuBuffer::copy_in`].
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        inside(offset, out.len(), self.len)?;
        self.allocation.read(offset, out)
    }
}
