//! Copies on streams of our own. The legacy stream, which the synchronous copies of CUDA use, waits for the
//! blocking streams of the application; those may wait for what this copy brings.

use super::Driver;
use super::api::Api;
use super::layout::{HOST_ALLOC_PORTABLE, Handle, STREAM_NON_BLOCKING};
use crate::error::{Error, Result};

/// Idle streams kept for each GPU. More threads may copy at once; their streams are not kept.
const IDLE_STREAMS: usize = 8;

/// Up to this length bytes come to the host through a pinned buffer, bytes: on an H200 8 KiB take 6.6 us instead of
/// 8.7, and 256 KiB 22 instead of 29. Above it, and in the other direction at any length, that gains nothing.
const BOUNCE: usize = 256 << 10;

/// A stream, and pinned memory for what it brings to the host.
pub(super) struct CopyStream {
    stream: Handle,
    /// Address of [`BOUNCE`] bytes, 0 for none.
    bounce: usize,
}

impl CopyStream {
    /// Destroys a stream on which nothing runs. Its context must be current.
    pub(super) fn destroy(self, api: &Api) {
        // SAFETY: made here, destroyed once, with its context current.
        let destroyed = unsafe { api.stream_destroy(self.stream) };
        let freed = match self.bounce {
            0 => Ok(()),
            // SAFETY: as above; nothing runs that would write to it.
            bounce => unsafe { api.mem_free_host(std::ptr::with_exposed_provenance_mut(bounce)) },
        };
        if let Err(error) = destroyed.and(freed) {
            tracing::debug!(%error, "stream not destroyed");
        }
    }
}

impl Driver {
    /// Copies host memory to the GPU; see [`copy`](Self::copy).
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub(super) unsafe fn copy_in(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
        let start = |stream: &CopyStream| {
            // SAFETY: the caller vouches for the host side, the driver checks the GPU side.
            unsafe { self.api.memcpy_to_device_async(dst, src.cast(), len, stream.stream) }
        };
        self.copy(device, dst, len, start, |_| ())
    }

    /// Copies GPU memory to the host; see [`copy`](Self::copy).
    ///
    /// # Safety
    /// `dst` must be writable for `len` bytes.
    pub(super) unsafe fn copy_out(&self, device: i32, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        let pinned = |stream: &CopyStream| {
            let small = len <= BOUNCE && stream.bounce != 0;
            small.then(|| std::ptr::with_exposed_provenance_mut::<u8>(stream.bounce))
        };
        let start = |stream: &CopyStream| {
            let target = pinned(stream).unwrap_or(dst);
            // SAFETY: the caller vouches for `dst`, and the pinned buffer is long enough; the driver checks the GPU side.
            unsafe { self.api.memcpy_to_host_async(target.cast(), src, len, stream.stream) }
        };
        self.copy(device, src, len, start, |stream| {
            if let Some(bounce) = pinned(stream) {
                // SAFETY: the copy into the pinned buffer is over; the caller vouches for `dst`.
                unsafe { dst.copy_from_nonoverlapping(bounce, len) };
            }
        })
    }

    /// Runs a copy of `len` bytes from or to GPU memory at `addr`, and waits until the bytes are in place: an
    /// asynchronous copy from pageable memory may return before. There is no deadline: the host memory is the
    /// caller's, and giving up would leave the GPU writing to it.
    fn copy(
        &self,
        device: i32,
        addr: u64,
        len: usize,
        start: impl FnOnce(&CopyStream) -> Result<()>,
        finish: impl FnOnce(&CopyStream),
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
        let stream = idle.map_or_else(|| self.new_stream(context.primary), Ok)?;

        let started = start(&stream);
        // Also after a failure: part of the copy may be under way, and the host memory is the caller's.
        // SAFETY: a stream of the current context.
        let done = unsafe { self.api.stream_synchronize(stream.stream) };
        let result = started.and(done).inspect(|()| finish(&stream));

        let mut streams = gpu.streams.lock();
        if result.is_ok() && context.primary && streams.len() < IDLE_STREAMS {
            streams.push(stream);
        } else {
            drop(streams);
            stream.destroy(&self.api);
        }
        result
    }

    /// A stream of the highest priority. Streams share the GPU's hardware queues, in which a blocked wait holds
    /// up all that is behind it; but only those of equal priority share, and applications rarely use this one.
    fn new_stream(&self, kept: bool) -> Result<CopyStream> {
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        // SAFETY: places for the answers; a context is current.
        unsafe { self.api.ctx_get_stream_priority_range(&mut least, &mut greatest) }?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, greatest) }?;
        Ok(CopyStream { stream, bounce: if kept { self.pinned() } else { 0 } })
    }

    /// Pinned memory for a stream that is kept; without it copies are slower, no more.
    fn pinned(&self) -> usize {
        let mut bounce = std::ptr::null_mut();
        // SAFETY: a place for the answer; a context is current.
        match unsafe { self.api.mem_host_alloc(&mut bounce, BOUNCE, HOST_ALLOC_PORTABLE) } {
            Ok(()) => bounce.expose_provenance(),
            Err(error) => {
                tracing::debug!(%error, "copies to the host go without a pinned buffer");
                0
            }
        }
    }
}
