//! Memory that the driver knows: GPU memory, pinned host memory, and registered memory of the application.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use gdrcopy::host_page;
use parking_lot::{Mutex, RecursiveRwLock};

use super::handles::Context;
use super::{Outcome, require};
use crate::pages::{Mapped, memory_file};

pub(super) static REGIONS: Mutex<BTreeMap<usize, Arc<Region>>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Device,
    HostAllocated,
    HostRegistered,
}

/// Memory that the driver knows.
pub(super) struct Region {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) kind: Kind,
    pub(super) context: Arc<Context>,
    /// Given to no other.
    pub(super) id: Handle,
    /// Registers of a device.
    pub(super) is_io: bool,
    /// Until it is freed or unregistered. Locked while work uses the memory.
    pub(super) alive: RecursiveRwLock<bool>,
    /// What is not the application's.
    pub(super) bytes: Option<Bytes>,
}

/// A memory file, mapped until it is freed: the address may be used again though a mapping still holds the bytes.
pub(super) struct Bytes {
    pub(super) file: File,
    mapped: Mutex<Option<Mapped>>,
}

impl Bytes {
    pub(super) fn new(len: usize) -> io::Result<(usize, Self)> {
        let len = len.next_multiple_of(host_page());
        let file = memory_file(c"simulated-cuda", len as u64)?;
        let mapped = Mapped::new(&file, len)?;
        Ok((mapped.addr(), Self { file, mapped: Mutex::new(Some(mapped)) }))
    }
}

impl Region {
    pub(super) fn contains(&self, addr: usize, len: usize) -> bool {
        let end = self.start + self.len;
        (self.start..end).contains(&addr) && len <= end - addr
    }

    /// Uses the memory, if it is still there. It stays meanwhile.
    pub(super) fn touch<T>(&self, act: impl FnOnce() -> T) -> Outcome<T> {
        // A copy may have both ends in one region, so the lock is recursive.
        let alive = self.alive.read();
        require(*alive, CudaStatus::ILLEGAL_ADDRESS)?;
        Ok(act())
    }

    fn end(&self) {
        *self.alive.write() = false;
        if let Some(bytes) = &self.bytes {
            bytes.mapped.lock().take();
        }
    }
}

/// The memory at an address, with all of the bytes.
pub(super) fn find(addr: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.lock();
    let (_, region) = regions.range(..=addr).next_back()?;
    region.contains(addr, len).then(|| region.clone())
}

/// Memory that work of a context can use.
pub(super) fn reachable(context: &Context, addr: usize, len: usize) -> Outcome<Arc<Region>> {
    let region = find(addr, len).ok_or(CudaStatus::INVALID_VALUE)?;
    let reached = region.kind != Kind::Device || context.reaches(&region.context);
    require(reached, CudaStatus::INVALID_VALUE)?;
    Ok(region)
}

/// Allocations of GPU memory, of host memory, and registrations that are younger than a handle.
pub(super) fn since(first: Handle) -> [usize; 3] {
    let regions = REGIONS.lock();
    [Kind::Device, Kind::HostAllocated, Kind::HostRegistered]
        .map(|kind| regions.values().filter(|region| region.kind == kind && region.id > first).count())
}

/// A context is gone, and its memory with it.
pub(super) fn forget(context: Handle) {
    let of_it = |_: &usize, region: &mut Arc<Region>| region.context.handle == context;
    let gone: Vec<_> = REGIONS.lock().extract_if(.., of_it).collect();
    gone.iter().for_each(|(_, region)| region.end());
}

/// Takes a region that begins at an address out of the table.
pub(super) fn remove(addr: usize, kind: Kind) -> Option<Arc<Region>> {
    let mut regions = REGIONS.lock();
    regions.get(&addr).filter(|region| region.kind == kind)?;
    let region = regions.remove(&addr)?;
    drop(regions);
    region.end();
    Some(region)
}
