//! A capture that the application makes by itself.
#![allow(unreachable_pub, reason = "as the other common parts")]

use gdsync::cuda::Gpu;
use gdsync::stream::Stream;

/// What `work` returns while the application captures the stream.
pub fn within_a_capture<T>(gpu: &Gpu, stream: &Stream, work: impl FnOnce() -> T) -> T {
    let (api, raw) = (gpu.api(), stream.raw().unwrap());
    let _current = gpu.enter().unwrap();
    // SAFETY: a stream of this context, in relaxed mode.
    unsafe { api.stream_begin_capture(raw, 2) }.unwrap();
    let done = work();
    let mut captured = 0;
    // SAFETY: a place for the graph.
    unsafe { api.stream_end_capture(raw, &mut captured) }.unwrap();
    // SAFETY: captured above.
    unsafe { api.graph_destroy(captured) }.unwrap();
    done
}
