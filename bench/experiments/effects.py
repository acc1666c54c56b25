"""python -m bench effects [NAME ...] --out FOLDER: what techniques change beside the speed.

`bench run --techniques` times steps, and no technique there trains other numbers. Here scripts of
techniques/ run to show what a step's time does not. The probe's records go to NAME.jsonl in the
folder, after a first line about the machine. Each has the name of its run, the processes, and the
seed; or, for runs that differ in nothing, their number.

losses         three epochs, by several seeds, with what alters gradients or averages weights
invariant      200 steps of 1, 2 and 4 processes, with a digest of all weights in each
ring           the ring beside dist.all_reduce, at 25 MB
stale          a parameter server, synchronous and not, and its updates without a stale gradient
heterogeneous  equal shares and shares by speed, where one of two processes is half as fast
memory         the peak of a rank that trains a vision transformer, by technique
step           what two ranks do in one step of DDP and of FSDP, by torch's profiler
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from bench import UserError, records
from bench.cases import Case
from bench.host import look
from bench.options import make_parser
from bench.process import OWNER, Failed, end, environment, heed_signals, launch

LIMIT = 900.0  # seconds for one run
EMBEDDED = ("--dataset", "fashion-mnist", "--device", "cpu")


class Job(NamedTuple):
    """A script's run: its name in the records, its processes and its flags."""

    name: str
    script: str
    processes: int
    flags: tuple = ()


class Effect(NamedTuple):
    """Jobs that belong together; each is made `times` times, in turns.

    seeds: these times differ by --seed. Else they differ in nothing, and show the machine's noise.
    """

    jobs: list[Job]
    times: int = 1
    seeds: bool = False
    variables: tuple[tuple[str, str], ...] = ()  # of the environment


def losses() -> Effect:
    """A small model, so that the ranks' BatchNorm and a short training matter little.

    `--hook own` does what DDP does, and its all-reduces can be counted.
    """
    flags = (*EMBEDDED, "--arch", "shufflenet_v2_x0_5", "--batch-size", 128, "--lr", 0.02)
    flags += ("--epochs", 3, "--log-every", 39)
    runs = [
        Job(hook, "techniques/comm_hooks.py", 2, (*flags, "--hook", hook))
        for hook in ("own", "bf16", "powersgd")
    ]
    runs += [
        Job(f"every {steps}", "techniques/local_sgd.py", 2, (*flags, "--sync-every", steps))
        for steps in (4, 16, 78)
    ]
    return Effect(runs, times=3, seeds=True)


def invariant() -> Effect:
    """One process, two and four."""
    flags = (*EMBEDDED, "--batch-size", 64, "--max-steps", 200, "--log-every", 1)
    return Effect([Job(f"x{size}", "techniques/invariant.py", size, flags) for size in (1, 2, 4)])


def ring() -> Effect:
    """Two and three processes."""
    return Effect([Job(f"x{size}", "bench/experiments/ring.py", size) for size in (2, 3)], times=5)


def stale() -> Effect:
    """Two and four workers, beside a server that trains nothing. All runs see as many images.

    `fresh` is one worker with a fourth of the batch and of the learning rate. So it makes as many
    updates as four asynchronous workers, by gradients of as many images, of which none is stale.
    """
    script = "techniques/parameter_server.py"
    flags = (*EMBEDDED, "--arch", "shufflenet_v2_x0_5", "--epochs", 2)
    whole = (*flags, "--batch-size", 128, "--lr", 0.02, "--log-every", 39)
    runs = [
        Job(f"{updates} x{workers}", script, workers + 1, (*whole, "--updates", updates))
        for workers in (2, 4)
        for updates in ("sync", "async")
    ]
    small = (*flags, "--batch-size", 32, "--lr", 0.005, "--log-every", 156)
    return Effect([*runs, Job("fresh x4", script, 2, small)], times=3, seeds=True)


def heterogeneous() -> Effect:
    """Rank 1 sleeps for as long as it computes. The first 13 steps of the epoch do not count."""
    flags = (*EMBEDDED, "--epochs", 1, "--slow-rank", 1, "--log-every", 13)
    script = "techniques/heterogeneous.py"
    runs = [
        Job("equal shares", script, 2, (*flags, "--shares", "128,128")),
        Job("by speed", script, 2, flags),
    ]
    return Effect(runs, times=3)


def memory() -> Effect:
    """Three steps. malloc returns freed blocks of 64 KiB or more at once, so a peak is of what is
    held together.
    """
    flags = (*EMBEDDED, "--arch", "vit_b_16", "--image-size", 224, "--batch-size", 8)
    flags += ("--images", 24, 8, "--epochs", 1)
    runs = [Job("mnmc_ddp_launch", "mnmc_ddp_launch.py", 2, flags)]
    runs += [
        Job(name, f"techniques/{name}.py", 2, flags)
        for name in ("activation_checkpointing", "optimizer_in_backward", "zero1", "fsdp")
    ]
    runs.append(Job("no_sync", "techniques/no_sync.py", 2, (*flags, "--accum-steps", 4)))
    return Effect(runs, variables=(("MALLOC_MMAP_THRESHOLD_", "65536"),))


def step() -> Effect:
    """Of DDP and of FSDP."""
    scripts = {"DDP": "mnmc_ddp_launch.py", "FSDP": "techniques/fsdp.py"}
    return Effect(
        [Job(name, "bench/experiments/step.py", 2, (path,)) for name, path in scripts.items()]
    )


EFFECTS = {
    each.__name__: each for each in (losses, invariant, ring, stale, heterogeneous, memory, step)
}


def of_job(job: Job, number: int, effect: Effect) -> list[dict]:
    """The records of one job. Raises Failed."""
    case = Case(job.name, job.script, "torchrun", job.processes)
    seed = ("--seed", number) if effect.seeds else ()
    # All run on the CPU, where PyTorch's PowerSGD would fail if it saw a GPU.
    env = environment(1, CUDA_VISIBLE_DEVICES="", **dict(effect.variables))
    lines = launch(case.command(*job.flags, *seed), env, LIMIT)
    about = {"run": job.name, "processes": job.processes}
    about["seed" if effect.seeds else "number"] = number
    return [line | about for line in lines]


def measured(effect: Effect) -> list[dict]:
    """All records of an effect; the jobs alternate. Raises Failed."""
    found = []
    for number in range(effect.times):
        for job in effect.jobs:
            text = f"{Path(job.script).name} {job.name}, {number + 1} of {effect.times}"
            print(text, file=sys.stderr)
            found += of_job(job, number, effect)
    return found


def main(argv: list[str]) -> int:
    """The command; returns the exit code."""
    parser = make_parser("effects", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EFFECTS)} [all]")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in EFFECTS]:
        raise UserError(f"{unknown[0]}: choose from {', '.join(EFFECTS)}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: {error.strerror}, name another folder") from None
    heed_signals()
    where = {"event": "setting", "environment": look().record()}
    try:
        for name in args.names or EFFECTS:
            lines = [where, *measured(EFFECTS[name]())]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            records.write_whole(args.out / f"{name}.jsonl", text)
    except Failed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        end(OWNER)
    return 0
