//! Protection domains and memory regions: host memory, and GPU memory by dma-buf or nvidia-peermem.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gdrcopy::cuda::raw::layout::{RANGE_HANDLE_DMA_BUF, pointer_attribute};
use parking_lot::Mutex;
use rdma_core_sys::verbs::{ibv_access_flags, ibv_mr, ibv_pd};

use super::explain::{Call, Memlock, failed_last, no_gpu_path};
use super::open::Open;
use super::sysfs::SYSFS;
use crate::Raw;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, host_page};
use gdsync_device::{Access, MrKeys, TransferPath, Transport};

/// How the device accesses the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registration {
    Host,
    DmaBuf,
    Peermem,
}

impl Registration {
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

/// A memory region, deregistered on drop. Whoever registers it keeps its memory until then.
pub(crate) struct Region {
    domain: Arc<Domain>,
    mr: Raw<ibv_mr>,
    lkey: u32,
    rkey: u32,
    registration: Registration,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {:#x} of {:?} ({:?})", self.lkey, self.domain.open(), self.registration)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let open = self.domain.open();
        // SAFETY: registered by `register`, deregistered only here.
        let errno = unsafe { open.verbs().ibv_dereg_mr(self.mr.as_ptr()) };
        if errno != 0 {
            tracing::error!(region = ?self, errno, "a memory region stays registered");
        }
    }
}

/// Access flags for libibverbs. Regions that the device never writes use relaxed ordering. Regions that it writes keep
/// PCIe order unless [`Access::RELAXED_ORDERING`] is requested, because they may be polled.
fn rights(access: Access) -> ibv_access_flags {
    let rights = ibv_access_flags::from_bits_retain(access.bits());
    let is_written = access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if is_written { rights } else { rights | ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING }
}

/// Whether a loaded module provides peer memory of GPUs to the RDMA core.
pub(crate) fn has_peermem() -> bool {
    peermem_in(Path::new(SYSFS))
}

fn peermem_in(sysfs: &Path) -> bool {
    ["nvidia_peermem", "nv_peer_mem"].iter().any(|name| sysfs.join("module").join(name).is_dir())
}

impl Region {
    /// Registers host or GPU memory.
    ///
    /// # Errors
    /// [`Error::Verbs`] if registration fails; [`Error::Device`] for GPU memory if neither way works.
    pub(crate) fn register(domain: &Arc<Domain>, memory: &Memory, access: Access) -> Result<Self> {
        match (memory.gpu(), memory.dma_buf()) {
            (Some(gpu), _) => Self::register_gpu(domain, gpu, memory, access),
            (None, Some((fd, offset))) => Self::by_dma_buf(domain, memory, (fd, offset), access),
            (None, None) => {
                let call = Call::Register { len: memory.len(), memlock: Memlock::here() };
                Self::by_address(domain, memory, access, &call, Registration::Host)
            }
        }
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(super) fn registration(&self) -> Registration {
        self.registration
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    fn new(domain: &Arc<Domain>, mr: NonNull<ibv_mr>, registration: Registration) -> Self {
        // SAFETY: `mr` was just created.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        // SAFETY: `mr` was just created.
        let rkey = unsafe { (*mr.as_ptr()).rkey };
        Self { domain: domain.clone(), mr: Raw(mr), lkey, rkey, registration }
    }

    fn by_address(
        domain: &Arc<Domain>,
        memory: &Memory,
        access: Access,
        call: &Call,
        registration: Registration,
    ) -> Result<Self> {
        let open = domain.open();
        let addr = usize::try_from(memory.addr()).expect("64-bit hosts only");
        let addr = std::ptr::with_exposed_provenance_mut::<c_void>(addr);
        // SAFETY: `memory` stays mapped while the region lives; the device gets only the rights in `access`.
        let mr = unsafe { open.verbs().reg_mr(domain.raw().as_ptr(), addr, memory.len(), rights(access)) };
        match NonNull::new(mr) {
            Some(mr) => Ok(Self::new(domain, mr, registration)),
            None => Err(failed_last("ibv_reg_mr", describe(open, memory), call)),
        }
    }

    fn register_gpu(domain: &Arc<Domain>, gpu: &Gpu, memory: &Memory, access: Access) -> Result<Self> {
        let exported = Pages::export(gpu, memory);
        let by_dma_buf = exported
            .and_then(|pages| Self::by_dma_buf(domain, memory, (pages.fd.as_fd(), pages.offset), access));
        let dma_buf = match by_dma_buf {
            Ok(region) => return Ok(region),
            // A lack of resources, not of support.
            Err(error) if error.is_exhausted() => return Err(error),
            Err(error) => error.to_string(),
        };
        tracing::debug!(?memory, why = %dma_buf, "no registration by dma-buf");
        let peermem = if has_peermem() {
            let call = Call::RegisterGpu { len: memory.len() };
            match Self::by_address(domain, memory, access, &call, Registration::Peermem) {
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

    fn by_dma_buf(
        domain: &Arc<Domain>,
        memory: &Memory,
        (fd, offset): (BorrowedFd<'_>, u64),
        access: Access,
    ) -> Result<Self> {
        let open = domain.open();
        let Some(register) = open.verbs().ibv_reg_dmabuf_mr else {
            return Err(Error::Unsupported {
                what: "ibv_reg_dmabuf_mr",
                by: "the installed libibverbs",
                fix: "install rdma-core 34 or newer",
            });
        };
        let (addr, len) = (memory.addr(), memory.len());
        let rights = rights(access);
        // SAFETY: the range lies in the dma-buf, which the kernel keeps.
        let mr = unsafe { register(domain.raw().as_ptr(), offset, len, addr, fd.as_raw_fd(), rights) };
        match NonNull::new(mr) {
            Some(mr) => Ok(Self::new(domain, mr, Registration::DmaBuf)),
            None => {
                Err(failed_last("ibv_reg_dmabuf_mr", describe(open, memory), &Call::RegisterDmaBuf { len }))
            }
        }
    }
}

/// GPU pages as a dma-buf.
pub(crate) struct Pages {
    pub(crate) fd: OwnedFd,
    /// Offset of the memory.
    pub(crate) offset: u64,
    /// Total bytes.
    pub(crate) len: usize,
}

impl Pages {
    /// Exports the pages of `memory`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the driver does not export dma-bufs; [`Error::Cuda`] if the export fails.
    pub(crate) fn export(gpu: &Gpu, memory: &Memory) -> Result<Self> {
        if !gpu.capabilities().dma_buf {
            return Err(Error::Unsupported {
                what: "the export of GPU memory as a dma-buf (device attribute 124)",
                by: "this GPU's driver",
                fix: "use the driver's open kernel modules",
            });
        }
        order_copies(gpu, memory);
        // The driver exports whole host pages.
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

/// Exports pages as a dma-buf.
fn export(gpu: &Gpu, start: u64, len: usize) -> Result<OwnedFd> {
    let mut fd: i32 = -1;
    let _current = gpu.enter()?;
    // SAFETY: `fd` is writable; the driver checks the range.
    unsafe {
        gpu.api().mem_get_handle_for_address_range((&raw mut fd).cast(), start, len, RANGE_HANDLE_DMA_BUF, 0)
    }
    .map_err(Error::cuda("exporting GPU memory as a dma-buf"))?;
    // SAFETY: the driver created this descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes CUDA finish copies to this memory before they return; otherwise they could race with the device.
fn order_copies(gpu: &Gpu, memory: &Memory) {
    let on = 1u32;
    let Ok(_current) = gpu.enter() else { return };
    let value = (&raw const on).cast();
    // SAFETY: the attribute has four bytes; the driver checks the address.
    let done =
        unsafe { gpu.api().pointer_set_attribute(value, pointer_attribute::SYNC_MEMOPS, memory.addr()) };
    if let Err(error) = done {
        // Pool and `cuMemCreate` memory lacks this attribute.
        tracing::debug!(%error, ?memory, "copies by CUDA are not ordered with traffic of the device");
    }
}

/// A protection domain, freed on drop unless the application has allocated it. Objects created in it keep it alive.
pub(crate) struct Domain {
    open: Arc<Open>,
    pd: Raw<ibv_pd>,
    is_adopted: bool,
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "protection domain of {:?}", self.open)
    }
}

impl Open {
    /// Allocates a protection domain.
    pub(crate) fn alloc_pd(self: &Arc<Self>) -> Result<Domain> {
        // SAFETY: the device is open while `self` lives.
        let pd = unsafe { self.verbs().ibv_alloc_pd(self.context().as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| failed_last("ibv_alloc_pd", self.name(), &Call::Other))?;
        Ok(Domain { open: self.clone(), pd: Raw(pd), is_adopted: false })
    }
}

impl Domain {
    pub(crate) fn open(&self) -> &Arc<Open> {
        &self.open
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_pd> {
        *self.pd
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if self.is_adopted {
            return;
        }
        // SAFETY: allocated by `alloc_pd`, freed only here.
        let errno = unsafe { self.open.verbs().ibv_dealloc_pd(self.pd.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = self.open.name(), errno, "a protection domain was not freed");
        }
    }
}

/// Domains and regions of an open device. They are freed without locks held, because that may block in the kernel.
#[derive(Debug)]
pub(crate) struct Objects {
    open: Arc<Open>,
    domains: Mutex<HashMap<u32, Arc<Domain>>>,
    next_domain: AtomicU32,
    regions: Mutex<HashMap<u32, Region>>,
}

impl Objects {
    pub(crate) fn new(open: &Arc<Open>) -> Self {
        let (domains, regions) = Default::default();
        Self { open: open.clone(), domains, next_domain: AtomicU32::new(1), regions }
    }

    pub(crate) fn alloc_pd(&self) -> Result<u32> {
        Ok(self.add(self.open.alloc_pd()?))
    }

    /// Uses a protection domain of the application.
    ///
    /// # Safety
    /// It must be one of the open device, and not be freed before the result is given to [`Objects::dealloc_pd`] and all that
    /// was made in it is dropped.
    pub(crate) unsafe fn adopt_pd(&self, pd: NonNull<ibv_pd>) -> u32 {
        self.add(Domain { open: self.open.clone(), pd: Raw(pd), is_adopted: true })
    }

    fn add(&self, domain: Domain) -> u32 {
        let pdn = self.next_domain.fetch_add(1, Ordering::Relaxed);
        self.domains.lock().insert(pdn, Arc::new(domain));
        pdn
    }

    pub(crate) fn dealloc_pd(&self, pdn: u32) {
        let domain = self.domains.lock().remove(&pdn);
        drop(domain);
    }

    pub(crate) fn domain(&self, pdn: u32) -> Result<Arc<Domain>> {
        let found = self.domains.lock().get(&pdn).cloned();
        found.ok_or_else(|| Error::invalid("protection domain", pdn, "one of this device"))
    }

    pub(crate) fn reg_mr(&self, pdn: u32, memory: &Memory, access: Access) -> Result<MrKeys> {
        let region = Region::register(&self.domain(pdn)?, memory, access)?;
        let keys = MrKeys { lkey: region.lkey(), rkey: region.rkey(), is_staged: false };
        tracing::debug!(?region, "registered");
        self.regions.lock().insert(keys.lkey, region);
        Ok(keys)
    }

    /// How the device accesses the region of this key.
    pub(crate) fn transfer_path(&self, lkey: u32) -> TransferPath {
        let registration = self.regions.lock().get(&lkey).map_or(Registration::Host, Region::registration);
        registration.transfer_path()
    }

    pub(crate) fn dereg_mr(&self, keys: MrKeys) {
        let region = self.regions.lock().remove(&keys.lkey);
        drop(region);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_regions_are_relaxed_only_on_request() {
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
    fn peermem_is_detected_by_loaded_module() {
        let root = std::env::temp_dir().join(format!("gdsync-peermem-{}", std::process::id()));
        assert!(!peermem_in(&root));
        std::fs::create_dir_all(root.join("module/nvidia_peermem")).unwrap();
        assert!(peermem_in(&root));
        std::fs::remove_dir_all(root).unwrap();
    }
}
