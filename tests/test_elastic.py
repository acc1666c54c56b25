"""techniques/elastic.py: killed ranks are replaced, and the numbers are those without a kill."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from kills import numbers
from real import FLAGS, data
from spies import at_calls
from support import records, refused, restarting, started, succeeded, wait_for, world

SCRIPT = "techniques/elastic.py"
STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def flags(folder: Path) -> list:
    """Two epochs of six steps; few weights, BatchNorm and dropout. The log, a snapshot."""
    files = ["--log-json", folder / "log.jsonl", "--snapshot", folder / "snapshot.pt"]
    small = ["--data", data(), "--arch", "mobilenet_v3_small", "--image-size", 16]
    return [*FLAGS, *small, "--batch-size", 32, *files]


def resumed(folder: Path) -> list[int]:
    """The first step of each start."""
    found = []
    for line in records(folder / "log.jsonl"):
        if line["event"] == "start":
            found.append(None)
        elif line["event"] == "train" and found[-1] is None:
            found[-1] = line["step"]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """The numbers of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    succeeded(*world(2, SCRIPT, *flags(folder)))
    found = numbers(folder)
    assert len(found) == 12 + 2
    return found


def test_it_resumes_bit_for_bit(whole, tmp_path):
    """From within an epoch and from its end: shuffle, augmentation, dropout, momentum."""
    for steps in (2, 4):
        succeeded(*world(2, SCRIPT, *flags(tmp_path), "--max-steps", steps))
    succeeded(*world(2, SCRIPT, *flags(tmp_path)))
    assert numbers(tmp_path) == whole
    assert resumed(tmp_path) == [1, 3, 7]


@pytest.mark.full
def test_torchrun_replaces_killed_ranks(whole, tmp_path, monkeypatch):
    """Rank 0 is killed: all ranks start again, and the numbers stay the same."""
    monkeypatch.setenv(STORE, "1")
    job = restarting(3, SCRIPT, *flags(tmp_path), "--epochs", 1000)
    try:
        wait_for(tmp_path / "log.jsonl", 2, alive=lambda: job.poll() is None)
        min(psutil.Process(job.pid).children(), key=lambda child: child.pid).kill()
        wait_for(tmp_path / "log.jsonl", 13, 2, lambda: job.poll() is None)
    finally:
        job.terminate()
        job.wait()
    first, second = resumed(tmp_path)
    assert first == 1 and second >= 2
    assert whole.items() <= numbers(tmp_path).items()


def die_while_writing() -> None:
    """Runs in the script's process: the third snapshot is left unfinished."""

    def cut_off(save, what, path):
        path.write_bytes(b"PK")
        os.kill(os.getpid(), signal.SIGKILL)

    at_calls({3}, "torch.save", cut_off)


def test_a_snapshot_is_written_whole_or_not_at_all(whole, tmp_path):
    first, other = started(2, SCRIPT, *flags(tmp_path), prepare=die_while_writing)
    assert first.finish(120).code == -signal.SIGKILL and other.finish(120).code
    succeeded(*world(2, SCRIPT, *flags(tmp_path)))
    assert resumed(tmp_path) == [1, 3]
    assert numbers(tmp_path) == whole


def test_torchruns_own_store_is_refused(tmp_path):
    """After a restart, ranks would find the addresses of dead ones in it."""
    (done,) = world(1, SCRIPT, *flags(tmp_path), TORCHELASTIC_USE_AGENT_STORE=True)
    refused(done, STORE)
