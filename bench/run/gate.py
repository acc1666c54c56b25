"""Compares each case with the oracle: one that trains other numbers gets no speed.

The oracle is bench/oracle.py, one process that splits each batch into as many parts as the case has
processes, in the case's precision. probe.py starts both, on deterministic kernels and few images,
so that an epoch is one step. The gate compares

- the losses of the steps: what was computed,
- the update of the weights by the first step, and by the first two: what was learned from it,
- the evaluations: images, loss, accuracy: what is reported.
"""

import math
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import cases, process
from bench.cases import Case
from bench.host import Host, free_mib
from bench.ladder import EQUAL, TIMED

STEPS = 5
# Seconds: of the first gate, since nothing is known of this machine before; and for any other,
# beside MARGIN times what the first took for each image.
FIRST, LEAST, MARGIN = 1800.0, 300.0, 4.0
# For `choose_number`. Both are margins, not measurements: what CUDA and its libraries take beside
# torch's tensors, in each process, and what the allocator keeps beyond the most that it handed out.
CONTEXT_MIB, SLACK = 1024, 1.25
TEST_IMAGES = 101  # a prime: no number of processes shares it evenly
# TF32 rounds as coarsely as fp16, so gates go without it; what is timed has it.
# cuBLAS adds up in one order only if its workspace has a fixed size (cuBLAS 12, section 2.1.4).
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Limits(NamedTuple):
    """How far a right run may be from the oracle, relatively, after each of the first steps.

    docs/evidence/equality.md has what was measured, of right scripts and of planted mistakes.
    """

    losses: tuple[float, ...]  # of each step; those of later ones only must be numbers
    update: tuple[float, float]  # of the weights' change by one step, by two
    evaluation: tuple[float, float]  # of the loss of the test images after either
    hits: int  # images that an evaluation may tip over


# A sum of two has one order, so one and two processes on a CPU round as the oracle does.
SAME = Limits((1e-4,) * STEPS, (1e-5, 1e-4), (2e-6, 1e-5), 0)
# More processes add up gradients in another order. That is the last digit of the first update;
# then BatchNorm makes it grow, and half precision more.
OTHER = {
    "double": Limits((1e-9, 1e-7, 1e-5), (1e-9, 1e-6), (1e-9, 1e-6), 0),
    "fp32": Limits((1e-5, 1e-4), (1e-5, 2e-2), (2e-6, 2e-2), 3),
    "bf16": Limits((1e-5, 2e-3), (1e-5, 0.3), (2e-6, 5e-2), 5),
    "fp16": Limits((1e-5, 2e-3), (1e-5, 0.3), (2e-6, 5e-2), 5),
    # Gradients that were rounded to bf16, or cut down from the fourth step on.
    "lossy": Limits((1e-5, 2e-3), (5e-3, 0.3), (1e-3, 5e-2), 5),
}
# With a margin: one H200 was measured, with one process. No weight decay can hide in it. Apex casts
# by lists of its own, and evaluates in fp16. In another memory layout, cuDNN's kernels add up in
# another order: on that GPU, the weights' change by two steps was 10% off.
GPU = {
    "double": OTHER["double"],
    "fp32": Limits((1e-5, 1e-3), (5e-4, 5e-2), (1e-4, 2e-2), 3),
    "bf16": Limits((1e-3, 1e-2), (1e-2, 0.3), (1e-3, 5e-2), 5),
    "fp16": Limits((1e-3, 1e-2), (1e-2, 0.3), (1e-3, 5e-2), 5),
    "layout": Limits((1e-3, 1e-2), (1e-2, 0.3), (1e-3, 5e-2), 5),
    "lossy": Limits((1e-4, 5e-3), (1e-2, 0.3), (1e-3, 5e-2), 5),
    "apex": Limits((1e-2, 2e-2), (0.1, 0.3), (2e-2, 5e-2), 5),
}


@dataclass
class Trained:
    """What a run of a few steps left: its records, and how far its updates are from the oracle's.

    folder: where the probe wrote its weights.
    """

    lines: list[dict]
    folder: Path | None = None
    update: list[float] = field(default_factory=list)

    def of(self, event: str) -> list[dict]:
        """The records of one kind; a null loss, JSON's word for one that is no number, is nan."""
        lines = [line for line in self.lines if line["event"] == event]
        return [line | {"loss": math.nan} if line["loss"] is None else line for line in lines]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.of("train")]


def arithmetic(case: Case, host: Host) -> str:
    """What a case's gate computes in: a key of OTHER, or of GPU."""
    if case.script == "mnmc_apex.py":
        return "apex" if host.gpus else "fp32"  # on a CPU its amp is off
    _, how = TIMED.get(case.technique, (None, None))
    return (how and ((host.gpus and how.on_gpus) or how.arithmetic)) or "fp32"


def limits(case: Case, host: Host) -> Limits:
    """How far a case may be from the oracle."""
    what = arithmetic(case, host)
    if host.gpus:
        return GPU[what]
    return SAME if case.world <= 2 and what not in ("double", "lossy") else OTHER[what]


def images(batch: int) -> int:
    """How many images a gate of this global batch trains on: an epoch is one step."""
    return 3 * batch // 2


def make_jobs(case: Case, flags: list[str], host: Host, steps: int = STEPS) -> tuple[tuple, tuple]:
    """A case's job and its oracle's: each the command, and the environment as sorted pairs.

    What is equal needs to run only once. The probe starts both.
    """
    flags = [*flags, "--epochs", steps, "--log-every", 1]
    gate = TIMED[case.technique][1].gate if case.technique else None
    if gate is not None:
        equal = ",".join([str((case.batch or cases.BATCH) // case.world)] * case.world)
        case = replace(case, flags=tuple(equal if word == EQUAL else word for word in gate))
    what = arithmetic(case, host)
    batch = [int(n) for word, n in pairwise(flags) if word == "--batch-size"] or [cases.BATCH]
    few = ["--images", str(images(case.batch or batch[-1])), str(TEST_IMAGES)]
    probe = ["--exact", *["--double"] * (what == "double")]
    half = {"bf16": "bf16", "fp16": "fp16", "apex": "fp16"}.get(what, "fp32")
    mine = case.command(*flags, *few, *probe, host=host)
    python, *exact = case.oracle(*flags, *few, "--precision", half)
    exact = [python, str(cases.ROOT / cases.PROBE), *probe, "--", *exact]
    sides = (
        (mine, process.environment(**case.own_variables(host))),
        (exact, process.environment(case.threads(host))),
    )
    return tuple((tuple(command), tuple(sorted((env | EXACT).items()))) for command, env in sides)


class Training:
    """Trains jobs in a folder, equal ones only once. Threads may share it."""

    def __init__(self, folder: str):
        self.folder = folder
        self.done: dict[tuple, Trained | process.Failed] = {}
        self.locks: dict[tuple, threading.Lock] = {}

    def run(self, job: tuple, limit: float) -> Trained | process.Failed:
        """What a job trained; limit: seconds."""
        with self.locks.setdefault(job, threading.Lock()):
            if job not in self.done:
                folder = Path(tempfile.mkdtemp(dir=self.folder))
                command, env = [*job[0], "--save", str(folder / "weights")], dict(job[1])
                try:
                    self.done[job] = Trained(process.launch(command, env, limit), folder)
                except process.Failed as error:
                    self.done[job] = error
            return self.done[job]


def train_cases(
    rows: list[Case], flags: list[str], host: Host, progress, note: Callable = lambda *_: None
) -> dict[str, tuple]:
    """The first steps of each case and of its oracle, by the case's name: Trained, or Failed.

    Gates are not timed, so several run at once: see `choose_number`. note: is called with a case
    and both sides as soon as they are there, so that a run that is cut off keeps them.
    """
    sides = {case.name: make_jobs(case, flags, host) for case in rows}
    todo = list(dict.fromkeys(job for pair in sides.values() for job in pair))
    processes = {job: 1 for job in todo}  # the oracle has one
    processes |= {sides[case.name][0]: case.processes for case in rows}

    def work(job: tuple, limit: float) -> Trained | process.Failed:
        names = [name for name, (mine, _) in sides.items() if mine == job]
        progress(f"gate: {', '.join(names) or 'oracle'}")
        trained = training.run(job, limit)
        with noting:
            for case in rows:
                pair = [training.done.get(side) for side in sides[case.name]]
                # What was ended did not fail.
                if case.name not in found and all(pair) and not ending.is_set():
                    found[case.name] = measure_pair(*pair)
                    note(case, *found[case.name])
        return trained

    found: dict[str, tuple] = {}
    noting, ending = threading.Lock(), threading.Event()
    slurm = any(command[0] == "srun" for command, _ in todo)
    with process.log_folder(slurm) as folder:
        training = Training(folder)
        if todo:
            begun = time.monotonic()
            first = work(todo[0], FIRST)  # by itself: its seconds a step set the windows' length
            each = (time.monotonic() - begun) / count_images(todo[0])
            rest = {job: processes[job] for job in todo[1:]}
            at_once = choose_number(first, rest, host)
            process.side_by_side(
                lambda job: work(job, time_limit(job, each)), rest, at_once, ending
            )
        return found


def count_images(job: tuple) -> int:
    """The training images of a job's epoch, which is one step."""
    command, _ = job
    return int(command[command.index("--images") + 1])


def time_limit(job: tuple, each: float) -> float:
    """Seconds for a job; each: what the first one took, divided by its images.

    A gate takes as long as its model and its batch: an oracle of eight ranks computes eight local
    batches in one process.
    """
    return LEAST + MARGIN * each * count_images(job)


def choose_number(first: Trained | Exception, jobs: dict[tuple, int], host: Host) -> int:
    """How many of these jobs, each with its processes, may run at once: two on a CPU, up to six on
    one GPU.

    All must fit into memory: each process may take as much as the first job, which ran by itself,
    and twice as much in double precision; on a GPU, 2.5 times as much in any case.
    """
    if not isinstance(first, Trained) or len(host.gpus) > 1:
        return 1
    peak, free = first.lines[-1]["peak_memory_mib"], free_mib(host)
    if host.gpus:
        each = 2.5 * peak + CONTEXT_MIB
        return max(1, min(6, host.cores // 2, int(free // each)))
    double = 2 if any("--double" in command for command, _ in jobs) else 1
    each = SLACK * double * peak * max(jobs.values(), default=1)
    return max(1, min(2, int(free // each)))


def measure_pair(mine, exact) -> tuple:
    """Both, the first with the distances of its updates; Failed where it left no such weights."""
    if isinstance(mine, Trained) and isinstance(exact, Trained):
        try:
            mine = Trained(mine.lines, update=measure_updates(mine.folder, exact.folder))
        except process.Failed as error:
            mine = error
    return mine, exact


def read_weights(folder: Path, number: int, whose: str) -> dict[str, np.ndarray]:
    """The weights by name that the probe wrote at a run's n-th save. Raises Failed.

    Without BatchNorm's averages, which no step of the optimizer makes.
    """
    path = folder / f"{number}.npz"
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files if "running_" not in name}
    except FileNotFoundError:
        raise process.Failed(f"{whose} saved no weights") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise process.Failed(f"{whose} saved weights that cannot be read: {error}") from None


def measure_updates(mine: Path, exact: Path) -> list[float]:
    """How far the change of all weights by one step, and by two, is from the oracle's, relatively.

    ||w - e|| / ||e - e0||: w the weights after these steps, e the oracle's, e0 those before the
    first, which the oracle saves, too. Euclidean norms over all numbers. Raises Failed.
    """
    before, *after = (read_weights(exact, number, "its oracle") for number in (1, 2, 3))
    found = []
    for step, right in enumerate(after, start=1):
        got = read_weights(mine, step, "it")
        if {k: v.shape for k, v in got.items()} != {k: v.shape for k, v in right.items()}:
            raise process.Failed("wrong numbers: it saved other weights than its model has")
        moved, apart = distance(right, before), distance(got, right)
        if not moved:
            raise process.Failed(
                "its oracle's steps did not change the weights: nothing to compare"
            )
        if not math.isfinite(apart):
            raise process.Failed(f"wrong numbers: after step {step} weights are no numbers")
        if distance(got, before) == 0:
            raise process.Failed(f"wrong numbers: step {step} did not change the weights")
        found.append(apart / moved)
    return found


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The Euclidean distance of two sets of weights."""
    squares = (np.square(a[name].astype(np.float64) - b[name]).sum() for name in b)
    return math.sqrt(sum(squares))


def relative(mine: list[float], exact: list[float]) -> list[float]:
    """The relative difference of each number; from 0 the difference itself."""
    return [abs(a - b) / (abs(b) or 1) for a, b in zip(mine, exact, strict=True)]


def find_miscount(mine: Trained, exact: Trained) -> str:
    """In words, that records are missing, or have other numbers of images or none; else ""."""
    for event, did in (("train", "trained on"), ("eval", "evaluated")):
        got, right = ([line["images"] for line in run.of(event)] for run in (mine, exact))
        if len(got) != len(right):
            return f"{len(got)} records of {event}, not {len(right)}"
        for a, b in zip(got, right, strict=True):
            if a != b:
                return f"{did} {a} images, not {b}"
        if not all(math.isfinite(line["loss"]) for run in (mine, exact) for line in run.of(event)):
            return "a loss is no number"
    return ""


def compare_evaluations(mine: Trained, exact: Trained) -> dict:
    """Of the evaluations after the first two steps: the images, the relative differences of the
    loss, and by how many images the hits differ at most.
    """
    pairs = [*zip(mine.of("eval"), exact.of("eval"), strict=True)][:2]
    loss = relative(*([line["loss"] for line in side] for side in zip(*pairs, strict=True)))
    hits = [abs(a["accuracy"] - b["accuracy"]) * b["images"] for a, b in pairs]
    return {"images": pairs[0][0]["images"], "loss": loss, "hits": round(max(hits))}


def find_faults(losses: list[float], update: list[float], seen: dict, most: Limits) -> list[str]:
    """In words, each thing that is further from the oracle than it may be."""
    found = []
    compared = (
        ("losses", losses, most.losses),
        ("updates of the weights", update, most.update),
        ("losses of the evaluation", seen["loss"], most.evaluation),
    )
    for what, far, allowed in compared:
        if any(x > limit for x, limit in zip(far, allowed, strict=False)):
            found.append(f"{what} {max(far[: len(allowed)]):.1e} off the oracle's")
    if seen["hits"] > most.hits:
        found.append(f"evaluation {seen['hits']} hits off")
    return found


def judge(case: Case, mine: Trained | Exception, exact: Trained | Exception, host: Host) -> dict:
    """The fields of a gate's record, from what a case and its oracle trained.

    If one failed, its exception stands instead. The fields: passed, distance (the largest relative
    difference of a compared loss), reason ("" if it passed). If the records could be compared,
    also the losses of both, update and evaluation as the functions of these names return them,
    start and end of the case, and step_seconds of its fastest step.
    """
    found = {"passed": False, "distance": None}
    if isinstance(mine, Exception):
        return found | {"reason": str(mine)}
    if reason := find_other_device(mine.lines[0], host):
        return found | {"reason": reason}
    if isinstance(exact, Exception):
        return found | {"reason": f"its oracle failed: {exact}"}
    if reason := find_miscount(mine, exact):  # nothing that could be compared
        return found | {"reason": f"wrong numbers: {reason}"}
    most = limits(case, host)
    off, seen = relative(mine.losses, exact.losses), compare_evaluations(mine, exact)
    reasons = find_faults(off, mine.update, seen, most)
    return {
        "passed": not reasons,
        "distance": max(off[: len(most.losses)]),
        "reason": "wrong numbers: " * bool(reasons) + ", ".join(reasons),
        "losses": mine.losses,
        "oracle_losses": exact.losses,
        "update": mine.update,
        "evaluation": seen,
        "step_seconds": min(line["seconds"] for line in mine.of("train")),
        "start": mine.lines[0],
        "end": mine.lines[-1],
    }


def find_other_device(start: dict, host: Host) -> str:
    """Says if a run used another device than its row would say; "" if it did not."""
    used = start.get("device_name", host.gpus[0].name if host.gpus else "cpu")
    if (used == "cpu") == (not host.gpus):
        return ""
    return f"ran on {used}, but torch shows {', '.join(host.gpu_names) or 'no GPU'}"
