"""Messages between tensors of two GPUs, and work of torch directly behind them. Skipped without torch and two GPUs."""

import random
import unittest

from job import LONG, raises, run

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


def tensors(comm):
    """What is sent is what the tensor had when it was passed, also if it gets another storage before the stream is there."""
    torch.cuda.set_device(comm.rank)
    peer, size = 1 - comm.rank, 16_000_000
    square = torch.zeros(4, 4, device="cuda")
    raises(ValueError, lambda: comm.send(square.t(), peer), "contiguous")
    raises(ValueError, lambda: comm.send(square[:0], peer), "empty")
    raises((BufferError, RuntimeError), lambda: comm.send(square.clone().requires_grad_(), peer), "grad")
    out, into = torch.full((size,), comm.rank + 1.0, device="cuda"), torch.zeros(size, device="cuda")
    received, sent = comm.irecv(into, peer), comm.isend(out, peer)
    # What it had before is free now for what comes next on the stream.
    out.data = torch.zeros(1, device="cuda")
    others = [torch.full((size,), 9.0, device="cuda") for _ in range(4)]
    received.wait_on()
    gdasync.Stream().synchronize(LONG)
    sent.wait()
    assert bool((into == peer + 1).all()) and len(others) == 4
    comm.finalize()


@unittest.skipUnless(torch and torch.cuda.device_count() >= 2, "needs torch and two GPUs")
class TwoGpus(unittest.TestCase):
    def test_tensors(self):
        run(2, tensors)

    def test_exchanges_queued_ahead(self):
        run(2, nothing)

    def test_copies_behind_messages(self):
        run(2, copies)

    def test_reductions_behind_messages(self):
        run(2, reductions)


if __name__ == "__main__":
    unittest.main()
