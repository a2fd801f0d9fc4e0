//! Memory of other processes, opened here through CUDA IPC.

use std::collections::HashMap;

use gdrcopy::cuda::raw::Api;

use super::Gpu;
use super::deferred_free::DeferredFree;
use crate::copy_engine::{Handle, ProcessId};
use crate::error::{Error, Result};

/// Allocations open at once.
const MOST: usize = 64;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;

/// An allocation of another process. What is allocated later at the same place has another number.
pub(super) type Key = (ProcessId, [u8; 64], u64);

/// The allocations that are open, in the context of one GPU.
#[derive(Debug, Default)]
pub(super) struct Handles {
    open: HashMap<Key, Opened>,
    clock: u64,
}

#[derive(Debug)]
struct Opened {
    addr: u64,
    /// Copies that use it.
    users: usize,
    /// When it was last used, in openings.
    used: u64,
}

impl Handles {
    /// The address of an allocation, which stays open until [`Handles::release`]. The context must be current.
    pub(super) fn acquire(&mut self, gpu: &Gpu, process: ProcessId, handle: &Handle) -> Result<(Key, u64)> {
        self.clock += 1;
        let (key, used) = ((process, handle.ipc, handle.buffer), self.clock);
        if let Some(opened) = self.open.get_mut(&key) {
            (opened.users, opened.used) = (opened.users + 1, used);
            return Ok((key, opened.addr));
        }
        if self.open.len() >= MOST {
            let idle = self.open.iter().filter(|(_, opened)| opened.users == 0);
            let oldest = idle.min_by_key(|(_, opened)| opened.used).map(|(key, _)| *key);
            let full = || Error::invalid("allocations of peers in use", MOST, "fewer at a time");
            self.close(gpu, &oldest.ok_or_else(full)?);
        }
        let addr = open(gpu.api(), handle.ipc)?;
        self.open.insert(key, Opened { addr, users: 1, used });
        Ok((key, addr))
    }

    /// A copy that used it is over.
    pub(super) fn release(&mut self, key: &Key) {
        if let Some(opened) = self.open.get_mut(key) {
            opened.users -= 1;
        }
    }

    /// Closes what no copy uses: of a process that is gone, or all of it.
    pub(super) fn close_idle(&mut self, gpu: &Gpu, process: Option<ProcessId>) {
        let of = |key: &Key| process.is_none_or(|process| key.0 == process);
        let idle: Vec<_> = self
            .open
            .iter()
            .filter(|(key, opened)| opened.users == 0 && of(key))
            .map(|(key, _)| *key)
            .collect();
        idle.iter().for_each(|key| self.close(gpu, key));
    }

    /// Closes an allocation, in time.
    fn close(&mut self, gpu: &Gpu, key: &Key) {
        if let Some(Opened { addr, .. }) = self.open.remove(key) {
            gpu.doom(DeferredFree::Ipc { addr });
        }
    }
}

fn open(api: &Api, handle: [u8; 64]) -> Result<u64> {
    let mut addr = 0;
    // SAFETY: a place for the answer; the driver checks the handle.
    unsafe { api.ipc_open_mem_handle(&mut addr, handle, LAZY_PEER_ACCESS) }
        .map_err(Error::cuda("opening memory of a peer"))?;
    Ok(addr)
}
