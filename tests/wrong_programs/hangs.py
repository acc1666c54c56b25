"""Five classic ways to hang, of a small model that DDP trains: hangs.py WAY."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(way):
    rank = int(os.environ["RANK"])
    if way == "dead" and rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    batches = 5 if way == "uneven" and rank == 1 else 8
    for step in range(batches):
        optimizer.zero_grad()
        try:
            if way == "exception" and rank == 1 and step == 3:
                raise ValueError("a broken image")
            loss = ddp_model(torch.randn(4, 8)).square().mean()
        except ValueError:
            dist.barrier()  # so that all ranks leave this batch out
            continue
        loss.backward()
        optimizer.step()
        if way == "condition" and step == 3 and rank == 0:
            dist.all_reduce(loss.detach())
    dist.barrier()  # at the end
    print("done", flush=True)
    dist.destroy_process_group()


main(sys.argv[1])
