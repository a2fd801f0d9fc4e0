//! `errno`, as functions of C leave it.

use std::ffi::c_int;

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
