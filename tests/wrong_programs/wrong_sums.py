"""`bench comm` with collectives that give wrong values in the right shape, on one rank."""

import os
import sys

import torch.distributed as dist

from bench.nodes import comm

all_reduce, all_gather = dist.all_reduce, dist.all_gather_into_tensor
last = os.environ["RANK"] == "1"


def off_by_one(tensor, *arguments):
    all_reduce(tensor, *arguments)
    if last and tensor.numel() == 1024 and tensor.any():  # of 4 KB, and not comm's own
        tensor[-1] += 1


def swapped(out, given):
    all_gather(out, given)
    if last and out.numel() == 4096:  # of 16 KB
        out.copy_(out.roll(len(given)))


dist.all_reduce, dist.all_gather_into_tensor = off_by_one, swapped
comm.SIZES = comm.SIZES[:3]
sys.exit(comm.main(sys.argv[1:]))
