"""techniques/local_sgd.py: a mean in each step is DDP; else it is two models, averaged at times."""

import pytest
from real import FLAGS, TEST_IMAGES, data, numbers, output
from support import ORACLE, checkpoint, forked, records, refused, succeeded, world
from test_equality import doubles

SCRIPT = "techniques/local_sgd.py"
WEIGHTS = 44_726_568  # bytes of resnet18's, with 10 classes


def train(*more, **keywords) -> list:
    """The flags of a run of two processes; the last one is its log."""
    flags = [*FLAGS, *more, *output(f"local-{'-'.join(map(str, more[:2]))}")]
    succeeded(*world(2, SCRIPT, *flags, **keywords))
    return flags


def test_a_mean_in_each_step_is_ddp():
    """SGD is linear in the gradients, with momentum and weight decay, too: the mean of two steps
    from the same weights is a step by the mean gradient. In double precision, since BatchNorm makes
    the rounding grow.
    """
    flags = [*FLAGS, "--parts", 2, "--max-steps", 4, *output("local-exact")]
    succeeded(forked(ORACLE, *flags, prepare=doubles))
    exact = numbers(flags)
    found = numbers(train("--sync-every", 1, "--max-steps", 4, prepare=doubles))
    assert [line[0] for line in found] == [line[0] for line in exact]
    for (what, loss, accuracy), (_, right, hits) in zip(found, exact, strict=True):
        assert loss == pytest.approx(right, rel=1e-9) and accuracy == hits, what


def local_models(sync_every: int, steps: int, each: int):
    """Two models in one process, on the oracle's images, with a mean of their weights at times."""
    import argparse

    import torch
    from torchvision.models import resnet18

    from bench import oracle

    args = argparse.Namespace(dataset="fashion-mnist", data=data(), images=[None, None])
    args.image_size, losses = 32, []
    image_of, count, _ = oracle.read(args, True)
    torch.manual_seed(0)
    first, second = resnet18(num_classes=10), resnet18(num_classes=10)
    second.load_state_dict(first.state_dict())
    optimizers = [
        torch.optim.SGD(net.parameters(), 0.005, 0.9, weight_decay=1e-4, nesterov=True, fused=True)
        for net in (first, second)
    ]
    for step in range(steps):
        epoch = 1 + step // each
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        dice = torch.rand(count, 3, generator=torch.Generator().manual_seed(10**6 + epoch))
        taken = order[step % each * 64 :][:64].tolist()
        images, labels = oracle.batch(dice, taken, image_of)
        both = []
        for part, (net, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
            loss, _ = oracle.forward(net, args, images[part::2], labels[part::2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            both.append((loss.detach() * 32).item())
        losses.append(sum(both) / 64)
        if (step + 1) % sync_every == 0 or (step + 1) % each == 0:
            with torch.no_grad():
                for one, other in zip(first.parameters(), second.parameters(), strict=True):
                    one += other
                    one /= 2
                    other.copy_(one)
    return losses, first.state_dict()


def test_means_now_and_then_train_what_two_local_models_train(tmp_path):
    """Bit for bit, in one process that averages two models: every two steps, and each third, since
    an epoch ends there. Sent is what all weights take, once a mean.
    """
    import torch

    flags = train("--sync-every", 2, "--save", tmp_path / "weights.pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have: more would add up in another order
    try:
        losses, weights = local_models(2, 6, 3)
    finally:
        torch.set_num_threads(threads)
    steps = records(flags[-1], "train")
    assert [step["loss"] for step in steps] == losses
    assert [step["all_reduces"] for step in steps] == [0, 1, 1, 1, 0, 1]
    assert all(step["all_reduce_bytes"] == WEIGHTS * step["all_reduces"] for step in steps)
    saved = checkpoint(tmp_path / "weights.pt")
    assert all(value.equal(weights[name]) for name, value in saved.items())
    assert {line["images"] for line in records(flags[-1], "eval")} == {TEST_IMAGES}


@pytest.mark.parametrize("size", [1, 3])
def test_a_mean_of_one_and_of_three(size):
    """With no step that the number divides, and an end before the epoch's: there is one all the
    same, so that what is evaluated and saved is the mean.
    """
    flags = [*FLAGS, "--sync-every", 100, "--max-steps", 2, "--batch-size", 48]
    flags += output(f"local-of-{size}")
    succeeded(*world(size, SCRIPT, *flags))
    assert [step["all_reduces"] for step in records(flags[-1], "train")] == [0, 1]


def test_never_is_refused():
    refused(forked(SCRIPT, "--sync-every", 0), "--sync-every", "1")
