"""The collectives of torch.distributed, an example of each: who has what before and after.

torchrun --standalone --nproc-per-node 4 techniques/collectives.py

Nothing is trained here. Start reading at main(). For each example a line is drawn for each process:
its numbers before, and after. 12 is the number that process 1 has made at place 2, and a dot is
room for what will come. All processes must call the same collectives in the same order: one that
does not makes the others wait.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


class UserError(Exception):
    """An error that the user can fix. run() prints it as one line."""


def main(args):
    try:
        local_rank = int(os.environ["LOCAL_RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
    except KeyError as missing:
        raise UserError(f"{missing} is not set: start this script with torchrun") from None
    if world_size > 9:
        raise UserError(f"WORLD_SIZE {world_size}: start 9 processes at most, a digit for each")
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(f"--device: no GPU for process {local_rank} here, try --device cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    examples = [broadcast, scatter, gather, all_gather, reduce, all_reduce, reduce_scatter]
    examples += [all_to_all, send_and_receive, barrier]
    for example in examples:
        before, after = example(device)
        draw(example, before, after)
    dist.destroy_process_group()


def broadcast(device):
    """Process 0's tensor goes to all. DDP: the weights, once; BatchNorm's averages, each step."""
    tensor = numbers(device) if dist.get_rank() == 0 else room(device)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    return before, tensor


def scatter(device):
    """Process 0 deals out its tensor, a part to each."""
    part = room(device, 1)
    if dist.get_rank() == 0:
        whole = numbers(device)
        dist.scatter(part, [*whole.split(1)], src=0)
        return whole, part
    dist.scatter(part, src=0)
    return None, part


def gather(device):
    """The reverse: process 0 gets a part from each, the others nothing."""
    part = numbers(device)[:1]
    if dist.get_rank() == 0:
        whole = room(device)
        dist.gather(part, [*whole.split(1)], dst=0)  # into these views of it
        return part, whole
    dist.gather(part, dst=0)
    return part, None


def all_gather(device):
    """Every process gets a part from each. FSDP: the weights of a layer, before it is computed."""
    part, whole = numbers(device)[:1], room(device)
    dist.all_gather_into_tensor(whole, part)
    return part, whole


def reduce(device):
    """Process 0 gets the sum of all tensors, place by place. (Or the maximum, by op=...)"""
    tensor = numbers(device)
    before = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    return before, tensor if dist.get_rank() == 0 else None  # what others have now means nothing


def all_reduce(device):
    """Every process gets the sum. DDP: the gradients, in each step; divided, it is their mean."""
    tensor = numbers(device)
    before = tensor.clone()
    dist.all_reduce(tensor)
    return before, tensor


def reduce_scatter(device):
    """Every process gets a part of the sum. An all-reduce is this one and then an all-gather."""
    tensor, part = numbers(device), room(device, 1)
    dist.reduce_scatter_tensor(part, tensor)
    return tensor, part


def all_to_all(device):
    """Every process deals out its tensor. Mixture of experts: each token goes to its expert."""
    tensor, after = numbers(device), room(device)
    dist.all_to_all_single(after, tensor)
    return tensor, after


def send_and_receive(device):
    """No collective, but what they are made of: each sends to the next one in a ring."""
    tensor, after = numbers(device), room(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return None, None  # there is nobody to send to
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, after, (rank - 1) % world_size)
    # Both are begun, then waited for: if all first sent, and waited, they might wait for ever.
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return tensor, after


def barrier(device):
    """No tensor: each waits until all have come. Here process 0 comes half a second late."""
    if dist.get_rank() == 0:
        time.sleep(0.5)
    started = time.perf_counter()
    dist.barrier()
    waited = time.perf_counter() - started
    return None, f"waited {waited:.1f} s"


def numbers(device):
    """A number for each process: 20, 21, 22 ... in process 2."""
    return 10 * dist.get_rank() + torch.arange(dist.get_world_size(), device=device)


def room(device, count=None):
    """Room for a number from each process, or for so many. -1 is drawn as a dot."""
    return torch.full((count or dist.get_world_size(),), -1, device=device)


def draw(example, before, after):
    """Process 0 prints what all have. All must call it."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"{shown(before)}  ->  {shown(after)}")  # Python's own objects
    if dist.get_rank() == 0:
        print(f"{example.__name__}: {example.__doc__}")
        for rank, line in enumerate(lines):
            print(f"    process {rank}  {line.rstrip()}")
        print(flush=True)


def shown(held):
    """A tensor's numbers in columns; nothing for nothing."""
    if isinstance(held, torch.Tensor):
        held = " ".join("  ." if number < 0 else f"{number:3}" for number in held.tolist())
    return f"{held or '':{4 * dist.get_world_size()}}"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
    )
    devices = ["auto", "cpu", "cuda"]
    help = "auto: GPUs, if there are any. [%(default)s]"
    parser.add_argument("--device", choices=devices, default="auto", help=help)
    return parser.parse_args()


def run(args):
    """main(), with a line in place of a traceback for errors that the user can fix."""
    try:
        main(args)
    except UserError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run(parse_args())
