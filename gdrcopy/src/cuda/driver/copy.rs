//! Copies on streams of our own. The legacy stream, which the synchronous copies of CUDA use, waits for the
//! blocking streams of the application; those may wait for what this copy brings.
//!
//! That is not enough where the application blocks as many streams as the GPU has hardware queues for this process
//! (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default): on an H200 every other stream then stands still too, of whatever
//! priority. So waits have a deadline, where there is pinned memory for the bytes. There is none for memory of another
//! context while its GPU has no primary one: what is pinned lasts as long as the context it was pinned in, and only of
//! the primary one is that in our hands. Making one for this would take a second and much memory of the GPU.

use std::time::{Duration, Instant};

use super::Driver;
use super::context::Gpu;
use crate::cuda::CudaStatus;
use crate::cuda::raw::Api;
use crate::cuda::raw::layout::{HOST_ALLOC_PORTABLE, Handle, STREAM_NON_BLOCKING};
use crate::error::{Error, Result};

/// Up to this length bytes go through a pinned buffer, bytes. To the host that is quicker: on an H200 8 KiB take 6.6 us
/// instead of 8.7, and 256 KiB 22 instead of 29. And it can be given up: the memory is ours, not the caller's.
const BOUNCE: usize = 256 << 10;

/// How long a copy through the pinned buffer may take: a thousand times what it needs.
const PATIENCE: Duration = Duration::from_secs(2);
/// A wait spins for so long, and then sleeps between its looks.
const SPIN: Duration = Duration::from_millis(1);

/// A stream, and pinned memory for what it carries.
pub(super) struct CopyStream {
    stream: Handle,
    /// Address of [`BOUNCE`] bytes, 0 for none.
    bounce: usize,
}

impl CopyStream {
    /// Pinned memory for a copy of this length.
    fn pinned(&self, len: usize) -> Option<*mut u8> {
        let fits = len <= BOUNCE && self.bounce != 0;
        fits.then(|| std::ptr::with_exposed_provenance_mut(self.bounce))
    }

    /// Destroys a stream on which nothing runs. Its context must be current.
    pub(super) fn destroy(self, api: &Api) {
        // SAFETY: made here, destroyed once, with its context current.
        let destroyed = unsafe { api.stream_destroy(self.stream) };
        let freed = match self.bounce {
            0 => Ok(()),
            // SAFETY: as above; nothing runs that would touch it.
            bounce => unsafe { api.mem_free_host(std::ptr::with_exposed_provenance_mut(bounce)) },
        };
        if let Err(error) = destroyed.and(freed) {
            tracing::debug!(%error, "stream not destroyed");
        }
    }
}

impl Driver {
    /// Copies host memory to the GPU; see [`on_stream`](Self::on_stream).
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub(super) unsafe fn copy_in(&self, device: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
        let start = |stream: &CopyStream| {
            let pinned = stream.pinned(len);
            if let Some(pinned) = pinned {
                // SAFETY: the caller vouches for `src`; the pinned buffer is long enough and nobody else's.
                unsafe { pinned.copy_from_nonoverlapping(src, len) };
            }
            let from = pinned.map_or(src, <*mut u8>::cast_const);
            // SAFETY: readable as said above; the driver checks the GPU side.
            unsafe { self.api.memcpy_to_device_async(dst, from.cast(), len, stream.stream) }
        };
        self.on_stream(device, dst, len, start, |_| {})
    }

    /// Copies GPU memory to the host; see [`on_stream`](Self::on_stream).
    ///
    /// # Safety
    /// `dst` must be writable for `len` bytes.
    pub(super) unsafe fn copy_out(&self, device: i32, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        let start = |stream: &CopyStream| {
            let to = stream.pinned(len).unwrap_or(dst);
            // SAFETY: the caller vouches for `dst`, the pinned buffer is long enough; the driver checks the GPU side.
            unsafe { self.api.memcpy_to_host_async(to.cast(), src, len, stream.stream) }
        };
        self.on_stream(device, src, len, start, |stream| {
            if let Some(pinned) = stream.pinned(len) {
                // SAFETY: the copy into the pinned buffer is over; the caller vouches for `dst`.
                unsafe { dst.copy_from_nonoverlapping(pinned, len) };
            }
        })
    }

    /// Runs a copy of `len` bytes from or to GPU memory at `addr` on a stream, and `finish` when the bytes are there.
    fn on_stream(
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
        let mut stream = idle.map_or_else(|| self.new_stream(context.primary), Ok)?;
        let lender = if context.primary || len > BOUNCE { None } else { self.lender(gpu) };
        if let Some(lender) = &lender {
            stream.bounce = lender.bounce;
        }
        let started = start(&stream);
        // Also after a failure, since part of the copy may be under way.
        match self.wait(&stream, stream.pinned(len).is_some()) {
            Ok(()) => {
                if started.is_ok() {
                    finish(&stream);
                }
                // Kept even if there are many: to free pinned memory, CUDA may wait for all work of the GPU.
                if context.primary {
                    gpu.streams.lock().push(stream);
                } else {
                    stream.bounce = 0;
                    stream.destroy(&self.api);
                    gpu.streams.lock().extend(lender);
                }
                started
            }
            Err(error) => {
                // After a timeout the GPU may still use the stream and its memory: nobody may ever have them again.
                // Nor may what was lent, as its own context is not current.
                if !matches!(error, Error::Timeout { .. }) {
                    if lender.is_some() {
                        stream.bounce = 0;
                    }
                    stream.destroy(&self.api);
                }
                started.and(Err(error))
            }
        }
    }

    /// Waits until the bytes are in place: an asynchronous copy from pageable memory may return before. A copy of the
    /// caller's own memory is never given up: the GPU would go on using it.
    fn wait(&self, stream: &CopyStream, may_give_up: bool) -> Result<()> {
        if !may_give_up {
            // SAFETY: a stream of the current context.
            return unsafe { self.api.stream_synchronize(stream.stream) };
        }
        let start = Instant::now();
        loop {
            // Before the look, so that a process that was stopped in between looks once more.
            let waited = start.elapsed();
            // SAFETY: as above.
            match unsafe { self.api.stream_query(stream.stream) } {
                Err(Error::Cuda { status: CudaStatus::NOT_READY, .. }) => {}
                done => return done,
            }
            match waited {
                spinning if spinning < SPIN => std::hint::spin_loop(),
                waiting if waiting < PATIENCE => std::thread::sleep(SPIN / 10),
                _ => {
                    return Err(Error::Timeout {
                        what: "a copy by CUDA, which may still happen,",
                        after: PATIENCE,
                        fix: "let fewer streams wait at a time than CUDA_DEVICE_MAX_CONNECTIONS (8 by default, 32 at \
                              most): from then on nothing of this process moves on the GPU",
                    });
                }
            }
        }
    }

    /// A stream of the highest priority, which the GPU serves first.
    fn new_stream(&self, kept: bool) -> Result<CopyStream> {
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        // SAFETY: places for the answers; a context is current.
        unsafe { self.api.ctx_get_stream_priority_range(&mut least, &mut greatest) }?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, greatest) }?;
        Ok(CopyStream { stream, bounce: if kept { self.pinned() } else { 0 } })
    }

    /// A stream of the primary context, if there is one, to lend its pinned memory to another context: memory is pinned
    /// for all of them.
    fn lender(&self, gpu: &Gpu) -> Option<CopyStream> {
        if !gpu.holds_primary() {
            return None;
        }
        let idle = gpu.streams.lock().pop();
        let made = || self.enter_primary(gpu).and_then(|_current| self.new_stream(true));
        idle.map_or_else(made, Ok)
            .inspect_err(|error| tracing::debug!(%error, "a copy goes without a pinned buffer"))
            .ok()
    }

    /// Pinned memory for a stream that is kept; without it copies are slower and have no deadline.
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
