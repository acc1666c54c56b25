"""techniques/uneven_inputs.py: some processes have fewer batches, and every image counts alike."""

import pytest
from real import FLAGS, compare, numbers, output
from support import ORACLE, checkpoint, forked, refused, succeeded, world
from test_equality import doubles

SCRIPT = "techniques/uneven_inputs.py"


def exact(parts: int, *flags, prepare=None) -> tuple[list[tuple], dict]:
    """The oracle's records and weights."""
    flags = [*FLAGS, "--parts", parts, *flags, *output("uneven-oracle")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(forked(ORACLE, *flags, "--save", weights, prepare=prepare))
    return numbers(flags), checkpoint(weights)


def trained(size: int, *flags, prepare=None) -> tuple[list[tuple], dict, str]:
    """The script's, and what process 0 printed."""
    flags = [*FLAGS, *flags, *output("uneven")]
    weights = flags[-1].with_suffix(".pt")
    runs = world(size, SCRIPT, *flags, "--save", weights, prepare=prepare)
    succeeded(*runs)
    return numbers(flags), checkpoint(weights), runs[0].out


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
    """Bit for bit: two steps of both, two of process 0 alone, and once more.

    The second epoch shows that all go on with the same weights and the same momentum. Each step
    asks three times who is still there.
    """
    flags = ["--extra-images", 64]
    (found, weights, out), (right, theirs) = trained(2, *flags, prepare=counted), exact(2, *flags)
    assert [line[0][3] for line in found] == 2 * [64, 64, 32, 32, 101]
    compare(found, right, 0)
    assert all(value.equal(theirs[name]) for name, value in weights.items())
    reduced = [int(line.split()[1]) for line in out.splitlines() if "reduced" in line]
    assert reduced == [3, 3, 3, 3, 3 + 2, 3, 3, 3]  # 2: the end of an epoch


def test_a_run_that_ends_where_a_process_has_no_images_left():
    flags = ["--extra-images", 64, "--max-steps", 3]
    (found, weights, _), (right, theirs) = trained(2, *flags), exact(2, *flags)
    assert [line[0][3] for line in found] == [64, 64, 32, 101]
    compare(found, right, 0)
    assert all(value.equal(theirs[name]) for name, value in weights.items())


def test_three_processes_with_partial_batches():
    """98, 47 and 47 images in batches of 20: in the third step 20, 7 and 7 of them, then 20.

    In double precision: 20 / 34 is rounded.
    """
    flags = ["--batch-size", 60, "--extra-images", 50, "--max-steps", 4]
    (found, weights, _), (right, theirs) = (
        trained(3, *flags, prepare=doubles),
        exact(3, *flags, prepare=doubles),
    )
    assert [line[0][3] for line in found] == [60, 60, 34, 20, 101]
    assert [line[0] for line in found] == [line[0] for line in right]
    for (what, loss, accuracy), (_, other, hits) in zip(found, right, strict=True):
        assert loss == pytest.approx(other, rel=1e-9) and accuracy == hits, what
    for name, value in weights.items():
        assert (value - theirs[name]).abs().max() < 1e-9, name


def no_process_group() -> None:
    """Runs in the script's process: the first one to end would take the group from the other."""
    import torch

    torch.distributed.init_process_group = lambda backend: None


@pytest.mark.parametrize("batch, extra, words", [(64, 129, "--extra-images"), (38, 0, "one image")])
def test_shares_that_do_not_fit(batch, extra, words):
    """No full batch for process 1; 96 images in batches of 19, and one is left."""
    flags = [*FLAGS, "--batch-size", batch, "--extra-images", extra, *output("uneven-unfit")]
    for process in world(2, SCRIPT, *flags, prepare=no_process_group):
        refused(process, words)
    assert not flags[-1].exists()
