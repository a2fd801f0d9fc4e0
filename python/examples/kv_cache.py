"""Pushes blocks of a key-value cache from a prefill rank into the cache of a decode rank, each with a signal.

The decode rank waits for the layers that it needs, in stream order; the prefill rank does not wait for it.

torchrun --nproc-per-node 2 kv_cache.py          # or: python kv_cache.py, which starts two ranks
"""

import os
import time

import torch

import gdasync

LAYERS, TOKENS, WIDTH, REQUESTS = 16, 256, 1024, 4


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
        if comm.rank == 0:
            for number in range(1, REQUESTS + 1):
                for index in range(LAYERS):
                    block = torch.full((TOKENS, WIDTH), float(100 * number + index), device=device)
                    # Kept until it is there, also without this name.
                    blocks.put(block, 1, index * layer, signal=(8 * index, "add", 1), signal_in=signals)
                # The cache is used: the next request may overwrite it.
                signals.wait_signal(8 * LAYERS, number)
        else:
            for number in range(1, REQUESTS + 1):
                begin = time.perf_counter()
                for index in range(LAYERS):
                    signals.wait_signal(8 * index, number, stream=stream)
                    mean = cache[index].mean()  # attention over the layer
                    assert mean.item() == 100 * number + index, (number, index, mean.item())
                signals.signal(0, (8 * LAYERS, "set", number))
                took = time.perf_counter() - begin
                rate = LAYERS * layer / took / 1e9
                print(f"request {number}: {LAYERS} layers of {layer >> 10} KiB in {1e3 * took:.1f} ms, {rate:.2f} GB/s")
        if cuda:
            gdasync.Stream(stream).synchronize()
        signals.close()
        blocks.close()


if __name__ == "__main__":
    main()
