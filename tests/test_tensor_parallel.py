"""Ranks that split the layers of a vision transformer train what one process trains.

In double precision to 1e-13, over two epochs. By hand each rank holds and sends what the page says.
"""

import json
import os
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from real import FLAGS, TEST_IMAGES, Trained, data, doubles, train
from support import ORACLE, forked, records, refused, succeeded, world

from bench import cases
from bench.__main__ import parse
from bench.host import Host
from bench.run import gate

BY_HAND, DTENSORS = "techniques/tensor_parallel_by_hand.py", "techniques/tensor_parallel.py"
MESH, PARENT = "techniques/parallel_2d.py", "mnmc_ddp_launch.py"
STAGES = "techniques/parallel_3d.py"
LAYERS, TOKENS, WIDTH, HIDDEN = 4, 65, 128, 256  # of vit_tiny
SPLIT = LAYERS * (4 * WIDTH**2 + 3 * WIDTH + 2 * WIDTH * HIDDEN + HIDDEN)
WHOLE = 546_186 - SPLIT
BATCH, STEPS = 24, 8  # 4 in each of 2 epochs
# The head begins with zeros, so in step 1 no gradient leaves it: hence several steps and this rate.
VIT = [*FLAGS, "--arch", "vit_tiny", "--lr", 0.05, "--batch-size", BATCH]
VIT += ["--images", 4 * BATCH, TEST_IMAGES]
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def watched() -> None:
    """Runs in the script's process, in double precision: counts the numbers that are all-reduced,
    and at the end the bytes of the weights, of their gradients and of the momentum.
    """
    import torch.distributed as dist

    doubles()
    begin, end, all_reduce = torch.optim.SGD.__init__, dist.destroy_process_group, dist.all_reduce
    switch = torch.nn.Module.train
    made, sent, mode = [], {"train": [], "eval": []}, ["train"]

    def init(self, *rest, **options):
        made.append(self)
        begin(self, *rest, **options)

    def counted(tensor, *rest, **options):
        sent[mode[0]].append(tensor.numel())
        return all_reduce(tensor, *rest, **options)

    def switched(self, training=True):
        mode[0] = "train" if training else "eval"
        return switch(self, training)

    def size(tensors):
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def ended():
        weights = [weight for group in made[0].param_groups for weight in group["params"]]
        momenta = [state["momentum_buffer"] for state in made[0].state.values()]
        held = [size(weights), size(weight.grad for weight in weights), size(momenta)]
        file = Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.json"
        file.write_text(json.dumps({"held": held, **sent}))
        made.clear()
        end()

    torch.nn.Module.train = switched  # eval() calls it, too
    torch.optim.SGD.__init__, dist.all_reduce, dist.destroy_process_group = init, counted, ended


def collectives() -> None:
    """Runs in the script's process, in double precision: counts DTensor's collectives in training,
    by their names and by how many numbers go in.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    doubles()
    end, switch = dist.destroy_process_group, torch.nn.Module.train
    calls, trains = Counter(), [True]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, words=(), options=None):
            if DTensor in types:  # first DTensor takes its own operators apart
                return NotImplemented
            name = op.name().removeprefix("_c10d_functional::")
            if trains[0] and name in ("all_reduce", GATHER, SCATTER):
                calls[f"{name} {words[0].numel()}"] += 1
            return op(*words, **options or {})

    def switched(self, training=True):
        trains[0] = training
        return switch(self, training)

    def ended():
        watch.__exit__(None, None, None)
        (Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(calls))
        end()

    torch.nn.Module.train, dist.destroy_process_group = switched, ended
    watch = Watch()
    watch.__enter__()


def sends() -> None:
    """Runs in the script's process, in double precision: keeps how many numbers it sends to other
    stages, how many gradients it all-reduces, and how many weights it has.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    doubles()
    end, all_reduce = dist.destroy_process_group, dist.all_reduce
    init, sent = torch.optim.SGD.__init__, {"stages": 0, "columns": 0, "weights": 0}

    def counted(tensor, *rest, group=None, **options):
        if group and tensor.is_floating_point():  # else the meter's, or a vote of the stages
            sent["columns"] += tensor.numel()
        return all_reduce(tensor, *rest, group=group, **options)

    def watch(name: str) -> None:
        get = getattr(PipelineStage, name)

        def counted_ops(self, chunk):
            ops = get(self, chunk)
            if torch.is_grad_enabled():  # it trains
                sent["stages"] += sum(op.tensor.numel() for op in ops)
            return ops

        setattr(PipelineStage, name, counted_ops)

    def begin(self, weights, **options):
        from torch.distributed.tensor import DTensor

        weights = list(weights)
        own = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        sent["weights"] = sum(weight.numel() for weight in own)
        init(self, weights, **options)

    def ended():
        (Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(sent))
        end()

    watch("get_fwd_send_ops")
    watch("get_bwd_send_ops")
    torch.optim.SGD.__init__, dist.destroy_process_group, dist.all_reduce = begin, ended, counted


def tiny() -> None:
    """Runs in the parent's process, in double precision: torchvision knows vit_tiny."""
    from torchvision import models

    doubles()
    models.get_model = lambda name, num_classes: models.VisionTransformer(
        32, 4, LAYERS, 4, WIDTH, HIDDEN, num_classes=num_classes
    )


@cache
def exact(parts: int = 1) -> Trained:
    """The oracle. A vision transformer has no BatchNorm, so all numbers of parts are alike."""
    return train(forked, ORACLE, *VIT, "--data", data(), "--parts", parts, prepare=doubles)


def full(*values):
    """A case that repeats what others show: only with --full."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize("size", [full(1), 2, 4])
def test_by_hand(size, tmp_path):
    """Losses, evaluation and weights; what each rank holds, and what it sends."""
    start = partial(world, size, prepare=watched, KEEP=tmp_path)
    found = train(start, BY_HAND, *VIT, "--data", data())
    assert len(found.losses) == STEPS
    found.equals(exact(), rel=1e-13)
    for rank in range(size):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["held"] == [8 * (WHOLE + SPLIT // size)] * 3
        # In each layer 2 all-reduces forward and 2 backward, of batch x tokens x width.
        assert seen["train"] == [BATCH * TOKENS * WIDTH] * (4 * LAYERS * STEPS)
        assert len(seen["eval"]) == 2 * 2 * LAYERS * -(-TEST_IMAGES // BATCH)  # in 2 epochs


@pytest.mark.parametrize("size", [2, full(4)])
@pytest.mark.parametrize("flags", [[], ["--sequence-parallel"]], ids=["tensor", "sequence"])
def test_dtensors(size, flags, tmp_path):
    """What they train, and what they send. 65 tokens are no multiple of 2 or 4: with sequence
    parallelism, one rank has fewer, and sends as many as the others. Each step then gathers twice
    more, at the ends of the encoder, and adds up the gradients of LayerNorm's weights and biases.
    """
    start = partial(world, size, prepare=collectives, KEEP=tmp_path)
    run = train(start, DTENSORS, *VIT, "--data", data(), *flags)
    assert len(run.losses) == STEPS
    run.equals(exact(), rel=1e-13)
    times, share = 4 * LAYERS * STEPS, BATCH * WIDTH * -(-TOKENS // size)
    sent = {f"all_reduce {BATCH * TOKENS * WIDTH}": times}
    if flags:
        sent = {f"{GATHER} {share}": times + 2 * STEPS}
        sent |= {f"{SCATTER} {share * size}": times, f"all_reduce {WIDTH}": times}
    for rank in range(size):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == sent


@pytest.mark.parametrize(
    "flags", [[], full(["--sequence-parallel"]), full(["--tensor-parallel", 1])]
)
def test_data_and_tensor(flags):
    """2 x 2 ranks, or 4 x 1: the oracle has as many parts as there are rows."""
    run = train(partial(world, 4), MESH, *VIT, "--data", data(), *flags, prepare=doubles)
    assert len(run.losses) == STEPS
    run.equals(exact(4 if "--tensor-parallel" in flags else 2), rel=1e-13)


@pytest.mark.full
def test_stages_data_and_tensor(tmp_path):
    """2 x 2 x 2 ranks train what the oracle trains, and send what the page says. On 1 x 1 x 4 they
    go on from the first epoch's folder.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    right, flags = exact(2), [*VIT, "--data", data()]

    def go(size: int, name: str, *more, prepare=doubles) -> list[dict]:
        log, out = tmp_path / f"{name}.jsonl", ["--save", tmp_path / name]
        start = partial(world, size, KEEP=tmp_path, prepare=prepare)
        succeeded(*start(STAGES, *flags, "--log-json", log, *out, *more))
        return [line for line in records(log) if line["event"] in ("train", "eval")]

    def agree(found: list[dict], expected: list[dict]) -> None:
        for one, other in zip(found, expected, strict=True):
            assert one["images"] == other["images"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-13, abs=0)

    expected = [line for line in right.records if line["event"] in ("train", "eval")]
    agree(go(8, "half", "--epochs", 1, prepare=sends), [r for r in expected if r["epoch"] == 1])
    rows, steps = 2, STEPS // 2
    for rank in range(8):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["columns"] == steps * seen["weights"]
        assert seen["stages"] == steps * BATCH // rows * TOKENS * WIDTH
    more = ["--pipeline-parallel", 1, "--tensor-parallel", 4, "--resume", tmp_path / "half"]
    agree(go(4, "whole", *more), [r for r in expected if r["epoch"] == 2])
    dcp_to_torch_save(tmp_path / "whole", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    for name, weight in right.weights.items():
        packed = name.replace("in_proj_", "{}.")
        parts = [found.get(packed.format(part)) for part in ("query", "key", "value")]
        own = torch.cat(parts) if "in_proj" in name else found[name]
        assert (own - weight).abs().max() < 1e-13, name


def test_the_oracle_moves():
    """Otherwise any weights would do: the first loss is ln 10, and the last is not."""
    assert abs(exact().losses[0] - 2.302585) < 1e-6 < 0.1 < abs(exact().losses[-1] - 2.302585)
    exact(2).equals(exact(), rel=1e-13)


@cache
def resumed(script: str, *more) -> Trained:
    """Two ranks of a script, four of the mesh's."""
    start = partial(world, 4 if script == MESH else 2)
    start = partial(start, prepare=tiny if script == PARENT else doubles)
    return train(start, script, *VIT, "--data", data(), *more)


def alike(found: dict, expected: dict) -> None:
    """Asserts files with the same names in the same order, and the same numbers."""
    assert [*found] == [*expected] and [*found["model"]] == [*expected["model"]]
    momenta, right = found["optimizer"]["state"], expected["optimizer"]["state"]
    assert momenta.keys() == right.keys()
    pairs = [(found["model"][name], value) for name, value in expected["model"].items()]
    name = "momentum_buffer"
    pairs += [(momenta[number][name], state[name]) for number, state in right.items()]
    for one, other in pairs:
        assert type(one) is type(other) and (one - other).abs().max() < 1e-13


@pytest.mark.full
@pytest.mark.parametrize("script", [BY_HAND, DTENSORS, MESH])
def test_its_file_is_the_parents_and_it_resumes_that(script, tmp_path):
    """Weights and momentum are whole, under torchvision's names, in the optimizer's order. So each
    resumes the other's file as its own.
    """
    whole, half = resumed(PARENT), resumed(PARENT, "--epochs", 1)
    alike(resumed(script, "--epochs", 1).saved, half.saved)
    torch.save(half.saved, tmp_path / "half.pt")
    run = resumed(script, "--resume", tmp_path / "half.pt")
    found = [line["loss"] for line in run.records if line.get("epoch") == 2]
    right = [line["loss"] for line in whole.records if line.get("epoch") == 2]
    assert len(found) == 5 and found == pytest.approx(right, rel=1e-13, abs=0)
    alike(run.saved, whole.saved)


def test_what_cannot_be_split_is_refused():
    flags = [*VIT, "--data", data()]
    for script in (BY_HAND, DTENSORS, MESH):
        more = ["--tensor-parallel", 1] if script == MESH else []
        (done,) = world(1, script, *flags, *more, "--arch", "resnet18")
        refused(done, "--arch resnet18: give a vision transformer")
    for done in world(3, BY_HAND, *flags):
        refused(done, "--nproc-per-node: 3 processes cannot share 4 heads evenly")
    for done in world(2, MESH, *flags, "--tensor-parallel", 3):
        refused(done, "--tensor-parallel 3: must divide 2 processes")
    for done in world(2, STAGES, *flags):
        refused(done, "--pipeline-parallel x --tensor-parallel: 4 must divide 2")


@pytest.mark.full
def test_the_gate_passes_them():
    """`bench run --techniques tensor` times only what trains the oracle's numbers. By hand, and
    context_parallel.py; the tests above have the others.
    """
    host = Host("a CPU", 2)
    flags = ["--dataset", "fashion-mnist", "--data", str(data()), "--arch", "vit_tiny"]
    args = parse(["run", *flags, "--batch-size", "12"])
    rows = cases.scaled(cases.techniques(host, 2, ["tensor"]), args, host)
    assert len(rows) == 5
    rows = [rows[0], rows[-1]]
    assert [case.technique for case in rows] == ["tensor by hand", "context"]
    outcomes = gate.train_cases(rows, [*flags, "--device", "cpu"], host, print)
    for case in rows:
        found = gate.judge(case, *outcomes[case.name], host)
        assert found["passed"], (case.name, found["reason"])
