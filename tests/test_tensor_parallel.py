"""Ranks that split the layers of a vision transformer train what one process trains.

In double precision to 1e-13, over two epochs. By hand each rank holds and sends what the page says.
"""

from functools import cache, partial

import pytest
import spies
import torch
from real import FLAGS, TEST_IMAGES, Trained, data, doubles, train
from spies import said
from support import ORACLE, forked, full, records, succeeded, world

BY_HAND, DTENSORS = "techniques/tensor_parallel_by_hand.py", "techniques/tensor_parallel.py"
MESH, STAGES = "techniques/parallel_2d.py", "techniques/parallel_3d.py"
LAYERS, TOKENS, WIDTH, HIDDEN = 4, 65, 128, 256  # of vit_tiny
SPLIT = LAYERS * (4 * WIDTH**2 + 3 * WIDTH + 2 * WIDTH * HIDDEN + HIDDEN)
WHOLE = 546_186 - SPLIT
BATCH, STEPS = 24, 8  # 4 in each of 2 epochs
# The head begins with zeros, so in step 1 no gradient leaves it: hence several steps and this rate.
VIT = [*FLAGS, "--arch", "vit_tiny", "--lr", 0.05, "--batch-size", BATCH]
VIT += ["--images", 4 * BATCH, TEST_IMAGES]


def watched() -> None:
    doubles()
    spies.held()
    spies.sent()


@cache
def exact(parts: int = 1) -> Trained:
    """The oracle. A vision transformer has no BatchNorm, so all numbers of parts are alike."""
    return train(forked, ORACLE, *VIT, "--data", data(), "--parts", parts, prepare=doubles)


def test_by_hand():
    """Losses, evaluation and weights; what each rank holds, and what it sends."""
    run = train(partial(world, 2, prepare=watched), BY_HAND, *VIT, "--data", data())
    assert len(run.losses) == STEPS and abs(run.losses[-1] - run.losses[0]) > 0.1
    run.equals(exact(), rel=1e-13)
    for out in run.outs:
        assert said(out, "held") == [[8 * (WHOLE + SPLIT // 2)] * 3]
        (sent,) = said(out, "sent")
        # In each layer 2 all-reduces forward and 2 backward, of batch x tokens x width.
        message = ["all_reduce", BATCH * TOKENS * WIDTH, None]
        assert sent["train"] == [message] * (4 * LAYERS * STEPS)
        assert len(sent["eval"]) == 2 * 2 * LAYERS * -(-TEST_IMAGES // BATCH)  # in 2 epochs


SEQUENCE = ["--sequence-parallel"]


@pytest.mark.parametrize("flags", [SEQUENCE, *full(([],))])
def test_dtensors(flags):
    """65 tokens are no multiple of 2: with sequence parallelism, one rank has fewer."""
    run = train(partial(world, 2), DTENSORS, *VIT, "--data", data(), *flags, prepare=doubles)
    assert len(run.losses) == STEPS
    run.equals(exact(), rel=1e-13)


def test_data_and_tensor():
    """2 x 2 ranks: the oracle has as many parts as there are rows."""
    run = train(partial(world, 4), MESH, *VIT, "--data", data(), prepare=doubles)
    assert len(run.losses) == STEPS
    run.equals(exact(2), rel=1e-13)


@pytest.mark.full
def test_stages_data_and_tensor(tmp_path):
    """2 x 2 x 2 ranks train what the oracle trains. On 1 x 1 x 4 they go on from the first epoch's
    folder.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    right, log = exact(2), tmp_path / "log.jsonl"
    flags = [*VIT, "--data", data(), "--log-json", log]
    half = ["--epochs", 1, "--save", tmp_path / "half"]
    succeeded(*world(8, STAGES, *flags, *half, prepare=doubles))
    more = ["--pipeline-parallel", 1, "--tensor-parallel", 4, "--resume", tmp_path / "half"]
    more += ["--save", tmp_path / "whole"]
    succeeded(*world(4, STAGES, *flags, *more, prepare=doubles))
    for found, expected in zip(
        *(
            [r for r in lines if r["event"] in ("train", "eval")]
            for lines in (records(log), right.records)
        ),
        strict=True,
    ):
        assert found["images"] == expected["images"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-13, abs=0)
    dcp_to_torch_save(tmp_path / "whole", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    for name, weight in right.weights.items():
        packed = name.replace("in_proj_", "{}.")
        parts = [found.get(packed.format(part)) for part in ("query", "key", "value")]
        own = torch.cat(parts) if "in_proj" in name else found[name]
        assert (own - weight).abs().max() < 1e-13, name


@pytest.mark.full
def test_a_folder_that_is_no_checkpoint_is_kept(tmp_path):
    """Saving replaces a folder. So --save with the name of a folder of results removed them."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious").touch()
    ranks = world(8, STAGES, *VIT, "--data", data(), "--epochs", 1, "--save", tmp_path / "results")
    for rank in ranks:
        assert rank.code
    assert any("must be new, or a checkpoint" in rank.err for rank in ranks)
    assert [*(tmp_path / "results").iterdir()] == [tmp_path / "results" / "precious"]
