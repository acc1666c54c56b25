"""imagenet.py: an interrupted run resumes bit for bit, whatever interrupted it."""

import errno
import os
import pickle
import random
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial

import hosts
import kills
import psutil
import pytest
import support
import torch
from kills import SCRIPT, numbers
from real import lacking
from spies import ALWAYS, at_calls, cannot
from support import (
    ROOT,
    Forked,
    forked,
    records,
    started,
    succeeded,
    wait_for,
    world,
    write_photos,
)

STEPS = 12  # of the small run's four epochs
refused = partial(support.refused, code=2)


@pytest.mark.full
def test_three_ranks_resume_bit_for_bit(small_run, tmp_path):
    """Their sums depend on the order, so on how DDP sorts the gradients; with two they do not.

    From within an epoch and from its end.
    """
    for out, steps in (("one", [5]), ("two", [2, 3, 5])):
        for step in steps:
            more = ["--out", tmp_path / out, "--max-steps", step]
            succeeded(*world(3, SCRIPT, *small_run, *more))
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")


@pytest.mark.parametrize("number", [signal.SIGUSR1, *support.full(signal.SIGHUP)])
def test_a_signal_stops_all_at_one_step(small_run, whole, tmp_path, number):
    """Sent to one rank; all save, end with exit code 75, and resume bit for bit."""
    ranks = started(2, SCRIPT, *small_run, "--out", tmp_path)
    wait_for(tmp_path / "log.jsonl", 2)
    for process in [*psutil.Process(ranks[1].process.pid).children(), ranks[1].process]:
        os.kill(process.pid, number)  # the loader's workers, too, as Slurm does
    ended = [rank.finish(60) for rank in ranks]
    assert [done.code for done in ended] == [75, 75], ended
    (end,) = records(tmp_path / "log.jsonl", "end")
    assert end["finished"] is False and 2 < end["step"] < STEPS
    succeeded(*world(2, SCRIPT, *small_run, "--out", tmp_path))
    assert numbers(tmp_path) == whole


@pytest.mark.full
def test_a_signal_cuts_an_evaluation_short(small_run, tmp_path):
    """The part so far is no result; the next start evaluates all images."""
    folder = write_photos(tmp_path / "photos")
    for path in [*folder.glob("val/*/*")]:
        for k in range(75):  # 1,350 images more
            (path.parent / f"{k}-{path.name}").symlink_to(path)
    here, out = [*small_run, "--data", folder, "--epochs", 2], tmp_path / "out"
    ranks = started(2, SCRIPT, *here, "--out", out)
    wait_for(out / "log.jsonl", 3)
    os.kill(ranks[1].process.pid, signal.SIGTERM)
    assert [rank.finish(60).code for rank in ranks] == [75, 75]
    assert not records(out / "log.jsonl", "eval")
    (end,) = records(out / "log.jsonl", "end")
    assert end["step"] == 3 and end["finished"] is False
    succeeded(*world(2, SCRIPT, *here, "--out", out, "--max-steps", 4))
    (line,) = records(out / "log.jsonl", "eval")
    assert line["epoch"] == 1 and line["images"] == 18 * 76


def signal_at_a_save(number):
    """Runs in the script's process: a file is written, but does not have its name yet."""
    at_calls({3}, "os.replace", lambda go, *paths: (os.kill(os.getpid(), number), go(*paths)))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_a_save(small_run, whole, tmp_path, number):
    """The file is whole or not there; after SIGTERM the run also saves where it stops."""
    every = [*small_run, "--out", tmp_path, "--save-every", 1]
    prepare = partial(signal_at_a_save, number)
    codes = [done.code for done in world(2, SCRIPT, *every, prepare=prepare)]
    assert codes == [75, 75] if number == signal.SIGTERM else codes[0] == -signal.SIGKILL
    parts, last = [*tmp_path.glob("*.part")], records(tmp_path / "log.jsonl", "train")[-1]["step"]
    assert len(parts) == (number == signal.SIGKILL) and last < STEPS
    succeeded(*world(2, SCRIPT, *every))
    assert numbers(tmp_path) == whole and not [*tmp_path.glob("*.part")]
    *_, start = records(tmp_path / "log.jsonl", "start")
    at = last - (number == signal.SIGKILL)  # the step whose file never got its name
    assert start["resumed"].startswith(f"step-{at:09}")


@pytest.mark.full
def test_three_kills_at_random_moments(small_run, whole, tmp_path):
    """`python tests/kills.py 500` does more of them; the seed is printed for a failure."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    begun = time.monotonic()
    succeeded(*world(2, SCRIPT, *small_run, "--out", tmp_path / "timed", "--save-every", 1))
    seconds = time.monotonic() - begun
    lives = [*kills.campaign(3, small_run, whole, seconds, tmp_path, seed)]
    assert lives[-1]["finished"] and lives[-1]["kill"] >= 3


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


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(small_run, whole, tmp_path):
    """The newest is cut short, the one before is empty, and in the next a bit is wrong."""
    every = [*small_run, "--out", tmp_path, "--save-every", 1, "--keep", 4]
    succeeded(*world(2, SCRIPT, *every, "--max-steps", 7))
    *_, last, other, newest = sorted(tmp_path.glob("step-*.pt"))
    data = newest.read_bytes()
    newest.write_bytes(data[: len(data) // 2])
    other.write_bytes(b"")
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    first, second = world(2, SCRIPT, *every)
    succeeded(first, second)
    assert all(f"not used: {path}" in first.err for path in (newest, other, last))
    *_, start = records(tmp_path / "log.jsonl", "start")
    assert start["resumed"] == "step-000000004-epochs-0001.pt"
    assert numbers(tmp_path) == whole
    found = {path.stem for path in tmp_path.glob("*.damaged")}
    assert found == {newest.stem, other.stem, last.stem}


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


@pytest.mark.full
def test_nothing_is_started_anew_where_no_checkpoint_is_whole(small_run, copy):
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


@pytest.mark.parametrize("flag, before", [("clip_grad", None), ("lr", 0.1)])
def test_a_flag_that_is_newer_than_the_checkpoint(small_run, copy, flag, before):
    """Its default counts: the run resumes with that, and not with another value."""
    for path in copy.glob("step-*.pt"):
        found = torch.load(path)
        found["settings"].pop(flag, None)
        found["settings"]["loader"] = "torch"  # a flag that no longer exists
        torch.save(found, path)
    done = forked(SCRIPT, *small_run, "--out", copy, "--max-steps", 3)
    if before:
        refused(done, f"--{flag} (was {before})")
    else:
        succeeded(done)
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


def unusual_file_system():
    """Runs in the script's process: it cannot sync a folder, nor remove one of the checkpoints."""

    def sync(fsync, file):
        (cannot(errno.EINVAL) if stat.S_ISDIR(os.fstat(file).st_mode) else fsync)(file)

    def remove(unlink, path, **more):
        (cannot(errno.EBUSY) if "step-000000001" in str(path) else partial(unlink, **more))(path)

    at_calls(ALWAYS, "os.fsync", sync)
    at_calls(ALWAYS, "os.unlink", remove)


@pytest.mark.full
def test_an_unusual_file_system_ends_nothing(small_run, tmp_path):
    """Each checkpoint counts as saved, and old ones are removed where that is possible."""
    every = [*small_run, "--out", tmp_path, "--save-every", 1, "--max-steps", 6, "--keep", 2]
    done = forked(SCRIPT, *every, prepare=unusual_file_system)
    succeeded(done)
    assert "not removed: [Errno 16]" in done.err and "not saved" not in done.err
    kept = [int(path.name[5:14]) for path in sorted(tmp_path.glob("step-*.pt"))]
    assert kept == [1, 5, 6]


@pytest.mark.full
def test_a_log_on_a_full_disk_ends_nothing(small_run, tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    done = forked(SCRIPT, *small_run, "--out", tmp_path, "--max-steps", 2)
    succeeded(done)
    assert f"not logged: {tmp_path}/log.jsonl: [Errno 28]" in done.err
    assert "train epoch=1 step=2" in done.out


@pytest.mark.full
def test_a_process_that_hangs_ends_all_and_shows_where(small_run, tmp_path):
    ranks = started(2, SCRIPT, *small_run, "--out", tmp_path, "--hang-timeout", 5)
    wait_for(tmp_path / "log.jsonl", 2)
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    try:
        done = ranks[0].finish(60)
    finally:
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        ranks[1].finish(60)
    assert done.code == 1 and "Timeout (0:00:05)!" in done.err and "in main" in done.err


def slow_phases():
    """Runs in the script's process: to list the files and to compile takes longer than a hang."""

    def find_classes(find, folder):
        assert os.environ["RANK"] == "0", "every rank lists the files"
        time.sleep(7 * ("train" in str(folder)))
        return find(folder)

    def compile(_, model):
        left = iter([7])
        model.register_forward_pre_hook(lambda *_: time.sleep(next(left, 0)))
        return model

    at_calls(ALWAYS, "torchvision.datasets.folder.find_classes", find_classes)
    at_calls({1}, "torch.compile", compile)


@pytest.mark.full
def test_a_slow_phase_is_no_hang(small_run, tmp_path):
    """Rank 0 lists the files and the others wait for it; then the first step compiles."""
    more = ["--out", tmp_path, "--hang-timeout", 5, "--max-steps", 2, "--compile"]
    succeeded(*world(2, SCRIPT, *small_run, *more, prepare=slow_phases))


@pytest.mark.full
def test_torchrun_starts_killed_processes_again(small_run, whole, tmp_path):
    """Elastic: all processes are new, and resume from the last checkpoint to the same end.

    `python tests/kills.py 20 --torchrun` does it more often, at random moments.
    """
    job = kills.torchrun(small_run, tmp_path, 3)
    try:
        wait_for(tmp_path / "log.jsonl", 4)
        psutil.Process(job.pid).children()[1].kill()
        assert job.wait(120) == 0
    finally:
        job.kill()
    assert len(records(tmp_path / "log.jsonl", "start")) == 2
    assert numbers(tmp_path) == whole


@pytest.mark.full
def test_when_torchrun_is_killed_its_processes_save_and_end(small_run, whole, tmp_path):
    """Else they would train on beside those of the next start. They listen on this machine only.
    (torchrun itself does not: no flag of its own keeps its store from all addresses.)
    """
    job = kills.torchrun(small_run, tmp_path, 0)
    try:
        wait_for(tmp_path / "log.jsonl", 2)
        ranks = psutil.Process(job.pid).children()
        for rank in ranks:
            listens_here_only(rank)
    finally:
        job.kill()
        job.wait()
    _, alive = psutil.wait_procs(ranks, 60)
    assert not alive
    (end,) = records(tmp_path / "log.jsonl", "end")
    assert end["finished"] is False
    succeeded(*world(2, SCRIPT, *small_run, "--out", tmp_path))
    assert numbers(tmp_path) == whole


# Several machines


@pytest.mark.full
def test_a_machine_whose_network_is_cut(small_run, whole, tmp_path):
    """Both sides wait in vain, end by themselves, and resume once the link is back."""
    if reason := hosts.lacking():
        lacking(reason)
    log = tmp_path / "log.jsonl"
    flags = [*small_run, "--out", tmp_path, "--save-every", 1, "--hang-timeout", 10]
    words = f"--nproc-per-node 1 --master-addr hosta {SCRIPT} {shlex.join(map(str, flags))}"
    with hosts.lab() as lab:

        def start() -> list[subprocess.Popen]:
            command = f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --node-rank"
            commands = [f"{command} {k} {words} >/dev/null 2>&1" for k in range(2)]
            return [lab.start(*one, {}) for one in zip(lab.hosts(), commands, strict=True)]

        jobs = start()
        wait_for(log, 4, alive=lambda: not any(job.poll() for job in jobs))
        lab.ip("hostb", "link set dev eth0 down")
        assert all(job.wait(120) for job in jobs)
        assert len(records(log, "start")) == 1 and records(log, "train")[-1]["step"] < STEPS
        lab.ip("hostb", "link set dev eth0 up")
        assert [job.wait(120) for job in start()] == [0, 0]
    assert records(log, "start")[-1]["resumed"] and numbers(tmp_path) == whole


def test_a_process_by_itself_listens_on_no_outside_address(small_run, tmp_path):
    job = Forked(SCRIPT, *small_run, "--epochs", 400, "--out", tmp_path)
    try:
        wait_for(tmp_path / "log.jsonl", 1)
        listens_here_only(psutil.Process(job.process.pid))
    finally:
        job.process.kill()
        job.finish()


def listens_here_only(process: psutil.Process) -> None:
    connections = process.net_connections("tcp")
    found = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert found <= {"127.0.0.1", "::1"}, found
