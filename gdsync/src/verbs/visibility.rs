//! Whether a GPU sees payload that a card has written to GPU memory, once a wait of one of its streams has seen the completion.
//!
//! A card writes payload by itself, so nothing of ours can flush it before the completion arrives, as the software HCA and the CPU
//! proxy do. A stream flushes writes to the memory of its own GPU alone.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use gdsync_device::Access;
use gdsync_device::cuda::{Flush, Gpu};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;

/// The GPUs whose memory queue pairs of a protection domain may write to, with the number of regions there.
#[derive(Debug, Default)]
pub(crate) struct WritableGpus {
    regions: AtomicUsize,
    gpus: Mutex<Vec<(Gpu, usize)>>,
}

/// The GPU that a device can write to by a region of this memory.
fn written(memory: &Memory, access: Access) -> Option<&Gpu> {
    memory.gpu().filter(|_| access.contains(Access::LOCAL_WRITE))
}

impl WritableGpus {
    /// A region was registered.
    pub(super) fn add(&self, memory: &Memory, access: Access) {
        let Some(gpu) = written(memory, access) else { return };
        let mut gpus = self.gpus.lock();
        match gpus.iter_mut().find(|(known, _)| known.ordinal() == gpu.ordinal()) {
            Some((_, regions)) => *regions += 1,
            None => gpus.push((gpu.clone(), 1)),
        }
        self.regions.fetch_add(1, Ordering::Release);
    }

    /// A region is no longer registered.
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

    /// Refuses a wait of a stream of `gpu` for payload which that GPU may not see behind it.
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
