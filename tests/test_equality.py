"""The promise: every script trains the same samples to the same numbers."""

from dataclasses import dataclass

import pytest
from support import ORACLE, STRICT, forked, python, records, succeeded, torchrun


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

    def train(start, script, *flags, **keywords) -> Trained:
        import torch

        folder = tmp_path_factory.mktemp("run")
        log, weights = folder / "log.json", folder / "weights.pt"
        succeeded(start(script, *flags, "--log-json", log, "--save", weights, **keywords))
        steps = records(log, "train")
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        losses = [step["loss"] for step in steps]
        return Trained(losses, records(log, "eval"), torch.load(weights))

    return train


@pytest.fixture(scope="module", params=[2, 4], ids="{}_processes".format)
def oracle(request, train, small):
    """World size, and what one process gets that accumulates over the parts of each batch."""
    return request.param, train(forked, ORACLE, *small, "--accum-steps", request.param)


def by_torchrun(script, *flags, size, **env):
    return torchrun(size, script, *flags, **env)


@pytest.mark.parametrize("script", ["mnmc_ddp_launch.py", "mnmc_ddp_mp.py"])
def test_processes_train_what_the_oracle_trains(script, oracle, train, small):
    """Losses, weights and evaluations over two epochs, with augmentation and BatchNorm."""
    size, exact = oracle
    start, flags, keywords = by_torchrun, small, {"size": size}
    if script == "mnmc_ddp_mp.py":
        start, flags, keywords = python, [*small, "--nproc-per-node", size], {}
    got = train(start, script, *flags, PYTHONWARNINGS=STRICT, **keywords)
    assert len(exact.losses) == 10 and exact.losses[-1] < exact.losses[0]
    if size == 2:  # a sum of two has one order
        assert got.losses == exact.losses
    assert got.losses == pytest.approx(exact.losses, rel=1e-5)
    assert got.distance(exact) <= 1e-6
    for ours, theirs in zip(got.evaluations, exact.evaluations, strict=True):
        assert (ours["accuracy"], ours["images"]) == (theirs["accuracy"], 101)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@pytest.fixture(scope="module")
def plain(train, small) -> Trained:
    return train(forked, "snsc.py", *small)


def test_the_oracle_is_not_what_one_process_trains(oracle, plain):
    """BatchNorm sees other groups: were they not, the test above could not tell them apart."""
    _, exact = oracle
    assert exact.losses != pytest.approx(plain.losses, rel=1e-3)


def test_dataparallel_trains_what_one_process_trains(plain, train, small):
    """Bit for bit, where there is no GPU to split a batch over."""
    assert train(forked, "snmc_dp.py", *small) == plain


def test_a_run_can_be_repeated_and_another_seed_is_another_run(plain, train, small):
    """The seed decides the weights, the order and the crops, and nothing else does."""
    assert train(forked, "snsc.py", *small).losses == plain.losses
    assert train(forked, "snsc.py", *small, "--seed", 1).losses != plain.losses


def test_the_number_of_loader_workers_changes_nothing(train, photos):
    """Files decoded in this process, by two workers, and by three."""
    runs = [train(forked, "snsc.py", *photos, "--workers", count) for count in (0, 2, 3)]
    assert len(runs[0].losses) == 6
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].distance(runs[1]) == runs[0].distance(runs[2]) == 0
