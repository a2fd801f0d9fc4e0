//! Memory regions of dma-bufs.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, RawFd};

use gdsync_device::memory::Memory;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::ioctl::Call;
use super::memory::{Mr, MrAttr, on_gpu};
use super::{Context, Result};
use crate::abi;
use crate::log::log;

/// A file, and the GPU address of its first byte.
type Exported = ([u64; 2], u64);

/// The dma-bufs that CUDA made most recently for this program.
static EXPORTED: Mutex<VecDeque<Exported>> = Mutex::new(VecDeque::new());
/// The most that are kept: programs register a dma-buf when they have made it.
const MOST: usize = 1024;

/// What identifies a file.
fn identity(fd: RawFd) -> Option<[u64; 2]> {
    // SAFETY: used for one call, which fails if the descriptor is closed.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(file).ok().map(|stat| [stat.st_dev, stat.st_ino])
}

/// CUDA made a dma-buf of the memory at this address.
#[cfg(target_arch = "x86_64")]
pub(crate) fn exported(fd: RawFd, addr: u64) {
    let Some(identity) = identity(fd) else { return };
    let mut exported = EXPORTED.lock();
    if exported.len() == MOST {
        exported.pop_front();
    }
    exported.push_back((identity, addr));
}

/// The GPU address of the first byte of a dma-buf that CUDA made for this program.
fn gpu_addr(fd: RawFd) -> Option<u64> {
    let identity = identity(fd)?;
    EXPORTED.lock().iter().rev().find(|(known, _)| *known == identity).map(|(_, addr)| *addr)
}

/// `len` bytes of a dma-buf of a GPU from `offset` on. Where its memory is, the call that made it told; if that was not seen, it may be
/// at `expected`. A dma-buf that can be mapped, as those of simulated GPUs, is mapped. Others are not supported.
///
/// # Errors
/// `EBADF`, `EINVAL` for a range that leaves it, `EOPNOTSUPP`.
pub(super) fn memory(fd: RawFd, offset: u64, len: u64, expected: Option<u64>) -> Result<Memory> {
    // Libraries find out by -1 whether dma-bufs are supported.
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: used for the calls below, which fail if the descriptor is closed.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let size = u64::try_from(rustix::fs::fstat(file)?.st_size).map_err(|_| Errno::INVAL)?;
    // One of a simulated GPU stands where it begins in the GPU's memory; the others cannot tell.
    let begin = rustix::fs::tell(file).unwrap_or(0);
    let start = begin.checked_add(offset).ok_or(Errno::OVERFLOW)?;
    let end = start.checked_add(len).ok_or(Errno::OVERFLOW)?;
    if len == 0 || end > size {
        return Err(Errno::INVAL);
    }
    let [start, end, len] = [start, end, len].map(usize::try_from);
    let (Ok(start), Ok(end), Ok(len)) = (start, end, len) else { return Err(Errno::INVAL) };
    let told = gpu_addr(fd).map(|first| first.checked_add(offset).ok_or(Errno::OVERFLOW)).transpose()?;
    if let Some(addr) = told.or(expected)
        && let Some(memory) = on_gpu(addr, len)?
    {
        return Ok(memory);
    }
    let mapped = Memory::map_shared(file, end).and_then(|memory| memory.slice(start, len));
    mapped.map_err(|error| {
        log!("a dma-buf of {size} bytes: CUDA does not know where its memory is, and it cannot be mapped: {error}");
        Errno::OPNOTSUPP
    })
}

impl Context {
    /// Registers a part of a dma-buf of a GPU. If the call that made it was not seen, its memory is at the address that the program
    /// gives the region (iova), as most do.
    pub(super) fn register_dmabuf(&self, call: &Call<'_>) -> Result<()> {
        let half = |number: u64| u32::try_from(number).map_err(|_| Errno::INVAL);
        let pd = half(call.number(abi::UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE)?)?;
        let offset = call.number(abi::UVERBS_ATTR_REG_DMABUF_MR_OFFSET)?;
        let length = call.number(abi::UVERBS_ATTR_REG_DMABUF_MR_LENGTH)?;
        let iova = call.number(abi::UVERBS_ATTR_REG_DMABUF_MR_IOVA)?;
        let fd = half(call.number(abi::UVERBS_ATTR_REG_DMABUF_MR_FD)?)?.cast_signed();
        let access = half(call.number(abi::UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS)?)?;
        let pd = self.pds.get(pd)?;
        // Whoever has a file may truncate it.
        let dma_buf = Some(memory(fd, offset, length, Some(iova))?.checked());
        let attr = MrAttr { pd, start: offset, length, hca_va: iova, access_flags: access, dma_buf };
        let mr = Mr::new(self.hca, attr)?;
        let handle = self.new_handle();
        call.put(abi::UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, &mr.key)?;
        call.put(abi::UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, &mr.key)?;
        call.put_handle(abi::UVERBS_ATTR_REG_DMABUF_MR_HANDLE, handle)?;
        self.mrs.add(handle, mr);
        Ok(())
    }
}
