"""Pipeline parallelism: pipeline.py by torch.distributed.pipelining, pipeline_by_hand.py without.

Both train what one process trains that computes the micro-batches one after the other. They send,
hold and wait as their pages' formulas say.
"""

import runpy
from functools import cache, partial

import pytest
import torch
from real import EPOCH, FLAGS, Trained, data, doubles, folder, short, train
from support import ORACLE, ROOT, forked, refused, succeeded, world
from test_diffs import functions
from torchvision import models

LIBRARY, HAND = "techniques/pipeline.py", "techniques/pipeline_by_hand.py"
GPIPE, ONE_F_ONE_B = (LIBRARY, "--schedule", "gpipe"), (LIBRARY, "--schedule", "1f1b")
INTERLEAVED = (LIBRARY, "--schedule", "interleaved")
ALL = [(HAND,), GPIPE, ONE_F_ONE_B, INTERLEAVED]
every = pytest.mark.parametrize("how", ALL, ids=lambda how: how[-1])
SMALL = [*FLAGS, "--data", data(), "--image-size", 16]  # resnet18
BATCH = 64
PASSED_ON = 4 * 256 * 1 * 1  # bytes of an image of 16 pixels behind resnet18's layer3.1


@cache
def oracle(flags: tuple, parts: int = 4, double: bool = False) -> Trained:
    """One process that accumulates the gradients of the micro-batches."""
    words = [*flags, "--micro-batches", parts]
    return train(forked, ORACLE, *words, prepare=doubles if double else None)


def equal(found: Trained, right: Trained, losses: float) -> None:
    """Asserts the same weights and running statistics to the last bit, and losses this close.

    A step's loss is the mean of its micro-batches' losses, which the oracle adds up elsewhere.
    """
    assert found.losses == pytest.approx(right.losses, rel=losses, abs=0)
    assert found.distance(right) == 0
    for ours, theirs in zip(found.evaluations, right.evaluations, strict=True):
        assert (ours["accuracy"], ours["images"]) == (theirs["accuracy"], theirs["images"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@every
def test_two_stages_train_what_the_oracle_trains(how):
    """In single precision. The 101 test images are a batch of 64, and one of 37 that is filled."""
    found = train(partial(world, 2), *how, *short())
    assert {line["images"] for line in found.evaluations} == {101}
    equal(found, oracle(tuple(short())), 1e-6)


@every
def test_four_ranks_train_what_the_oracle_trains(how):
    """In double precision, in eight micro-batches; interleaved are eight stages. Two steps."""
    flags = [*short(), "--epochs", 1, "--images", 128, 101]
    found = train(partial(world, 4), *how, *flags, "--micro-batches", 8, prepare=doubles)
    equal(found, oracle(tuple(flags), 8, double=True), 1e-15)


def test_zero_bubble_trains_what_the_oracle_trains():
    """With resnet18. The blocks of shufflenet end in a view, which PyTorch 2.15 cannot detach."""
    found = train(partial(world, 2), LIBRARY, *SMALL, "--schedule", "zero-bubble")
    equal(found, oracle(tuple(SMALL)), 1e-6)


def test_one_rank_is_gradient_accumulation():
    equal(train(partial(world, 1), HAND, *short()), oracle(tuple(short())), 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("how", [(HAND,), ONE_F_ONE_B], ids=lambda how: how[-1])
def test_over_an_epoch(how):
    """39 steps."""
    found = train(partial(world, 2), *how, *EPOCH)
    assert len(found.losses) == 39
    equal(found, oracle(tuple(EPOCH)), 1e-6)


@cache
def first_epoch(script: str, size: int, *flags) -> str:
    """The checkpoint after the first of two epochs."""
    file = folder() / f"first-{script.replace('/', '-')}.pt"
    succeeded(*world(size, script, *short(), *flags, "--epochs", 1, "--save", file))
    return file


@cache
def both() -> Trained:
    """Both epochs in one go."""
    return train(partial(world, 2), LIBRARY, *short())


def same_files(found: dict, right: dict) -> None:
    """Asserts the same weights, running statistics and momentum, to the last bit."""
    assert [*found["model"]] == [*right["model"]]
    assert all(found["model"][name].equal(value) for name, value in right["model"].items())
    momenta, expected = found["optimizer"]["state"], right["optimizer"]["state"]
    assert momenta.keys() == expected.keys() == {*range(len(expected))}
    for number, state in expected.items():
        assert state["momentum_buffer"].equal(momenta[number]["momentum_buffer"])


ACCUMULATES = "techniques/grad_accum.py"


@pytest.mark.parametrize("script", [LIBRARY, HAND, ACCUMULATES])
def test_they_save_the_same_file_and_resume_it(script):
    """grad_accum.py in 4 parts trains the same in one process, and knows nothing of stages. All is
    as in a run that nobody interrupted.
    """
    size, parts = (1, ["--accum-steps", 4]) if script == ACCUMULATES else (2, [])
    saved = first_epoch(LIBRARY, 2)
    same_files(torch.load(first_epoch(script, size, *parts)), torch.load(saved))
    run, whole = train(partial(world, size), script, *short(), *parts, "--resume", saved), both()
    steps = [line["loss"] for line in run.records if line["event"] == "train"]
    assert steps == pytest.approx(whole.losses[3:], rel=1e-6)
    same_files(run.saved, whole.saved)


def test_any_script_resumes_the_file():
    """Of DDP's ranks each needs all weights, which no rank of the pipeline has."""
    saved = first_epoch(LIBRARY, 2)
    for script, size in (("snsc.py", 1), ("mnmc_ddp_launch.py", 2), ("techniques/fsdp.py", 2)):
        run = train(partial(world, size), script, *short(), "--resume", saved)
        assert run.saved["epoch"] == 2 and len(run.evaluations) == 1


def held() -> None:
    """Runs in the script's process: prints for each step the bytes saved for backward at most, and
    all that was saved.
    """
    from torch.autograd.graph import saved_tensors_hooks
    from torch.optim.optimizer import register_optimizer_step_post_hook

    count = {"now": 0, "most": 0, "all": 0}

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            count["now"] += tensor.nbytes
            count["all"] += tensor.nbytes
            count["most"] = max(count["most"], count["now"])

        def __del__(self):
            count["now"] -= self.tensor.nbytes

    def after(*_):
        print("held", count["most"], count["all"])
        count["most"] = count["all"] = 0

    saved_tensors_hooks(Saved, lambda saved: saved.tensor).__enter__()
    register_optimizer_step_post_hook(after)


def printed(run, name: str) -> list[list[int]]:
    """The numbers in the lines that begin with a name."""
    lines = [line.split() for line in run.out.splitlines() if line.startswith(name)]
    return [[int(word) for word in words[1:]] for words in lines]


@pytest.mark.parametrize(
    ("how", "micro_batches"),
    [((HAND,), [8, 8, 8, 8]), (GPIPE, [8, 8, 8, 8]), (ONE_F_ONE_B, [4, 3, 2, 1])],
    ids=["by hand", "gpipe", "1f1b"],
)
def test_micro_batches_held_for_backward(how, micro_batches):
    """Exactly: GPipe all 8 of a step; of 1F1B, rank r of p has at most p - r. A stage saves as many
    bytes of each micro-batch.
    """
    ranks = world(4, *how, *SMALL, "--micro-batches", 8, "--max-steps", 2, prepare=held)
    succeeded(*ranks)
    for rank, most in zip(ranks, micro_batches, strict=True):
        steps = printed(rank, "held")
        assert len(steps) == 2
        for peak, total in steps:
            assert 8 * peak == most * total > 0


def outstanding() -> None:
    """Runs in the script's process: prints how many forwards of its stages had no backward yet, at
    most. A backward that leaves the weights' gradients for later still holds its activations.
    """
    import atexit

    from torch.distributed.pipelining import PipelineStage

    count = {"now": 0, "most": 0}

    def counted(name: str, change: int) -> None:
        run = getattr(PipelineStage, name)

        def chunk(self, *rest, **options):
            if torch.is_grad_enabled() or change < 0:
                frees = options.get("full_backward", True)
                count["now"] += change if frees or change > 0 else 0
                count["most"] = max(count["most"], count["now"])
            return run(self, *rest, **options)

        setattr(PipelineStage, name, chunk)

    counted("forward_one_chunk", 1)
    counted("backward_one_chunk", -1)
    counted("backward_weight_one_chunk", -1)
    atexit.register(lambda: print("outstanding", count["most"]))


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "parts"), [("interleaved", [5, 3]), ("zero-bubble", [4, 4])])
def test_parts_held_where_a_rank_has_two_stages(schedule, parts):
    """A micro-batch has two parts on each rank. Of interleaved 1F1B, rank r of p has at most
    3 p - 1 - 2 r parts, of zero bubble 2 p.
    """
    flags = ["--schedule", schedule, "--micro-batches", 8, "--max-steps", 2]
    ranks = world(2, LIBRARY, *SMALL, *flags, prepare=outstanding)
    succeeded(*ranks)
    assert [printed(rank, "outstanding") for rank in ranks] == [[[most]] for most in parts]


def sends() -> None:
    """Runs in the script's process: prints the bytes that it sends in each step."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    sent, operation, isend = [], dist.P2POp, dist.isend

    def counted_operation(call, tensor, *rest):
        sent.extend([tensor.nbytes] * (call is isend))
        return operation(call, tensor, *rest)

    def after(*_):
        print("sent", len(sent), sum(sent))
        sent.clear()

    dist.P2POp = counted_operation
    register_optimizer_step_post_hook(after)


def sends_itself() -> None:
    """The same of a script that calls isend."""
    import torch.distributed as dist

    sends()
    isend, operation = dist.isend, dist.P2POp

    def counted(tensor, peer):
        operation(isend, tensor, peer)
        return isend(tensor, peer)

    dist.isend = counted


@every
def test_what_is_sent(how):
    """Exactly: rank 0 sends the activations of the batch at the cut, and rank 1 their gradients.

    The number of micro-batches does not matter. Interleaved has three cuts; rank 0 sends forward
    over the first and the last, and backward over the second.
    """
    prepare = sends_itself if how == (HAND,) else sends
    ranks = world(2, *how, *SMALL, "--micro-batches", 8, "--max-steps", 2, prepare=prepare)
    succeeded(*ranks)
    split = runpy.run_path(str(ROOT / LIBRARY))["split"]
    model = models.get_model("resnet18", num_classes=10)
    stages = 4 if how == INTERLEAVED else 2
    cuts = [shape.nbytes for shape in split(model, stages, BATCH, 16)[1][1:-1]]
    if stages == 2:
        assert cuts == [BATCH * PASSED_ON]
    for rank in ranks:
        assert printed(rank, "sent") == [[8 * len(cuts), sum(cuts)]] * 2


def traced() -> None:
    """Runs in the script's process: prints what it computes, in its order."""
    from torch.distributed.pipelining import PipelineStage as Stage

    forward, backward = Stage.forward_one_chunk, Stage.backward_one_chunk
    weights = Stage.backward_weight_one_chunk

    def traced_forward(self, part, *rest, **options):
        print("trace F", self.stage_index, part)
        return forward(self, part, *rest, **options)

    def traced_backward(self, part, *rest, full_backward=True, **options):
        print("trace B" if full_backward else "trace I", self.stage_index, part)
        return backward(self, part, *rest, full_backward=full_backward, **options)

    def traced_weights(self, part, *rest, **options):
        print("trace W", self.stage_index, part)
        return weights(self, part, *rest, **options)

    Stage.forward_one_chunk, Stage.backward_one_chunk = traced_forward, traced_backward
    Stage.backward_weight_one_chunk = traced_weights


def idle(ranks: list[list[tuple]], stages: int) -> float:
    """The share of a step in which ranks wait, if they compute in this order and send in no time.

    A forward takes 1, a backward 2, of which half are the gradients of the input, the rest those of
    the weights. It starts when its rank is free, and what it needs has been computed.
    """
    cost = {"F": 1, "B": 2, "I": 1, "W": 1}
    ends, free, todo = {}, [0] * len(ranks), [list(rank) for rank in ranks]

    def needs(kind, stage, part):
        if kind == "F":
            return ("F", stage - 1, part) if stage else None
        if kind == "W":
            return "I", stage, part
        return ("grad", stage + 1, part) if stage + 1 < stages else ("F", stage, part)

    while any(todo):
        before = len(ends)
        for rank, work in enumerate(todo):
            while work and ((need := needs(*work[0])) is None or need in ends):
                kind, stage, part = work.pop(0)
                free[rank] = max(free[rank], ends.get(need, 0)) + cost[kind]
                ends[kind, stage, part] = free[rank]
                if kind in "BI":
                    ends["grad", stage, part] = free[rank]
        assert len(ends) > before, "they wait for each other"
    busy = sum(cost[kind] for rank in ranks for kind, *_ in rank)
    return 1 - busy / (len(ranks) * max(free))


@pytest.mark.parametrize(
    ("schedule", "parts"), [("gpipe", 4), ("1f1b", 4), ("interleaved", 4), ("interleaved", 8)]
)
def test_the_bubble(schedule, parts):
    """By the order in which four ranks really computed: (p - 1) / (v m + p - 1), for v stages per
    rank that take equally long.
    """
    flags = [*short(), "--schedule", schedule, "--micro-batches", parts, "--max-steps", 1]
    each = 2 if schedule == "interleaved" else 1
    ranks = world(4, LIBRARY, *flags, prepare=traced)
    succeeded(*ranks)
    assert idle([trace(run) for run in ranks], 4 * each) == pytest.approx(3 / (each * parts + 3))


def trace(run) -> list[tuple]:
    """What a rank computed: kind, stage, micro-batch."""
    lines = [line.split()[1:] for line in run.out.splitlines() if line.startswith("trace")]
    return [(kind, int(stage), int(part)) for kind, stage, part in lines]


def test_zero_bubble_waits_less():
    """A seventeenth of the time on four ranks; interleaved 1F1B, with as many stages, 3 / 19."""
    flags = [*FLAGS, "--data", data(), "--arch", "resnet34", "--image-size", 64]
    flags += ["--schedule", "zero-bubble", "--micro-batches", 8, "--max-steps", 1]
    ranks = world(4, LIBRARY, *flags, prepare=traced)
    succeeded(*ranks)
    assert idle([trace(run) for run in ranks], 8) == pytest.approx(1 / 17)


def weights() -> None:
    """Runs in the script's process: prints the bytes of its weights, gradients and momentum."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after(optimizer, *_):
        own = [weight for weight in optimizer.param_groups[0]["params"] if not weight.is_meta]
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        kinds = own, [weight.grad for weight in own], momentum
        print("weights", *(sum(tensor.nbytes for tensor in kind) for kind in kinds))

    register_optimizer_step_post_hook(after)


def test_each_rank_holds_its_stage():
    """Equal computing is not equal memory: resnet18's last layers have most weights."""
    ranks = world(2, LIBRARY, *FLAGS, "--data", data(), "--max-steps", 1, prepare=weights)
    succeeded(*ranks)
    found = [printed(run, "weights")[0] for run in ranks]
    assert all(len({*kinds}) == 1 for kinds in found)
    first, second = (kinds[0] for kinds in found)
    assert first + second == 4 * 11_181_642
    assert (round(first / 1e6, 1), round(second / 1e6, 1)) == (2.7, 42.0)


@pytest.mark.parametrize("arch, stages", [("resnet18", 2), ("resnet18", 4), ("vgg11", 2)])
def test_stages_are_balanced(arch, stages):
    """No stage computes half as much again as the mean. Each layer is in one stage."""
    from torch.utils.flop_counter import FlopCounterMode

    split = runpy.run_path(str(ROOT / HAND))["split"]
    model = models.get_model(arch, num_classes=10)
    parts, shapes = split(model, stages, 2, 32)
    flops, x = [], torch.rand(2, 3, 32, 32)
    for part, shape in zip(parts, shapes, strict=False):
        assert x.shape == shape.shape
        with FlopCounterMode(display=False) as counter:
            x = part(x)
        flops.append(counter.get_total_flops())
    assert max(flops) < 1.5 * sum(flops) / stages
    names = [id(weight) for part in parts for weight in part.parameters()]
    assert names == [id(weight) for weight in model.parameters()]


@pytest.mark.parametrize("script", [LIBRARY, HAND])
def test_what_does_not_fit(script):
    """Micro-batches of unequal size, a forward() that does more than its layers, many stages."""
    (done,) = world(1, script, *short(), "--micro-batches", 3)
    refused(done, "--batch-size 64", "--micro-batches")
    (done,) = world(1, script, *short(), "--arch", "densenet121")
    refused(done, "--arch", "DenseNet")
    split = runpy.run_path(str(ROOT / script))["split"]
    with pytest.raises(SystemExit, match="too few layers"):
        split(models.get_model("resnet18", num_classes=10), 40, 2, 32)


def test_both_cut_and_save_alike():
    one, other = (functions((ROOT / script).read_text()) for script in (LIBRARY, HAND))
    for name in ("split", "find_layers", "save"):
        assert one[name] == other[name]
