//! Memory regions: memory with keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::context::Pd;
use super::wr::Sge;
use super::writers::Listed;
use gdsync_device::cuda::{Flush, Gpu};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::{Access, MrKeys, Provider};
use mlx5_ring::RemoteAddr;

/// A registered memory region. Clones share it; dropping the last one invalidates the keys.
///
/// A work request with an invalid key fails with a protection error. It cannot touch freed memory.
#[derive(Clone, Debug)]
pub struct Mr {
    region: Arc<Region>,
    /// The slice of the region's memory, if not all of it.
    part: Option<Memory>,
}

/// Keeps a region registered. Smaller than an [`Mr`].
#[derive(Clone, Debug)]
pub struct MrGuard {
    region: Arc<Region>,
}

#[derive(Debug)]
struct Region {
    pd: Pd,
    memory: Memory,
    access: Access,
    keys: MrKeys,
    _listed: Listed,
}

impl MrGuard {
    /// Whether it keeps the region of `mr` registered.
    #[inline]
    pub fn keeps(&self, mr: &Mr) -> bool {
        Arc::ptr_eq(&self.region, &mr.region)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.pd.is_here() {
            self.pd.old_keys().add(self.keys.lkey);
            self.pd.provider().dereg_mr(self.keys);
            self.pd.writable_gpus().remove(&self.memory, self.access);
        }
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
        pd.check_here()?;
        let keys = pd.provider().reg_mr(pd.pdn(), memory, access)?;
        pd.old_keys().remove(keys.lkey);
        pd.writable_gpus().add(memory, access);
        let _listed = Listed::new(memory, access, pd.provider());
        Ok(Self {
            region: Arc::new(Region { pd, memory: memory.clone(), access, keys, _listed }),
            part: None,
        })
    }

    /// A slice of this region with the same keys. Offsets start at the slice and are bounds-checked against it. Peers
    /// can still access the whole region.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when the slice exceeds the region.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        Ok(Self { region: self.region.clone(), part: Some(self.memory().slice(offset, len)?) })
    }

    /// A guard that keeps the region registered after this `Mr` is dropped.
    #[inline]
    pub fn guard(&self) -> MrGuard {
        MrGuard { region: self.region.clone() }
    }

    /// Whether this is the last handle of the region: no other clone, slice or [`MrGuard`]. Dropping it deregisters the
    /// memory.
    pub fn is_only(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }

    /// The registered memory.
    #[inline]
    pub fn memory(&self) -> &Memory {
        self.part.as_ref().unwrap_or(&self.region.memory)
    }

    pub(crate) fn is_of(&self, provider: &Arc<dyn Provider>) -> bool {
        Arc::ptr_eq(self.region.pd.provider(), provider)
    }

    /// The access rights of the registration.
    pub fn access(&self) -> Access {
        self.region.access
    }

    /// The key for local use.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.region.keys.lkey
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        self.region.keys.rkey
    }

    /// A scatter/gather element over `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], or [`Error::InvalidArgument`] for 4 GiB and more.
    #[inline]
    pub fn sge(&self, offset: usize, len: usize) -> Result<Sge> {
        let addr = self.at(offset, len)?;
        let len = u32::try_from(len).map_err(|_| Error::invalid("SGE length", len, "less than 4 GiB"))?;
        Ok(Sge { addr, len, lkey: self.lkey() })
    }

    /// The remote address of the byte at `offset`: what a peer needs for WRITE, READ and atomics. Send it as bytes or text, along
    /// with [`Qp::address`](super::Qp::address), over any connection.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Unsupported`] for GPU memory that is [staged](super::Context::stage).
    pub fn remote(&self, offset: usize) -> Result<RemoteAddr> {
        if self.region.keys.is_staged {
            return Err(Error::Unsupported {
                what: "access of peers to GPU memory that is staged in host memory",
                by: "a device that does not reach GPU memory",
                fix: "have peers access host memory, or the device reach the GPU by dma-bufs or nvidia-peermem (`gdasync doctor` \
                      says what is missing)",
            });
        }
        Ok(RemoteAddr { addr: self.at(offset, 0)?, rkey: self.rkey() })
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> Result<u64> {
        let memory = self.memory();
        let size = memory.len();
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(memory.addr() + offset as u64),
            _ => Err(Error::OutOfBounds { offset, len, size }),
        }
    }
}

/// The GPUs whose memory the queue pairs of a protection domain may write, with their region counts.
///
/// A card writes payload to GPU memory by itself, so the library cannot flush it before the completion arrives, as the
/// software HCA and the CPU proxy do. A stream flushes writes to the memory of its own GPU only.
#[derive(Debug, Default)]
pub(crate) struct WritableGpus {
    regions: AtomicUsize,
    gpus: Mutex<Vec<(Gpu, usize)>>,
}

/// The GPU that a device can write through this region.
fn written(memory: &Memory, access: Access) -> Option<&Gpu> {
    memory.gpu().filter(|_| access.contains(Access::LOCAL_WRITE))
}

impl WritableGpus {
    /// Counts a registered region.
    pub(super) fn add(&self, memory: &Memory, access: Access) {
        let Some(gpu) = written(memory, access) else { return };
        let mut gpus = self.gpus.lock();
        match gpus.iter_mut().find(|(known, _)| known.ordinal() == gpu.ordinal()) {
            Some((_, regions)) => *regions += 1,
            None => gpus.push((gpu.clone(), 1)),
        }
        self.regions.fetch_add(1, Ordering::Release);
    }

    /// Removes a deregistered region.
    pub(super) fn remove(&self, memory: &Memory, access: Access) {
        let Some(gpu) = written(memory, access) else { return };
        let mut gpus = self.gpus.lock();
        if let Some(at) = gpus.iter().position(|(known, _)| known.ordinal() == gpu.ordinal()) {
            gpus[at].1 -= 1;
            if gpus[at].1 == 0 {
                gpus.swap_remove(at);
            }
            self.regions.fetch_sub(1, Ordering::Release);
        }
    }

    /// Refuses a wait on a stream of `gpu` for payload that this GPU may not see after the wait.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    #[inline]
    pub(super) fn check(&self, gpu: &Gpu) -> Result<()> {
        if self.regions.load(Ordering::Acquire) == 0 { Ok(()) } else { self.check_all(gpu) }
    }

    fn check_all(&self, gpu: &Gpu) -> Result<()> {
        let gpus = self.gpus.lock();
        gpus.iter().try_for_each(|(owner, _)| {
            if owner.ordinal() != gpu.ordinal() {
                return if owner.capabilities().ordered_for_all { Ok(()) } else { Err(of_another_gpu()) };
            }
            match gpu.capabilities().flush {
                Flush::NotNeeded | Flush::OnStream => Ok(()),
                Flush::OnCpu | Flush::Impossible => Err(not_flushed()),
            }
        })
    }
}

fn not_flushed() -> Error {
    Error::Unsupported {
        what: "a stream's wait for payload that a card writes to this GPU's memory",
        by: "this GPU or driver, whose streams cannot flush inbound writes (device attributes 98, 117 and 118)",
        fix: "use the CPU proxy, which flushes before it completes (GDSYNC_PATH=proxy); or wait on the CPU, then call \
              Memory::flush; or receive into host memory, with the GPU's memory in another protection domain",
    }
}

fn of_another_gpu() -> Error {
    Error::Unsupported {
        what: "a stream's wait for payload that a card may write to the memory of another GPU",
        by: "that GPU or driver, which orders inbound writes for itself alone (device attribute 118 is below 200)",
        fix: "register the memory of each GPU in a protection domain of its own, and have streams of that GPU wait for its queue \
              pairs; or wait on the CPU",
    }
}
