"""--save and --resume: the same digits after a resume; a crash while saving keeps the old file."""

import os
import resource
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from real import FLAGS, Trained, data, doubles, folder, more_models, short, small_models, train
from spies import at_calls
from support import forked, full, succeeded, world

DDP = "mnmc_ddp_launch.py"
# Models and epochs. FSDP is slow where there are many tensors: resnet10 has few. The last two are
# in double precision. The head of vit_tiny begins with zeros, so in step 1 no gradient leaves it:
# hence the learning rate.
LITTLE = [*FLAGS, "--data", data(), "--image-size", 16, "--images", 128, 32]
KINDS = {
    "small": short(),
    "resnet10": [*LITTLE, "--arch", "resnet10"],
    "exact": short(),
    "vit_tiny": [*FLAGS, "--data", data(), "--images", 128, 32, "--arch", "vit_tiny", "--lr", 0.05],
}


class How(NamedTuple):
    """How a script is started, and the script whose file it resumes, as both train the same.

    losses, weights: how far it may be off.
    """

    start: Callable = partial(world, 2)
    other: str = DDP
    kind: str = "small"
    flags: tuple = ()
    losses: float = 0
    weights: float = 0


LAYERS = How(kind="vit_tiny", losses=1e-12, weights=1e-12)
HOWS = {  # all that save or resume in ways of their own
    "snsc.py": How(forked, "snsc.py"),
    DDP: How(),
    "techniques/cpu_offload.py": How(),
    "techniques/optimizer_in_backward.py": How(),
    "techniques/zero1.py": How(),
    "techniques/parameter_server.py": How(partial(world, 3), "techniques/parameter_server.py"),
    "techniques/channels_last.py": How(kind="exact", losses=1e-8, weights=1e-8),
    "techniques/uneven_inputs.py": How(
        other="techniques/uneven_inputs.py", flags=("--extra-images", 64)
    ),
    # The scaler begins with a factor that overflows. The file has the one that was found.
    "techniques/amp.py": How(other="techniques/amp.py", flags=("--amp", "fp16")),
    "techniques/fsdp.py": How(other="techniques/fsdp.py", kind="resnet10"),
    "techniques/custom_optimizer.py": How(
        other="techniques/custom_optimizer.py",
        kind="resnet10",
        flags=("--trust", 0, "--schedule", "constant"),
    ),
    # pipeline_by_hand.py saves alike: test_pipeline.py
    "techniques/pipeline.py": How(other="techniques/pipeline.py", losses=1e-6),
    "techniques/tensor_parallel_by_hand.py": LAYERS,
    "techniques/tensor_parallel.py": LAYERS,
}
DEFAULT = ("snsc.py", DDP)  # without --full


def go(script: str, kind: str, *more) -> Trained:
    how = HOWS[script]
    prepare = {"resnet10": more_models, "exact": doubles, "vit_tiny": small_models}.get(kind)
    start = partial(how.start, prepare=prepare) if prepare else how.start
    return train(start, script, *KINDS[kind], *how.flags, *more)


@cache
def half(script: str, kind: str = "small") -> Path:
    """The checkpoint after the first of two epochs."""
    path = folder() / f"half-{kind}-{Path(script).stem}.pt"
    torch.save(go(script, kind, "--epochs", 1).saved, path)
    return path


@cache
def whole(script: str, kind: str = "small") -> Trained:
    """Both epochs at once."""
    return go(script, kind)


def same(one, other, off: float = 0) -> bool:
    """Whether two states are equal; off: how far the numbers of tensors may be."""
    if isinstance(one, torch.Tensor):
        alike = type(one) is type(other) and (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and torch.allclose(one, other, rtol=off, atol=off)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], off) for key in one)
    return one == other


def numbers(saved: dict) -> dict:
    """Of a file, all but the options of its optimizer, which has other ones with other kernels."""
    return {"model": saved["model"], "momentum": saved["optimizer"]["state"]}


def second_epoch(run: Trained) -> list[tuple]:
    """The event and step, the accuracy and the loss of the second epoch's records."""
    found = [line for line in run.records if line.get("epoch") == 2]
    return [(line["event"], line.get("step"), line["accuracy"], line["loss"]) for line in found]


def goes_on(run: Trained, right: Trained, losses: float = 0, weights: float = 0) -> None:
    """Asserts that a resumed run trained and saved what one did that was not interrupted: no step
    of the first epoch, then the same losses, evaluation, weights and momentum.
    """
    assert not [line for line in run.records if line.get("epoch") == 1]
    for (*what, found), (*expected, loss) in zip(
        second_epoch(run), second_epoch(right), strict=True
    ):
        assert what == expected and found == pytest.approx(loss, rel=losses, abs=0)
    assert len(second_epoch(run)) >= 3
    assert same(numbers(run.saved), numbers(right.saved), weights) and run.saved["epoch"] == 2
    assert [*run.saved] == [*right.saved]
    assert run.saved.get("scaler") == right.saved.get("scaler")  # amp.py's


@pytest.mark.parametrize("script", [*DEFAULT, *full(*(s for s in HOWS if s not in DEFAULT))])
def test_a_resumed_run_goes_on_with_the_same_digits(script):
    """From its own file, or from that of another script, whose names and numbers it has."""
    how = HOWS[script]
    run = go(script, how.kind, "--resume", half(how.other, how.kind))
    goes_on(run, whole(how.other, how.kind), how.losses, how.weights)


@pytest.mark.full
@pytest.mark.parametrize("script", ["techniques/fsdp.py", "techniques/channels_last.py"])
def test_ddp_and_a_script_with_other_kernels_resume_each_others_files(script):
    """Names and shapes are the same, and the numbers but for the kernels' rounding, which cannot be
    seen until the second step. Fused SGD ignores the layout: with momentum in another one than its
    weight, DDP would train on, and wrongly.
    """
    kind = HOWS[script].kind
    mine, ddps = (torch.load(half(one, kind)) for one in (script, DDP))
    assert same(numbers(mine), numbers(ddps), 1e-4)
    there = go(DDP, kind, "--resume", half(script, kind))
    back = go(script, kind, "--resume", half(DDP, kind))
    for run, whole_run in ((there, whole(script, kind)), (back, whole(DDP, kind))):
        found, right = second_epoch(run), second_epoch(whole_run)
        assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in right], rel=1e-5)


def test_the_files_learning_rate_replaces_the_flags():
    run = go("snsc.py", "small", "--resume", half("snsc.py"), "--lr", 1)
    goes_on(run, whole("snsc.py"))


def test_one_process_resumes_what_two_have_trained():
    """snsc.py and a single rank of mnmc_ddp_launch.py go on alike."""
    flags = [*short(), "--resume", half(DDP)]
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

    def cut_short(save, state, path):
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    at_calls({2}, "torch.save", cut_short)


def test_a_kill_while_saving_leaves_the_old_file(tmp_path):
    """The file is that of the first epoch. The script has made its folder."""
    file = tmp_path / "new" / "checkpoint.pt"
    done = forked("snsc.py", *short(), "--save", file, prepare=killed_while_saving)
    assert done.code == -signal.SIGKILL
    assert same(torch.load(file), torch.load(half("snsc.py")))


def test_a_full_disk_while_saving_leaves_the_old_file(tmp_path):
    """The last line names the file, and half a file does not keep the disk full."""
    file = tmp_path / "checkpoint.pt"
    file.write_text("old")
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    done = forked("snsc.py", *short(), "--save", file, prepare=full)
    assert done.code == 1 and not done.timed_out
    assert done.last_line.startswith(f"{file}: not saved, is the disk full?")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]
