//! Copies on streams of our own. The legacy stream, which the synchronous copies of CUDA use, waits for the
//! blocking streams of the application; those may wait for what this copy brings.

use super::Driver;
use super::context::destroy_stream;
use super::layout::{Handle, STREAM_NON_BLOCKING};
use crate::error::Result;

/// Idle streams kept for each GPU. More threads may copy at once; their streams are not kept.
const IDLE_STREAMS: usize = 8;

impl Driver {
    /// Runs a copy of `len` bytes from or to GPU memory at `addr`, and waits until the bytes are in place: an
    /// asynchronous copy from pageable memory may return before.
    pub(super) fn copy(
        &self,
        device: i32,
        addr: u64,
        len: usize,
        start: impl FnOnce(Handle) -> Result<()>,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let gpu = self.gpu(device)?;
        let context = self.context_of(addr, gpu)?;
        let _current = context.enter(&self.api)?;
        let idle = if context.primary { gpu.streams.lock().pop() } else { None };
        let stream = idle.map_or_else(|| self.new_stream(), Ok)?;

        let started = start(stream);
        // Also after a failure: part of the copy may be under way, and the host memory is the caller's.
        // SAFETY: a stream of the current context.
        let done = unsafe { self.api.stream_synchronize(stream) };
        let result = started.and(done);

        let mut streams = gpu.streams.lock();
        if result.is_ok() && context.primary && streams.len() < IDLE_STREAMS {
            streams.push(stream);
        } else {
            drop(streams);
            destroy_stream(&self.api, stream);
        }
        result
    }

    fn new_stream(&self) -> Result<Handle> {
        let mut stream = 0;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING) }?;
        Ok(stream)
    }
}
