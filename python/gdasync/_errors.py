"""What fails, as exceptions."""

from __future__ import annotations


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
