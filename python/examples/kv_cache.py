"""Pushes blocks of a key-value cache from a prefill rank into the cache of a decode rank, each with a signal.

The decode rank waits for the layers that it needs, in stream order; the prefill rank does not wait for it.

torchrun --nproc-per-node 2 kv_cache.py          # on GPUs, also by torch.distributed over NCCL, by turns
python kv_cache.py                               # starts its two ranks; on CPUs if there are no GPUs
"""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import gdasync

LAYERS, TOKENS, WIDTH = 16, 256, 1024


def main() -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda" if cuda else "cpu")
    with gdasync.init(spawn=2) as comm:
        cache = torch.zeros(LAYERS, TOKENS, WIDTH, device=device)
        layer = cache[0].numel() * cache.element_size()
        # A counter for each layer, in memory of the CPU: also where GPU memory cannot be mapped.
        counters = torch.zeros(LAYERS + 1, dtype=torch.int64)
        blocks = comm.window(cache)
        signals = blocks.beside(counters)
        stream = torch.cuda.current_stream() if cuda else None

        def block(number: int, index: int) -> torch.Tensor:
            return torch.full((TOKENS, WIDTH), float(100 * number + index), device=device)

        def use(number: int, index: int) -> None:
            mean = cache[index].mean()  # attention over the layer
            assert mean.item() == 100 * number + index, (number, index, mean.item())

        def ours(number: int) -> None:
            if comm.rank == 0:
                for index in range(LAYERS):
                    # Kept until it is there, also without a name.
                    value, at = block(number, index), index * layer
                    blocks.put(value, 1, at, signal=(8 * index, "add", 1), signal_in=signals)
                # The cache is used: the next request may overwrite it.
                signals.wait_signal(8 * LAYERS, number)
            else:
                for index in range(LAYERS):
                    signals.wait_signal(8 * index, number, stream=stream)
                    use(number, index)
                signals.signal(0, (8 * LAYERS, "set", number))

        def nccl(number: int) -> None:
            for index in range(LAYERS):
                if comm.rank == 0:
                    dist.send(block(number, index), 1)
                else:
                    dist.recv(cache[index], 0)
                    use(number, index)

        def timed(name: str, request: Callable[[int], None], number: int) -> None:
            comm.barrier()
            begin = time.perf_counter()
            request(number)
            if cuda:
                torch.cuda.synchronize()
            took = time.perf_counter() - begin
            if comm.rank == 1:
                rate = LAYERS * layer / took / 1e9
                print(f"{name}: {LAYERS} layers of {layer >> 10} KiB in {1e3 * took:.1f} ms, {rate:.2f} GB/s", flush=True)

        by_nccl = cuda and dist.is_torchelastic_launched()
        if by_nccl:
            dist.init_process_group("nccl")
        for number in range(1, 5):
            timed("windows", ours, number)
            if by_nccl:
                timed("NCCL", nccl, number)
        if by_nccl:
            dist.destroy_process_group()
        if cuda:
            gdasync.Stream(stream).synchronize()
        signals.close()
        blocks.close()


if __name__ == "__main__":
    main()
