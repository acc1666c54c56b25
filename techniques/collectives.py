"""The collectives of torch.distributed: what each rank has before and after each of them.

torchrun --standalone --nproc-per-node 4 techniques/collectives.py

This script trains nothing. Start reading at main(). For each collective, rank 0 prints one line per
rank: the rank's tensor before the call, and after it. 12 is rank 1's number at index 2. A dot is an
element that is still to be filled. Every rank must call the same collectives in the same order. If
a rank leaves one out, the others wait for it until a timeout.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist


def main(args):
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        sys.exit("start this script with torchrun, as its first lines show")
    if args.device == "cuda":
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)  # device_id: NCCL connects now
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")  # for CPUs

    examples = [broadcast, scatter, gather, all_gather, reduce, all_reduce, reduce_scatter]
    examples += [all_to_all, send_and_receive, barrier]
    for example in examples:
        before, after = example(device)
        show(example, before, after)


def broadcast(device):
    """All ranks get rank 0's tensor. DDP: the weights once, BatchNorm's statistics in each step."""
    tensor = numbers(device) if dist.get_rank() == 0 else empty(device)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    return before, tensor


def scatter(device):
    """Rank 0 splits its tensor, and each rank gets one part."""
    part = empty(device, 1)
    if dist.get_rank() == 0:
        whole = numbers(device)
        dist.scatter(part, list(whole.split(1)), src=0)
        return whole, part
    dist.scatter(part, src=0)
    return None, part


def gather(device):
    """The reverse of scatter: rank 0 gets one part from each rank."""
    part = numbers(device)[:1]
    if dist.get_rank() == 0:
        whole = empty(device)
        dist.gather(part, list(whole.split(1)), dst=0)  # fills these views of whole
        return part, whole
    dist.gather(part, dst=0)
    return part, None


def all_gather(device):
    """All ranks get one part from each rank. FSDP: the weights of a layer, before it computes."""
    part, whole = numbers(device)[:1], empty(device)
    dist.all_gather_into_tensor(whole, part)
    return part, whole


def reduce(device):
    """Rank 0 gets the sum of all tensors, element by element. (Or the maximum: op=...)"""
    tensor = numbers(device)
    before = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    return before, tensor if dist.get_rank() == 0 else None  # undefined on the other ranks


def all_reduce(device):
    """All ranks get the sum. DDP: the gradients, in each step, then divided by the world size."""
    tensor = numbers(device)
    before = tensor.clone()
    dist.all_reduce(tensor)
    return before, tensor


def reduce_scatter(device):
    """Each rank gets one part of the sum. With an all-gather after it, it is an all-reduce."""
    tensor, part = numbers(device), empty(device, 1)
    dist.reduce_scatter_tensor(part, tensor)
    return tensor, part


def all_to_all(device):
    """Each rank sends one part to each rank. Mixture of experts: each token goes to its expert."""
    tensor, after = numbers(device), empty(device)
    dist.all_to_all_single(after, tensor)
    return tensor, after


def send_and_receive(device):
    """Not a collective; collectives consist of such messages. Each rank sends to the next one."""
    tensor, after = numbers(device), empty(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return None, None  # a rank cannot send to itself
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, after, (rank - 1) % world_size)
    # Start both, then wait. If every rank waited for its send first, no rank would receive.
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return tensor, after


def barrier(device):
    """No tensor: each rank waits until all ranks call it. Here rank 0 is half a second late."""
    if dist.get_rank() == 0:
        time.sleep(0.5)
    started = time.perf_counter()
    dist.barrier()
    waited = time.perf_counter() - started
    return None, f"waited {waited:.1f} s"


def numbers(device):
    """One number for each rank: 20, 21, 22 ... on rank 2."""
    return 10 * dist.get_rank() + torch.arange(dist.get_world_size(), device=device)


def empty(device, count=None):
    """A tensor to be filled, by default with one number from each rank. -1 is shown as a dot."""
    return torch.full((count or dist.get_world_size(),), -1, device=device)


def show(example, before, after):
    """Prints the tensors of all ranks, on rank 0. Every rank must call it."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"{as_text(before)}  ->  {as_text(after)}")  # pickled objects
    if dist.get_rank() == 0:
        print(f"{example.__name__}: {example.__doc__}")
        for rank, line in enumerate(lines):
            print(f"    rank {rank}  {line.rstrip()}")
        print(flush=True)


def as_text(held):
    """A tensor's numbers in columns; spaces for None."""
    if isinstance(held, torch.Tensor):
        held = " ".join("  ." if number < 0 else f"{number:3}" for number in held.tolist())
    return f"{held or '':{4 * dist.get_world_size()}}"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=device, help="where to run [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
    dist.destroy_process_group()
