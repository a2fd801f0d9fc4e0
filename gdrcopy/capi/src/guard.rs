//! What surrounds every call from C: error numbers, panics that become errors, and messages.
//!
//! Messages go to standard error in the format and under the variables of GDRCopy. They are events of `tracing`, printed only
//! while a call of this library runs: a program's own subscribers and events are left alone.

use std::ffi::{CString, c_int};
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::OnceLock;

pub(crate) use gdrcopy::{Error, Result};
use tracing::dispatcher::{self, Dispatch};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::writer::MakeWriter;
use tracing_subscriber::fmt::{FmtContext, Subscriber as Lines};
use tracing_subscriber::registry::LookupSpan;

pub(crate) fn invalid(what: &'static str, value: impl fmt::Display, expected: &'static str) -> Error {
    Error::InvalidArgument { what, value: value.to_string(), expected }
}

/// A pointer of the caller's that is not `NULL`.
pub(crate) fn non_null<T>(what: &'static str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| invalid(what, "NULL", "a pointer"))
}

/// Runs a call, logs its error under the call's name, and returns the error number.
pub(crate) fn run<T>(name: &'static str, call: impl FnOnce() -> Result<T>) -> std::result::Result<T, c_int> {
    no_panic(|| {
        with_messages(|| {
            no_panic(|| {
                call().map_err(|error| {
                    tracing::error!("{name}: {error}");
                    // A failure must not look like success, whatever a driver said.
                    Some(error.errno()).filter(|&errno| errno > 0).unwrap_or(libc::EIO)
                })
            })
            .inspect_err(|_| tracing::error!("{name}: panicked, which is a defect of this library"))
            .unwrap_or(Err(libc::EIO))
        })
    })
    .unwrap_or(Err(libc::EIO))
}

/// [`run`] for calls that return 0 or an error number.
pub(crate) fn status(name: &'static str, call: impl FnOnce() -> Result<()>) -> c_int {
    run(name, call).err().unwrap_or(0)
}

/// [`status`] for calls that write one answer.
///
/// # Safety
/// `place` must be null or valid for a write.
pub(crate) unsafe fn answer<T>(
    name: &'static str,
    what: &'static str,
    place: *mut T,
    call: impl FnOnce() -> Result<T>,
) -> c_int {
    status(name, || {
        let place = non_null(what, place)?;
        let value = call()?;
        // SAFETY: not null, so writable: the caller guarantees it.
        unsafe { place.write(value) };
        Ok(())
    })
}

/// A panic becomes an error; its message has been printed by the panic hook.
#[inline]
pub(crate) fn no_panic<T>(call: impl FnOnce() -> T) -> std::result::Result<T, ()> {
    // The state of a call is behind locks, which the unwinding releases.
    catch_unwind(AssertUnwindSafe(call)).map_err(std::mem::forget)
}

/// Runs a call with its messages printed as the environment says.
fn with_messages<T>(call: impl FnOnce() -> T) -> T {
    // Read once, as in GDRCopy.
    static PRINTER: OnceLock<Option<Dispatch>> = OnceLock::new();
    match PRINTER.get_or_init(printer) {
        Some(printer) => dispatcher::with_default(printer, call),
        None => call(),
    }
}

/// `GDRCOPY_ENABLE_LOGGING` switches on by being there, `GDRCOPY_LOG_LEVEL` is the lowest level that is printed.
fn printer() -> Option<Dispatch> {
    std::env::var_os("GDRCOPY_ENABLE_LOGGING")?;
    let level = std::env::var_os("GDRCOPY_LOG_LEVEL").map_or(4, |text| {
        let text = CString::new(text.into_vec()).unwrap_or_default();
        // SAFETY: a terminated text.
        unsafe { libc::atoi(text.as_ptr()) }
    });
    let filter = match level {
        ..=1 => LevelFilter::TRACE,
        2 => LevelFilter::INFO,
        3 => LevelFilter::WARN,
        4 => LevelFilter::ERROR,
        5.. => return None,
    };
    Some(lines(filter, std::io::stderr))
}

fn lines<W>(filter: LevelFilter, writer: W) -> Dispatch
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = Lines::builder()
        .with_max_level(filter)
        .with_writer(writer)
        // A closed standard error is no reason to panic.
        .log_internal_errors(false)
        .with_ansi(false)
        .event_format(GdrcopyLine);
    Dispatch::new(lines.finish())
}

/// One line: a prefix six characters wide, and the message.
struct GdrcopyLine;

impl<S, N> FormatEvent<S, N> for GdrcopyLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str(match *event.metadata().level() {
            Level::ERROR => "ERR:  ",
            Level::WARN => "WARN: ",
            Level::INFO => "INFO: ",
            Level::DEBUG | Level::TRACE => "DBG:  ",
        })?;
        context.format_fields(writer.by_ref(), event)?;
        writer.write_char('\n')
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Seek};
    use std::os::fd::FromRawFd;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn failures_become_error_numbers() {
        assert_eq!(status("call", || Ok(())), 0);
        assert_eq!(status("call", || Err(invalid("a", "b", "c"))), libc::EINVAL);
        assert_eq!(status("call", || panic!("on purpose")), libc::EIO);
        // A device that answers a failed call with error 0.
        let error = std::io::Error::from_raw_os_error(0);
        assert_eq!(
            status("call", || Err(gdrcopy::Error::Sys { call: "x".into(), error, fix: "" })),
            libc::EIO
        );
    }

    /// What is printed at a level.
    fn printed(filter: LevelFilter) -> String {
        // SAFETY: a terminated string and flags; nothing else is passed.
        let fd = unsafe { libc::memfd_create(c"log".as_ptr(), 0) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: just created, nothing else owns it.
        let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
        dispatcher::with_default(&lines(filter, Arc::new(file.try_clone().unwrap())), || {
            tracing::trace!("one");
            tracing::debug!("two {}", 2);
            tracing::info!(backend = "rm", "three");
            tracing::warn!("four");
            tracing::error!("five");
        });
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn lines_are_gdrcopys() {
        let all = "DBG:  one\nDBG:  two 2\nINFO: three backend=\"rm\"\nWARN: four\nERR:  five\n";
        assert_eq!(printed(LevelFilter::TRACE), all);
        assert_eq!(printed(LevelFilter::WARN), "WARN: four\nERR:  five\n");
        assert_eq!(printed(LevelFilter::ERROR), "ERR:  five\n");
    }
}
