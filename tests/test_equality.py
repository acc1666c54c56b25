"""The promise: every script trains the same samples to the same numbers."""

import os
import re
from functools import cache, partial

import pytest
from real import (
    ARCH,
    EPOCH,
    STEPS,
    Trained,
    as_srun,
    epoch_oracle,
    oracle,
    short,
    small_models,
    train,
    unfused,
)
from support import ORACLE, STRICT, forked, full, torchrun, world

from bench import ladder
from mistakes.page import divided

# How each is started, if not as one process or as two of torchrun's. test_slurm.py, test_apex.py,
# test_horovod.py and test_libraries.py have what may have to be installed.
STARTS = {
    "mnmc_ddp_launch.py": partial(torchrun, 2, PYTHONWARNINGS=STRICT),
    "mnmc_ddp_mp.py": partial(forked, PYTHONWARNINGS=STRICT),  # for the two that it starts
    "mnmc_ddp_slurm.py": partial(as_srun, 2),
    "techniques/parameter_server.py": partial(world, 3),  # a server and two workers
}
TWO = [*STARTS][:3]


def right(script: ladder.Script, longer: bool = False) -> Trained:
    """The oracle's run with the flags of the script's."""
    parts, flags = script.ranks if script.processes else 1, divided(script.equality)[0]
    if longer:
        return epoch_oracle(parts, script.split, *script.oracle, *flags)
    return oracle(parts, "--split", script.split, *script.oracle, *flags)


@cache
def right_unfused() -> Trained:
    return train(forked, ORACLE, *short(), "--parts", 2, prepare=unfused)


# A script, its flags, and whose numbers it must have. Other tests have the techniques that need a
# tolerance, or another model.
EXACTLY = {path: script for path, script in ladder.SCRIPTS.items() if script.equality is not None}
RUNS = [
    *((path, script.equality, partial(right, script)) for path, script in EXACTLY.items()),
    *full(("techniques/fsdp.py", (), right_unfused)),
]


@cache
def trained(script: str, *flags) -> Trained:
    start = partial(world, 2) if ladder.SCRIPTS[script].processes else forked
    return train(STARTS.get(script, start), script, *short(), *flags)


@pytest.mark.parametrize(("script", "flags", "right"), RUNS)
def test_it_trains_what_the_oracle_trains(script, flags, right):
    """Bit for bit over two epochs, with augmentation, and BatchNorm's running statistics: a sum of
    two numbers has one order. The oracle shares no code with the scripts, and augments image by
    image.
    """
    run = trained(script, *flags)
    assert len(run.losses) == 6
    run.equals(right())


@pytest.mark.full
@pytest.mark.parametrize("script", [*EXACTLY])
def test_a_longer_epoch_is_the_oracles(script):
    """39 steps, as the README says; Horovod, Apex and Slurm's srun have tests of their own."""
    found = ladder.SCRIPTS[script]
    start = partial(world, 2) if found.processes else forked
    run = train(STARTS.get(script, start), script, *EPOCH, *found.equality)
    assert len(run.losses) == STEPS
    run.equals(right(found, longer=True))


def test_the_oracle_of_two_is_not_what_one_process_trains():
    """BatchNorm normalizes other groups. Otherwise the tests above could not tell them apart."""
    assert oracle(2).losses != pytest.approx(oracle(1).losses, rel=1e-3)


@pytest.mark.parametrize("script", ["snsc.py", *TWO])
def test_printed_lines_are_the_records_with_nine_digits(script):
    """`event key=value ...`: start, each epoch's steps and evaluation, end. Only rank 0 prints."""
    run, lines = trained(script), trained(script).out.splitlines()
    epoch = ["train", "train", "train", "eval"]
    assert [line.split()[0] for line in lines] == ["start", *epoch, *epoch, "end"]
    flags = {"dataset", "batch_size", "epochs", "lr", "arch", "save", "resume", "workers"}
    measured = {"loss", "accuracy", "images", "seconds", "images_per_second"}
    expected = {"start": flags, "train": measured | {"epoch", "step"}, "eval": measured | {"epoch"}}
    for line, record in zip(lines, run.records, strict=True):
        event, *pairs = line.split()
        found = dict(pair.split("=", 1) for pair in pairs)
        assert event == record["event"] and expected.get(event, set()) <= found.keys()
        if event in ("train", "eval"):
            assert found.keys() == expected[event]
            for name in ("loss", "accuracy"):
                assert re.fullmatch(r"\d+(\.\d+)?", found[name])
                assert found[name] == f"{record[name]:.9g}"
    assert "lr=0.005 " in lines[0] and "dataset=fashion-mnist " in lines[0]
    assert ("world_size=2 " in lines[0]) == (script in TWO)
    assert re.fullmatch(r"end peak_gpu_memory_mib=0", lines[-1])


def different_weights() -> None:
    """Runs in the script's process: each process begins with its own weights."""
    import torch

    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + 7 * int(os.environ["RANK"]))


def test_all_ranks_begin_with_the_weights_of_rank_0():
    script = "mnmc_ddp_launch.py"
    train(partial(world, 2), script, *short(), prepare=different_weights).equals(oracle(2))


# A script, its processes, its flags, and the tolerance.
ROWS = ("--batch-size", 33, "--images", 99, 100, "--epochs", 1)
ROWS += ("--image-size", 16, "--arch", "resnet10")  # few tensors; rows do not divide by 3
EXACT = [
    ("mnmc_ddp_launch.py", 4, ("--epochs", 1), 1e-8),
    # Of the 100 test images, the first rank has 34 in 4 batches, and the others 33 in 3.
    *full(("techniques/fsdp.py", 3, ROWS, 1e-10)),
]


@pytest.mark.parametrize(("script", "size", "flags", "tolerance"), EXACT)
def test_more_processes_train_what_the_oracle_trains(script, size, flags, tolerance):
    """In double precision, where the order of a sum of more than two numbers hardly matters."""
    flags = [*short(), *flags]
    run = train(partial(world, size), script, *flags, prepare=small_models)
    run.equals(train(forked, ORACLE, *flags, "--parts", size, prepare=small_models), rel=tolerance)


def test_the_seed_decides_the_weights_the_order_and_the_crops():
    seed = ["--seed", 1]
    train(forked, "snsc.py", *short(), *seed).equals(oracle(1, *seed))
    assert oracle(1, *seed).losses[0] != oracle(1).losses[0]


def test_photographs_in_two_processes_are_those_of_the_oracle(photos):
    """Decoded, cropped and dealt to the ranks: the oracle reads each by itself."""
    script = "mnmc_ddp_launch.py"
    small = [*photos, "--arch", ARCH]
    two = train(partial(world, 2), script, *small, "--workers", 2, classes=3)
    two.equals(train(forked, ORACLE, *small, "--parts", 2, classes=3))
    assert len(two.losses) == 6 and [line["images"] for line in two.evaluations] == [18, 18]
