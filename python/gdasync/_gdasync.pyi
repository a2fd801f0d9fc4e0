from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, final

class _Dlpack(Protocol):
    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> Any: ...

# Contiguous memory: a tensor, a registered one, or a writable buffer.
_Tensor = _Dlpack | _CudaArray | Buffer | bytearray | memoryview
# None: torch's current stream for memory of a GPU, the CPU for other memory.
_Stream = Stream | _CudaStream | _TorchStream | int | None
# Offset of a 64-bit word in the window of the target, what to do there, value.
_Signal = tuple[int, Literal["add", "set"], int]

def init(exchange: Any, gpu: int | None, spawn: int | None, timeout: float) -> Communicator: ...

@final
class Communicator:
    """The ranks of a job, and messages between them.

    Messages match receives in the order of the calls. Timeouts are in seconds; None is that of ``init``. Leave with
    ``finalize``, or use it as a context manager, which does unless there is an exception.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def path(self, rank: int) -> str:
        """The device that messages with a rank go through, and why."""
    def lost(self) -> list[int]:
        """Ranks that are known to be gone."""
    def register(self, tensor: _Tensor) -> Buffer:
        """Registers memory once, for operations that use it often."""
    def send(self, tensor: _Tensor, rank: int, *, stream: _Stream = None) -> None:
        """Sends. On a stream, the stream goes on when the tensor may be written again; else the call does."""
    def recv(self, tensor: _Tensor, rank: int, *, stream: _Stream = None) -> None:
        """Receives. On a stream, the stream goes on when the message is there; else the call does."""
    def sendrecv(
        self, tensor: _Tensor, to: int, into: _Tensor, source: int, *, stream: _Stream = None
    ) -> None:
        """Sends to one rank and receives from another, or the same. A stream waits for both; without one the call does."""
    def isend(self, tensor: _Tensor, rank: int, *, stream: _Stream = None) -> Request:
        """Starts a send; on a stream, when the stream gets there. Nothing waits for it."""
    def irecv(self, tensor: _Tensor, rank: int, *, stream: _Stream = None) -> Request:
        """Starts a receive; on a stream, when the stream gets there. Nothing waits for it."""
    def window(self, tensor: _Tensor, timeout: float | None = None) -> Window:
        """Lets all ranks read and write the tensor. By all ranks; sizes may differ."""
    def channels(
        self, wanted: Sequence[tuple[int, Sequence[_Tensor]]], timeout: float | None = None
    ) -> list[Channel]:
        """Makes channels with ranks, each with places for what comes from there. By all ranks; lists may be empty."""
    def barrier(self, timeout: float | None = None) -> None:
        """Waits for all ranks, by the CPU."""
    def allreduce(
        self, tensor: _Tensor, op: Literal["sum", "min", "max"] = "sum", timeout: float | None = None
    ) -> None:
        """Combines a few numbers of all ranks in place, by the CPU."""
    def shrink(self, timeout: float | None = None) -> Communicator:
        """A communicator of the ranks that are left, after others were lost. By all of them."""
    def finalize(self, timeout: float | None = None) -> None:
        """Ends the communicator when nothing is under way at any rank."""
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class Buffer:
    """Registered memory of a tensor, which it keeps."""

    @property
    def nbytes(self) -> int: ...
    def part(self, offset: int, nbytes: int) -> Buffer:
        """A range of its bytes."""

@final
class Request:
    """An operation under way. It keeps its tensor until the operation is complete, also after it is dropped."""

    @property
    def rank(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int:
        """Waits by the CPU, and returns the bytes of the message. After ``Deadline`` the operation goes on."""
    def test(self) -> int | None:
        """The bytes of the message if it is complete."""
    def wait_on(self, stream: _Stream = None) -> None:
        """Holds a stream until it is complete."""

@final
class Window:
    """Memory of all ranks. Offsets are in bytes, in the window of the target."""

    def put(
        self,
        tensor: _Tensor,
        rank: int,
        offset: int = 0,
        *,
        signal: _Signal | None = None,
        signal_in: Window | None = None,
        stream: _Stream = None,
    ) -> Request:
        """Writes a tensor into the window of a rank. A signal then changes a word there, or in another window.

        Words in memory of a GPU need one that gdrcopy can map; where it cannot, keep them in the CPU's, by ``beside``.
        """
    def get(self, tensor: _Tensor, rank: int, offset: int = 0, *, stream: _Stream = None) -> Request:
        """Reads a part of the window of a rank into a tensor."""
    def signal(self, rank: int, signal: _Signal, *, stream: _Stream = None) -> None:
        """Changes a word of a rank after all earlier puts to it."""
    def wait_signal(
        self, word: int, value: int, *, stream: _Stream = None, timeout: float | None = None
    ) -> None:
        """Waits until the word at an offset of this rank's window is at least ``value``."""
    def flush(self, rank: int, *, timeout: float | None = None) -> None:
        """Waits by the CPU until all that was started on the window of a rank is complete there."""
    def beside(self, tensor: _Tensor, timeout: float | None = None) -> Window:
        """A window of other memory, in which this one's puts may signal. By all ranks."""
    def close(self, timeout: float | None = None) -> None:
        """Ends the window. By all ranks."""

@final
class Channel:
    """Messages with one rank on streams, in a loop or a graph. A message leaves when its place is free."""

    @property
    def rank(self) -> int: ...
    def post_recv(self, stream: _Stream = None) -> None:
        """Frees the next place for a message, when the stream gets there."""
    def wait_recv(self, stream: _Stream = None) -> None:
        """Holds the stream until the message is in its place."""
    def send(self, tensor: _Tensor, stream: _Stream = None) -> None:
        """Sends when there is a free place. The stream goes on when the tensor may be written again."""

@final
class Stream:
    """A stream of another library, which goes on using it; None is torch's current one.

    ``via`` is what waits and writes there: ``"memop"``, memory operations of the GPU's front end (the default),
    ``"kernel"``, a kernel of one thread for each call, which is quicker and occupies a multiprocessor while it waits, or
    ``"auto"``, which measures both. ``wait_limit`` is what a wait for a message may last, the kernels before it
    included, until the stream gives up (60 s). Choose both before the first use of the stream.
    """

    def __new__(
        cls,
        stream: _Stream = None,
        *,
        via: Literal["memop", "kernel", "auto"] | None = None,
        wait_limit: float | None = None,
    ) -> Stream: ...
    @staticmethod
    def host(*, wait_limit: float | None = None) -> Stream:
        """A stream that a thread of the CPU runs."""
    @property
    def is_cuda(self) -> bool: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...
    def call(self, function: Callable[[], object]) -> None:
        """Calls a function in the order of a host stream, in place of a kernel. An exception fails the stream."""
    def synchronize(self, timeout: float | None = None) -> None:
        """Waits for all that was queued here, and raises what has failed. None is the wait limit.

        A failed stream of another library can be used again then, by a new ``Stream``.
        """
    def check(self) -> None:
        """Raises what has failed so far."""
    def _begin_capture(self) -> None: ...
    def _end_capture(self) -> _Recorded: ...
    def _discard_capture(self) -> None: ...

@final
class _Recorded:
    def launch(self, stream: Stream, timeout: float | None = None) -> None: ...
