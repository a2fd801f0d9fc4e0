//! Stream memory operations, actually run: eager, and from a graph.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{CAPTURE_RELAXED, HOST_ALLOC_PORTABLE, Handle, MemOp, STREAM_NON_BLOCKING};

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const HOST_ALLOC_MAPPED: u32 = 2;
/// `CU_STREAM_WAIT_VALUE_EQ`.
const WAIT_EQUAL: u32 = 1;

/// A stream, and three words that it and the CPU share.
pub(super) struct Bench<'a> {
    api: &'a Api,
    stream: Handle,
    words: NonNull<[AtomicU64; 3]>,
    /// The GPU's address of the first.
    addr: u64,
    /// What the GPU may take for a few operations.
    patience: Duration,
}

/// What went wrong.
#[derive(Debug)]
pub(super) enum Trouble {
    Call(gdrcopy::Error),
    Silent(&'static str, Duration),
    Hasty,
}

impl From<gdrcopy::Error> for Trouble {
    fn from(error: gdrcopy::Error) -> Self {
        Self::Call(error)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::Silent(what, patience) => write!(f, "{what} did not show within {patience:?}"),
            Self::Hasty => f.write_str("the stream passed a wait that was not satisfied"),
        }
    }
}

impl<'a> Bench<'a> {
    /// In the current context.
    pub(super) fn new(api: &'a Api, patience: Duration) -> gdrcopy::Result<Self> {
        let (mut host, mut addr, mut stream) = (std::ptr::null_mut::<c_void>(), 0, 0);
        // SAFETY: a place for the answer; a context is current.
        unsafe {
            api.mem_host_alloc(&mut host, gdrcopy::host_page(), HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED)
        }?;
        // SAFETY: a place for the answer; the memory was allocated above.
        unsafe { api.mem_host_get_device_pointer(&mut addr, host, 0) }?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }?;
        let words = NonNull::new(host.cast::<[AtomicU64; 3]>()).expect("the driver gave memory");
        Ok(Self { api, stream, words, addr, patience })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: a page of memory that is never freed, aligned to pages; everybody accesses its words atomically.
        let words = unsafe { self.words.as_ref() };
        &words[at]
    }

    /// A write, a wait for an answer of the CPU, and a write behind it.
    fn ops(&self, value: u64) -> [MemOp; 4] {
        [
            MemOp::word(MemOp::WRITE_64, self.addr, value, 0),
            MemOp::word(MemOp::WAIT_64, self.addr + 8, value, WAIT_EQUAL),
            MemOp::barrier(),
            MemOp::word(MemOp::WRITE_64, self.addr + 16, value, 0),
        ]
    }

    fn submit(&self, value: u64) -> gdrcopy::Result<()> {
        let mut ops = self.ops(value);
        // SAFETY: four operations, on words that stay, and a live stream.
        unsafe { self.api.stream_batch_mem_op(self.stream, 4, ops.as_mut_ptr(), 0) }
    }

    /// The CPU's part of it.
    fn follow(&self, value: u64) -> Result<(), Trouble> {
        let silent = |what| Err(Trouble::Silent(what, self.patience));
        let first = self.shows(0, value);
        let hasty = self.word(2).load(Ordering::Acquire) == value;
        // Also where nothing showed: no stream may stay behind that waits.
        self.word(1).store(value, Ordering::Release);
        match () {
            () if !first => silent("what a stream wrote"),
            () if hasty => Err(Trouble::Hasty),
            () if !self.shows(2, value) => silent("what a stream wrote behind a satisfied wait"),
            () => Ok(()),
        }
    }

    /// Whether a word gets this value in time.
    fn shows(&self, at: usize, value: u64) -> bool {
        let deadline = Instant::now() + self.patience;
        loop {
            if self.word(at).load(Ordering::Acquire) == value {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::yield_now();
        }
    }

    /// Runs the operations.
    pub(super) fn run(&self) -> Result<String, Trouble> {
        self.submit(0x1_0000_0001)?;
        self.follow(0x1_0000_0001)?;
        Ok("a write, a wait for the CPU, a barrier and a write ran".into())
    }

    /// Captures the operations, and runs them as a graph.
    pub(super) fn capture(&self) -> Result<String, Trouble> {
        const VALUE: u64 = 0x2_0000_0002;
        let (api, stream) = (self.api, self.stream);
        let (mut graph, mut exec) = (0, 0);
        // SAFETY: a live stream.
        unsafe { api.stream_begin_capture(stream, CAPTURE_RELAXED) }?;
        let captured = self.submit(VALUE);
        // SAFETY: a place for the answer; the capture was begun above.
        let ended = unsafe { api.stream_end_capture(stream, &mut graph) };
        captured?;
        ended?;
        // SAFETY: a place for the answer, and the graph that was captured.
        unsafe { api.graph_instantiate(&mut exec, graph, 0) }?;
        if self.word(0).load(Ordering::Acquire) == VALUE {
            return Err(Trouble::Hasty);
        }
        // SAFETY: the graph made above, on a live stream.
        unsafe { api.graph_launch(exec, stream) }?;
        self.follow(VALUE)?;
        Ok("the same, captured and launched as a graph".into())
    }
}
