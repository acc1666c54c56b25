"""imagenet.py: an interrupted run resumes bit for bit, whatever interrupted it."""

import errno
import os
import pickle
import shlex
import shutil
import signal
import sys
from functools import partial

import hosts
import kills
import psutil
import pytest
import support
import torch
from kills import SCRIPT, numbers
from real import lacking
from spies import at_calls, cannot
from support import ROOT, forked, records, started, succeeded, wait_for, world

STEPS = 12  # of the small run's four epochs
refused = partial(support.refused, code=2)


@pytest.mark.full
def test_three_ranks_resume_bit_for_bit(small_run, tmp_path):
    """Their sums depend on the order, so on how DDP sorts the gradients; with two they do not."""
    for out, steps in (("one", [5]), ("two", [2, 5])):
        for step in steps:
            more = ["--out", tmp_path / out, "--max-steps", step]
            succeeded(*world(3, SCRIPT, *small_run, *more))
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")


def signaled(number, workers):
    """Runs in the script's process: at its fifth step, rank 1 gets a signal, and perhaps the
    loader's workers, as Slurm does it.
    """

    def signal_rank_1(step, *words, **more):
        if os.environ["RANK"] == "1":
            itself = psutil.Process()
            for process in [*(itself.children() if workers else []), itself]:
                process.send_signal(number)
        return step(*words, **more)

    at_calls({5}, "torch.optim.SGD.step", signal_rank_1)


def test_a_signal_stops_all_at_one_step(small_run, whole, tmp_path):
    """Sent to one rank; all save, end with exit code 75, and resume bit for bit."""
    prepare = partial(signaled, signal.SIGUSR1, workers=True)
    ended = world(2, SCRIPT, *small_run, "--out", tmp_path, prepare=prepare)
    assert [done.code for done in ended] == [75, 75], ended
    (end,) = records(tmp_path / "log.jsonl", "end")
    assert end["finished"] is False and 5 <= end["step"] < STEPS
    succeeded(*world(2, SCRIPT, *small_run, "--out", tmp_path))
    assert numbers(tmp_path) == whole


def killed_at_a_save():
    """Runs in the script's process: a file is written, but does not have its name yet."""
    at_calls({3}, "os.replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.full
def test_a_kill_during_a_save(small_run, whole, tmp_path):
    """Only whole files count. `python tests/kills.py 500` kills at random moments."""
    every = [*small_run, "--out", tmp_path, "--save-every", 1]
    first, _ = world(2, SCRIPT, *every, prepare=killed_at_a_save)
    assert first.code == -signal.SIGKILL and len([*tmp_path.glob("*.part")]) == 1
    last = records(tmp_path / "log.jsonl", "train")[-1]["step"]
    succeeded(*world(2, SCRIPT, *every))
    assert numbers(tmp_path) == whole and not [*tmp_path.glob("*.part")]
    *_, start = records(tmp_path / "log.jsonl", "start")
    assert start["resumed"].startswith(f"step-{last - 1:09}")


@pytest.mark.full
def test_the_number_of_ranks_may_change(small_run, tmp_path):
    """One rank, with the same parts one after the other, resumes with the same loss.

    Without dropout, which then draws other numbers. Only the next step is compared: a difference
    from another order of a sum grows tenfold a step.
    """
    same = [*small_run, "--arch", "resnet18", "--max-steps", 5]
    two, one = tmp_path / "two", tmp_path / "one"
    one.mkdir()
    succeeded(*world(2, SCRIPT, *same, "--out", two, "--save-every", 1))
    (file,) = two.glob("step-000000004*")
    shutil.copy(file, one)
    succeeded(forked(SCRIPT, *same, "--out", one, "--accumulate", 2))
    (start,) = records(one / "log.jsonl", "start")
    assert start["resumed"] == file.name
    (found,), (*_, right) = (records(out / "log.jsonl", "train") for out in (one, two))
    assert found["step"] == right["step"] == 5
    assert found["loss"] == pytest.approx(right["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def begun(small_run, tmp_path_factory):
    """A folder with checkpoints of a run with one rank."""
    out = tmp_path_factory.mktemp("begun")
    succeeded(forked(SCRIPT, *small_run, "--out", out, "--save-every", 1, "--max-steps", 2))
    return out


@pytest.fixture
def copy(begun, tmp_path):
    """A copy of it, to be spoiled."""
    return shutil.copytree(begun, tmp_path / "copy")


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(small_run, copy):
    """In the newest a bit is wrong. Then no file is whole: nothing is started anew."""
    *_, newest = sorted(copy.glob("step-*.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    done = forked(SCRIPT, *small_run, "--out", copy, "--max-steps", 2)
    succeeded(done)
    assert f"not used: {newest}" in done.err
    *_, start = records(copy / "log.jsonl", "start")
    assert start["resumed"].startswith("step-000000001")
    assert [path.stem for path in copy.glob("*.damaged")] == [newest.stem]
    for path in copy.glob("step-*.pt"):
        path.write_bytes(b"")
    done = forked(SCRIPT, *small_run, "--out", copy)
    assert done.code == 2 and "no checkpoint there is whole" in done.last_line


class Evil:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_checkpoint_that_would_run_code_is_refused(small_run, copy):
    for path in copy.glob("step-*.pt"):
        torch.save({"model": Evil()}, path, pickle_module=pickle)
    done = forked(SCRIPT, *small_run, "--out", copy)
    assert done.code == 2 and "holds more than tensors" in done.err
    done = forked(SCRIPT, *small_run, "--out", copy.parent / "new", "--weights", path)
    refused(done, "holds more than tensors")
    assert not (ROOT / "evil").exists()


def test_another_runs_checkpoint_is_refused(small_run, begun):
    more = ["--arch", "resnet18", "--lr", 0.1, "--epochs", 5]
    refused(forked(SCRIPT, *small_run, "--out", begun, *more), f"--out {begun}", *more[::2])


def test_a_checkpoint_of_another_version_with_other_flags(small_run, copy):
    """A flag that it does not know has its default; one that no longer exists does not matter."""
    for path in copy.glob("step-*.pt"):
        found = torch.load(path)
        del found["settings"]["clip_grad"]
        found["settings"]["loader"] = "torch"
        torch.save(found, path)
    succeeded(forked(SCRIPT, *small_run, "--out", copy, "--max-steps", 3))
    *_, start = records(copy / "log.jsonl", "start")
    assert start["resumed"].startswith("step-000000002")


def no_space():
    """Runs in the script's process: after two checkpoints the disk is full."""
    at_calls(range(5, 99), "os.fsync", cannot(errno.ENOSPC))


@pytest.mark.full
def test_training_goes_on_where_the_disk_is_full(small_run, tmp_path):
    """A message, older checkpoints stay, no partial file is left; at the end it is fatal."""
    every = [*small_run, "--out", tmp_path, "--save-every", 1, "--max-steps", 6]
    done = forked(SCRIPT, *every, prepare=no_space)
    assert done.code == 2 and "could not be saved" in done.last_line
    assert f"not saved: {tmp_path}/step-000000003-epochs-0000.pt: [Errno 28]" in done.err
    assert len(records(tmp_path / "log.jsonl", "train")) == 6
    steps = [path.name[:14] for path in sorted(tmp_path.glob("step-*.pt"))]
    assert steps == ["step-000000001", "step-000000002"] and not [*tmp_path.glob("*.part")]


@pytest.mark.full
def test_a_process_that_hangs_ends_all_and_shows_where(small_run, tmp_path):
    more = ["--out", tmp_path, "--hang-timeout", 10]
    prepare = partial(signaled, signal.SIGSTOP, workers=False)
    ranks = started(2, SCRIPT, *small_run, *more, prepare=prepare)
    try:
        done = ranks[0].finish(120)
    finally:
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        ranks[1].finish(60)
    assert done.code == 1 and "Timeout (0:00:10)!" in done.err and "in main" in done.err


@pytest.mark.full
def test_torchrun_starts_killed_processes_again_and_is_killed_itself(small_run, tmp_path):
    """Elastic: all processes are new, and resume from the last checkpoint. When torchrun is killed,
    they save and end: else they would train on beside those of the next start. They listen on this
    machine only. (torchrun itself does not: no flag of its own keeps its store from all addresses.)

    `python tests/kills.py 20 --torchrun` kills more often, at random moments.
    """
    endless, log = [*small_run, "--epochs", 400], tmp_path / "log.jsonl"
    job = kills.torchrun(endless, tmp_path, 3)
    try:
        wait_for(log, 4)
        first = psutil.Process(job.pid).children()
        first[1].kill()
        wait_for(log, 5, starts=2)
        ranks = psutil.Process(job.pid).children()
        assert len(ranks) == 2 and not {*ranks} & {*first}
        for rank in ranks:
            connections = rank.net_connections("tcp")
            found = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
            assert found <= {"127.0.0.1", "::1"}, found
    finally:
        job.kill()
        job.wait()
    _, alive = psutil.wait_procs(ranks, 120)
    assert not alive
    *_, end = records(log, "end")
    last = records(log, "train")[-1]["step"]
    assert end["finished"] is False and end["step"] == last
    succeeded(*world(2, SCRIPT, *endless, "--out", tmp_path, "--max-steps", last + 1))
    steps = [step for event, step in numbers(tmp_path) if event == "train"]  # equal if repeated
    assert steps == [*range(1, last + 2)]


# Several machines


@pytest.mark.full
def test_a_machine_whose_network_is_cut(small_run, whole, tmp_path):
    """Both sides wait in vain, and end by themselves. The run can be resumed."""
    if reason := hosts.lacking():
        lacking(reason)
    log = tmp_path / "log.jsonl"
    flags = [*small_run, "--epochs", 400, "--save-every", 1, "--hang-timeout", 10]
    words = shlex.join(map(str, [sys.executable, SCRIPT, *flags, "--out", tmp_path]))
    with hosts.lab() as lab:
        port = {"MASTER_ADDR": "hosta", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        jobs = [
            lab.start(host, f"exec {words} >/dev/null 2>&1", port | local | {"RANK": str(rank)})
            for rank, host in enumerate(lab.hosts())
        ]
        wait_for(log, 4, alive=lambda: not any(job.poll() for job in jobs))
        lab.ip("hostb", "link set dev eth0 down")
        assert all(job.wait(120) for job in jobs)
    last = records(log, "train")[-1]["step"]
    more = ["--out", tmp_path, "--max-steps", last + 1]
    succeeded(*world(2, SCRIPT, *flags, *more))
    assert records(log, "start")[-1]["resumed"]
    assert records(log, "train")[-1]["step"] == last + 1
