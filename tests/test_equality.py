"""The promise: every script trains the same samples to the same numbers."""

import os
import re
import runpy
from functools import cache, partial

import pytest
from real import EPOCH, STEPS, Trained, as_srun, doubles, epoch_oracle, exact_oracle, short, train
from support import ORACLE, ROOT, STRICT, forked, python, torchrun, world

# How two processes of each are started. test_slurm.py, test_apex.py and test_horovod.py have the
# launchers and the libraries that may have to be installed.
TWO = {
    "mnmc_ddp_launch.py": partial(torchrun, 2, PYTHONWARNINGS=STRICT),
    "mnmc_ddp_mp.py": partial(python, PYTHONWARNINGS=STRICT),
    "mnmc_ddp_slurm.py": partial(as_srun, 2),
}
two_processes = pytest.mark.parametrize("script", TWO)


@cache
def epoch(script: str) -> Trained:
    """An epoch: with two processes if the script knows processes, otherwise one."""
    return train(TWO.get(script, forked), script, *EPOCH)


@two_processes
def test_two_processes_train_what_the_oracle_trains(script):
    """Bit for bit over an epoch, with augmentation and BatchNorm: a sum of two has one order."""
    assert len(epoch(script).losses) == STEPS
    epoch(script).equals(epoch_oracle(2))


def test_one_process_trains_what_the_oracle_trains():
    """Bit for bit. The oracle shares no code with the scripts, and augments image by image."""
    assert len(epoch("snsc.py").losses) == STEPS
    epoch("snsc.py").equals(epoch_oracle(1))


def test_dataparallel_trains_what_one_process_trains():
    """Bit for bit, without a GPU to split a batch over."""
    epoch("snmc_dp.py").equals(epoch("snsc.py"))


def test_the_oracle_of_two_is_not_what_one_process_trains():
    """BatchNorm normalizes other groups. Otherwise the tests above could not tell them apart."""
    assert epoch_oracle(2).losses != pytest.approx(epoch_oracle(1).losses, rel=1e-3)


@pytest.mark.parametrize("script", [*TWO, "snsc.py", "snmc_dp.py"])
def test_printed_lines_are_the_records_with_nine_digits(script):
    """`event key=value ...`: start, every step, one evaluation, end. Only rank 0 prints."""
    run, lines = epoch(script), epoch(script).out.splitlines()
    assert [line.split()[0] for line in lines] == ["start", *["train"] * STEPS, "eval", "end"]
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
    assert f"lr={0.01} " in lines[0] and "dataset=fashion-mnist " in lines[0]
    assert ("world_size=2 " in lines[0]) == (script in TWO)
    assert re.fullmatch(r"end peak_gpu_memory_mib=0", lines[-1])


@pytest.mark.parametrize("script", [*TWO, "snmc_dp.py"])
def test_all_checkpoints_are_alike(script):
    """A script can resume the file of any other: the same names, and one momentum per weight."""
    saved, plain = epoch(script).saved, epoch("snsc.py").saved
    assert [*saved] == ["model", "optimizer", "epoch"] and saved["epoch"] == 1
    assert [*saved["model"]] == [*plain["model"]]
    assert saved["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
    momenta = saved["optimizer"]["state"]
    assert len(momenta) == len(saved["optimizer"]["param_groups"][0]["params"]) > 100
    assert all([*state] == ["momentum_buffer"] for state in momenta.values())


def different_weights() -> None:
    """Runs in the script's process: each process begins with its own weights."""
    import torch

    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + 7 * int(os.environ["RANK"]))


def test_all_ranks_begin_with_the_weights_of_rank_0():
    oracle = train(forked, ORACLE, *short(), "--parts", 2)
    script = "mnmc_ddp_launch.py"
    train(partial(world, 2), script, *short(), prepare=different_weights).equals(oracle)


def test_four_processes_train_what_the_oracle_trains():
    """In double precision, where the order of a sum of four hardly matters."""
    four = train(partial(world, 4), "mnmc_ddp_launch.py", *short(), prepare=doubles)
    four.equals(exact_oracle(4), rel=1e-8)


@pytest.mark.full
def test_four_spawned_processes_train_what_four_launched_ones_train():
    """Bit for bit."""
    spawned = train(python, "mnmc_ddp_mp.py", *short(), "--nproc-per-node", 4)
    spawned.equals(train(partial(world, 4), "mnmc_ddp_launch.py", *short()))


def test_a_run_can_be_repeated_and_another_seed_is_another_run(small):
    """The seed decides the weights, the order and the crops."""
    first = train(forked, "snsc.py", *small)
    assert len(first.losses) == 10
    train(forked, "snsc.py", *small).equals(first)
    assert train(forked, "snsc.py", *small, "--seed", 1).losses != first.losses


@pytest.mark.full
def test_the_number_of_loader_workers_changes_nothing(photos):
    """Files are decoded in this process, by two workers, by three."""
    runs = [train(forked, "snsc.py", *photos, "--workers", k, classes=3) for k in (0, 2, 3)]
    assert len(runs[0].losses) == 6
    runs[1].equals(runs[0])
    runs[2].equals(runs[0])


def test_photographs_in_two_processes_are_those_of_the_oracle(photos):
    """Decoded, cropped and dealt to the ranks: the oracle reads each by itself."""
    script = "mnmc_ddp_launch.py"
    two = train(partial(world, 2), script, *photos, "--workers", 2, classes=3)
    two.equals(train(forked, ORACLE, *photos, "--parts", 2, classes=3))
    assert len(two.losses) == 6 and [line["images"] for line in two.evaluations] == [18, 18]


def test_augment_shifts_and_flips_as_the_draws_say():
    """Each image by its own row of draws. Every shift occurs, and both directions."""
    import torch

    augment = runpy.run_path(str(ROOT / "snsc.py"))["augment"]
    images = torch.arange(2000 * 3 * 32 * 32).remainder(251).byte().view(2000, 3, 32, 32)
    draws = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0))
    whole = augment(images, draws)
    some = torch.tensor([7, 3, 1999])
    assert whole[some].equal(augment(images[some], draws[some]))
    assert not whole.equal(augment(images, draws.flip(0)))
    assert len(whole.unique(dim=0)) > 1900
    still = torch.full((2000, 3), 0.5)  # the middle one of 9 x 9 crops; 0.5 does not flip
    assert augment(images, still).equal(images)
    still[:, 2] = 0.49
    assert augment(images, still).equal(images.flip(3))
    # A white dot in the middle goes to each of 9 x 9 places; what comes in is black.
    dot = torch.zeros(2000, 3, 33, 33, dtype=torch.uint8)
    dot[:, :, 16, 16] = 255
    moved = augment(dot, draws)
    assert moved.sum(dim=(1, 2, 3), dtype=torch.int64).eq(3 * 255).all()
    places = moved[:, 0].flatten(1).argmax(1).unique()
    rows, columns = places // 33, places % 33
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (12, 20, 12, 20)
    assert len(places) == 81
