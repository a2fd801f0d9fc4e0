//! Streams, and the capture of their work into graphs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{CAPTURE_RELAXED, Handle, MemOp, STREAM_NON_BLOCKING};
use parking_lot::Mutex;

use super::context::{CONTEXTS, Context, Table, current, number};
use super::control::{COUNTERS, SETTINGS, count};
use super::queue::{Command, Copy, Fill, Shared, Side, Ticket};
use super::status::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, ILLEGAL_STATE,
};
use super::{Outcome, address, memop, put, put_wanted, require};

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
        match capture_of(self) {
            Some(capture) => Err(capture.spoil()),
            None => Ok(()),
        }
    }
}

/// The stream of a handle.
pub(super) fn resolve(handle: Handle) -> Outcome<Arc<Stream>> {
    if handle > PER_THREAD {
        return STREAMS.get(handle).inspect_err(|_| count(&COUNTERS.stray));
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
    if SETTINGS.lock().version < 13_000 {
        current()?;
    }
    let stream = resolve(handle)?;
    stream.context.check()?;
    if stream.is_legacy && spoil_blocking(stream.context.handle) {
        return Err(CAPTURE_IMPLICIT);
    }
    let command = build(&stream.context)?;
    match capture_of(&stream) {
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
    unsafe_call()?;
    require(!stream.is_null() && flags <= STREAM_NON_BLOCKING, CudaStatus::INVALID_VALUE)?;
    let made = Stream::start(&context, flags == 0, false)?;
    put(stream, STREAMS.insert(|_| made))
}

pub(super) fn query(stream: Handle) -> Outcome {
    let stream = resolve(stream)?;
    stream.not_captured()?;
    unsafe_call()?;
    require(stream.shared.last().is_done(), CudaStatus::NOT_READY)?;
    stream.context.check()
}

pub(super) fn synchronize(stream: Handle) -> Outcome {
    let stream = resolve(stream)?;
    stream.not_captured()?;
    unsafe_call()?;
    stream.shared.synchronize()
}

pub(super) fn destroy(stream: Handle) -> Outcome {
    let found = STREAMS.get(stream).inspect_err(|_| count(&COUNTERS.stray))?;
    if let Some(capture) = capture_of(&found) {
        return Err(capture.spoil());
    }
    STREAMS.remove(stream).map(drop)
}

pub(super) fn get_context(stream: Handle, context: *mut Handle) -> Outcome {
    put(context, resolve(stream)?.context.handle)
}

pub(super) fn get_id(stream: Handle, id: *mut u64) -> Outcome {
    put(id, resolve(stream)?.number as u64)
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
        CONTEXTS.get(context).map_err(|_| CudaStatus::INVALID_CONTEXT)?;
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

pub(super) static GRAPHS: Table<Arc<Graph>> = Table::new();

/// Nodes in their order.
#[derive(Default)]
pub(super) struct Graph(pub(super) Mutex<Vec<Node>>);

#[derive(Clone)]
pub(super) struct Node {
    pub(super) handle: Handle,
    pub(super) command: Command,
}

impl Graph {
    /// Adds a node after the others.
    pub(super) fn add(&self, command: Command) -> Handle {
        let handle = number();
        self.0.lock().push(Node { handle, command });
        handle
    }

    pub(super) fn place_of(&self, node: Handle) -> Option<usize> {
        self.0.lock().iter().position(|own| own.handle == node)
    }
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`; 1 is `_THREAD_LOCAL`.
const GLOBAL: u32 = 0;
pub(super) const RELAXED: u32 = CAPTURE_RELAXED;

static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// A stream that is being captured.
struct Capture {
    /// The number of the stream.
    stream: Handle,
    context: Handle,
    is_blocking: bool,
    mode: u32,
    thread: ThreadId,
    graph: Handle,
    nodes: Arc<Graph>,
    /// The last node, at a lasting address; 0 for none.
    last: AtomicUsize,
    spoiled: AtomicBool,
}

impl Capture {
    /// Ends all hope for it; the status of the call that did it.
    fn spoil(&self) -> CudaStatus {
        self.spoiled.store(true, Ordering::Release);
        CAPTURE_UNSUPPORTED
    }

    fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
    }

    /// Makes work its next node.
    fn add(&self, command: Command) -> Outcome {
        require(!self.is_spoiled(), CAPTURE_INVALIDATED)?;
        if !command.can_be_node() {
            return Err(self.spoil());
        }
        self.last.store(self.nodes.add(command), Ordering::Release);
        Ok(())
    }

    /// Whether it forbids this thread what is not safe in a capture.
    fn forbids(&self, mode: u32) -> bool {
        if self.thread == std::thread::current().id() {
            self.mode != RELAXED
        } else {
            mode == GLOBAL && self.mode == GLOBAL
        }
    }
}

pub(super) fn exchange_mode(mode: u32) -> u32 {
    MODE.replace(mode)
}

/// Refuses a call that is not safe in a capture, and spoils the captures that mind.
pub(super) fn unsafe_call() -> Outcome {
    let mode = MODE.get();
    if mode == RELAXED {
        return Ok(());
    }
    let captures = CAPTURES.lock();
    let mut outcome = Ok(());
    for capture in captures.iter().filter(|capture| capture.forbids(mode)) {
        outcome = Err(capture.spoil());
    }
    outcome
}

/// The capture of a stream.
fn capture_of(stream: &Stream) -> Option<Arc<Capture>> {
    CAPTURES.lock().iter().find(|capture| capture.stream == stream.number).cloned()
}

/// Spoils the captures of blocking streams of a context, as the use of its legacy stream does, if there are any.
fn spoil_blocking(context: Handle) -> bool {
    let captures = CAPTURES.lock();
    let mut any = false;
    for capture in captures.iter().filter(|capture| capture.is_blocking && capture.context == context) {
        capture.spoil();
        any = true;
    }
    any
}

/// Ends the captures in contexts that are gone, or were left behind.
pub(super) fn forget_captures(is_gone: impl Fn(Handle) -> bool) {
    for capture in CAPTURES.lock().extract_if(.., |capture| is_gone(capture.context)) {
        // It is there as long as its capture, or was destroyed by the application.
        _ = GRAPHS.remove(capture.graph);
    }
}

pub(super) fn begin_capture(handle: Handle, mode: u32) -> Outcome {
    require(mode <= RELAXED, CudaStatus::INVALID_VALUE)?;
    let stream = resolve(handle)?;
    stream.context.check()?;
    require(!stream.is_legacy, CAPTURE_UNSUPPORTED)?;
    let mut captures = CAPTURES.lock();
    require(captures.iter().all(|capture| capture.stream != stream.number), ILLEGAL_STATE)?;
    let nodes = Arc::new(Graph::default());
    captures.push(Arc::new(Capture {
        stream: stream.number,
        context: stream.context.handle,
        is_blocking: stream.is_blocking,
        mode,
        thread: std::thread::current().id(),
        graph: GRAPHS.insert(|_| nodes.clone()),
        nodes,
        last: AtomicUsize::new(0),
        spoiled: AtomicBool::new(false),
    }));
    Ok(())
}

pub(super) fn end_capture(handle: Handle, graph: *mut Handle) -> Outcome {
    let stream = resolve(handle)?;
    require(!graph.is_null(), CudaStatus::INVALID_VALUE)?;
    let mut captures = CAPTURES.lock();
    let index = captures.iter().position(|capture| capture.stream == stream.number).ok_or(ILLEGAL_STATE)?;
    let own = captures[index].thread == std::thread::current().id();
    require(own || captures[index].mode == RELAXED, CAPTURE_WRONG_THREAD)?;
    let capture = captures.remove(index);
    drop(captures);
    if capture.is_spoiled() {
        GRAPHS.remove(capture.graph)?;
        put(graph, 0)?;
        return Err(CAPTURE_INVALIDATED);
    }
    put(graph, capture.graph)
}

/// The graph so far and its last node. Of a spoiled capture only that it is so.
pub(super) fn capture_info(
    stream: Handle,
    status: *mut u32,
    id: *mut u64,
    graph: *mut Handle,
    dependencies: *mut *const Handle,
    count: *mut usize,
) -> Outcome {
    let stream = resolve(stream)?;
    if stream.is_legacy && spoil_blocking(stream.context.handle) {
        return Err(CAPTURE_IMPLICIT);
    }
    let Some(capture) = capture_of(&stream) else { return put(status, 0) };
    if capture.is_spoiled() {
        return put(status, 2);
    }
    put(status, 1)?;
    put_wanted(id, capture.graph as u64)?;
    put_wanted(graph, capture.graph)?;
    put_wanted(dependencies, capture.last.as_ptr().cast_const())?;
    put_wanted(count, usize::from(capture.last.load(Ordering::Acquire) != 0))
}
