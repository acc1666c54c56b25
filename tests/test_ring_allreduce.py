"""techniques/ring_allreduce.py: not a byte more than a ring must send."""

import json

import pytest
from support import ROOT, full, succeeded, world

SCRIPT = "techniques/ring_allreduce.py"


DRIVER = """
import json, runpy, sys
import torch
import torch.distributed as dist
script, out, *sizes = sys.argv[1:]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
ring_all_reduce = runpy.run_path(script)["ring_all_reduce"]
operation, sent = dist.P2POp, []

def counted(call, tensor, peer):
    if call is dist.isend:
        assert peer == (rank + 1) % world_size
        sent.append(tensor.nbytes)
    return operation(call, tensor, peer)

dist.P2POp = counted
found = []
for size in map(int, sizes):
    torch.manual_seed(rank)
    whole = torch.randint(-100, 100, (size,)).float()  # whole numbers: their sum has no rounding
    right, noise = whole.clone(), torch.rand(size)
    dist.all_reduce(right)
    sent.clear()
    ring_all_reduce(whole)
    found.append([size, sum(sent), whole.equal(right)])
    ring_all_reduce(noise)
    all_noise = [torch.empty(size) for _ in range(world_size)]
    dist.all_gather(all_noise, noise)
    found[-1].append(all(other.equal(noise) for other in all_noise))
open(f"{out}.{rank}", "w").write(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [3, *full(2)])
def test_the_sum_and_the_bytes_sent(size, tmp_path):
    """Each rank sends 2 (W - 1) / W of the tensor. If W does not divide its length, at most two
    numbers more or less, since nothing is padded. All ranks have the same sums, to the last bit,
    also of tensors with fewer numbers than there are ranks.
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
