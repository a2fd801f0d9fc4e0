//! The devices that may write a word: those with a writable region over it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdsync_device::memory::Memory;
use gdsync_device::{Access, Provider};
use parking_lot::RwLock;
use smallvec::SmallVec;

/// The writable regions of the process.
static REGIONS: RwLock<Regions> = RwLock::new(Regions { by_start: BTreeMap::new(), longest: 0, next: 0 });

#[derive(Default)]
struct Regions {
    /// End and device of each region, by its first address and its number.
    by_start: BTreeMap<(u64, u64), (u64, Weak<dyn Provider>)>,
    /// No region is longer.
    longest: u64,
    /// The number of the next region.
    next: u64,
}

impl Regions {
    fn add(&mut self, (start, len): (u64, u64), device: Weak<dyn Provider>) -> (u64, u64) {
        let key = (start, self.next);
        self.next += 1;
        self.longest = self.longest.max(len);
        self.by_start.insert(key, (start.saturating_add(len), device));
        key
    }

    fn remove(&mut self, key: (u64, u64)) {
        self.by_start.remove(&key);
        if self.by_start.is_empty() {
            self.longest = 0;
        }
    }

    /// The devices of the regions that contain `addr`, each once.
    fn at(&self, addr: u64) -> SmallVec<[Weak<dyn Provider>; 1]> {
        let mut found = SmallVec::new();
        let starts = (addr.saturating_sub(self.longest), 0)..=(addr, u64::MAX);
        for (end, device) in self.by_start.range(starts).map(|(_, region)| region) {
            if *end > addr && !found.iter().any(|known: &Weak<_>| known.ptr_eq(device)) {
                found.push(device.clone());
            }
        }
        found
    }
}

/// A region in the list, until it is dropped.
#[derive(Debug)]
pub(super) struct Listed(Option<(u64, u64)>);

impl Listed {
    /// Lists a region if its device may write it.
    pub(super) fn new(memory: &Memory, access: Access, device: &Arc<dyn Provider>) -> Self {
        let is_written = access.contains(Access::LOCAL_WRITE);
        let place = (memory.addr(), memory.len() as u64);
        Self(is_written.then(|| REGIONS.write().add(place, Arc::downgrade(device))))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if let Some(key) = self.0.take() {
            REGIONS.write().remove(key);
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
        Self { addr, devices: REGIONS.read().at(addr) }
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
        assert_eq!((devices(&regions, 1500), regions.longest), ([0, 0], 0));
    }
}
