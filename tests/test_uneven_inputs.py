"""techniques/uneven_inputs.py: some ranks have fewer batches, and every image counts the same."""

import pytest
from real import FLAGS, compare, doubles, numbers, output
from support import ORACLE, checkpoint, forked, refused, succeeded, world

SCRIPT = "techniques/uneven_inputs.py"
ARCH = "shufflenet_v2_x0_5"
SMALL = [*FLAGS, "--arch", ARCH]


def exact(parts: int, *flags, prepare=None) -> tuple[list[tuple], dict]:
    """The oracle's records and weights."""
    flags = [*SMALL, "--parts", parts, *flags, *output("uneven-oracle")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(forked(ORACLE, *flags, "--save", weights, prepare=prepare))
    return numbers(flags), checkpoint(weights, arch=ARCH)


def trained(size: int, *flags, prepare=None) -> tuple[list[tuple], dict, str]:
    """The script's, and what rank 0 printed. Its checkpoint is uneven.pt, beside the log."""
    flags = [*SMALL, *flags, *output("uneven")]
    weights = flags[-1].with_suffix(".pt")
    runs = world(size, SCRIPT, *flags, "--save", weights, prepare=prepare)
    succeeded(*runs)
    return numbers(flags), checkpoint(weights, arch=ARCH), runs[0].out


def counted() -> None:
    """Runs in the script's process: each step prints how many single numbers were reduced."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    reduce, sizes = dist.all_reduce, []

    def counting(tensor, *arguments, **keywords):
        sizes.append(tensor.numel())
        return reduce(tensor, *arguments, **keywords)

    def after(*_):
        print("reduced", sizes.count(1))
        sizes.clear()

    dist.all_reduce = counting
    register_optimizer_step_post_hook(after)


def test_two_processes_train_what_the_oracle_trains():
    """Bit for bit: two steps of both, two of rank 0 only, and once more.

    The second epoch shows that all resume with the same weights and the same momentum, also from
    a checkpoint. Each step asks three times who is still there.
    """
    flags = ["--extra-images", 64]
    first, _, _ = trained(2, *flags, "--epochs", 1)
    more = ["--resume", output("uneven")[-1].with_suffix(".pt")]
    second, resumed, _ = trained(2, *flags, *more)
    (found, weights, out), (right, theirs) = trained(2, *flags, prepare=counted), exact(2, *flags)
    assert [line[0][3] for line in found] == 2 * [64, 64, 32, 32, 101]
    compare(found, right, 0)
    assert all(value.equal(theirs[name]) for name, value in weights.items())
    assert first + second == found
    assert all(value.equal(theirs[name]) for name, value in resumed.items())
    reduced = [int(line.split()[1]) for line in out.splitlines() if "reduced" in line]
    assert reduced == [3, 3, 3, 3, 3 + 2, 3, 3, 3]  # 2: the end of an epoch


@pytest.mark.full
def test_three_processes_with_partial_batches():
    """98, 47 and 47 images in batches of 20: in the third step 20, 7 and 7 of them, then 20.

    In double precision: 20 / 34 is rounded.
    """
    flags = ["--batch-size", 60, "--extra-images", 50, "--epochs", 1]
    found, weights, _ = trained(3, *flags, prepare=doubles)
    right, theirs = exact(3, *flags, prepare=doubles)
    assert [line[0][3] for line in found] == [60, 60, 34, 20, 18, 101]
    assert [line[0] for line in found] == [line[0] for line in right]
    for (what, loss, accuracy), (_, other, hits) in zip(found, right, strict=True):
        assert loss == pytest.approx(other, rel=1e-9) and accuracy == hits, what
    for name, value in weights.items():
        assert (value - theirs[name]).abs().max() < 1e-9, name


def test_a_rank_without_a_batch_is_refused():
    """192 images, of which 129 go only to rank 0: no full batch of 64 is left for both."""
    for rank in world(2, SCRIPT, *SMALL, "--extra-images", 129, *output("uneven-unfit")[:2]):
        refused(rank, "--batch-size 64", "63 training images")
