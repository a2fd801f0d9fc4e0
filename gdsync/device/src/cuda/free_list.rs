//! Memory that stays registered or allocated when its user is gone, for the next one.
//!
//! To give it back to CUDA may take as long as any stream waits: see [`super::deferred_free`].

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

/// Bytes of host memory kept at most; what is beyond is given back.
const MOST: usize = 64 << 20;
/// Bytes of a part at most: rings and words come again, large buffers of the application would only fill the place.
const LARGEST: usize = 4 << 20;

/// Registered pages that nobody uses.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// First byte.
    pub ptr: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// The GPU's address of the first byte.
    pub addr: u64,
}

// SAFETY: an address range that nobody else uses.
unsafe impl Send for Pages {}

/// Mapped memory of a GPU; it is freed in time when dropped.
#[derive(Debug)]
pub struct Buffer {
    gpu: Gpu,
    /// Always there until the drop.
    parts: Option<(Mapping, GpuBuffer)>,
}

impl Buffer {
    /// A buffer and its mapping.
    pub fn new(gpu: &Gpu, mapping: Mapping, buffer: GpuBuffer) -> Self {
        Self { gpu: gpu.clone(), parts: Some((mapping, buffer)) }
    }

    /// The GPU whose memory it is.
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
        if let Some((mapping, buffer)) = self.parts.take() {
            self.gpu.doom(DeferredFree::Gpu { _mapping: mapping, _buffer: buffer });
        }
    }
}

/// A block of GPU memory; it is kept when dropped.
#[derive(Debug)]
pub struct Block(Buffer);

impl Block {
    /// Memory for small pieces.
    pub fn new(buffer: Buffer) -> Self {
        Self(buffer)
    }

    /// The GPU whose memory it is.
    pub fn gpu(&self) -> &Gpu {
        self.0.gpu()
    }

    /// Its mapping for the CPU.
    pub fn mapping(&self) -> &Mapping {
        self.0.mapping()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let parts = self.0.parts.take();
        self.gpu().free_list().blocks.lock().extend(parts);
    }
}

/// What is kept.
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
    pub fn take_host(&self, len: usize) -> Option<Pages> {
        let mut shelf = self.host.lock();
        let pages = shelf.by_len.get_mut(&len)?.pop()?;
        shelf.bytes -= len;
        Some(pages)
    }

    /// Keeps pages. Returns false when they are too many.
    pub fn put_host(&self, pages: Pages) -> bool {
        let mut shelf = self.host.lock();
        if pages.len > LARGEST || shelf.bytes + pages.len > MOST {
            return false;
        }
        shelf.bytes += pages.len;
        shelf.by_len.entry(pages.len).or_default().push(pages);
        true
    }

    /// Gives all host memory back, as the context goes, which must be current.
    pub fn give_back(&self, api: &Api) {
        let mut shelf = self.host.lock();
        shelf.bytes = 0;
        for pages in shelf.by_len.drain().flat_map(|(_, pages)| pages) {
            match unregister(api, pages.ptr.as_ptr().addr()) {
                // SAFETY: mapped by a `Memory` that left it here; nobody uses it.
                Ok(()) => drop(unsafe { libc::munmap(pages.ptr.as_ptr().cast(), pages.len) }),
                Err(error) => tracing::debug!(%error, "host memory stays registered"),
            }
        }
    }

    /// A block of GPU memory of the arena's size.
    pub fn take_block(&self) -> Option<(Mapping, GpuBuffer)> {
        self.blocks.lock().pop()
    }
}

/// Bytes of a block: what `gdrcopy` takes from CUDA at least.
const BLOCK: usize = 2 << 20;
/// Pieces begin on lines of their own.
const ALIGN: usize = 256;

/// The block that pieces are cut from, and how much of it is. A block keeps its GPU, so the GPU must not keep it.
#[derive(Default)]
pub(super) struct Arena(Mutex<Option<(WeakMemory, usize)>>);

impl Arena {
    /// `len` zeroed bytes.
    pub(super) fn piece(&self, gpu: &Gpu, len: usize) -> Result<Memory> {
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
    let buffer = match gpu.free_list().take_block() {
        Some((mapping, buffer)) => Buffer::new(gpu, mapping, buffer),
        None => gpu.buffer(BLOCK)?,
    };
    Ok(Memory::block(Block::new(buffer)))
}

fn zeroed(memory: Memory) -> Result<Memory> {
    memory.fill(0, memory.len(), 0)?;
    memory.flush()?;
    Ok(memory)
}
