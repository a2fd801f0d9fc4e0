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

MICROBATCHES = 16


def main() -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda" if cuda else "cpu")
    width, rounds = (2048, 21) if cuda else (512, 3)
    with gdasync.init(spawn=2) as comm:
        weight = torch.full((width, width), 1.0 / width, device=device)
        # One for each microbatch: a message does not wait for the use of the one before.
        places = [torch.empty(width, width, device=device) for _ in range(MICROBATCHES)]
        memory = [comm.register(place) for place in places]

        def compute(value: torch.Tensor, into: torch.Tensor) -> None:
            torch.matmul(value, weight, out=into)

        def finish() -> None:
            if cuda:
                torch.cuda.synchronize()

        def ours(computes: bool = True, exchanges: bool = True) -> None:
            if comm.rank == 0:
                requests = []
                for index, place in enumerate(places):
                    if computes:
                        compute(torch.full((width, width), float(index), device=device), place)
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
                    compute(torch.full((width, width), float(index), device=device), place)
                    works.append(dist.isend(place, 1))
            else:
                works = [dist.irecv(place, 0) for place in places]
            for index, work in enumerate(works):
                work.wait()
                if comm.rank == 1:
                    compute(places[index], results[index])

        results = [torch.empty_like(place) for place in places]
        ways: dict[str, Callable[[], None]] = {
            "compute alone": partial(ours, exchanges=False),
            "messages alone": partial(ours, computes=False),
            "both": ours,
        }
        if cuda and dist.is_torchelastic_launched():
            dist.init_process_group("nccl")
            ways["both, NCCL"] = nccl
        # By turns: the clock of a GPU changes by more than what is to be seen here.
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                for result in results:
                    result.zero_()
                finish()
                comm.barrier()
                begin = time.perf_counter()
                way()
                finish()
                times[name].append(1e3 * (time.perf_counter() - begin))
                if comm.rank == 1 and name.startswith("both"):
                    for index, result in enumerate(results):
                        assert torch.allclose(result, torch.full_like(result, float(index))), f"microbatch {index}"
        if len(ways) > 3:
            dist.destroy_process_group()
        median = {name: sorted(each)[rounds // 2] for name, each in times.items()}
        # As if messages took no time: the second stage is as fast as the first one, and begins behind its first product.
        slowest = torch.tensor([median["compute alone"]])
        comm.allreduce(slowest, "max")
        ideal = slowest.item() + (median["compute alone"] / MICROBATCHES if comm.rank == 1 else 0)
        lines = [f"rank {comm.rank}: {name}: {took:.2f} ms\n" for name, took in median.items()]
        if cuda:
            seen = (median["both"] - ideal) / median["messages alone"]
            lines.append(f"rank {comm.rank}: {100 * (1 - seen):.0f} % of the communication is hidden\n")
        print("".join(lines), end="", flush=True)


if __name__ == "__main__":
    main()
