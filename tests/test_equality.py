"""The promise: every script trains the same samples to the same numbers."""

import os
import runpy
import time
from dataclasses import dataclass

import pytest
from support import (
    ORACLE,
    ROOT,
    STRICT,
    checkpoint,
    forked,
    python,
    records,
    succeeded,
    torchrun,
    world,
)


@dataclass
class Trained:
    """What is compared of a run: its losses, step by step, its evaluations and its weights."""

    losses: list[float]
    evaluations: list[dict]
    weights: dict

    def distance(self, other: "Trained") -> float:
        """The largest difference of two weights (or averages of BatchNorm) in the same place."""
        assert self.weights.keys() == other.weights.keys()
        pairs = [(value, other.weights[name]) for name, value in self.weights.items()]
        return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs a script, by python, torchrun or forked, and gives back what it trained."""

    def train(start, script, *flags, classes=10, **keywords) -> Trained:
        folder = tmp_path_factory.mktemp("run")
        log, weights = folder / "log.json", folder / "weights.pt"
        succeeded(start(script, *flags, "--log-json", log, "--save", weights, **keywords))
        steps = records(log, "train")
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        losses = [step["loss"] for step in steps]
        return Trained(losses, records(log, "eval"), checkpoint(weights, classes))

    return train


def by_torchrun(script, *flags, size, **env):
    return torchrun(size, script, *flags, **env)


def in_a_world(script, *flags, size, **keywords):
    first, *others = world(size, script, *flags, **keywords)
    succeeded(*others)
    return first


def compare(got: Trained, exact: Trained, rel: float = 0) -> None:
    """The same losses, weights and evaluations, to a relative tolerance or to the last bit.

    The oracle evaluates in other batches, so that the sum of the losses has another order.
    """
    assert len(exact.losses) == 10  # two epochs
    assert got.losses == pytest.approx(exact.losses, rel=rel, abs=0)
    assert got.distance(exact) <= 100 * rel
    for ours, theirs in zip(got.evaluations, exact.evaluations, strict=True):
        assert (ours["accuracy"], ours["images"]) == (theirs["accuracy"], 101)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@pytest.fixture(scope="module")
def exact(train, small) -> Trained:
    """What two processes must train, from independent code."""
    return train(forked, ORACLE, *small, "--parts", 2)


def test_two_processes_of_torchrun_train_what_the_oracle_trains(exact, train, small):
    """Bit for bit, with augmentation and BatchNorm: a sum of two has one order."""
    script = "mnmc_ddp_launch.py"
    compare(train(by_torchrun, script, *small, size=2, PYTHONWARNINGS=STRICT), exact)


def test_two_spawned_processes_train_what_the_oracle_trains(exact, train, small):
    flags = [*small, "--nproc-per-node", 2]
    compare(train(python, "mnmc_ddp_mp.py", *flags, PYTHONWARNINGS=STRICT), exact)


def different_weights() -> None:
    """Runs in the script's process: each process begins with weights of its own."""
    import torch

    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + 7 * int(os.environ["RANK"]))


def test_the_weights_are_those_of_process_0(exact, train, small):
    """Processes that begin with other weights train the same."""
    script = "mnmc_ddp_launch.py"
    compare(train(in_a_world, script, *small, size=2, prepare=different_weights), exact)


def doubles() -> None:
    """Runs in the script's process: it computes in double precision."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double


def test_four_processes_train_what_the_oracle_trains(train, small):
    """In double precision: the sums of four have another order, and BatchNorm makes such a
    difference grow tenfold a step, so that ten steps in single precision would compare noise.
    """
    four = train(in_a_world, "mnmc_ddp_launch.py", *small, size=4, prepare=doubles)
    compare(four, train(forked, ORACLE, *small, "--parts", 4, prepare=doubles), rel=1e-10)


def test_four_processes_in_single_precision(train, small):
    """Both ways to start them agree to the last bit, and with the oracle until noise has grown."""
    spawned = train(python, "mnmc_ddp_mp.py", *small, "--nproc-per-node", 4)
    launched = train(in_a_world, "mnmc_ddp_launch.py", *small, size=4)
    compare(spawned, launched)
    exact = train(forked, ORACLE, *small, "--parts", 4)
    assert launched.losses[:3] == pytest.approx(exact.losses[:3], rel=1e-5)


@pytest.fixture(scope="module")
def plain(train, small) -> Trained:
    return train(forked, "snsc.py", *small)


def test_one_process_trains_what_the_oracle_trains(plain, train, small):
    """Bit for bit: the oracle shares no code with it, and cuts out and flips image by image."""
    compare(plain, train(forked, ORACLE, *small, "--parts", 1))


def test_the_oracle_of_two_is_not_what_one_process_trains(exact, plain):
    """BatchNorm sees other groups: else the tests above could not tell them apart."""
    assert exact.losses != pytest.approx(plain.losses, rel=1e-3)


def test_dataparallel_trains_what_one_process_trains(plain, train, small):
    """Bit for bit, where there is no GPU to split a batch over."""
    compare(train(forked, "snmc_dp.py", *small), plain)


def test_a_run_can_be_repeated_and_another_seed_is_another_run(plain, train, small):
    """The seed decides the weights, the order and the crops, and nothing else does."""
    assert train(forked, "snsc.py", *small).losses == plain.losses
    assert train(forked, "snsc.py", *small, "--seed", 1).losses != plain.losses


def test_the_number_of_loader_workers_changes_nothing(train, photos):
    """Files decoded in this process, by two workers, and by three."""
    counts = (0, 2, 3)
    runs = [train(forked, "snsc.py", *photos, "--workers", k, classes=3) for k in counts]
    assert len(runs[0].losses) == 6
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].distance(runs[1]) == runs[0].distance(runs[2]) == 0


def test_photographs_in_two_processes_are_those_of_the_oracle(train, photos):
    """Decoded, cropped and shared out: the oracle reads each by itself."""
    script = "mnmc_ddp_launch.py"
    two = train(in_a_world, script, *photos, "--workers", 2, size=2, classes=3)
    exact = train(forked, ORACLE, *photos, "--parts", 2, classes=3)
    assert two.losses == exact.losses and len(exact.losses) == 6
    assert two.distance(exact) == 0
    hits = [[(e["accuracy"], e["images"]) for e in run.evaluations] for run in (two, exact)]
    assert hits[0] == hits[1] and {images for _, images in hits[0]} == {18}


def test_the_two_scripts_log_the_same_fields(small, tmp_path):
    """Each record has its time; DDP's `start` says more, and no record of it less."""
    logs, begin = [tmp_path / "one.json", tmp_path / "two.json"], time.time()
    flags = [*small, "--max-steps", 1, "--log-json"]
    succeeded(forked("snsc.py", *flags, logs[0]))
    succeeded(*world(2, "mnmc_ddp_launch.py", *flags, logs[1]))
    one, two = map(records, logs)
    assert (
        [r["event"] for r in one] == [r["event"] for r in two] == ["start", "train", "eval", "end"]
    )
    times = [r["time"] for r in one + two]
    assert times == sorted(times) and begin <= times[0] and times[-1] <= time.time()
    assert two[0].keys() - one[0].keys() == {"backend", "world_size", "local_batch"}
    assert [r.keys() for r in one[1:]] == [r.keys() for r in two[1:]]
    assert "startup_seconds" not in one[0].keys() | two[0].keys()
    assert (two[0]["backend"], two[0]["world_size"], two[0]["local_batch"]) == ("gloo", 2, 32)


def test_an_image_is_augmented_alike_in_whatever_batch_it_comes():
    """As its own numbers say; others in another epoch. Every shift comes, and both ways round."""
    import torch

    script = runpy.run_path(str(ROOT / "snsc.py"))
    augment, draw = script["augment"], script["draw_augmentation"]
    images = torch.arange(2000 * 3 * 32 * 32).remainder(251).byte().view(2000, 3, 32, 32)
    draws = draw(2000, 0, 1)
    whole = augment(images, draws)
    some = torch.tensor([7, 3, 1999])
    assert whole[some].equal(augment(images[some], draws[some]))
    assert not whole.equal(augment(images, draw(2000, 0, 2)))
    assert not whole.equal(augment(images, draw(2000, 1, 1)))
    assert len(whole.unique(dim=0)) > 1900 and 0.4 < (draws[:, 2] < 0.5).float().mean() < 0.6
    # A white dot in the middle goes to each of 9 x 9 places, black comes in, and nothing else.
    dot = torch.zeros(2000, 3, 33, 33, dtype=torch.uint8)
    dot[:, :, 16, 16] = 255
    moved = augment(dot, draws)
    assert moved.sum(dim=(1, 2, 3), dtype=torch.int64).eq(3 * 255).all()
    places = moved[:, 0].flatten(1).argmax(1).unique()
    rows, columns = places // 33, places % 33
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (12, 20, 12, 20)
    assert len(places) == 81
