//! GPUs and their contexts.

use std::sync::OnceLock;

use parking_lot::Mutex;

use super::Driver;
use super::copy::CopyStream;
use super::pointer;
use crate::cuda::raw::layout::{Handle, pointer_attribute};
use crate::cuda::raw::{Api, Current, Relaxed};
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
        unsafe { Current::enter(api, self.handle) }
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
