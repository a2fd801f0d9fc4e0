//! What surrounds every call from C: error numbers, panics that become errors, messages, and the reason of the last failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdsync::env::variable;
use gdsync::{Error, Result};
use tracing::dispatcher::{self, Dispatch};

use crate::process;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What texts of the crates below say, and a program in C does not know.
const WORDS: [(&str, &str); 15] = [
    (" and wait with Qp::wait_send_room, or raise QpBuilder::max_send_wr", ""),
    (" and wait with Qp::wait_recv_room, or raise QpBuilder::max_recv_wr", ""),
    ("QpBuilder::max_inline: raise it (to 512 at most)", "max_inline_data, which is 512 at most"),
    ("QpBuilder::", ""),
    ("Qp::init or Qp::connect", "gds_modify_qp"),
    ("Qp::connect", "gds_modify_qp"),
    ("Qp::modify", "gds_modify_qp"),
    (" (Communicator::irecv)", ""),
    (" (Communicator::check)", ""),
    ("or raise its wait_limit", "or raise GDSYNC_CAPI_WAIT_LIMIT"),
    (", or use mp::tagged for unknown lengths", ""),
    (": only Communicator::shrink makes a new one", ""),
    (" (Stream::with_timeout)", ""),
    ("use Stream::cuda, or pass", "pass"),
    (" or to Device::find", ""),
];

/// A text with words for programs in C: each pair is what a crate says, and what C says.
pub fn in_words<'a>(text: String, words: impl IntoIterator<Item = &'a (&'a str, &'a str)>) -> String {
    words.into_iter().fold(text, |text, (rust, c)| text.replace(rust, c))
}

/// A failure of a call.
pub trait Failure: fmt::Display {
    /// What the call returns.
    fn errno(&self) -> c_int;

    /// Whether callers expect it and try again: then it is not printed.
    fn is_retried(&self) -> bool;
}

impl Failure for Error {
    fn errno(&self) -> c_int {
        self.errno()
    }

    fn is_retried(&self) -> bool {
        matches!(self, Self::QueueFull { .. } | Self::StreamFull { .. })
    }
}

/// The library that a program calls.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// Its name, at the start of each message.
    pub name: &'static str,
    /// The variable that asks for messages of all levels.
    pub debug: &'static str,
}

impl Library {
    /// Remembers the reason of a failure for [`last_error`], and writes it to standard error.
    pub fn report(&self, call: &str, reason: impl fmt::Display, is_printed: bool) {
        let text = in_words(format!("{call}: {reason}"), &WORDS);
        if is_printed {
            self.announce(&text);
        }
        set_last_error(&text);
    }

    /// Writes a line to standard error.
    pub fn announce(&self, text: &str) {
        let line = format!("{}: {text}\n", self.name);
        // In one piece: other processes write there too. Without the lock of `std::io::stderr`, which a thread may hold that a forked
        // child does not have. A closed standard error is no reason to fail.
        // SAFETY: the bytes of the line.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }

    /// Runs a call, and reports its error under the call's name.
    ///
    /// # Errors
    /// The number of the call's error; `EIO` if it panicked.
    pub fn run<T, E: Failure>(
        &self,
        name: &'static str,
        call: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, c_int> {
        // Before any lock: see `process`.
        if let Err(refusal) = process::check() {
            self.report(name, &refusal.text, true);
            return Err(refusal.errno);
        }
        match no_panic(|| self.with_messages(call)) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                self.report(name, &error, !error.is_retried());
                Err(error.errno())
            }
            Err(panicked) => {
                self.report(name, panicked, true);
                Err(libc::EIO)
            }
        }
    }

    /// [`Library::run`] for calls that return 0 or an error number.
    pub fn status<E: Failure>(
        &self,
        name: &'static str,
        call: impl FnOnce() -> std::result::Result<(), E>,
    ) -> c_int {
        self.run(name, call).err().unwrap_or(0)
    }

    /// Runs a call with all messages on standard error, if the variable asks for them.
    fn with_messages<T>(&self, call: impl FnOnce() -> T) -> T {
        static PRINTER: OnceLock<Option<Dispatch>> = OnceLock::new();
        let printer = PRINTER.get_or_init(|| {
            std::env::var_os(self.debug).filter(|value| value != "0")?;
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
}

/// A call that panicked. The panic hook has printed why.
#[derive(Clone, Copy, Debug)]
pub struct Panicked;

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("panicked, which is a defect of this library")
    }
}

/// Runs a call.
///
/// # Errors
/// [`Panicked`].
#[inline]
pub fn no_panic<T>(call: impl FnOnce() -> T) -> std::result::Result<T, Panicked> {
    // What a call holds is behind locks, which the unwinding releases.
    catch_unwind(AssertUnwindSafe(call)).map_err(|thrown| {
        // It may panic when it is dropped.
        std::mem::forget(thrown);
        Panicked
    })
}

/// Keeps the reason of a failure for [`last_error`].
pub fn set_last_error(text: &str) {
    // A thread that ends has no place for it any more.
    let _ = LAST.try_with(|last| last.replace(CString::new(text.replace('\0', "")).unwrap_or_default()));
}

/// The text of the last [`set_last_error`] of this thread, until the next one.
pub fn last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// A pointer of the caller's that is not `NULL`.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub fn non_null<T>(what: &'static str, pointer: *const T) -> Result<NonNull<T>> {
    NonNull::new(pointer.cast_mut()).ok_or_else(|| Error::invalid(what, "NULL", "a pointer"))
}

/// Refuses flags that are not 0.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub fn no_flags(flags: c_int) -> Result<()> {
    if flags == 0 { Ok(()) } else { Err(Error::invalid("flags", flags, "0")) }
}

const WAIT_LIMIT: &str = "GDSYNC_CAPI_WAIT_LIMIT";

/// Milliseconds; 0 for ever, `u64::MAX` before the environment was read.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Sets the time after which a wait fails; 0 is for ever.
pub fn set_wait_limit(milliseconds: u64) {
    LIMIT.store(milliseconds.min(u64::MAX - 1), Ordering::Relaxed);
}

/// The time after which a wait fails.
pub fn wait_limit() -> Duration {
    let known = LIMIT.load(Ordering::Relaxed);
    let milliseconds = if known == u64::MAX {
        let seconds = variable(WAIT_LIMIT).map_or(0, |text| {
            text.parse::<u64>().unwrap_or_else(|_| {
                let gdsync = Library { name: "gdsync", debug: "" };
                gdsync.announce(&format!("{WAIT_LIMIT} is '{text}': expected seconds; waits have no limit"));
                0
            })
        });
        let asked = seconds.saturating_mul(1000);
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
        let library = Library { name: "test", debug: "NO_SUCH_VARIABLE" };
        assert_eq!(library.status("call", || Ok::<_, Error>(())), 0);
        assert_eq!(library.status("first", || no_flags(3)), libc::EINVAL);
        // SAFETY: terminated, and no other call of this thread.
        let text = || unsafe { std::ffi::CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned();
        assert_eq!(text(), "first: flags is 3: expected 0");
        assert_eq!(library.status::<Error>("second", || panic!("on purpose")), libc::EIO);
        assert!(text().starts_with("second: panicked"));
    }
}
