"""Starts a script or the oracle for the gate: what it trains must not depend on which kernels ran.

python bench/measure/gated.py [--double] [--images TRAIN TEST] SCRIPT [its flags]

- Kernels are deterministic, and chosen by shape alone: the scripts let cuDNN time several and take
  the fastest, which differs from start to start.
- Its data sets keep so many images, so that an evaluation is short, and an epoch one step.
- Each file of weights is kept, as numpy arrays, which the harness reads without torch.
- --double: what would be single precision is double, for where the kernels must be others.

The oracle has flags of its own for the number of images, and makes its data sets in its own way.
"""

import argparse
import runpy
import sys
from functools import partial
from itertools import count
from pathlib import Path

if __name__ == "__main__":  # in place of this folder, whose modules are named as others are
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import TensorDataset
from torchvision import datasets

KEPT = 3  # files of weights: the oracle's first, and those after one step and after two
# fp16's scale of the loss. Torch's and Apex's own, 2**16, overflows at first, and the steps until
# it has been halved often enough are left out. They would be steps that teach the gate nothing.
SCALE = 2.0**4


def settle() -> None:
    """Deterministic kernels, whatever the script says; a scale that leaves no step out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn = torch.backends.cudnn
    cudnn.deterministic, cudnn.benchmark = True, False
    type(cudnn).benchmark = property(lambda self: False, lambda self, value: None)
    set_default(torch.amp.GradScaler.__init__, 65536.0, SCALE)
    if "apex" in Path(sys.argv[0]).stem:
        try:
            from apex.amp.scaler import LossScaler
        except ImportError:  # the script says so in words
            return
        set_default(LossScaler.__init__, 65536.0, SCALE)


def set_default(function, old: float, new: float) -> None:
    """Gives a function another default value for a parameter."""
    function.__defaults__ = tuple(new if x == old else x for x in function.__defaults__)


def keep_weights() -> None:
    """Makes torch.save write the first files as 1.npz, 2.npz ..., beside the wanted file.

    That one is there, too, as the script will look for it, and empty.
    """
    number = count(1)

    def save(weights: dict, path: Path) -> None:
        path.touch()
        if (n := next(number)) <= KEPT:
            arrays = {k: v.detach().cpu() for k, v in weights.items() if v.is_floating_point()}
            halves = (torch.bfloat16, torch.float16)
            arrays = {k: v.float() if v.dtype in halves else v for k, v in arrays.items()}
            np.savez(path.with_name(f"{n}.npz"), **{k: v.numpy() for k, v in arrays.items()})

    torch.save = save


def keep_images(most: list[int]) -> None:
    """Makes data sets keep so many images: the first that is made, the second.

    In memory the first images, of photographs as many from each class. In the classes themselves,
    as the script of a spawned process has imported them by then.
    """
    left = list(most)
    in_memory, photographs = TensorDataset.__init__, datasets.ImageFolder.__init__

    def first(self, *tensors):
        n = left.pop(0) if left else None
        in_memory(self, *(tensor[:n] for tensor in tensors))

    def spread(self, *arguments, **named):
        photographs(self, *arguments, **named)
        n = left.pop(0) if left else len(self.samples)
        self.samples = self.samples[:: max(1, len(self.samples) // n)][:n]

    TensorDataset.__init__, datasets.ImageFolder.__init__ = first, spread


def prepare(images: list[int], double: bool) -> None:
    """All of this, in a process that is about to run a script."""
    settle()
    keep_weights()
    keep_images(images)
    if double:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double
    spawn = torch.multiprocessing.spawn
    torch.multiprocessing.spawn = lambda function, *arguments, **named: spawn(
        partial(prepared, images, double, function), *arguments, **named
    )


def prepared(images: list[int], double: bool, function, *arguments):
    """Calls a function in a process that a script has started anew, and so without all of this."""
    prepare(images, double)
    return function(*arguments)


def main() -> None:
    """Runs the script as Python itself would."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--images", type=int, nargs=2, default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = args.command
    prepare(args.images, args.double)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    from bench.measure.gated import main  # by a name that a spawned process finds, too

    main()
