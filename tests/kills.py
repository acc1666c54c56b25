"""Kills imagenet.py at random moments, over and over: each time it must resume bit for bit.

python tests/kills.py 500 --out logs/NAME/kills.jsonl
python tests/kills.py 20 --torchrun --out logs/NAME/restarts.jsonl
python tests/kills.py 20 --elastic --out logs/NAME/restarts.jsonl

A run of two ranks with loader workers is started. At a random moment between its first line and its
last, one rank, both, or a worker gets SIGKILL, SIGTERM, SIGHUP or SIGUSR1. The run is started again
in the same folder until it finishes; then a new run begins. After every kill, each step and each
evaluation in the log must have the numbers of an undisturbed run. The next start must begin at the
newest checkpoint.

--torchrun: one run by torchrun instead, which replaces killed processes; the run must finish.
--elastic: the same with techniques/elastic.py.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import Forked, records, restarting, started, succeeded, world, write_photos

SCRIPT = "imagenet.py"
LONGEST = 20.0  # seconds from one kill to the next, with --torchrun
GRACE = 10.0  # seconds between the death of a rank and SIGTERM for the others
# The signal, and which of a run's processes get it.
ACTS = {
    "SIGKILL to rank 0": (signal.SIGKILL, "0"),
    "SIGKILL to rank 1": (signal.SIGKILL, "1"),
    "SIGKILL to both ranks": (signal.SIGKILL, "both"),
    "SIGKILL to a loader's worker": (signal.SIGKILL, "worker"),
    "SIGTERM to a rank": (signal.SIGTERM, "one"),
    "SIGHUP to a rank": (signal.SIGHUP, "one"),
    "SIGUSR1 to all ranks and workers": (signal.SIGUSR1, "all"),
}


def small_run(folder: Path) -> list:
    """The flags of 12 steps in four epochs, on 36 small pictures; everything with a state is on."""
    flags = ["--data", write_photos(folder), "--arch", "mobilenet_v3_small"]  # has dropout
    flags += ["--image-size", 32, "--batch-size", 12, "--epochs", 4, "--warmup-epochs", 1]
    flags += ["--model-ema-decay", 0.9, "--lr", 0.05, "--log-every", 1, "--device", "cpu"]
    return [*flags, "--workers", 2, "--hang-timeout", 120]


def numbers(out: Path) -> dict:
    """The loss of each step and each evaluation; those that were repeated must agree."""
    found = {}
    log = out / "log.jsonl"
    for line in records(log) if log.exists() else []:
        if line["event"] in ("train", "eval"):
            key = line["event"], line.get("step", line["epoch"])
            kept = {k: v for k, v in line.items() if k.endswith(("loss", "top1", "top5", "lr"))}
            assert found.setdefault(key, kept) == kept, key
    return found


def targets(ranks: list[Forked], whom: str, dice: random.Random) -> list[psutil.Process]:
    """The processes that get the signal; none if all have ended, or if no worker runs yet."""
    try:
        processes = [psutil.Process(rank.process.pid) for rank in ranks]
        workers = [child for process in processes for child in process.children()]
    except psutil.NoSuchProcess:  # it has just ended
        return []
    if whom == "worker":
        return workers and [dice.choice(workers)]
    if whom == "one":
        return [dice.choice(processes)]
    some = {"both": processes, "all": [*workers, *processes]}
    return some[whom] if whom in some else [processes[int(whom)]]


def end(ranks: list[Forked]) -> list:
    """Waits as torchrun does: once a rank has failed, the others get SIGTERM, then SIGKILL."""
    while any(rank.process.is_alive() for rank in ranks):
        if any(rank.process.exitcode for rank in ranks):
            break
        time.sleep(0.02)
    deadline = time.monotonic() + GRACE
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.terminate() if number == signal.SIGTERM else rank.process.kill()
        while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
    return [rank.finish(60) for rank in ranks]


def life(flags: list, out: Path, act: str, moment: float, every: int, dice: random.Random) -> dict:
    """Starts a run, with a checkpoint every `every` steps, and acts after `moment` seconds.

    Returns what happened. Raises AssertionError if it did not begin at the newest checkpoint, or
    ended in a way that it should not.
    """
    newest = max((path.name for path in out.glob("step-*.pt")), default=None)
    clock, begun = time.time(), time.monotonic()
    ranks = started(2, SCRIPT, *flags, "--out", out, "--save-every", every)
    hit = []
    try:
        while time.monotonic() < begun + moment and all(r.process.is_alive() for r in ranks):
            time.sleep(0.002)
        number, whom = ACTS[act]
        for process in targets(ranks, whom, dice):
            try:
                process.send_signal(number)
                hit.append(process.pid)
            except psutil.NoSuchProcess:
                pass  # it ended in that moment
        acted = time.monotonic()
        ended = end(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
    found = records(out / "log.jsonl", growing=True)
    fresh = [r for r in found if r["event"] == "start" and r["time"] >= clock]
    assert len(fresh) <= 1 and all(line["resumed"] == newest for line in fresh), (newest, fresh)
    codes = [done.code for done in ended]
    assert hit or codes == [0, 0], [done.err for done in ended]
    for done in ended:  # a refusal is a line
        assert done.code != 2 or re.search(r"^imagenet\.py: .+\n\Z", done.err, re.M), done.err
    return {
        "act": act if hit else "none",
        "moment": round(moment, 3),
        "save_every": every,
        "resumed": newest,
        "codes": codes,
        "finished": codes == [0, 0],
        "step": max((r["step"] for r in found if r["event"] == "train"), default=0),
        "seconds_to_end": round(time.monotonic() - acted, 2),
    }


def campaign(count: int, flags: list, whole: dict, seconds: float, folder: Path, seed=0):
    """`count` kills, one after the other; yields each life.

    whole: the numbers of an undisturbed run, which takes `seconds`.
    Raises AssertionError at the first life that does not resume bit for bit.
    """
    dice, kills, run = random.Random(seed), 0, 0
    while kills < count:
        run += 1
        out = folder / f"run{run}"
        finished = False
        while not finished:
            # Within the rest of the run, as estimated: starting takes about a third of a whole one.
            left = 1 - len(numbers(out)) / len(whole)
            moment = dice.uniform(0, 1.05 * seconds * (1 / 3 + 2 / 3 * left))
            if kills >= count:  # so that the last run finishes and is compared, too
                moment = 10 * seconds + 60
            found = life(flags, out, dice.choice([*ACTS]), moment, dice.choice([0, 1, 2]), dice)
            seen = numbers(out)
            assert seen.items() <= whole.items(), (found, seen)
            kills += found["act"] != "none"
            finished = found["finished"]
            yield {"kill": kills, "run": run, **found}
        assert seen == whole, found
        shutil.rmtree(out)


def torchrun(flags: list, out: Path, restarts: int) -> subprocess.Popen:
    """A run of two ranks, with a checkpoint after each step."""
    return restarting(restarts, SCRIPT, *flags, "--out", out, "--save-every", 1)


def restarts(count: int, job: subprocess.Popen, log: Path, longest: float, seed=0):
    """`count` times SIGKILL for a random rank of a run by torchrun; yields each.

    Each comes up to `longest` seconds after the one before, perhaps before all ranks have joined
    again: `starts` counts the starts until then. Raises AssertionError if torchrun gives up, or if
    the run finishes too soon.
    """
    dice, before = random.Random(seed), set()
    try:
        for kill in range(1, count + 1):
            begun, processes = time.monotonic(), set()
            moment = dice.uniform(0, longest)
            # Wait until all are of a new start: else this kill would need no restart.
            while time.monotonic() < begun + moment or len(processes) < 2 or processes & before:
                assert job.poll() is None, (kill, job.returncode)
                time.sleep(0.05)
                processes = set(psutil.Process(job.pid).children())
            before = processes
            process = dice.choice(sorted(processes, key=lambda process: process.pid))
            process.kill()
            known = records(log, growing=True)
            starts = sum(r["event"] == "start" for r in known)
            step = max((r["step"] for r in known if r["event"] == "train"), default=0)
            yield {"kill": kill, "moment": round(moment, 3), "starts": starts, "step": step}
        assert job.wait(900) == 0
    finally:
        job.kill()
        job.wait()


def of_imagenet(args, folder: Path):
    """Each start of imagenet.py, or each kill of --torchrun; compares the numbers at the end."""
    flags = small_run(folder / "photos")
    if args.torchrun:  # enough epochs that it does not finish before
        flags += ["--epochs", 15 * args.count]
    for _ in range(2):  # the first one starts the fork server
        begun = time.monotonic()
        shutil.rmtree(folder / "whole", ignore_errors=True)
        words = [*flags, "--out", folder / "whole", "--save-every", 1]
        succeeded(*world(2, SCRIPT, *words, limit=1200))  # 900 steps with --torchrun 20
        seconds = time.monotonic() - begun
        if args.torchrun:
            break
    whole = numbers(folder / "whole")
    if args.torchrun:
        out = folder / "run"
        job = torchrun(flags, out, args.count)
        yield from restarts(args.count, job, out / "log.jsonl", LONGEST, args.seed)
        assert numbers(out) == whole
    else:
        yield from campaign(args.count, flags, whole, seconds, folder, args.seed)


def of_elastic(args, folder: Path):
    """Each kill of techniques/elastic.py; compares the numbers at the end."""
    from test_elastic import SCRIPT, STORE, flags

    os.environ[STORE] = "1"
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir()
    killed.mkdir()
    epochs = ["--epochs", 20 * args.count]  # enough that it does not finish before
    succeeded(*world(2, SCRIPT, *flags(whole), *epochs, limit=1200))
    job = restarting(args.count, SCRIPT, *flags(killed), *epochs)
    yield from restarts(args.count, job, killed / "log.jsonl", LONGEST, args.seed)
    assert numbers(killed) == numbers(whole)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("count", type=int, help="kills")
    add("--torchrun", action="store_true", help="one run, restarted by torchrun")
    add("--elastic", action="store_true", help="one run of techniques/elastic.py, likewise")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON lines: one per start, or per kill with --torchrun")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        lives = (of_elastic if args.elastic else of_imagenet)(args, Path(name))
        with open(part := f"{args.out}.part", "w") if args.out else nullcontext() as file:
            for line in lives:
                print(json.dumps(line), flush=True)
                if file:
                    print(json.dumps(line), file=file, flush=True)
    if args.out:
        Path(part).replace(args.out)
    print("each led to the same numbers, bit for bit", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
