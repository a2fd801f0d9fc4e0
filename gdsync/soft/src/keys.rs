//! Memory keys: local and remote access checks, and flushes of written GPU memory.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::packet::Export;
use gdsync_device::memory::Memory;
use gdsync_device::{Access, Shuffle};
use mlx5_ring::Syndrome;

/// The memory regions of one HCA. A key is `index << 8 | variant`, shuffled. The variant changes with every
/// registration, so a stale key does not match its successor; the shuffle makes keys hard to guess.
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
    /// Address of the first byte in work requests.
    iova: u64,
    access: Access,
    /// Exported memory handle for peers, if it can be exported.
    export: Option<Arc<Export>>,
}

/// Reserved keys: "no region", the terminator of a receive's scatter list, and all ones.
const RESERVED: [u32; 3] = [0, 0x100, u32::MAX];

impl Keys {
    pub(crate) fn new() -> gdsync_device::error::Result<Self> {
        Ok(Self { shuffle: Shuffle::random()?, slots: Vec::new(), free: Vec::new() })
    }

    pub(crate) fn register(
        &mut self,
        pdn: u32,
        memory: &Memory,
        iova: u64,
        access: Access,
        export: Option<Arc<Export>>,
    ) -> u32 {
        let region = Some(Region { pdn, memory: memory.clone(), iova, access, export });
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

    /// Number of registered regions.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Replaces the region of a key. The caller drops the returned one outside of locks.
    pub(crate) fn replace(
        &mut self,
        key: u32,
        pdn: u32,
        memory: &Memory,
        iova: u64,
        access: Access,
        export: Option<Arc<Export>>,
    ) -> Option<impl Sized + use<>> {
        let (index, variant) = self.split(key);
        let region = self.slots.get_mut(index).filter(|slot| slot.variant == variant)?.region.as_mut()?;
        Some(std::mem::replace(region, Region { pdn, memory: memory.clone(), iova, access, export }))
    }

    /// Removes a key. The caller drops the returned region outside of locks.
    pub(crate) fn deregister(&mut self, key: u32) -> Option<impl Sized + use<>> {
        let (index, variant) = self.split(key);
        let slot = self.slots.get_mut(index)?;
        let region = if slot.variant == variant { slot.region.take() } else { None };
        region.inspect(|_| self.free.push(index))
    }

    /// Index and variant of a key.
    fn split(&self, key: u32) -> (usize, u8) {
        let [variant, index @ ..] = self.shuffle.find(key).to_le_bytes();
        let [a, b, c] = index;
        (u32::from_le_bytes([a, b, c, 0]) as usize, variant)
    }

    /// Memory of the key's region.
    pub(super) fn memory(&self, key: u32) -> Option<&Memory> {
        self.region(key).map(|region| &region.memory)
    }

    /// Export of the key's region.
    pub(super) fn export(&self, key: u32) -> Option<&Export> {
        self.region(key)?.export.as_deref()
    }

    fn region(&self, key: u32) -> Option<&Region> {
        let (index, variant) = self.split(key);
        let slot = self.slots.get(index)?;
        slot.region.as_ref().filter(|_| slot.variant == variant)
    }

    /// Memory and offset of `len` bytes at `addr`, if the key allows `access`.
    fn find(&self, key: u32, pdn: u32, addr: u64, len: usize, access: Access) -> Option<(&Memory, usize)> {
        let region = self.region(key)?;
        if region.pdn != pdn || !region.access.contains(access) {
            return None;
        }
        let offset = usize::try_from(addr.checked_sub(region.iova)?).ok()?;
        (offset.checked_add(len)? <= region.memory.len()).then_some((&region.memory, offset))
    }

    /// Checks a local SGE; `write` if the HCA writes to it.
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

    /// Checks the remote address of a peer's request.
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

/// Keys of regions written since the last completion that need a flush.
#[derive(Debug, Default)]
pub(crate) struct PendingFlush(SmallVec<[u32; 4]>);

impl PendingFlush {
    /// Records a CPU write to a region.
    #[inline]
    pub(super) fn written(&mut self, key: u32, memory: &Memory) {
        if memory.needs_flush() && !self.0.contains(&key) {
            self.0.push(key);
        }
    }

    /// Flushes all recorded regions.
    pub(super) fn flush(&mut self, keys: &Keys) -> gdsync_device::error::Result<()> {
        let memories = self.0.drain(..).filter_map(|key| keys.memory(key));
        memories.map(Memory::flush).fold(Ok(()), Result::and)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_grants_only_its_range_pd_and_access() {
        let mut keys = Keys::new().unwrap();
        let memory = Memory::alloc(100).unwrap();
        let key = keys.register(7, &memory, memory.addr(), Access::LOCAL_WRITE | Access::REMOTE_READ, None);
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
    fn replaced_region_is_all_that_its_key_grants() {
        let mut keys = Keys::new().unwrap();
        let [old, new] = [(); 2].map(|()| Memory::alloc(8).unwrap());
        let key = keys.register(1, &old, old.addr(), Access::LOCAL_WRITE, None);
        assert!(keys.replace(key, 2, &new, new.addr(), Access::empty(), None).is_some());
        assert!(keys.local(key, 2, new.addr(), 8, false).is_ok());
        assert!(keys.local(key, 2, new.addr(), 8, true).is_err(), "the old rights");
        assert!(keys.local(key, 1, new.addr(), 8, false).is_err(), "the old protection domain");
        assert!(keys.local(key, 2, old.addr(), 8, false).is_err(), "the old memory");
        keys.deregister(key);
        assert!(keys.replace(key, 1, &old, old.addr(), Access::empty(), None).is_none());
    }

    #[test]
    fn stale_key_fails_after_its_slot_is_reused() {
        let mut keys = Keys::new().unwrap();
        let memory = Memory::alloc(8).unwrap();
        let old = keys.register(1, &memory, memory.addr(), Access::empty(), None);
        assert_eq!(keys.len(), 1);
        assert!(keys.deregister(old).is_some());
        assert!(keys.deregister(old).is_none());
        assert_eq!(keys.len(), 0);
        let new = keys.register(1, &memory, memory.addr(), Access::empty(), None);
        assert_eq!(keys.split(old).0, keys.split(new).0);
        assert!(keys.local(old, 1, memory.addr(), 8, false).is_err());
        assert!(keys.local(new, 1, memory.addr(), 8, false).is_ok());
        assert!(keys.deregister(old).is_none() && keys.local(new, 1, memory.addr(), 8, false).is_ok());
    }
}
