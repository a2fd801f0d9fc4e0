//! The copy engines that a software HCA leaves payload to.

use std::fmt;
use std::sync::Arc;

use gdrcopy::cuda::MemoryKind;
use gdrcopy::cuda::raw::pointer_info;
use parking_lot::RwLock;

use super::{Engine, Gpu};
use crate::copy_engine::{CopyEngine, Handle, Part, ProcessId, Ticket};
use crate::error::{Error, Result};
use crate::memory::Memory;

/// The engines of the GPUs whose memory is registered, or that drive a queue pair.
#[derive(Default)]
pub struct GpuCopyEngines(RwLock<Vec<Arc<Engine>>>);

impl fmt::Debug for GpuCopyEngines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.read().iter().map(|engine| engine.gpu())).finish()
    }
}

impl GpuCopyEngines {
    /// The engine for a copy: that of the GPU that it goes to, or always the same one. So copies to one place are in order.
    fn of(&self, parts: &[Part]) -> Option<Arc<Engine>> {
        let engines = self.0.read();
        let of = |gpu: &Gpu| engines.iter().find(|e| e.gpu().raw_context() == gpu.raw_context());
        let to = parts.iter().find_map(|part| part.to.gpu().and_then(of));
        to.or(engines.first()).cloned()
    }
}

impl CopyEngine for GpuCopyEngines {
    fn adopt(&self, gpu: &Gpu) {
        let is_known =
            |engines: &[Arc<Engine>]| engines.iter().any(|e| e.gpu().raw_context() == gpu.raw_context());
        if is_known(&self.0.read()) {
            return;
        }
        // Without the lock, which the HCA takes under its own.
        match gpu.engine() {
            Ok(engine) => {
                let mut engines = self.0.write();
                if !is_known(&engines) {
                    engines.push(engine);
                }
            }
            Err(error) => tracing::warn!(%error, ?gpu, "no copy engine: the CPU moves all payload"),
        }
    }

    fn export(&self, memory: &Memory) -> Option<Handle> {
        let gpu = memory.gpu()?;
        handle(gpu, memory.addr())
            .inspect_err(|error| tracing::debug!(%error, ?memory, "peers cannot be referred to this memory"))
            .ok()
    }

    fn stages(&self, memory: &Memory) -> bool {
        memory.gpu().is_some()
    }

    fn start(&self, parts: Vec<Part>) -> Ticket {
        match self.of(&parts) {
            Some(engine) => engine.copy(parts),
            None => {
                Ticket::failed("no GPU is known here: register GPU memory, or build a queue pair on a GPU")
            }
        }
    }

    fn forget(&self, process: ProcessId) {
        self.0.read().iter().for_each(|engine| engine.forget(process));
    }
}

/// How other processes open the allocation at an address, and where in it that is.
fn handle(gpu: &Gpu, addr: u64) -> Result<Handle> {
    let failed = Error::cuda("exporting GPU memory");
    let _current = gpu.enter()?;
    let info = pointer_info(gpu.api(), addr).map_err(&failed)?;
    let (buffer, offset) = (info.buffer_id, addr.saturating_sub(info.base));
    let mut ipc = [0; 64];
    if info.kind == MemoryKind::Malloc {
        // SAFETY: a place for the answer; the driver checks the address.
        if let Err(error) = unsafe { gpu.api().ipc_get_mem_handle(&mut ipc, info.base) } {
            tracing::debug!(%error, "other processes cannot open this memory");
            ipc = [0; 64];
        }
    }
    Ok(Handle { ipc, buffer, offset })
}
