"""Counts the FLOPs of a training step, an image, and knows the most that a GPU does in a second.

`python -m bench.flops resnet18 32` prints the step's, and how many of them are matrix products:
by default, torch computes convolutions in TF32 where a GPU can, and matrix products in fp32.

A program of its own, since it imports torch, which the harness does not.
"""

import re
import sys

# Dense peak TFLOP/s of one GPU by precision, from NVIDIA's data sheets and white papers, named by
# the longest of these that its whole name has. Where a sheet gives the number with sparsity, half
# of it; tensor cores with a sum in FP32.
PEAKS = {
    "V100": {"fp32": 15.7, "fp16": 125},  # V100 data sheet, SXM2
    "V100-PCIE": {"fp32": 14, "fp16": 112},
    "V100S": {"fp32": 16.4, "fp16": 130},  # V100 data sheet of January 2020
    "T4": {"fp32": 8.1, "fp16": 65},
    "A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
    "A10G": {"fp32": 35, "tf32": 35, "fp16": 70, "bf16": 70},  # A10G data sheet, made for AWS
    "A40": {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},  # A40 data sheet
    "A100": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    "L4": {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121},
    "L40": {"fp32": 90.5, "tf32": 90.5, "fp16": 181, "bf16": 181},
    "L40S": {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362},
    # Ada GPU architecture white paper, appendix A, the sums in FP32
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756},
    "H100 NVL": {"fp32": 60, "tf32": 418, "fp16": 835, "bf16": 835},
    "H100": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},
    "H200": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},
    "H200 NVL": {"fp32": 60, "tf32": 418, "fp16": 835, "bf16": 835},  # H200 data sheet
    "GH200": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},  # GH200 data sheet
    "B200": {"fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250},  # Blackwell data sheet, HGX
}
# What may stand around it: NVIDIA A100-SXM4-80GB. Not "MIG 1g.5gb", a part; nor "RTX 4090 Laptop
# GPU", "V100-FHHL" or a virtual GPU's "-48Q", which are slower than the numbers above.
NAME = r"(NVIDIA |Tesla |GeForce )*{}([- ](SXM\d|PCIE|PCIe|\d+GB?|HBM\de?))*"


def flops(arch: str, size: int, classes: int = 10) -> tuple[int, int]:
    """FLOPs of a training step on one image (3, size, size), and those of its matrix products.

    A multiply-add counts as 2. The step has three times those of the forward, as a layer's gradient
    is two products of its forward's size, by its input and by its weights; less once the first
    layer's, whose input, the images, needs no gradient. The forward's are counted by torch's own
    counter, on a model without memory (device meta): convolutions and matrix products, all that a
    peak in a data sheet is about. Not so the backward's: to torch 2.15's counter every filter of a
    grouped convolution sees all groups.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision import models

    with torch.device("meta"):
        model = models.get_model(arch, num_classes=classes).eval()
        images = torch.empty(1, 3, size, size)
    first = []

    def note(layer, inputs, _):
        if not first and any(weight.dim() > 1 for weight in layer.parameters(recurse=False)):
            first.extend([layer, *inputs])

    hooks = [layer.register_forward_hook(note) for layer in model.modules()]
    counts = []
    for call in (lambda: model(images), lambda: first[0](*first[1:])):
        with FlopCounterMode(display=False) as counter:
            call()  # with autograd: without, attention would take a way that is not counted
        whole = counter.get_total_flops()
        convolutions = counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0)
        counts.append((whole, whole - convolutions))
        for hook in hooks:
            hook.remove()
    forward, layer = counts
    return tuple(3 * many - few for many, few in zip(forward, layer, strict=True))


def peak(gpus: list[str], precision: str) -> float | None:
    """FLOP/s of one of the GPUs of these names at a precision; None where it is not known."""
    gpu = gpus[0] if gpus else ""
    names = [name for name in PEAKS if re.fullmatch(NAME.format(name), gpu)]
    tera = PEAKS[max(names, key=len)].get(precision) if names else None
    return tera * 1e12 if tera else None


if __name__ == "__main__":
    print(*flops(sys.argv[1], int(sys.argv[2])))
