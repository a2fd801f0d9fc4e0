//! The cache on a software HCA with few regions, and on GPU memory, simulated where there is none.

use std::ops::Range;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use gdrcopy::standin::driver::{self, Control};
use gdsync::cuda::Gpu;
use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Pd, SendWr};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{Cache, CacheConfig, CacheStats, Cached, Keep};
use crate::registration::Registration;

/// Host memory that is there for as long as the test, a device with room for a few regions, and a cache.
struct Bed {
    memory: Memory,
    pd: Pd,
    cache: Cache,
}

const BYTES: usize = 1 << 16;
/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

impl Bed {
    fn new(max_regions: usize, config: CacheConfig) -> Self {
        let context = Context::soft(&SoftHcaConfig { max_regions, ..SoftHcaConfig::default() }).unwrap();
        let (memory, pd) = (Memory::alloc(BYTES).unwrap(), context.alloc_pd().unwrap());
        Self { memory, pd, cache: Cache::new(config) }
    }

    fn register(&self, memory: &Memory) -> gdsync::Result<Registration> {
        self.pd.register(memory, Access::LOCAL_WRITE).map(|mr| Registration::new(mr, None))
    }

    /// The addresses of a part of the memory.
    fn at(&self, part: &Range<usize>) -> Range<u64> {
        assert!(part.end <= BYTES);
        self.memory.addr() + part.start as u64..self.memory.addr() + part.end as u64
    }

    fn try_get(&self, part: Range<usize>) -> gdsync::Result<Cached> {
        let range = self.at(&part);
        // SAFETY: the memory stays until the test ends; nobody has a reference to it.
        let cached = unsafe { self.cache.get(None, &range, |memory| self.register(memory)) }?;
        assert_eq!((cached.memory().addr(), cached.memory().len()), (range.start, part.len()), "{part:?}");
        Ok(cached)
    }

    #[track_caller]
    fn get(&self, part: Range<usize>) -> Cached {
        self.try_get(part).unwrap()
    }

    fn invalidate(&self, part: Range<usize>) -> usize {
        self.cache.invalidate(self.at(&part).start, part.len())
    }

    /// First and last offset of the parts that are there.
    fn kept(&self) -> Vec<(usize, usize)> {
        let offset = |at: u64| usize::try_from(at - self.memory.addr()).unwrap();
        self.cache.ranges().iter().map(|range| (offset(range.start), offset(range.end))).collect()
    }
}

fn config(entries: usize, bytes: u64) -> CacheConfig {
    CacheConfig { keep: Keep::All, entries, bytes, window: None, announced: false }
}

#[test]
fn a_range_is_registered_once_and_serves_its_parts() {
    let bed = Bed::new(1, config(8, 1 << 20));
    let first = bed.get(100..200);
    let keys = first.mr(false).lkey();
    drop(first);
    for part in [100..200, 100..101, 199..200, 120..180] {
        assert_eq!(bed.get(part).mr(false).lkey(), keys);
    }
    let CacheStats { hits, misses, entries, bytes, .. } = bed.cache.stats();
    assert_eq!((hits, misses, entries, bytes), (4, 1, 1, 100));
    let part = bed.get(120..130);
    part.memory().write(0, b"0123456789").unwrap();
    assert_eq!(&bed.memory.to_vec()[120..130], b"0123456789");
    assert_eq!(part.mr(false).sge(2, 3).unwrap().addr, bed.memory.addr() + 122);
    assert!(part.mr(false).sge(8, 3).is_err(), "a part ends where it ends");
}

#[test]
fn what_was_not_used_for_longest_goes_first_and_what_is_used_stays() {
    let bed = Bed::new(64, config(3, 1 << 20));
    let held = bed.get(0..10);
    bed.get(20..30);
    bed.get(40..50);
    bed.get(20..25);
    bed.get(60..70);
    assert_eq!(bed.kept(), [(0, 10), (20, 30), (60, 70)]);
    bed.get(80..90);
    assert_eq!(bed.kept(), [(0, 10), (60, 70), (80, 90)]);
    drop(held);
    bed.get(100..110);
    assert_eq!(bed.kept(), [(60, 70), (80, 90), (100, 110)]);
    assert_eq!(bed.cache.stats().evictions, 3);
}

#[test]
fn a_message_under_way_counts_as_a_use() {
    let bed = Bed::new(64, config(1, 1 << 20));
    let message = Registration::clone(&bed.get(0..10));
    let other = bed.get(20..30);
    assert_eq!((bed.kept(), bed.cache.stats().uncached), (vec![(0, 10)], 1));
    drop((message, other));
    bed.get(20..30);
    assert_eq!(bed.kept(), [(20, 30)]);
}

#[test]
fn bytes_are_bounded_and_what_cannot_fit_evicts_nothing() {
    let bed = Bed::new(64, config(64, 100));
    bed.get(0..40);
    bed.get(100..140);
    bed.get(200..301);
    assert_eq!((bed.kept(), bed.cache.stats().uncached), (vec![(0, 40), (100, 140)], 1));
    bed.get(200..300);
    let stats = bed.cache.stats();
    assert_eq!((bed.kept(), stats.bytes, stats.evictions), (vec![(200, 300)], 100, 2));
}

#[test]
fn ranges_that_overlap_become_one() {
    let bed = Bed::new(64, config(8, 100));
    bed.get(0..20);
    let held = bed.get(30..50);
    bed.get(10..40);
    assert_eq!((bed.kept(), bed.cache.stats().merged), (vec![(0, 50)], 2));
    held.memory().write(0, b"still registered").unwrap();
    bed.get(50..60);
    assert_eq!(bed.kept(), [(0, 50), (50, 60)], "neighbours do not overlap");
    bed.get(40..141);
    assert_eq!((bed.kept(), bed.cache.stats().uncached), (vec![(0, 50), (50, 60)], 1), "too long to be kept");
    bed.get(59..100);
    bed.get(99..150);
    assert_eq!(bed.kept(), [(50, 150)], "the oldest made room");
    bed.get(149..160);
    assert_eq!(bed.kept(), [(149, 160)], "together they would be too long");
}

#[test]
fn what_is_invalidated_is_registered_again() {
    let bed = Bed::new(64, config(8, 1 << 20));
    for part in [0..10, 10..20, 20..30] {
        bed.get(part);
    }
    assert_eq!(bed.invalidate(5..11), 2);
    assert_eq!(bed.invalidate(5..11), 0);
    assert_eq!(bed.kept(), [(20, 30)]);
    let held = bed.get(20..30);
    assert_eq!(bed.cache.clear(), 1);
    assert_eq!(bed.cache.stats().entries, 0);
    held.memory().write(0, b"registered").unwrap();
    let misses = bed.cache.stats().misses;
    bed.get(20..30);
    assert_eq!(bed.cache.stats().misses, misses + 1);
}

#[test]
fn a_device_without_room_gets_some() {
    let bed = Bed::new(3, config(64, 1 << 20));
    let held = bed.get(0..10);
    bed.get(20..30);
    bed.get(40..50);
    bed.get(60..80);
    assert_eq!(bed.kept(), [(0, 10), (60, 80)], "as many bytes as are wanted");
    let (second, third) = (bed.get(60..70), bed.get(100..110));
    let error = bed.try_get(120..130).unwrap_err();
    assert!(error.is_exhausted(), "{error}");
    assert!(error.to_string().contains("deregister"), "{error}");
    drop((second, third));
    bed.get(120..130);
    drop(held);
    bed.get(140..160);
    assert_eq!(bed.kept(), [(120, 130), (140, 160)]);
}

#[test]
fn an_error_that_is_no_lack_of_room_evicts_nothing() {
    let bed = Bed::new(64, config(64, 1 << 20));
    bed.get(0..10);
    let refuse = |_: &Memory| Err(gdsync::Error::OutOfBounds { offset: 1, len: 2, size: 3 });
    // SAFETY: the memory stays until the test ends.
    let refused = unsafe { bed.cache.get(None, &bed.at(&(20..30)), refuse) };
    assert!(matches!(refused, Err(gdsync::Error::OutOfBounds { .. })), "{refused:?}");
    assert_eq!((bed.kept(), bed.cache.stats().evictions), (vec![(0, 10)], 0));
}

/// The pages between may be gone, or of another kind.
#[test]
fn what_cannot_be_registered_together_is_registered_alone() {
    let bed = Bed::new(64, config(64, 1 << 20));
    bed.get(0..20);
    let only_short = |memory: &Memory| match memory.len() {
        10 => bed.register(memory),
        _ => Err(gdsync::Error::OutOfBounds { offset: 0, len: memory.len(), size: 10 }),
    };
    // SAFETY: the memory stays until the test ends.
    drop(unsafe { bed.cache.get(None, &bed.at(&(15..25)), only_short) }.unwrap());
    assert_eq!(bed.kept(), [(15, 25)]);
}

#[test]
fn nothing_is_kept_where_it_is_off() {
    for (keep, variable) in [(Keep::Nothing, None), (Keep::All, Some("off")), (Keep::All, Some(" gpu "))] {
        let bed = Bed::new(1, CacheConfig { keep, ..config(8, 1 << 20) }.or(variable).unwrap());
        drop(bed.get(0..10));
        let held = bed.get(0..10);
        assert!(bed.try_get(0..10).unwrap_err().is_exhausted(), "the device has one region");
        drop(held);
        bed.get(5..15);
        let stats = CacheStats { uncached: 3, ..CacheStats::default() };
        assert_eq!(bed.cache.stats(), stats, "{keep:?} {variable:?}");
    }
    let on = CacheConfig { keep: Keep::Nothing, ..CacheConfig::default() }.or(Some("on")).unwrap();
    assert_eq!(on, CacheConfig::default());
    let error = CacheConfig::default().or(Some("yes")).unwrap_err().to_string();
    assert!(error.contains("MP_REG_CACHE") && error.contains("'yes'") && error.contains("off"), "{error}");
}

#[test]
fn no_entries_means_nothing_is_kept() {
    let bed = Bed::new(1, config(0, 1 << 20));
    drop(bed.get(0..10));
    drop(bed.get(0..10));
    assert_eq!(bed.cache.stats(), CacheStats { uncached: 2, ..CacheStats::default() });
}

const ENTRIES: usize = 4;
const BOUND: usize = 40;
const REGIONS: usize = 6;

#[derive(Clone, Debug)]
enum Op {
    /// Gets a range, and keeps the handle or not.
    Get(Range<usize>, bool),
    /// Drops a handle.
    Drop(usize),
    Invalidate(Range<usize>),
}

fn op() -> impl Strategy<Value = Op> {
    let range = || (0..60usize, 1..30usize).prop_map(|(start, len)| start..start + len);
    prop_oneof![
        6 => (range(), any::<bool>()).prop_map(|(range, keep)| Op::Get(range, keep)),
        3 => any::<usize>().prop_map(Op::Drop),
        1 => range().prop_map(Op::Invalidate),
    ]
}

/// A region of the device, as long as it is kept or has handles.
struct Region {
    id: u64,
    range: Range<usize>,
    kept: bool,
    used: u64,
    handles: usize,
}

#[derive(Default)]
struct Model {
    regions: Vec<Region>,
    time: u64,
    made: u64,
    stats: CacheStats,
}

impl Model {
    fn kept(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.kept)
    }

    fn fits<'a>(kept: impl Iterator<Item = &'a Region>, more: &Range<usize>) -> bool {
        let (count, bytes) = kept.fold((1, more.len()), |(n, bytes), r| (n + 1, bytes + r.range.len()));
        count <= ENTRIES && bytes <= BOUND
    }

    fn could_have(&self, range: &Range<usize>) -> bool {
        Self::fits(self.kept().filter(|region| region.handles > 0), range)
    }

    /// Forgets one; it goes when it has no handles either.
    fn forget(&mut self, at: usize) -> Range<usize> {
        self.regions[at].kept = false;
        let range = self.regions[at].range.clone();
        self.regions.retain(|region| region.kept || region.handles > 0);
        range
    }

    fn evict(&mut self) -> Option<usize> {
        let idle = self.regions.iter().enumerate().filter(|(_, region)| region.kept && region.handles == 0);
        let (at, _) = idle.min_by_key(|(_, region)| region.used)?;
        self.stats.evictions += 1;
        Some(self.forget(at).len())
    }

    fn overlapping(&mut self, range: &Range<usize>) -> Vec<Range<usize>> {
        let mut gone = Vec::new();
        let touches = |r: &Region| r.kept && r.range.start < range.end && range.start < r.range.end;
        while let Some(at) = self.regions.iter().position(touches) {
            gone.push(self.forget(at));
        }
        gone
    }

    /// Whether the device has, or is given, room for a region of so many bytes.
    fn room(&mut self, bytes: usize) -> bool {
        while self.regions.len() >= REGIONS {
            let mut freed = self.evict();
            if freed.is_none() {
                return false;
            }
            while freed.is_some_and(|freed| freed < bytes) {
                let Some(more) = self.evict() else { break };
                freed = freed.map(|freed| freed + more);
            }
        }
        true
    }

    fn add(&mut self, range: Range<usize>, kept: bool) -> u64 {
        self.time += u64::from(kept);
        self.made += 1;
        self.regions.push(Region { id: self.made, range, kept, used: self.time, handles: 1 });
        self.made
    }

    /// Drops a handle of a region.
    fn drop_handle(&mut self, id: u64) {
        let region = self.regions.iter_mut().find(|region| region.id == id);
        region.expect("a region that has a handle is there").handles -= 1;
        self.regions.retain(|region| region.kept || region.handles > 0);
    }

    /// Gets a range: the region that serves it, unless the device has no room.
    fn get(&mut self, range: &Range<usize>) -> Option<u64> {
        let covers = |r: &Region| r.kept && r.range.start <= range.start && range.end <= r.range.end;
        if let Some(at) = self.regions.iter().position(covers) {
            self.time += 1;
            self.stats.hits += 1;
            let region = &mut self.regions[at];
            region.used = self.time;
            region.handles += 1;
            return Some(region.id);
        }
        if !self.could_have(range) {
            if !self.room(range.len()) {
                return None;
            }
            self.stats.uncached += 1;
            return Some(self.add(range.clone(), false));
        }
        let gone = self.overlapping(range);
        self.stats.merged += gone.len() as u64;
        let hull = gone.iter().fold(range.clone(), |all, r| all.start.min(r.start)..all.end.max(r.end));
        let mut wanted = if self.could_have(&hull) { hull } else { range.clone() };
        while !Self::fits(self.kept(), &wanted) {
            self.evict().expect("what is in use leaves room");
        }
        if !self.room(wanted.len()) {
            wanted = range.clone();
            if !self.room(wanted.len()) {
                return None;
            }
        }
        self.stats.misses += 1;
        Some(self.add(wanted, true))
    }
}

struct Pair {
    bed: Bed,
    model: Model,
    /// With the regions that they are of.
    handles: Vec<(Cached, u64)>,
}

impl Pair {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::Get(range, keep) => {
                let (got, expected) = (self.bed.try_get(range.clone()), self.model.get(range));
                assert_eq!(got.is_ok(), expected.is_some(), "{range:?}: {got:?}");
                if let (Ok(cached), Some(region)) = (got, expected) {
                    self.handles.push((cached, region));
                    if !keep {
                        self.drop_handle(self.handles.len() - 1);
                    }
                }
            }
            Op::Drop(n) => {
                if let Some(at) = n.checked_rem(self.handles.len()) {
                    self.drop_handle(at);
                }
            }
            Op::Invalidate(range) => {
                assert_eq!(self.bed.invalidate(range.clone()), self.model.overlapping(range).len());
            }
        }
    }

    fn drop_handle(&mut self, at: usize) {
        let (_, region) = self.handles.swap_remove(at);
        self.model.drop_handle(region);
    }

    fn check(&self) {
        let mut kept: Vec<_> = self.model.kept().map(|r| (r.range.start, r.range.end)).collect();
        kept.sort_unstable();
        assert_eq!(self.bed.kept(), kept);
        let bytes = kept.iter().map(|(start, end)| (end - start) as u64).sum();
        let expected = CacheStats { entries: kept.len(), bytes, ..self.model.stats };
        assert_eq!(self.bed.cache.stats(), expected);
        assert!(kept.len() <= ENTRIES && bytes <= BOUND as u64);
        assert!(kept.is_sorted_by(|a, b| a.1 <= b.0), "{kept:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn the_cache_does_what_the_model_says(ops in vec(op(), 1..120)) {
        let bed = Bed::new(REGIONS, config(ENTRIES, BOUND as u64));
        let mut pair = Pair { bed, model: Model::default(), handles: Vec::new() };
        for op in &ops {
            pair.apply(op);
            pair.check();
        }
        pair.handles.clear();
        pair.bed.cache.clear();
        let all: Vec<_> = (0..REGIONS).map(|_| pair.bed.register(&pair.bed.memory).unwrap()).collect();
        prop_assert!(pair.bed.register(&pair.bed.memory).is_err(), "{} are all", all.len());
    }
}

/// Each thread writes through its handles, over a connection to itself: a key that is dead, or opens other memory, fails.
#[test]
fn a_handle_is_registered_as_long_as_it_lives() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 300;
    const SHARE: usize = 4096;
    let bed = Bed::new(24, config(6, 6000));
    let target = bed.pd.register(&bed.memory, Access::all()).unwrap();
    let play = |me: usize| {
        let [a, b] = [(); 2].map(|()| bed.pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let mut random = me as u64 + 1;
        let mut next = |below: usize| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            usize::try_from(random >> 33).unwrap() % below
        };
        for round in 0..ROUNDS {
            // The threads look up the same ranges, and write to places of their own.
            let start = next(8) * 512;
            let len = 16 + next(2000);
            let source = bed.get(start..start + len);
            assert_eq!(source.memory().len(), len);
            let sge = source.mr(false).sge(0, 16).unwrap();
            let to = target.remote(8192 + me * SHARE).unwrap();
            a.post_send(&[SendWr::write(to, &[sge])]).unwrap().wait(LONG).unwrap();
            while a.poll_send().is_some() {}
            if round % 50 == me {
                bed.invalidate(0..next(8192).max(1));
            }
        }
    };
    thread::scope(|scope| (0..THREADS).for_each(|me| drop(scope.spawn(move || play(me)))));
    let stats = bed.cache.stats();
    assert!(stats.entries <= 6 && stats.bytes <= 6000, "{stats:?}");
    assert_eq!(stats.hits + stats.misses + stats.uncached, (THREADS * ROUNDS) as u64, "{stats:?}");
    bed.cache.clear();
    assert_eq!(bed.cache.stats().entries, 0);
    let rest: Vec<_> = (0..23).map(|_| bed.register(&bed.memory).unwrap()).collect();
    assert!(
        bed.register(&bed.memory).is_err(),
        "nothing else is registered but {} and the target",
        rest.len()
    );
}

const LEN: usize = 2 << 20;

fn is_simulated() -> bool {
    Gpu::count().map_or(true, |count| count == 0)
}

fn gpu() -> &'static Gpu {
    static OPEN: OnceLock<Gpu> = OnceLock::new();
    OPEN.get_or_init(|| {
        if is_simulated() {
            Gpu::open_with(driver::api(), 0, Some(driver::gdr().unwrap())).unwrap()
        } else {
            Gpu::open(0).unwrap()
        }
    })
}

fn malloc(len: usize) -> u64 {
    let (gpu, mut addr) = (gpu(), 0);
    let _current = gpu.enter().unwrap();
    // SAFETY: a place for the answer.
    unsafe { gpu.api().mem_alloc(&mut addr, len) }.unwrap();
    addr
}

fn free(addr: u64) {
    let _current = gpu().enter().unwrap();
    // SAFETY: allocated above, freed once; only the cache still knows of it.
    unsafe { gpu().api().mem_free(addr) }.unwrap();
}

fn get(bed: &Bed, addr: u64, len: usize) -> Cached {
    let register = |memory: &gdsync::memory::Memory| {
        bed.pd.register(memory, Access::LOCAL_WRITE).map(|mr| Registration::new(mr, None))
    };
    // SAFETY: the memory is freed when the handle is gone.
    let cached = unsafe { bed.cache.get(Some(gpu()), &(addr..addr + len as u64), register) }.unwrap();
    assert_eq!((cached.memory().addr(), cached.memory().len()), (addr, len));
    cached
}

fn bed(config: CacheConfig) -> Bed {
    Bed::new(64, config)
}

/// Allocates until an address that was freed is used again. Rarely somebody else of the process has taken it.
fn is_allocated_again(addr: u64) -> bool {
    let mut others = Vec::new();
    while others.len() < 100 && !others.contains(&addr) {
        others.push(malloc(LEN));
    }
    let is_there = others.contains(&addr);
    others.into_iter().filter(|&other| other != addr).for_each(free);
    is_there
}

/// So many times: `before` with memory that is freed then, `after` with other memory at the same address.
fn with_memory_of_before(times: usize, mut before: impl FnMut(u64), mut after: impl FnMut(u64)) {
    let mut done = 0;
    for _ in 0..10 * times {
        let addr = malloc(LEN);
        before(addr);
        free(addr);
        if is_allocated_again(addr) {
            after(addr);
            done += 1;
            free(addr);
        }
        if done == times {
            return;
        }
    }
    panic!("only {done} of {times} addresses were used again");
}

#[test]
fn memory_that_was_freed_is_never_served_again() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let before = |addr| {
        let key = get(&bed, addr, LEN).mr(false).lkey();
        assert_eq!(get(&bed, addr + 64, 64).mr(false).lkey(), key, "the same memory is a hit");
    };
    let after = |addr| {
        let before = bed.cache.stats();
        get(&bed, addr + 64, 64);
        let now = bed.cache.stats();
        assert_eq!((now.hits, now.misses), (before.hits, before.misses + 1), "other memory is none");
        assert!(now.stale > before.stale, "{now:?}");
    };
    with_memory_of_before(20, before, after);
}

/// What the CPU writes through the registration is what CUDA reads from the memory that is there now.
#[test]
fn the_registration_is_of_the_memory_that_is_there() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let check = |addr: u64, byte: u8| {
        let cached = get(&bed, addr + 4096, 4096);
        if !cached.memory().is_mapped() {
            println!("skipped: the CPU does not reach GPU memory here");
            return;
        }
        cached.memory().write(0, &[byte; 64]).unwrap();
        cached.memory().flush().unwrap();
        drop(cached);
        let mut seen = [0u8; 64];
        let _current = gpu().enter().unwrap();
        // SAFETY: a place for 64 bytes; the memory is allocated.
        unsafe { gpu().api().memcpy_to_host_async(seen.as_mut_ptr().cast(), addr + 4096, 64, 0) }.unwrap();
        // SAFETY: the default stream.
        unsafe { gpu().api().stream_synchronize(0) }.unwrap();
        assert_eq!(seen, [byte; 64]);
    };
    with_memory_of_before(5, |addr| check(addr, 1), |addr| check(addr, 2));
}

#[test]
fn cuda_is_not_asked_where_a_handle_or_the_application_proves_the_memory() {
    if !is_simulated() {
        println!("skipped: only the simulated driver counts its calls");
        return;
    }
    let driver = Control::take();
    let asked = || driver.calls("cuPointerGetAttribute");
    let addr = malloc(LEN);
    let bed = bed(config(64, 1 << 30));
    let held = get(&bed, addr, LEN);
    let before = asked();
    drop(get(&bed, addr, LEN));
    assert_eq!(asked(), before, "a handle proves it");
    drop(held);
    drop(get(&bed, addr, LEN));
    assert_eq!(asked(), before + 1, "nothing else does");
    let message = Registration::clone(&get(&bed, addr, LEN));
    let before = asked();
    drop(get(&bed, addr, LEN));
    assert_eq!(asked(), before + 1, "a message under way may be complete, and its memory freed");
    drop(message);

    let announced = self::bed(CacheConfig { announced: true, ..config(64, 1 << 30) });
    drop(get(&announced, addr, LEN));
    let before = asked();
    drop(get(&announced, addr, LEN));
    assert_eq!(asked(), before, "the application says when it frees");
    assert_eq!(announced.cache.invalidate(addr, 1), 1);
    free(addr);
}

#[test]
fn freed_memory_is_found_by_looks() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let addrs: Vec<_> = (0..20).map(|_| malloc(LEN)).collect();
    addrs.iter().for_each(|&addr| drop(get(&bed, addr, LEN)));
    addrs.iter().for_each(|&addr| free(addr));
    let host = |n: usize| drop(bed.get(n * 10..n * 10 + 5));
    (0..3).for_each(host);
    let stats = bed.cache.stats();
    assert_eq!((stats.stale, stats.entries), (8 + 8 + 4, 3), "eight at every miss");
}

#[test]
fn the_window_of_a_gpu_is_bounded() {
    let _driver = Control::take();
    let bed = bed(CacheConfig { window: Some(4 << 16), ..config(64, 1 << 30) });
    let allocation = malloc(LEN);
    let addr = allocation.next_multiple_of(1 << 16);
    bed.get(0..10);
    // A page of 64 KiB each, but the last, which lies on two.
    for start in [0, 1 << 16, 2 << 16, (4 << 16) - 1] {
        drop(get(&bed, addr + start, 2));
    }
    let kept: Vec<_> = bed.cache.ranges().iter().map(|range| range.start.wrapping_sub(addr)).collect();
    let expected = [1 << 16, 2 << 16, (4 << 16) - 1];
    assert_eq!(kept.iter().filter(|start| **start < 5 << 16).copied().collect::<Vec<_>>(), expected);
    let stats = bed.cache.stats();
    assert_eq!((stats.evictions, stats.entries), (1, 4), "host memory stays: it is not in the window");
    drop(get(&bed, addr, (4 << 16) + 1));
    assert_eq!((bed.cache.stats().uncached, bed.cache.stats().entries), (1, 4));
    bed.cache.clear();
    free(allocation);
}

#[test]
fn what_cuda_does_not_know_is_refused_and_nothing_is_kept() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let addr = malloc(LEN);
    let refused = |addr: u64, len: usize| {
        let register = |memory: &gdsync::memory::Memory| bed.register(memory);
        // SAFETY: nothing is sent.
        let cached = unsafe { bed.cache.get(Some(gpu()), &(addr..addr + len as u64), register) };
        cached.unwrap_err().to_string()
    };
    assert!(refused(addr, LEN + 1).contains("inside one allocation"));
    free(addr);
    assert!(refused(addr, 64).contains("live memory"));
    assert_eq!(bed.cache.stats(), CacheStats::default());
}
