"""Two hosts of network namespaces in a training: one is late, killed, or cut off for a while."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import hosts
import pytest
from real import lacking
from support import write_idx

from bench import process

pytestmark = pytest.mark.full
STEPS = 24
LINE = re.compile(r"train epoch=\d+ step=(\d+) loss=(\S+)")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Hosts on a slow network: 100 Mbit/s."""
    if reason := hosts.lacking():
        lacking(reason)
    data = write_idx(tmp_path_factory.mktemp("data"), 64 * STEPS, 101)
    with hosts.lab("--debian", "--rate", "100mbit") as made:
        made.data = data
        yield made


def start(lab, number: int, *flags: str) -> subprocess.Popen:
    """A rank of a training on its host, as docs/howto/several-machines.md starts it."""
    words = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1"
    words += f" --master-addr hosta mnmc_ddp_launch.py --device cpu --data {lab.data}"
    words += " --dataset fashion-mnist --arch shufflenet_v2_x0_5 --batch-size 64 --epochs 1"
    words = f"{words} --log-every 1 {' '.join(flags)}"
    env = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    return lab.start(lab.hosts()[number], f"exec {sys.executable} {words}", env)


def lines(job: subprocess.Popen):
    """The step and loss of each line of rank 0, as it comes."""
    for text in job.stdout:
        if found := LINE.match(text):
            yield int(found[1]), found[2]


def end(*jobs: subprocess.Popen) -> None:
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(20)


@pytest.fixture(scope="module")
def undisturbed(lab) -> list[str]:
    """The losses; the second host comes 10 s late."""
    jobs = [start(lab, 0)]
    try:
        time.sleep(10)
        jobs.append(start(lab, 1))
        losses = [loss for _, loss in lines(jobs[0])]
        assert [job.wait(60) for job in jobs] == [0, 0]
    finally:
        end(*jobs)
    assert len(losses) == STEPS
    return losses


def test_a_link_that_is_cut_for_some_seconds_changes_no_number(lab, undisturbed):
    jobs, losses = [start(lab, 0), start(lab, 1)], []
    try:
        for step, loss in lines(jobs[0]):
            losses.append(loss)
            if step == STEPS // 2:
                lab.ip("hostb", "link set dev eth0 down")
                time.sleep(8)
                lab.ip("hostb", "link set dev eth0 up")
        assert [job.wait(60) for job in jobs] == [0, 0]
    finally:
        end(*jobs)
    assert losses == undisturbed


def test_when_a_host_is_killed_the_other_ends(lab):
    """Long before Gloo's timeout of 30 minutes: its connection is closed."""
    jobs = [start(lab, 0), start(lab, 1)]
    try:
        for step, _ in lines(jobs[0]):
            if step == 2:
                there = process.run(["ip", "netns", "pids", f"{lab.name}-hostb"], 20)
                for pid in there.out.split():
                    os.kill(int(pid), signal.SIGKILL)
                break
        rest = jobs[0].stdout.read()
        assert jobs[0].wait(60) == 1
    finally:
        end(*jobs)
    assert re.search(r"Connection (closed|reset) by peer", rest), rest


def test_other_flags_on_one_host_are_named_by_imagenet(lab, photos, tmp_path):
    """The ladder's scripts don't compare flags, as their page says; doctor does, before the run."""
    jobs = []
    for number, rate in enumerate(("0.1", "0.2")):
        words = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1"
        words += f" --master-addr hosta imagenet.py {shlex.join(map(str, photos[2:]))}"
        words += f" --arch resnet18 --lr {rate} --out {tmp_path / 'out'}"
        jobs.append(lab.start(lab.hosts()[number], f"exec {sys.executable} {words}", {}))
    try:
        texts = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        end(*jobs)
    named = [text for text in texts if "--lr" in text and "0.2" in text]
    assert named, "\n".join(texts)
