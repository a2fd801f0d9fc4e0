//! The cache itself.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use parking_lot::Mutex;

use super::config::{CacheConfig, Keep};
use super::handle::Cached;
use super::index::{Entry, Index, Slot};
use super::room::Room;
use crate::communicator::Registration;

/// Entries that a miss asks CUDA about, so that what was freed does not stay for ever.
const LOOKS: usize = 8;

/// The registration cache of a communicator: see [the module](super). Any thread may use it.
#[derive(Debug)]
pub struct Cache {
    config: CacheConfig,
    /// A lock that many could read at a time costs a hit more than one that nobody shares: it is held for some nanoseconds.
    known: Mutex<Known>,
    /// Held by whoever adds entries or takes some out; where the next look at what may be freed begins.
    changing: Mutex<usize>,
    made: AtomicU64,
    unproved: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
    stale: AtomicU64,
    merged: AtomicU64,
    uncached: AtomicU64,
}

/// What can be looked up.
#[derive(Debug, Default)]
struct Known {
    /// Of host memory, and of GPU memory: they are told apart by the caller, not by their addresses.
    spaces: [Index; 2],
    /// The time: the number of lookups that found something, and of entries made.
    clock: u64,
}

impl Known {
    fn space(&mut self, gpu: Option<&Gpu>) -> &mut Index {
        &mut self.spaces[usize::from(gpu.is_some())]
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.spaces.iter().flat_map(Index::slots)
    }

    /// The entry that a range lies in, which is used now.
    #[inline]
    fn used(&mut self, gpu: Option<&Gpu>, range: &Range<u64>) -> Option<Arc<Entry>> {
        let now = self.clock + 1;
        let slot = self.space(gpu).covering(range)?;
        slot.used = now;
        let entry = slot.entry.clone();
        self.clock = now;
        Some(entry)
    }

    fn insert(&mut self, gpu: Option<&Gpu>, entry: Arc<Entry>) {
        self.clock += 1;
        let now = self.clock;
        self.space(gpu).insert(entry, now);
    }
}

/// What a [`Cache`] has done, and has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Uses of a registration that was there.
    pub hits: u64,
    /// Registrations that were made to be kept.
    pub misses: u64,
    /// Registrations that were given up for lack of room.
    pub evictions: u64,
    /// Registrations of GPU memory that turned out to be freed.
    pub stale: u64,
    /// Registrations that a larger one took the place of.
    pub merged: u64,
    /// Registrations that were made for one handle alone.
    pub uncached: u64,
    /// Registrations that are there now.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Cache {
    pub(crate) fn new(config: CacheConfig) -> Self {
        let (known, changing, made, unproved) = Default::default();
        let (misses, evictions, stale, merged, uncached) = Default::default();
        Self { config, known, changing, made, unproved, misses, evictions, stale, merged, uncached }
    }

    /// What it keeps.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// What it has done so far, and has now.
    pub fn stats(&self) -> CacheStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let not_hits = load(&self.made) + load(&self.unproved);
        let known = self.known.lock();
        let Room { entries, bytes, .. } = Room::of(known.slots(), None);
        CacheStats {
            hits: known.clock.saturating_sub(not_hits),
            misses: load(&self.misses),
            evictions: load(&self.evictions),
            stale: load(&self.stale),
            merged: load(&self.merged),
            uncached: load(&self.uncached),
            entries,
            bytes,
        }
    }

    /// Forgets all registrations that overlap `len` bytes at `addr`, of host and GPU memory, and returns how many those were.
    /// They end with the last handle and the last message of them, mostly at once.
    ///
    /// For host memory this must be called before it is unmapped or freed, after the messages on it are complete.
    pub fn invalidate(&self, addr: u64, len: usize) -> usize {
        let range = addr..addr.saturating_add(len as u64);
        let _changing = self.changing.lock();
        let mut known = self.known.lock();
        let taken = known.spaces.each_mut().map(|index| index.take_overlapping(&range));
        drop(known);
        taken.iter().map(Vec::len).sum()
    }

    /// Forgets all registrations, and returns how many those were.
    pub fn clear(&self) -> usize {
        self.invalidate(0, usize::MAX)
    }

    /// A registration of a range, made by `register` unless it is there.
    ///
    /// # Errors
    /// Those of `register`, of CUDA, and of wrapping the memory.
    ///
    /// # Safety
    /// The memory must stay allocated until all handles, messages and clones of the registration are gone, host memory until
    /// it is invalidated; no Rust reference to it may be used while messages are under way.
    #[inline]
    pub(crate) unsafe fn get(
        &self,
        gpu: Option<&Gpu>,
        range: &Range<u64>,
        register: impl Fn(&Memory) -> gdsync::Result<Registration>,
    ) -> gdsync::Result<Cached> {
        let keeps = match self.config.keep {
            Keep::Nothing => false,
            Keep::Gpu => gpu.is_some(),
            Keep::All => true,
        };
        if keeps && let Some(cached) = self.hit(gpu, range)? {
            return Ok(cached);
        }
        // SAFETY: only called by this function with what the caller vouches for, or has vouched for and not taken back.
        let register = |range: &Range<u64>| register(&unsafe { wrap(gpu, range) }?);
        if keeps { self.miss(gpu, range, register) } else { self.alone(range, register(range)?) }
    }

    /// The ranges of its entries.
    #[cfg(test)]
    pub(super) fn ranges(&self) -> Vec<Range<u64>> {
        self.known.lock().slots().map(|slot| slot.entry.range.clone()).collect()
    }

    #[inline]
    fn hit(&self, gpu: Option<&Gpu>, range: &Range<u64>) -> gdsync::Result<Option<Cached>> {
        let Some(entry) = self.known.lock().used(gpu, range) else { return Ok(None) };
        if self.proves(&entry, gpu, range.start)? {
            return Cached::new(entry, range).map(Some);
        }
        count(&self.unproved);
        Ok(None)
    }

    /// Whether the memory at an address within an entry is the memory that was registered.
    #[inline]
    fn proves(&self, entry: &Entry, gpu: Option<&Gpu>, addr: u64) -> gdsync::Result<bool> {
        let (Some(gpu), Some((_, id))) = (gpu, &entry.home) else { return Ok(true) };
        Ok(entry.is_on(Some(gpu))
            && (self.config.announced || entry.has_handles() || gpu.buffer_id(addr)? == *id))
    }

    #[cold]
    #[inline(never)]
    fn miss(
        &self,
        gpu: Option<&Gpu>,
        range: &Range<u64>,
        register: impl Fn(&Range<u64>) -> gdsync::Result<Registration>,
    ) -> gdsync::Result<Cached> {
        let mut changing = self.changing.lock();
        // Somebody else may have been quicker.
        if let Some(cached) = self.hit(gpu, range)? {
            return Ok(cached);
        }
        self.look_for_freed(&mut changing);
        let home = match gpu {
            Some(gpu) => Some((gpu.clone(), gpu.buffer_id(range.start)?)),
            None => None,
        };
        // Of an address that CUDA does not know, the error is better than anything to keep.
        let provable = !matches!(home, Some((_, 0)));
        if !provable || !self.could_have(gpu, range) {
            return self.alone(range, self.register(range, range, register)?.1);
        }
        let hull = self.take_the_place_of(&home, range);
        let wanted = if self.could_have(gpu, &hull) { hull } else { range.clone() };
        if !self.make_room(gpu, &wanted) {
            return self.alone(range, self.register(range, range, register)?.1);
        }
        let (got, registration) = self.register(range, &wanted, register)?;
        count(&self.misses);
        let entry = Entry::new(got, home, registration);
        let cached = Cached::new(entry.clone(), range)?;
        count(&self.made);
        self.known.lock().insert(gpu, entry);
        Ok(cached)
    }

    /// Registers `wanted`, or if that cannot be done `range` in it; what is idle makes room. Returns which of the two.
    fn register(
        &self,
        range: &Range<u64>,
        wanted: &Range<u64>,
        register: impl Fn(&Range<u64>) -> gdsync::Result<Registration>,
    ) -> gdsync::Result<(Range<u64>, Registration)> {
        let mut wanted = wanted;
        loop {
            match register(wanted) {
                Ok(registration) => return Ok((wanted.clone(), registration)),
                Err(error) if error.is_exhausted() && self.evict_bytes(wanted.end - wanted.start) => {
                    tracing::debug!(%error, ?wanted, "idle registrations make room");
                }
                Err(_) if wanted != range => wanted = range,
                Err(error) => return Err(error),
            }
        }
    }

    /// A handle of a registration that is not kept.
    fn alone(&self, range: &Range<u64>, registration: Registration) -> gdsync::Result<Cached> {
        count(&self.uncached);
        Cached::new(Entry::new(range.clone(), None, registration), range)
    }

    /// Whether a range fits beside all that is in use.
    fn could_have(&self, gpu: Option<&Gpu>, range: &Range<u64>) -> bool {
        let in_use = Room::of(self.known.lock().slots().filter(|slot| !slot.is_idle()), gpu);
        in_use.and(range, gpu.is_some()).fits(&self.config, gpu)
    }

    /// Takes out what overlaps a range, and returns the range that all of it and the range make, as far as it is alive.
    fn take_the_place_of(&self, home: &Option<(Gpu, u64)>, range: &Range<u64>) -> Range<u64> {
        let gpu = home.as_ref().map(|(gpu, _)| gpu);
        let taken = self.known.lock().space(gpu).take_overlapping(range);
        taken.iter().fold(range.clone(), |hull, Slot { entry, .. }| {
            let number = |home: &Option<(Gpu, u64)>| home.as_ref().map(|(_, id)| *id);
            if !entry.is_on(gpu) || number(&entry.home) != number(home) {
                count(&self.stale);
                return hull;
            }
            count(&self.merged);
            hull.start.min(entry.range.start)..hull.end.max(entry.range.end)
        })
    }

    /// Takes out idle entries until a range fits. Returns whether it does.
    fn make_room(&self, gpu: Option<&Gpu>, range: &Range<u64>) -> bool {
        loop {
            let room = Room::of(self.known.lock().slots(), gpu).and(range, gpu.is_some());
            if room.fits(&self.config, gpu) {
                return true;
            }
            // Where only the window is full, what is elsewhere would go in vain.
            let only_window = room.fits(&self.config, None);
            if self.evict(|slot| !only_window || slot.entry.is_on(gpu)).is_none() {
                return false;
            }
        }
    }

    /// Takes out the idle entry that was not used for longest, of those that `which` is true of. Returns its length.
    fn evict(&self, which: impl Fn(&Slot) -> bool) -> Option<u64> {
        let mut known = self.known.lock();
        let spaces = known.spaces.iter().enumerate();
        let oldest = spaces.filter_map(|(n, index)| Some((index.oldest_idle(&which)?, n)));
        let ((_, at), n) = oldest.min()?;
        let slot = known.spaces[n].take(at);
        drop(known);
        count(&self.evictions);
        Some(slot.entry.len())
    }

    /// Takes out idle entries of so many bytes, as far as there are any. Returns whether there was one.
    fn evict_bytes(&self, bytes: u64) -> bool {
        let mut freed = None;
        while freed < Some(bytes)
            && let Some(len) = self.evict(|_| true)
        {
            freed = Some(freed.unwrap_or(0).saturating_add(len));
        }
        freed.is_some()
    }

    /// Asks CUDA about a few entries of GPU memory, from the `next` on.
    fn look_for_freed(&self, next: &mut usize) {
        let some: Vec<Arc<Entry>> = {
            let known = self.known.lock();
            let (slots, first) = (known.spaces[1].slots(), *next);
            *next = if first + LOOKS < slots.len() { first + LOOKS } else { 0 };
            slots.iter().skip(first).take(LOOKS).map(|slot| slot.entry.clone()).collect()
        };
        for entry in some {
            if matches!(entry.is_alive(), Ok(false))
                && self.known.lock().spaces[1].take_entry(&entry).is_some()
            {
                count(&self.stale);
            }
        }
    }
}

/// The memory at a range of addresses.
///
/// # Safety
/// As [`Cache::get`].
unsafe fn wrap(gpu: Option<&Gpu>, range: &Range<u64>) -> gdsync::Result<Memory> {
    let len = usize::try_from(range.end - range.start).expect("64-bit hosts only");
    match gpu {
        // SAFETY: what the caller promised.
        Some(gpu) => unsafe { gpu.wrap(range.start, len) },
        None => {
            let start = usize::try_from(range.start).expect("64-bit hosts only");
            // SAFETY: as above.
            unsafe { Memory::from_raw(std::ptr::with_exposed_provenance_mut(start), len) }
        }
    }
}
