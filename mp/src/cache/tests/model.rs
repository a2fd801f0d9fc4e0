//! The cache against a list of what it should have, through random calls, on a device that runs out.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::{CacheStats, Cached};
use super::{Bed, config};

const ENTRIES: usize = 4;
const BYTES: usize = 40;
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
        count <= ENTRIES && bytes <= BYTES
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
        assert!(kept.len() <= ENTRIES && bytes <= BYTES as u64);
        assert!(kept.is_sorted_by(|a, b| a.1 <= b.0), "{kept:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn the_cache_does_what_the_model_says(ops in vec(op(), 1..120)) {
        let bed = Bed::new(REGIONS, config(ENTRIES, BYTES as u64));
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
