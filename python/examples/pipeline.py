"""Two pipeline stages: activations go from one to the next in stream order, while the next microbatch is computed.

torchrun --nproc-per-node 2 pipeline.py          # on GPUs, also by torch.distributed over NCCL, by turns
python pipeline.py                               # starts its two ranks; on CPUs if there are no GPUs
"""

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import gdasync

MICROBATCHES, WIDTH = 16, 2048


def main() -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda" if cuda else "cpu")
    with gdasync.init(spawn=2) as comm:
        weight = torch.full((WIDTH, WIDTH), 1.0 / WIDTH, device=device)
        # One for each microbatch: a message does not wait for the use of the one before.
        places = [torch.empty(WIDTH, WIDTH, device=device) for _ in range(MICROBATCHES)]
        memory = [comm.register(place) for place in places]

        def compute(value: torch.Tensor, into: torch.Tensor) -> None:
            torch.matmul(value, weight, out=into)

        def ours(computes: bool = True, exchanges: bool = True) -> None:
            if comm.rank == 0:
                requests = []
                for index, place in enumerate(places):
                    if computes:
                        compute(torch.full((WIDTH, WIDTH), float(index), device=device), place)
                    if exchanges:
                        # Leaves when its product is there; the stream goes on with the next one.
                        requests.append(comm.isend(memory[index], 1))
                for request in requests:
                    request.wait()
            else:
                requests = [comm.irecv(each, 0) for each in memory] if exchanges else []
                for index, place in enumerate(places):
                    if exchanges:
                        requests[index].wait_on() if cuda else requests[index].wait()
                    if computes:
                        compute(place, results[index])

        def nccl() -> None:
            works = []
            if comm.rank == 0:
                for index, place in enumerate(places):
                    compute(torch.full((WIDTH, WIDTH), float(index), device=device), place)
                    works.append(dist.isend(place, 1))
            else:
                works = [dist.irecv(place, 0) for place in places]
            for index, work in enumerate(works):
                work.wait()
                if comm.rank == 1:
                    compute(places[index], results[index])

        def timed(name: str, rounds: Callable[[], None]) -> float:
            times = []
            for _ in range(5):
                comm.barrier()
                begin = time.perf_counter()
                rounds()
                if cuda:
                    torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - begin))
            median = sorted(times)[2]
            print(f"rank {comm.rank}: {name}: {median:.2f} ms", flush=True)
            return median

        def check() -> None:
            if comm.rank == 1:
                for index, result in enumerate(results):
                    assert torch.allclose(result, torch.full_like(result, float(index))), f"microbatch {index}"

        results = [torch.empty_like(place) for place in places]
        alone = timed("compute alone", partial(ours, exchanges=False))
        messages = timed("messages alone", partial(ours, computes=False))
        together = timed("both", ours)
        check()
        # As if messages took no time: the second stage is as fast as the first one, and begins behind its first product.
        slowest = torch.tensor([alone])
        comm.allreduce(slowest, "max")
        ideal = slowest.item() + (alone / MICROBATCHES if comm.rank == 1 else 0)
        print(f"rank {comm.rank}: {100 * (1 - (together - ideal) / messages):.0f} % of the communication is hidden", flush=True)
        if cuda and dist.is_torchelastic_launched():
            dist.init_process_group("nccl")
            for _ in range(2):
                timed("both, NCCL", nccl)
                check()
                timed("both", ours)
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
