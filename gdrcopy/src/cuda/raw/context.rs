//! The context of a call, and its place outside of stream captures.

use std::marker::PhantomData;

use super::Api;
use super::layout::{CAPTURE_RELAXED, Handle};
use crate::error::Result;

/// The context is current for this thread; the former one comes back on drop.
#[derive(Debug)]
#[must_use]
pub struct Current<'a> {
    api: &'a Api,
    _relaxed: Relaxed<'a>,
}

/// This thread's calls do not count as part of a stream capture; the former mode comes back on drop. In any other
/// mode an allocation, a new stream or a copy, while the application captures here or in another thread, would fail
/// and spoil the capture.
#[derive(Debug)]
#[must_use]
pub struct Relaxed<'a> {
    api: &'a Api,
    /// None where the driver has no such modes.
    former: Option<u32>,
    _of_this_thread: PhantomData<*mut ()>,
}

impl<'a> Current<'a> {
    /// Makes a context current, and the calls that follow no part of a capture.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    /// The context must live.
    pub unsafe fn enter(api: &'a Api, context: Handle) -> Result<Self> {
        // SAFETY: the caller vouches for the context.
        unsafe { api.ctx_push_current(context) }?;
        Ok(Self { api, _relaxed: Relaxed::enter(api) })
    }
}

impl<'a> Relaxed<'a> {
    /// Begins it.
    pub fn enter(api: &'a Api) -> Self {
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
