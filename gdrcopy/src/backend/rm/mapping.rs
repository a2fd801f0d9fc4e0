//! BAR1 mappings of resource-manager objects.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use super::Gpu;
use super::abi::{self, Escape};
use super::client::{Object, refused};
use super::status::NvStatus;
use crate::backend::reservation::Reservation;
use crate::error::{Error, Result};

/// GPU memory held by a handle of our own.
#[derive(Debug)]
pub(crate) struct Memory {
    // Fields are dropped in this order.
    object: Object,
    gpu: Arc<Gpu>,
}

impl Memory {
    pub(crate) fn new(gpu: &Arc<Gpu>, object: Object) -> Arc<Self> {
        Arc::new(Self { object, gpu: gpu.clone() })
    }

    /// Gives the memory back, telling what went wrong.
    pub(crate) fn free(self) -> Result<()> {
        self.object.free()
    }
}

/// What the resource manager holds for a mapping: BAR1 space. Given back when dropped, after the `munmap`.
#[derive(Debug)]
pub(crate) struct Bar1Mapping {
    linear: u64,
    memory: Arc<Memory>,
    /// The file whose `mmap` this is.
    file: OwnedFd,
}

impl Bar1Mapping {
    /// Maps `len` bytes at `offset` of an object behind what is in the range.
    pub(crate) fn append(
        range: &mut Reservation,
        memory: &Arc<Memory>,
        offset: u64,
        len: usize,
    ) -> Result<Self> {
        let gpu = &memory.gpu;
        let client = gpu.client();
        let file = gpu.open_file()?;
        let mut map = abi::Map {
            client: client.handle(),
            device: gpu.device(),
            memory: memory.object.handle(),
            offset,
            length: len as u64,
            flags: abi::Map::FLAGS,
            fd: file.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: no pointers.
        let status = unsafe { client.escape(&mut map) }?;
        if status != NvStatus::OK {
            return Err(refused_mapping(status, len));
        }
        let mapping = Bar1Mapping { linear: map.linear, memory: memory.clone(), file };
        range.append(&*client.kernel, mapping.file.as_fd(), len).map_err(|error| {
            Error::sys(format!("mmap of {len} B of BAR1"), error, "see the kernel's log for NVRM messages")
        })?;
        Ok(mapping)
    }
}

impl Drop for Bar1Mapping {
    fn drop(&mut self) {
        let client = self.memory.gpu.client();
        // In a forked child the mapping is the parent's.
        if client.check_owner().is_err() {
            return;
        }
        let mut unmap = abi::Unmap {
            client: client.handle(),
            device: self.memory.gpu.device(),
            memory: self.memory.object.handle(),
            linear: self.linear,
            ..Default::default()
        };
        // SAFETY: no pointers.
        let error = match unsafe { client.escape(&mut unmap) } {
            Ok(NvStatus::OK) => return,
            Ok(status) => refused(status, abi::Unmap::NAME),
            Err(error) => error,
        };
        tracing::warn!(%error, "BAR1 mapping of object {:#x} not given back", self.memory.object.handle());
    }
}

/// The error of a refused mapping of `len` bytes. Resources that run out here are BAR1 space.
fn refused_mapping(status: NvStatus, len: usize) -> Error {
    match status {
        NvStatus::INSUFFICIENT_RESOURCES | NvStatus::NO_MEMORY => Error::Exhausted {
            what: "BAR1 space",
            len,
            fix: "unmap something, map less at a time, or enable a resizable BAR (nvidia-smi -q shows BAR1)",
        },
        _ => refused(status, abi::Map::NAME),
    }
}
