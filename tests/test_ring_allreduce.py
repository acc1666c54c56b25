"""techniques/ring_allreduce.py: the oracle's numbers, and no byte more than a ring has to send."""

import json

import pytest
from real import FLAGS, compare, numbers, oracle, output
from support import ORACLE, ROOT, forked, records, succeeded, world

SCRIPT = "techniques/ring_allreduce.py"
GRADIENTS = 44_726_568  # bytes of resnet18's, with 10 classes


def test_two_processes_train_what_the_oracle_trains():
    """Bit for bit: there is one order to add up two numbers, and half of a float is exact.

    Each sends half of the gradients, and then the sum of the other half.
    """
    flags = [*FLAGS, *output("ring-2")]
    succeeded(*world(2, SCRIPT, *flags))
    compare(numbers(flags), oracle(2), 0)
    assert {step["sent_bytes"] for step in records(flags[-1], "train")} == {GRADIENTS}


def test_three_processes_train_what_the_oracle_trains():
    """To rounding: the parts' sums begin at different processes."""
    flags = [*FLAGS, "--batch-size", 48, "--max-steps", 3]
    mine, exact = [*flags, *output("ring-3")], [*flags, "--parts", 3, *output("ring-exact")]
    succeeded(*world(3, SCRIPT, *mine), forked(ORACLE, *exact))
    compare(numbers(mine), numbers(exact), 1e-6)
    assert {step["sent_bytes"] for step in records(mine[-1], "train")} == {GRADIENTS * 4 // 3}


DRIVER = """
import json, runpy, sys
import torch
import torch.distributed as dist
script, out, *sizes = sys.argv[1:]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
ring_all_reduce = runpy.run_path(script)["ring_all_reduce"]
found = []
for size in map(int, sizes):
    torch.manual_seed(rank)
    row = torch.randint(-100, 100, (size,)).float()  # whole numbers: their sum has no rounding
    right, noise = row.clone(), torch.rand(size)
    dist.all_reduce(right)
    sent = ring_all_reduce(row)
    ring_all_reduce(noise)
    all_noise = [torch.empty(size) for _ in range(world_size)]
    dist.all_gather(all_noise, noise)
    alike = all(other.equal(noise) for other in all_noise)
    found.append([size, sent, row.equal(right), alike])
open(f"{out}.{rank}", "w").write(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_sum_and_the_bytes_sent(size, tmp_path):
    """Each process sends 2 (W - 1) / W of the row, to the byte where W divides it, and else at most
    two numbers more or less, since nothing is padded. All have the same sums, to the last bit, also
    of rows with fewer numbers than there are processes.
    """
    driver, out = tmp_path / "driver.py", tmp_path / "found"
    driver.write_text(DRIVER)
    lengths = [0, 1, 2, 5, 12, 120_000, 119_999, 120_001]
    succeeded(*world(size, str(driver), ROOT / SCRIPT, out, *lengths))
    for rank in range(size):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert [line[0] for line in found] == lengths
        for length, sent, right, alike in found:
            assert right and alike, (rank, length)
            ideal = 4 * length * 2 * (size - 1) / size
            assert abs(sent - ideal) < 8
            assert length % size or sent == ideal


def test_it_says_how_it_compares(tmp_path):
    """--check: an event before training; the times are what they are."""
    flags = [*FLAGS, "--check", "--max-steps", 1, *output("ring-check")]
    succeeded(*world(2, SCRIPT, *flags))
    start, found, *_ = records(flags[-1])
    assert (start["event"], found["event"]) == ("start", "check")
    assert found["tensor_bytes"] == found["sent_bytes"] == 25 * 2**20
    assert found["ring_seconds"] > 0 and found["all_reduce_seconds"] > 0
