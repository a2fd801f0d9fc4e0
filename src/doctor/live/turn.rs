//! Turns: a GPU in the compute mode EXCLUSIVE_PROCESS lets one process use it at a time, and the doctor asks by several.

use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::parent_id;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gdrcopy::Error;
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::Handle;

use super::cuda::attribute::{COMPUTE_MODE, EXCLUSIVE};

const PAUSE: Duration = Duration::from_millis(5);
/// How long a GPU may take to be free when the process that used it has ended.
const RELEASE: Duration = Duration::from_millis(500);

/// Waits for the turn of this process where a GPU lets only one use it. It ends with what is returned, or with the process.
///
/// The parent ends processes that wait too long.
pub(in crate::doctor) fn take(api: &Api) -> Option<UnixListener> {
    let mut count = 0;
    // SAFETY: a place for the answer.
    unsafe { api.device_get_count(&mut count) }.ok()?;
    (0..count).find(|device| {
        let mut mode = 0;
        // SAFETY: a place for the answer; the driver checks the numbers.
        unsafe { api.device_get_attribute(&mut mode, COMPUTE_MODE, *device) }.is_ok() && mode == EXCLUSIVE
    })?;
    // A name that goes with the process, whatever becomes of it, and is the same for all that one doctor asks.
    let name = SocketAddr::from_abstract_name(format!("gdasync-doctor-{}", parent_id())).ok()?;
    loop {
        match UnixListener::bind_addr(&name) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => sleep(PAUSE),
            turn => return turn.ok(),
        }
    }
}

/// The same for a process that is going to use GPU 0 by other means than `api`.
pub(super) fn of_first() -> Option<UnixListener> {
    let api = Api::load().ok()?;
    // SAFETY: no flags are defined.
    unsafe { api.init(0) }.ok()?;
    let turn = take(&api)?;
    let mut device = 0;
    // SAFETY: a place for the answer.
    unsafe { api.device_get(&mut device, 0) }.ok()?;
    // Whoever comes next in this process gets the same context, or the same refusal.
    let _ = retain(&api, device);
    Some(turn)
}

/// The primary context of a device, also where the process before this one is still ending.
pub(super) fn retain(api: &Api, device: i32) -> gdrcopy::Result<Handle> {
    let deadline = Instant::now() + RELEASE;
    loop {
        let mut context = 0;
        // SAFETY: a place for the answer and a device of this driver. The process ends with it.
        match unsafe { api.primary_ctx_retain(&mut context, device) } {
            Err(error) if is_taken(&error) && Instant::now() < deadline => sleep(PAUSE),
            told => return told.map(|()| context),
        }
    }
}

/// Whether another process has the GPU for itself, or nobody may use it.
pub(super) fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Cuda { status: CudaStatus::DEVICE_UNAVAILABLE, .. })
}
