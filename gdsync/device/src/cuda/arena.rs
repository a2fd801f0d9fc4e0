//! GPU memory for rings and words: many small pieces of few mappings.

use parking_lot::Mutex;

use super::{Block, Buffer, Gpu};
use crate::error::Result;
use crate::memory::{Memory, WeakMemory};

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
