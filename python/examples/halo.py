"""A stencil on a ring of ranks: each step exchanges the rows at the edges through channels, captured in a graph.

torchrun --nproc-per-node 2 halo.py              # on GPUs, also by torch.distributed over NCCL, by turns
python halo.py                                   # starts its two ranks; on CPUs if there are no GPUs
"""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import gdasync

ROWS, COLUMNS, STEPS = 64, 4096, 50


def main() -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda" if cuda else "cpu")
    with gdasync.init(spawn=2) as comm:
        above, below = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        # With a row of each neighbour at the ends.
        field = torch.zeros(ROWS + 2, COLUMNS, device=device)
        field[1:-1] = comm.rank
        memory = comm.register(field)
        row = COLUMNS * field.element_size()
        top, bottom = memory.part(0, row), memory.part((ROWS + 1) * row, row)
        first, last = memory.part(row, row), memory.part(ROWS * row, row)
        sides = [(above, [top]), (below, [bottom])]
        # In a ring of two both neighbours are the same rank: the n-th channel of one goes to the n-th of the other.
        turned = comm.size == 2 and comm.rank == 1
        channels = comm.channels(sides[::-1] if turned else sides)
        up, down = channels[::-1] if turned else channels

        stream = torch.cuda.Stream() if cuda else gdasync.Stream.host()

        def exchange() -> None:
            up.post_recv(stream)
            down.post_recv(stream)
            up.send(first, stream)
            down.send(last, stream)
            up.wait_recv(stream)
            down.wait_recv(stream)

        def smooth() -> None:
            field[1:-1] = (field[:-2] + field[1:-1] + field[2:]) / 3

        if cuda:
            exchange()  # registers the rows before the capture
            torch.cuda.synchronize()
        graph = gdasync.Graph()
        with graph.capture(stream):
            exchange()
            if cuda:
                smooth()

        def step() -> None:
            graph.replay()
            if isinstance(stream, gdasync.Stream):
                # A host stream has no kernels: the CPU takes their place.
                stream.synchronize()
                smooth()

        def timed(name: str, step: Callable[[], None]) -> None:
            for _ in range(2):
                comm.barrier()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step()
                if cuda:
                    torch.cuda.synchronize()
            print(f"rank {comm.rank}: {name}: {1e6 * (time.perf_counter() - begin) / STEPS:.1f} us a step", flush=True)

        timed("channels", step)
        if not isinstance(stream, gdasync.Stream):
            gdasync.Stream(stream).synchronize()
        if cuda and dist.is_torchelastic_launched():
            dist.init_process_group("nccl")

            def by_nccl() -> None:
                # With two ranks the first send of one meets the first receive of the other.
                sends = [dist.P2POp(dist.isend, field[1], above), dist.P2POp(dist.isend, field[-2], below)]
                receives = [dist.P2POp(dist.irecv, field[-1], below), dist.P2POp(dist.irecv, field[0], above)]
                for work in dist.batch_isend_irecv(sends + receives):
                    work.wait()

            by_nccl()
            torch.cuda.synchronize()
            of_torch = torch.cuda.CUDAGraph()
            with torch.cuda.graph(of_torch):
                by_nccl()
                smooth()
            for _ in range(2):
                timed("NCCL", of_torch.replay)
                timed("channels", step)
            del of_torch
            dist.destroy_process_group()
        total = torch.tensor([float(field[1:-1].double().sum())], dtype=torch.float64)
        comm.allreduce(total)
        expected = ROWS * COLUMNS * sum(range(comm.size))
        assert abs(total.item() - expected) < 1e-3 * expected, (total.item(), expected)
        print(f"rank {comm.rank}: the sum is kept: {total.item():.0f}", flush=True)


if __name__ == "__main__":
    main()
