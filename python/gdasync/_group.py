"""Addresses exchanged by ranks that know each other already."""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

# How many communicators were made over each group: each has keys of its own.
_made: Counter[str] = Counter()


class StoreExchange:
    """Ranks of a ``torch.distributed`` group, which meet in its store. No backend is used, and no port."""

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.prefix = f"gdasync/{name}/{_made[name]}"
        self.round = 0

    def count(self) -> None:
        """The communicator is made: the next one has other keys. One that failed at some ranks is tried again with these."""
        _made[self.name] += 1

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        prefix = f"{self.prefix}/{self.round}"
        self.store.set(f"{prefix}/{self.rank}", data)
        gathered = []
        for rank in range(self.size):
            key, left = f"{prefix}/{rank}", max(end - time.monotonic(), 0.001)
            try:
                self.store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                # Who tries again must not find it.
                for round in (self.round - 1, self.round):
                    self.store.delete_key(f"{self.prefix}/{round}/{self.rank}")
                if time.monotonic() < end:
                    raise
                raise TimeoutError(f"rank {rank} does not come to a call of all ranks") from error
            gathered.append(bytes(self.store.get(key)))
        if self.round:
            # Who has written for this round has read all of the one before.
            self.store.delete_key(f"{self.prefix}/{self.round - 1}/{self.rank}")
        self.round += 1
        return gathered


class MpiExchange:
    """Ranks of a communicator of mpi4py, whose calls have no timeout."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        gathered: list[bytes] = self.comm.allgather(data)
        return gathered


def exchange_of(group: Any) -> Any:
    if hasattr(group, "Get_rank"):
        return MpiExchange(group)
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups = {} if c10d is None else c10d._world.pg_map if hasattr(c10d, "_world") else c10d._pg_map
    if group not in groups:
        name = type(group).__name__
        raise TypeError(
            f"'{name}' is no group that this rank is in: expected one of torch.distributed, such as"
            " torch.distributed.group.WORLD, or a communicator of mpi4py"
        )
    rank, size = c10d.get_rank(group), c10d.get_world_size(group)
    ranks = [c10d.get_global_rank(group, each) for each in range(size)] if hasattr(c10d, "get_global_rank") else size
    return StoreExchange(groups[group][1], rank, size, str(ranks))
