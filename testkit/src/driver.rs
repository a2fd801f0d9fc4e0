//! A simulated CUDA driver: the entry points of [`Api`](gdrcopy::cuda::raw::Api), on streams that really run.
//!
//! [`api`] gives the table, [`gdr`] maps the memory behind it, [`kernel()`] makes a Rust function a kernel, [`Control`]
//! makes calls fail and counts. The driver is one per process, as the real one; it works inside one process only.
//!
//! # Model
//!
//! - Two GPUs like an H200. Contexts: the primary ones, and those that [`application_context`] makes. Calls that need a
//!   current context fail with 201 without one. An error of running work sticks to its context, as in CUDA.
//! - GPU memory is host memory, its GPU address its CPU address. Freeing and unregistering memory, and loading and
//!   unloading modules, wait for all work of the GPU, as seen on an H200, or with [`Control::frees_wait`] do not: then work
//!   that was enqueued on the memory before fails with 700, and the bytes stay until then. While such a call waits, nobody
//!   can submit anything but memory operations. Memory of the other GPU needs
//!   peer access in stream memory operations; contexts of one GPU reach each other's. Registrations may not overlap, but
//!   may share pages; one waits while another is taken back. Kernels and host functions get plain addresses, which nothing
//!   checks.
//! - Each stream is a queue with a thread. Of its submissions 1,024 may be pending, and 55 host functions; one more
//!   blocks the call, as measured on an H200, at most for [`Control::patience`]: then it fails with 702. So do
//!   synchronizations, frees and modules. A destroyed stream finishes its work in the background.
//! - A write without a barrier shows when something other than a wait follows on its stream, or at a synchronization.
//! - Copies from pageable memory take the bytes at once, copies to it return when they are there.
//! - Capture: memory operations, kernels, host functions, fills, and copies without pageable memory become a chain of
//!   nodes. Events and graphs are not captured: they spoil a capture with 900, which CUDA allows. What is not safe in a
//!   capture fails by the modes of captures and threads as the manual says, and spoils them.
//! - A graph runs as one submission, after the former launch of the same executable graph. Its nodes can be changed
//!   while the graph that they were captured in lives.
//! - IPC handles can be had, but not opened: in this process CUDA refuses that with 201, in another one this does, 801.
//! - Not modelled: the order of the legacy stream with others (except that using it spoils captures of blocking
//!   streams), priorities, limits that streams share, virtual memory management, dma-bufs.
//! - No entry point may be called in kernels and host functions: 800.

mod backend;
mod context;
mod control;
mod handles;
mod kernel;
mod memop;
mod memory;
mod objects;
mod queue;
mod region;
mod settings;
mod stream;
mod table;

use gdrcopy::cuda::CudaStatus;

pub use backend::gdr;
pub use context::{application_context, destroy_context};
pub use control::{Alive, Control};
pub use kernel::kernel;
pub use table::api;

/// What an entry point gives.
type Outcome<T = ()> = std::result::Result<T, CudaStatus>;

/// Statuses that the rest of the crate never meets.
mod status {
    use gdrcopy::cuda::CudaStatus;

    pub(super) const INVALID_IMAGE: CudaStatus = CudaStatus(200);
    pub(super) const ILLEGAL_STATE: CudaStatus = CudaStatus(401);
    pub(super) const LAUNCH_TIMEOUT: CudaStatus = CudaStatus(702);
    pub(super) const NOT_REGISTERED: CudaStatus = CudaStatus(713);
    pub(super) const CAPTURE_UNSUPPORTED: CudaStatus = CudaStatus(900);
    pub(super) const CAPTURE_INVALIDATED: CudaStatus = CudaStatus(901);
    pub(super) const CAPTURE_IMPLICIT: CudaStatus = CudaStatus(906);
    pub(super) const CAPTURE_WRONG_THREAD: CudaStatus = CudaStatus(908);
}

/// Refuses what is not true.
fn require(true_here: bool, otherwise: CudaStatus) -> Outcome {
    if true_here { Ok(()) } else { Err(otherwise) }
}

/// Writes an answer.
fn put<T>(place: *mut T, value: T) -> Outcome {
    require(!place.is_null(), CudaStatus::INVALID_VALUE)?;
    // SAFETY: the caller of the entry point passes a place for the answer.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes an answer that the caller may not want.
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
    // SAFETY: the caller of the entry point passes so many values.
    Ok(unsafe { std::slice::from_raw_parts(first, count) }.to_vec())
}

/// A GPU address as one of this process.
fn address(addr: u64) -> Outcome<usize> {
    usize::try_from(addr).map_err(|_| CudaStatus::INVALID_VALUE)
}
