//! Errors of `mp` as the exceptions of `gdasync._errors`.

use gdsync::Error as Cause;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyType};

/// What texts say and a program in Python calls otherwise. Other paths of Rust become paths of Python by their dot.
const WORDS: &[(&str, &str)] = &[
    (
        "before the capture make an mp::Channel (channel = comm.channel(rank, &[(&buffer, range)], None), at both ranks); in the \
         capture write channel.post_recv_on_stream(stream) where the receive is queued, channel.isend_on_stream(stream, &buffer, range) \
         for the send and channel.wait_recv_on_stream(stream) for the wait",
        "before the capture make a channel (Communicator.channels, at all ranks); in the capture call Channel.post_recv where the \
         receive is queued, Channel.send for the send and Channel.wait_recv for the wait",
    ),
    (
        "sendrecv_on_stream, or Communicator::irecv_on_stream, send_on_stream, wait_on_stream",
        "Communicator.irecv with a stream, Communicator.send, Request.wait_on",
    ),
    (
        "call CommunicatorBuilder::init in all ranks, or init_over in all",
        "call gdasync.init with a group in all ranks, or in none",
    ),
    ("(CommunicatorBuilder::timeout)", "(gdasync.init(timeout=...))"),
    (" (Communicator::barrier is another one)", ""),
    (" (Stream::with_timeout)", ""),
    (
        "capture with Stream::capture instead, and launch the application's work on Stream::raw in it",
        "capture with gdasync.Graph",
    ),
    ("or use one QP per stream", "or use a communicator for each stream"),
    ("use Stream::cuda, or pass", "use another stream, or"),
    ("wait_recv_in_batch or wait_recv_on_stream", "wait_recv"),
    ("post_recv_on_stream or post_recv_in_batch", "post_recv"),
    ("post_recv_in_batch or post_recv_on_stream", "post_recv"),
    ("boot over MPI (Builder::init_over)", "pass the communicator of mpi4py to gdasync.init"),
    ("CommunicatorBuilder::init_over", "gdasync.init(group)"),
    ("CommunicatorBuilder::spawn", "gdasync.init(spawn=...)"),
    ("CommunicatorBuilder::init", "gdasync.init"),
    ("Communicator::init", "gdasync.init"),
    ("its wait_limit", "it by gdasync.Stream(..., wait_limit=...)"),
    ("Stream::submit", "submit"),
    ("Window::destroy", "Window.close"),
];

/// The text of an error for programs in Python.
fn in_python(text: String) -> String {
    let text = WORDS.iter().fold(text, |text, (rust, python)| match text.contains(rust) {
        true => text.replace(rust, python),
        false => text,
    });
    if text.contains("::") { text.replace("::", ".") } else { text }
}

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

/// The exception for a failed operation, with the rank at its other end where the error does not tell.
#[cold]
pub(crate) fn exception(py: Python<'_>, operation: &str, with: Option<usize>, error: &mp::Error) -> PyErr {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let (class, rank, cause) = classify(error);
    let cause = cause.map(|cause| in_python(cause.to_string()));
    let arguments = (in_python(error.to_string()), rank.or(with), operation.to_owned(), cause);
    let class = ERRORS
        .get_or_try_init(py, || py.import("gdasync._errors").map(Bound::unbind))
        .and_then(|errors| Ok(errors.bind(py).getattr(class)?.cast_into::<PyType>()?));
    class.map_or_else(|error| error, |class| PyErr::from_type(class, arguments))
}

/// Results of `mp` as results of Python.
pub(crate) trait OrRaise<T> {
    /// The value, or the exception of an operation with a rank.
    fn or_raise(self, py: Python<'_>, operation: &str, rank: Option<usize>) -> PyResult<T>;
}

impl<T, E: Into<mp::Error>> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>, operation: &str, rank: Option<usize>) -> PyResult<T> {
        self.map_err(|error| exception(py, operation, rank, &error.into()))
    }
}
