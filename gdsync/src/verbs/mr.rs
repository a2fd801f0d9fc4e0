//! Memory regions: memory with keys.

use std::sync::Arc;

use super::attr::Access;
use super::device::Pd;
use super::provider::MrKeys;
use super::wr::Sge;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::mlx5::RemoteAddr;

/// A registered memory region. Clones share it; the keys die with the last clone.
///
/// A work request that still names a dead key fails with a protection error; it cannot touch freed memory.
#[derive(Clone, Debug)]
pub struct Mr(Arc<MrInner>);

#[derive(Debug)]
struct MrInner {
    pd: Pd,
    memory: Memory,
    keys: MrKeys,
}

impl Drop for MrInner {
    fn drop(&mut self) {
        self.pd.provider().dereg_mr(self.keys);
    }
}

impl Mr {
    pub(crate) fn register(pd: Pd, memory: &Memory, access: Access) -> Result<Self> {
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(Error::invalid(
                "access",
                format!("{access:?}"),
                "LOCAL_WRITE with REMOTE_WRITE or REMOTE_ATOMIC",
            ));
        }
        let keys = pd.provider().reg_mr(pd.pdn(), memory, access)?;
        Ok(Self(Arc::new(MrInner { pd, memory: memory.clone(), keys })))
    }

    /// The registered memory.
    pub fn memory(&self) -> &Memory {
        &self.0.memory
    }

    /// The key for local use.
    pub fn lkey(&self) -> u32 {
        self.0.keys.lkey
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        self.0.keys.rkey
    }

    /// A scatter/gather element over `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], or [`Error::InvalidArgument`] for 4 GiB and more.
    pub fn sge(&self, offset: usize, len: usize) -> Result<Sge> {
        let addr = self.at(offset, len)?;
        let len = u32::try_from(len).map_err(|_| Error::invalid("SGE length", len, "less than 4 GiB"))?;
        Ok(Sge { addr, len, lkey: self.lkey() })
    }

    /// How a peer names the byte at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn remote(&self, offset: usize) -> Result<RemoteAddr> {
        Ok(RemoteAddr { addr: self.at(offset, 0)?, rkey: self.rkey() })
    }

    fn at(&self, offset: usize, len: usize) -> Result<u64> {
        let size = self.0.memory.len();
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(self.0.memory.addr() + offset as u64),
            _ => Err(Error::OutOfBounds { offset, len, size }),
        }
    }
}
