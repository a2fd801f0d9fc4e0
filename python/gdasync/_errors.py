"""What fails, as exceptions."""

from __future__ import annotations

# What texts of the library in Rust say, and a program in Python calls otherwise. Other paths become paths of Python by their dot.
_WORDS = {
    "before the capture make an mp::Channel (channel = comm.channel(rank, &[(&buffer, range)], None), at both ranks); in "
    "the capture write channel.post_recv_on_stream(stream) where the receive is queued, channel.isend_on_stream(stream, "
    "&buffer, range) for the send and channel.wait_recv_on_stream(stream) for the wait": "before the capture make a "
    "channel (Communicator.channels, at all ranks); in the capture call Channel.post_recv where the receive is queued, "
    "Channel.send for the send and Channel.wait_recv for the wait",
    "sendrecv_on_stream, or Communicator::irecv_on_stream, send_on_stream, wait_on_stream": "Communicator.sendrecv, or "
    "Communicator.irecv with a stream, Communicator.send, Request.wait_on",
    "call CommunicatorBuilder::init in all ranks, or init_over in all": "call gdasync.init with a group in all ranks, or "
    "in none",
    "use Batch::repeatable_host_fn, or submit the function to the stream before or after each launch": "call it before or "
    "after each replay",
    "capture with Stream::capture instead, and launch the application's work on Stream::raw in it": "capture with "
    "gdasync.Graph",
    "a forked child must open the device and make its streams itself": "start processes by spawn, not by fork",
    ", or use mp::tagged for unknown lengths": "",
    ", or raise CommunicatorBuilder::depth": "",
    "switch it off: CommunicatorBuilder::bind, or MP_BIND=0": "switch it off: MP_BIND=0",
    ", or build with IntraHostPath::Queues": "",
    ", by Stream::abort or by a panic that dropped it": "",
    " (GDSYNC_PATH, DeviceConfig::route)": " (GDSYNC_PATH)",
    "in GDSYNC_DEVICE or to Device::find": "in GDSYNC_DEVICE",
    "(Rma::signal, Rma::with_signal)": "(Window.signal, or Window.put with a signal)",
    "Communicator::check": "Communicator.lost",
    "Cond::Geq": "at least",
    " (NearPath::PeerCopies)": "",
    " (Gpu::alloc)": "",
    " (Communicator::barrier is another one)": "",
    " (Stream::with_timeout)": "",
    "(CommunicatorBuilder::timeout)": "(gdasync.init(timeout=...))",
    "or use one QP per stream": "or use a communicator for each stream",
    "use Stream::cuda, or pass": "use another stream, or",
    "wait_recv_in_batch or wait_recv_on_stream": "wait_recv",
    "post_recv_on_stream or post_recv_in_batch": "post_recv",
    "post_recv_in_batch or post_recv_on_stream": "post_recv",
    "boot over MPI (Builder::init_over)": "pass the communicator of mpi4py to gdasync.init",
    "CommunicatorBuilder::init_over": "gdasync.init(group)",
    "CommunicatorBuilder::spawn": "gdasync.init(spawn=...)",
    "CommunicatorBuilder::init": "gdasync.init",
    "Communicator::init": "gdasync.init",
    "its wait_limit": "it by gdasync.Stream(..., wait_limit=...)",
    "Stream::submit": "submit",
    "Window::destroy": "Window.close",
    "::": ".",
}


class Error(Exception):
    """An operation failed. The text names cause and fix.

    ``rank`` is the rank at the other end, if there is one, ``operation`` the call, and ``cause`` the reason without
    the rest of the text, if it is known.
    """

    def __init__(
        self, message: str, rank: int | None = None, operation: str | None = None, cause: str | None = None
    ) -> None:
        super().__init__(message, rank, operation, cause)
        self.rank = rank
        self.operation = operation
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class PeerGone(Error):
    """A rank died, does not answer, or gave this one up. ``Communicator.shrink`` goes on without it."""


class Deadline(Error, TimeoutError):
    """Something did not happen in time. What a request waits for goes on."""


class CudaError(Error):
    """CUDA refused a call, or its work failed."""


class Busy(Error):
    """Another stream, or the CPU, uses the queue; or it is full. Wait for what is under way, and try again."""


def made(kind: str, message: str, rank: int | None, operation: str, cause: str | None) -> Error:
    """The exception for an error of the library in Rust."""
    kinds = {each.__name__: each for each in (Error, PeerGone, Deadline, CudaError, Busy)}
    for rust, python in _WORDS.items():
        message, cause = message.replace(rust, python), cause and cause.replace(rust, python)
    return kinds[kind](message, rank, operation, cause)
