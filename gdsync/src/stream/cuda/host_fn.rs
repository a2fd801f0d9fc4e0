//! Host functions: closures that CUDA calls in stream order, on a thread of its own.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;

use gdrcopy::cuda::raw::Api;

use super::shared::Shared;
use crate::stream::execute::message_of;
use crate::stream::reentrancy::ReentrancyCheck;
use gdsync_device::cuda::RawStream;
use gdsync_device::error::{Error, Result};

/// A host function on its way through the driver.
struct HostFn {
    f: Box<dyn FnOnce() + Send>,
    shared: Weak<Shared>,
}

/// Whether the calling thread runs a host function, where CUDA may not be called and nothing may be waited for.
pub(super) fn is_running() -> bool {
    ReentrancyCheck::HostFn.is_here()
}

/// Refuses a call that needs CUDA within a host function.
pub(super) fn refuse() -> Result<()> {
    match is_running() {
        false => Ok(()),
        true => Err(Error::Unsupported {
            what: "the use of a stream of a GPU within a host function",
            by: "CUDA, which must not be called there",
            fix: "leave it to another thread",
        }),
    }
}

/// Queues a function on a stream of the current context.
pub(super) fn launch(
    api: &Api,
    stream: RawStream,
    f: Box<dyn FnOnce() + Send>,
    shared: Weak<Shared>,
) -> gdrcopy::Result<()> {
    let data = Box::into_raw(Box::new(HostFn { f, shared }));
    // SAFETY: the function takes the box over, once.
    let launched = unsafe { api.launch_host_func(stream, run, data.cast()) };
    if launched.is_err() {
        // SAFETY: the driver did not take it.
        drop(unsafe { Box::from_raw(data) });
    }
    launched
}

/// Runs a host function in stream order, unless the stream has failed.
extern "C" fn run(data: *mut c_void) {
    // SAFETY: made by `launch` from a box, and handed to the driver once.
    let HostFn { f, shared } = *unsafe { Box::from_raw(data.cast::<HostFn>()) };
    let shared = shared.upgrade();
    ReentrancyCheck::HostFn.begin();
    let run = shared.as_ref().is_some_and(|shared| !shared.failed());
    // Also the drop of a function that is not run is foreign code.
    let outcome = catch_unwind(AssertUnwindSafe(|| if run { f() } else { drop(f) }));
    if let (Err(panic), Some(shared)) = (outcome, &shared) {
        let message = message_of(panic.as_ref());
        shared.fail(Error::HostFnPanicked { stream: shared.config.name.clone(), message });
    }
    drop(shared);
    ReentrancyCheck::HostFn.end();
}
