//! The capture of streams, and what it forbids.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::command::Command;
use super::graph::{GRAPHS, Graph};
use super::status::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, ILLEGAL_STATE,
};
use super::stream::{Stream, resolve};
use super::{Outcome, put, put_wanted, require};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{CAPTURE_RELAXED, Handle};

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`; 1 is `_THREAD_LOCAL`.
const GLOBAL: u32 = 0;
pub(super) const RELAXED: u32 = CAPTURE_RELAXED;

static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// A stream that is being captured.
pub(super) struct Capture {
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
    pub(super) fn spoil(&self) -> CudaStatus {
        self.spoiled.store(true, Ordering::Release);
        CAPTURE_UNSUPPORTED
    }

    fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
    }

    /// Makes work its next node.
    pub(super) fn add(&self, command: Command) -> Outcome {
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
pub(super) fn of_stream(stream: &Stream) -> Option<Arc<Capture>> {
    CAPTURES.lock().iter().find(|capture| capture.stream == stream.number).cloned()
}

/// Spoils the captures of blocking streams of a context, as the use of its legacy stream does, if there are any.
pub(super) fn spoil_blocking(context: Handle) -> bool {
    let captures = CAPTURES.lock();
    let mut any = false;
    for capture in captures.iter().filter(|capture| capture.is_blocking && capture.context == context) {
        capture.spoil();
        any = true;
    }
    any
}

/// Ends the captures in contexts that are gone, or were left behind.
pub(super) fn forget(is_gone: impl Fn(Handle) -> bool) {
    for capture in CAPTURES.lock().extract_if(.., |capture| is_gone(capture.context)) {
        // It is there as long as its capture, or was destroyed by the application.
        _ = GRAPHS.remove(capture.graph);
    }
}

pub(super) fn begin(handle: Handle, mode: u32) -> Outcome {
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

pub(super) fn end(handle: Handle, graph: *mut Handle) -> Outcome {
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
pub(super) fn info(
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
    let Some(capture) = of_stream(&stream) else { return put(status, 0) };
    if capture.is_spoiled() {
        return put(status, 2);
    }
    put(status, 1)?;
    put_wanted(id, capture.graph as u64)?;
    put_wanted(graph, capture.graph)?;
    put_wanted(dependencies, capture.last.as_ptr().cast_const())?;
    put_wanted(count, usize::from(capture.last.load(Ordering::Acquire) != 0))
}
