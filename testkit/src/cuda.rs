//! The CUDA driver of the simulated machine.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gdrcopy::cuda::{
    AllocKind, Cuda, CudaSource, CudaStatus, GpuInfo, MemoryKind, Objects, Piece, PointerInfo,
};
use gdrcopy::{Error, Result};
use parking_lot::Mutex;

use crate::machine::{CLIENT, Machine, VaRange, pci};

/// Host pages, in which dma-bufs are cut; bytes.
const HOST_PAGE: u64 = 4096;
/// GPU pages, to which [`Cuda::alloc`] aligns; bytes.
const GPU_PAGE: usize = 64 << 10;
/// Granularity of `cuMemCreate`; bytes.
const GRANULARITY: usize = 2 << 20;

/// A simulated `libcuda`. Every call first looks whether [`Machine::fail`] wants it to fail: under the name
/// that the entry point has in the manual, with the `CUresult` to return. With the fault `no bounds` it does not tell
/// where allocations begin and end.
#[derive(Debug)]
pub struct SimulatedCuda {
    machine: Arc<Machine>,
    /// What [`Cuda::alloc`] returned, and where the allocation really begins.
    allocations: Mutex<HashMap<u64, u64>>,
}

impl SimulatedCuda {
    /// The driver of this machine.
    pub fn new(machine: &Arc<Machine>) -> Arc<Self> {
        Arc::new(Self { machine: machine.clone(), allocations: Mutex::default() })
    }

    /// Fails as the machine was told to.
    fn enter(&self, call: &'static str) -> Result<()> {
        fail_as_told(&self.machine, call)
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
            let range = match self.range(call, at) {
                Err(_) if done == 0 => return Err(unknown(addr)),
                found => found?,
            };
            if range.object.gpu != device {
                return Err(invalid("device", device, "the GPU that the memory is on"));
            }
            let inside = offset_in(&range, at);
            let part = (range.len - inside).min(len - done);
            step(&range, range.offset + inside, done, part).map_err(|e| file_error(call, e))?;
            done += part;
        }
        Ok(())
    }
}

/// Fails with the status that the machine was told for this call, if any.
fn fail_as_told(machine: &Machine, call: &'static str) -> Result<()> {
    machine.fault(call).map_or(Ok(()), |code| Err(refusal(call, CudaStatus(code.unsigned_abs()))))
}

fn unknown(addr: u64) -> Error {
    Error::NotMappable {
        addr,
        found: "no CUDA memory of this process",
        fix: "pass the address of a live allocation",
    }
}

fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Error {
    Error::InvalidArgument { what, value: value.to_string(), expected }
}

fn refusal(call: &'static str, status: CudaStatus) -> Error {
    Error::Cuda { call, status, fix: status.fix() }
}

/// A failure of the memory file behind an object.
fn file_error(call: &'static str, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => refusal(call, CudaStatus::OUT_OF_MEMORY),
        _ => Error::Sys {
            call: format!("{call} of the simulated machine"),
            error,
            fix: "see the limits of this process",
        },
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
        let settings = self.machine.cuda.lock();
        let info = |ordinal| GpuInfo {
            ordinal,
            pci: settings.pci.clone().unwrap_or_else(|| pci(ordinal)),
            name: settings.name.clone(),
        };
        Ok((0..gpus).map(info).collect())
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
        let bounded = self.machine.fault("no bounds").is_none();
        let memory = self.machine.memory.lock();
        Ok(match memory.find(addr) {
            Some(range) => PointerInfo {
                kind: range.kind,
                device: range.object.gpu,
                base: if bounded { range.base } else { 0 },
                size: if bounded { range.len } else { 0 },
                buffer_id: range.buffer_id,
            },
            None => PointerInfo { kind: MemoryKind::Unknown, device: -1, base: addr, size: 0, buffer_id: 0 },
        })
    }

    fn buffer_id(&self, addr: u64) -> Result<u64> {
        self.enter("cuPointerGetAttribute")?;
        Ok(self.machine.memory.lock().find(addr).map_or(0, |range| range.buffer_id))
    }

    /// See [`dma_buf_offset`](super::dma_buf_offset). Pages that an allocation fills only in part are given whole;
    /// a range over several objects is refused.
    fn dma_buf(&self, memory: u64, addr: u64, len: usize, _pcie: bool) -> Result<OwnedFd> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        self.enter(CALL)?;
        if self.machine.cuda.lock().attributes.get(&124) != Some(&1) {
            return Err(refusal(CALL, CudaStatus::NOT_SUPPORTED));
        }
        let invalid = || refusal(CALL, CudaStatus::INVALID_VALUE);
        if !addr.is_multiple_of(HOST_PAGE) || !(len as u64).is_multiple_of(HOST_PAGE) || len == 0 {
            return Err(invalid());
        }
        let all = self.machine.memory.lock();
        // By it the real driver's context is found.
        all.find(memory).ok_or_else(|| unknown(memory))?;
        let page = |at: u64| all.touching(at, HOST_PAGE).ok_or_else(invalid);
        let (first, last) = (page(addr)?, page(addr + len as u64 - HOST_PAGE)?);
        let gpu = matches!(first.kind, MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool);
        if !gpu || !Arc::ptr_eq(&first.object, &last.object) {
            return Err(invalid());
        }
        let object_base = first.base - first.offset as u64;
        first.object.dma_buf(addr - object_base).map_err(|e| file_error(CALL, e))
    }

    /// Of whatever lies in the driver's objects, whether allocated or not.
    fn objects(&self, memory: u64, addr: u64, len: usize) -> Result<Objects> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        self.enter(CALL)?;
        let refused = || refusal(CALL, CudaStatus::INVALID_VALUE);
        if !addr.is_multiple_of(HOST_PAGE) || !(len as u64).is_multiple_of(HOST_PAGE) || len == 0 {
            return Err(refused());
        }
        let mut all = self.machine.memory.lock();
        all.find(memory).ok_or_else(|| unknown(memory))?;
        let (mut pieces, mut done) = (Vec::new(), 0);
        while done < len {
            let (object, offset, rest) = all.exported(addr + done as u64).ok_or_else(refused)?;
            let part = rest.min(len - done);
            pieces.push(Piece {
                object: all.object_handle(&object),
                offset: offset as u64,
                len: part as u64,
            });
            done += part;
        }
        Ok(Objects { client: CLIENT, pieces })
    }

    fn alloc(&self, device: i32, len: usize, kind: AllocKind) -> Result<u64> {
        if len == 0 {
            return Err(invalid("length", len, "at least one byte"));
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
        let vmm = self.machine.memory.lock().find(addr).is_some_and(|range| range.kind == MemoryKind::Vmm);
        self.enter(if vmm { "cuMemUnmap" } else { "cuMemFree" })?;
        let raw = self.allocations.lock().remove(&addr);
        let range = raw.and_then(|raw| self.machine.memory.lock().free(raw));
        range.map(drop).ok_or_else(|| {
            invalid("address", format_args!("{addr:#x}"), "one that alloc gave, not freed yet")
        })
    }

    unsafe fn copy_to_device(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
        const CALL: &str = "cuMemcpyHtoDAsync";
        self.enter(CALL)?;
        self.walk(CALL, device, dst, len, |range, offset, done, part| {
            let mut bytes = vec![0; part];
            // SAFETY: within the `len` bytes that the caller guarantees.
            let at = unsafe { src.add(done) };
            // SAFETY: within the caller's bytes; `bytes` is a separate allocation.
            unsafe { at.copy_to_nonoverlapping(bytes.as_mut_ptr(), part) };
            range.object.write(offset, &bytes)
        })
    }

    unsafe fn gather_from_device(&self, device: i32, dst: *mut u8, src: &[u64], len: usize) -> Result<()> {
        const CALL: &str = "cuMemcpyDtoHAsync";
        for (index, &src) in src.iter().enumerate() {
            self.enter(CALL)?;
            self.walk(CALL, device, src, len, |range, offset, done, part| {
                let bytes = range.object.read(offset, part)?;
                // SAFETY: within the bytes that the caller guarantees.
                let at = unsafe { dst.add(index * len + done) };
                // SAFETY: within the caller's bytes; `bytes` is a separate allocation.
                unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), part) };
                Ok(())
            })?;
        }
        Ok(())
    }

    fn flush(&self, device: i32, memory: u64) -> Result<()> {
        const CALL: &str = "cuFlushGPUDirectRDMAWrites";
        self.check_device(CALL, device)?;
        // Writes are in order for the owner.
        if self.machine.cuda.lock().attributes.get(&118).is_some_and(|&ordering| ordering >= 100) {
            return Ok(());
        }
        self.machine.memory.lock().find(memory).ok_or_else(|| unknown(memory))?;
        self.enter(CALL)
    }
}

/// A simulated `libcuda` that counts its initialisations. The machine's fault `cuInit` is a `CUresult`.
#[derive(Clone, Debug)]
pub struct UninitialisedCuda {
    machine: Arc<Machine>,
    cuda: Arc<SimulatedCuda>,
    initialised: Arc<AtomicUsize>,
}

impl UninitialisedCuda {
    /// The driver of this machine. Clones are the same driver.
    pub fn new(machine: &Arc<Machine>) -> Self {
        let cuda = SimulatedCuda::new(machine);
        Self { machine: machine.clone(), cuda, initialised: Arc::default() }
    }

    /// How often `cuInit` was called.
    pub fn initialised(&self) -> usize {
        self.initialised.load(Ordering::Relaxed)
    }
}

impl CudaSource for UninitialisedCuda {
    fn version(&self) -> Result<u32> {
        self.cuda.driver_version()
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        self.initialised.fetch_add(1, Ordering::Relaxed);
        fail_as_told(&self.machine, "cuInit")?;
        Ok(self.cuda.clone())
    }
}
