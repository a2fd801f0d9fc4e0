//! CUDA as this benchmark uses it. Nothing of it is given back before the process ends: a stream that is stuck would
//! make that wait for ever.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gdasync::gdrcopy::Error;
use gdasync::gdrcopy::cuda::CudaStatus;
use gdasync::gdrcopy::cuda::raw::layout::{
    CAPTURE_RELAXED, HOST_ALLOC_PORTABLE, Handle, MemOp, STREAM_NON_BLOCKING,
};
use gdasync::gdrcopy::cuda::raw::{Api, Current};

use super::rig::{ARENA, Word};
use gdasync::results::Result;

/// The primary context of one GPU, with the kernels of `trigger.cu`. Its calls belong on threads that have
/// [entered](Gpu::enter) it.
pub(super) struct Gpu {
    api: Api,
    context: Handle,
    /// In the order of [`KERNELS`].
    kernels: [Handle; 3],
    /// Lowest and highest.
    priorities: [i32; 2],
    /// The version of CUDA that the driver offers, such as `13.0`.
    pub(super) cuda: String,
}

const KERNELS: [&std::ffi::CStr; 3] = [c"await_gate", c"store_word", c"spin"];

/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_DISABLE_TIMING: u32 = 2;

#[derive(Clone, Copy)]
pub(super) struct Stream(Handle);

#[derive(Clone, Copy)]
pub(super) struct Event(Handle);

/// A graph that can be launched.
#[derive(Clone, Copy)]
pub(super) struct Graph(Handle);

#[derive(Clone, Copy)]
pub(super) enum Priority {
    Default,
    Lowest,
    Highest,
}

/// A kernel with its arguments.
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    /// Says `ready`, waits for the gate at most so long, says `over`.
    AwaitGate { ready: Option<Word>, gate: Word, over: Option<Word>, limit: Duration },
    /// Makes the word 1.
    Store(Word),
    /// Runs so long, then adds 1 to the count.
    Spin { count: Option<Word>, time: Duration },
}

/// A stream memory operation.
#[derive(Clone, Copy)]
pub(super) enum Op {
    /// Writes 4 bytes, after everything before is visible to the whole system.
    Write(Word, u32),
    /// Writes 4 bytes in no order with what is before.
    WriteUnordered(Word, u32),
    /// Writes 8 bytes, after everything before is visible to the whole system.
    Write64(Word, u32),
    /// Waits until the word is at least 1.
    Wait(Word),
    /// Everything before is visible to the whole system before anything after.
    Barrier,
}

/// Operations that are submitted together.
pub(super) struct Batch(Vec<MemOp>);

impl Batch {
    pub(super) fn new(ops: impl IntoIterator<Item = Op>) -> Self {
        let convert = |op| match op {
            Op::Write(word, value) => MemOp::word(MemOp::WRITE_32, word.addr(), value.into(), 0),
            Op::WriteUnordered(word, value) => {
                MemOp::word(MemOp::WRITE_32, word.addr(), value.into(), MemOp::NO_BARRIER)
            }
            Op::Write64(word, value) => MemOp::word(MemOp::WRITE_64, word.addr(), value.into(), 0),
            // No flags: greater than or equal.
            Op::Wait(word) => MemOp::word(MemOp::WAIT_32, word.addr(), 1, 0),
            Op::Barrier => MemOp::barrier(),
        };
        Self(ops.into_iter().map(convert).collect())
    }
}

/// What a host function may do.
#[derive(Clone, Copy)]
pub(super) enum HostFunction {
    /// Makes the word 1.
    Store(&'static AtomicU32),
    /// As [`Kernel::AwaitGate`].
    Await(&'static HostWait),
}

/// The arguments of [`HostFunction::Await`].
pub(super) struct HostWait {
    pub(super) ready: &'static AtomicU32,
    pub(super) gate: &'static AtomicU32,
    pub(super) limit: Duration,
}

extern "C" fn store_one(data: *mut c_void) {
    // SAFETY: `Gpu::host_function` passes a word that lives for ever.
    let word = unsafe { &*data.cast::<AtomicU32>() };
    word.store(1, Ordering::Release);
}

extern "C" fn await_one(data: *mut c_void) {
    // SAFETY: `Gpu::host_function` passes arguments that live for ever.
    let wait = unsafe { &*data.cast::<HostWait>() };
    wait.ready.store(1, Ordering::Release);
    let start = Instant::now();
    while wait.gate.load(Ordering::Acquire) == 0 && start.elapsed() < wait.limit {
        std::hint::spin_loop();
    }
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
        // SAFETY: retained above.
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
        let mut priorities = [0; 2];
        let [least, greatest] = &mut priorities;
        // SAFETY: both are valid for writing.
        unsafe { api.ctx_get_stream_priority_range(least, greatest) }?;
        drop(current);
        let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
        Ok(Box::leak(Box::new(Self { api, context, kernels, priorities, cuda })))
    }

    /// Makes the context current for this thread.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: retained for ever.
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

    pub(super) fn stream(&self, priority: Priority) -> Result<Stream> {
        let priority = match priority {
            Priority::Default => 0,
            Priority::Lowest => self.priorities[0],
            Priority::Highest => self.priorities[1],
        };
        let mut stream = 0;
        // SAFETY: `stream` is valid for writing.
        unsafe { self.api.stream_create(&raw mut stream, STREAM_NON_BLOCKING, priority) }?;
        Ok(Stream(stream))
    }

    pub(super) fn batch(&self, stream: Stream, batch: &mut Batch) -> Result<()> {
        let count = u32::try_from(batch.0.len())?;
        // SAFETY: so many operations on words, which are never freed.
        Ok(unsafe { self.api.stream_batch_mem_op(stream.0, count, batch.0.as_mut_ptr(), 0) }?)
    }

    pub(super) fn launch(&self, stream: Stream, kernel: Kernel) -> Result<()> {
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
        // SAFETY: all parameters of the kernels are of 8 bytes and copied by the call, the surplus is not looked at; words
        // are never freed.
        Ok(unsafe { self.api.launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, stream.0, params, null_mut()) }?)
    }

    pub(super) fn host_function(&self, stream: Stream, function: HostFunction) -> Result<()> {
        let (function, data): (extern "C" fn(*mut c_void), *mut c_void) = match function {
            HostFunction::Store(word) => (store_one, word.as_ptr().cast()),
            HostFunction::Await(wait) => (await_one, std::ptr::from_ref(wait).cast_mut().cast()),
        };
        // SAFETY: each function gets what it asks for.
        Ok(unsafe { self.api.launch_host_func(stream.0, function, data) }?)
    }

    pub(super) fn event(&self) -> Result<Event> {
        let mut event = 0;
        // SAFETY: `event` is valid for writing.
        unsafe { self.api.event_create(&raw mut event, EVENT_DISABLE_TIMING) }?;
        Ok(Event(event))
    }

    pub(super) fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: both are never destroyed.
        Ok(unsafe { self.api.event_record(event.0, stream.0) }?)
    }

    pub(super) fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: both are never destroyed.
        Ok(unsafe { self.api.stream_wait_event(stream.0, event.0, 0) }?)
    }

    /// Whether all before the record has been done.
    pub(super) fn happened(&self, event: Event) -> Result<bool> {
        // SAFETY: never destroyed.
        done(unsafe { self.api.event_query(event.0) })
    }

    /// Whether the stream has nothing to do.
    pub(super) fn idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: never destroyed.
        done(unsafe { self.api.stream_query(stream.0) })
    }

    /// Returns when the stream has nothing to do: have it watched.
    pub(super) fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: never destroyed.
        Ok(unsafe { self.api.stream_synchronize(stream.0) }?)
    }

    /// Copies one word.
    pub(super) fn copy(&self, stream: Stream, to: Word, from: Word) -> Result<()> {
        // SAFETY: words are never freed.
        Ok(unsafe { self.api.memcpy_async(to.addr(), from.addr(), 4, stream.0) }?)
    }

    /// Makes a graph of what is enqueued meanwhile on the stream.
    pub(super) fn graph(&self, stream: Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        // SAFETY: never destroyed.
        unsafe { self.api.stream_begin_capture(stream.0, CAPTURE_RELAXED) }?;
        let enqueued = enqueue();
        let (mut graph, mut exec) = (0, 0);
        // SAFETY: in capture; `graph` is valid for writing.
        let ended = unsafe { self.api.stream_end_capture(stream.0, &raw mut graph) };
        enqueued?;
        ended?;
        // SAFETY: just captured; `exec` is valid for writing.
        let made = unsafe { self.api.graph_instantiate(&raw mut exec, graph, 0) };
        // SAFETY: as above, and not used again.
        unsafe { self.api.graph_destroy(graph) }?;
        made?;
        Ok(Graph(exec))
    }

    pub(super) fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        // SAFETY: never destroyed.
        Ok(unsafe { self.api.graph_launch(graph.0, stream.0) }?)
    }

    /// Pins memory of the application; [`unregister`](Gpu::unregister) it before it is freed.
    pub(super) fn register(&self, memory: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's memory; a caller that frees it too early leaves CUDA with pages that nobody else gets.
        Ok(unsafe { self.api.mem_host_register(memory.as_mut_ptr().cast(), memory.len(), 0) }?)
    }

    pub(super) fn unregister(&self, memory: &mut [u8]) -> Result<()> {
        // SAFETY: CUDA looks the address up.
        Ok(unsafe { self.api.mem_host_unregister(memory.as_mut_ptr().cast()) }?)
    }
}

/// The answer to a query.
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
    fn the_checked_in_ptx_is_that_of_the_source() {
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
    fn batches_are_what_the_driver_takes() {
        static WORD: AtomicU32 = AtomicU32::new(0);
        let word = Word::Host(&WORD);
        let Batch(ops) = Batch::new([
            Op::Write(word, 7),
            Op::WriteUnordered(word, 1),
            Op::Write64(word, 1),
            Op::Wait(word),
            Op::Barrier,
        ]);
        assert_eq!(ops[0], MemOp::word(MemOp::WRITE_32, word.addr(), 7, 0));
        assert_eq!(ops[1], MemOp::word(MemOp::WRITE_32, word.addr(), 1, MemOp::NO_BARRIER));
        assert_eq!(ops[2], MemOp::word(MemOp::WRITE_64, word.addr(), 1, 0));
        assert_eq!(ops[3], MemOp::word(MemOp::WAIT_32, word.addr(), 1, 0));
        assert_eq!(ops[4], MemOp::barrier());
    }

    #[test]
    fn only_not_ready_means_not_yet() {
        assert!(done(Ok(())).unwrap());
        let error = |status| Error::Cuda { call: "cuStreamQuery", status, fix: "" };
        assert!(!done(Err(error(CudaStatus::NOT_READY))).unwrap());
        done(Err(error(CudaStatus::LAUNCH_FAILED))).unwrap_err();
    }

    #[test]
    fn host_functions_do_what_they_say() {
        static READY: AtomicU32 = AtomicU32::new(0);
        static GATE: AtomicU32 = AtomicU32::new(0);
        static WAIT: HostWait = HostWait { ready: &READY, gate: &GATE, limit: Duration::from_millis(10) };
        let data: *mut c_void = std::ptr::from_ref(&WAIT).cast_mut().cast();
        // Nobody opens the gate.
        await_one(data);
        assert_eq!(READY.load(Ordering::Relaxed), 1);
        store_one(GATE.as_ptr().cast());
        assert_eq!(GATE.load(Ordering::Relaxed), 1);
        await_one(data);
    }
}
