//! Protection domains and regions by number.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::region::Way;
use super::{Domain, Open, Region};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{Access, MrKeys, TransferPath};

/// Domains and regions of an open device. They are freed without locks held, because that may block in the kernel.
#[derive(Debug)]
pub(crate) struct Objects {
    open: Arc<Open>,
    domains: Mutex<HashMap<u32, Arc<Domain>>>,
    next_domain: AtomicU32,
    regions: Mutex<HashMap<u32, Region>>,
}

impl Objects {
    pub(crate) fn new(open: &Arc<Open>) -> Self {
        let (domains, regions) = Default::default();
        Self { open: open.clone(), domains, next_domain: AtomicU32::new(1), regions }
    }

    pub(crate) fn alloc_pd(&self) -> Result<u32> {
        let domain = Arc::new(self.open.alloc_pd()?);
        let pdn = self.next_domain.fetch_add(1, Ordering::Relaxed);
        self.domains.lock().insert(pdn, domain);
        Ok(pdn)
    }

    pub(crate) fn dealloc_pd(&self, pdn: u32) {
        let domain = self.domains.lock().remove(&pdn);
        drop(domain);
    }

    pub(crate) fn domain(&self, pdn: u32) -> Result<Arc<Domain>> {
        let found = self.domains.lock().get(&pdn).cloned();
        found.ok_or_else(|| Error::invalid("protection domain", pdn, "one of this device"))
    }

    pub(crate) fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys> {
        let region = Region::register(&self.domain(pdn)?, memory, access)?;
        let keys = MrKeys { lkey: region.lkey(), rkey: region.rkey(), is_staged: false };
        tracing::debug!(?region, "registered");
        self.regions.lock().insert(keys.lkey, region);
        Ok(keys)
    }

    /// How the device accesses the region of this key.
    pub(crate) fn transfer_path(&self, lkey: u32) -> TransferPath {
        let way = self.regions.lock().get(&lkey).map_or(Way::Host, Region::way);
        way.transfer_path()
    }

    pub(crate) fn dereg_mr(&self, keys: MrKeys) {
        let region = self.regions.lock().remove(&keys.lkey);
        drop(region);
    }
}
