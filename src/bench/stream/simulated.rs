//! A driver without a GPU, whose calls cost next to nothing: what is measured on it is the library.
//!
//! Everything but the calls of streams is the simulated driver's.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use gdasync::gdrcopy::cuda::raw::Api;
use gdasync::gdrcopy::cuda::raw::layout::{Handle, MemOp};
use gdasync::gdsync::cuda::Gpu;
use gdsync_testkit::driver;

use super::Machinery;
use super::driver::watched;
use crate::bench::Result;

static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static QUEUE: Queue = Queue::new();

/// All streams in one queue, and a thread that runs it when it may.
struct Queue {
    ops: std::sync::Mutex<(Vec<MemOp>, bool)>,
    changed: std::sync::Condvar,
}

impl Queue {
    const fn new() -> Self {
        Self { ops: std::sync::Mutex::new((Vec::new(), true)), changed: std::sync::Condvar::new() }
    }

    fn add(&self, ops: impl IntoIterator<Item = MemOp>) -> u32 {
        let Ok(mut queue) = self.ops.lock() else { return 999 };
        queue.0.extend(ops);
        if queue.1 {
            self.changed.notify_one();
        }
        0
    }

    fn may_run(&self, may: bool) {
        if let Ok(mut queue) = self.ops.lock() {
            queue.1 = may;
            self.changed.notify_one();
        }
    }

    fn run(&self) {
        while let Ok(queue) = self.ops.lock() {
            let Ok(mut queue) = self.changed.wait_while(queue, |(ops, may)| ops.is_empty() || !*may) else {
                return;
            };
            let ops = std::mem::take(&mut queue.0);
            drop(queue);
            ops.iter().for_each(execute);
        }
    }
}

/// For `graphs` the simulated driver runs all by itself: their calls are timed at its entry points.
pub(super) fn machinery(graphs: bool) -> Result<Machinery> {
    driver::kernel("gds_run_12", &[32 + 24 * 12], run_program);
    driver::kernel("gds_run_160", &[32 + 24 * 160], run_program);
    driver::kernel("gds_run_at", &[8], |params| {
        // SAFETY: an address of a program.
        let at = unsafe { params[0].cast::<u64>().read() };
        run_program(&[std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or_default())]);
    });
    // Nothing here launches steps, but the kernel is looked for.
    driver::kernel("gds_finish", &[8], |_| {});
    let name = "no GPU".to_owned();
    let open = |api| -> Result<Gpu> { Ok(Gpu::open_with(api, 0, Some(driver::gdr()?))?) };
    let both = |api| -> Result<_> { Ok((open(api)?, open(watched(api))?)) };
    if graphs {
        let (gpu, watched) = both(driver::api())?;
        return Ok(Machinery { gpu, watched, name, run: |_| {} });
    }
    let api = Api {
        stream_batch_mem_op: Some(batch_mem_op),
        launch_kernel: Some(launch_kernel),
        stream_query: Some(stream_query),
        stream_get_capture_info: Some(stream_get_capture_info),
        ctx_get_current: Some(ctx_get_current),
        ..driver::api()
    };
    let (gpu, watched) = both(api)?;
    CONTEXT.store(gpu.raw_context(), Ordering::Relaxed);
    std::thread::Builder::new().name("no-gpu".into()).spawn(|| QUEUE.run())?;
    Ok(Machinery { gpu, watched, name, run: |may| QUEUE.may_run(may) })
}

unsafe extern "C" fn batch_mem_op(_stream: Handle, count: u32, ops: *mut MemOp, _flags: u32) -> u32 {
    // SAFETY: the caller passes so many operations.
    QUEUE.add(unsafe { std::slice::from_raw_parts(ops, count as usize) }.iter().copied())
}

unsafe extern "C" fn launch_kernel(
    _function: Handle,
    _grid_x: u32,
    _grid_y: u32,
    _grid_z: u32,
    _block_x: u32,
    _block_y: u32,
    _block_z: u32,
    _shared: u32,
    _stream: Handle,
    params: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    // SAFETY: kernels of streams have one parameter.
    QUEUE.add(program(unsafe { *params }))
}

/// A kernel of `lane.cu`.
fn run_program(params: &[*mut c_void]) {
    program(params[0]).for_each(|op| execute(&op));
}

/// The operations of a program, which lives as long as they are looked at.
fn program(at: *mut c_void) -> impl Iterator<Item = MemOp> {
    let head = at.cast::<[u64; 4]>();
    // SAFETY: it begins with a head of 4 words.
    let [.., count] = unsafe { head.read() };
    // SAFETY: the operations follow, 3 words each.
    let first = unsafe { head.add(1) }.cast::<[u64; 3]>();
    // SAFETY: so many of them.
    let ops = unsafe { std::slice::from_raw_parts(first, usize::try_from(count).unwrap_or_default()) };
    ops.iter().map(|&[kind, address, value]| {
        // Numbers as in `lane.cu`.
        let operation = match kind & 0xffff_ffff {
            0 | 6 => MemOp::WRITE_32,
            1 | 7 => MemOp::WRITE_64,
            2 | 4 => MemOp::WAIT_32,
            3 => MemOp::WAIT_64,
            _ => MemOp::BARRIER,
        };
        MemOp::word(operation, address, value, u32::try_from(kind >> 32 & 0xffff).unwrap_or_default())
    })
}

unsafe extern "C" fn stream_query(_stream: Handle) -> u32 {
    0
}

unsafe extern "C" fn stream_get_capture_info(
    _stream: Handle,
    status: *mut u32,
    _id: *mut u64,
    _graph: *mut Handle,
    _dependencies: *mut *const Handle,
    _count: *mut usize,
) -> u32 {
    // SAFETY: a place for the answer.
    unsafe { *status = 0 };
    0
}

unsafe extern "C" fn ctx_get_current(context: *mut Handle) -> u32 {
    // SAFETY: a place for the answer.
    unsafe { *context = CONTEXT.load(Ordering::Relaxed) };
    0
}

/// What the GPU would do.
fn execute(op: &MemOp) {
    let Ok(addr) = usize::try_from(op.address) else { return };
    let low = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap_or_default();
    let ptr = std::ptr::with_exposed_provenance_mut::<u64>(addr);
    match op.operation {
        // SAFETY: a word that the caller of the driver keeps for the operation.
        MemOp::WRITE_32 => unsafe { AtomicU32::from_ptr(ptr.cast()) }.store(low(op.value), Ordering::SeqCst),
        // SAFETY: as above.
        MemOp::WRITE_64 => unsafe { AtomicU64::from_ptr(ptr) }.store(op.value, Ordering::SeqCst),
        MemOp::WAIT_32 | MemOp::WAIT_64 => {
            let load = || match op.operation {
                // SAFETY: as above.
                MemOp::WAIT_32 => unsafe { AtomicU32::from_ptr(ptr.cast()) }.load(Ordering::SeqCst).into(),
                // SAFETY: as above.
                _ => unsafe { AtomicU64::from_ptr(ptr) }.load(Ordering::SeqCst),
            };
            let wide = op.operation == MemOp::WAIT_64;
            while !holds(load(), op.value, op.flags, wide) {
                std::thread::yield_now();
            }
        }
        _ => {}
    }
}

/// Whether a condition of `CUstreamWaitValue_flags` holds.
fn holds(word: u64, value: u64, cond: u32, wide: bool) -> bool {
    let shift = if wide { 0 } else { 32 };
    let (word, value) = (word << shift, value << shift);
    match cond {
        0 => word.wrapping_sub(value).cast_signed() >= 0,
        1 => word == value,
        2 => word & value != 0,
        _ => !(word | value) >> shift << shift != 0,
    }
}
