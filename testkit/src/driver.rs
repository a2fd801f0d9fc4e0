//! A simulated CUDA driver: the entry points of [`Api`](gdrcopy::cuda::raw::Api), on streams that really run.
//!
//! [`api`] returns the table, [`gdr`] maps the memory behind it, [`kernel()`] makes a Rust function a kernel, and [`Control`] makes
//! calls fail and counts them. There is one driver per process, and it works inside one process only.
//!
//! # Model
//!
//! - **Devices**: two GPUs like an H200. Contexts are the primary ones and those of [`application_context`]. Calls that need a current
//!   context fail with 201 without one. An error of running work is sticky in its context, as in CUDA.
//! - **Memory** of a GPU is host memory; its GPU address is its CPU address. Free, unregister, module load and unload wait for all work
//!   of the GPU, as on an H200; meanwhile only memory operations can be submitted. With [`Control::frees_wait`] off they do not wait,
//!   and earlier work that uses the memory fails with 700. Stream memory operations need peer access to memory of the other GPU;
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
//! - **IPC handles** can be obtained, but not opened: CUDA refuses with 201 in this process, and this driver with 801 in another one.
//! - **Not modelled**: the order of the legacy stream with others (except that using it invalidates captures of blocking streams),
//!   priorities, limits that streams share, and virtual memory management.
//! - Entry points called by kernels and host functions fail with 800.

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

/// The result of an entry point.
type Outcome<T = ()> = std::result::Result<T, CudaStatus>;

/// Statuses that `CudaStatus` has no names for.
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
