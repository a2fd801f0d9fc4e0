//! Streams.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;

use super::command::{Command, Copy, Fill, Side};
use super::context::{Context, current};
use super::handles::{Table, number};
use super::queue::{Shared, Ticket};
use super::status::CAPTURE_IMPLICIT;
use super::{Outcome, address, capture, context, control, memop, put, require};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{Handle, MemOp, STREAM_NON_BLOCKING};

/// `CU_STREAM_LEGACY`; so is 0.
const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Handle = 2;

/// Streams that the application made.
pub(super) static STREAMS: Table<Arc<Stream>> = Table::new();
/// The legacy streams by context.
static LEGACY_STREAMS: Mutex<BTreeMap<Handle, Arc<Stream>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The streams of this thread by context.
    static OF_THREAD: RefCell<BTreeMap<Handle, Arc<Stream>>> = const { RefCell::new(BTreeMap::new()) };
}

/// A stream. Its queue ends with it.
pub(super) struct Stream {
    /// Its own number, also of a default stream.
    pub(super) number: Handle,
    pub(super) context: Arc<Context>,
    /// In order with the legacy stream.
    pub(super) is_blocking: bool,
    pub(super) is_legacy: bool,
    pub(super) shared: Arc<Shared>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Stream {
    fn start(context: &Arc<Context>, is_blocking: bool, is_legacy: bool) -> Outcome<Arc<Self>> {
        let (context, shared) = (context.clone(), Shared::start(context.clone())?);
        Ok(Arc::new(Self { number: number(), context, is_blocking, is_legacy, shared }))
    }

    /// Refuses what would ask for the state of a stream that is being captured, and spoils the capture.
    fn not_captured(&self) -> Outcome {
        self.context.check()?;
        match capture::of_stream(self) {
            Some(capture) => Err(capture.spoil()),
            None => Ok(()),
        }
    }
}

/// The stream of a handle.
pub(super) fn resolve(handle: Handle) -> Outcome<Arc<Stream>> {
    if handle > PER_THREAD {
        return STREAMS.get(handle).inspect_err(|_| control::stray());
    }
    let context = current()?;
    let made = |streams: &mut BTreeMap<Handle, Arc<Stream>>, is_legacy| {
        if let Some(stream) = streams.get(&context.handle) {
            return Ok(stream.clone());
        }
        let stream = Stream::start(&context, true, is_legacy)?;
        streams.insert(context.handle, stream.clone());
        Ok(stream)
    };
    if handle <= LEGACY {
        return made(&mut LEGACY_STREAMS.lock(), true);
    }
    OF_THREAD.with_borrow_mut(|streams| made(streams, false))
}

/// Enqueues what `build` gives for the stream's context, or captures it: then nothing is there to wait for.
pub(super) fn enqueue(
    handle: Handle,
    build: impl FnOnce(&Arc<Context>) -> Outcome<Command>,
) -> Outcome<Option<Ticket>> {
    current()?;
    enqueue_anywhere(handle, build)
}

/// As [`enqueue`], whatever context the thread has, as CUDA does from 13.0 on with memory operations and launches.
pub(super) fn enqueue_anywhere(
    handle: Handle,
    build: impl FnOnce(&Arc<Context>) -> Outcome<Command>,
) -> Outcome<Option<Ticket>> {
    if control::version() < 13_000 {
        current()?;
    }
    let stream = resolve(handle)?;
    stream.context.check()?;
    if stream.is_legacy && capture::spoil_blocking(stream.context.handle) {
        return Err(CAPTURE_IMPLICIT);
    }
    let command = build(&stream.context)?;
    match capture::of_stream(&stream) {
        Some(capture) => capture.add(command).map(|()| None),
        None => stream.shared.submit(command).map(Some),
    }
}

/// A context is gone, and its streams with it.
pub(super) fn forget(context: Handle) {
    STREAMS.forget(|stream| stream.context.handle == context);
    let legacy = LEGACY_STREAMS.lock().remove(&context);
    drop(legacy);
}

pub(super) fn create(stream: *mut Handle, flags: u32, _priority: i32) -> Outcome {
    let context = current()?;
    capture::unsafe_call()?;
    require(!stream.is_null() && flags <= STREAM_NON_BLOCKING, CudaStatus::INVALID_VALUE)?;
    let made = Stream::start(&context, flags == 0, false)?;
    put(stream, STREAMS.insert(|_| made))
}

pub(super) fn query(stream: Handle) -> Outcome {
    let stream = resolve(stream)?;
    stream.not_captured()?;
    capture::unsafe_call()?;
    require(stream.shared.last().is_done(), CudaStatus::NOT_READY)?;
    stream.context.check()
}

pub(super) fn synchronize(stream: Handle) -> Outcome {
    let stream = resolve(stream)?;
    stream.not_captured()?;
    capture::unsafe_call()?;
    stream.shared.synchronize()
}

pub(super) fn destroy(stream: Handle) -> Outcome {
    let found = STREAMS.get(stream).inspect_err(|_| control::stray())?;
    if let Some(capture) = capture::of_stream(&found) {
        return Err(capture.spoil());
    }
    STREAMS.remove(stream).map(drop)
}

pub(super) fn get_context(stream: Handle, context: *mut Handle) -> Outcome {
    put(context, resolve(stream)?.context.handle)
}

pub(super) fn batch_mem_op(stream: Handle, count: u32, ops: *mut MemOp, flags: u32) -> Outcome {
    enqueue_anywhere(stream, |context| memop::batch(context, count, ops, flags).map(Command::MemOps))
        .map(drop)
}

pub(super) fn launch_host(
    stream: Handle,
    function: extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> Outcome {
    enqueue(stream, |_| Ok(Command::Host(function, data.expose_provenance()))).map(drop)
}

/// A copy between two sides.
fn copy(to: Outcome<Side>, from: Outcome<Side>, len: usize, stream: Handle) -> Outcome {
    if len == 0 {
        return resolve(stream).map(drop);
    }
    let mut is_synchronous = false;
    let copied = enqueue(stream, |_| {
        let copy = Copy::new(to?, from?, len);
        is_synchronous = copy.is_synchronous();
        Ok(Command::Copy(copy))
    })?;
    match copied.filter(|_| is_synchronous) {
        Some(ticket) => ticket.synchronize(),
        None => Ok(()),
    }
}

pub(super) fn copy_to_device(dst: u64, src: *const c_void, len: usize, stream: Handle) -> Outcome {
    copy(Side::device(address(dst)?, len), Side::any(src.expose_provenance(), len), len, stream)
}

pub(super) fn copy_to_host(dst: *mut c_void, src: u64, len: usize, stream: Handle) -> Outcome {
    copy(Side::any(dst.expose_provenance(), len), Side::device(address(src)?, len), len, stream)
}

pub(super) fn copy_any(dst: u64, src: u64, len: usize, stream: Handle) -> Outcome {
    copy(Side::any(address(dst)?, len), Side::any(address(src)?, len), len, stream)
}

pub(super) fn copy_peer(dst: (u64, Handle), src: (u64, Handle), len: usize, stream: Handle) -> Outcome {
    for context in [dst.1, src.1] {
        context::CONTEXTS.get(context).map_err(|_| CudaStatus::INVALID_CONTEXT)?;
    }
    copy(Side::device(address(dst.0)?, len), Side::device(address(src.0)?, len), len, stream)
}

pub(super) fn fill(dst: u64, value: u32, count: usize, stream: Handle) -> Outcome {
    let addr = address(dst)?;
    let len = count.checked_mul(4).filter(|_| addr.is_multiple_of(4)).ok_or(CudaStatus::INVALID_VALUE)?;
    if len == 0 {
        return resolve(stream).map(drop);
    }
    enqueue(stream, |_| Ok(Command::Fill(Fill { to: Side::device(addr, len)?, value, count }))).map(drop)
}
