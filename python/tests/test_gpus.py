"""Messages between tensors of two GPUs, and work of torch directly behind them. Skipped without torch and two GPUs."""

import random
import unittest

from job import LONG, run

import gdasync

try:
    import torch
except ImportError:
    torch = None


def queued_ahead(comm, behind):
    """Exchanges of new tensors, ten at a time; `behind` each its stream has work that waits for the message."""
    torch.cuda.set_device(comm.rank)
    peer, sizes = 1 - comm.rank, random.Random(7)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    # What is new to the GPU must not wait for a message.
    assert (behind(torch.full((12_000_000,), 1, dtype=torch.uint8, device="cuda")) == 1).all()
    for batch in range(5):
        kept = []
        for index in range(10):
            size, value = sizes.randrange(1, 12_000_000), 16 * batch + index
            out = torch.full((size,), value + comm.rank, dtype=torch.uint8, device="cuda")
            into = torch.empty_like(out)
            received = comm.irecv(into, peer)
            comm.send(out, peer)
            received.wait_on()
            kept.append((behind(into), value + peer))
        gdasync.Stream(stream).synchronize(LONG)
        assert all(bool((tensor == value).all()) for tensor, value in kept)
    comm.finalize()


def nothing(comm):
    queued_ahead(comm, lambda tensor: tensor)


def copies(comm):
    queued_ahead(comm, lambda tensor: tensor.clone())


def reductions(comm):
    queued_ahead(comm, lambda tensor: tensor.max())


@unittest.skipUnless(torch and torch.cuda.device_count() >= 2, "needs torch and two GPUs")
class TwoGpus(unittest.TestCase):
    def test_exchanges_queued_ahead(self):
        run(2, nothing)

    def test_copies_behind_messages(self):
        run(2, copies)

    def test_reductions_behind_messages(self):
        run(2, reductions)


if __name__ == "__main__":
    unittest.main()
