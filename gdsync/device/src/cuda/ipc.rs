//! Memory of other processes, opened by CUDA IPC in the context of a GPU: once for each allocation.

use std::collections::HashMap;
use std::fmt;

use parking_lot::Mutex;

use super::Gpu;
use super::deferred_free::DeferredFree;
use crate::copy_engine::{Handle, ProcessId};
use crate::error::{Error, Result};

/// Maximum number of allocations that stay open without a user.
const MOST: usize = 64;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;

/// An allocation of another process: process, IPC handle, allocation number.
type Key = (ProcessId, [u8; 64], u64);

/// The open allocations of a GPU.
#[derive(Debug, Default)]
pub struct IpcHandles {
    open: Mutex<Open>,
    /// Held while the driver opens one, which may block: it refuses an allocation that another thread is opening (`ALREADY_MAPPED`).
    opening: Mutex<()>,
}

#[derive(Debug, Default)]
struct Open {
    by_key: HashMap<Key, Opened>,
    clock: u64,
}

#[derive(Debug)]
struct Opened {
    addr: u64,
    /// Number of [`IpcOpening`]s of it.
    users: usize,
    /// `clock` at the last use.
    used: u64,
}

/// A use of an allocation of another process.
pub struct IpcOpening {
    gpu: Gpu,
    key: Key,
    base: u64,
    /// It stays open for the next user.
    kept: bool,
}

impl IpcOpening {
    /// Opens the allocation, unless it is open. If it is `kept`, it stays open behind the last use, up to a number of allocations.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(gpu: &Gpu, process: ProcessId, handle: &Handle, kept: bool) -> Result<Self> {
        let key = (process, handle.ipc, handle.buffer);
        let handles = gpu.ipc_handles();
        let known = || handles.open.lock().use_known(&key);
        let base = match known() {
            Some(base) => base,
            None => {
                let _opening = handles.opening.lock();
                match known() {
                    Some(base) => base,
                    None => handles.use_opened(gpu, key, open(gpu, handle.ipc)?),
                }
            }
        };
        Ok(Self { gpu: gpu.clone(), key, base, kept })
    }

    /// The GPU that accesses it.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The address of the allocation.
    pub fn base(&self) -> u64 {
        self.base
    }
}

impl fmt::Debug for IpcOpening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IpcOpening({:#x} for {:?})", self.base, self.gpu)
    }
}

impl Drop for IpcOpening {
    fn drop(&mut self) {
        if !self.gpu.is_here() {
            return;
        }
        let mut open = self.gpu.ipc_handles().open.lock();
        let Some(opened) = open.by_key.get_mut(&self.key) else { return };
        opened.users -= 1;
        if opened.users == 0 && !self.kept {
            open.close(&self.gpu, &self.key);
        }
    }
}

impl IpcHandles {
    /// Records a new opening.
    fn use_opened(&self, gpu: &Gpu, key: Key, addr: u64) -> u64 {
        let mut open = self.open.lock();
        let idle = open.by_key.iter().filter(|(_, opened)| opened.users == 0);
        let oldest = idle.min_by_key(|(_, opened)| opened.used).map(|(key, _)| *key);
        if let Some(oldest) = oldest.filter(|_| open.by_key.len() >= MOST) {
            open.close(gpu, &oldest);
        }
        let used = open.clock;
        open.by_key.insert(key, Opened { addr, users: 1, used });
        addr
    }

    /// Closes unused allocations, of `process` or all.
    pub fn close_idle(&self, gpu: &Gpu, process: Option<ProcessId>) {
        let mut open = self.open.lock();
        let of = |key: &Key| process.is_none_or(|process| key.0 == process);
        let is_idle = |(key, opened): &(&Key, &Opened)| opened.users == 0 && of(key);
        let idle: Vec<_> = open.by_key.iter().filter(is_idle).map(|(key, _)| *key).collect();
        idle.iter().for_each(|key| open.close(gpu, key));
    }
}

impl Open {
    /// Uses an allocation that is open.
    fn use_known(&mut self, key: &Key) -> Option<u64> {
        self.clock += 1;
        let opened = self.by_key.get_mut(key)?;
        (opened.users, opened.used) = (opened.users + 1, self.clock);
        Some(opened.addr)
    }

    /// Closes an allocation later, when no stream waits.
    fn close(&mut self, gpu: &Gpu, key: &Key) {
        if let Some(Opened { addr, .. }) = self.by_key.remove(key) {
            gpu.defer_free(DeferredFree::Ipc { addr });
        }
    }
}

fn open(gpu: &Gpu, handle: [u8; 64]) -> Result<u64> {
    let _current = gpu.enter()?;
    let mut addr = 0;
    // SAFETY: a place for the answer; the driver checks the handle.
    unsafe { gpu.api().ipc_open_mem_handle(&mut addr, handle, LAZY_PEER_ACCESS) }
        .map_err(Error::cuda("opening memory of a peer"))?;
    Ok(addr)
}
