"""Short real runs of a script in which something was taken back: twenty steps on two processes.

A Lab runs them in a temporary folder, on the first images of the embedded set. It also runs what
verdicts.py compares them with: the oracle, and the whole script.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import psutil

from bench import ROOT, process
from bench.backends import absent
from bench.cases import Case
from bench.data import write_images
from bench.host import PORT
from bench.ladder import script_of
from bench.nodes.watched import sitecustomize
from bench.process import Failed
from mistakes.verdicts import Ran, judge

# 640 images to train on, 101 to test on: two processes get 51 and 50 of these. Small images, since
# resnet18 on 32 x 32 pixels takes half as long again, and shows no more.
IMAGES = ["--images", "640", "101"]
FLAGS = ["--dataset", "fashion-mnist", *IMAGES, "--image-size", "16", "--batch-size", "64"]
FLAGS += [*"--lr 0.02 --epochs 2 --log-every 1 --device cpu --data".split(), ROOT / "data"]
# OneFlow's Python has no torch, so these runs use no probe: files with few images instead of its
# flag, and what is printed instead of its log. They are compared with the whole script, which
# tests/test_oneflow.py compares with an oracle.
ONEFLOW = ROOT / ".cache" / "oneflow" / "bin" / "python"
# It listens on all addresses of its network, so it gets one that has only a loopback device.
ALONE = ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "-"]
# Inserted into a script: the end of rank 1, in this step of the first start.
KILL = """\
            first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if step == {} and rank == 1 and first_start:
                os.kill(os.getpid(), 9)
"""
# Otherwise torchrun, which restarts the ranks, may hand them the store of the first start.
RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
IDLE, MOST_IDLE = 10.0, 0.3  # processes that use 0.3 CPU seconds in 10 seconds wait
MOST = 20  # times its limit: then even a run that computes is ended


@dataclass(frozen=True)
class Trial:
    """A run to make: a script of the project by its name, and the text to run instead of it."""

    script: str
    text: str
    processes: int = 2
    oracle: tuple[str, ...] = ("--parts", "2")  # only for the oracle that it is compared with
    flags: tuple[str, ...] = ()  # for the script and the oracle
    own: tuple[str, ...] = ()  # only for the script
    limit: float = 25.0  # seconds, after which a run that no longer computes hangs
    save: bool = True
    within: float = 0.0  # relative distance of losses that count as equal; 0: that of rounding
    kill: int = 0  # the step of epoch 1 in which rank 1 is killed, the first time; 0: none

    @property
    def in_oneflow(self) -> bool:
        """Whether it runs in OneFlow's environment."""
        return script_of(self.script).in_oneflow

    def case(self) -> Case:
        """How the benchmark starts such a script."""
        return Case(self.script, self.script, script_of(self.script).launcher, self.processes)

    def command(self, script: Path, *flags) -> list[str]:
        """The case's command with this script; after a kill, torchrun may start it once more."""
        if self.in_oneflow:
            start = [*ALONE, ONEFLOW, "-m", "oneflow.distributed.launch"]
            start += ["--nproc_per_node", self.processes, "--master_port", PORT]
            return [*start, script, *flags, *self.own, *self.flags]
        command = self.case().command(*flags, *self.own, *self.flags)
        command[command.index(str(ROOT / self.script))] = str(script)
        if self.kill:
            place = command.index("--standalone")
            command[place:place] = ["--max-restarts", "1"]
        return command

    def code(self) -> str:
        """The text, with the kill in it: after the step, of which the others wait for the means."""
        if not self.kill:
            return self.text
        step = "            optimizer.step()\n"
        if step not in self.text:
            raise Failed(f"it has no line that is {step.strip()}, behind which to be killed")
        return self.text.replace(step, step + KILL.format(self.kill))

    def missing(self) -> str | None:
        """What keeps it from running here, in words."""
        if self.script == "mnmc_apex.py":  # on a CPU it trains without Apex's kernels
            return None if importlib.util.find_spec("apex") else "apex not installed"
        if self.in_oneflow:
            where = ONEFLOW.parents[1].relative_to(ROOT)
            cure = f"OneFlow not installed: bash bench/install_oneflow.sh {where}"
            return no_own_network() if ONEFLOW.exists() else cure
        return absent(self.case())


def no_own_network() -> str | None:
    """Why ALONE cannot work here, in words."""
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("ip")):
        return "a network of its own needs root, unshare and ip"
    return None


class StallDetector(threading.Thread):
    """Watches a run from its time limit on: once it only waits, looks where, and ends it."""

    def __init__(self, mark: str, limit: float, stacks: Path, script: Path):
        super().__init__(daemon=True)
        self.mark, self.limit, self.stacks, self.script = mark, limit, stacks, script
        self.done, self.stuck = threading.Event(), None

    def run(self) -> None:
        """A slow machine gets more time: a run hangs where its processes no longer compute."""
        wait, before = self.limit, None
        while not self.done.wait(wait):
            members, wait = process.marked(self.mark), IDLE
            now = {member.pid: cpu_seconds(member) for member in members}
            if before and now.keys() == before.keys():  # else some have just ended
                if sum(now.values()) - sum(before.values()) < MOST_IDLE:
                    self.stuck = self.places(now)
                    return process.end(self.mark)
            before = now
        return None

    def places(self, members: Iterable[int]) -> dict[str, str]:
        """The line of the script that each process is in, by its rank.

        A process that waits outside of all functions, and has no rank, has started the others.
        """
        lines, found = self.script.read_text().splitlines(), {}
        for file in (self.stacks / f"{number}.json" for number in sorted(members)):
            if not file.exists():  # no Python
                continue
            state = json.loads(file.read_text())
            rank, _ = state["rank"] or (None, None)
            for path, number, where in state["stack"]:  # the innermost frame comes first
                if path == str(self.script) and (rank is not None or where != "<module>"):
                    line = lines[number - 1].split("  # ")[0].strip()
                    found[str(len(found) if rank is None else rank)] = line
                    break
        return dict(sorted(found.items()))


def cpu_seconds(member: psutil.Process) -> float:
    """Of a process, or 0 where it has gone."""
    try:
        return sum(member.cpu_times()[:2])
    except psutil.Error:
        return 0.0


class Lab:
    """A temporary folder, and the runs that the trials are compared with."""

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ladder-pieces-"))
        self.known: dict[object, Ran] = {}
        self.lock = threading.RLock()
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    def outcome(self, trial: Trial, text: str) -> dict:
        """Runs a trial and judges it; text: that of the script with nothing taken back."""

        def whole() -> Ran:
            return self.whole(replace(trial, text=text))

        def exact() -> Ran:
            return whole() if trial.in_oneflow else self.exact(trial)

        ran = self.run(trial)
        try:
            found = judge(ran, exact, whole, trial.within)
            if found["kind"] not in ("crash", "hang"):
                whole()  # otherwise the whole script itself may be that far off
            return found
        finally:
            shutil.rmtree(ran.folder, ignore_errors=True)

    def run(self, trial: Trial) -> Ran:
        """A trial, in a folder of its own."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        stacks = Path(tempfile.mkdtemp(dir=self.folder))
        script, log, weights = folder / Path(trial.script).name, folder / "log", folder / "weights"
        script.write_text(trial.code())
        flags = [*FLAGS, "--log-json", log, *(["--save", weights] if trial.save else [])]
        if trial.in_oneflow:
            images = write_images(folder / "images", *map(int, IMAGES[1:]))
            flags = [*(word for word in FLAGS[:-1] if word not in IMAGES), images]
        command = trial.command(script, *flags)
        # As under `bench watch`, each process writes where it is. A spawned one looks for the probe
        # in the project's folder.
        paths = [str(Path(sitecustomize.__file__).parent), str(ROOT), os.environ.get("PYTHONPATH")]
        own = {sitecustomize.FOLDER: str(stacks), **(RESTART if trial.kill else {})}
        env = process.environment(1, PYTHONPATH=os.pathsep.join(filter(None, paths)), **own)
        mark = process.new_mark()
        watch = StallDetector(mark, trial.limit, stacks, script)
        watch.start()
        try:
            finished = process.run(command, MOST * trial.limit, env, folder, mark)
        finally:
            watch.done.set()
        watch.join()
        if finished.timed_out:
            raise Failed(f"it still computes after {MOST * trial.limit:.0f} s: raise its limit")
        saved = weights if trial.save else None
        records = printed(finished.out) if trial.in_oneflow else read(log)
        return Ran(finished.code, finished.err, records, folder, saved, watch.stuck)

    def exact(self, trial: Trial) -> Ran:
        """The oracle with a trial's flags."""
        key = (trial.oracle, trial.flags)
        with self.lock:
            if key not in self.known:
                folder = Path(tempfile.mkdtemp(dir=self.folder))
                log, weights = folder / "log", folder / "weights"
                command = [sys.executable, ROOT / "bench" / "oracle.py", *trial.oracle]
                command += [*FLAGS, "--log-json", log, "--save", weights]
                done = process.run([*command, *trial.flags], 600, process.environment(1))
                if done.code:
                    raise Failed(f"its oracle failed: {done.last_line}")
                self.known[key] = Ran(0, done.err, read(log), folder, weights)
            return self.known[key]

    def whole(self, trial: Trial) -> Ran:
        """The whole script with a trial's flags. Raises Failed if that is not right itself."""
        with self.lock:
            if trial not in self.known:
                ran = self.run(trial)
                right = ran if trial.in_oneflow else self.exact(trial)
                found = judge(ran, lambda: right, lambda: ran, trial.within)
                if found["kind"] != "no effect here":
                    raise Failed(f"the whole {trial.script} is not right: {found['text']}")
                self.known[trial] = ran
            return self.known[trial]


def printed(out: str) -> list[dict]:
    """The same records, as far as verdicts need them, from what a script printed."""
    found, last = [], 0  # the last step of the first epoch: steps count on over the epochs
    for event, words in re.findall(r"^(train|eval) (.*)$", out, re.M):
        fields = dict(word.split("=") for word in words.split())
        epoch, images, loss = int(fields["epoch"]), int(fields["images"]), float(fields["loss"])
        record = {"event": event, "epoch": epoch, "images": images}
        record["loss"] = loss if isfinite(loss) else None
        if event == "train":
            last = max(last, int(fields["step"])) if epoch == 1 else last
            record["step"] = int(fields["step"]) + (epoch - 1) * last
        found.append(record)
    return found


def read(log: Path) -> list[dict]:
    """The records of a --log-json file."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
