//! What surrounds every call from C: error numbers, panics that become errors, messages, and the reason of the last failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use gdsync::{Error, Result};
use tracing::dispatcher::{self, Dispatch};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Remembers the reason of a failure for [`last_error`], and writes it to standard error.
pub(crate) fn report(name: &str, reason: impl fmt::Display, is_printed: bool) {
    let text = format!("{name}: {reason}");
    if is_printed {
        // A closed standard error is no reason to fail.
        let _ = writeln!(std::io::stderr(), "gdsync: {text}");
    }
    // A thread that ends has no place for it any more.
    let _ = LAST.try_with(|last| last.replace(CString::new(text.replace('\0', "")).unwrap_or_default()));
}

/// The text of the last [`report`] of this thread, until the next one.
pub(crate) fn last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs a call, reports its error under the call's name, and returns the error number.
pub(crate) fn run<T>(name: &'static str, call: impl FnOnce() -> Result<T>) -> std::result::Result<T, c_int> {
    // What a call holds is behind locks, which the unwinding releases.
    match catch_unwind(AssertUnwindSafe(|| with_messages(call))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            let errno = error.errno();
            // Callers retry after these.
            report(name, &error, !matches!(error, Error::QueueFull { .. } | Error::StreamFull { .. }));
            Err(errno)
        }
        Err(panic) => {
            std::mem::forget(panic);
            report(name, "panicked, which is a defect of this library", true);
            Err(libc::EIO)
        }
    }
}

/// [`run`] for calls that return 0 or an error number.
pub(crate) fn status(name: &'static str, call: impl FnOnce() -> Result<()>) -> c_int {
    run(name, call).err().unwrap_or(0)
}

/// Runs a call with all messages of the library on standard error, if `GDS_ENABLE_DEBUG` asks for them.
fn with_messages<T>(call: impl FnOnce() -> T) -> T {
    static PRINTER: OnceLock<Option<Dispatch>> = OnceLock::new();
    let printer = PRINTER.get_or_init(|| {
        std::env::var_os("GDS_ENABLE_DEBUG").filter(|value| value != "0")?;
        let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
        Some(Dispatch::new(
            lines.without_time().log_internal_errors(false).with_writer(std::io::stderr).finish(),
        ))
    });
    match printer {
        Some(printer) => dispatcher::with_default(printer, call),
        None => call(),
    }
}

/// A pointer of the caller's that is not `NULL`.
pub(crate) fn non_null<T>(what: &'static str, pointer: *const T) -> Result<NonNull<T>> {
    NonNull::new(pointer.cast_mut()).ok_or_else(|| Error::invalid(what, "NULL", "a pointer"))
}

/// Refuses flags that are not 0.
pub(crate) fn no_flags(flags: c_int) -> Result<()> {
    if flags == 0 { Ok(()) } else { Err(Error::invalid("flags", flags, "0")) }
}

/// Milliseconds; 0 for ever, `u64::MAX` before the environment was read.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

pub(crate) fn set_wait_limit(milliseconds: u64) {
    LIMIT.store(milliseconds.min(u64::MAX - 1), Ordering::Relaxed);
}

/// The time after which a wait fails.
pub(crate) fn wait_limit() -> Duration {
    let known = LIMIT.load(Ordering::Relaxed);
    let milliseconds = if known == u64::MAX {
        let seconds = std::env::var("GDSYNC_CAPI_WAIT_LIMIT").ok().and_then(|text| text.parse::<u64>().ok());
        let asked = seconds.unwrap_or(0).saturating_mul(1000);
        set_wait_limit(asked);
        asked
    } else {
        known
    };
    if milliseconds == 0 { Duration::MAX } else { Duration::from_millis(milliseconds) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_become_error_numbers_and_reasons() {
        assert_eq!(status("call", || Ok(())), 0);
        assert_eq!(status("first", || no_flags(3)), libc::EINVAL);
        // SAFETY: terminated, and no other call of this thread.
        let text = || unsafe { std::ffi::CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned();
        assert_eq!(text(), "first: flags is 3: expected 0");
        assert_eq!(status("second", || panic!("on purpose")), libc::EIO);
        assert!(text().starts_with("second: panicked"));
    }
}
