"""What the tests of real launchers share: small data, the oracle's numbers, and a run cut short."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import psutil
import pytest
from support import ORACLE, forked, records, succeeded, write_idx

from bench.measure import process
from bench.measure.process import Finished, environment, run
from bench.measure.resident import Resident

TEST_IMAGES = 101  # a prime: no number of processes shares it evenly
# Three steps an epoch, so an epoch's end and a second order of the images are in every run.
FLAGS = ["--dataset", "fashion-mnist", "--device", "cpu", "--epochs", 2]
FLAGS += ["--batch-size", 64, "--lr", 0.005, "--log-every", 1]
FOREVER = [*FLAGS[:4], "--epochs", 10_000, "--batch-size", 64, "--log-every", 1]
CLEAN_UP = 15  # seconds that a launcher may take to end a job of which a process was killed


def lacking(reason: str):
    """Skips a test by name; where everything is to be tested, that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"with CI=true nothing may be skipped: {reason}")
    pytest.skip(reason)


@cache
def folder() -> Path:
    """A folder for the whole session, removed at its end."""
    path = Path(tempfile.mkdtemp(prefix="ladder-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def data() -> Path:
    """192 images to train on, 101 to test on."""
    return write_idx(folder() / "data", 192, TEST_IMAGES)


def output(name: str) -> list:
    """The flags of a run on the small data, and its log file, which is not there yet."""
    log = folder() / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    return ["--data", data(), "--log-json", log]


@cache
def oracle(processes: int) -> list[tuple]:
    """What so many processes must compute, from independent code in one process."""
    flags = [*FLAGS, *output(f"oracle{processes}"), "--parts", processes]
    succeeded(forked(ORACLE, *flags))
    return numbers(flags)


def numbers(flags: list) -> list[tuple]:
    """Every train and eval record of a run: what it is of, the loss, the accuracy."""
    log = flags[flags.index("--log-json") + 1]
    kept = [line for line in records(log) if line["event"] in ("train", "eval")]
    return [
        ((r["event"], r["epoch"], r.get("step"), r["images"]), r["loss"], r["accuracy"])
        for r in kept
    ]


def compare(found: list[tuple], expected: list[tuple], tolerance: float) -> None:
    """The same records, global counts included; losses within a relative tolerance, 0: equal.

    Where another order of a sum is allowed, only the first three steps are compared: with BatchNorm
    such a difference grows tenfold a step. A set evaluated in other batches is summed in another
    order: 1e-6 there.
    """
    assert [line[0] for line in found] == [line[0] for line in expected]
    assert {line[0][3] for line in found if line[0][0] == "eval"} == {TEST_IMAGES}
    for (what, loss, accuracy), (_, right, hits) in zip(found, expected, strict=True):
        if tolerance and what[0] == "eval":
            break
        least = 1e-6 if what[0] == "eval" else 0
        assert loss == pytest.approx(right, rel=max(tolerance, least), abs=0), what
        if tolerance < 1e-4:  # a lossy run may tip an image over
            assert accuracy == hits, what


def members(tag: str) -> list[psutil.Process]:
    """The live processes whose environment has this TEST_TAG."""
    found = []
    for member in psutil.process_iter():
        try:
            tagged = member.environ().get("TEST_TAG") == tag
            if tagged and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
        except psutil.Error:
            pass
    return found


def cut_short(name, command, script, rank, act, monkeypatch, **env) -> tuple[Finished, float]:
    """Starts a job that would run for ever, and acts once every process of it trains.

    rank: the variable that numbers the processes. act is called with {rank: process}. Returns what
    the launcher left, and the seconds from the act until no process of the job was alive, before
    the clean-up of bench.measure.process touched any.
    """
    flags = [*FOREVER, *output(name)]
    tag = f"{name}-{os.getpid()}"
    gone = []
    clean_up = process.end

    def wait_for_all(mark):
        while process.marked(mark) and time.monotonic() < gone[0] + 2 * CLEAN_UP:
            time.sleep(0.1)
        gone.append(time.monotonic())
        clean_up(mark)

    monkeypatch.setattr(process, "end", wait_for_all)
    with ThreadPoolExecutor(1) as pool:
        arguments = [*command, sys.executable, script, *flags]
        job = pool.submit(run, arguments, 150, environment(1, TEST_TAG=tag, **env))
        try:
            log = flags[-1]
            while not records(log, "train", growing=True):
                assert not job.done(), job.result().err
                time.sleep(0.2)
            ranks = {}
            for member in members(tag):
                words = member.cmdline()
                if len(words) > 1 and words[0] == sys.executable and script in words[1:3]:
                    ranks[member.environ().get(rank)] = member
            gone.append(time.monotonic())
            act(ranks)
        except BaseException:
            gone[:] = [0.0]
            for member in members(tag):
                member.kill()
            raise
        done = job.result()
    assert not done.timed_out
    return done, gone[1] - gone[0]


def takes_turns(name: str, command: list, script: str, **env) -> None:
    """A job that the harness keeps started computes in its turns alone, and ends with it."""
    whole = [*command, sys.executable, script, *FOREVER, "--data", data()]
    with Resident(name, [str(part) for part in whole], folder(), environment(1, **env)) as case:
        last = spent = 0
        for _ in range(2):
            turn = case.slice(3)
            assert turn["steps"] == 3 and turn["images"] == 3 * 64
            spent += turn["cpu_seconds"]  # in one turn 0, where the harness itself came late
            assert turn["after"] > last
            last = turn["windows"][-1]["step"]
            size = case.log.stat().st_size
            time.sleep(1)
            assert case.log.stat().st_size == size
    assert spent > 0 and not process.marked(case.mark)


def kill_one(ranks: dict) -> None:
    """SIGKILL for process 1 of two."""
    assert set(ranks) == {"0", "1"}, ranks
    ranks["1"].send_signal(signal.SIGKILL)
