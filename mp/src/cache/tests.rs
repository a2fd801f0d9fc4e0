//! The cache on a software HCA with few regions, and on GPU memory, simulated where there is none.

use std::ops::Range;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Pd, SendWr};
use gdsync_testkit::driver::{self, Control};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{Cache, CacheConfig, CacheStats, Cached, Keep};
use crate::registration::{DomainId, Registration};

/// Host memory, a device with few regions, and a cache.
struct Fixture {
    memory: Memory,
    pd: Pd,
    cache: Cache,
}

const BYTES: usize = 1 << 16;
/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

impl Fixture {
    fn new(max_regions: usize, config: CacheConfig) -> Self {
        let context = Context::soft(&SoftHcaConfig { max_regions, ..SoftHcaConfig::default() }).unwrap();
        let (memory, pd) = (Memory::alloc(BYTES).unwrap(), context.alloc_pd().unwrap());
        Self { memory, pd, cache: Cache::new(config) }
    }

    fn register(&self, memory: &Memory) -> gdsync::Result<Registration> {
        self.pd.register(memory, Access::LOCAL_WRITE).map(|mr| Registration::new(mr, None, DomainId::new()))
    }

    /// The addresses of a part of the memory.
    fn at(&self, part: &Range<usize>) -> Range<u64> {
        assert!(part.end <= BYTES);
        self.memory.addr() + part.start as u64..self.memory.addr() + part.end as u64
    }

    fn try_get(&self, part: Range<usize>) -> gdsync::Result<Cached> {
        let range = self.at(&part);
        // SAFETY: the memory stays allocated until the test ends, and no reference to it is made.
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

    /// The offsets of the start and end of the kept ranges.
    fn kept(&self) -> Vec<(usize, usize)> {
        let offset = |at: u64| usize::try_from(at - self.memory.addr()).unwrap();
        self.cache.ranges().iter().map(|range| (offset(range.start), offset(range.end))).collect()
    }
}

fn config(entries: usize, bytes: u64) -> CacheConfig {
    CacheConfig { keep: Keep::All, entries, bytes, window: None, announced: false }
}

#[test]
fn ranges_are_registered_once() {
    let fixture = Fixture::new(1, config(8, 1 << 20));
    let first = fixture.get(100..200);
    let keys = first.mr(false).lkey();
    drop(first);
    for part in [100..200, 100..101, 199..200, 120..180] {
        assert_eq!(fixture.get(part).mr(false).lkey(), keys);
    }
    let CacheStats { hits, misses, entries, bytes, .. } = fixture.cache.stats();
    assert_eq!((hits, misses, entries, bytes), (4, 1, 1, 100));
    let part = fixture.get(120..130);
    part.memory().write(0, b"0123456789").unwrap();
    assert_eq!(&fixture.memory.to_vec()[120..130], b"0123456789");
    assert_eq!(part.mr(false).sge(2, 3).unwrap().addr, fixture.memory.addr() + 122);
    assert!(part.mr(false).sge(8, 3).is_err(), "a part ends where it ends");
}

#[test]
fn messages_under_way_count_as_uses() {
    let fixture = Fixture::new(64, config(1, 1 << 20));
    let message = Registration::clone(&fixture.get(0..10));
    let other = fixture.get(20..30);
    assert_eq!((fixture.kept(), fixture.cache.stats().uncached), (vec![(0, 10)], 1));
    drop((message, other));
    fixture.get(20..30);
    assert_eq!(fixture.kept(), [(20, 30)]);
}

/// Ranges that are used and dropped one after the other, with what is kept then: at most three, of 100 bytes together.
#[test]
fn ranges_are_merged_and_evicted() {
    let fixture = Fixture::new(64, config(3, 100));
    let held = fixture.get(0..10);
    for (part, kept) in [
        (20..30, &[(0, 10), (20, 30)][..]),
        (40..50, &[(0, 10), (20, 30), (40, 50)]),
        (20..25, &[(0, 10), (20, 30), (40, 50)]),
        // The oldest but the one in use leaves.
        (60..70, &[(0, 10), (20, 30), (60, 70)]),
        (25..65, &[(0, 10), (20, 70)]),
        // Neighbours do not overlap.
        (70..80, &[(0, 10), (20, 70), (70, 80)]),
        // Too long to be kept.
        (65..166, &[(0, 10), (20, 70), (70, 80)]),
        // The oldest makes room; together they would be too long.
        (79..165, &[(0, 10), (79, 165)]),
        (5..20, &[(0, 20)]),
    ] {
        fixture.get(part.clone());
        assert_eq!(fixture.kept(), kept, "{part:?}");
    }
    held.memory().write(0, b"registered").unwrap();
    let CacheStats { merged, uncached, evictions, .. } = fixture.cache.stats();
    assert_eq!((merged, uncached, evictions), (4, 1, 3));
    assert_eq!((fixture.invalidate(19..30), fixture.invalidate(19..30), fixture.kept()), (1, 0, vec![]));
}

#[test]
fn a_full_device_evicts_idle_ranges() {
    let fixture = Fixture::new(3, config(64, 1 << 20));
    let held = fixture.get(0..10);
    fixture.get(20..30);
    fixture.get(40..50);
    fixture.get(60..80);
    assert_eq!(fixture.kept(), [(0, 10), (60, 80)], "as many bytes as are wanted");
    let (second, third) = (fixture.get(60..70), fixture.get(100..110));
    let error = fixture.try_get(120..130).unwrap_err();
    assert!(error.is_exhausted(), "{error}");
    assert!(error.to_string().contains("deregister"), "{error}");
    drop((second, third));
    fixture.get(120..130);
    drop(held);
    fixture.get(140..160);
    assert_eq!(fixture.kept(), [(120, 130), (140, 160)]);
}

#[test]
fn other_errors_evict_nothing() {
    let fixture = Fixture::new(64, config(64, 1 << 20));
    fixture.get(0..10);
    let refuse = |_: &Memory| Err(gdsync::Error::OutOfBounds { offset: 1, len: 2, size: 3 });
    // SAFETY: the memory stays allocated until the test ends, and no reference to it is made.
    let refused = unsafe { fixture.cache.get(None, &fixture.at(&(20..30)), refuse) };
    assert!(matches!(refused, Err(gdsync::Error::OutOfBounds { .. })), "{refused:?}");
    assert_eq!((fixture.kept(), fixture.cache.stats().evictions), (vec![(0, 10)], 0));
}

/// The pages between may be unmapped, or of another kind.
#[test]
fn ranges_that_cannot_be_merged_are_registered_alone() {
    let fixture = Fixture::new(64, config(64, 1 << 20));
    fixture.get(0..20);
    let only_short = |memory: &Memory| match memory.len() {
        10 => fixture.register(memory),
        _ => Err(gdsync::Error::OutOfBounds { offset: 0, len: memory.len(), size: 10 }),
    };
    // SAFETY: the memory stays allocated until the test ends, and no reference to it is made.
    drop(unsafe { fixture.cache.get(None, &fixture.at(&(15..25)), only_short) }.unwrap());
    assert_eq!(fixture.kept(), [(15, 25)]);
}

#[test]
fn a_cache_that_is_off_keeps_nothing() {
    for (keep, variable) in [(Keep::Nothing, None), (Keep::All, Some("off")), (Keep::All, Some(" gpu "))] {
        let fixture = Fixture::new(1, CacheConfig { keep, ..config(8, 1 << 20) }.or(variable).unwrap());
        drop(fixture.get(0..10));
        let held = fixture.get(0..10);
        assert!(fixture.try_get(0..10).unwrap_err().is_exhausted(), "the device has one region");
        drop(held);
        fixture.get(5..15);
        let stats = CacheStats { uncached: 3, ..CacheStats::default() };
        assert_eq!(fixture.cache.stats(), stats, "{keep:?} {variable:?}");
    }
    let none = Fixture::new(1, config(0, 1 << 20));
    none.get(0..10);
    none.get(0..10);
    assert_eq!(none.cache.stats(), CacheStats { uncached: 2, ..CacheStats::default() });
    let on = CacheConfig { keep: Keep::Nothing, ..CacheConfig::default() }.or(Some("on")).unwrap();
    assert_eq!(on, CacheConfig::default());
    let error = CacheConfig::default().or(Some("yes")).unwrap_err().to_string();
    assert!(error.contains("MP_REG_CACHE") && error.contains("'yes'") && error.contains("off"), "{error}");
}

const ENTRIES: usize = 4;
const BOUND: usize = 40;
const REGIONS: usize = 6;

#[derive(Clone, Debug)]
enum Op {
    /// Gets a range, and perhaps keeps the handle.
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

/// A region of the device while it is kept or has handles.
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

    /// Removes a region from the cache; it ends with its last handle.
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

    /// Whether the device has room for a region, after evicting so many bytes.
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

    /// Gets a range: its region, unless the device has no room.
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
    fixture: Fixture,
    model: Model,
    /// With their regions.
    handles: Vec<(Cached, u64)>,
}

impl Pair {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::Get(range, keep) => {
                let (got, expected) = (self.fixture.try_get(range.clone()), self.model.get(range));
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
                assert_eq!(self.fixture.invalidate(range.clone()), self.model.overlapping(range).len());
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
        assert_eq!(self.fixture.kept(), kept);
        let bytes = kept.iter().map(|(start, end)| (end - start) as u64).sum();
        let expected = CacheStats { entries: kept.len(), bytes, ..self.model.stats };
        assert_eq!(self.fixture.cache.stats(), expected);
        assert!(kept.len() <= ENTRIES && bytes <= BOUND as u64);
        assert!(kept.is_sorted_by(|a, b| a.1 <= b.0), "{kept:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn the_cache_agrees_with_the_model(ops in vec(op(), 1..120)) {
        let fixture = Fixture::new(REGIONS, config(ENTRIES, BOUND as u64));
        let mut pair = Pair { fixture, model: Model::default(), handles: Vec::new() };
        for op in &ops {
            pair.apply(op);
            pair.check();
        }
        pair.handles.clear();
        pair.fixture.cache.clear();
        let all: Vec<_> = (0..REGIONS).map(|_| pair.fixture.register(&pair.fixture.memory).unwrap()).collect();
        prop_assert!(pair.fixture.register(&pair.fixture.memory).is_err(), "{} are all", all.len());
    }
}

/// Each thread writes through its handles, over a connection to itself: dead keys and keys of other memory fail.
#[test]
fn handles_keep_their_registration() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 300;
    const SHARE: usize = 4096;
    let fixture = Fixture::new(24, config(6, 6000));
    let target = fixture.pd.register(&fixture.memory, Access::all()).unwrap();
    let play = |me: usize| {
        let [a, b] = [(); 2].map(|()| fixture.pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let mut random = me as u64 + 1;
        let mut next = |below: usize| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            usize::try_from(random >> 33).unwrap() % below
        };
        for round in 0..ROUNDS {
            // The threads look up the same ranges, and write to different addresses.
            let start = next(8) * 512;
            let len = 16 + next(2000);
            let source = fixture.get(start..start + len);
            assert_eq!(source.memory().len(), len);
            let sge = source.mr(false).sge(0, 16).unwrap();
            let to = target.remote(8192 + me * SHARE).unwrap();
            a.post_send(&[SendWr::write(to, &[sge])]).unwrap().wait(LONG).unwrap();
            while a.poll_send().is_some() {}
            if round % 50 == me {
                fixture.invalidate(0..next(8192).max(1));
            }
        }
    };
    thread::scope(|scope| (0..THREADS).for_each(|me| drop(scope.spawn(move || play(me)))));
    let stats = fixture.cache.stats();
    assert!(stats.entries <= 6 && stats.bytes <= 6000, "{stats:?}");
    assert_eq!(stats.hits + stats.misses + stats.uncached, (THREADS * ROUNDS) as u64, "{stats:?}");
    fixture.cache.clear();
    assert_eq!(fixture.cache.stats().entries, 0);
    let rest: Vec<_> = (0..23).map(|_| fixture.register(&fixture.memory).unwrap()).collect();
    assert!(
        fixture.register(&fixture.memory).is_err(),
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
    // SAFETY: the address is written to a local that outlives the call.
    unsafe { gpu.api().mem_alloc(&mut addr, len) }.unwrap();
    addr
}

fn free(addr: u64) {
    let _current = gpu().enter().unwrap();
    // SAFETY: the memory was allocated by `malloc`, is freed once, and no handle of it is left.
    unsafe { gpu().api().mem_free(addr) }.unwrap();
}

fn get(fixture: &Fixture, addr: u64, len: usize) -> Cached {
    let (range, register) = (addr..addr + len as u64, |memory: &Memory| fixture.register(memory));
    // SAFETY: the tests free the memory after the handle is dropped.
    let cached = unsafe { fixture.cache.get(Some(gpu()), &range, register) }.unwrap();
    assert_eq!((cached.memory().addr(), cached.memory().len()), (addr, len));
    cached
}

fn fixture(config: CacheConfig) -> Fixture {
    Fixture::new(64, config)
}

/// Allocates until a freed address is used again. Another thread may have taken it.
fn is_allocated_again(addr: u64) -> bool {
    let mut others = Vec::new();
    while others.len() < 100 && !others.contains(&addr) {
        others.push(malloc(LEN));
    }
    let is_there = others.contains(&addr);
    others.into_iter().filter(|&other| other != addr).for_each(free);
    is_there
}

/// Calls `before` with memory that is freed then, and `after` with other memory at the same address, several times.
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
fn freed_memory_is_never_served() {
    let _driver = Control::take();
    let fixture = fixture(config(64, 1 << 30));
    let before = |addr| {
        let key = get(&fixture, addr, LEN).mr(false).lkey();
        assert_eq!(get(&fixture, addr + 64, 64).mr(false).lkey(), key, "the same memory is a hit");
    };
    let after = |addr| {
        let before = fixture.cache.stats();
        get(&fixture, addr + 64, 64);
        let now = fixture.cache.stats();
        assert_eq!((now.hits, now.misses), (before.hits, before.misses + 1), "other memory is none");
        assert!(now.stale > before.stale, "{now:?}");
    };
    with_memory_of_before(20, before, after);
}

/// CUDA reads from the current memory what the CPU writes through the registration.
#[test]
fn registrations_are_of_the_current_memory() {
    let _driver = Control::take();
    let fixture = fixture(config(64, 1 << 30));
    let check = |addr: u64, byte: u8| {
        let cached = get(&fixture, addr + 4096, 4096);
        if !cached.memory().is_mapped() {
            println!("skipped: the CPU does not reach GPU memory here");
            return;
        }
        cached.memory().write(0, &[byte; 64]).unwrap();
        cached.memory().flush().unwrap();
        drop(cached);
        let mut seen = [0u8; 64];
        let _current = gpu().enter().unwrap();
        // SAFETY: the buffer has 64 bytes, and the memory is allocated.
        unsafe { gpu().api().memcpy_to_host_async(seen.as_mut_ptr().cast(), addr + 4096, 64, 0) }.unwrap();
        // SAFETY: the null stream always exists.
        unsafe { gpu().api().stream_synchronize(0) }.unwrap();
        assert_eq!(seen, [byte; 64]);
    };
    with_memory_of_before(5, |addr| check(addr, 1), |addr| check(addr, 2));
}

#[test]
fn cuda_is_not_queried_with_another_proof() {
    if !is_simulated() {
        println!("skipped: only the simulated driver counts its calls");
        return;
    }
    let driver = Control::take();
    let asked = || driver.calls("cuPointerGetAttribute");
    let addr = malloc(LEN);
    let fixture = fixture(config(64, 1 << 30));
    let held = get(&fixture, addr, LEN);
    let before = asked();
    drop(get(&fixture, addr, LEN));
    assert_eq!(asked(), before, "a handle proves it");
    drop(held);
    drop(get(&fixture, addr, LEN));
    assert_eq!(asked(), before + 1, "nothing else does");
    let message = Registration::clone(&get(&fixture, addr, LEN));
    let before = asked();
    drop(get(&fixture, addr, LEN));
    assert_eq!(asked(), before + 1, "a message under way may be complete, and its memory freed");
    drop(message);

    let announced = self::fixture(CacheConfig { announced: true, ..config(64, 1 << 30) });
    drop(get(&announced, addr, LEN));
    let before = asked();
    drop(get(&announced, addr, LEN));
    assert_eq!(asked(), before, "the application says when it frees");
    assert_eq!(announced.cache.invalidate(addr, 1), 1);
    free(addr);
}

#[test]
fn queries_find_freed_memory() {
    let _driver = Control::take();
    let fixture = fixture(config(64, 1 << 30));
    let addrs: Vec<_> = (0..20).map(|_| malloc(LEN)).collect();
    addrs.iter().for_each(|&addr| drop(get(&fixture, addr, LEN)));
    addrs.iter().for_each(|&addr| free(addr));
    let host = |n: usize| drop(fixture.get(n * 10..n * 10 + 5));
    (0..3).for_each(host);
    let stats = fixture.cache.stats();
    assert_eq!((stats.stale, stats.entries), (8 + 8 + 4, 3), "eight at every miss");
}

#[test]
fn the_window_of_a_gpu_is_bounded() {
    let _driver = Control::take();
    let fixture = fixture(CacheConfig { window: Some(4 << 16), ..config(64, 1 << 30) });
    let allocation = malloc(LEN);
    let addr = allocation.next_multiple_of(1 << 16);
    fixture.get(0..10);
    // One page of 64 KiB each, except for the last, which is on two.
    for start in [0, 1 << 16, 2 << 16, (4 << 16) - 1] {
        drop(get(&fixture, addr + start, 2));
    }
    let kept: Vec<_> = fixture.cache.ranges().iter().map(|range| range.start.wrapping_sub(addr)).collect();
    let expected = [1 << 16, 2 << 16, (4 << 16) - 1];
    assert_eq!(kept.iter().filter(|start| **start < 5 << 16).copied().collect::<Vec<_>>(), expected);
    let stats = fixture.cache.stats();
    assert_eq!((stats.evictions, stats.entries), (1, 4), "host memory stays: it is not in the window");
    drop(get(&fixture, addr, (4 << 16) + 1));
    assert_eq!((fixture.cache.stats().uncached, fixture.cache.stats().entries), (1, 4));
    fixture.cache.clear();
    free(allocation);
}

#[test]
fn addresses_unknown_to_cuda_are_refused() {
    let _driver = Control::take();
    let fixture = fixture(config(64, 1 << 30));
    let addr = malloc(LEN);
    let refused = |addr: u64, len: usize| {
        let register = |memory: &gdsync::memory::Memory| fixture.register(memory);
        // SAFETY: no message uses the memory.
        let cached = unsafe { fixture.cache.get(Some(gpu()), &(addr..addr + len as u64), register) };
        cached.unwrap_err().to_string()
    };
    assert!(refused(addr, LEN + 1).contains("inside one allocation"));
    free(addr);
    assert!(refused(addr, 64).contains("live memory"));
    assert_eq!(fixture.cache.stats(), CacheStats::default());
}
