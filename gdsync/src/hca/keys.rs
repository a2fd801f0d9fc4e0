//! Memory keys: what a work request or a peer may touch.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::gid::random;
use super::reference::Export;
use crate::error::Result;
use crate::memory::Memory;
use crate::mlx5::Syndrome;
use crate::verbs::Access;

/// The memory regions of one HCA, by their keys: random numbers, which a peer that was not told one cannot guess.
#[derive(Debug, Default)]
pub(crate) struct Keys(HashMap<u32, Region, BuildHasherDefault<Spread>>);

#[derive(Debug)]
struct Region {
    pdn: u32,
    memory: Memory,
    access: Access,
    /// How peers are referred to it, if they may be.
    export: Option<Arc<Export>>,
}

/// Hashes keys, which are random already, in a nanosecond.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are hashed by write_u32");
    }

    fn write_u32(&mut self, key: u32) {
        // The map takes its groups from the low bits and tells their members apart by the high ones.
        self.0 = u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Keys {
    pub(crate) fn register(
        &mut self,
        pdn: u32,
        memory: &Memory,
        access: Access,
        export: Option<Arc<Export>>,
    ) -> Result<u32> {
        loop {
            let key = u32::from_ne_bytes(random()?);
            // Small numbers would hide mistakes, and one of them ends lists of scatter elements.
            if key > u32::from(u16::MAX)
                && let Entry::Vacant(place) = self.0.entry(key)
            {
                place.insert(Region { pdn, memory: memory.clone(), access, export });
                return Ok(key);
            }
        }
    }

    /// The number of live regions.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Drops a key. What it held is returned, to be let go outside of locks.
    pub(crate) fn deregister(&mut self, key: u32) -> Option<impl Sized + use<>> {
        self.0.remove(&key)
    }

    /// The memory of this key's region.
    pub(super) fn memory(&self, key: u32) -> Option<&Memory> {
        self.region(key).map(|region| &region.memory)
    }

    /// How peers are referred to the region of this key.
    pub(super) fn export(&self, key: u32) -> Option<&Export> {
        self.region(key)?.export.as_deref()
    }

    fn region(&self, key: u32) -> Option<&Region> {
        self.0.get(&key)
    }

    /// The memory and offset of `len` bytes at `addr`, if `key` opens them for `access`.
    fn find(&self, key: u32, pdn: u32, addr: u64, len: usize, access: Access) -> Option<(&Memory, usize)> {
        let region = self.region(key)?;
        if region.pdn != pdn || !region.access.contains(access) {
            return None;
        }
        let offset = usize::try_from(addr.checked_sub(region.memory.addr())?).ok()?;
        (offset.checked_add(len)? <= region.memory.len()).then_some((&region.memory, offset))
    }

    /// For a local SGE; `write` when the HCA will write there.
    pub(crate) fn local(
        &self,
        key: u32,
        pdn: u32,
        addr: u64,
        len: usize,
        write: bool,
    ) -> std::result::Result<(&Memory, usize), Syndrome> {
        let access = if write { Access::LOCAL_WRITE } else { Access::empty() };
        self.find(key, pdn, addr, len, access).ok_or(Syndrome::LOC_PROT_ERR)
    }

    /// For a request of a peer.
    pub(crate) fn remote(
        &self,
        key: u32,
        pdn: u32,
        addr: u64,
        len: usize,
        access: Access,
    ) -> std::result::Result<(&Memory, usize), Syndrome> {
        self.find(key, pdn, addr, len, access).ok_or(Syndrome::REM_ACCESS_ERR)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::mlx5::INVALID_LKEY;

    #[test]
    fn a_key_opens_its_range_domain_and_rights_and_nothing_else() {
        let mut keys = Keys::default();
        let memory = Memory::alloc(100).unwrap();
        let key = keys.register(7, &memory, Access::LOCAL_WRITE | Access::REMOTE_READ, None).unwrap();
        let base = memory.addr();
        assert_eq!(keys.local(key, 7, base + 60, 40, true).unwrap().1, 60);
        assert_eq!(keys.local(key, 7, base + 61, 40, true).unwrap_err(), Syndrome::LOC_PROT_ERR);
        assert!(keys.local(key, 7, base - 1, 1, false).is_err());
        assert!(keys.local(key, 7, u64::MAX, usize::MAX, false).is_err());
        assert!(keys.local(key, 8, base, 1, false).is_err(), "another protection domain");
        assert!(keys.remote(key, 7, base, 1, Access::REMOTE_READ).is_ok());
        assert_eq!(keys.remote(key, 7, base, 1, Access::REMOTE_WRITE).unwrap_err(), Syndrome::REM_ACCESS_ERR);
        for bit in 0..32 {
            assert!(keys.local(key ^ 1 << bit, 7, base, 1, false).is_err(), "bit {bit} of the key matters");
        }
    }

    #[test]
    fn keys_are_random_and_a_dead_one_stays_dead() {
        let mut keys = Keys::default();
        let memory = Memory::alloc(8).unwrap();
        let old = keys.register(1, &memory, Access::empty(), None).unwrap();
        assert_eq!(keys.len(), 1);
        assert!(keys.deregister(old).is_some());
        assert!(keys.deregister(old).is_none());
        assert_eq!(keys.len(), 0);
        let many: Vec<_> =
            (0..1000).map(|_| keys.register(1, &memory, Access::empty(), None).unwrap()).collect();
        assert!(keys.local(old, 1, memory.addr(), 8, false).is_err());
        assert!(many.iter().all(|&key| keys.local(key, 1, memory.addr(), 8, false).is_ok()));
        assert_eq!((keys.len(), many.contains(&INVALID_LKEY)), (1000, false));
        // Of numbers that follow from one another, most differences are the same.
        let differences: HashSet<_> = many.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        assert!(differences.len() > 990, "{}", differences.len());
    }
}
