//! What was written into GPU memory and its GPU may not see yet.
//!
//! A completion says that data is in place, also to work of the GPU that waits for the completion. Where the GPU does not
//! see in order what reaches it over PCIe, data that was stored through a mapping is flushed before the next completion of
//! the HCA is written: [`Capabilities::flush`](gdsync_device::cuda::Capabilities) says where. Data that a copy engine has moved is in
//! place when the word behind the copy is seen, and host memory always is.

use smallvec::SmallVec;

use super::keys::Keys;
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;

/// Regions that were written to since the last completion, and need a flush.
#[derive(Debug, Default)]
pub(crate) struct PendingFlush(SmallVec<[u32; 4]>);

impl PendingFlush {
    /// The CPU has written to this region.
    #[inline]
    pub(super) fn written(&mut self, key: u32, memory: &Memory) {
        if memory.needs_flush() && !self.0.contains(&key) {
            self.0.push(key);
        }
    }

    /// Flushes all of them.
    pub(super) fn flush(&mut self, keys: &Keys) -> Result<()> {
        let memories = self.0.drain(..).filter_map(|key| keys.memory(key));
        memories.map(Memory::flush).fold(Ok(()), Result::and)
    }
}
