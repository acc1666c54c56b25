"""FLOPs of a training step, an image, and the most that a GPU can do in a second.

`python -m bench.flops resnet18 32` prints the step's.

A program of its own, since it imports torch, which the harness does not.
"""

import re
import sys

# Dense peak TFLOP/s of one GPU by precision, from NVIDIA's data sheets; the longest name that fits.
PEAKS = {
    "V100": {"fp32": 15.7, "fp16": 125},
    "V100-PCIE": {"fp32": 14, "fp16": 112},
    "T4": {"fp32": 8.1, "fp16": 65},
    "A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
    "A100": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    "L4": {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121},
    "L40": {"fp32": 90.5, "tf32": 90.5, "fp16": 181, "bf16": 181},
    "L40S": {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756},
    "H100 NVL": {"fp32": 60, "tf32": 418, "fp16": 835, "bf16": 835},
    "H100": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},
    "H200": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},
}


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


def peak(gpus: list[str], precision: str) -> float | None:
    """FLOP/s of one of the GPUs of these names at a precision; None where it is not known."""
    gpu = gpus[0] if gpus else ""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", gpu)]  # an L40 is no L4
    tera = PEAKS[max(names, key=len)].get(precision) if names else None
    return tera * 1e12 if tera else None


if __name__ == "__main__":
    print(flops(sys.argv[1], int(sys.argv[2])))
