//! Entry points of the CUDA driver that measure the time spent in the calls of a stream.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gdasync::gdrcopy::cuda::CudaStatus;
use gdasync::gdrcopy::cuda::raw::Api;
use gdasync::gdrcopy::cuda::raw::layout::{Handle, MemOp};

static DRIVER: OnceLock<Api> = OnceLock::new();

thread_local! {
    static SPENT: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The entry points of `driver`; [`spent`] counts the time in those that trigger and wait.
pub(super) fn watched(driver: Api) -> Api {
    let driver = DRIVER.get_or_init(|| driver);
    Api { stream_batch_mem_op: Some(batch_mem_op), launch_kernel: Some(launch_kernel), ..*driver }
}

/// The time that this thread has spent in the driver since it last asked.
pub(super) fn spent() -> Duration {
    SPENT.take()
}

/// Makes a call and counts its time.
fn timed<P>(entry: fn(&Api) -> Option<P>, call: impl FnOnce(P) -> u32) -> u32 {
    let driver = DRIVER.get().expect("these entry points are only in a table of `watched`");
    let Some(entry) = entry(driver) else { return CudaStatus::NOT_SUPPORTED.0 };
    let start = Instant::now();
    let status = call(entry);
    SPENT.set(SPENT.get() + start.elapsed());
    status
}

unsafe extern "C" fn batch_mem_op(stream: Handle, count: u32, ops: *mut MemOp, flags: u32) -> u32 {
    // SAFETY: the caller's arguments.
    timed(|driver| driver.stream_batch_mem_op, |entry| unsafe { entry(stream, count, ops, flags) })
}

unsafe extern "C" fn launch_kernel(
    function: Handle,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    // SAFETY: the caller's arguments.
    let call = |entry: unsafe extern "C" fn(_, _, _, _, _, _, _, _, _, _, _) -> u32| unsafe {
        entry(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, params, extra)
    };
    timed(|driver| driver.launch_kernel, call)
}
