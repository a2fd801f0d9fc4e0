//! What a caller is told: `errno` as functions of C leave it, and complaints of what kernel and provider would not have seen.

use std::ffi::{c_char, c_int};

use parking_lot::Mutex;

use crate::hca::Hca;

/// Sets it.
pub(crate) fn set(errno: c_int) {
    // SAFETY: it is the address of this thread's variable.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: it may be written at any time.
    unsafe { *location = errno };
}

/// What a function returns that failed with `errno`.
pub(crate) fn null<T>(errno: c_int) -> *mut T {
    set(errno);
    std::ptr::null_mut()
}

/// Gives an object to the caller, or sets the error.
pub(crate) fn hand_out<T, C>(made: Result<Box<T>, c_int>) -> *mut C {
    match made {
        Ok(object) => Box::into_raw(object).cast(),
        Err(errno) => null(errno),
    }
}

/// 0 or the error.
pub(crate) fn code(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// More than this many are not kept.
const KEPT: usize = 100;

static COMPLAINTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Says what is wrong.
pub(crate) fn complain(what: impl Into<String>) {
    let what = what.into();
    eprintln!("rdma stand-in: {what}");
    let mut all = COMPLAINTS.lock();
    if all.len() < KEPT {
        all.push(what);
    }
}

/// Copies all complaints so far, one a line, and the last one of the HCA itself, and a terminating zero to `text`, as far as its `len` bytes reach. Returns the
/// bytes of all, without the zero; 0 where nothing was wrong.
///
/// # Safety
/// `text` must be writable for `len` bytes, or null for none.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdsync_standin_complaints(text: *mut c_char, len: usize) -> usize {
    let mut all = COMPLAINTS.lock().clone();
    // The HCA has its own.
    all.extend(Hca::started().and_then(|hca| hca.card.stats().last_violation).map(str::to_owned));
    let all = all.join("\n");
    if text.is_null() || len == 0 {
        return all.len();
    }
    let count = all.len().min(len - 1);
    // SAFETY: the caller vouches for so many bytes.
    unsafe { text.copy_from_nonoverlapping(all.as_ptr().cast(), count) };
    // SAFETY: as above, and one is left.
    unsafe { text.wrapping_add(count).write(0) };
    all.len()
}
