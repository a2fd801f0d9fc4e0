//! Streams, batches that record for them, and graphs.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use gdsync::stream::{Batch, Capture, CudaStreamConfig, Graph, HostStreamConfig, KernelSteps, Stream, Via};
use gdsync_capi_support::handles::Table;
use parking_lot::Mutex;

use crate::abi::{IN_PROGRESS, KINDS, Raw};
use crate::context::context;
use crate::guard::{Error, Foreign, Result, c_number, end, invalid, number, place, status, timeout, values};

const HOST: u32 = 1;
const KERNEL: u32 = 2;

/// What work is enqueued on.
#[derive(Debug)]
pub(crate) enum Queue {
    Stream(Submitter),
    Batch(Box<Mutex<Batch>>),
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Submitter {
    pub(crate) stream: Stream,
    /// Held from the first operation of a call until the stream has all of them: threads do not mix theirs.
    order: Mutex<()>,
    capture: Mutex<Option<Capture>>,
}

/// Recorded work that is launched any number of times.
enum Program {
    Graph(Graph),
    /// Locked also while the caller launches the kernel.
    Steps(Mutex<KernelSteps>),
}

static STREAMS: Table<Arc<Queue>> = Table::new(6, &KINDS);
static GRAPHS: Table<Arc<Program>> = Table::new(7, &KINDS);

impl Queue {
    /// The stream, unless it is a batch.
    pub(crate) fn stream(&self) -> Result<&Submitter> {
        match self {
            Self::Stream(stream) => Ok(stream),
            Self::Batch(_) => Err(invalid("the stream", "a batch", "a stream of gda_stream_open")),
        }
    }

    fn batch(&self) -> Result<&Mutex<Batch>> {
        match self {
            Self::Batch(batch) => Ok(batch),
            Self::Stream(_) => Err(invalid("the batch", "a stream", "what gda_batch_begin has made")),
        }
    }
}

pub(crate) fn queue(raw: Raw) -> Result<Arc<Queue>> {
    Ok(STREAMS.get(raw)?.clone())
}

/// Enqueues what `record` adds to a batch: on a stream at once, in a batch of the caller with the rest of it.
pub(crate) fn on<T>(raw: Raw, record: impl FnOnce(&mut Batch) -> Result<T>) -> Result<T> {
    match &*queue(raw)? {
        Queue::Batch(batch) => record(&mut batch.lock()),
        Queue::Stream(to) => {
            let _order = to.order.lock();
            let mut batch = Batch::new();
            let made = record(&mut batch)?;
            to.stream.submit(&mut batch)?;
            Ok(made)
        }
    }
}

fn limit(ns: i64) -> Result<Duration> {
    if ns == 0 { Ok(HostStreamConfig::default().wait_limit) } else { timeout(ns) }
}

/// See the header.
///
/// # Safety
/// `cuda_stream` must be a stream of the context's GPU that lives until the close.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_stream_open(
    ctx: Raw,
    cuda_stream: *mut c_void,
    flags: u32,
    wait_limit_ns: i64,
    stream: *mut Raw,
) -> c_int {
    status("gda_stream_open", || {
        let (to, ctx, wait_limit) = (place("stream", stream)?, context(ctx)?, limit(wait_limit_ns)?);
        let stream = match flags {
            HOST if cuda_stream.is_null() => {
                Stream::host(HostStreamConfig { wait_limit, ..Default::default() })?
            }
            HOST => return Err(invalid("cuda_stream", "a stream", "NULL with GDA_STREAM_HOST")),
            0 | KERNEL => {
                let gpu = ctx.gpu()?;
                let via = if flags == KERNEL { Via::Kernel } else { CudaStreamConfig::default().via };
                let config = CudaStreamConfig { wait_limit, via, ..CudaStreamConfig::default() };
                // SAFETY: a stream of this GPU, which lives as long: the caller guarantees it.
                unsafe { Stream::cuda_from_raw(gpu, cuda_stream.addr(), config) }?
            }
            _ => {
                return Err(invalid(
                    "flags",
                    format_args!("{flags:#x}"),
                    "GDA_STREAM_HOST, GDA_STREAM_KERNEL or 0",
                ));
            }
        };
        // No call of this interface blocks, unless it takes a timeout.
        let (stream, order, capture) =
            (stream.with_timeout(Duration::ZERO), Mutex::default(), Mutex::default());
        *to = STREAMS.insert(Arc::new(Queue::Stream(Submitter { stream, order, capture })))?;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_stream_sync(stream: Raw, timeout_ns: i64) -> c_int {
    status("gda_stream_sync", || {
        let queue = queue(stream)?;
        // With the rank whose message has failed, in the text.
        Ok(queue.stream()?.stream.synchronize(timeout(timeout_ns)?)?)
    })
}

/// See the header.
///
/// # Safety
/// `rank` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_stream_status(stream: Raw, rank: *mut c_int) -> c_int {
    number("gda_stream_status", || {
        let queue = queue(stream)?;
        let done = queue.stream()?.stream.synchronize(Duration::ZERO).map_err(mp::Error::from);
        // SAFETY: null or writable: the caller guarantees it.
        if let Some(place) = unsafe { rank.as_mut() } {
            *place = match done {
                Err(mp::Error::Message { rank, .. }) => c_number(rank),
                _ => -1,
            };
        }
        match done {
            Err(mp::Error::Device(gdsync::Error::Deadline { .. })) => Ok(IN_PROGRESS),
            done => Ok(done.map(|()| 0)?),
        }
    })
}

/// See the header.
///
/// # Safety
/// The function must be callable with `this` when the stream gets there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_stream_call(
    stream: Raw,
    call: Option<unsafe extern "C" fn(*mut c_void)>,
    this: *mut c_void,
) -> c_int {
    status("gda_stream_call", || {
        let call = call.ok_or_else(|| invalid("fn", "NULL", "a function"))?;
        let this = Foreign(this);
        on(stream, |batch| {
            // SAFETY: the caller's function.
            batch.host_fn(move || unsafe { call(this.get()) });
            Ok(())
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_stream_close(stream: Raw) -> c_int {
    end("gda_stream_close", &STREAMS, stream)
}

/// See the header.
///
/// # Safety
/// `batch` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_batch_begin(ctx: Raw, batch: *mut Raw) -> c_int {
    status("gda_batch_begin", || {
        let (batch, _ctx) = (place("batch", batch)?, context(ctx)?);
        *batch = STREAMS.insert(Arc::new(Queue::Batch(Box::default())))?;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_batch_submit(batch: Raw, stream: Raw) -> c_int {
    status("gda_batch_submit", || {
        let (batch, to) = (queue(batch)?, queue(stream)?);
        let (mut batch, to) = (batch.batch()?.lock(), to.stream()?);
        let _order = to.order.lock();
        Ok(to.stream.submit(&mut batch)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_capture_begin(stream: Raw) -> c_int {
    status("gda_capture_begin", || {
        let queue = queue(stream)?;
        let of = queue.stream()?;
        // Held, so that two captures do not begin at once.
        let mut capture = of.capture.lock();
        *capture = Some(of.stream.begin_capture()?);
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `graph` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_capture_end(stream: Raw, graph: *mut Raw) -> c_int {
    status("gda_capture_end", || {
        let (graph, queue) = (place("graph", graph)?, queue(stream)?);
        let capture = queue.stream()?.capture.lock().take();
        let capture =
            capture.ok_or_else(|| invalid("the capture", "none", "one that gda_capture_begin has begun"))?;
        *graph = GRAPHS.insert(Arc::new(Program::Graph(capture.end()?)))?;
        Ok(())
    })
}

fn program(raw: Raw) -> Result<Arc<Program>> {
    Ok(GRAPHS.get(raw)?.clone())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_graph_launch(graph: Raw, stream: Raw) -> c_int {
    status("gda_graph_launch", || {
        let (program, queue) = (program(graph)?, queue(stream)?);
        match &*program {
            Program::Graph(graph) => Ok(graph.launch(&queue.stream()?.stream).map(drop)?),
            Program::Steps(_) => Err(invalid("the graph", "steps", "a graph: gda_steps_launch is for steps")),
        }
    })
}

/// See the header.
///
/// # Safety
/// `batches` must be valid for `n` handles, `steps` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_steps_record(
    stream: Raw,
    batches: *const Raw,
    n: c_int,
    steps: *mut Raw,
) -> c_int {
    status("gda_steps_record", || {
        let (steps, queue_) = (place("steps", steps)?, queue(stream)?);
        // SAFETY: the caller vouches for the number.
        let batches = unsafe { values("batches", batches, n) }?;
        let batches = batches.iter().map(|&raw| queue(raw)).collect::<Result<Vec<_>>>()?;
        let batches = batches.iter().map(|one| one.batch()).collect::<Result<Vec<_>>>()?;
        let recorded = queue_
            .stream()?
            .stream
            .record_steps(|stream| batches.iter().try_for_each(|batch| stream.submit(&mut batch.lock())));
        *steps = GRAPHS.insert(Arc::new(Program::Steps(Mutex::new(recorded?))))?;
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `launch` must be callable with `this`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_steps_launch(
    steps: Raw,
    stream: Raw,
    launch: Option<unsafe extern "C" fn(*mut c_void, u64) -> c_int>,
    this: *mut c_void,
) -> c_int {
    status("gda_steps_launch", || {
        let (program, queue) = (program(steps)?, queue(stream)?);
        let launch =
            launch.ok_or_else(|| invalid("launch", "NULL", "a function that launches the kernel"))?;
        let Program::Steps(steps) = &*program else {
            return Err(invalid("the steps", "a graph", "what gda_steps_record has made"));
        };
        // A launch may not launch again.
        let busy = || Error::Own(libc::EBUSY, "another call launches these steps".into());
        let steps = steps.try_lock().ok_or_else(busy)?;
        let launched = steps.launch(&queue.stream()?.stream, |address| {
            // SAFETY: the caller's function.
            match unsafe { launch(this, address) } {
                0 => Ok(()),
                failed => {
                    let errno = failed.checked_abs().unwrap_or(libc::EIO);
                    Err(Error::Own(errno, format!("the function that launches the kernel returned {failed}")))
                }
            }
        });
        launched.map(drop)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_graph_destroy(graph: Raw) -> c_int {
    end("gda_graph_destroy", &GRAPHS, graph)
}
