"""--save and --resume: the same digits after a resume; a crash while saving keeps the old file."""

import os
import resource
import signal
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from real import Trained, as_srun, folder, short, train
from support import forked, full, python, succeeded, world

# How each script is started, and the script whose file it resumes, as both train the same.
STARTS = {
    "snsc.py": (forked, "snsc.py"),
    "snmc_dp.py": (forked, "snsc.py"),
    "mnmc_ddp_launch.py": (partial(world, 2), "mnmc_ddp_launch.py"),
    "mnmc_ddp_mp.py": (python, "mnmc_ddp_launch.py"),
    "mnmc_ddp_slurm.py": (partial(as_srun, 2), "mnmc_ddp_launch.py"),
    "techniques/cpu_offload.py": (partial(world, 2), "mnmc_ddp_launch.py"),
    "techniques/parameter_server.py": (partial(world, 3), "techniques/parameter_server.py"),
    "techniques/optimizer_in_backward.py": (partial(world, 2), "mnmc_ddp_launch.py"),
    "techniques/model_parallel.py": (forked, "snsc.py"),
}

DEFAULT = ("snsc.py", "mnmc_ddp_launch.py")  # without --full


@cache
def half(script: str) -> Path:
    """The checkpoint after the first of two epochs."""
    path = folder() / f"half-{Path(script).stem}.pt"
    run = train(STARTS[script][0], script, *short(), "--epochs", 1)
    torch.save(run.saved, path)
    return path


@cache
def whole(script: str) -> Trained:
    """Both epochs at once."""
    return train(STARTS[script][0], script, *short())


def same(one, other) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def second_epoch(run: Trained) -> list[tuple]:
    """The step or event, the loss and the accuracy of the second epoch's records."""
    found = [line for line in run.records if line.get("epoch") == 2]
    return [(line.get("step"), line["loss"], line["accuracy"]) for line in found]


@pytest.mark.parametrize(
    "script",
    [*DEFAULT, *full(*(s for s in STARTS if s not in DEFAULT))],
)
def test_a_resumed_run_goes_on_with_the_same_digits(script):
    """Also from the file of another script: losses, evaluation, weights and momentum are those of
    a run that was not interrupted. No step of the first epoch is trained again.
    """
    start, other = STARTS[script]
    run = train(start, script, *short(), "--resume", half(other))
    assert not [line for line in run.records if line.get("epoch") == 1]
    assert [step for step, *_ in second_epoch(run)] == [4, 5, 6, None]
    assert second_epoch(run) == second_epoch(whole(other))
    assert same(run.saved, whole(other).saved) and run.saved["epoch"] == 2


@pytest.mark.parametrize("file", ["snsc.py", "mnmc_ddp_launch.py"])
def test_one_process_resumes_what_two_have_trained_and_the_reverse(file):
    """snsc.py and a single rank of mnmc_ddp_launch.py go on alike from either file."""
    flags = [*short(), "--resume", half(file)]
    plain = train(forked, "snsc.py", *flags)
    single = train(partial(world, 1), "mnmc_ddp_launch.py", *flags)
    assert second_epoch(plain) == second_epoch(single) and same(plain.saved, single.saved)


def test_without_epochs_left_nothing_is_trained():
    """--epochs counts those of the first run, too."""
    run = forked("snsc.py", *short(), "--epochs", 1, "--resume", half("snsc.py"))
    succeeded(run)
    assert [line.split()[0] for line in run.out.splitlines()] == ["start", "end"]


def killed_while_saving() -> None:
    """Runs in the script's process: in its second save it writes a half file, and is killed."""
    save, calls = torch.save, []

    def cut_short(state, path):
        calls.append(path)
        if len(calls) == 1:
            return save(state, path)
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = cut_short


def test_a_kill_while_saving_leaves_the_old_file(tmp_path):
    """The file is that of the first epoch. The script has made its folder."""
    file = tmp_path / "new" / "checkpoint.pt"
    done = forked("snsc.py", *short(), "--save", file, prepare=killed_while_saving)
    assert done.code == -signal.SIGKILL
    assert same(torch.load(file), torch.load(half("snsc.py")))


def test_a_full_disk_while_saving_leaves_the_old_file(tmp_path):
    """PyTorch's own message says what is wrong."""
    file = tmp_path / "checkpoint.pt"
    file.write_text("old")
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    done = forked("snsc.py", *short(), "--save", file, prepare=full)
    assert done.code == 1 and "Error" in done.last_line and not done.timed_out
    assert file.read_text() == "old"
