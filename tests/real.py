"""What tests of real launchers share: small data, the oracle's numbers, a run that is cut short."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from support import (
    ORACLE,
    PROBE,
    Forked,
    checkpoint,
    forked,
    free_port,
    make_model,
    records,
    succeeded,
    words,
    write_idx,
)

from bench import process
from bench.process import Finished, environment, run
from bench.run.resident import Resident

TEST_IMAGES = 101  # a prime: no number of ranks divides it
# Three steps per epoch: every run has an end of an epoch, and a second order of the images.
FLAGS = ["--dataset", "fashion-mnist", "--device", "cpu", "--epochs", 2]
FLAGS += ["--batch-size", 64, "--lr", 0.005, "--log-every", 1]
FOREVER = [*FLAGS[:4], "--epochs", 10_000, "--batch-size", 64, "--log-every", 1]
# An epoch of 39 steps with a small model; four images are left out.
ARCH = "shufflenet_v2_x0_5"
STEPS = 39
EPOCH = ["--dataset", "fashion-mnist", "--device", "cpu", "--arch", ARCH]
EPOCH += ["--epochs", 1, "--batch-size", 64, "--log-every", 1]
EPOCH += ["--images", 64 * STEPS + 4, TEST_IMAGES]
CLEAN_UP = 60  # seconds that a launcher may take to end a job after a process was killed


def lacking(reason: str):
    """Skips a test with a reason. With CI=true that is a failure (conftest.py)."""
    pytest.skip(reason)


def shorten_epoch() -> None:
    """Without --full, EPOCH has six steps."""
    global STEPS
    STEPS = 6
    EPOCH.extend(["--images", 64 * STEPS, TEST_IMAGES])


@cache
def folder() -> Path:
    """A folder for this process's whole session, removed at its end."""
    path = Path(tempfile.mkdtemp(prefix="ladder-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def data() -> Path:
    """192 images to train on, 101 to test on."""
    return write_idx(folder() / "data", 192, TEST_IMAGES)


@cache
def short() -> list:
    """The flags for two epochs of three steps on the small data, with a small model."""
    return [*FLAGS, "--data", data(), "--arch", ARCH]


@dataclass
class Trained:
    """What a run has logged and saved."""

    records: list[dict]  # with all digits
    outs: list[str]  # the printed lines of each process that was started
    saved: dict  # the file of --save
    weights: dict  # in that file: the model's, BatchNorm's running statistics included

    @property
    def out(self) -> str:
        """What the first process has printed."""
        return self.outs[0]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        steps = [line for line in self.records if line["event"] == "train"]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        return [line["loss"] for line in steps]

    @property
    def evaluations(self) -> list[dict]:
        """The records of the evaluations."""
        return [line for line in self.records if line["event"] == "eval"]

    def distance(self, other: "Trained") -> float:
        """The largest difference between two weights at the same place."""
        assert self.weights.keys() == other.weights.keys()
        pairs = [(value, other.weights[name]) for name, value in self.weights.items()]
        return max((a.double() - b.double()).abs().max().item() for a, b in pairs)

    def equals(self, other: "Trained", rel: float = 0, losses: float = 0) -> None:
        """Asserts the same losses, weights and evaluations; rel: within a relative tolerance.

        losses: one for the losses alone. The oracle evaluates in other batches, so it adds the
        losses in another order.
        """
        assert self.losses == pytest.approx(other.losses, rel=max(rel, losses), abs=0)
        assert self.distance(other) <= 100 * rel
        for ours, theirs in zip(self.evaluations, other.evaluations, strict=True):
            assert (ours["accuracy"], ours["images"]) == (theirs["accuracy"], theirs["images"])
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def train(start: Callable, script: str, *flags, classes: int = 10, **keywords) -> Trained:
    """Runs a script to its end. start: as forked, world, torchrun and python are called."""
    import torch

    place = Path(tempfile.mkdtemp(dir=folder()))
    log, weights = place / "log.jsonl", place / "weights.pt"
    done = start(script, *flags, "--log-json", log, "--save", weights, **keywords)
    done = done if isinstance(done, list) else [done]
    succeeded(*done)
    archs = [arch for name, arch in pairwise(flags) if name == "--arch"]
    saved = checkpoint(weights, classes, archs[-1] if archs else "resnet18")
    return Trained(records(log), [one.out for one in done], torch.load(weights), saved)


@cache
def epoch_oracle(parts: int, split: str = "strided", *more, prepare=None) -> Trained:
    """The oracle's run of EPOCH."""
    words = ["--parts", parts, "--split", split, *more]
    return train(forked, ORACLE, *EPOCH, *words, prepare=prepare)


@cache
def oracle(parts: int, *more) -> Trained:
    """The oracle's run of short()."""
    return train(forked, ORACLE, *short(), "--parts", parts, *more)


@cache
def exact_oracle(parts: int) -> Trained:
    """The same in double precision.

    More than two numbers have several orders to be added in, and BatchNorm makes the difference
    grow: from 1e-7 in a step to 1e-4 in the next. Here it stays below 1e-9.
    """
    return train(forked, ORACLE, *short(), "--parts", parts, prepare=doubles)


def doubles() -> None:
    """Runs in the script's process: it computes in double precision."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double


def unfused() -> None:
    """Runs in the script's process: SGD without its fused kernel.

    That one rounds the last numbers of a tensor in another way than the others, which do not fill
    a vector. So its result depends on where a weight is cut into shards.
    """
    import torch

    begin = torch.optim.SGD.__init__

    def init(self, *arguments, fused=None, foreach=None, **options):
        begin(self, *arguments, foreach=True, **options)

    torch.optim.SGD.__init__ = init


def more_models() -> None:
    """Runs in the script's process: torchvision knows the models of make_model, too."""
    from torchvision import models

    models.get_model = lambda name, num_classes: make_model(name, num_classes)


def small_models() -> None:
    """The same, and the script computes in double precision."""
    doubles()
    more_models()


def as_srun(size: int, script: str, *flags, limit: float = 300, **keywords) -> list[Finished]:
    """A script for srun in this many processes, with the variables that srun sets."""
    step = {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": size, "SLURM_JOB_ID": 1}
    step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **keywords}
    tasks = range(size)
    ranks = [Forked(script, *flags, **step, SLURM_PROCID=r, SLURM_LOCALID=r) for r in tasks]
    return [rank.finish(limit) for rank in ranks]


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
    """Starts a job that would run for ever, and calls act({rank: process}) when all ranks train.

    rank: the variable that numbers the processes. Returns the finished launcher, and the seconds
    from the act until no process of the job was alive. The clean-up of bench.process waits
    for that.
    """
    flags = [*FOREVER, "--data", data(), "--log-json", folder() / f"{name}.jsonl"]
    tag = f"{name}-{os.getpid()}"
    gone = []
    clean_up = process.end

    def wait_for_all(mark):
        while process.marked(mark) and time.monotonic() < gone[0] + CLEAN_UP:
            time.sleep(0.1)
        gone.append(time.monotonic())
        clean_up(mark)

    monkeypatch.setattr(process, "end", wait_for_all)
    with ThreadPoolExecutor(1) as pool:
        arguments = [*command, sys.executable, *words(script, *flags)]
        job = pool.submit(run, arguments, 400, environment(1, TEST_TAG=tag, **env))
        try:
            log = flags[-1]
            while not records(log, "train", growing=True):
                assert not job.done(), job.result().err
                time.sleep(0.2)
            ranks = {}
            for member in members(tag):
                line = member.cmdline()
                if len(line) > 1 and line[0] == sys.executable and script in line[1:3]:
                    ranks[member.environ().get(rank)] = member
            gone.append(time.monotonic())
            act(ranks)
        except BaseException:
            gone[:] = [0.0]
            for member in members(tag):
                member.kill()
            raise
        done = job.result()
    seconds = gone[1] - gone[0]
    assert not done.timed_out and seconds < CLEAN_UP, (done, seconds)
    return done, seconds


def takes_turns(name: str, command: list, script: str, **env) -> None:
    """A job that the harness keeps started computes only in its turns, and ends with it."""
    whole = [*command, sys.executable, PROBE, script, *FOREVER, "--data", data()]
    with Resident(name, [str(part) for part in whole], folder(), environment(1, **env)) as case:
        last = spent = 0
        for _ in range(2):
            turn = case.slice(3)
            assert sum(window["images"] for window in turn["windows"]) == 3 * 64
            spent += turn["cpu_seconds"]
            assert turn["after"] > last
            last = turn["windows"][-1]["step"]
            assert last == turn["after"] + 3
            size = case.log.stat().st_size
            time.sleep(1)
            assert case.log.stat().st_size == size
    assert spent > 0 and not process.marked(case.mark)


def kill_one(ranks: dict) -> None:
    """SIGKILL for rank 1 of two."""
    assert set(ranks) == {"0", "1"}, ranks
    ranks["1"].send_signal(signal.SIGKILL)
