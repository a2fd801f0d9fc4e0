//! Facts of the real CUDA driver that other tests rely upon, on the simulated one: what it refuses, and what does not happen
//! yet. That work is done and in order is seen by every test of gdsync on streams.

mod graphs;
mod streams;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdrcopy::cuda::raw::layout::{Handle, MemOp};
use gdrcopy::{Error, Result};
use gdsync_testkit::driver::{Alive, Control, application_context, destroy_context};

const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;
const NOT_READY: u32 = 600;
const CAPTURE_UNSUPPORTED: u32 = 900;
const CAPTURE_INVALIDATED: u32 = 901;

/// Conditions of waits.
const EQUAL: u32 = 1;
const AND: u32 = 2;
const NOR: u32 = 3;

/// Calls an entry point; its status.
macro_rules! cuda {
    ($entry:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the driver checks what it is given, but for places and lengths of host memory, which are the test's own.
        $crate::status(unsafe { gdsync_testkit::driver::api().$entry($($arg),*) })
    };
}
use cuda;

fn status(result: Result<()>) -> u32 {
    match result {
        Ok(()) => 0,
        Err(Error::Cuda { status, .. }) => status.0,
        Err(other) => panic!("{other}"),
    }
}

/// The driver for one test, with a context of the application that is current.
struct Rig {
    control: Control,
    context: Handle,
}

impl Rig {
    fn new() -> Self {
        let control = Control::take();
        assert_eq!(cuda!(init(0)), 0);
        let context = application_context(0);
        assert_eq!(cuda!(ctx_push_current(context)), 0);
        Self { control, context }
    }

    fn stream(&self) -> Handle {
        let mut stream = 0;
        assert_eq!(cuda!(stream_create(&mut stream, 1, 0)), 0);
        stream
    }

    /// Zeroed 64-bit words of GPU memory.
    fn words(&self, count: usize) -> Words {
        let mut addr = 0;
        assert_eq!(cuda!(mem_alloc(&mut addr, 8 * count)), 0);
        Words { addr, count }
    }

    fn nothing_is_left(&self) {
        assert_eq!(self.control.alive(), Alive::default());
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        destroy_context(self.context);
        let mut popped = 0;
        let status = cuda!(ctx_pop_current(&mut popped));
        if !std::thread::panicking() {
            assert_eq!((status, popped), (0, self.context));
        }
    }
}

/// GPU memory.
struct Words {
    addr: u64,
    count: usize,
}

impl Words {
    fn at(&self, index: usize) -> u64 {
        self.addr + 8 * index as u64
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        let addr = usize::try_from(self.at(index)).unwrap();
        // SAFETY: inside memory that is there until it is freed by consuming this.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(addr)) }
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::SeqCst)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::SeqCst);
    }

    fn free(self) {
        assert_eq!(cuda!(mem_free(self.addr)), 0);
    }
}

fn wait(addr: u64, value: u64, flags: u32) -> MemOp {
    MemOp::word(MemOp::WAIT_64, addr, value, flags)
}

fn write(addr: u64, value: u64) -> MemOp {
    MemOp::word(MemOp::WRITE_64, addr, value, 0)
}

fn batch(stream: Handle, ops: &[MemOp]) -> u32 {
    let mut ops = ops.to_vec();
    cuda!(stream_batch_mem_op(stream, u32::try_from(ops.len()).unwrap(), ops.as_mut_ptr(), 0))
}

/// Waits for what must come.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(30), "not {what}");
        std::thread::yield_now();
    }
}

fn counter(counter: &AtomicU64) -> *mut c_void {
    std::ptr::from_ref(counter).cast_mut().cast()
}
