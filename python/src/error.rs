//! Errors of `mp` as the exceptions of `gdasync._errors`.

use gdsync::Error as Cause;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The class, the rank at the other end, and the reason.
fn classify(error: &mp::Error) -> (&'static str, Option<usize>, Option<&Cause>) {
    use mp::Error as E;
    let (rank, cause) = match error {
        E::Message { rank, cause, .. } => (Some(*rank), Some(cause)),
        E::Device(cause) => (None, Some(cause)),
        E::Child { rank, .. } | E::Collective { rank, .. } | E::NoSuchRank { rank, .. } => {
            (Some(*rank), None)
        }
        E::NoPostedReceive { rank } | E::NoFreePlace { rank, .. } | E::OutsideWindow { rank, .. } => {
            (Some(*rank), None)
        }
        E::OverlappingReceives { rank, .. } => (*rank, None),
        E::Bootstrap { peer, .. } => (peer.strip_prefix("rank ").and_then(|rank| rank.parse().ok()), None),
        _ => (None, None),
    };
    let class = match (error, cause) {
        _ if error.is_rank_lost() => "PeerGone",
        (E::Deadline { .. }, _) | (_, Some(Cause::Deadline { .. } | Cause::StreamWait { .. })) => "Deadline",
        (_, Some(Cause::Cuda { .. })) => "CudaError",
        (_, Some(Cause::Busy { .. } | Cause::QueueFull { .. } | Cause::StreamFull { .. })) => "Busy",
        _ => "Error",
    };
    (class, rank, cause)
}

/// The exception for a failed operation, with the rank at its other end, and whether a rank `is_gone`, where the error does not tell.
#[cold]
pub(crate) fn exception(
    py: Python<'_>,
    operation: &str,
    with: Option<usize>,
    error: &mp::Error,
    is_gone: bool,
) -> PyErr {
    static MADE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let (class, rank, cause) = classify(error);
    let class = if is_gone { "PeerGone" } else { class };
    let arguments = (class, error.to_string(), rank.or(with), operation, cause.map(ToString::to_string));
    let made = MADE
        .get_or_try_init(py, || Ok(py.import("gdasync._errors")?.getattr("made")?.unbind()))
        .and_then(|made| made.bind(py).call1(arguments));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Results of `mp` as results of Python.
pub(crate) trait OrRaise<T> {
    /// The value, or the exception of an operation with a rank.
    fn or_raise(self, py: Python<'_>, operation: &str, rank: Option<usize>) -> PyResult<T>;
}

impl<T, E: Into<mp::Error>> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>, operation: &str, rank: Option<usize>) -> PyResult<T> {
        self.map_err(|error| exception(py, operation, rank, &error.into(), false))
    }
}
