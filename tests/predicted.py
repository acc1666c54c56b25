"""Predictions of DDP's speed on two hosts of network namespaces, each written before its run.

    python tests/predicted.py FOLDER [--minutes 40]

In a round, for each network: `bench comm`; then for each model, with another local batch than in
the round before, a training of its own on each host, both at once (so that they share this
machine's memory as the hosts do later); the prediction, which is written to FOLDER/hosts.jsonl; and
the training on both hosts together, whose speed is written after it.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
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
RATES = {"shufflenet_v2_x0_5": 200, "resnet18": 50}  # images/s of a rank, roughly
WINDOW = 2  # seconds of a rank's computing in each of four log lines, roughly
LIMIT = 300  # seconds of a training


def train(lab, arch: str, batch: int, world: int) -> list[float]:
    """Images/s of the last three of four log lines: of each host by itself, or of both together."""
    steps = max(1, min(50, round(WINDOW * RATES[arch] / batch)))
    with tempfile.TemporaryDirectory() as folder:
        data = write_idx(Path(folder), 4 * steps * batch * world, 16)
        command = f"exec {sys.executable} mnmc_ddp_launch.py --device cpu --dataset fashion-mnist "
        command += f"--data {data} --arch {arch} --batch-size {batch * world} --epochs 1 "
        command += f"--log-every {steps}"
        jobs = []
        for k, host in enumerate(lab.hosts()):
            rank, address = (k, "10.77.0.1") if world > 1 else (0, "127.0.0.1")
            interface = "eth0" if world > 1 else "lo"
            jobs.append(lab.start(host, command, variables(rank, world, address, interface)))
        done = [lab.finish(host, job, LIMIT) for host, job in zip(lab.hosts(), jobs, strict=True)]
    found = []
    for report in done[: 1 if world > 1 else 2]:
        assert report.code == 0, report.out
        lines = [x for x in report.out.splitlines() if x.startswith("train ")]
        known = [dict(word.split("=") for word in x.split()[1:]) for x in lines]
        assert len(known) == 4, report.out
        images, seconds = (sum(float(x[key]) for x in known[1:]) for key in ("images", "seconds"))
        found.append(images / seconds)
    return found


def variables(rank: int, world: int, address: str, interface: str) -> dict:
    found = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": address}
    found |= {"MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": interface}
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
    parser.add_argument("--seconds", type=int, default=25, help="of each bench comm")
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
                    alone = train(lab, arch, batch, 1)
                    known = {"network": network, "arch": arch, "batch": batch, "start": start}
                    guess = predicted(link, arch, batch, alone)
                    note(kind="prediction", **known, comm=link.name, alone=alone, **guess)
                    note(kind="measured", **known, together=train(lab, arch, batch, 2)[0])


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
