//! A simulated CUDA driver: the entry points of [`Api`], on streams that really run.
//!
//! [`api`] returns the table, [`gdr`] maps the memory behind it, [`kernel()`] makes a Rust function a kernel, and [`Control`] makes
//! calls fail and counts them. There is one driver per process; processes share memory by IPC handles only.
//!
//! # Model
//!
//! - **Devices**: two GPUs like an H200. Contexts are the primary ones and those of [`application_context`]. Calls that need a current
//!   context fail with 201 without one. An error of running work is sticky in its context, as in CUDA.
//! - **Memory** of a GPU is host memory; its GPU address is its CPU address. Free, unregister, module load and unload wait for all work
//!   of the GPU, as on an H200; meanwhile only memory operations can be submitted. Stream memory operations need peer access to memory of the other GPU;
//!   contexts of one GPU share theirs. Registrations may not overlap, but may share pages; a registration waits for an unregistration.
//!   Kernels and host functions get plain addresses, which are not checked.
//! - **Streams** are queues with a thread each. 1,024 submissions may be pending, among them 55 host functions; a further one blocks, as
//!   on an H200, and fails with 702 after [`Control::patience`]. So do synchronizations, frees and module calls. A destroyed stream
//!   finishes its work in the background.
//! - **Writes without a barrier** become visible when something other than a wait follows on the stream, or at a synchronization.
//! - **Copies** from pageable memory read the bytes at once; copies to it return when the bytes are in place.
//! - **Capture**: memory operations, kernels, host functions, fills, and copies without pageable memory become a chain of nodes. Events
//!   and graphs invalidate a capture with 900, which CUDA permits. Calls that are unsafe during a capture fail by the capture modes as
//!   the manual says, and invalidate the captures.
//! - **Graphs** run as one submission, after the previous launch of the same executable graph. Their nodes can be changed while the
//!   captured graph exists.
//! - **IPC handles** open in other processes of this driver while the owner runs, as further mappings of the same bytes; in the own
//!   process CUDA refuses with 201. Memory of `cuMemCreate` has none.
//! - **Not modelled**: the order of the legacy stream with others (except that using it invalidates captures of blocking streams),
//!   priorities, limits that streams share, and which memory a virtual address shows.
//! - Entry points called by kernels and host functions fail with 800.

mod context;
mod control;
mod memop;
mod memory;
mod objects;
mod queue;
mod stream;
mod table;

use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::{CudaStatus, EntryPoints};
use gdrcopy::system::{Kernel, Linux, System};
use gdrcopy::{BackendKind, Gdr, Result};

pub use context::{application_context, destroy_context};
pub use control::{Alive, Control};
pub use objects::kernel;
pub use table::api;

use crate::machine::dma_buf_offset;

/// The result of an entry point.
type Outcome<T = ()> = std::result::Result<T, CudaStatus>;

/// Statuses that `CudaStatus` has no names for.
mod status {
    use gdrcopy::cuda::CudaStatus;

    pub(super) const INVALID_IMAGE: CudaStatus = CudaStatus(200);
    pub(super) const ALREADY_MAPPED: CudaStatus = CudaStatus(208);
    pub(super) const ILLEGAL_STATE: CudaStatus = CudaStatus(401);
    pub(super) const LAUNCH_TIMEOUT: CudaStatus = CudaStatus(702);
    pub(super) const NOT_REGISTERED: CudaStatus = CudaStatus(713);
    pub(super) const CAPTURE_UNSUPPORTED: CudaStatus = CudaStatus(900);
    pub(super) const CAPTURE_INVALIDATED: CudaStatus = CudaStatus(901);
    pub(super) const CAPTURE_IMPLICIT: CudaStatus = CudaStatus(906);
    pub(super) const CAPTURE_WRONG_THREAD: CudaStatus = CudaStatus(908);
}

/// Returns an error unless the condition holds.
fn require(true_here: bool, otherwise: CudaStatus) -> Outcome {
    if true_here { Ok(()) } else { Err(otherwise) }
}

/// Writes an answer.
fn put<T>(place: *mut T, value: T) -> Outcome {
    require(!place.is_null(), CudaStatus::INVALID_VALUE)?;
    // SAFETY: the caller of the entry point passes a place for it.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes an answer unless the caller passes a null pointer.
fn put_wanted<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() { Ok(()) } else { put(place, value) }
}

/// Reads an argument.
fn get<T: Copy>(place: *const T) -> Outcome<T> {
    require(!place.is_null(), CudaStatus::INVALID_VALUE)?;
    // SAFETY: the caller of the entry point passes a value.
    Ok(unsafe { place.read() })
}

/// Reads arguments.
fn get_all<T: Copy>(first: *const T, count: u32) -> Outcome<Vec<T>> {
    require(!first.is_null() && count > 0, CudaStatus::INVALID_VALUE)?;
    let count = usize::try_from(count).map_err(|_| CudaStatus::INVALID_VALUE)?;
    // SAFETY: the caller of the entry point passes `count` values.
    Ok(unsafe { std::slice::from_raw_parts(first, count) }.to_vec())
}

/// A GPU address as one of this process.
fn address(addr: u64) -> Outcome<usize> {
    usize::try_from(addr).map_err(|_| CudaStatus::INVALID_VALUE)
}

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
        // SAFETY: the caller guarantees `at`.
        unsafe { Linux.mmap(fd, len, start + offset, at) }
    }
}
