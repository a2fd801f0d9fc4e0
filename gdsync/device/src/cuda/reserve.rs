//! Fills the driver's pool of streams and graphs before any stream waits.
//!
//! When the pool is exhausted the driver waits for every stream of the process: on an H200 (driver 580) at the 34th and 77th stream, and
//! at the 10th and 31st graph with a kernel. Streams and graphs that are created and destroyed here stay in the pool.

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{CAPTURE_RELAXED, Handle, STREAM_NON_BLOCKING};

use super::kernel_exec::{Head, KernelExecutor, KernelOp, SMALL};

/// Streams and graphs in the pool afterwards.
const STREAMS: usize = 64;
const GRAPHS: usize = 64;

/// Fills the pool. The context must be current.
pub(super) fn reserve(api: &Api, kernel_exec: &KernelExecutor) {
    let (mut streams, mut graphs) = (Vec::new(), Vec::new());
    if let Err(error) = make(api, kernel_exec, &mut streams, &mut graphs) {
        tracing::debug!(%error, "streams and graphs are not reserved");
    }
    let mut gone = Vec::new();
    for exec in graphs {
        // SAFETY: created by `make`, never launched.
        gone.push(unsafe { api.graph_exec_destroy(exec) });
    }
    for stream in streams {
        // SAFETY: created by `make`, without work.
        gone.push(unsafe { api.stream_destroy(stream) });
    }
    if let Some(error) = gone.into_iter().find_map(Result::err) {
        tracing::debug!(%error, "a stream or graph is leaked");
    }
}

fn make(
    api: &Api,
    kernel_exec: &KernelExecutor,
    streams: &mut Vec<Handle>,
    graphs: &mut Vec<Handle>,
) -> gdrcopy::Result<()> {
    for _ in 0..STREAMS {
        let mut stream = 0;
        // SAFETY: a place for the answer.
        unsafe { api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }?;
        streams.push(stream);
    }
    let graph = kernels(api, kernel_exec, streams[0])?;
    let mut instantiate = || {
        let mut exec = 0;
        // SAFETY: a place for the answer, a graph, no flags.
        unsafe { api.graph_instantiate(&mut exec, graph, 0) }?;
        graphs.push(exec);
        Ok(())
    };
    let made = (0..GRAPHS).try_for_each(|_| instantiate());
    // SAFETY: captured here.
    made.and(unsafe { api.graph_destroy(graph) })
}

/// A graph of both kernels, without operations.
fn kernels(api: &Api, kernel_exec: &KernelExecutor, stream: Handle) -> gdrcopy::Result<Handle> {
    let head = Head { status: 0, limit_ns: 0, submission: 0, count: 0 };
    // SAFETY: an idle stream of this context.
    unsafe { api.stream_begin_capture(stream, CAPTURE_RELAXED) }?;
    let launched = kernel_exec
        .launch(api, stream, head, &[])
        .and_then(|()| kernel_exec.launch(api, stream, head, &[KernelOp::BARRIER; SMALL + 1]));
    let mut graph = 0;
    // SAFETY: a stream that is being captured, and a place for the graph.
    let ended = unsafe { api.stream_end_capture(stream, &mut graph) };
    launched.and(ended).map(|()| graph)
}
