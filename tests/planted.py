"""Mistakes that train, do not crash, and are no slower: what the gate must find."""

import math
import re
from itertools import chain
from pathlib import Path

from support import ROOT

from bench.ladder import TIMED
from bench.run import gate


def scaled_backward(factor: str) -> tuple[str, str]:
    """The gradients of a process times this; what is logged is not."""
    return r"loss(\)?\.backward)", rf"(loss * {factor})\1"


PLANTED = {  # a pattern, and what to put in its place
    "learning rate 2% off": ("lr=args.lr", "lr=1.02 * args.lr"),
    "no Nesterov": ("nesterov=True", "nesterov=False"),
    "no weight decay": ("weight_decay=1e-4", "weight_decay=0"),
    "one rank's gradient missing": scaled_backward("(rank == 0)"),
    "gradients summed": scaled_backward("world_size"),
    "loss averaged over one image more": scaled_backward("len(labels) / (len(labels) + 1)"),
    "no set_epoch": (r"sampler\.set_epoch\(epoch\)", "pass"),
    "set_epoch once": (r"sampler\.set_epoch\(epoch\)", "sampler.set_epoch(1)"),
    "every rank the same augmentation": (r"draws\[rank::world_size\]", "draws[: len(images)]"),
    "every rank the same images": (r"Sampler\(train_set, ", "Sampler(train_set, world_size, 0, "),
    "metrics of one rank": (r"dist\.all_reduce\(sums\)", "sums *= dist.get_world_size()"),
    "every rank evaluates all": (
        r"range\(rank, len\(test_set\), world_size\)",
        "range(len(test_set))",
    ),
    "BatchNorm in eval mode": (r"model\.train\(\)", "model.eval()"),
    "BatchNorm in eval mode after the first epoch": (
        r"model\.train\(\)",
        "model.train(epoch == 1)",
    ),
    "labels of one rank off by one": (
        r"( +)images = augment",
        r"\1labels = (labels + rank) % len(classes)\n\g<0>",
    ),
    "no zero_grad": (r"optimizer\.zero_grad\(\)", "pass"),
    "evaluation with each rank's averages": (r"dist\.broadcast\(buffer, src=0\)", "pass"),
}
SHARE_A_GPU = (  # two processes by Gloo, since NCCL refuses it
    (r'int\(os\.environ\.setdefault\("LOCAL_RANK", "0"\)\)', "0"),
    (r'init_process_group\("nccl", device_id=device\)', 'init_process_group("gloo")'),
)


def plant(text: str, *changes: tuple[str, str]) -> str:
    """A script's text with these patterns replaced; each must be there."""
    for pattern, wrong in changes:
        text, count = re.subn(pattern, wrong, text)
        assert count, f"{pattern} is not in the script"
    return text


def write_scripts(folder: Path, precision: str, mistakes: list[str], *changes) -> dict[str, Path]:
    """Writes DDP's script in a precision of ladder.TIMED as it is ("right"), and with each mistake;
    returns their paths by name.
    """
    text = plant((ROOT / TIMED[precision][0].path).read_text(), *changes)
    found = {}
    for name in ("right", *mistakes):
        found[name] = folder / f"{name}.py"
        found[name].write_text(plant(text, PLANTED[name]) if name in PLANTED else text)
    return found


def excess(judged: dict, most: gate.Limits) -> float:
    """The largest distance of a gate's record, as a multiple of the limit; infinite if the records
    have other counts or no numbers.
    """
    if "update" not in judged:
        return math.inf
    off = gate.relative(judged["losses"], judged["oracle_losses"])
    pairs = zip((off, judged["update"], judged["evaluation"]["loss"]), most[:3], strict=True)
    far = chain.from_iterable(zip(*pair, strict=False) for pair in pairs)
    hits = judged["evaluation"]["hits"]
    return max(*(x / limit for x, limit in far), hits / most.hits if most.hits else 0)
