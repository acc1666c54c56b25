"""A rank that all-reduces ten times a second; `bench launchers` starts two, and breaks one.

ranks.py FOLDER FAULT [--spawn]

Each rank writes its process id to FOLDER/pid.RANK, and after three steps FOLDER/ready.RANK. FAULT:
`exception` and `hang` happen on rank 1 once FOLDER/act is there; any other one comes from outside.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = {
    "RANK": "WORLD_SIZE",
    "HOROVOD_RANK": "HOROVOD_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
}


def reducer():
    """The all-reduce of this launcher, once the ranks have met."""
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        hvd.init()
        return lambda numbers: hvd.allreduce(numbers, name="numbers")
    dist.init_process_group("gloo")
    return dist.all_reduce


def main(folder: Path, fault: str) -> None:
    rank, size = next(pair for pair in NAMES.items() if pair[0] in os.environ)
    os.environ |= {"RANK": os.environ[rank], "WORLD_SIZE": os.environ[size]}
    rank = int(os.environ["RANK"])
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    all_reduce = reducer()
    for step in range(10**9):
        all_reduce(torch.ones(1))
        time.sleep(0.1)
        if step == 3:
            (folder / f"ready.{rank}").touch()
        if rank == 1 and (folder / "act").exists():
            if fault == "exception":
                raise ValueError("a broken image")
            if fault == "hang":
                time.sleep(10**6)


def spawned(local_rank: int, folder: Path, fault: str) -> None:
    os.environ |= {"RANK": str(local_rank), "WORLD_SIZE": "2"}
    main(folder, fault)


if __name__ == "__main__":
    if sys.argv[3:] == ["--spawn"]:
        torch.multiprocessing.spawn(spawned, (Path(sys.argv[1]), sys.argv[2]), nprocs=2)
    else:
        main(Path(sys.argv[1]), sys.argv[2])
