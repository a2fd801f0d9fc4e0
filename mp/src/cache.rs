//! The registration cache: registrations of the application's own memory outlive their use, so that memory which is used again and
//! again is registered once.
//!
//! [`Communicator::register_cached`](crate::Communicator::register_cached) takes host memory by its address,
//! [`Communicator::register_cached_gpu`](crate::Communicator::register_cached_gpu) GPU memory. They return handles
//! of a [`Registration`], which stays after the handle is dropped, until room is needed or the memory is known to be freed.
//!
//! # Memory that was freed
//!
//! A device keeps using the pages that were at an address when it was registered, whatever is there now. What proves that they
//! are still the same:
//!
//! | memory | the proof | what the application does |
//! |---|---|---|
//! | GPU memory | its number in CUDA (`CU_POINTER_ATTRIBUTE_BUFFER_ID`), which no later allocation gets: queried at every use, unless a handle of the same registration is alive | nothing |
//! | GPU memory, [`CacheConfig::announced`] | none | calls [`Cache::invalidate`] before it frees |
//! | host memory | there is none: this library does not hook `free` and `munmap`, as MPI libraries do | calls [`Cache::invalidate`] before it unmaps or frees, or has host memory not kept: [`Keep::Gpu`] |
//!
//! Freed GPU memory is noticed when its address is used again, or by a few queries at every miss; until then the registration may
//! hold its pages.
//!
//! # What is kept
//!
//! Ranges of addresses that do not overlap, each with one registration. A range inside one of them is a hit. A range that
//! overlaps some is registered together with them. Nothing is rounded up to pages. Peers get no access, as they would keep it when
//! the handle is dropped.
//!
//! [`CacheConfig`] bounds what is kept. The least recently used registration is evicted first, also when a device refuses a
//! registration for lack of room. Registrations in use stay; a range that does not fit beside them is registered for its handle
//! alone.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use parking_lot::Mutex;

use crate::path::choice;
use crate::registration::Registration;

/// The smallest BAR1 window of a GPU.
const SMALL_WINDOW: u64 = 256 << 20;

/// Entries that a miss queries CUDA for, so that freed memory does not stay registered for ever.
const QUERIES: usize = 8;

/// Which registrations stay after their handles are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// None: memory is registered at each call.
    Nothing,
    /// Those of GPU memory, which CUDA can prove to be current.
    Gpu,
    /// All.
    All,
}

/// Bounds of a [`Cache`], and what it keeps. The environment's `MP_REG_CACHE` overrides
/// [`CacheConfig::keep`]: `off`, `gpu` or `on`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Which registrations are kept (default all).
    pub keep: Keep,
    /// How many are kept, in use or not (default 1024).
    pub entries: usize,
    /// Their bytes, in host and GPU memory together (default a quarter of the host's memory).
    pub bytes: u64,
    /// Bytes of each GPU's window (BAR1) that they may take, in pages of 64 KiB; `None`, the default, is half of it, or
    /// 128 MiB where the system does not tell its size.
    pub window: Option<u64>,
    /// The application calls [`Cache::invalidate`] before it frees GPU memory (default no). Then CUDA is not queried at each use.
    pub announced: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self { keep: Keep::All, entries: 1024, bytes: host_memory() / 4, window: None, announced: false }
    }
}

impl CacheConfig {
    /// With the choice of the environment.
    pub(crate) fn or(self, variable: Option<&str>) -> gdsync::Result<Self> {
        let choices = [("off", Keep::Nothing), ("gpu", Keep::Gpu), ("on", Keep::All)];
        let keep = choice(self.keep, "MP_REG_CACHE", variable, &choices, "on, gpu or off")?;
        Ok(Self { keep, ..self })
    }

    /// Bytes of the window of a GPU that registrations may take.
    fn window_of(&self, gpu: &Gpu) -> u64 {
        self.window.unwrap_or_else(|| gpu.window().unwrap_or(SMALL_WINDOW) / 2)
    }
}

/// Bytes of the host's memory.
fn host_memory() -> u64 {
    // SAFETY: sysconf takes any number and touches no memory of ours.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(gdsync::memory::host_page() as u64)
}

/// The page size by which devices map GPU memory.
const GPU_PAGE: u64 = 64 << 10;

/// A registration of a range of addresses.
#[derive(Debug)]
struct Entry {
    range: Range<u64>,
    /// The GPU of the memory, and the number of its allocation in CUDA.
    allocation: Option<(Gpu, u64)>,
    registration: Registration,
    /// Handles of GPU memory: while there is one the memory cannot have been freed.
    handles: AtomicIsize,
}

impl Entry {
    fn new(range: Range<u64>, allocation: Option<(Gpu, u64)>, registration: Registration) -> Arc<Self> {
        Arc::new(Self { range, allocation, registration, handles: AtomicIsize::new(0) })
    }

    /// The registration of a range within this one's.
    fn part(&self, range: &Range<u64>) -> gdsync::Result<Registration> {
        let number = |bytes: u64| usize::try_from(bytes).expect("64-bit hosts only");
        self.registration.part(number(range.start - self.range.start), number(range.end - range.start))
    }

    /// Counts handles of GPU memory.
    fn count_handle(&self, more: isize) {
        if self.allocation.is_some() {
            self.handles.fetch_add(more, Ordering::Relaxed);
        }
    }

    fn has_handles(&self) -> bool {
        self.handles.load(Ordering::Relaxed) > 0
    }

    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn is_on(&self, gpu: Option<&Gpu>) -> bool {
        self.allocation.as_ref().map(|(gpu, _)| gpu.raw_context()) == gpu.map(Gpu::raw_context)
    }
}

/// Bytes of the window of a GPU that a range takes.
fn window(range: &Range<u64>) -> u64 {
    range.end.saturating_add(GPU_PAGE - 1) / GPU_PAGE * GPU_PAGE - range.start / GPU_PAGE * GPU_PAGE
}

/// An entry in the index. Its range is copied, so that lookups stay in one array.
#[derive(Debug)]
struct IndexedEntry {
    start: u64,
    end: u64,
    /// When it was used last.
    used: u64,
    entry: Arc<Entry>,
}

impl IndexedEntry {
    /// Whether only the index has it. The index must be locked.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.entry) == 1 && self.entry.registration.is_only()
    }
}

/// Entries that do not overlap, in the order of their addresses.
#[derive(Debug, Default)]
struct Index(Vec<IndexedEntry>);

impl Index {
    /// The entry that a range lies in.
    fn covering(&mut self, range: &Range<u64>) -> Option<&mut IndexedEntry> {
        let at = self.0.partition_point(|indexed| indexed.start <= range.start).checked_sub(1)?;
        self.0.get_mut(at).filter(|indexed| range.end <= indexed.end)
    }

    /// Removes what overlaps a range.
    fn take_overlapping(&mut self, range: &Range<u64>) -> Vec<IndexedEntry> {
        let first = self.0.partition_point(|indexed| indexed.end <= range.start);
        let last = self.0.partition_point(|indexed| indexed.start < range.end);
        self.0.drain(first..last).collect()
    }

    /// Adds an entry that overlaps none.
    fn insert(&mut self, entry: Arc<Entry>, used: u64) {
        let Range { start, end } = entry.range;
        let at = self.0.partition_point(|indexed| indexed.start < start);
        self.0.insert(at, IndexedEntry { start, end, used, entry });
    }

    /// The least recently used of the idle entries that are selected: the time of its use, and its position.
    fn oldest_idle(&self, is_selected: impl Fn(&IndexedEntry) -> bool) -> Option<(u64, usize)> {
        let idle = self.0.iter().enumerate().filter(|(_, indexed)| is_selected(indexed) && indexed.is_idle());
        idle.map(|(at, indexed)| (indexed.used, at)).min()
    }
}

/// A handle of a [`Registration`] in the cache, of the range that was asked for. The registration stays in the cache when the last
/// clone and the last message of it are gone.
pub struct Cached {
    entry: Arc<Entry>,
    /// The range as a part of the entry, unless it is all of it. Boxed: moving a registration costs more than a hit.
    part: Option<Box<Registration>>,
}

impl Cached {
    /// A handle of a range within an entry whose memory is proved to be current.
    fn new(entry: Arc<Entry>, range: &Range<u64>) -> gdsync::Result<Self> {
        let part = if *range == entry.range { None } else { Some(Box::new(entry.part(range)?)) };
        entry.count_handle(1);
        Ok(Self { entry, part })
    }
}

impl Deref for Cached {
    type Target = Registration;

    fn deref(&self) -> &Registration {
        self.part.as_deref().unwrap_or(&self.entry.registration)
    }
}

impl Clone for Cached {
    fn clone(&self) -> Self {
        self.entry.count_handle(1);
        Self { entry: self.entry.clone(), part: self.part.clone() }
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        self.entry.count_handle(-1);
    }
}

impl fmt::Debug for Cached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cached({:?})", self.memory())
    }
}

/// The resources that some entries take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Room {
    entries: usize,
    bytes: u64,
    /// Bytes of the window of one GPU.
    window: u64,
}

impl Room {
    fn of<'a>(entries: impl Iterator<Item = &'a IndexedEntry>, gpu: Option<&Gpu>) -> Self {
        entries.fold(Self::default(), |room, indexed| {
            let on_it = gpu.is_some() && indexed.entry.is_on(gpu);
            room.and(&indexed.entry.range, on_it)
        })
    }

    /// With one more entry.
    fn and(self, range: &Range<u64>, on_gpu: bool) -> Self {
        Self {
            entries: self.entries + 1,
            bytes: self.bytes.saturating_add(range.end - range.start),
            window: self.window.saturating_add(if on_gpu { window(range) } else { 0 }),
        }
    }

    /// Whether they are within the bounds.
    fn fits(&self, config: &CacheConfig, gpu: Option<&Gpu>) -> bool {
        self.entries <= config.entries
            && self.bytes <= config.bytes
            && gpu.is_none_or(|gpu| self.window <= config.window_of(gpu))
    }
}

/// The registration cache of a communicator: see [the module](self). Any thread may use it.
#[derive(Debug)]
pub struct Cache {
    config: CacheConfig,
    /// Held for nanoseconds: a reader-writer lock would cost a hit more.
    known: Mutex<Known>,
    /// Held while entries are added or removed; the entry that is queried next.
    changing: Mutex<usize>,
}

/// The entries, and what has become of them.
#[derive(Debug, Default)]
struct Known {
    /// Of host memory, and of GPU memory: the caller tells them apart, not their addresses.
    spaces: [Index; 2],
    /// Counts hits and new entries.
    clock: u64,
    /// Without the contents.
    stats: CacheStats,
}

impl Known {
    fn space(&mut self, gpu: Option<&Gpu>) -> &mut Index {
        &mut self.spaces[usize::from(gpu.is_some())]
    }

    fn entries(&self) -> impl Iterator<Item = &IndexedEntry> {
        self.spaces.iter().flat_map(|index| &index.0)
    }

    /// Looks an entry up, and marks it as used now: a hit, if the memory is proved to be current.
    fn used(&mut self, gpu: Option<&Gpu>, range: &Range<u64>) -> Option<Arc<Entry>> {
        let now = self.clock + 1;
        let indexed = self.space(gpu).covering(range)?;
        indexed.used = now;
        let entry = indexed.entry.clone();
        self.clock = now;
        self.stats.hits += 1;
        Some(entry)
    }

    fn insert(&mut self, gpu: Option<&Gpu>, entry: Arc<Entry>) {
        self.clock += 1;
        let now = self.clock;
        self.space(gpu).insert(entry, now);
    }
}

/// The counters of a [`Cache`], and its contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Uses of a kept registration.
    pub hits: u64,
    /// Registrations that were made to be kept.
    pub misses: u64,
    /// Registrations that were evicted for lack of room.
    pub evictions: u64,
    /// Registrations of GPU memory that had been freed.
    pub stale: u64,
    /// Registrations that a larger one replaced.
    pub merged: u64,
    /// Registrations that were made for one handle alone.
    pub uncached: u64,
    /// Registrations that are kept now.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Cache {
    pub(crate) fn new(config: CacheConfig) -> Self {
        let (known, changing) = Default::default();
        Self { config, known, changing }
    }

    /// Its configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Its counters, and its contents now.
    pub fn stats(&self) -> CacheStats {
        let known = self.known.lock();
        let Room { entries, bytes, .. } = Room::of(known.entries(), None);
        CacheStats { entries, bytes, ..known.stats }
    }

    fn count(&self, counter: impl FnOnce(&mut CacheStats)) {
        counter(&mut self.known.lock().stats);
    }

    /// Forgets all registrations that overlap `len` bytes at `addr`, of host and GPU memory, and returns how many those were.
    /// They end with their last handle and message, mostly at once.
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
    /// it is invalidated. No Rust reference to it may be used while messages are under way.
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
        // SAFETY: only ranges of this call and of kept entries are wrapped: for both the callers of `get` keep the memory
        // allocated.
        let register = |range: &Range<u64>| register(&unsafe { wrap(gpu, range) }?);
        if keeps { self.miss(gpu, range, register) } else { self.uncached(range, register(range)?) }
    }

    /// The ranges of its entries.
    #[cfg(test)]
    fn ranges(&self) -> Vec<Range<u64>> {
        self.known.lock().entries().map(|indexed| indexed.entry.range.clone()).collect()
    }

    fn hit(&self, gpu: Option<&Gpu>, range: &Range<u64>) -> gdsync::Result<Option<Cached>> {
        let Some(entry) = self.known.lock().used(gpu, range) else { return Ok(None) };
        if self.proves(&entry, gpu, range.start)? {
            return Cached::new(entry, range).map(Some);
        }
        self.count(|stats| stats.hits -= 1);
        Ok(None)
    }

    /// Whether the memory at an address within an entry is the memory that was registered.
    fn proves(&self, entry: &Entry, gpu: Option<&Gpu>, addr: u64) -> gdsync::Result<bool> {
        let (Some(gpu), Some((_, id))) = (gpu, &entry.allocation) else { return Ok(true) };
        Ok(entry.is_on(Some(gpu))
            && (self.config.announced || entry.has_handles() || gpu.buffer_id(addr)? == *id))
    }

    #[cold]
    fn miss(
        &self,
        gpu: Option<&Gpu>,
        range: &Range<u64>,
        register: impl Fn(&Range<u64>) -> gdsync::Result<Registration>,
    ) -> gdsync::Result<Cached> {
        let mut changing = self.changing.lock();
        // Another thread may have been faster.
        if let Some(cached) = self.hit(gpu, range)? {
            return Ok(cached);
        }
        self.drop_freed(&mut changing);
        let allocation = match gpu {
            Some(gpu) => Some((gpu.clone(), gpu.buffer_id(range.start)?)),
            None => None,
        };
        // CUDA does not know the address: registering it returns the error.
        let provable = !matches!(allocation, Some((_, 0)));
        if !provable || !self.could_fit(gpu, range) {
            return self.uncached(range, self.register(range, range, register)?.1);
        }
        let hull = self.replace_overlapping(&allocation, range);
        let wanted = if self.could_fit(gpu, &hull) { hull } else { range.clone() };
        if !self.make_room(gpu, &wanted) {
            return self.uncached(range, self.register(range, range, register)?.1);
        }
        let (got, registration) = self.register(range, &wanted, register)?;
        self.count(|stats| stats.misses += 1);
        let entry = Entry::new(got, allocation, registration);
        let cached = Cached::new(entry.clone(), range)?;
        self.known.lock().insert(gpu, entry);
        Ok(cached)
    }

    /// Registers `wanted`, or if that fails `range` in it, after evicting what is idle. Returns which of the two.
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
                    tracing::debug!(%error, ?wanted, "evicting idle registrations");
                }
                Err(_) if wanted != range => wanted = range,
                Err(error) => return Err(error),
            }
        }
    }

    /// A handle of a registration that is not kept.
    fn uncached(&self, range: &Range<u64>, registration: Registration) -> gdsync::Result<Cached> {
        self.count(|stats| stats.uncached += 1);
        Cached::new(Entry::new(range.clone(), None, registration), range)
    }

    /// Whether a range fits beside all that is in use.
    fn could_fit(&self, gpu: Option<&Gpu>, range: &Range<u64>) -> bool {
        let in_use = Room::of(self.known.lock().entries().filter(|indexed| !indexed.is_idle()), gpu);
        in_use.and(range, gpu.is_some()).fits(&self.config, gpu)
    }

    /// Removes what overlaps a range, and returns the hull of the range and of what was current.
    fn replace_overlapping(&self, allocation: &Option<(Gpu, u64)>, range: &Range<u64>) -> Range<u64> {
        let gpu = allocation.as_ref().map(|(gpu, _)| gpu);
        let taken = self.known.lock().space(gpu).take_overlapping(range);
        taken.iter().fold(range.clone(), |hull, IndexedEntry { entry, .. }| {
            let number = |allocation: &Option<(Gpu, u64)>| allocation.as_ref().map(|(_, id)| *id);
            if !entry.is_on(gpu) || number(&entry.allocation) != number(allocation) {
                self.count(|stats| stats.stale += 1);
                return hull;
            }
            self.count(|stats| stats.merged += 1);
            hull.start.min(entry.range.start)..hull.end.max(entry.range.end)
        })
    }

    /// Evicts idle entries until a range fits. Returns whether it does.
    fn make_room(&self, gpu: Option<&Gpu>, range: &Range<u64>) -> bool {
        loop {
            let room = Room::of(self.known.lock().entries(), gpu).and(range, gpu.is_some());
            if room.fits(&self.config, gpu) {
                return true;
            }
            // Where only the window is full, evicting others would not help.
            let only_window = room.fits(&self.config, None);
            if self.evict(|indexed| !only_window || indexed.entry.is_on(gpu)).is_none() {
                return false;
            }
        }
    }

    /// Evicts the least recently used of the idle entries that are selected. Returns its length.
    fn evict(&self, is_selected: impl Fn(&IndexedEntry) -> bool) -> Option<u64> {
        let mut known = self.known.lock();
        let spaces = known.spaces.iter().enumerate();
        let oldest = spaces.filter_map(|(n, index)| Some((index.oldest_idle(&is_selected)?, n)));
        let ((_, at), n) = oldest.min()?;
        let evicted = known.spaces[n].0.remove(at);
        known.stats.evictions += 1;
        drop(known);
        Some(evicted.entry.len())
    }

    /// Evicts idle entries of so many bytes, as far as there are any. Returns whether there was one.
    fn evict_bytes(&self, bytes: u64) -> bool {
        let mut freed = None;
        while freed < Some(bytes)
            && let Some(len) = self.evict(|_| true)
        {
            freed = Some(freed.unwrap_or(0).saturating_add(len));
        }
        freed.is_some()
    }

    /// Queries CUDA for a few entries of GPU memory, from the `next` on, and drops those that were freed.
    fn drop_freed(&self, next: &mut usize) {
        let some: Vec<Arc<Entry>> = {
            let known = self.known.lock();
            let (entries, first) = (&known.spaces[1].0, *next);
            *next = if first + QUERIES < entries.len() { first + QUERIES } else { 0 };
            entries.iter().skip(first).take(QUERIES).map(|indexed| indexed.entry.clone()).collect()
        };
        for entry in some {
            let Some((gpu, id)) = &entry.allocation else { continue };
            if gpu.buffer_id(entry.range.start).is_ok_and(|now| now != *id) {
                let mut known = self.known.lock();
                let gone = known.spaces[1].0.extract_if(.., |indexed| Arc::ptr_eq(&indexed.entry, &entry));
                known.stats.stale += gone.count() as u64;
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
        // SAFETY: the caller of this function keeps the memory allocated.
        Some(gpu) => unsafe { gpu.wrap(range.start, len) },
        None => {
            let start = usize::try_from(range.start).expect("64-bit hosts only");
            // SAFETY: the caller keeps the range mapped, and uses no reference to it while messages are under way.
            unsafe { Memory::from_raw(std::ptr::with_exposed_provenance_mut(start), len) }
        }
    }
}

#[cfg(test)]
mod tests;
