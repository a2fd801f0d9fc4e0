//! GPU memory written by the CPU and not yet flushed.
//!
//! A completion guarantees that the data is visible to GPU work that waits for it. Some GPUs do not order incoming PCIe
//! writes: there, stores through a mapping are flushed before the next CQE is written; see
//! [`Capabilities::flush`](gdsync_device::cuda::Capabilities). Copy engines and host memory need no flush.

use smallvec::SmallVec;

use super::keys::Keys;
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;

/// Keys of regions written since the last completion that need a flush.
#[derive(Debug, Default)]
pub(crate) struct PendingFlush(SmallVec<[u32; 4]>);

impl PendingFlush {
    /// Records a CPU write to a region.
    #[inline]
    pub(super) fn written(&mut self, key: u32, memory: &Memory) {
        if memory.needs_flush() && !self.0.contains(&key) {
            self.0.push(key);
        }
    }

    /// Flushes all recorded regions.
    pub(super) fn flush(&mut self, keys: &Keys) -> Result<()> {
        let memories = self.0.drain(..).filter_map(|key| keys.memory(key));
        memories.map(Memory::flush).fold(Ok(()), Result::and)
    }
}
