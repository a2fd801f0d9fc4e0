//! The devices that may write a word: those with a writable region over it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use std::{fmt, iter};

use gdsync_device::fork_guard::PerProcess;
use gdsync_device::memory::Memory;
use gdsync_device::{Access, Provider};
use parking_lot::RwLock;
use smallvec::SmallVec;

/// The writable regions of the process.
static REGIONS: PerProcess<RwLock<Regions>> = PerProcess::new();

/// Identifies a region: the logarithm of its length, its first address, and a number.
type Key = (u32, u64, u64);

#[derive(Default)]
struct Regions {
    /// End and device of each region. A search looks back as far as the longest region of a class, which is at most twice as long
    /// as the others: it passes few regions that do not contain the address.
    by_class: BTreeMap<Key, (u64, Weak<dyn Provider>)>,
}

impl Regions {
    fn add(&mut self, (start, len): (u64, u64), device: Weak<dyn Provider>) -> Key {
        // Not that of a region of the parent process either, which a forked child may drop.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let key = (len.max(1).ilog2(), start, NEXT.fetch_add(1, Ordering::Relaxed));
        self.by_class.insert(key, (start.saturating_add(len), device));
        key
    }

    fn remove(&mut self, key: Key) {
        self.by_class.remove(&key);
    }

    /// End and device of the regions that may contain `addr`.
    fn near(&self, addr: u64) -> impl Iterator<Item = &(u64, Weak<dyn Provider>)> {
        let class_from = |class| self.by_class.range((class, 0, 0)..).next().map(|(&(class, ..), _)| class);
        let classes = iter::successors(class_from(0), move |class| class_from(class + 1));
        classes.flat_map(move |class| {
            let longest = u64::MAX >> (63 - class);
            let starts = (class, addr.saturating_sub(longest), 0)..=(class, addr, u64::MAX);
            self.by_class.range(starts).map(|(_, region)| region)
        })
    }

    /// The devices of the regions that contain `addr`, each once.
    fn at(&self, addr: u64) -> SmallVec<[Weak<dyn Provider>; 1]> {
        let mut found = SmallVec::new();
        for (end, device) in self.near(addr) {
            if *end > addr && !found.iter().any(|known: &Weak<_>| known.ptr_eq(device)) {
                found.push(device.clone());
            }
        }
        found
    }
}

/// A region in the list, until it is dropped.
#[derive(Debug)]
pub(super) struct Listed(Option<Key>);

impl Listed {
    /// Lists a region if its device may write it.
    pub(super) fn new(memory: &Memory, access: Access, device: &Arc<dyn Provider>) -> Self {
        let is_written = access.contains(Access::LOCAL_WRITE);
        let place = (memory.addr(), memory.len() as u64);
        Self(is_written.then(|| REGIONS.get().write().add(place, Arc::downgrade(device))))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if let Some(key) = self.0.take() {
            REGIONS.get().write().remove(key);
        }
    }
}

/// The devices that may write a word. It keeps none of them open.
pub(crate) struct Writers {
    addr: u64,
    devices: SmallVec<[Weak<dyn Provider>; 1]>,
}

impl fmt::Debug for Writers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} devices that write {:#x}", self.devices.len(), self.addr)
    }
}

impl Writers {
    /// Those of the word at `addr`, an address of work requests.
    pub(crate) fn of(addr: u64) -> Self {
        Self { addr, devices: REGIONS.get().read().at(addr) }
    }

    /// Takes account of regions that were registered since.
    pub(crate) fn refresh(&mut self) {
        *self = Self::of(self.addr);
    }

    /// Runs work of the devices on the calling thread. Returns whether there was any.
    pub(crate) fn progress(&self) -> bool {
        self.open().fold(false, |any, device| device.progress() | any)
    }

    /// Sleeps unless `ready`, until something arrives for the device, or for `timeout`. Returns `false` at once if it cannot: with
    /// several devices, or one that wakes nobody. These are then not run for a while.
    pub(crate) fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        let devices: SmallVec<[_; 1]> = self.open().collect();
        if let [device] = &*devices
            && device.sleep(ready, timeout)
        {
            return true;
        }
        devices.iter().for_each(|device| device.end_polling());
        false
    }

    fn open(&self) -> impl Iterator<Item = Arc<dyn Provider>> {
        self.devices.iter().filter_map(Weak::upgrade)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdsync_soft::{SoftHca, SoftHcaConfig};
    use gdsync_testkit::process::{End, in_child};

    #[test]
    fn a_word_has_the_devices_of_the_regions_that_contain_it() {
        let [one, two] = [(); 2]
            .map(|()| -> Arc<dyn Provider> { Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap()) });
        let mut regions = Regions::default();
        let long = regions.add((1000, 1000), Arc::downgrade(&one));
        let within = regions.add((1500, 8), Arc::downgrade(&two));
        let again = regions.add((1500, 8), Arc::downgrade(&one));
        let devices = |regions: &Regions, addr| {
            let found: Vec<_> = regions.at(addr).iter().map(|device| device.upgrade().unwrap()).collect();
            [&one, &two].map(|device| found.iter().filter(|found| Arc::ptr_eq(found, device)).count())
        };
        for (addr, expected) in [
            (999, [0, 0]),
            (1000, [1, 0]),
            (1499, [1, 0]),
            (1500, [1, 1]),
            (1507, [1, 1]),
            (1508, [1, 0]),
            (1999, [1, 0]),
            (2000, [0, 0]),
        ] {
            assert_eq!(devices(&regions, addr), expected, "{addr}");
        }
        regions.remove(long);
        assert_eq!([1000, 1500].map(|addr| devices(&regions, addr)), [[0, 0], [1, 1]]);
        regions.remove(again);
        assert_eq!(devices(&regions, 1500), [0, 1]);
        regions.remove(within);
        assert_eq!((devices(&regions, 1500), regions.by_class.len()), ([0, 0], 0));
    }

    #[test]
    fn a_search_passes_few_regions_beside_a_long_one() {
        let device: Arc<dyn Provider> = Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap());
        let mut regions = Regions::default();
        regions.add((0, 1 << 40), Arc::downgrade(&device));
        regions.add((0, u64::MAX), Arc::downgrade(&device));
        regions.add((u64::MAX, 0), Arc::downgrade(&device));
        (0..10_000).for_each(|n| _ = regions.add((4096 * n, 100 + n % 4000), Arc::downgrade(&device)));
        for addr in (0..10_000).map(|n| 4096 * n + n % 5000) {
            let near = regions.near(addr).count();
            assert!(near <= 10, "{near} regions may contain {addr}");
            assert_eq!(regions.at(addr).len(), 1);
        }
        assert_eq!(regions.at(u64::MAX - 1).len(), 1);
    }
    /// A thread of the parent may hold the lock at the fork, and is not there to release it.
    #[test]
    fn a_child_drops_and_lists_regions_whatever_its_parent_has_locked() {
        let device: Arc<dyn Provider> = Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap());
        let memory = Memory::alloc(8).unwrap();
        let list = || Listed::new(&memory, Access::all(), &device);
        let mut parents = Some(list());
        let held = REGIONS.get().read();
        let end = in_child(|| {
            drop(parents.take());
            let own = list();
            let found = Writers::of(memory.addr()).devices.len();
            drop(own);
            found == 1 && Writers::of(memory.addr()).devices.is_empty()
        });
        drop(held);
        assert_eq!(end, End::Said(true));
        assert_eq!(Writers::of(memory.addr()).devices.len(), 1);
    }
}
