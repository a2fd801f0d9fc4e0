"""Graphs: work of a stream that is captured once and replayed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ._gdasync import Stream, _Recorded


class Graph:
    """Kernels and messages of a stream, captured once and replayed any number of times.

    What torch launches on the stream within the capture is part of the graph, and so are ``Channel`` and ``Window``
    calls on it. Each replay sends and receives anew. Messages of a ``Communicator`` are refused: use a channel.
    A graph that ``torch.cuda.graph`` captures cannot send: its replays would repeat the same requests.
    """

    def __init__(self) -> None:
        self._recorded: _Recorded | None = None
        self._on: Stream | None = None
        self._pool: Any = None

    @contextmanager
    def capture(self, stream: Any = None) -> Iterator[None]:
        """Records what is queued on ``stream`` (None: torch's current one) until the block ends; nothing of it runs.

        An exception discards the recording.
        """
        on = stream if isinstance(stream, Stream) else Stream(stream)
        torch = sys.modules.get("torch")
        with ExitStack() as within:
            if torch is not None and hasattr(stream, "cuda_stream"):
                within.enter_context(torch.cuda.stream(stream))
            if torch is not None and on.is_cuda and hasattr(torch.cuda, "MemPool"):
                # What torch allocates in the capture belongs to the graph.
                self._pool = torch.cuda.MemPool()
                within.enter_context(torch.cuda.use_mem_pool(self._pool))
            on._begin_capture()
            try:
                yield
            except BaseException:
                on._discard_capture()
                raise
            self._recorded, self._on = on._end_capture(), on

    def replay(self, stream: Any = None, timeout: float | None = None) -> None:
        """Queues the recorded work on a stream (None: that of the capture). Waits for room up to ``timeout``."""
        if self._recorded is None or self._on is None:
            raise ValueError("nothing is captured yet: capture first")
        on = self._on if stream is None else stream if isinstance(stream, Stream) else Stream(stream)
        self._recorded.launch(on, timeout)
