"""A rank of PyTorch over NCCL, which checks all that arrives."""
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

SIZES = 1, 1000, (1 << 16) + 3, 1 << 22


def numbers(size, rank):
    """Differ by rank and place. Their sums fit into 32 bits."""
    return (torch.arange(size, dtype=torch.int32, device="cuda") * 7919 + rank * 104729) % 1000003


def check(what, got, expected):
    if not torch.equal(got, expected):
        wrong = int((got != expected).sum())
        sys.exit(f"rank {dist.get_rank()}: {what} of {got.numel()} numbers: {wrong} are wrong")


def exchange(size, rank, ranks):
    mine = numbers(size, rank)
    all_ranks = [numbers(size, other) for other in range(ranks)]
    total = mine.clone()
    dist.all_reduce(total)
    check("all_reduce", total, sum(all_ranks))
    gathered = [torch.zeros_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    for got, expected in zip(gathered, all_ranks):
        check("all_gather", got, expected)
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    got = torch.zeros_like(mine)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, got, source)]):
        request.wait()
    check("send and receive", got, all_ranks[source])
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        dist.recv(got, 0)
        check("receive", got, all_ranks[0])
    got = mine.clone()
    dist.broadcast(got, ranks - 1)
    check("broadcast", got, all_ranks[-1])
    torch.cuda.synchronize()


def main():
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    print(f"nccl: version {torch.cuda.nccl.version()}", flush=True)
    for _ in range(5):
        for size in SIZES:
            exchange(size, rank, ranks)
    print(f"nccl: rank {rank} of {ranks}: all data right", flush=True)
    dist.destroy_process_group()


main()
