//! Registered host memory and GPU memory that is kept for the next user, and small allocations from blocks of GPU memory.
//!
//! Giving memory back to CUDA takes as long as any stream waits: see [`super::deferred_free`].

use std::collections::HashMap;
use std::ptr::NonNull;

use gdrcopy::cuda::raw::Api;
use gdrcopy::{GpuBuffer, Mapping};
use parking_lot::Mutex;

use super::Gpu;
use super::deferred_free::DeferredFree;
use super::register::unregister;
use crate::error::Result;
use crate::memory::{Memory, WeakMemory};

/// Maximum bytes of host memory kept.
const MOST: usize = 64 << 20;
/// Maximum bytes of one allocation kept: rings and words are allocated again, large buffers of applications rarely.
const LARGEST: usize = 4 << 20;

/// Registered pages without a user.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Address of the first byte.
    pub ptr: NonNull<u8>,
    /// Length in bytes.
    pub len: usize,
    /// Address of the first byte on the GPU.
    pub addr: u64,
}

// SAFETY: an address range that nobody else uses.
unsafe impl Send for Pages {}

/// Mapped GPU memory. When dropped it is freed in time, or kept for the next user if it is a block of small pieces.
#[derive(Debug)]
pub struct Buffer {
    gpu: Gpu,
    /// `None` only during the drop.
    parts: Option<(Mapping, GpuBuffer)>,
    is_block: bool,
}

impl Buffer {
    /// A buffer and its mapping.
    pub fn new(gpu: &Gpu, mapping: Mapping, buffer: GpuBuffer) -> Self {
        Self { gpu: gpu.clone(), parts: Some((mapping, buffer)), is_block: false }
    }

    /// The GPU that it is on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Its mapping for the CPU.
    pub fn mapping(&self) -> &Mapping {
        &self.parts.as_ref().expect("there until the drop").0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some((mapping, buffer)) = self.parts.take() else { return };
        if self.is_block {
            self.gpu.free_list().blocks.lock().push((mapping, buffer));
        } else {
            self.gpu.defer_free(DeferredFree::Gpu { _mapping: mapping, _buffer: buffer });
        }
    }
}

/// Memory without a user.
#[derive(Default, Debug)]
pub struct FreeList {
    host: Mutex<FreeBlocks>,
    blocks: Mutex<Vec<(Mapping, GpuBuffer)>>,
}

/// Host memory by length.
#[derive(Default, Debug)]
struct FreeBlocks {
    by_len: HashMap<usize, Vec<Pages>>,
    bytes: usize,
}

impl FreeList {
    /// Takes pages of this length, if there are any.
    pub fn take_host(&self, len: usize) -> Option<Pages> {
        let mut host = self.host.lock();
        let pages = host.by_len.get_mut(&len)?.pop()?;
        host.bytes -= len;
        Some(pages)
    }

    /// Keeps pages. Returns false when they are too many.
    pub fn put_host(&self, pages: Pages) -> bool {
        let mut host = self.host.lock();
        if pages.len > LARGEST || host.bytes + pages.len > MOST {
            return false;
        }
        host.bytes += pages.len;
        host.by_len.entry(pages.len).or_default().push(pages);
        true
    }

    /// Gives all host memory back to CUDA and the system. The context must be current.
    pub fn give_back(&self, api: &Api) {
        let mut host = self.host.lock();
        host.bytes = 0;
        for pages in host.by_len.drain().flat_map(|(_, pages)| pages) {
            match unregister(api, pages.ptr.as_ptr().addr()) {
                // SAFETY: mapped by a `Memory` that left it here; nobody uses it.
                Ok(()) => drop(unsafe { libc::munmap(pages.ptr.as_ptr().cast(), pages.len) }),
                Err(error) => tracing::debug!(%error, "host memory stays registered"),
            }
        }
    }
}

/// Bytes of a block, the smallest allocation that `gdrcopy` takes from CUDA.
const BLOCK: usize = 2 << 20;
/// Alignment of allocations, so that they share no cache lines.
const ALIGN: usize = 256;

/// Allocates small pieces from a block of GPU memory. Holds the block weakly, because the block holds its GPU.
#[derive(Default)]
pub(super) struct Arena(Mutex<Option<(WeakMemory, usize)>>);

impl Arena {
    /// Allocates `len` zeroed bytes.
    pub(super) fn alloc(&self, gpu: &Gpu, len: usize) -> Result<Memory> {
        let size = len.next_multiple_of(ALIGN);
        if size > BLOCK {
            return zeroed(gpu.alloc(len)?);
        }
        let mut current = self.0.lock();
        let known = current.take().and_then(|(block, used)| Some((block.upgrade()?, used)));
        let (block, used) = match known.filter(|(_, used)| used + size <= BLOCK) {
            Some(known) => known,
            None => (block(gpu)?, 0),
        };
        *current = Some((block.downgrade(), used + size));
        zeroed(block.slice(used, len)?)
    }
}

fn block(gpu: &Gpu) -> Result<Memory> {
    let known = gpu.free_list().blocks.lock().pop();
    let mut buffer = match known {
        Some((mapping, buffer)) => Buffer::new(gpu, mapping, buffer),
        None => gpu.buffer(BLOCK)?,
    };
    buffer.is_block = true;
    Ok(Memory::buffer(buffer))
}

fn zeroed(memory: Memory) -> Result<Memory> {
    memory.fill(0, memory.len(), 0)?;
    memory.flush()?;
    Ok(memory)
}
