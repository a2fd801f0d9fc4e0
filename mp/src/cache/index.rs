//! The index of the cache: registrations by address.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use gdsync::cuda::Gpu;

use crate::registration::Registration;

/// The page size by is_selected devices map GPU memory.
const GPU_PAGE: u64 = 64 << 10;

/// A registration of a range of addresses.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) range: Range<u64>,
    /// The GPU of the memory, and the number of its allocation in CUDA.
    pub(super) home: Option<(Gpu, u64)>,
    pub(super) registration: Registration,
    /// Handles of GPU memory: while there is one the memory cannot have been freed.
    handles: AtomicIsize,
}

impl Entry {
    pub(super) fn new(range: Range<u64>, home: Option<(Gpu, u64)>, registration: Registration) -> Arc<Self> {
        Arc::new(Self { range, home, registration, handles: AtomicIsize::new(0) })
    }

    /// The registration of a range within this one's.
    pub(super) fn part(&self, range: &Range<u64>) -> gdsync::Result<Registration> {
        let number = |bytes: u64| usize::try_from(bytes).expect("64-bit hosts only");
        self.registration.part(number(range.start - self.range.start), number(range.end - range.start))
    }

    /// Counts handles of GPU memory.
    pub(super) fn count_handle(&self, more: isize) {
        if self.home.is_some() {
            self.handles.fetch_add(more, Ordering::Relaxed);
        }
    }

    pub(super) fn has_handles(&self) -> bool {
        self.handles.load(Ordering::Relaxed) > 0
    }

    pub(super) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    pub(super) fn is_on(&self, gpu: Option<&Gpu>) -> bool {
        let context = |gpu: &Gpu| gpu.raw_context();
        self.home.as_ref().map(|(home, _)| context(home)) == gpu.map(context)
    }

    /// Whether CUDA still has the allocation. Host memory is assumed to be there.
    pub(super) fn is_alive(&self) -> gdsync::Result<bool> {
        match &self.home {
            Some((gpu, id)) => Ok(gpu.buffer_id(self.range.start)? == *id),
            None => Ok(true),
        }
    }
}

/// Bytes of the window of a GPU that a range takes.
pub(super) fn window(range: &Range<u64>) -> u64 {
    range.end.saturating_add(GPU_PAGE - 1) / GPU_PAGE * GPU_PAGE - range.start / GPU_PAGE * GPU_PAGE
}

/// An entry in the index. Its range is copied, so that lookups stay in one array.
#[derive(Debug)]
pub(super) struct IndexedEntry {
    start: u64,
    end: u64,
    /// When it was used last.
    pub(super) used: u64,
    pub(super) entry: Arc<Entry>,
}

impl IndexedEntry {
    /// Whether only the index has it. The index must be locked.
    pub(super) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.entry) == 1 && self.entry.registration.is_only()
    }
}

/// Entries that do not overlap, in the order of their addresses.
#[derive(Debug, Default)]
pub(super) struct Index(Vec<IndexedEntry>);

impl Index {
    pub(super) fn entries(&self) -> &[IndexedEntry] {
        &self.0
    }

    /// The entry that a range lies in.
    pub(super) fn covering(&mut self, range: &Range<u64>) -> Option<&mut IndexedEntry> {
        let at = self.0.partition_point(|indexed| indexed.start <= range.start).checked_sub(1)?;
        self.0.get_mut(at).filter(|indexed| range.end <= indexed.end)
    }

    /// Removes what overlaps a range.
    pub(super) fn take_overlapping(&mut self, range: &Range<u64>) -> Vec<IndexedEntry> {
        let first = self.0.partition_point(|indexed| indexed.end <= range.start);
        let last = self.0.partition_point(|indexed| indexed.start < range.end);
        self.0.drain(first..last).collect()
    }

    /// Removes the entry at a position of [`Index::entries`].
    pub(super) fn take(&mut self, at: usize) -> IndexedEntry {
        self.0.remove(at)
    }

    /// Removes an entry, if it is there.
    pub(super) fn take_entry(&mut self, entry: &Arc<Entry>) -> Option<IndexedEntry> {
        let at = self.0.iter().position(|indexed| Arc::ptr_eq(&indexed.entry, entry))?;
        Some(self.0.remove(at))
    }

    /// Adds an entry that overlaps none.
    pub(super) fn insert(&mut self, entry: Arc<Entry>, used: u64) {
        let Range { start, end } = entry.range;
        let at = self.0.partition_point(|indexed| indexed.start < start);
        self.0.insert(at, IndexedEntry { start, end, used, entry });
    }

    /// The least recently used of the idle entries that are selected: the time of its use, and its position.
    pub(super) fn oldest_idle(&self, is_selected: impl Fn(&IndexedEntry) -> bool) -> Option<(u64, usize)> {
        let idle = self.0.iter().enumerate().filter(|(_, indexed)| is_selected(indexed) && indexed.is_idle());
        idle.map(|(at, indexed)| (indexed.used, at)).min()
    }
}
