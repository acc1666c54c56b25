"""techniques/context_parallel.py: ranks with parts of each image train what one process trains."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from real import FLAGS, TEST_IMAGES, data, doubles, train
from support import ORACLE, forked, refused, world
from test_resume import same

SCRIPT = "techniques/context_parallel.py"
LAYERS, TOKENS, WIDTH = 4, 65, 128  # of vit_tiny
BATCH, STEPS = 12, 6  # 3 in each of 2 epochs
VIT = [*FLAGS, "--arch", "vit_tiny", "--lr", 0.05, "--batch-size", BATCH]
VIT += ["--images", 3 * BATCH, TEST_IMAGES]


def watched() -> None:
    """Runs in the script's process, in double precision: counts the numbers of each message."""
    import torch
    import torch.distributed as dist

    doubles()
    operation, end, switch = dist.P2POp, dist.destroy_process_group, torch.nn.Module.train
    sent, mode = {"train": [], "eval": []}, ["train"]

    def counted(call, tensor, peer):
        if call is dist.isend:
            assert peer == (dist.get_rank() + 1) % dist.get_world_size()
            sent[mode[0]].append(tensor.numel())
        return operation(call, tensor, peer)

    def switched(self, training=True):
        mode[0] = "train" if training else "eval"
        return switch(self, training)

    def ended():
        file = Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.json"
        file.write_text(json.dumps(sent))
        end()

    torch.nn.Module.train, dist.P2POp, dist.destroy_process_group = switched, counted, ended


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_train_what_one_process_trains(size, tmp_path):
    """In double precision, and with 65 tokens: the first ranks may have one more than the others.

    In a layer a rank sends W - 1 pairs of keys and values forward, W - 1 backward, and W gradients
    of such pairs: together 3 W - 2. One rank sends nothing.
    """
    start = partial(world, size, prepare=watched, KEEP=tmp_path)
    found = train(start, SCRIPT, *VIT, "--data", data())
    assert len(found.losses) == STEPS and abs(found.losses[-1] - found.losses[0]) > 1e-3
    found.equals(train(forked, ORACLE, *VIT, "--data", data(), prepare=doubles), rel=1e-12)
    sent = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for rank in sent:
        assert len(rank["train"]) == (3 * size - 2 if size > 1 else 0) * LAYERS * STEPS
        batches = -(-TEST_IMAGES // BATCH)  # evaluated after each epoch
        assert len(rank["eval"]) == (size - 1) * LAYERS * 2 * batches
    # All ranks together send every token's key and value as often as a rank sends a pair.
    pairs = (3 * size - 2 if size > 1 else 0) * LAYERS * STEPS
    assert sum(sum(rank["train"]) for rank in sent) == pairs * 2 * BATCH * TOKENS * WIDTH


@pytest.mark.full
def test_resumes_its_own_file(tmp_path):
    """The second epoch's losses and evaluation, weights and momentum are those of a whole run."""
    start, file, flags = partial(world, 2), tmp_path / "half.pt", [*VIT, "--data", data()]
    whole = train(start, SCRIPT, *flags)
    torch.save(train(start, SCRIPT, *flags, "--epochs", 1).saved, file)
    rest = train(start, SCRIPT, *flags, "--resume", file)
    first, second = (
        [(line["loss"], line["accuracy"]) for line in run.records if line.get("epoch") == 2]
        for run in (whole, rest)
    )
    assert not [line for line in rest.records if line.get("epoch") == 1]
    assert len(second) == 4 and second == first and same(rest.saved, whole.saved)


def test_another_model_is_refused():
    (done,) = world(1, SCRIPT, *VIT, "--data", data(), "--arch", "resnet18")
    refused(done, "--arch resnet18: give a vision transformer")
