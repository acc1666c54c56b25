"""GPUs that are not here: makes torch pretend to have them, in every Python that finds this file.

    PYTHONPATH=tests/pretend PRETEND_GPUS=2 python snsc.py

Python imports a module of this name by itself, before a program; this one waits until torch is
imported. Then torch.cuda says that there are so many GPUs, and a tensor may be "on" one: it stays
in the machine's memory with a note of its GPU, which its results inherit, and which its `device`
tells. What a GPU would refuse is refused: two tensors of different devices in one operation, a
tensor of the CPU in one of NCCL's exchanges, two processes of NCCL's on one GPU, to pin what is on
a GPU. So a program takes its ways for GPUs here, and errors in them are found; not found is what
GPUs compute, how fast, and with how much memory.

NCCL is Gloo, a GPU's streams and clocks do nothing, nothing is compiled, and nn.DataParallel trains
its parts one after the other.
"""

import importlib.abc
import importlib.machinery
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python does, and calls `pretend` when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def then(module):
            execute(module)
            import pretended  # beside this file

            pretended.pretend(int(os.environ["PRETEND_GPUS"]))

        spec.loader.exec_module = then
        return spec


if int(os.environ.get("PRETEND_GPUS") or 0):
    sys.meta_path.insert(0, AfterTorch())
