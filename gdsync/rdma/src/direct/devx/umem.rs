//! Memory registered with the firmware: host memory by address, GPU memory by dma-buf or nvidia-peermem.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{mlx5dv_devx_umem, mlx5dv_devx_umem_in, mlx5dv_devx_umem_in_mask};
use rdma_core_sys::verbs::ibv_access_flags;

use super::mailbox::Place;
use crate::Raw;
use crate::explain::{Call, Memlock, failed, last_errno};
use crate::{Open, Pages, has_peermem};
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, host_page};

/// Registered memory. The firmware must not use it any more when this is dropped.
pub(in crate::direct) struct Umem {
    _open: Arc<Open>,
    mlx5: &'static Mlx5,
    raw: Raw<mlx5dv_devx_umem>,
    place: Place,
    memory: Memory,
}

impl fmt::Debug for Umem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "umem {:#x} of {:?}", self.place.umem, self.memory)
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: registered here, deregistered only here.
        let errno = unsafe { self.mlx5.mlx5dv_devx_umem_dereg(self.raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(umem = ?self, errno, "memory of a queue stays registered, and is kept");
            std::mem::forget(self.memory.clone());
        }
    }
}

/// Allowed page sizes: all from the firmware's minimum, 4 KiB.
const PAGE_SIZES: u64 = !0xfff;

impl Umem {
    /// Registers host or GPU memory.
    ///
    /// # Errors
    /// [`Error::Verbs`] if a call fails; [`Error::Device`] for GPU memory that cannot be registered.
    pub(super) fn register(open: &Arc<Open>, mlx5: &'static Mlx5, memory: &Memory) -> Result<Self> {
        match memory.gpu() {
            None => {
                Self::by_address(open, mlx5, memory, |len| Call::Register { len, memlock: Memlock::here() })
            }
            Some(gpu) => Self::of_gpu(open, mlx5, gpu, memory),
        }
    }

    /// Location of its first byte, for commands.
    pub(super) fn place(&self) -> Place {
        self.place
    }

    fn of_gpu(open: &Arc<Open>, mlx5: &'static Mlx5, gpu: &Gpu, memory: &Memory) -> Result<Self> {
        let dma_buf = match Self::by_dma_buf(open, mlx5, gpu, memory) {
            Ok(umem) => return Ok(umem),
            Err(error) => error,
        };
        if !has_peermem() {
            return Err(no_way(open, &dma_buf, "the module nvidia_peermem is not loaded"));
        }
        tracing::debug!(?memory, why = %dma_buf, "no registration by dma-buf");
        Self::by_address(open, mlx5, memory, |len| Call::RegisterGpu { len })
            .map_err(|peermem| no_way(open, &dma_buf, &peermem.to_string()))
    }

    fn by_dma_buf(open: &Arc<Open>, mlx5: &'static Mlx5, gpu: &Gpu, memory: &Memory) -> Result<Self> {
        let Some(register) = mlx5.mlx5dv_devx_umem_reg_ex else {
            return Err(Error::Unsupported {
                what: "a dma-buf for DevX (mlx5dv_devx_umem_reg_ex with MLX5DV_UMEM_MASK_DMABUF)",
                by: "the installed libmlx5",
                fix: "install rdma-core 43 or newer",
            });
        };
        let Pages { fd, offset, len } = Pages::export(gpu, memory)?;
        let mut attr = mlx5dv_devx_umem_in::zeroed();
        attr.size = len;
        attr.access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        attr.pgsz_bitmap = PAGE_SIZES;
        attr.comp_mask = mlx5dv_devx_umem_in_mask::MLX5DV_UMEM_MASK_DMABUF;
        attr.dmabuf_fd = fd.as_raw_fd();
        // SAFETY: the device is open; the kernel keeps the dma-buf, and the range lies in it.
        let raw = unsafe { register(open.context().as_ptr(), &raw mut attr) };
        Self::made(open, mlx5, raw, offset, memory).ok_or_else(|| {
            let errno = last_errno();
            let subject = format!("{memory:?} on {} as dma-buf", open.name());
            failed("mlx5dv_devx_umem_reg_ex", subject, &Call::UmemDmaBuf { len }, errno)
        })
    }

    fn by_address(
        open: &Arc<Open>,
        mlx5: &'static Mlx5,
        memory: &Memory,
        call: impl FnOnce(usize) -> Call,
    ) -> Result<Self> {
        // Whole pages, as the kernel pins them.
        let page = host_page() as u64;
        let offset = memory.addr() % page;
        let len = usize::try_from((offset + memory.len() as u64).next_multiple_of(page));
        let len = len.expect("64-bit hosts only");
        let start = usize::try_from(memory.addr() - offset).expect("64-bit hosts only");
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(start);
        let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        // SAFETY: the device is open; it writes only inside `memory`, which this object keeps alive.
        let raw = unsafe { mlx5.mlx5dv_devx_umem_reg(open.context().as_ptr(), start, len, access) };
        Self::made(open, mlx5, raw, offset, memory).ok_or_else(|| {
            let errno = last_errno();
            failed("mlx5dv_devx_umem_reg", format!("{memory:?} on {}", open.name()), &call(len), errno)
        })
    }

    fn made(
        open: &Arc<Open>,
        mlx5: &'static Mlx5,
        raw: *mut mlx5dv_devx_umem,
        offset: u64,
        memory: &Memory,
    ) -> Option<Self> {
        let raw = NonNull::new(raw)?;
        // SAFETY: `raw` was just created.
        let umem = unsafe { (*raw.as_ptr()).umem_id };
        let place = Place { umem, offset };
        Some(Self { _open: open.clone(), mlx5, raw: Raw(raw), place, memory: memory.clone() })
    }
}

fn no_way(open: &Open, dma_buf: &Error, peermem: &str) -> Error {
    Error::Device {
        device: format!("{} for queues in GPU memory", open.name()),
        why: format!(
            "by dma-buf: {dma_buf}; by nvidia-peermem: {peermem}; either a kernel that takes a dma-buf for DevX (Linux 6.1, \
             rdma-core 43, the NVIDIA driver's open kernel modules, CUDA 11.7), or `sudo modprobe nvidia-peermem` on \
             MLNX_OFED or DOCA-OFED; or leave the queues in host memory (OnGpu::empty())"
        ),
    }
}
