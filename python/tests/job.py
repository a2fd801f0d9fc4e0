"""Ranks for tests: processes with a launcher's variables."""

import multiprocessing
import os
import secrets
import socket
import sys
import traceback
from unittest import mock

SPAWN = multiprocessing.get_context("spawn")
# For a machine that is busy with other work; nothing waits so long unless something is wrong.
LONG = 120.0


def _rank(function, rank, size, port, token, arguments):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GDSYNC_JOB_TOKEN=token,
        GDSYNC_DEVICE="soft0",
    )
    try:
        import gdasync

        function(gdasync.init(timeout=LONG), *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run(size, function, *arguments, killed=(), environment={}):
    """Runs `function(comm, *arguments)` in `size` processes. Ranks that are `killed` end by SIGKILL, the others well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = str(secrets.randbits(63))
    ranks = [
        SPAWN.Process(target=_rank, args=(function, rank, size, port, token, arguments)) for rank in range(size)
    ]
    with mock.patch.dict(os.environ, environment):
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(2 * LONG)
    ended = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    expected = [-9 if rank in killed else 0 for rank in range(size)]
    assert ended == expected, f"exit codes of the ranks: {ended}, not {expected}"


def raises(kind, call, *words, **fields):
    """What a call raises, with these words in its text and these fields."""
    try:
        call()
    except kind as error:
        for word in words:
            assert word in str(error), f"'{word}' is not in: {error}"
        for name, value in fields.items():
            assert getattr(error, name) == value, f"{name} is {getattr(error, name)}, not {value}: {error}"
        return error
    raise AssertionError(f"{kind.__name__} was expected")
