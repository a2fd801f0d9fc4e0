//! Waiting: without the interpreter's lock, until a deadline or a signal.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// How long a wait goes on before it looks for signals.
const SLICE: Duration = Duration::from_millis(100);

/// A timeout in seconds.
pub(crate) fn seconds(timeout: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(timeout) {
        Ok(limit) => Ok(limit),
        Err(_) if timeout > 0.0 => Ok(Duration::MAX),
        Err(_) => Err(PyValueError::new_err(format!("timeout is {timeout}: expected seconds, 0 or more"))),
    }
}

pub(crate) fn seconds_or(timeout: Option<f64>, default: Duration) -> PyResult<Duration> {
    timeout.map_or(Ok(default), seconds)
}

/// Whether an attempt found a queue or a stream full, and started nothing.
pub(crate) fn is_full(error: &mp::Error) -> bool {
    use gdsync::Error::{QueueFull, StreamFull};
    matches!(error, mp::Error::Message { cause, .. } | mp::Error::Device(cause) if matches!(cause, QueueFull { .. } | StreamFull { .. }))
}

/// Whether a wait ended by its timeout. What was waited for goes on.
pub(crate) fn is_late(error: &mp::Error) -> bool {
    use gdsync::Error::Deadline;
    matches!(
        error,
        mp::Error::Deadline { .. }
            | mp::Error::Message { cause: Deadline { .. }, .. }
            | mp::Error::Device(Deadline { .. })
    )
}

/// Repeats a step, which gets a part of `limit`, while it fails with an error that time may end.
///
/// # Errors
/// The exception of a signal handler, such as `KeyboardInterrupt`.
pub(crate) fn sliced<T: Send>(
    py: Python<'_>,
    limit: Duration,
    again: fn(&mp::Error) -> bool,
    mut step: impl FnMut(Duration) -> mp::Result<T> + Send,
) -> PyResult<mp::Result<T>> {
    let mut start = None;
    loop {
        let left = start.map_or(limit, |start: Instant| limit.saturating_sub(start.elapsed()));
        start.get_or_insert_with(Instant::now);
        match py.detach(|| step(left.min(SLICE))) {
            Err(error) if again(&error) && left > SLICE => py.check_signals()?,
            Err(error) => return Ok(Err(of_limit(error, limit))),
            done => return Ok(done),
        }
    }
}

/// The error of the last slice as that of the whole wait.
fn of_limit(mut error: mp::Error, limit: Duration) -> mp::Error {
    use gdsync::Error::Deadline;
    if let mp::Error::Deadline { after, .. }
    | mp::Error::Message { cause: Deadline { after, .. }, .. }
    | mp::Error::Device(Deadline { after, .. }) = &mut error
    {
        *after = limit;
    }
    error
}

/// Runs a call of all ranks, which cannot be taken apart, on a thread. After a signal it goes on there until its own deadline.
///
/// # Errors
/// The exception of a signal handler; `RuntimeError` if the thread could not start or has panicked.
pub(crate) fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> mp::Result<T> + Send + 'static,
) -> PyResult<mp::Result<T>> {
    let (done, mut result) = channel();
    let run = move || drop(done.send(call()));
    Builder::new().name("gdasync-call".into()).spawn(run)?;
    loop {
        let waited = {
            let result = &mut result;
            py.detach(move || result.recv_timeout(SLICE))
        };
        match waited {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let text = "a thread of gdasync panicked; its message is on standard error: please report it";
                return Err(PyRuntimeError::new_err(text));
            }
        }
    }
}
