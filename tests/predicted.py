"""Predictions of DDP's speed on two hosts of network namespaces, each written before its run.

    python tests/predicted.py FOLDER [--minutes 40]

In a round, for each network: `bench comm`; then for each model, with another local batch than in
the round before, a training of its own on each host, both at once (so that they share this
machine's memory as the hosts do later). From its speed comes the prediction, which is written to
FOLDER/hosts.jsonl. Only then the training on both hosts together starts. The two take turns of some
seconds, one of them stopped by a signal while the other runs: so a minute in which other programs
are busy slows both. At last, the predictions are made again, by the same measurement of the network
and one host's speed in the turns before and after.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import hosts
from support import write_idx

from bench.nodes import predict

NETWORKS = {"unshaped": [], "1gbit": ["--rate", "1gbit"], "100mbit": ["--rate", "100mbit"]}
# Local batches: one that computes about as long as it sends on a busy machine, a smaller one and a
# larger one.
BATCHES = {
    ("unshaped", "shufflenet_v2_x0_5"): (4, 16, 32),
    ("1gbit", "shufflenet_v2_x0_5"): (4, 16, 32),
    ("100mbit", "shufflenet_v2_x0_5"): (8, 32, 96),
    ("unshaped", "resnet18"): (8, 32, 64),
    ("1gbit", "resnet18"): (8, 24, 64),
    ("100mbit", "resnet18"): (64, 192, 384),
}
RATES = {"shufflenet_v2_x0_5": 150, "resnet18": 40}  # images/s of a rank, roughly
IMAGES = 6144
TURNS = 3  # of the training on both hosts, between turns of the other
LIMIT = 240  # seconds of a turn


class Training:
    """A training on each host by itself (world 1), or on both together (world 2)."""

    def __init__(self, lab, folder: Path, arch: str, batch: int, world: int):
        every = max(1, round(RATES[arch] / batch))  # steps of about a second
        self.good = 4 if batch < 3 * RATES[arch] else 2  # lines of a turn that count
        command = f"exec {sys.executable} mnmc_ddp_launch.py --device cpu --dataset fashion-mnist "
        command += f"--data {folder} --arch {arch} --batch-size {batch * world} --epochs 1000 "
        command += f"--log-every {every}"
        self.logs, self.jobs = [], []
        for k, host in enumerate(lab.hosts()):
            rank, address = (k, "10.77.0.1") if world > 1 else (0, "127.0.0.1")
            env = variables(rank, world, address, "eth0" if world > 1 else "lo")
            log = folder / f"{world}-{k}.txt"
            self.jobs.append(lab.start(host, f"{command} > {log} 2>&1", env))
            self.logs += [log] if rank == 0 else []

    def signal(self, number: int) -> None:
        for job in self.jobs:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(job.pid, number)

    def lines(self, log: Path) -> list[dict]:
        """The whole lines about training so far."""
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [dict(w.split("=") for w in x.split()[1:]) for x in lines if x.startswith("train ")]

    def turn(self) -> list[float]:
        """Lets it run; images/s of each log. The first line of a turn began in the one before."""
        before = [len(self.lines(log)) + 1 for log in self.logs]
        self.signal(signal.SIGCONT)
        end = time.monotonic() + LIMIT
        while any(
            len(self.lines(log)) < n + self.good for log, n in zip(self.logs, before, strict=True)
        ):
            time.sleep(0.2)
            ended = [job for job in self.jobs if job.poll() is not None]
            assert not ended and time.monotonic() < end, [log.read_text() for log in self.logs]
        self.signal(signal.SIGSTOP)
        found = []
        for log, n in zip(self.logs, before, strict=True):
            mine = self.lines(log)[n:]
            found.append(sum(float(x["images"]) for x in mine))
            found[-1] /= sum(float(x["seconds"]) for x in mine)
        return found


def variables(rank: int, world: int, address: str, interface: str) -> dict:
    found = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": address}
    found |= {"MASTER_PORT": 29500 + world, "GLOO_SOCKET_IFNAME": interface}
    return {name: str(value) for name, value in found.items()}


def measure(lab, out: Path, seconds: int) -> None:
    """`bench comm` on both hosts."""
    command = f"exec {sys.executable} -m bench comm --seconds {seconds} --out {out}"
    jobs = [
        lab.start(host, command, variables(k, 2, "10.77.0.1", "eth0"))
        for k, host in enumerate(lab.hosts())
    ]
    for host, job in zip(lab.hosts(), jobs, strict=True):
        report = lab.finish(host, job, seconds + 120)
        assert report.code == 0, report.out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--seconds", type=int, default=35, help="of each bench comm")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    end, start = time.monotonic() + 60 * args.minutes, 0

    def note(**fields) -> None:
        with open(args.folder / "hosts.jsonl", "a") as file:
            file.write(
                json.dumps(fields | {"load": os.getloadavg()[0], "time": time.time()}) + "\n"
            )

    while time.monotonic() < end:
        start += 1
        for network in random.sample([*NETWORKS], len(NETWORKS)):
            with hosts.lab(*NETWORKS[network]) as lab:
                link = args.folder / f"comm-{network}-{start}.jsonl"
                measure(lab, link, args.seconds)
                mine = {a: each for (n, a), each in BATCHES.items() if n == network}
                cases = [(arch, batches[start % 3]) for arch, batches in mine.items()]
                for arch, batch in random.sample(cases, len(cases)):
                    if time.monotonic() > end:
                        return
                    known = {"network": network, "arch": arch, "batch": batch, "start": start}
                    try:
                        compare(lab, link, known, note)
                    except AssertionError as error:  # the others go on
                        print(known, error, file=sys.stderr, flush=True)


def compare(lab, link: Path, known: dict, note) -> None:
    """The prediction of a case, and the turns of both trainings after it."""
    with tempfile.TemporaryDirectory() as folder:
        case = lab, write_idx(Path(folder), IMAGES, 16), known["arch"], known["batch"]
        trainings = [Training(*case, 1)]
        try:
            alone = [trainings[0].turn()]
            guess = predicted(link, known["arch"], known["batch"], alone[0])
            note(kind="prediction", **known, comm=link.name, alone=alone[0], **guess)
            trainings.append(Training(*case, 2))
            together = []
            for _ in range(TURNS):
                together += trainings[1].turn()
                alone.append(trainings[0].turn())
            note(kind="measured", **known, together=together, alone=alone)
            again = [predicted(link, known["arch"], known["batch"], two) for two in around(alone)]
            note(kind="again", **known, predictions=again)
        finally:
            for each in trainings:
                each.signal(signal.SIGKILL)


def around(alone: list[list[float]]) -> list[list[float]]:
    """Of each turn of both hosts together, a host's speeds in the turns before and after."""
    return [[sum(turn) / len(turn) for turn in pair] for pair in pairwise(alone)]


def predicted(link: Path, arch: str, batch: int, alone: list[float]) -> dict:
    """What `bench predict` says of two ranks on two nodes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "predict.jsonl"
        words = [str(link), "--arch", arch, "--batch", str(batch), "--ranks", "2", "--per-node"]
        words += ["1", "--step-ms", ",".join(str(1e3 * batch / speed) for speed in alone)]
        predict.main([*words, "--out", str(out)])
        (line,) = map(json.loads, out.read_text().splitlines())
    keys = ("images_per_second", "low", "high", "efficiency", "overlap", "hides_at")
    return {key: line[key] for key in keys}


if __name__ == "__main__":
    main()
