//! Memory registered with an RDMA device: host memory, and GPU memory by a dma-buf or by nvidia-peermem.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use gdrcopy::cuda::raw::layout::{RANGE_HANDLE_DMA_BUF, pointer_attribute};
use rdma_core_sys::verbs::{ibv_access_flags, ibv_mr};

use super::domain::Domain;
use super::explain::{Call, Memlock, failed_last, no_gpu_path};
use super::open::Open;
use super::sysfs::SYSFS;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, host_page};
use gdsync_device::{Access, TransferPath, Transport};

/// How the device got at the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Host,
    DmaBuf,
    Peermem,
}

impl Way {
    pub(super) fn transfer_path(self) -> TransferPath {
        match self {
            Self::Host => TransferPath::new(Transport::Card, "it is host memory"),
            Self::DmaBuf => TransferPath::new(Transport::CardFromGpu, "it is registered by a dma-buf"),
            Self::Peermem => TransferPath::new(
                Transport::CardFromGpu,
                "it is registered by nvidia-peermem: a dma-buf was refused",
            ),
        }
    }
}

/// A registered memory region. Deregistered when this is dropped; the memory must stay until then.
pub(crate) struct Region {
    domain: Arc<Domain>,
    mr: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    way: Way,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {:#x} of {:?} ({:?})", self.lkey, self.domain.open(), self.way)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let open = self.domain.open();
        // SAFETY: registered here, deregistered once.
        let errno = unsafe { open.verbs().ibv_dereg_mr(self.mr.as_ptr()) };
        if errno != 0 {
            tracing::error!(region = ?self, errno, "a memory region stays registered");
        }
    }
}

/// The rights of a region, as libibverbs names them. What the device never writes may be read in any order; what it writes is written in
/// order unless [`Access::RELAXED_ORDERING`] was asked for, as it may be polled.
fn rights(access: Access) -> ibv_access_flags {
    let rights = ibv_access_flags::from_bits_retain(access.bits());
    let is_written = access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if is_written { rights } else { rights | ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING }
}

/// Whether a module hands GPU addresses to the kernel's RDMA core.
pub(crate) fn has_peermem() -> bool {
    peermem_in(Path::new(SYSFS))
}

fn peermem_in(sysfs: &Path) -> bool {
    ["nvidia_peermem", "nv_peer_mem"].iter().any(|name| sysfs.join("module").join(name).is_dir())
}

impl Region {
    /// Registers memory with a device: the way follows from where it is.
    ///
    /// # Errors
    /// [`Error::Verbs`]; [`Error::Device`] for GPU memory where there is neither of the two ways.
    pub(crate) fn register(domain: &Arc<Domain>, memory: &Memory, access: Access) -> Result<Self> {
        match memory.gpu() {
            None => Self::register_host(domain, memory, access),
            Some(gpu) => Self::register_gpu(domain, gpu, memory, access),
        }
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(super) fn way(&self) -> Way {
        self.way
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    fn new(domain: &Arc<Domain>, mr: NonNull<ibv_mr>, way: Way) -> Self {
        // SAFETY: a region that was just made.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*mr.as_ptr()).rkey };
        Self { domain: domain.clone(), mr, lkey, rkey, way }
    }

    fn register_host(domain: &Arc<Domain>, memory: &Memory, access: Access) -> Result<Self> {
        let call = Call::Register { len: memory.len(), memlock: Memlock::here() };
        Self::by_address(domain, memory, access, &call, Way::Host)
    }

    fn by_address(
        domain: &Arc<Domain>,
        memory: &Memory,
        access: Access,
        call: &Call,
        way: Way,
    ) -> Result<Self> {
        let open = domain.open();
        let addr = usize::try_from(memory.addr()).expect("64-bit hosts only");
        let addr = std::ptr::with_exposed_provenance_mut::<c_void>(addr);
        // SAFETY: the memory is the caller's until the region is dropped; the device only gets what `access` says.
        let mr = unsafe { open.verbs().reg_mr(domain.raw().as_ptr(), addr, memory.len(), rights(access)) };
        match NonNull::new(mr) {
            Some(mr) => Ok(Self::new(domain, mr, way)),
            None => Err(failed_last("ibv_reg_mr", describe(open, memory), call)),
        }
    }

    fn register_gpu(domain: &Arc<Domain>, gpu: &Gpu, memory: &Memory, access: Access) -> Result<Self> {
        let dma_buf = match Self::by_dma_buf(domain, gpu, memory, access) {
            Ok(region) => return Ok(region),
            // The way is open; there is only no room.
            Err(error) if error.is_exhausted() => return Err(error),
            Err(error) => error.to_string(),
        };
        tracing::debug!(?memory, why = %dma_buf, "no registration by dma-buf");
        let peermem = if has_peermem() {
            let call = Call::RegisterGpu { len: memory.len() };
            match Self::by_address(domain, memory, access, &call, Way::Peermem) {
                Ok(region) => return Ok(region),
                Err(error) if error.is_exhausted() => return Err(error),
                Err(error) => error.to_string(),
            }
        } else {
            "the module nvidia_peermem is not loaded".into()
        };
        let device = format!("{} for GPU memory", domain.open().name());
        Err(Error::Device { device, why: no_gpu_path(&dma_buf, &peermem) })
    }

    fn by_dma_buf(domain: &Arc<Domain>, gpu: &Gpu, memory: &Memory, access: Access) -> Result<Self> {
        let open = domain.open();
        let Some(register) = open.verbs().ibv_reg_dmabuf_mr else {
            return Err(Error::Unsupported {
                what: "ibv_reg_dmabuf_mr",
                by: "the installed libibverbs",
                fix: "install rdma-core 34 or newer",
            });
        };
        let Pages { fd, offset, .. } = Pages::export(gpu, memory)?;
        let (addr, len) = (memory.addr(), memory.len());
        let rights = rights(access);
        // SAFETY: the range is inside the dma-buf, which the region keeps alive; the caller keeps the memory.
        let mr = unsafe { register(domain.raw().as_ptr(), offset, len, addr, fd.as_raw_fd(), rights) };
        match NonNull::new(mr) {
            Some(mr) => Ok(Self::new(domain, mr, Way::DmaBuf)),
            None => {
                Err(failed_last("ibv_reg_dmabuf_mr", describe(open, memory), &Call::RegisterDmaBuf { len }))
            }
        }
    }
}

/// The pages of GPU memory as a dma-buf.
pub(crate) struct Pages {
    pub(crate) fd: OwnedFd,
    /// Where the memory begins in it.
    pub(crate) offset: u64,
    /// Bytes of all pages.
    pub(crate) len: usize,
}

impl Pages {
    /// # Errors
    /// [`Error::Unsupported`] where the driver makes no dma-buf; [`Error::Cuda`].
    pub(crate) fn export(gpu: &Gpu, memory: &Memory) -> Result<Self> {
        if !gpu.capabilities().dma_buf {
            return Err(Error::Unsupported {
                what: "the export of GPU memory as a dma-buf (device attribute 124)",
                by: "this GPU's driver",
                fix: "use the driver's open kernel modules",
            });
        }
        order_copies(gpu, memory);
        // The driver exports pages of the host.
        let page = host_page() as u64;
        let offset = memory.addr() % page;
        let len = (offset + memory.len() as u64).next_multiple_of(page);
        let len = usize::try_from(len).expect("64-bit hosts only");
        let fd = export(gpu, memory.addr() - offset, len)?;
        Ok(Self { fd, offset, len })
    }
}

fn describe(open: &Open, memory: &Memory) -> String {
    format!("{memory:?} on {}", open.name())
}

/// A dma-buf of these pages.
fn export(gpu: &Gpu, start: u64, len: usize) -> Result<OwnedFd> {
    let mut fd: i32 = -1;
    let _current = gpu.enter()?;
    // SAFETY: a place for the descriptor; the driver checks the range.
    unsafe {
        gpu.api().mem_get_handle_for_address_range((&raw mut fd).cast(), start, len, RANGE_HANDLE_DMA_BUF, 0)
    }
    .map_err(Error::cuda("exporting GPU memory as a dma-buf"))?;
    // SAFETY: the driver made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has CUDA finish copies to this memory before they return, which otherwise could race with the device's traffic.
fn order_copies(gpu: &Gpu, memory: &Memory) {
    let on = 1u32;
    let Ok(_current) = gpu.enter() else { return };
    let value = (&raw const on).cast();
    // SAFETY: the attribute has four bytes; the driver checks the address.
    let done =
        unsafe { gpu.api().pointer_set_attribute(value, pointer_attribute::SYNC_MEMOPS, memory.addr()) };
    if let Err(error) = done {
        // Memory of pools and of cuMemCreate has no such attribute.
        tracing::debug!(%error, ?memory, "copies by CUDA are not ordered with traffic of the device");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_writes_is_only_relaxed_when_asked_for() {
        let relaxed = |access| rights(access).contains(ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING);
        assert!(relaxed(Access::empty()));
        assert!(relaxed(Access::REMOTE_READ));
        for access in [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::all()] {
            assert!(!relaxed(access), "{access:?}");
            assert!(!relaxed(access | Access::REMOTE_READ), "{access:?}");
        }
        for access in [Access::LOCAL_WRITE, Access::all()] {
            assert!(relaxed(access | Access::RELAXED_ORDERING), "asked for");
        }
        let all = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            | ibv_access_flags::IBV_ACCESS_REMOTE_READ
            | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC;
        assert_eq!(rights(Access::all()), all);
    }

    #[test]
    fn peermem_is_a_loaded_module() {
        let root = std::env::temp_dir().join(format!("gdsync-peermem-{}", std::process::id()));
        assert!(!peermem_in(&root));
        std::fs::create_dir_all(root.join("module/nvidia_peermem")).unwrap();
        assert!(peermem_in(&root));
        std::fs::remove_dir_all(root).unwrap();
    }
}
