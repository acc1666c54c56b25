"""The ring of techniques/ring_allreduce.py beside dist.all_reduce; `bench effects` starts it.

torchrun --standalone --nproc-per-node 2 bench/experiments/ring.py

Checks that both have the same sum, then times them in turns.
"""

import runpy
import time
from pathlib import Path

import torch
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parents[2] / "techniques" / "ring_allreduce.py"
SIZE = 25 * 2**20  # bytes, as many as DDP's buckets have by default
WARM_UP, ROUNDS = 2, 10


def main():
    dist.init_process_group("gloo")
    log("start", world_size=dist.get_world_size())
    ring_all_reduce = runpy.run_path(str(SCRIPT))["ring_all_reduce"]
    torch.manual_seed(dist.get_rank())
    numbers = torch.rand(SIZE // 4)
    mine, right = numbers.clone(), numbers.clone()
    ring_all_reduce(mine)
    dist.all_reduce(right)
    torch.testing.assert_close(mine, right)
    functions = {"ring_seconds": ring_all_reduce, "all_reduce_seconds": dist.all_reduce}
    total = dict.fromkeys(functions, 0.0)
    for turn in range(WARM_UP + ROUNDS):
        for name, function in functions.items():
            took = seconds(function, numbers.clone())
            total[name] += took if turn >= WARM_UP else 0.0
    means = {name: sum_ / ROUNDS for name, sum_ in total.items()}
    log("check", tensor_bytes=SIZE, **means)
    log("end")


def seconds(function, tensor):
    """How long a collective takes. Every rank must call it."""
    dist.barrier()  # all begin together
    begin = time.perf_counter()
    function(tensor)
    return time.perf_counter() - begin


def log(event, **fields):
    """Prints one line, on rank 0 only; the probe records it."""
    if dist.get_rank() == 0:
        print(event, fields, flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
