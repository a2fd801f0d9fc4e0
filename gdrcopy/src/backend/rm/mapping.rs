//! BAR1 mappings of resource-manager objects, side by side in one address range.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Gpu;
use super::abi::{self, Escape};
use super::client::Object;
use super::status::NvStatus;
use crate::backend::MappingType;
use crate::cpu_range::CpuRange;
use crate::error::{Error, Result};
use crate::kernel::check;

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

/// An address range with nothing in it, to be filled with mappings; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    ptr: NonNull<u8>,
    len: usize,
    filled: usize,
}

impl Reservation {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: no address is asked for, so no mapping is touched.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        let failed = (raw == libc::MAP_FAILED).then(std::io::Error::last_os_error);
        match (failed, NonNull::new(raw.cast())) {
            (None, Some(ptr)) => Ok(Self { ptr, len, filled: 0 }),
            (failed, _) => Err(Error::sys(
                format!("mmap of {len} B without access"),
                failed.unwrap_or_else(|| std::io::Error::from_raw_os_error(libc::EFAULT)),
                "raise the limit on address space (ulimit -v), or map less",
            )),
        }
    }

    /// Maps `len` bytes at `offset` of an object behind those already here.
    pub(crate) fn append(&mut self, memory: &Arc<Memory>, offset: u64, len: usize) -> Result<Bar1Mapping> {
        debug_assert!(len <= self.len - self.filled);
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
            return Err(status.map_error(abi::Map::NAME, len));
        }
        let mapping = Bar1Mapping { linear: map.linear, memory: memory.clone(), file };
        // SAFETY: inside the reservation.
        let at = unsafe { self.ptr.add(self.filled) };
        // SAFETY: the reservation is this value's own, and nothing was put behind `filled` yet.
        unsafe { client.kernel.mmap(mapping.file.as_fd(), len, 0, Some(at)) }.map_err(|error| {
            Error::sys(format!("mmap of {len} B of BAR1"), error, "see the kernel's log for NVRM messages")
        })?;
        self.filled += len;
        Ok(mapping)
    }

    /// The filled range, with what must live as long.
    pub(crate) fn adopt(self, mappings: Vec<Bar1Mapping>) -> Result<CpuRange> {
        debug_assert_eq!(self.filled, self.len);
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: whole adjacent mappings, and this value no longer unmaps them. WC: what the driver uses for
        // BAR1 by default (`nvidia_mmap_helper` in `nv-mmap.c` of the open kernel modules 580.142).
        unsafe { CpuRange::adopt(this.ptr, this.len, MappingType::WriteCombining, Some(Box::new(mappings))) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own and was given to nobody.
        if let Err(error) = check(unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) }) {
            tracing::warn!(%error, "munmap of {:p} failed", self.ptr);
        }
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
            Ok(status) => status.error(abi::Unmap::NAME),
            Err(error) => error,
        };
        tracing::warn!(%error, "BAR1 mapping of object {:#x} not given back", self.memory.object.handle());
    }
}
