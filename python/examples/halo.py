"""A stencil on a ring of ranks: each step exchanges the rows at the edges through channels, captured in a graph.

torchrun --nproc-per-node 2 halo.py              # or: python halo.py, which starts two ranks
"""

import os

import torch

import gdasync

ROWS, COLUMNS, STEPS = 64, 4096, 20


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
        for _ in range(STEPS):
            graph.replay()
            if isinstance(stream, gdasync.Stream):
                # A host stream has no kernels: the CPU takes their place.
                stream.synchronize()
                smooth()
        if cuda:
            gdasync.Stream(stream).synchronize()
        total = torch.tensor([float(field[1:-1].double().sum())], dtype=torch.float64)
        comm.allreduce(total)
        expected = ROWS * COLUMNS * sum(range(comm.size))
        assert abs(total.item() - expected) < 1e-3 * expected, (total.item(), expected)
        print(f"rank {comm.rank}: {STEPS} steps, the sum is kept: {total.item():.0f}", flush=True)


if __name__ == "__main__":
    main()
