"""techniques/optimizer_in_backward.py and cpu_offload.py: what three ranks train, and the bytes."""

from real import FLAGS, data
from spies import ALWAYS, at_calls, said, tell
from support import succeeded, world

WEIGHTS = 4 * 11_181_642  # bytes of resnet18 with ten classes
LARGEST = 4 * 512 * 512 * 3 * 3  # of its convolutions
BACKWARD, OFFLOAD = "techniques/optimizer_in_backward.py", "techniques/cpu_offload.py"


def counted() -> None:
    """Runs in the script's process: tells the bytes of gradients that are there in each step of an
    optimizer, those of the model after it, and what Tensor.copy_ copies in between.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    copied = []

    def counting(copy_, tensor, other, **options):
        copied.append(tensor.nbytes)
        return copy_(tensor, other, **options)

    def step(optimizer, *_):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        memory = {each.untyped_storage().data_ptr(): each.nbytes for each in gradients}
        tell("step", [sum(memory.values()), sum(copied)])
        copied.clear()

    at_calls(ALWAYS, "torch.Tensor.copy_", counting)
    register_optimizer_step_pre_hook(step)


def steps(script: str) -> list[list[int]]:
    """What rank 0 of two tells in an epoch of two steps."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--epochs", 1]
    flags += ["--batch-size", 8, "--images", 16, 8]
    ranks = world(2, script, *flags, prepare=counted)
    succeeded(*ranks)
    return said(ranks[0].out, "step")


def test_one_gradient_at_a_time():
    """Of 62 tensors in each of two steps; the largest has 9.4 MB of the 44.7 MB of all."""
    found = [held for held, _ in steps(BACKWARD)]
    assert len(found) == 2 * 62 and sum(found) == 2 * WEIGHTS
    assert max(found) == LARGEST and round(LARGEST / 1e6, 1) == 9.4


def test_gradients_go_to_the_host_and_weights_come_back():
    """4 N bytes each, the weights of a step before the gradients of the next."""
    assert steps(OFFLOAD) == [[WEIGHTS, WEIGHTS], [WEIGHTS, 2 * WEIGHTS]]
