//! The cache on a software HCA that takes few regions, and on GPU memory, simulated where there is none.

mod bounds;
mod gpu;
mod model;
mod threads;

use std::ops::Range;
use std::time::Duration;

use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Pd};

use super::{Cache, CacheConfig, Cached, Keep};
use crate::communicator::Registration;

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
        self.pd.register(memory, Access::LOCAL_WRITE).map(|mr| Registration(mr, None))
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
