//! Memory registered for queues of DevX: of the host, or of a GPU, by address or dma-buf.

use std::os::fd::RawFd;
use std::sync::Arc;

use gdsync_device::Access;
use gdsync_device::memory::Memory;
use rdma_core_sys::mlx5::ifc::Status;
use rustix::io::Errno;

use super::firmware::Refusal;
use crate::abi;
use crate::context::ioctl::Call;
use crate::context::memory::{check_access, on_gpu, ring};
use crate::context::{Context, Result, dmabuf};
use crate::log::log;

/// Registered memory.
#[derive(Debug)]
pub(super) struct Umem {
    memory: Memory,
    /// Whether the card may write to it.
    pub(super) is_writable: bool,
}

/// Smallest page of the host: registrations are of pages of this size or larger.
const PAGE: u64 = 4096;

impl Umem {
    pub(super) fn new(memory: Memory, is_writable: bool) -> Self {
        Self { memory, is_writable }
    }

    /// `len` bytes at `offset`, a multiple of `align` in the host's memory.
    pub(super) fn part(&self, offset: u64, len: usize, align: u64) -> std::result::Result<Memory, Refusal> {
        let total = self.memory.len() as u64;
        let end = offset.checked_add(len as u64).filter(|&end| end <= total);
        let start = usize::try_from(offset).ok().filter(|_| end.is_some()).ok_or_else(|| {
            Refusal::new(Status::BAD_SIZE, format!("{len} bytes at {offset:#x} leave a umem of {total}"))
        })?;
        if !self.memory.addr().wrapping_add(offset).is_multiple_of(align) {
            return Err(Refusal::parameter(format!("offset {offset:#x} is not aligned to {align}")));
        }
        self.memory.slice(start, len).map_err(|error| Refusal::parameter(error.to_string()))
    }
}

impl Context {
    pub(super) fn register_umem(&self, call: &Call<'_>) -> Result<()> {
        let addr = call.number(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR)?;
        let len = call.number(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_LEN)?;
        let len = usize::try_from(len).ok().filter(|&len| len > 0).ok_or(Errno::INVAL)?;
        let access = call.number(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS)?;
        let access = u32::try_from(access).map_err(|_| Errno::INVAL)?;
        check_access(access)?;
        let sizes = call.number(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP);
        if sizes.is_ok_and(|sizes| sizes & PAGE == 0) {
            return Err(Errno::INVAL);
        }
        let memory = match call.number(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD) {
            Ok(_) if self.hca.modes.no_dma_buf => return Err(Errno::OPNOTSUPP),
            // Programs may register memory that they only let the card read; its pages are written to all the same.
            Err(_) => match ring(addr, len, 1) {
                Err(Errno::FAULT) => on_gpu(addr, len)?.ok_or(Errno::FAULT)?,
                memory => memory?,
            },
            Ok(fd) => {
                let fd = RawFd::try_from(fd).map_err(|_| Errno::BADF)?;
                dmabuf::memory(fd, addr, len as u64, None)?
            }
        };
        if !memory.is_mapped() {
            log!("GPU memory for queues cannot be mapped for the card");
            return Err(Errno::OPNOTSUPP);
        }
        let handle = self.new_handle();
        call.put(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, &handle)?;
        call.put_handle(abi::MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, handle)?;
        let umem = Umem::new(memory, Access::from_bits_truncate(access).contains(Access::LOCAL_WRITE));
        self.devx.umems.add(handle, Arc::new(umem));
        Ok(())
    }

    /// The registered memory of this number.
    pub(super) fn umem(&self, number: u32) -> std::result::Result<Arc<Umem>, Refusal> {
        self.devx.umems.get(number).map_err(|_| Refusal::resource(format!("umem {number:#x} is not there")))
    }
}
