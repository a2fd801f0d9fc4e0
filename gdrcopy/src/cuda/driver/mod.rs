//! The real CUDA driver.

mod alloc;
mod context;
mod copy;
mod pointer;

pub use self::pointer::info as pointer_info;

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use self::alloc::Allocation;
use self::context::Gpu;
use super::{AllocKind, Cuda, CudaSource, CudaStatus, GpuInfo, PointerInfo};
use crate::cuda::raw::layout::{
    FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER, HANDLE_TYPE_FD, ORDERING_OWNER, RANGE_FLAG_PCIE,
    RANGE_HANDLE_DMA_BUF, RDMA_WRITES_ORDERING,
};
use crate::cuda::raw::{Api, Relaxed};
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::system::check;

/// The `libcuda` of this machine.
#[derive(Debug)]
pub(crate) struct Installed;

impl CudaSource for Installed {
    fn version(&self) -> Result<u32> {
        version(&Api::load()?)
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        Ok(Arc::new(Driver::with(Api::load()?)?))
    }
}

/// A CUDA driver given as a table of entry points, in place of the installed one: an emulator, or a wrapper around the
/// table that [`Api::load`] gives.
#[derive(Debug)]
pub struct EntryPoints(Api);

impl EntryPoints {
    /// A driver of these entry points.
    ///
    /// # Safety
    /// Each entry point must do what the CUDA driver's manual says of it: the library passes addresses of its own memory for
    /// answers, and copies to and from the memory that the driver allocates.
    pub const unsafe fn new(api: Api) -> Self {
        Self(api)
    }
}

impl CudaSource for EntryPoints {
    fn version(&self) -> Result<u32> {
        version(&self.0)
    }

    fn initialise(&self) -> Result<Arc<dyn Cuda>> {
        Ok(Arc::new(Driver::with(self.0)?))
    }
}

fn version(api: &Api) -> Result<u32> {
    let mut version = 0;
    // SAFETY: a place for the answer.
    unsafe { api.driver_get_version(&mut version) }?;
    u32::try_from(version).map_err(|_| Error::invalid("CUDA version", version, "a positive number"))
}

/// `libcuda`, loaded and initialised.
struct Driver {
    api: Api,
    gpus: Vec<Gpu>,
    /// What [`Cuda::alloc`] gave and nobody freed, by address.
    allocations: Mutex<HashMap<u64, Allocation>>,
    owner: Owner,
}

impl Driver {
    fn with(api: Api) -> Result<Self> {
        // SAFETY: no flags are defined.
        unsafe { api.init(0) }?;
        let mut count = 0;
        // SAFETY: a place for the answer.
        unsafe { api.device_get_count(&mut count) }?;
        let gpus = (0..count).map(|ordinal| Gpu::new(&api, ordinal)).collect::<Result<_>>()?;
        Ok(Self { api, gpus, allocations: Mutex::default(), owner: Owner::this_process() })
    }

    fn gpu(&self, ordinal: i32) -> Result<&Gpu> {
        self.owner.check()?;
        let found = usize::try_from(ordinal).ok().and_then(|index| self.gpus.get(index));
        found.ok_or_else(|| Error::invalid("device", ordinal, "the CUDA ordinal of a visible GPU"))
    }

    fn attribute(&self, gpu: &Gpu, attribute: u32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a place for the answer; the driver checks the number.
        unsafe { self.api.device_get_attribute(&mut value, attribute, gpu.device) }?;
        Ok(value)
    }

    /// Whether what comes over PCIe is visible to the GPU's kernels without a flush.
    fn orders_writes(&self, gpu: &Gpu) -> Result<bool> {
        if let Some(&known) = gpu.orders_writes.get() {
            return Ok(known);
        }
        let ordering = match self.attribute(gpu, RDMA_WRITES_ORDERING) {
            // A driver older than the question.
            Err(Error::Cuda { status: CudaStatus::INVALID_VALUE, .. }) => 0,
            told => told?,
        };
        Ok(*gpu.orders_writes.get_or_init(|| ordering >= ORDERING_OWNER))
    }

    fn info(&self, gpu: &Gpu) -> Result<GpuInfo> {
        let id = text(|buffer, len| {
            // SAFETY: `buffer` has `len` bytes.
            unsafe { self.api.device_get_pci_bus_id(buffer, len, gpu.device) }
        })?;
        let name = text(|buffer, len| {
            // SAFETY: as above.
            unsafe { self.api.device_get_name(buffer, len, gpu.device) }
        })?;
        let pci = sysfs_address(&id).ok_or_else(|| {
            Error::invalid("PCI address from cuDeviceGetPCIBusId", &id, "domain:bus:device.function")
        })?;
        Ok(GpuInfo { ordinal: gpu.ordinal, pci, name })
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({} GPUs)", self.gpus.len())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // CUDA does not work in a forked child, and the parent still uses all of this.
        if self.owner.is_caller() {
            self.gpus.iter().for_each(|gpu| gpu.release(&self.api));
        }
    }
}

impl Cuda for Driver {
    fn driver_version(&self) -> Result<u32> {
        version(&self.api)
    }

    fn devices(&self) -> Result<Vec<GpuInfo>> {
        self.gpus.iter().map(|gpu| self.info(gpu)).collect()
    }

    fn device_attribute(&self, device: i32, attribute: u32) -> Result<i32> {
        self.attribute(self.gpu(device)?, attribute)
    }

    fn pointer(&self, addr: u64) -> Result<PointerInfo> {
        self.owner.check()?;
        pointer::info(&self.api, addr)
    }

    fn buffer_id(&self, addr: u64) -> Result<u64> {
        self.owner.check()?;
        pointer::buffer_id(&self.api, addr)
    }

    fn ipc_handle(&self, base: u64) -> Result<[u8; 64]> {
        let _current = self.home(base)?.1.enter(&self.api)?;
        let mut handle = [0; 64];
        // SAFETY: a place for the answer; the driver checks the address.
        unsafe { self.api.ipc_get_mem_handle(&mut handle, base) }?;
        Ok(handle)
    }

    fn export_fd(&self, addr: u64) -> Result<OwnedFd> {
        self.owner.check()?;
        let _relaxed = Relaxed::enter(&self.api);
        let mut memory = 0;
        // SAFETY: a place for the answer; the driver checks the address and does not look behind it.
        unsafe {
            self.api
                .mem_retain_allocation_handle(&mut memory, std::ptr::without_provenance_mut(address(addr)?))
        }?;
        let fd = received_fd(|fd| {
            // SAFETY: a place for the descriptor; the handle was given above.
            unsafe { self.api.mem_export_to_shareable_handle(fd.cast(), memory, HANDLE_TYPE_FD, 0) }
        });
        // SAFETY: retained above, given back once.
        unsafe { self.api.mem_release(memory) }?;
        fd
    }

    fn dma_buf(&self, memory: u64, addr: u64, len: usize, pcie: bool) -> Result<OwnedFd> {
        let _current = self.home(memory)?.1.enter(&self.api)?;
        let flags = if pcie { RANGE_FLAG_PCIE } else { 0 };
        received_fd(|fd| {
            // SAFETY: a place for the descriptor; the driver checks the range.
            unsafe {
                self.api.mem_get_handle_for_address_range(fd.cast(), addr, len, RANGE_HANDLE_DMA_BUF, flags)
            }
        })
    }

    fn alloc(&self, device: i32, len: usize, kind: AllocKind) -> Result<u64> {
        self.allocate(self.gpu(device)?, len, kind)
    }

    unsafe fn free(&self, addr: u64) -> Result<()> {
        // SAFETY: the caller vouches for the memory.
        unsafe { self.give_back(addr) }
    }

    unsafe fn copy_to_device(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
        // SAFETY: what the caller promised.
        unsafe { self.copy_in(device, dst, src, len) }
    }

    unsafe fn copy_from_device(&self, device: i32, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        // SAFETY: what the caller promised.
        unsafe { self.copy_out(device, dst, src, len) }
    }

    fn flush(&self, device: i32, memory: u64) -> Result<()> {
        if self.orders_writes(self.gpu(device)?)? {
            return Ok(());
        }
        let _current = self.home(memory)?.1.enter(&self.api)?;
        // SAFETY: plain numbers; a context is current.
        unsafe { self.api.flush_gpu_direct_rdma_writes(FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER) }
    }
}

/// A GPU address as a number of pointer size.
fn address(addr: u64) -> Result<usize> {
    usize::try_from(addr).map_err(|_| Error::invalid("address", addr, "at most the size of a pointer"))
}

/// Reads a text that the driver writes into a buffer of a given size.
fn text(fill: impl FnOnce(*mut c_char, i32) -> Result<()>) -> Result<String> {
    const LEN: u16 = 256;
    let mut buffer = [0u8; LEN as usize];
    fill(buffer.as_mut_ptr().cast(), LEN.into())?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// Takes over a file descriptor that the driver makes. It does not pass to programs that this one starts:
/// there it would hold the GPU memory.
fn received_fd(make: impl FnOnce(*mut i32) -> Result<()>) -> Result<OwnedFd> {
    let mut raw = -1;
    make(&mut raw)?;
    if raw < 0 {
        return Err(Error::invalid("file descriptor from CUDA", raw, "0 or more"));
    }
    // SAFETY: the driver made it for the caller.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: an open descriptor and a plain number.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) }).map_err(|e| {
        Error::sys("fcntl(FD_CLOEXEC)", e, "the descriptor from CUDA was closed by another thread")
    })?;
    Ok(fd)
}

/// CUDA's PCI address as `/sys/bus/pci/devices` writes it. CUDA's is in capitals and its domain may have more
/// zeros in front.
pub fn sysfs_address(id: &str) -> Option<String> {
    let mut parts = id.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok());
    let (domain, bus, device, function) = (parts.next()??, parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;
