//! What the entries take of what the cache may have.

use std::ops::Range;

use gdsync::cuda::Gpu;

use super::config::CacheConfig;
use super::index::{Slot, window};

/// What some entries take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) entries: usize,
    pub(super) bytes: u64,
    /// Of the window of the GPU in question.
    pub(super) window: u64,
}

impl Room {
    pub(super) fn of<'a>(slots: impl Iterator<Item = &'a Slot>, gpu: Option<&Gpu>) -> Self {
        slots.fold(Self::default(), |room, slot| {
            let on_it = gpu.is_some() && slot.entry.is_on(gpu);
            room.and(&slot.entry.range, on_it)
        })
    }

    /// With one more entry.
    pub(super) fn and(self, range: &Range<u64>, on_gpu: bool) -> Self {
        Self {
            entries: self.entries + 1,
            bytes: self.bytes.saturating_add(range.end - range.start),
            window: self.window.saturating_add(if on_gpu { window(range) } else { 0 }),
        }
    }

    /// Whether it is within the bounds.
    pub(super) fn fits(&self, config: &CacheConfig, gpu: Option<&Gpu>) -> bool {
        self.entries <= config.entries
            && self.bytes <= config.bytes
            && gpu.is_none_or(|gpu| self.window <= config.window_of(gpu))
    }
}
