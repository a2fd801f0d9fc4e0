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
    /// Unique.
    pub(super) id: Handle,
    /// Registers of a device.
    pub(super) is_io: bool,
    /// False after a free or unregistration. Read-locked while work uses the memory.
    pub(super) alive: RecursiveRwLock<bool>,
    /// The backing file; none for registered memory.
    pub(super) bytes: Option<Bytes>,
}

/// A memory file, mapped until the free. A mapping by the library keeps the bytes after that.
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

    /// Runs `act` unless the memory was freed; the free waits for it.
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

/// The region that contains a range.
pub(super) fn find(addr: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.lock();
    let (_, region) = regions.range(..=addr).next_back()?;
    region.contains(addr, len).then(|| region.clone())
}

/// The region of a range that work of a context can access.
pub(super) fn reachable(context: &Context, addr: usize, len: usize) -> Outcome<Arc<Region>> {
    let region = find(addr, len).ok_or(CudaStatus::INVALID_VALUE)?;
    let reached = region.kind != Kind::Device || context.reaches(&region.context);
    require(reached, CudaStatus::INVALID_VALUE)?;
    Ok(region)
}

/// Allocations of GPU memory, of host memory, and registrations made after a handle.
pub(super) fn since(first: Handle) -> [usize; 3] {
    let regions = REGIONS.lock();
    [Kind::Device, Kind::HostAllocated, Kind::HostRegistered]
        .map(|kind| regions.values().filter(|region| region.kind == kind && region.id > first).count())
}

/// Frees the memory of a destroyed context.
pub(super) fn forget(context: Handle) {
    let of_it = |_: &usize, region: &mut Arc<Region>| region.context.handle == context;
    let gone: Vec<_> = REGIONS.lock().extract_if(.., of_it).collect();
    gone.iter().for_each(|(_, region)| region.end());
}

/// Removes the region that begins at an address.
pub(super) fn remove(addr: usize, kind: Kind) -> Option<Arc<Region>> {
    let mut regions = REGIONS.lock();
    regions.get(&addr).filter(|region| region.kind == kind)?;
    let region = regions.remove(&addr)?;
    drop(regions);
    region.end();
    Some(region)
}
