//! GPUs and their contexts. A call makes the context it needs current and puts the caller's back, and does not disturb
//! a stream capture.

use std::marker::PhantomData;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::Driver;
use super::api::Api;
use super::copy::CopyStream;
use super::layout::{CAPTURE_RELAXED, Handle, pointer_attribute};
use super::pointer;
use crate::cuda::unknown;
use crate::error::Result;

/// A GPU of this process.
pub(super) struct Gpu {
    pub(super) ordinal: i32,
    /// `CUdevice`.
    pub(super) device: i32,
    /// The primary context, once retained. Making it may take a second and much memory, so it waits for need.
    primary: Mutex<Option<Handle>>,
    /// Streams of the primary context that no copy uses now.
    pub(super) streams: Mutex<Vec<CopyStream>>,
    /// Whether its kernels see writes over PCIe without a flush, once asked.
    pub(super) orders_writes: OnceLock<bool>,
}

/// A context to work in.
#[derive(Clone, Copy)]
pub(super) struct Context {
    handle: Handle,
    /// Retained here, so it lasts; any other may be destroyed by the application when the call is over.
    pub(super) primary: bool,
}

/// The context is current for this thread; the former one comes back on drop.
pub(super) struct Current<'a> {
    api: &'a Api,
    _relaxed: Relaxed<'a>,
}

/// This thread's calls do not count as part of a stream capture; the former mode comes back on drop. In any other
/// mode an allocation, a new stream or a copy, while the application captures here or in another thread, would fail
/// and spoil the capture.
pub(super) struct Relaxed<'a> {
    api: &'a Api,
    /// None where the driver has no such modes.
    former: Option<u32>,
    _of_this_thread: PhantomData<*mut ()>,
}

impl Gpu {
    pub(super) fn new(api: &Api, ordinal: i32) -> Result<Self> {
        let mut device = 0;
        // SAFETY: a place for the answer; the driver checks the ordinal.
        unsafe { api.device_get(&mut device, ordinal) }?;
        let (primary, streams, orders_writes) = Default::default();
        Ok(Self { ordinal, device, primary, streams, orders_writes })
    }

    /// The primary context, retained until [`release`](Self::release).
    fn primary(&self, api: &Api) -> Result<Handle> {
        let mut primary = self.primary.lock();
        if let Some(handle) = *primary {
            return Ok(handle);
        }
        let mut handle = 0;
        let _relaxed = Relaxed::enter(api);
        // SAFETY: a place for the answer and a device of this driver.
        unsafe { api.primary_ctx_retain(&mut handle, self.device) }?;
        *primary = Some(handle);
        Ok(handle)
    }

    /// Whether the primary context is there and held.
    pub(super) fn holds_primary(&self) -> bool {
        self.primary.lock().is_some()
    }

    /// Whether a context is the primary one, without making one for the question.
    fn is_primary(&self, api: &Api, handle: Handle) -> Result<bool> {
        if self.primary.lock().is_none() {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: places for the answers and a device of this driver.
            unsafe { api.primary_ctx_get_state(self.device, &mut flags, &mut active) }?;
            if active == 0 {
                return Ok(false);
            }
        }
        Ok(self.primary(api)? == handle)
    }

    /// Gives back streams and context.
    pub(super) fn release(&self, api: &Api) {
        let Some(handle) = self.primary.lock().take() else { return };
        let streams = std::mem::take(&mut *self.streams.lock());
        let result = (Context { handle, primary: true }).enter(api).map(|_current| {
            for stream in streams {
                stream.destroy(api);
            }
        });
        // SAFETY: retained once, given back once.
        if let Err(error) = result.and_then(|()| unsafe { api.primary_ctx_release(self.device) }) {
            tracing::debug!(%error, "GPU {}: primary context not given back", self.ordinal);
        }
    }
}

impl Context {
    /// Makes it current.
    pub(super) fn enter(self, api: &Api) -> Result<Current<'_>> {
        // SAFETY: a live context: retained, or named by the driver as that of live memory.
        unsafe { api.ctx_push_current(self.handle) }?;
        Ok(Current { api, _relaxed: Relaxed::enter(api) })
    }
}

impl<'a> Relaxed<'a> {
    pub(super) fn enter(api: &'a Api) -> Self {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: a mode, and a place for the former one.
        let former = unsafe { api.thread_exchange_stream_capture_mode(&mut mode) }.ok().map(|()| mode);
        Self { api, former, _of_this_thread: PhantomData }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let Some(mut mode) = self.former else { return };
        // SAFETY: the mode that this thread had, and a place for the one that it has.
        if let Err(error) = unsafe { self.api.thread_exchange_stream_capture_mode(&mut mode) } {
            tracing::warn!(%error, "the capture mode of the calling thread was not put back");
        }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = 0;
        // SAFETY: pushed by this thread when this value was made.
        if let Err(error) = unsafe { self.api.ctx_pop_current(&mut popped) } {
            tracing::warn!(%error, "the CUDA context of the calling thread was not put back");
        }
    }
}

impl Driver {
    pub(super) fn enter_primary(&self, gpu: &Gpu) -> Result<Current<'_>> {
        Context { handle: gpu.primary(&self.api)?, primary: true }.enter(&self.api)
    }

    /// The GPU and the context of memory: its own where it has one (`cuMemAlloc`), else its GPU's primary one.
    /// Refuses addresses that CUDA does not know; on some machines a GPU would take them for those of the heap.
    pub(super) fn home(&self, addr: u64) -> Result<(&Gpu, Context)> {
        self.owner.check()?;
        let asked =
            [pointer_attribute::CONTEXT, pointer_attribute::MEMORY_TYPE, pointer_attribute::DEVICE_ORDINAL];
        let [own, kind, ordinal] = pointer::attributes(&self.api, addr, asked)?;
        if pointer::number(kind) == 0 {
            return Err(unknown(addr));
        }
        let gpu = self.gpu(pointer::number(ordinal).cast_signed())?;
        let own = Handle::from_ne_bytes(own.to_ne_bytes());
        let (handle, primary) = match own {
            0 => (gpu.primary(&self.api)?, true),
            _ => (own, gpu.is_primary(&self.api, own)?),
        };
        Ok((gpu, Context { handle, primary }))
    }
}
