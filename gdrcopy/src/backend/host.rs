//! Plain memory in place of GPU memory, for machines without a GPU.
//!
//! An allocation is a memory file, mapped once for its "GPU address" and once by each pin. So the two addresses differ, and freed
//! memory stays while it is pinned, as on a GPU.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::locate::host_pages;
use super::{Allocation, Backend, Pinned};
use crate::cpu_range::{CpuRange, memory_file};
use crate::cuda::AllocKind;
use crate::error::{Error, Result, check_bounds};
use crate::fork::Owner;
use crate::system::{Kernel, Linux, System};
use crate::types::{BackendKind, MappingType, PinFlags, host_page};

/// Allocations by address.
type Registry = Mutex<BTreeMap<u64, Arc<Memory>>>;

#[derive(Debug)]
pub(crate) struct Host {
    registry: Arc<Registry>,
    owner: Owner,
}

/// The bytes of an allocation, shared by the allocation and its pins.
#[derive(Debug)]
struct Memory {
    base: u64,
    /// Requested bytes; the file has whole pages.
    len: usize,
    file: File,
}

impl Memory {
    fn map(&self, offset: usize, len: usize) -> Result<CpuRange> {
        // SAFETY: no address is given.
        let ptr = unsafe { Linux.mmap(self.file.as_fd(), len, offset as u64, None) }.map_err(|error| {
            Error::sys(format!("mmap of {len} bytes"), error, "free memory, or raise vm.max_map_count")
        })?;
        // SAFETY: just mapped, nothing else knows it.
        unsafe { CpuRange::adopt(ptr, len, MappingType::Cached, None) }
    }
}

impl Host {
    /// Never fails.
    pub(crate) fn open(_system: &System) -> Result<Self> {
        Ok(Self { registry: Arc::default(), owner: Owner::this_process() })
    }
}

impl Backend for Host {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>> {
        self.owner.check()?;
        if flags.contains(PinFlags::FORCE_PCIE) {
            return Err(Error::Unsupported {
                what: "FORCE_PCIE".into(),
                by: "the host backend",
                fix: "pin without it: there is no PCIe between the memory and the CPU",
            });
        }
        if len == 0 {
            return Err(Error::invalid("length", len, "at least 1"));
        }
        let registry = self.registry.lock();
        let below = registry.range(..=addr).next_back();
        let Some((_, memory)) = below.filter(|(base, memory)| addr - **base < memory.len as u64) else {
            return Err(Error::NotMappable {
                addr,
                found: "no memory of the host backend",
                fix: "allocate with GpuBuffer; without a GPU nothing else can be mapped",
            });
        };
        let Memory { base, len: asked, .. } = **memory;
        let whole_pages = flags.contains(PinFlags::WHOLE_PAGES);
        let size = if whole_pages { asked.next_multiple_of(host_page()) } else { asked };
        if len as u64 > size as u64 - (addr - base) {
            return Err(Error::BeyondAllocation { addr, len, base, size });
        }
        let (va, pinned_len) = host_pages(addr, len)?;
        let offset = usize::try_from(va - base).expect("less than the size of an allocation");
        Ok(Box::new(HostPin { memory: memory.clone(), va, offset, pinned_len, owner: self.owner }))
    }

    fn allocate_as(&self, device: i32, len: usize, _kind: AllocKind) -> Result<Box<dyn Allocation>> {
        self.owner.check()?;
        if device != 0 {
            return Err(Error::invalid("device", device, "0: the host backend has one"));
        }
        let whole = len.checked_next_multiple_of(host_page()).filter(|whole| *whole > 0);
        let Some(whole) = whole else {
            return Err(Error::invalid("length", len, "at least 1, and within the address space"));
        };
        let file = memory_file(c"gdrcopy-host", whole as u64)
            .map_err(|error| Error::sys(format!("memory file of {len} bytes"), error, "free memory"))?;
        let mut memory = Memory { base: 0, len, file };
        let range = memory.map(0, whole)?;
        memory.base = range.ptr().as_ptr().expose_provenance() as u64;
        let memory = Arc::new(memory);
        self.registry.lock().insert(memory.base, memory.clone());
        Ok(Box::new(HostAllocation {
            memory,
            registry: self.registry.clone(),
            owner: self.owner,
            _range: range,
        }))
    }
}

#[derive(Debug)]
struct HostAllocation {
    memory: Arc<Memory>,
    registry: Arc<Registry>,
    owner: Owner,
    /// The mapping at the "GPU address".
    _range: CpuRange,
}

impl Allocation for HostAllocation {
    fn addr(&self) -> u64 {
        self.memory.base
    }

    fn len(&self) -> usize {
        self.memory.len
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.owner.check()?;
        check_bounds(offset, data.len(), self.len())?;
        self.memory
            .file
            .write_all_at(data, offset as u64)
            .map_err(|error| Error::sys("pwrite to a memory file", error, "free memory"))
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.owner.check()?;
        check_bounds(offset, out.len(), self.len())?;
        self.memory
            .file
            .read_exact_at(out, offset as u64)
            .map_err(|error| Error::sys("pread from a memory file", error, "free memory"))
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        // A thread that a forked child does not have may have held the lock of the registry.
        if self.owner.is_caller() {
            // Removed before the address is unmapped and can be reused.
            self.registry.lock().remove(&self.memory.base);
        }
    }
}

/// Pinned memory; it keeps the bytes when the allocation is freed.
#[derive(Debug)]
struct HostPin {
    memory: Arc<Memory>,
    va: u64,
    offset: usize,
    pinned_len: usize,
    owner: Owner,
}

impl Pinned for HostPin {
    fn va(&self) -> u64 {
        self.va
    }

    fn pinned_len(&self) -> usize {
        self.pinned_len
    }

    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.owner.check()?;
        check_bounds(0, len, self.pinned_len)?;
        if let Some(other) = request.filter(|kind| *kind != MappingType::Cached) {
            return Err(other.unsupported("the host backend", "ask for no type: host memory is cached"));
        }
        self.memory.map(self.offset, len.max(1).next_multiple_of(host_page()))
    }

    fn unpin(self: Box<Self>) -> Result<()> {
        self.owner.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::proof;

    fn host() -> Host {
        Host::open(&System::real()).unwrap()
    }

    fn peek(range: &CpuRange, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        proof::load(range, offset, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_address_is_memory_of_this_process() {
        let host = host();
        let memory = host.allocate_as(0, 100, AllocKind::Malloc).unwrap();
        memory.write(10, b"by the GPU").unwrap();
        let ptr: *const u8 = std::ptr::with_exposed_provenance(usize::try_from(memory.addr()).unwrap());
        // SAFETY: inside the allocation.
        let tenth = unsafe { ptr.add(10) };
        // SAFETY: mapped while `memory` lives.
        assert_eq!(unsafe { tenth.read_volatile() }, b'b');
        let pin = host.pin(memory.addr() + 10, 10, PinFlags::empty()).unwrap();
        let range = pin.map(20, None).unwrap();
        assert_eq!(peek(&range, 10, 10), b"by the GPU");
        assert_ne!(range.ptr().as_ptr().cast_const(), ptr);
        proof::store(&range, 10, b"x").unwrap();
        // SAFETY: mapped while `memory` lives.
        assert_eq!(unsafe { tenth.read_volatile() }, b'x');
    }

    #[test]
    fn memory_of_another_backend_is_refused() {
        let (one, other) = (host(), host());
        let memory = one.allocate_as(0, 4096, AllocKind::Malloc).unwrap();
        assert!(matches!(other.pin(memory.addr(), 1, PinFlags::empty()), Err(Error::NotMappable { .. })));
    }

    #[test]
    fn a_pin_does_not_reach_neighbouring_memory() {
        let host = host();
        let memory = host.allocate_as(0, 5000, AllocKind::Malloc).unwrap();
        let pin = |offset, len| host.pin(memory.addr() + offset, len, PinFlags::empty()).map(drop);
        assert!(pin(4999, 1).is_ok());
        assert!(matches!(pin(4999, 2), Err(Error::BeyondAllocation { size: 5000, .. })));
        // The rest of the last page is unused.
        assert!(matches!(pin(5000, 1), Err(Error::NotMappable { .. })));
        let pages = |offset, len| host.pin(memory.addr() + offset, len, PinFlags::WHOLE_PAGES).map(drop);
        let whole = 5000_usize.next_multiple_of(host_page());
        assert!(pages(0, whole).is_ok() && pages(4999, whole - 4999).is_ok());
        assert!(matches!(pages(0, whole + 1), Err(Error::BeyondAllocation { .. })));
        assert!(matches!(pages(5000, 1), Err(Error::NotMappable { .. })));
    }

    #[test]
    fn memory_outlives_the_backend() {
        let host = host();
        let memory = host.allocate_as(0, 4096, AllocKind::Malloc).unwrap();
        let pin = host.pin(memory.addr(), 4096, PinFlags::empty()).unwrap();
        drop(host);
        memory.write(0, b"still").unwrap();
        drop(memory);
        assert_eq!(peek(&pin.map(5, None).unwrap(), 0, 5), b"still");
    }
}
