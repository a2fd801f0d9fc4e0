//! Copies on streams of our own. The legacy stream, which the synchronous copies of CUDA use, waits for the
//! blocking streams of the application; those may wait for what this copy brings.

use super::Driver;
use super::context::destroy_stream;
use super::layout::{Handle, STREAM_NON_BLOCKING};
use crate::error::{Error, Result};

/// Idle streams kept for each GPU. More threads may copy at once; their streams are not kept.
const IDLE_STREAMS: usize = 8;

impl Driver {
    /// Runs a copy of `len` bytes from or to GPU memory at `addr`, and waits until the bytes are in place: an
    /// asynchronous copy from pageable memory may return before. There is no deadline: the host memory is the
    /// caller's, and giving up would leave the GPU writing to it.
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
        let (gpu, context) = self.home(addr)?;
        if gpu.ordinal != device {
            return Err(Error::invalid("device", device, "the GPU that the memory is on"));
        }
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

    /// A stream of the highest priority. Streams share the GPU's hardware queues, in which a blocked wait holds
    /// up all that is behind it; but only those of equal priority share, and applications rarely use this one.
    fn new_stream(&self) -> Result<Handle> {
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        // SAFETY: places for the answers; a context is current.
        unsafe { self.api.ctx_get_stream_priority_range(&mut least, &mut greatest) }?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, greatest) }?;
        Ok(stream)
    }
}
