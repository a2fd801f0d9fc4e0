//! Registrations by address.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use gdsync::cuda::Gpu;

use crate::communicator::Registration;

/// Devices map the memory of GPUs in pages of so many bytes.
const GPU_PAGE: u64 = 64 << 10;

/// A registration of a range of addresses.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) range: Range<u64>,
    /// The GPU that the memory is on, and the number of its allocation.
    pub(super) home: Option<(Gpu, u64)>,
    pub(super) registration: Registration,
    /// Handles of GPU memory: while there is one it cannot have been freed.
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

    /// Counts handles where that proves something.
    #[inline]
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

    /// Whether CUDA still has the allocation. Host memory is taken to be there.
    pub(super) fn is_alive(&self) -> gdsync::Result<bool> {
        match &self.home {
            Some((gpu, id)) => Ok(gpu.buffer_id(self.range.start)? == *id),
            None => Ok(true),
        }
    }
}

/// Bytes of a GPU's window that a range takes.
pub(super) fn window(range: &Range<u64>) -> u64 {
    range.end.saturating_add(GPU_PAGE - 1) / GPU_PAGE * GPU_PAGE - range.start / GPU_PAGE * GPU_PAGE
}

/// An entry, with what a lookup needs of it beside the others'.
#[derive(Debug)]
pub(super) struct Slot {
    start: u64,
    end: u64,
    /// When it was used last.
    pub(super) used: u64,
    pub(super) entry: Arc<Entry>,
}

impl Slot {
    /// Whether only the index has it. To be asked while nobody else can look it up.
    pub(super) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.entry) == 1 && self.entry.registration.is_only()
    }
}

/// Entries that do not overlap, in the order of their addresses.
#[derive(Debug, Default)]
pub(super) struct Index(Vec<Slot>);

impl Index {
    pub(super) fn slots(&self) -> &[Slot] {
        &self.0
    }

    /// The entry that a range lies in.
    #[inline]
    pub(super) fn covering(&mut self, range: &Range<u64>) -> Option<&mut Slot> {
        let at = self.0.partition_point(|slot| slot.start <= range.start).checked_sub(1)?;
        self.0.get_mut(at).filter(|slot| range.end <= slot.end)
    }

    /// Takes out what overlaps a range.
    pub(super) fn take_overlapping(&mut self, range: &Range<u64>) -> Vec<Slot> {
        let first = self.0.partition_point(|slot| slot.end <= range.start);
        let last = self.0.partition_point(|slot| slot.start < range.end);
        self.0.drain(first..last).collect()
    }

    /// Takes out what is at a place of [`Index::slots`].
    pub(super) fn take(&mut self, at: usize) -> Slot {
        self.0.remove(at)
    }

    /// Takes out an entry, if it is there.
    pub(super) fn take_entry(&mut self, entry: &Arc<Entry>) -> Option<Slot> {
        let at = self.0.iter().position(|slot| Arc::ptr_eq(&slot.entry, entry))?;
        Some(self.0.remove(at))
    }

    /// Adds an entry that overlaps none.
    pub(super) fn insert(&mut self, entry: Arc<Entry>, used: u64) {
        let Range { start, end } = entry.range;
        let at = self.0.partition_point(|slot| slot.start < start);
        self.0.insert(at, Slot { start, end, used, entry });
    }

    /// The idle entry that was not used for longest, of those that `which` is true of: when that was, and its place.
    pub(super) fn oldest_idle(&self, which: impl Fn(&Slot) -> bool) -> Option<(u64, usize)> {
        let slots = self.0.iter().enumerate().filter(|(_, slot)| which(slot) && slot.is_idle());
        slots.map(|(at, slot)| (slot.used, at)).min()
    }
}
