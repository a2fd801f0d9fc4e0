//! The library opened on the simulated driver.

use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use gdrcopy::cuda::EntryPoints;
use gdrcopy::cuda::raw::Api;
use gdrcopy::system::{Kernel, Linux, System};
use gdrcopy::{BackendKind, Gdr, Result};

use super::memory;
use super::table::api;
use crate::machine::dma_buf_offset;

/// The library on this driver, by its dma-bufs: it allocates with `cuMemAlloc` on both GPUs and maps at addresses of its own.
/// Mappings show freed memory until they are unmapped. The library keeps 4 MiB of scratch memory on each GPU that it used.
///
/// # Errors
/// [`Error::NoBackend`](gdrcopy::Error::NoBackend) where the driver was told to fail.
pub fn gdr() -> Result<Gdr> {
    /// The first driver that maps dma-bufs.
    extern "C" fn version(version: *mut i32) -> u32 {
        // SAFETY: the library passes a place for the answer.
        unsafe { version.write(13_030) };
        0
    }
    /// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`: a coherent link, whose mappings are cached.
    const HOST_PAGE_TABLES: u32 = 100;
    /// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`: also where a test takes dma-bufs from the application.
    const DMA_BUF: u32 = 124;
    extern "C" fn attribute(value: *mut i32, number: u32, device: i32) -> u32 {
        if [HOST_PAGE_TABLES, DMA_BUF].contains(&number) {
            // SAFETY: the library passes a place for the answer.
            unsafe { value.write(1) };
            return 0;
        }
        let entry = api().device_get_attribute.expect("an entry point of the table");
        // SAFETY: the arguments of the library's call.
        unsafe { entry(value, number, device) }
    }
    /// Not subject to the faults of tests, which concern dma-bufs for cards.
    extern "C" fn dma_buf(handle: *mut c_void, addr: u64, len: usize, kind: u32, _flags: u64) -> u32 {
        memory::dma_buf(handle, addr, len, kind).map_or_else(|status| status.0, |()| 0)
    }
    let api = Api {
        driver_get_version: Some(version),
        device_get_attribute: Some(attribute),
        mem_get_handle_for_address_range: Some(dma_buf),
        ..api()
    };
    // SAFETY: the simulated driver does what the manual says of these entry points.
    let cuda = unsafe { EntryPoints::new(api) };
    Gdr::builder().backend(BackendKind::DmaBuf).system(System::new(Arc::new(DmaBufs), cuda)).open()
}

/// A kernel that maps the driver's dma-bufs.
#[derive(Debug)]
struct DmaBufs;

// SAFETY: `Linux` makes the mappings.
unsafe impl Kernel for DmaBufs {
    fn open(&self, _path: &CStr) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::NotFound.into())
    }

    unsafe fn ioctl(&self, _fd: BorrowedFd<'_>, _request: u32, _arg: *mut c_void) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>> {
        let start = dma_buf_offset(fd)?;
        // SAFETY: the caller's promise about `at`.
        unsafe { Linux.mmap(fd, len, start + offset, at) }
    }

    fn read(&self, _path: &str) -> io::Result<String> {
        Err(io::ErrorKind::NotFound.into())
    }
}
