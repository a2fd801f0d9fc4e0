"""Tensors and groups of torch, in memory of the CPU. Skipped where there is no torch."""

import threading
import unittest

from job import LONG, raises, run

import gdasync

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None


def tensors(comm):
    peer = 1 - comm.rank
    for kind in (torch.float32, torch.float16, torch.int8, torch.uint8):
        out, into = torch.ones(3, 700).to(kind), torch.zeros(3, 700).to(kind)
        receive = comm.irecv(into, peer)
        comm.send(out, peer)
        assert receive.wait() == out.numel() * out.element_size() and (into == out).all()
    weight = torch.ones(4, requires_grad=True)
    raises((BufferError, RuntimeError), lambda: comm.send(weight, peer), "grad")
    receive = comm.irecv(torch.zeros(4), peer)
    comm.send(weight.detach(), peer)
    receive.wait()
    raises(ValueError, lambda: comm.send(torch.ones(4, 4).t(), peer), "contiguous")
    for odd in (torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")):
        raises((BufferError, RuntimeError, ValueError), lambda: comm.send(odd, peer))
    # What is sent is what the tensor had when it was passed.
    stream, go = gdasync.Stream.host(), threading.Event()
    out, into = torch.full((50_000,), 7.0 + comm.rank), torch.zeros(50_000)
    stream.call(go.wait)
    comm.sendrecv(out, peer, into, peer, stream=stream)
    out.data = torch.zeros(1)
    others = [torch.full((50_000,), 9.0) for _ in range(20)]
    go.set()
    stream.synchronize(LONG)
    assert bool((into == 7 + peer).all()) and len(others) == 20
    values = comm.register(torch.tensor([1.0, 1.0]))
    comm.allreduce(values)
    values = torch.tensor([1.0, float(comm.rank)])
    comm.allreduce(values)
    assert values.tolist() == [2.0, 1.0]
    comm.finalize()


def group(comm):
    rank, size = comm.rank, comm.size
    comm.finalize()
    dist.init_process_group("gloo")
    pair = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for of in (dist.group.WORLD, dist.group.WORLD, *pair):
        if dist.get_rank(of) < 0:
            raises(TypeError, lambda: gdasync.init(of), "group")
            continue
        with gdasync.init(of) as within:
            assert (within.rank, within.size) == (dist.get_rank(of), dist.get_world_size(of))
            values = torch.tensor([float(rank)])
            within.allreduce(values)
            window = within.window(torch.zeros(8))
            window.close()
    raises(TypeError, lambda: gdasync.init("world"), "'str'")
    # A rank that does not come is named.
    if rank:
        raises(gdasync.Deadline, lambda: gdasync.init(dist.group.WORLD, timeout=0.5), "rank 0")
    dist.barrier()
    # Then all come.
    with gdasync.init(dist.group.WORLD, timeout=LONG) as within:
        assert within.size == size
    assert size == 3


@unittest.skipIf(torch is None, "no torch here")
class Torch(unittest.TestCase):
    def test_tensors(self):
        run(2, tensors)

    def test_groups(self):
        run(3, group)


if __name__ == "__main__":
    unittest.main()
