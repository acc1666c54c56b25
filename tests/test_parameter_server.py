"""techniques/parameter_server.py: an asynchronous worker, and the bytes through the server."""

from functools import partial

import pytest
import spies
from real import oracle, short, train
from spies import numbers_sent
from support import world

from bench.formulas import all_reduced

SCRIPT = "techniques/parameter_server.py"
NUMBERS = 352_042  # of shufflenet_v2_x0_5's parameters, with 10 classes


@pytest.mark.full
def test_one_asynchronous_worker_trains_what_one_process_trains():
    """Its gradients are never stale: bit for bit SGD."""
    run = train(partial(world, 2), SCRIPT, *short(), "--updates", "async")
    assert len(run.losses) == 6
    run.equals(oracle(1))


@pytest.mark.parametrize("updates", ["sync", "async"])
def test_all_bytes_pass_through_the_server(updates):
    """Gradients in and weights out, for each worker and step. An asynchronous server makes as many
    updates as there are gradients; a notice before each one has one number. All ranks evaluate the
    server's weights, each test image once.
    """
    start = partial(world, 3, prepare=spies.sent)
    run = train(start, SCRIPT, *short(), "--updates", updates)
    steps, workers = 6, 2
    notices = steps if updates == "async" else 0

    def numbers(rank: int, name: str) -> list[int]:
        return sorted(numbers_sent(run.outs[rank], name))

    each = [NUMBERS] * steps
    assert numbers(0, "recv") == [1] * notices * workers + each * workers
    assert numbers(0, "send") == each * workers
    for worker in (1, 2):
        assert numbers(worker, "send") == [1] * notices + each and numbers(worker, "recv") == each
    through = 4 * NUMBERS * 2 * workers
    assert through == 4 * all_reduced(4 * NUMBERS, workers)
    ages = [record.get("staleness", {}) for record in run.records if record["event"] == "train"]
    assert sum(sum(age.values()) for age in ages) == notices * workers
    assert [line["images"] for line in run.evaluations] == [101, 101]
