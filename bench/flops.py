"""FLOPs of a training step, an image: `python -m bench.flops resnet18 32` prints the number.

A program of its own, since it imports torch, which the harness does not.
"""

import sys


def flops(arch: str, size: int, classes: int = 10) -> int:
    """FLOPs of forward and backward of one image (3, size, size); a multiply-add counts as 2.

    Counted by torch's own counter, on a model without memory (device meta): convolutions and
    matrix products, which are all that a peak in a data sheet is about.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision import models

    with torch.device("meta"):
        model = models.get_model(arch, num_classes=classes).eval()
        images = torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops()


if __name__ == "__main__":
    print(flops(sys.argv[1], int(sys.argv[2])))
