//! The CUDA calls of this benchmark. Nothing is destroyed before the process ends: destroying would wait for a stuck stream.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use gdasync::gdrcopy::Error;
use gdasync::gdrcopy::cuda::CudaStatus;
use gdasync::gdrcopy::cuda::raw::layout::{
    CAPTURE_RELAXED, HOST_ALLOC_PORTABLE, Handle, MemOp, STREAM_NON_BLOCKING,
};
use gdasync::gdrcopy::cuda::raw::{Api, Current};
use gdasync::results::Result;

use super::rig::{ARENA, Word};

/// The primary context of one GPU, with the kernels of `trigger.cu`. Its calls belong on threads that have
/// [entered](Gpu::enter) it.
pub(super) struct Gpu {
    api: Api,
    context: Handle,
    /// In the order of [`KERNELS`].
    kernels: [Handle; 3],
    /// The version of CUDA that the driver offers, such as `13.0`.
    pub(super) cuda: String,
}

const KERNELS: [&std::ffi::CStr; 3] = [c"await_gate", c"store_word", c"spin"];

#[derive(Clone, Copy)]
pub(super) struct Stream(Handle);

#[derive(Clone, Copy)]
pub(super) enum Kernel {
    /// Stores to `ready`, waits for the gate at most this long, stores to `over`.
    AwaitGate { ready: Option<Word>, gate: Word, over: Option<Word>, limit: Duration },
    /// Makes the word 1.
    Store(Word),
    /// Runs this long, then adds 1 to the count.
    Spin { count: Option<Word>, time: Duration },
}

#[derive(Clone)]
pub(super) enum Call {
    MemOps(Vec<MemOp>),
    Kernel(Kernel),
    /// A host function that makes the word 1.
    HostStore(&'static AtomicU32),
    Graph(Handle),
    Query,
    /// Blocks until the stream is idle.
    Synchronize,
}

/// Writes 4 bytes, after everything before is visible to the whole system.
pub(super) fn write(word: Word, value: u32) -> MemOp {
    MemOp::word(MemOp::WRITE_32, word.addr(), value.into(), 0)
}

/// Waits until the word is at least 1: no flags means greater than or equal.
pub(super) fn wait(word: Word) -> MemOp {
    MemOp::word(MemOp::WAIT_32, word.addr(), 1, 0)
}

extern "C" fn store_one(data: *mut c_void) {
    // SAFETY: `Gpu::call` passes a word that is never freed.
    let word = unsafe { &*data.cast::<AtomicU32>() };
    word.store(1, Ordering::Release);
}

impl Gpu {
    /// Opens a GPU and loads the kernels, so that none is loaded while a stream is blocked.
    pub(super) fn open(device: i32) -> Result<&'static Self> {
        let api = Api::load()?;
        // SAFETY: the flags must be 0.
        unsafe { api.init(0) }?;
        let (mut handle, mut context, mut version) = (0, 0, 0);
        // SAFETY: `handle` is valid for writing.
        unsafe { api.device_get(&raw mut handle, device) }?;
        // SAFETY: `context` is valid for writing.
        unsafe { api.primary_ctx_retain(&raw mut context, handle) }?;
        // SAFETY: `version` is valid for writing.
        unsafe { api.driver_get_version(&raw mut version) }?;
        // SAFETY: retained above, never released.
        let current = unsafe { Current::enter(&api, context) }?;
        let image = concat!(include_str!("../trigger.ptx"), "\0");
        let mut module = 0;
        // SAFETY: a terminated PTX text.
        unsafe { api.module_load_data(&raw mut module, image.as_ptr().cast()) }
            .map_err(|e| format!("the GPU driver cannot compile the kernels: {e}"))?;
        let mut kernels = [0; 3];
        for (kernel, name) in kernels.iter_mut().zip(KERNELS) {
            // SAFETY: the module is loaded, and the name ends with a 0.
            unsafe { api.module_get_function(kernel, module, name.as_ptr()) }?;
            // SAFETY: found in the module.
            match unsafe { api.func_load(*kernel) } {
                // A driver without the call loads at once.
                Ok(()) | Err(Error::Unsupported { .. }) => (),
                Err(error) => return Err(error.into()),
            }
        }
        drop(current);
        let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
        Ok(Box::leak(Box::new(Self { api, context, kernels, cuda })))
    }

    /// Makes the context current for this thread.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: retained when it was opened, never released.
        Ok(unsafe { Current::enter(&self.api, self.context) }?)
    }

    /// Pinned host memory of [`ARENA`] bytes, all 0.
    pub(super) fn pinned(&self) -> Result<&'static [AtomicU32]> {
        let mut ptr = null_mut();
        // SAFETY: `ptr` is valid for writing.
        unsafe { self.api.mem_host_alloc(&raw mut ptr, ARENA, HOST_ALLOC_PORTABLE) }?;
        // SAFETY: just allocated with this length.
        unsafe { ptr.cast::<u8>().write_bytes(0, ARENA) };
        // SAFETY: initialised, aligned to pages, never freed; and others may change atomics.
        Ok(unsafe { std::slice::from_raw_parts(ptr.cast(), ARENA / size_of::<AtomicU32>()) })
    }

    pub(super) fn stream(&self) -> Result<Stream> {
        let mut stream = 0;
        // SAFETY: `stream` is valid for writing.
        unsafe { self.api.stream_create(&raw mut stream, STREAM_NON_BLOCKING, 0) }?;
        Ok(Stream(stream))
    }

    /// Makes a call. Queries return false while there is something left to do, everything else true.
    pub(super) fn call(&self, Stream(stream): Stream, call: &mut Call) -> Result<bool> {
        let api = &self.api;
        let called = match call {
            Call::MemOps(ops) => {
                let count = u32::try_from(ops.len())?;
                // SAFETY: this many operations on words, which are never freed.
                unsafe { api.stream_batch_mem_op(stream, count, ops.as_mut_ptr(), 0) }
            }
            Call::Kernel(kernel) => self.launch(stream, *kernel),
            Call::HostStore(word) => {
                // SAFETY: the function takes a word, and this one is never freed.
                unsafe { api.launch_host_func(stream, store_one, word.as_ptr().cast()) }
            }
            // SAFETY: neither stream nor graph is ever destroyed.
            Call::Graph(graph) => unsafe { api.graph_launch(*graph, stream) },
            // SAFETY: the stream is never destroyed.
            Call::Query => return done(unsafe { api.stream_query(stream) }),
            // SAFETY: the stream is never destroyed.
            Call::Synchronize => unsafe { api.stream_synchronize(stream) },
        };
        Ok(called.map(|()| true)?)
    }

    pub(super) fn calls(&self, stream: Stream, calls: &mut [Call]) -> Result<()> {
        calls.iter_mut().try_for_each(|call| self.call(stream, call).map(drop))
    }

    pub(super) fn idle(&self, stream: Stream) -> Result<bool> {
        self.call(stream, &mut Call::Query)
    }

    fn launch(&self, stream: Handle, kernel: Kernel) -> gdasync::gdrcopy::Result<()> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let addr = |word: Option<Word>| word.map_or(0, Word::addr);
        let (index, mut arguments) = match kernel {
            Kernel::AwaitGate { ready, gate, over, limit } => {
                (0, [addr(ready), gate.addr(), addr(over), nanos(limit)])
            }
            Kernel::Store(word) => (1, [word.addr(), 0, 0, 0]),
            Kernel::Spin { count, time } => (2, [addr(count), nanos(time), 0, 0]),
        };
        let mut params = arguments.each_mut().map(|argument| (argument as *mut u64).cast());
        let (function, params) = (self.kernels[index], params.as_mut_ptr());
        // SAFETY: all parameters of the kernels have 8 bytes and are copied by the call, which ignores the surplus; words
        // are never freed.
        unsafe { self.api.launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, stream, params, null_mut()) }
    }

    /// Captures these calls in a graph, for [`Call::Graph`].
    pub(super) fn graph(&self, stream: Stream, calls: &mut [Call]) -> Result<Handle> {
        // SAFETY: the stream is never destroyed.
        unsafe { self.api.stream_begin_capture(stream.0, CAPTURE_RELAXED) }?;
        let enqueued = self.calls(stream, calls);
        let (mut graph, mut exec) = (0, 0);
        // SAFETY: in capture; `graph` is valid for writing.
        let ended = unsafe { self.api.stream_end_capture(stream.0, &raw mut graph) };
        enqueued?;
        ended?;
        // SAFETY: just captured; `exec` is valid for writing.
        let made = unsafe { self.api.graph_instantiate(&raw mut exec, graph, 0) };
        // SAFETY: captured above, and not used again.
        unsafe { self.api.graph_destroy(graph) }?;
        made?;
        Ok(exec)
    }
}

fn done(result: gdasync::gdrcopy::Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::Cuda { status: CudaStatus::NOT_READY, .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_matches_the_source() {
        let (source, ptx) = (include_str!("../trigger.cu"), include_str!("../trigger.ptx"));
        for name in KERNELS.map(|name| name.to_str().unwrap()) {
            assert!(source.contains(&format!(" {name}(")), "{name}");
            assert!(ptx.contains(&format!(".visible .entry {name}(")), "{name}");
        }
        assert!(ptx.contains(".target sm_70"));
        // Every parameter has the 8 bytes that `Gpu::launch` gives it.
        assert!(ptx.contains(".param .u64") && !ptx.contains(".param .u32"));
    }

    #[test]
    fn queries_and_host_functions() {
        assert!(done(Ok(())).unwrap());
        let error = |status| Error::Cuda { call: "cuStreamQuery", status, fix: "" };
        assert!(!done(Err(error(CudaStatus::NOT_READY))).unwrap());
        done(Err(error(CudaStatus::LAUNCH_FAILED))).unwrap_err();
        static WORD: AtomicU32 = AtomicU32::new(0);
        store_one(WORD.as_ptr().cast());
        assert_eq!(WORD.load(Ordering::Relaxed), 1);
    }
}
