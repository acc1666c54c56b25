"""techniques/local_sgd.py: with an average in each step it is DDP, otherwise it is local models."""

import argparse
from functools import partial

import torch
from real import ARCH, FLAGS, data, doubles, exact_oracle, short, train
from support import world
from torchvision import models

SCRIPT = "techniques/local_sgd.py"
WEIGHTS = 4 * 352_042  # bytes of shufflenet_v2_x0_5's parameters, with 10 classes


def test_an_average_in_each_step_is_ddp():
    """SGD is linear in the gradient, with momentum and weight decay, too: the mean of two steps
    from the same weights is a step by the mean gradient. In double precision, since BatchNorm
    amplifies rounding.
    """
    exact = exact_oracle(2)
    train(partial(world, 2), SCRIPT, *short(), "--sync-every", 1, prepare=doubles).equals(
        exact, rel=1e-9
    )


def local_models(sync_every: int) -> tuple[list[float], list[torch.nn.Module]]:
    """Two models in one process, on the oracle's images: their losses in two epochs of 3 steps."""
    from bench import oracle

    args = argparse.Namespace(dataset="fashion-mnist", data=data(), images=[None, None])
    args.image_size, losses = 32, []
    image_of, count, _ = oracle.read(args, True)
    torch.manual_seed(0)
    first, second = (models.get_model(ARCH, num_classes=10) for _ in range(2))
    second.load_state_dict(first.state_dict())
    lr = FLAGS[FLAGS.index("--lr") + 1]
    optimizers = [
        torch.optim.SGD(net.parameters(), lr, 0.9, weight_decay=1e-4, nesterov=True, fused=True)
        for net in (first, second)
    ]
    for epoch in (1, 2):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
        generator = torch.Generator().manual_seed(10**6 + epoch)
        for step in (1, 2, 3):
            dice = torch.rand(64, 3, generator=generator)
            taken = [*zip(order[64 * (step - 1) :][:64], range(64), strict=True)]
            both = []
            for part, (net, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
                images, labels = oracle.batch(dice, taken[part::2], image_of)
                loss, _ = oracle.forward(net, args, images, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                both.append((loss.detach() * 32).item())
            losses.append(sum(both) / 64)
            if step % sync_every == 0 or step == 3:
                with torch.no_grad():
                    for one, other in zip(first.parameters(), second.parameters(), strict=True):
                        one += other
                        one /= 2
                        other.copy_(one)
    return losses, [first, second]


def test_two_local_models_are_averaged_every_two_steps_and_at_an_epochs_end():
    """Bit for bit, BatchNorm's statistics of rank 0 included. An average all-reduces all weights.

    The statistics of rank 0 are copied at an evaluation; no other training step reads them.
    """
    run = train(partial(world, 2), SCRIPT, *short(), "--sync-every", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have: more would add in another order
    try:
        losses, (first, _) = local_models(2)
    finally:
        torch.set_num_threads(threads)
    assert run.losses == losses
    steps = [line for line in run.records if line["event"] == "train"]
    assert [step.get("all_reduces", 0) for step in steps] == [0, 1, 1, 0, 1, 1]
    assert all(
        step.get("all_reduce_bytes", 0) == WEIGHTS * step.get("all_reduces", 0) for step in steps
    )
    assert all(value.equal(run.weights[name]) for name, value in first.state_dict().items())
