"""One training step of a script in time, on each rank; `bench effects` starts it.

torchrun --standalone --nproc-per-node 2 bench/experiments/step.py mnmc_ddp_launch.py

torch.profiler runs through a few steps. The record has the last one: when each rank was in its
forward, its backward, its optimizer's step, and when Gloo was in a collective, in ms since the step
began.
"""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--dataset fashion-mnist --device cpu --epochs 1 --batch-size 256 --log-every 1000"
FIRST, LAST = 5, 8  # the steps around what is profiled


class Stop(Exception):
    """Ends the training after the steps that are profiled."""


def spans(events) -> list[tuple[str, int, int]]:
    """Kind, begin and end in ns of what the last step of a profile did."""
    found = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]

    def named(prefix: str, since: int = 0) -> list[tuple[str, int, int]]:
        return [span for span in found if span[0].startswith(prefix) and span[1] >= since]

    (*_, before, step) = named("Optimizer.step")
    loss = named("aten::cross_entropy_loss", before[2])[0]
    forward = min(begin for _, begin, _ in named("aten::conv2d", before[2]))
    backward = named("autograd::engine::evaluate_function", before[2])
    messages = [(name.removeprefix("gloo:"), *ends) for name, *ends in named("gloo:", before[2])]
    return [
        ("forward", forward, loss[2]),
        ("backward", min(b for _, b, _ in backward), max(e for *_, e in backward)),
        ("step", step[1], step[2]),
        *messages,
    ]


def main():
    prof, steps = profile(activities=[ProfilerActivity.CPU]), 0

    def after(*_):
        nonlocal steps
        steps += 1
        if steps == FIRST:
            prof.start()
        elif steps == LAST:
            prof.stop()
            raise Stop

    register_optimizer_step_post_hook(after)
    sys.argv = [str(ROOT / sys.argv[1]), *FLAGS.split()]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Stop:
        mine = spans(prof.profiler.kineto_results.events())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    zero = min(begin for each in everyone for _, begin, _ in each)
    log("start", world_size=dist.get_world_size(), torch=torch.__version__)
    for rank, each in enumerate(everyone):
        rows = [[kind, (a - zero) / 1e6, (b - zero) / 1e6] for kind, a, b in sorted(each)]
        log("trace", traced_rank=rank, spans=rows)
    log("end")


def log(event, **fields):
    """Prints one line, on rank 0 only; the probe records it."""
    if dist.get_rank() == 0:
        print(event, fields, flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
