"""The gate: a case that trains other numbers than the exact oracle gets no speed.

The oracle is bench/oracle.py, one process that steps after as many parts of a batch as the case has
processes; the losses of the first steps are compared.
"""

import math
from concurrent.futures import ThreadPoolExecutor

from bench.cases import Case
from bench.host import Host
from bench.measure import process

STEPS = 5
# The largest relative difference of each compared step's loss; later ones only must be numbers.
# BatchNorm makes rounding grow tenfold to a thousandfold a step. Measured, resnet18 at batch 256:
#     the same kernels in 2 processes 0, in 4 processes 1e-7
#     other kernels 2e-6, then 8e-4, 1e-2; bf16 2e-4, then 5e-3, 3e-2
#     one rank's gradient left out 0, then 3e-2; one augmentation for all ranks 6e-3
SAME_KERNELS = [1e-4] * STEPS
OTHER_KERNELS = [1e-4, 1e-2]
HALF = {"bf16": [2e-3, 2e-2], "fp16": [2e-3]}  # fp16's scaler skips steps until its scale fits
# TF32 rounds as coarsely as fp16, so gates go without it: it is for the rounds to be fast with.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}


def outcomes(cases: list[Case], flags: list[str], host: Host, progress) -> dict[str, tuple]:
    """The first steps of each case and of its oracle, by the case's name: their records, or Failed.

    What several cases need runs once. Gates are not timed, so on a CPU two run at once.
    """
    flags = [*flags, "--max-steps", STEPS, "--log-every", 1]
    jobs: dict[tuple, dict] = {}  # by command and threads, the environment
    sides = {}
    for case in cases:
        threads = case.threads(host)
        mine = (tuple(case.command(*flags, host=host)), threads)
        exact = (tuple(case.oracle(*flags)), threads)
        jobs.setdefault(mine, process.of_case(case, host) | EXACT)
        jobs.setdefault(exact, process.environment(threads) | EXACT)
        sides[case.name] = (mine, exact)
    results: dict[tuple, list[dict] | process.Failed] = {}

    def work(job: tuple) -> None:
        names = [name for name, (mine, _) in sides.items() if mine == job]
        progress(f"gate: {', '.join(names) or 'oracle'}")
        try:
            results[job] = process.launch([*job[0]], jobs[job], limit=300)[0]
        except process.Failed as error:
            results[job] = error

    first, *others = jobs or [None]
    if first:
        work(first)  # by itself, since its seconds a step set the length of the windows
    with ThreadPoolExecutor(1 if host.gpus else 2) as pool:
        list(pool.map(work, others))
    return {name: (results[mine], results[exact]) for name, (mine, exact) in sides.items()}


def losses(lines: list[dict]) -> list[float]:
    """The loss of each train record; a null, JSON's word for one that is no number, is nan."""
    found = [line["loss"] for line in lines if line["event"] == "train"]
    return [math.nan if loss is None else loss for loss in found]


def limits(case: Case, host: Host) -> list[float]:
    """How far each compared step's loss may be off.

    On a GPU cuDNN chooses among kernels anew in every process.
    """
    other = bool(host.gpus) or case.technique in ("channels_last", "compiled")
    return HALF.get(case.precision(host), OTHER_KERNELS if other else SAME_KERNELS)


def differences(mine: list[float], exact: list[float]) -> list[float]:
    """The relative difference of each step's loss; infinite where steps or numbers are missing."""
    if len(mine) != len(exact) or not mine or not all(map(math.isfinite, [*mine, *exact])):
        return [float("inf")]
    return [abs(a - b) / abs(b) for a, b in zip(mine, exact, strict=True)]


def elsewhere(start: dict, host: Host) -> str:
    """In words that a run was on another device than its row would say; "" where it was not."""
    used = start.get("device_name", host.gpus[0].name if host.gpus else "cpu")
    if (used == "cpu") == (not host.gpus):
        return ""
    return f"ran on {used}, but torch shows {', '.join(host.gpu_names) or 'no GPU'}"


def judged(
    case: Case, mine: list[dict] | Exception, exact: list[dict] | Exception, host: Host
) -> dict:
    """The fields of a gate's record, from the records of a case and of its oracle.

    In place of a run's records: the exception it failed with. The fields: passed, distance (the
    largest relative difference of a compared loss), reason ("" where it passed); of a case that ran
    also its start and end, its losses, and step_seconds, its fastest step's.
    """
    found = {"passed": False, "distance": None}
    if isinstance(mine, Exception):
        return found | {"reason": str(mine)}
    if reason := elsewhere(mine[0], host):
        return found | {"reason": reason}
    if isinstance(exact, Exception):
        return found | {"reason": f"its oracle failed: {exact}"}
    compared = [*zip(differences(losses(mine), losses(exact)), limits(case, host), strict=False)]
    apart = max(x for x, _ in compared)
    passed = all(x <= most for x, most in compared)
    reason = "" if passed else f"wrong numbers: losses {apart:.1e} off the oracle's"
    found = {"passed": passed, "distance": apart, "reason": reason, "losses": losses(mine)}
    found["step_seconds"] = min(r["seconds"] for r in mine if r["event"] == "train")
    return found | {"start": mine[0], "end": mine[-1]}
