//! What the plug-in tells: lines in NCCL's log, the failures that a program can ask for, and an eventfd.

use std::ffi::{CString, c_int};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::time::SystemTime;

use gdsync::memory::{eventfd, signal_eventfd};
use parking_lot::{Mutex, RwLock};

use crate::abi::{CAUSE_BYTES, Failure, LOG_INFO, LOG_SUBSYSTEM, LOG_WARN, Logger};

/// Communicators that are open, and NCCL's logger while there is one.
static LOGGER: RwLock<(usize, Option<Logger>)> = RwLock::new((0, None));

/// One of each communicator that has failed.
static FAILURES: Mutex<Vec<Failure>> = Mutex::new(Vec::new());

/// One more communicator logs by this.
pub(crate) fn open(logger: Option<Logger>) {
    let (open, known) = &mut *LOGGER.write();
    *open += 1;
    *known = logger.or(*known);
}

/// After the last one NCCL may be unloaded.
pub(crate) fn close() {
    let (open, logger) = &mut *LOGGER.write();
    *open = open.saturating_sub(1);
    if *open == 0 {
        *logger = None;
    }
}

fn log(level: c_int, text: &str) {
    let Ok(text) = CString::new(format!("RMA/GDA: {text}").replace('\0', "")) else { return };
    if let (_, Some(logger)) = *LOGGER.read() {
        // SAFETY: NCCL's logger, which is loaded until the last communicator is closed; the text is the argument of `%s`.
        unsafe { logger(level, LOG_SUBSYSTEM, c"gda".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr()) };
    }
}

pub(crate) fn warn(text: &str) {
    log(LOG_WARN, text);
}

pub(crate) fn info(text: &str) {
    log(LOG_INFO, text);
}

/// A communicator has failed, and its streams are released.
pub(crate) fn failed(comm: u64, own_rank: usize, rank: usize, why: &str) {
    warn(&format!(
        "rank {rank} is lost: {why}. All streams that wait for the network go on, with wrong data; call ncclCommAbort (gda_nccl_status \
         tells this to the program)"
    ));
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let [rank, own_rank] = [rank, own_rank].map(|rank| i32::try_from(rank).unwrap_or(-1));
    let mut cause = [0; CAUSE_BYTES];
    let len = why.floor_char_boundary(CAUSE_BYTES - 1);
    cause[..len].copy_from_slice(&why.as_bytes()[..len]);
    let time = u64::try_from(time).unwrap_or(u64::MAX);
    FAILURES.lock().push(Failure { comm, time, rank, own_rank, cause });
    if let Ok(event) = event() {
        signal_eventfd(event);
    }
}

fn event() -> gdsync::Result<&'static OwnedFd> {
    static EVENT: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(event) = EVENT.get() {
        return Ok(event);
    }
    let event = eventfd()?;
    Ok(EVENT.get_or_init(|| event))
}

/// See the header.
///
/// # Safety
/// `failures` must be null or have room for `n`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_nccl_status(failures: *mut Failure, n: c_int) -> c_int {
    let known = FAILURES.lock();
    let count = known.len().min(usize::try_from(n).unwrap_or(0));
    if !failures.is_null() {
        // SAFETY: there is room for `n`, as the caller promises; the list is of this library.
        unsafe { failures.copy_from_nonoverlapping(known.as_ptr(), count) };
    }
    c_int::try_from(known.len()).unwrap_or(c_int::MAX)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_nccl_eventfd() -> c_int {
    event().map_or(-1, AsRawFd::as_raw_fd)
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn every_failure_of_a_long_run_counts() {
        for comm in 0..1000 {
            failed(comm, 0, 1, "test");
            // SAFETY: no place is needed.
            let count = unsafe { gda_nccl_status(null_mut(), 0) };
            assert_eq!(u64::try_from(count), Ok(comm + 1));
        }
    }
}
