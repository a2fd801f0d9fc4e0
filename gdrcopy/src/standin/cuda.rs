//! The CUDA driver of the simulated machine.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::memory::CLIENT;
use super::{Machine, VaRange};
use crate::cuda::{AllocKind, Cuda, CudaStatus, GpuInfo, MemoryKind, PointerInfo};
use crate::error::{Error, Result};

/// Host pages, in which dma-bufs are cut; bytes.
const HOST_PAGE: u64 = 4096;
/// GPU pages, to which [`Cuda::alloc`] aligns; bytes.
const GPU_PAGE: usize = 64 << 10;
/// Granularity of `cuMemCreate`; bytes.
const GRANULARITY: usize = 2 << 20;

/// What the simulated driver says of itself and of its GPUs.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// `cuDriverGetVersion`.
    pub driver_version: u32,
    /// Device attributes by number; one that is not here is refused, as by a driver that does not know it.
    pub attributes: HashMap<u32, i32>,
}

impl Default for CudaSettings {
    /// An H200 under CUDA 13.0.
    fn default() -> Self {
        // Integrated; host page tables; VMM; POSIX handles; RDMA with VMM; RDMA; flush from the host; write
        // ordering of the owner; dma-buf.
        let attributes =
            [(18, 0), (100, 0), (102, 1), (103, 1), (110, 1), (116, 1), (117, 1), (118, 100), (124, 1)];
        Self { driver_version: 13000, attributes: attributes.into() }
    }
}

/// A simulated `libcuda`. Every call first looks whether [`Machine::fail`] wants it to fail: under the name
/// that the entry point has in the manual, with the `CUresult` to return.
#[derive(Debug)]
pub struct SimulatedCuda {
    machine: Arc<Machine>,
    /// What [`Cuda::alloc`] handed out, and where the allocation really begins.
    allocations: Mutex<HashMap<u64, u64>>,
}

impl SimulatedCuda {
    /// The driver of this machine.
    pub fn new(machine: &Arc<Machine>) -> Arc<Self> {
        Arc::new(Self { machine: machine.clone(), allocations: Mutex::default() })
    }

    /// Fails as the machine was told to.
    fn enter(&self, call: &'static str) -> Result<()> {
        let status =
            self.machine.fault(call).map_or(CudaStatus::SUCCESS, |code| CudaStatus(code.unsigned_abs()));
        status.check(call)
    }

    /// The allocation at an address of GPU memory.
    fn range(&self, call: &'static str, addr: u64) -> Result<VaRange> {
        let found = self.machine.memory.lock().find(addr).cloned();
        found
            .filter(|range| range.kind != MemoryKind::Host)
            .ok_or_else(|| refusal(call, CudaStatus::INVALID_VALUE))
    }

    /// Takes memory with room for [`GPU_PAGE`] alignment.
    fn allocate(&self, device: i32, len: usize, kind: AllocKind) -> Result<u64> {
        let (call, kind, len) = match kind {
            AllocKind::Malloc => ("cuMemAlloc", MemoryKind::Malloc, len.checked_add(GPU_PAGE - 1)),
            AllocKind::Vmm => ("cuMemCreate", MemoryKind::Vmm, len.checked_next_multiple_of(GRANULARITY)),
        };
        self.enter(call)?;
        self.check_device(call, device)?;
        let len = len.ok_or_else(|| refusal(call, CudaStatus::INVALID_VALUE))?;
        self.machine.memory.lock().alloc(device, len, kind).map_err(|e| file_error(call, e))
    }

    fn check_device(&self, call: &'static str, device: i32) -> Result<()> {
        let known = (0..self.machine.memory.lock().gpus()).contains(&device);
        if known { Ok(()) } else { Err(refusal(call, CudaStatus::INVALID_DEVICE)) }
    }

    /// Walks over the allocations of a range, which may be several adjacent ones; gives each with the offset in
    /// its object, the position in the range and the length there.
    fn walk(
        &self,
        call: &'static str,
        device: i32,
        addr: u64,
        len: usize,
        mut step: impl FnMut(&VaRange, usize, usize, usize) -> io::Result<()>,
    ) -> Result<()> {
        self.check_device(call, device)?;
        let mut done = 0;
        while done < len {
            let at = addr + done as u64;
            let range = self.range(call, at)?;
            if range.object.gpu != device {
                return Err(refusal(call, CudaStatus::INVALID_VALUE));
            }
            let inside = offset_in(&range, at);
            let part = (range.len - inside).min(len - done);
            step(&range, range.offset + inside, done, part).map_err(|e| file_error(call, e))?;
            done += part;
        }
        Ok(())
    }
}

fn refusal(call: &'static str, status: CudaStatus) -> Error {
    Error::Cuda { call, status, fix: status.fix() }
}

/// A failure of the memory file behind an object.
fn file_error(call: &'static str, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => refusal(call, CudaStatus::OUT_OF_MEMORY),
        _ => Error::sys(format!("{call} of the simulated machine"), error, "see the limits of this process"),
    }
}

/// Where an address of a range lies in it.
fn offset_in(range: &VaRange, addr: u64) -> usize {
    usize::try_from(addr - range.base).unwrap_or(usize::MAX)
}

impl Cuda for SimulatedCuda {
    fn driver_version(&self) -> Result<u32> {
        self.enter("cuDriverGetVersion")?;
        Ok(self.machine.cuda.lock().driver_version)
    }

    fn devices(&self) -> Result<Vec<GpuInfo>> {
        self.enter("cuDeviceGetCount")?;
        let gpus = self.machine.memory.lock().gpus();
        Ok((0..gpus)
            .map(|ordinal| GpuInfo { ordinal, pci: pci(ordinal), name: "Simulated GPU".into() })
            .collect())
    }

    fn device_attribute(&self, device: i32, attribute: u32) -> Result<i32> {
        const CALL: &str = "cuDeviceGetAttribute";
        self.enter(CALL)?;
        self.check_device(CALL, device)?;
        let value = self.machine.cuda.lock().attributes.get(&attribute).copied();
        value.ok_or_else(|| refusal(CALL, CudaStatus::INVALID_VALUE))
    }

    fn pointer(&self, addr: u64) -> Result<PointerInfo> {
        self.enter("cuPointerGetAttributes")?;
        let memory = self.machine.memory.lock();
        Ok(match memory.find(addr) {
            Some(range) => PointerInfo {
                kind: range.kind,
                device: range.object.gpu,
                base: range.base,
                size: range.len,
                buffer_id: range.buffer_id,
                exportable: range.kind == MemoryKind::Vmm && range.exportable,
            },
            None => PointerInfo {
                kind: MemoryKind::Unknown,
                device: -1,
                base: addr,
                size: 0,
                buffer_id: 0,
                exportable: false,
            },
        })
    }

    fn buffer_id(&self, addr: u64) -> Result<u64> {
        self.enter("cuPointerGetAttribute")?;
        Ok(self.machine.memory.lock().find(addr).map_or(0, |range| range.buffer_id))
    }

    /// The layout is that seen on an H200 with driver 580: size of the allocation, pages of its block, offset in
    /// it, the resource manager's client and object.
    fn ipc_handle(&self, base: u64) -> Result<[u8; 64]> {
        const CALL: &str = "cuIpcGetMemHandle";
        self.enter(CALL)?;
        let range = self.range(CALL, base)?;
        if range.kind != MemoryKind::Malloc || range.base != base {
            return Err(refusal(CALL, CudaStatus::INVALID_VALUE));
        }
        let object = self.machine.memory.lock().object_handle(&range.object);
        let word = |value: usize| u32::try_from(value).map_err(|_| refusal(CALL, CudaStatus::NOT_SUPPORTED));
        let mut handle = [0; 64];
        handle[16..24].copy_from_slice(&(range.len as u64).to_le_bytes());
        handle[24..28].copy_from_slice(&word(range.object.size >> 12)?.to_le_bytes());
        handle[28..32].copy_from_slice(&word(range.offset)?.to_le_bytes());
        handle[48..52].copy_from_slice(&CLIENT.to_le_bytes());
        handle[52..56].copy_from_slice(&object.to_le_bytes());
        Ok(handle)
    }

    fn export_fd(&self, addr: u64) -> Result<OwnedFd> {
        const CALL: &str = "cuMemExportToShareableHandle";
        self.enter("cuMemRetainAllocationHandle")?;
        let range = self.range("cuMemRetainAllocationHandle", addr)?;
        if range.kind != MemoryKind::Vmm {
            return Err(refusal("cuMemRetainAllocationHandle", CudaStatus::INVALID_VALUE));
        }
        self.enter(CALL)?;
        if !range.exportable {
            return Err(refusal(CALL, CudaStatus::INVALID_VALUE));
        }
        range.object.fd().try_clone_to_owned().map_err(|e| file_error(CALL, e))
    }

    /// See [`dma_buf_offset`](super::dma_buf_offset). A range over several allocations is refused.
    fn dma_buf(&self, addr: u64, len: usize, _pcie: bool) -> Result<OwnedFd> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        self.enter(CALL)?;
        if self.machine.cuda.lock().attributes.get(&124) != Some(&1) {
            return Err(refusal(CALL, CudaStatus::NOT_SUPPORTED));
        }
        let range = self.range(CALL, addr)?;
        let pages = addr.is_multiple_of(HOST_PAGE) && (len as u64).is_multiple_of(HOST_PAGE) && len > 0;
        let gpu = matches!(range.kind, MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool);
        // A page that the allocation fills only in part is given whole.
        let end = (range.base + range.len as u64).next_multiple_of(HOST_PAGE);
        if !pages || !gpu || len as u64 > end - addr {
            return Err(refusal(CALL, CudaStatus::INVALID_VALUE));
        }
        let offset = (range.offset + offset_in(&range, addr)) as u64;
        range.object.dma_buf(offset).map_err(|e| file_error(CALL, e))
    }

    fn alloc(&self, device: i32, len: usize, kind: AllocKind) -> Result<u64> {
        if len == 0 {
            return Err(Error::invalid("length", len, "at least one byte"));
        }
        let raw = self.allocate(device, len, kind).map_err(|error| match error {
            Error::Cuda { status: CudaStatus::OUT_OF_MEMORY, .. } => {
                Error::Exhausted { what: "GPU memory", len, fix: CudaStatus::OUT_OF_MEMORY.fix() }
            }
            other => other,
        })?;
        let addr = raw.next_multiple_of(GPU_PAGE as u64);
        self.allocations.lock().insert(addr, raw);
        Ok(addr)
    }

    unsafe fn free(&self, addr: u64) -> Result<()> {
        self.enter("cuMemFree")?;
        let raw = self.allocations.lock().remove(&addr);
        let range = raw.and_then(|raw| self.machine.memory.lock().free(raw));
        range.map(drop).ok_or_else(|| refusal("cuMemFree", CudaStatus::INVALID_VALUE))
    }

    unsafe fn copy_to_device(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
        const CALL: &str = "cuMemcpyHtoDAsync";
        self.enter(CALL)?;
        self.walk(CALL, device, dst, len, |range, offset, done, part| {
            let mut bytes = vec![0; part];
            // SAFETY: within the `len` bytes that the caller vouches for.
            let at = unsafe { src.add(done) };
            // SAFETY: as above; `bytes` is memory of its own.
            unsafe { at.copy_to_nonoverlapping(bytes.as_mut_ptr(), part) };
            range.object.write(offset, &bytes)
        })
    }

    unsafe fn copy_from_device(&self, device: i32, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        const CALL: &str = "cuMemcpyDtoHAsync";
        self.enter(CALL)?;
        self.walk(CALL, device, src, len, |range, offset, done, part| {
            let mut bytes = vec![0; part];
            range.object.read(offset, &mut bytes)?;
            // SAFETY: within the `len` bytes that the caller vouches for.
            let at = unsafe { dst.add(done) };
            // SAFETY: as above; `bytes` is memory of its own.
            unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), part) };
            Ok(())
        })
    }

    fn flush(&self, device: i32) -> Result<()> {
        const CALL: &str = "cuFlushGPUDirectRDMAWrites";
        self.enter(CALL)?;
        self.check_device(CALL, device)
    }
}

/// The PCI address of a simulated GPU.
pub fn pci(ordinal: i32) -> String {
    format!("0000:{:02x}:00.0", 0x0f + ordinal)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::standin::{Object, dma_buf_offset};

    const RESERVED: u64 = 0x7e00_0000_0000;

    fn machine() -> (Arc<Machine>, Arc<SimulatedCuda>) {
        let machine = Machine::new(2);
        let cuda = SimulatedCuda::new(&machine);
        (machine, cuda)
    }

    fn write(cuda: &dyn Cuda, device: i32, dst: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: a whole slice.
        unsafe { cuda.copy_to_device(device, dst, bytes.as_ptr(), bytes.len()) }
    }

    fn read(cuda: &dyn Cuda, device: i32, src: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        // SAFETY: a whole vector.
        unsafe { cuda.copy_from_device(device, bytes.as_mut_ptr(), src, len) }?;
        Ok(bytes)
    }

    fn status(error: Error) -> (&'static str, CudaStatus) {
        match error {
            Error::Cuda { call, status, .. } => (call, status),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn both_kinds_of_memory_are_aligned_and_keep_bytes_until_freed() {
        let (_machine, cuda) = machine();
        for kind in [AllocKind::Malloc, AllocKind::Vmm] {
            let addr = cuda.alloc(1, 100_000, kind).unwrap();
            let info = cuda.pointer(addr + 99_999).unwrap();
            assert!(addr.is_multiple_of(65536));
            assert!(info.base <= addr && addr + 100_000 <= info.base + info.size as u64, "{info:x?}");
            assert_eq!(info.device, 1);
            assert_eq!(info.exportable, kind == AllocKind::Vmm);
            write(&*cuda, 1, addr + 99_990, b"0123456789").unwrap();
            assert_eq!(read(&*cuda, 1, addr + 99_989, 11).unwrap(), b"\x000123456789");
            // SAFETY: nothing uses it.
            unsafe { cuda.free(addr) }.unwrap();
            assert_eq!(cuda.pointer(addr).unwrap().kind, MemoryKind::Unknown);
            // SAFETY: refused.
            assert_eq!(status(unsafe { cuda.free(addr) }.unwrap_err()).1, CudaStatus::INVALID_VALUE);
        }
    }

    #[test]
    fn a_full_gpu_is_exhausted_and_recovers() {
        let (_machine, cuda) = machine();
        let most = cuda.alloc(0, 1000 << 20, AllocKind::Vmm).unwrap();
        let error = cuda.alloc(0, 100 << 20, AllocKind::Malloc).unwrap_err();
        assert!(matches!(error, Error::Exhausted { what: "GPU memory", len: 104_857_600, .. }), "{error}");
        cuda.alloc(1, 100 << 20, AllocKind::Malloc).unwrap();
        // SAFETY: nothing uses it.
        unsafe { cuda.free(most) }.unwrap();
        cuda.alloc(0, 100 << 20, AllocKind::Malloc).unwrap();
        assert!(cuda.alloc(0, usize::MAX, AllocKind::Malloc).is_err());
        assert!(cuda.alloc(0, usize::MAX, AllocKind::Vmm).is_err());
    }

    #[test]
    fn copies_stay_inside_their_allocations_and_gpu() {
        let (machine, cuda) = machine();
        let addr = machine.memory.lock().alloc(0, 4096, MemoryKind::Pool).unwrap();
        assert_eq!(status(write(&*cuda, 1, addr, b"x").unwrap_err()).1, CudaStatus::INVALID_VALUE);
        assert_eq!(status(write(&*cuda, 7, addr, b"x").unwrap_err()).1, CudaStatus::INVALID_DEVICE);
        assert_eq!(status(write(&*cuda, 0, addr + 4095, b"xy").unwrap_err()).1, CudaStatus::INVALID_VALUE);
        write(&*cuda, 0, addr + 4095, b"x").unwrap();
    }

    #[test]
    fn a_copy_crosses_adjacent_mappings() {
        let (machine, cuda) = machine();
        let mut memory = machine.memory.lock();
        let (a, b) = (Object::new(0, 1 << 21).unwrap(), Object::new(0, 1 << 21).unwrap());
        memory.insert(RESERVED, 1 << 20, a.clone(), 4096, MemoryKind::Vmm);
        memory.insert(RESERVED + (1 << 20), 1 << 20, b.clone(), 0, MemoryKind::Vmm);
        drop(memory);
        write(&*cuda, 0, RESERVED + (1 << 20) - 2, b"abcd").unwrap();
        let mut two = [0; 2];
        a.read((1 << 20) + 4096 - 2, &mut two).unwrap();
        assert_eq!(&two, b"ab");
        b.read(0, &mut two).unwrap();
        assert_eq!(&two, b"cd");
        assert_eq!(read(&*cuda, 0, RESERVED + (1 << 20) - 2, 4).unwrap(), b"abcd");
    }

    #[test]
    fn an_ipc_handle_names_the_block_and_the_place_in_it() {
        let (machine, cuda) = machine();
        let first = machine.memory.lock().alloc(0, 700, MemoryKind::Malloc).unwrap();
        let second = machine.memory.lock().alloc(0, 256, MemoryKind::Malloc).unwrap();
        let handle = cuda.ipc_handle(second).unwrap();
        let word = |at: usize| u32::from_le_bytes(handle[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(handle[16..24].try_into().unwrap()), 256);
        assert_eq!((word(24), word(28), word(48)), (512, 1024, CLIENT));
        let object = machine.memory.lock().object_by_handle(word(52)).unwrap();
        write(&*cuda, 0, second, b"here").unwrap();
        let mut seen = [0; 4];
        object.read(1024, &mut seen).unwrap();
        assert_eq!(&seen, b"here");
        assert_eq!(cuda.ipc_handle(first).unwrap()[52..56], handle[52..56], "the two share a block");
        assert!(cuda.ipc_handle(second + 1).is_err(), "not the beginning of an allocation");
        let pool = machine.memory.lock().alloc(0, 256, MemoryKind::Pool).unwrap();
        assert_eq!(
            status(cuda.ipc_handle(pool).unwrap_err()),
            ("cuIpcGetMemHandle", CudaStatus::INVALID_VALUE)
        );
    }

    #[test]
    fn handles_of_freed_objects_vanish_unless_held() {
        let (machine, cuda) = machine();
        let base = machine.memory.lock().alloc(0, 4 << 20, MemoryKind::Malloc).unwrap();
        let handle = u32::from_le_bytes(cuda.ipc_handle(base).unwrap()[52..56].try_into().unwrap());
        let held = machine.memory.lock().object_by_handle(handle).unwrap();
        machine.memory.lock().free(base).unwrap();
        assert!(machine.memory.lock().object_by_handle(handle).is_some());
        drop(held);
        assert!(machine.memory.lock().object_by_handle(handle).is_none());
    }

    #[test]
    fn an_exported_descriptor_leads_back_to_its_object() {
        let (machine, cuda) = machine();
        let addr = cuda.alloc(0, 1, AllocKind::Vmm).unwrap();
        let other = cuda.alloc(0, 1, AllocKind::Vmm).unwrap();
        let fd = cuda.export_fd(addr + 7).unwrap();
        let memory = machine.memory.lock();
        let found = memory.object_by_fd(fd.as_fd()).unwrap().unwrap();
        assert!(Arc::ptr_eq(&found, &memory.find(addr).unwrap().object));
        assert!(!Arc::ptr_eq(&found, &memory.find(other).unwrap().object));
        let foreign = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(memory.object_by_fd(foreign.as_fd()).unwrap().is_none());
        drop(memory);
        machine.memory.lock().set_exportable(addr, false);
        assert!(!cuda.pointer(addr).unwrap().exportable);
        assert_eq!(status(cuda.export_fd(addr).unwrap_err()).0, "cuMemExportToShareableHandle");
        let malloc = cuda.alloc(0, 1, AllocKind::Malloc).unwrap();
        assert_eq!(status(cuda.export_fd(malloc).unwrap_err()).0, "cuMemRetainAllocationHandle");
    }

    #[test]
    fn a_dma_buf_knows_where_it_begins_and_holds_the_memory() {
        let (machine, cuda) = machine();
        machine.memory.lock().alloc(0, 4096, MemoryKind::Malloc).unwrap();
        let addr = machine.memory.lock().alloc(0, 10_000, MemoryKind::Malloc).unwrap();
        write(&*cuda, 0, addr, b"kept").unwrap();
        let fd = cuda.dma_buf(addr, 12_288, false).unwrap();
        assert_eq!(dma_buf_offset(fd.as_fd()).unwrap(), 4096);
        let object = machine.memory.lock().find(addr).unwrap().object.clone();
        assert_eq!(dma_buf_offset(object.fd()).unwrap(), 0);
        let found = machine.memory.lock().object_by_fd(fd.as_fd()).unwrap().unwrap();
        assert!(Arc::ptr_eq(&found, &object));
        machine.memory.lock().free(addr).unwrap();
        drop((object, found));
        let mut seen = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::from(fd), &mut seen, 4096).unwrap();
        assert_eq!(&seen, b"kept");
    }

    #[test]
    fn a_dma_buf_needs_pages_of_gpu_memory_and_a_driver_that_makes_them() {
        let (machine, cuda) = machine();
        let addr = machine.memory.lock().alloc(0, 8192, MemoryKind::Pool).unwrap();
        for (addr, len) in [(addr + 512, 4096), (addr, 4095), (addr, 0), (addr, 12_288), (addr + 8192, 4096)]
        {
            assert_eq!(status(cuda.dma_buf(addr, len, true).unwrap_err()).1, CudaStatus::INVALID_VALUE);
        }
        let managed = machine.memory.lock().alloc(0, 8192, MemoryKind::Managed).unwrap();
        assert!(cuda.dma_buf(managed, 4096, false).is_err());
        machine.cuda.lock().attributes.insert(124, 0);
        assert_eq!(status(cuda.dma_buf(addr, 8192, true).unwrap_err()).1, CudaStatus::NOT_SUPPORTED);
    }

    #[test]
    fn each_call_fails_when_the_machine_says_so() {
        let (machine, cuda) = machine();
        let addr = cuda.alloc(0, 4096, AllocKind::Vmm).unwrap();
        let calls: [(&str, &dyn Fn() -> Result<()>); 11] = [
            ("cuDriverGetVersion", &|| cuda.driver_version().map(drop)),
            ("cuDeviceGetCount", &|| cuda.devices().map(drop)),
            ("cuDeviceGetAttribute", &|| cuda.device_attribute(0, 124).map(drop)),
            ("cuPointerGetAttributes", &|| cuda.pointer(addr).map(drop)),
            ("cuMemRetainAllocationHandle", &|| cuda.export_fd(addr).map(drop)),
            ("cuMemExportToShareableHandle", &|| cuda.export_fd(addr).map(drop)),
            ("cuMemGetHandleForAddressRange", &|| cuda.dma_buf(addr, 4096, false).map(drop)),
            ("cuMemcpyHtoDAsync", &|| write(&*cuda, 0, addr, b"x")),
            ("cuMemcpyDtoHAsync", &|| read(&*cuda, 0, addr, 1).map(drop)),
            ("cuFlushGPUDirectRDMAWrites", &|| cuda.flush(0)),
            ("cuMemCreate", &|| cuda.alloc(0, 1, AllocKind::Vmm).map(drop)),
        ];
        for (name, call) in calls {
            call().unwrap();
            machine.fail(name, 719);
            assert_eq!(status(call().unwrap_err()), (name, CudaStatus::LAUNCH_FAILED));
            machine.fail(name, 0);
            call().unwrap();
        }
    }

    #[test]
    fn settings_are_those_of_the_machine() {
        let (machine, cuda) = machine();
        assert_eq!(cuda.driver_version().unwrap(), 13000);
        machine.cuda.lock().driver_version = 13030;
        assert_eq!(cuda.driver_version().unwrap(), 13030);
        assert_eq!(status(cuda.device_attribute(0, 152).unwrap_err()).1, CudaStatus::INVALID_VALUE);
        machine.cuda.lock().attributes.insert(152, 1);
        assert_eq!(cuda.device_attribute(0, 152).unwrap(), 1);
        let gpus = cuda.devices().unwrap();
        assert_eq!((gpus.len(), gpus[1].pci.as_str()), (2, "0000:10:00.0"));
    }
}
