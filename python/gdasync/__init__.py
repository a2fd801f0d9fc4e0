"""GPUDirect Async: messages, windows and channels in the order of GPU streams, without the CPU in their path.

Tensors are those of torch, CuPy, JAX and NumPy. A call with a tensor of a GPU is queued on torch's current stream, or
on ``stream=``, and returns at once. A call with a tensor of the CPU is the CPU's: ``send`` and ``recv`` wait. See
docs/python.md.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _gdasync
from ._doctor import doctor
from ._errors import Busy, CudaError, Deadline, Error, PeerGone
from ._gdasync import Buffer, Channel, Communicator, Request, Stream, Window
from ._graph import Graph
from ._group import StoreExchange, exchange_of

__all__ = [
    "Buffer",
    "Busy",
    "Channel",
    "Communicator",
    "CudaError",
    "Deadline",
    "Error",
    "Graph",
    "PeerGone",
    "Request",
    "Stream",
    "Window",
    "doctor",
    "init",
]


def init(
    group: Any = None, *, gpu: int | None = None, spawn: int | None = None, timeout: float = 30.0
) -> Communicator:
    """Joins the other ranks: a call of all of them.

    Without a group they are those that torchrun, mpirun or srun has started; without a launcher, ``spawn`` starts the
    program again as ranks 1 to ``spawn - 1``, which end with the thread that makes this call. A group is one of
    ``torch.distributed`` or a communicator of mpi4py.

    The queues are prepared for ``gpu``, by default torch's current one if torch uses GPUs; others work, too.
    ``timeout``, in seconds, is also that of calls without one of their own.
    """
    if group is not None and spawn is not None:
        raise ValueError("group and spawn: the ranks of a group run already, pass one of both")
    torch = sys.modules.get("torch")
    if gpu is None and torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        gpu = torch.cuda.current_device()
    exchange = None if group is None else exchange_of(group)
    comm = _gdasync.init(exchange, gpu, spawn, timeout)
    if isinstance(exchange, StoreExchange):
        exchange.count()
    return comm
