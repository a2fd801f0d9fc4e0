//! The place of a mapping, which copies read without a lock.
//!
//! A sequence lock (H.-J. Boehm, "Can seqlocks get along with programming language memory models?", 2012). The one
//! writer at a time holds the lock of the slot around it. `tests/it/loom.rs` explores the code of this file.

use crate::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// First address in this process.
    pub(crate) base: usize,
    /// Bytes.
    pub(crate) len: usize,
    /// The number of the mapping type.
    pub(crate) kind: usize,
}

impl View {
    /// Whether `len` bytes at `address` lie inside.
    #[inline]
    pub(crate) fn holds(&self, address: usize, len: usize) -> bool {
        let offset = address.wrapping_sub(self.base);
        offset <= self.len && len <= self.len - offset
    }
}

/// The mapping of the pin that has a slot now, if it is mapped.
#[derive(Debug)]
pub(crate) struct Window {
    /// Even, except while the rest is being written.
    sequence: AtomicU64,
    /// The handle of the pin; 0 if nothing is mapped.
    handle: AtomicU64,
    base: AtomicUsize,
    len: AtomicUsize,
    kind: AtomicUsize,
}

impl Window {
    pub(crate) fn new() -> Self {
        Self {
            sequence: AtomicU64::new(0),
            handle: AtomicU64::new(0),
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            kind: AtomicUsize::new(0),
        }
    }

    /// Shows a mapping to copies. One writer at a time.
    pub(crate) fn open(&self, handle: u64, view: View) {
        self.write(handle, view);
    }

    /// Hides the mapping. One writer at a time.
    pub(crate) fn close(&self) {
        self.write(0, View { base: 0, len: 0, kind: 0 });
    }

    fn write(&self, handle: u64, view: View) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.handle.store(handle, Ordering::Relaxed);
        self.base.store(view.base, Ordering::Relaxed);
        self.len.store(view.len, Ordering::Relaxed);
        self.kind.store(view.kind, Ordering::Relaxed);
        self.sequence.store(sequence + 2, Ordering::Release);
    }

    /// The mapping of `handle`; `None` if it has none, or gets or loses it at this moment.
    #[inline]
    pub(crate) fn view(&self, handle: u64) -> Option<View> {
        let before = self.sequence.load(Ordering::Acquire);
        let owner = self.handle.load(Ordering::Relaxed);
        let view = View {
            base: self.base.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            kind: self.kind.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let steady = before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before;
        (steady && owner == handle && handle != 0).then_some(view)
    }
}
