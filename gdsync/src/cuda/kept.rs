//! Memory that stays registered or allocated when its user is gone, for the next one.
//!
//! To take a registration back, or to free GPU memory, CUDA waits for everything that runs on the GPU, also for streams that
//! wait for something the calling thread has yet to do (seen on an H200 with driver 580). So what queues and streams drop
//! is kept.

use std::collections::HashMap;
use std::ptr::NonNull;

use gdrcopy::{GpuBuffer, Mapping};
use parking_lot::Mutex;

use super::Gpu;

/// Bytes of host memory kept at most; what is beyond is given back, and that may take as long as the streams of the GPU.
const MOST: usize = 64 << 20;

/// Registered pages that nobody uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
    /// The GPU's address of the first byte.
    pub(crate) addr: u64,
}

// SAFETY: an address range that nobody else uses.
unsafe impl Send for Pages {}

/// A block of GPU memory; it is kept when dropped.
pub(crate) struct Block {
    gpu: Gpu,
    /// Always there until the drop.
    parts: Option<(Mapping, GpuBuffer)>,
}

impl Block {
    pub(super) fn new(gpu: &Gpu, mapping: Mapping, buffer: GpuBuffer) -> Self {
        Self { gpu: gpu.clone(), parts: Some((mapping, buffer)) }
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.parts.as_ref().expect("there until the drop").0
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.gpu.kept().blocks.lock().extend(self.parts.take());
    }
}

/// What is kept.
#[derive(Default)]
pub(crate) struct Kept {
    host: Mutex<Shelf>,
    blocks: Mutex<Vec<(Mapping, GpuBuffer)>>,
}

/// Host memory by length.
#[derive(Default)]
struct Shelf {
    by_len: HashMap<usize, Vec<Pages>>,
    bytes: usize,
}

impl Kept {
    pub(super) fn take_host(&self, len: usize) -> Option<Pages> {
        let mut shelf = self.host.lock();
        let pages = shelf.by_len.get_mut(&len)?.pop()?;
        shelf.bytes -= len;
        Some(pages)
    }

    /// Keeps pages, or hands them back when there are too many.
    pub(super) fn put_host(&self, pages: Pages) -> Result<(), Pages> {
        let mut shelf = self.host.lock();
        if shelf.bytes + pages.len > MOST {
            return Err(pages);
        }
        shelf.bytes += pages.len;
        shelf.by_len.entry(pages.len).or_default().push(pages);
        Ok(())
    }

    /// All host memory that is kept.
    pub(super) fn host(&self) -> Vec<Pages> {
        let mut shelf = self.host.lock();
        shelf.bytes = 0;
        shelf.by_len.drain().flat_map(|(_, pages)| pages).collect()
    }

    /// A block of GPU memory of the arena's size.
    pub(super) fn take_block(&self) -> Option<(Mapping, GpuBuffer)> {
        self.blocks.lock().pop()
    }
}
