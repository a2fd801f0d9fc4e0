//! Memory keys: what a work request or a peer may touch.

use std::sync::Arc;

use super::reference::Export;
use gdsync_device::memory::Memory;
use gdsync_device::{Access, Shuffle};
use mlx5_ring::Syndrome;

/// The memory regions of one HCA. A key is `index << 8 | variant`, shuffled: the variant changes at every registration, so that
/// a stale key does not open its successor, and who was not told a key cannot guess it.
#[derive(Debug)]
pub(crate) struct Keys {
    shuffle: Shuffle<32>,
    slots: Vec<Slot>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct Slot {
    variant: u8,
    region: Option<Region>,
}

#[derive(Debug)]
struct Region {
    pdn: u32,
    memory: Memory,
    access: Access,
    /// How peers are referred to it, if they may be.
    export: Option<Arc<Export>>,
}

/// Keys with a meaning of their own: that of no region, the terminator of a receive's scatter list, and the reserved one.
const RESERVED: [u32; 3] = [0, 0x100, u32::MAX];

impl Keys {
    pub(crate) fn new() -> gdsync_device::error::Result<Self> {
        Ok(Self { shuffle: Shuffle::random()?, slots: Vec::new(), free: Vec::new() })
    }

    pub(crate) fn register(
        &mut self,
        pdn: u32,
        memory: &Memory,
        access: Access,
        export: Option<Arc<Export>>,
    ) -> u32 {
        let region = Some(Region { pdn, memory: memory.clone(), access, export });
        let index = self.free.pop().unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(Slot { variant: 0, region: None });
        }
        let slot = &mut self.slots[index];
        slot.region = region;
        let number = u32::try_from(index).expect("fewer than 2^24 regions") << 8;
        loop {
            slot.variant = slot.variant.wrapping_add(1);
            let key = self.shuffle.hide(number | u32::from(slot.variant));
            if !RESERVED.contains(&key) {
                return key;
            }
        }
    }

    /// The number of live regions.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Drops a key. What it held is returned, to be let go outside of locks.
    pub(crate) fn deregister(&mut self, key: u32) -> Option<impl Sized + use<>> {
        let (index, variant) = self.split(key);
        let slot = self.slots.get_mut(index)?;
        let region = if slot.variant == variant { slot.region.take() } else { None };
        region.inspect(|_| self.free.push(index))
    }

    /// The index and the variant of a key.
    fn split(&self, key: u32) -> (usize, u8) {
        let [variant, index @ ..] = self.shuffle.find(key).to_le_bytes();
        let [a, b, c] = index;
        (u32::from_le_bytes([a, b, c, 0]) as usize, variant)
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
        let (index, variant) = self.split(key);
        let slot = self.slots.get(index)?;
        slot.region.as_ref().filter(|_| slot.variant == variant)
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
    ) -> Result<(&Memory, usize), Syndrome> {
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
    ) -> Result<(&Memory, usize), Syndrome> {
        self.find(key, pdn, addr, len, access).ok_or(Syndrome::REM_ACCESS_ERR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_opens_its_range_domain_and_rights_and_nothing_else() {
        let mut keys = Keys::new().unwrap();
        let memory = Memory::alloc(100).unwrap();
        let key = keys.register(7, &memory, Access::LOCAL_WRITE | Access::REMOTE_READ, None);
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
    fn a_dead_key_stays_dead_when_its_slot_is_used_again() {
        let mut keys = Keys::new().unwrap();
        let memory = Memory::alloc(8).unwrap();
        let old = keys.register(1, &memory, Access::empty(), None);
        assert_eq!(keys.len(), 1);
        assert!(keys.deregister(old).is_some());
        assert!(keys.deregister(old).is_none());
        assert_eq!(keys.len(), 0);
        let new = keys.register(1, &memory, Access::empty(), None);
        assert_eq!(keys.split(old).0, keys.split(new).0);
        assert!(keys.local(old, 1, memory.addr(), 8, false).is_err());
        assert!(keys.local(new, 1, memory.addr(), 8, false).is_ok());
        assert!(keys.deregister(old).is_none() && keys.local(new, 1, memory.addr(), 8, false).is_ok());
    }
}
