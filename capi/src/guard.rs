//! What surrounds every call: error numbers, arguments, messages, and the reason of the last failure.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::time::Duration;
use std::{fmt, io, slice};

use gdsync_capi_support::guard::{no_panic, set_last_error};
use gdsync_capi_support::handles::{Refusal, Table};
use gdsync_capi_support::process;
use parking_lot::RwLock;
use tracing_subscriber::fmt::writer::MakeWriter;

use crate::abi::{Raw, Sized32};
use crate::words::in_c;

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Error {
    Mp(mp::Error),
    /// An error number of this interface, with its reason.
    Own(c_int, String),
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mp(error) => f.write_str(&in_c(error)),
            Self::Own(_, text) => f.write_str(text),
        }
    }
}

impl From<mp::Error> for Error {
    fn from(error: mp::Error) -> Self {
        Self::Mp(error)
    }
}

impl From<gdsync::Error> for Error {
    fn from(error: gdsync::Error) -> Self {
        Self::Mp(error.into())
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Own(refusal.errno, refusal.text)
    }
}

impl Error {
    fn errno(&self) -> c_int {
        match self {
            Self::Mp(error) => error.errno(),
            Self::Own(errno, _) => *errno,
        }
    }
}

pub(crate) fn invalid(what: &str, value: impl fmt::Display, expected: &str) -> Error {
    Error::Own(libc::EINVAL, format!("{what} is {value}: expected {expected}"))
}

/// Keeps the reason of a failure, tells the logger, and returns the negative error number.
#[cold]
pub(crate) fn report(name: &str, error: &Error) -> c_int {
    let (errno, text) = (error.errno(), format!("{name}: {error}"));
    set_last_error(&text);
    // Callers try these again.
    log(if errno == libc::EAGAIN { LOG_DEBUG } else { LOG_ERROR }, &text);
    -errno
}

/// Runs a call that returns a number that is not negative.
#[inline]
pub(crate) fn number(name: &'static str, call: impl FnOnce() -> Result<c_int>) -> c_int {
    let checked = || {
        process::check()?;
        call()
    };
    match no_panic(checked) {
        Ok(Ok(number)) => number,
        Ok(Err(error)) => report(name, &error),
        Err(panicked) => report(name, &Error::Own(libc::EIO, panicked.to_string())),
    }
}

/// Runs a call that returns `GDA_OK`.
#[inline]
pub(crate) fn status(name: &'static str, call: impl FnOnce() -> Result<()>) -> c_int {
    number(name, || call().map(|()| 0))
}

/// Ends a handle.
pub(crate) fn end<T>(name: &'static str, table: &'static Table<T>, raw: Raw) -> c_int {
    status(name, || {
        table.take(raw)?;
        Ok(())
    })
}

/// A place of the caller's for an answer.
pub(crate) fn place<'a, T>(what: &str, pointer: *mut T) -> Result<&'a mut T> {
    // SAFETY: not null, so writable as long as the call lasts: the header asks for it.
    unsafe { pointer.as_mut() }.ok_or_else(|| invalid(what, "NULL", "a place for it"))
}

/// An address of the caller's that is not NULL.
pub(crate) fn non_null<T>(what: &str, pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() { Err(invalid(what, "NULL", "an address")) } else { Ok(pointer) }
}

/// `n` values of the caller's.
///
/// # Safety
/// The pointer must be null or valid for that many.
pub(crate) unsafe fn values<'a, T>(what: &str, pointer: *const T, n: c_int) -> Result<&'a [T]> {
    match usize::try_from(n) {
        Ok(0) => Ok(&[]),
        Ok(n) if !pointer.is_null() => {
            // SAFETY: not null, so valid: the caller guarantees it.
            Ok(unsafe { slice::from_raw_parts(pointer, n) })
        }
        Ok(_) => Err(invalid(what, "NULL", "as many as their number says")),
        Err(_) => Err(invalid(what, format_args!("{n} long"), "a number that is not negative")),
    }
}

/// A structure of the caller's, which may be of a later version if what this one does not know is zero.
///
/// # Safety
/// The pointer must be null or valid for as many bytes as the structure says.
pub(crate) unsafe fn input<T: Sized32>(what: &str, pointer: *const T) -> Result<T> {
    let size = checked_size(what, pointer)?;
    // SAFETY: the caller vouches for the size.
    let all = unsafe { slice::from_raw_parts(pointer.cast::<u8>(), size) };
    if all[size_of::<T>()..].iter().any(|&byte| byte != 0) {
        return Err(invalid(what, "of a later version", "zeros behind what this version knows"));
    }
    // SAFETY: long enough, and any bits are a value.
    Ok(unsafe { pointer.read_unaligned() })
}

/// Fills a structure of the caller's, as far as this version knows it, unless it is NULL. Check it before with [`checked_size`].
///
/// # Safety
/// The pointer must be null or valid for as many bytes as the structure says.
pub(crate) unsafe fn output<T: Sized32>(pointer: *mut T, fill: impl FnOnce(&mut T)) {
    // SAFETY: the caller vouches for it.
    if let Some(place) = unsafe { pointer.as_mut() } {
        fill(place);
    }
}

/// The size that a structure says it has, if it is one of this version or later.
pub(crate) fn checked_size<T: Sized32>(what: &str, pointer: *const T) -> Result<usize> {
    if pointer.is_null() {
        return Err(invalid(what, "NULL", "a structure"));
    }
    // SAFETY: not null, so it begins with its size.
    let size = unsafe { pointer.cast::<u32>().read_unaligned() } as usize;
    // A size of megabytes is none.
    match (size_of::<T>()..=1 << 16).contains(&size) {
        true => Ok(size),
        false => Err(invalid(&format!("struct_size of {what}"), size, "sizeof of the structure")),
    }
}

/// A text of the caller's; `None` for NULL.
///
/// # Safety
/// The pointer must be null or a terminated text.
pub(crate) unsafe fn text<'a>(what: &str, pointer: *const c_char) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so a terminated text: the caller guarantees it.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| invalid(what, "not UTF-8", "a name"))
}

pub(crate) fn timeout(ns: i64) -> Result<Duration> {
    match u64::try_from(ns) {
        Ok(ns) => Ok(Duration::from_nanos(ns)),
        Err(_) if ns == -1 => Ok(Duration::MAX),
        Err(_) => Err(invalid("the timeout", format_args!("{ns} ns"), "-1 (for ever), 0 or more")),
    }
}

pub(crate) fn size(what: &str, value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| invalid(what, value, "less"))
}

/// A rank of the caller's.
pub(crate) fn rank(value: c_int) -> Result<usize> {
    usize::try_from(value).map_err(|_| invalid("the rank", value, "one of the communicator"))
}

/// A rank of the caller's, or with -1 all of so many.
pub(crate) fn ranks(value: c_int, size: usize) -> Result<Range<usize>> {
    if value == -1 { Ok(0..size) } else { rank(value).map(|rank| rank..rank + 1) }
}

/// A rank, or a number of ranks, for the caller.
pub(crate) fn c_number(value: usize) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// A pointer of the caller's that goes to another thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreign(pub(crate) *mut c_void);
// SAFETY: the header says on which threads it is used; this crate only passes it on.
unsafe impl Send for Foreign {}
// SAFETY: as for `Send`: a shared reference only gives the address.
unsafe impl Sync for Foreign {}

impl Foreign {
    pub(crate) fn get(self) -> *mut c_void {
        self.0
    }
}

/// A function that gets messages.
pub(crate) type Logger = unsafe extern "C" fn(*mut c_void, c_int, *const c_char);

thread_local! {
    /// Whether this thread is in the logger, whose own calls are not logged.
    static IS_LOGGING: Cell<bool> = const { Cell::new(false) };
}

static LOGGER: RwLock<Option<(Logger, Foreign, c_int)>> = RwLock::new(None);

const LOG_ERROR: c_int = 1;
const LOG_DEBUG: c_int = 4;

/// Passes messages up to a level to this function.
pub(crate) fn set_logger(logger: Option<Logger>, this: *mut c_void, level: c_int) -> Result<()> {
    if logger.is_some() && !(LOG_ERROR..=LOG_DEBUG).contains(&level) {
        return Err(invalid("level", level, "GDA_LOG_ERROR to GDA_LOG_DEBUG"));
    }
    *LOGGER.write() = logger.map(|logger| (logger, Foreign(this), level));
    if logger.is_some() {
        let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
        let lines = lines.without_time().with_level(false).with_target(false).with_writer(Lines);
        // Another subscriber is there where this crate is linked into a program in Rust, or this is not the first call.
        let _ = lines.log_internal_errors(false).try_init();
    }
    Ok(())
}

fn log(level: c_int, text: &str) {
    // Copied out: it is called without the lock, and may set another one.
    let logger = *LOGGER.read();
    if let Some((logger, this, most)) = logger
        && level <= most
        && !IS_LOGGING.replace(true)
    {
        let text = CString::new(text.replace('\0', "")).unwrap_or_default();
        // SAFETY: a terminated text; the function and its pointer are the caller's.
        unsafe { logger(this.get(), level, text.as_ptr()) };
        IS_LOGGING.set(false);
    }
}

/// Makes a line of each event.
struct Lines;

/// A line at a level.
struct Line(c_int);

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(LOG_DEBUG)
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> Line {
        Line(match *meta.level() {
            tracing::Level::ERROR => LOG_ERROR,
            tracing::Level::WARN => 2,
            tracing::Level::INFO => 3,
            _ => LOG_DEBUG,
        })
    }
}

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        log(self.0, String::from_utf8_lossy(bytes).trim_end());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
