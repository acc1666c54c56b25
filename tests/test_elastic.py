"""techniques/elastic.py: killed ranks are replaced, and the numbers are those without a kill."""

import os
import signal
from functools import partial

import psutil
import pytest
from real import EPOCH, FLAGS, epoch_oracle, numbers, output, train
from support import records, refused, restarting, started, succeeded, wait_for, world

SCRIPT = "techniques/elastic.py"
STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Few weights, BatchNorm and dropout; six steps per epoch.
SMALL = [*FLAGS, "--arch", "mobilenet_v3_small", "--batch-size", 32]
STEPS = 12


def logged(flags: list) -> dict:
    """The loss and the accuracy of each step and evaluation. Repeated ones must be equal."""
    found = {}
    for what, *values in numbers(flags):
        assert found.setdefault(what, values) == values, what
    return found


def resumed(flags: list) -> list[int]:
    """The first step of each start."""
    found = []
    for line in records(flags[flags.index("--log-json") + 1]):
        if line["event"] == "start":
            found.append(None)
        elif line["event"] == "train" and found[-1] is None:
            found[-1] = line["step"]
    return found


@pytest.fixture(scope="module")
def whole() -> dict:
    """The numbers of a run that nothing interrupts."""
    flags = [*SMALL, *output("elastic-whole")]
    succeeded(*world(2, SCRIPT, *flags))
    found = logged(flags)
    assert len(found) == STEPS + 2
    return found


def test_two_processes_train_what_the_oracle_trains():
    """Bit for bit over an epoch, without a snapshot."""
    train(partial(world, 2), SCRIPT, *EPOCH).equals(epoch_oracle(2))


def test_it_resumes_bit_for_bit(whole, tmp_path):
    """From within an epoch and from its end: shuffle, augmentation, dropout, momentum."""
    flags = [*SMALL, *output("elastic-stops"), "--snapshot", tmp_path / "snapshot.pt"]
    for steps in (2, 4, 1):
        succeeded(*world(2, SCRIPT, *flags, "--max-steps", steps))
    succeeded(*world(2, SCRIPT, *flags))
    assert logged(flags) == whole
    assert resumed(flags) == [1, 3, 7, 8]


def kill_one(job, which: int) -> None:
    """SIGKILL for a rank that torchrun has started."""
    os.kill(sorted(child.pid for child in psutil.Process(job.pid).children())[which], 9)


@pytest.mark.full
def test_torchrun_replaces_killed_ranks(whole, tmp_path, monkeypatch):
    """Rank 1, then rank 0: each time all ranks start again, and the numbers stay the same."""
    monkeypatch.setenv(STORE, "1")
    flags = [*SMALL, *output("elastic-killed"), "--snapshot", tmp_path / "snapshot.pt"]
    log = flags[flags.index("--log-json") + 1]
    job = restarting(3, SCRIPT, *flags)
    try:
        for kill, (which, step) in enumerate([(1, 2), (0, 7)]):
            wait_for(log, step, kill + 1, lambda: job.poll() is None)
            kill_one(job, which)
        assert job.wait(180) == 0
    finally:
        job.terminate()
        job.wait()
    first, second, third = resumed(flags)
    assert first == 1 and second >= 2 and third >= 7
    assert logged(flags) == whole


def die_while_writing() -> None:
    """Runs in the script's process: the third snapshot is left unfinished."""
    import torch

    plain, left = torch.save, [3]

    def cut_off(what, path):
        left[0] -= 1
        if left[0]:
            return plain(what, path)
        path.write_bytes(b"PK")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = cut_off


def test_a_snapshot_is_written_whole_or_not_at_all(whole, tmp_path):
    flags = [*SMALL, *output("elastic-cut"), "--snapshot", tmp_path / "snapshot.pt"]
    first, other = started(2, SCRIPT, *flags, prepare=die_while_writing)
    assert first.finish(120).code == -signal.SIGKILL and other.finish(120).code
    succeeded(*world(2, SCRIPT, *flags))
    assert resumed(flags) == [1, 3]
    assert logged(flags) == whole


def test_torchruns_own_store_is_refused(tmp_path):
    """After a restart, ranks would find the addresses of dead ones in it."""
    flags = [*SMALL, *output("elastic-store")]
    (done,) = world(
        1, SCRIPT, *flags, "--snapshot", tmp_path / "s", TORCHELASTIC_USE_AGENT_STORE=True
    )
    refused(done, STORE)
