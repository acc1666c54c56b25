"""The gate: planted mistakes that it must catch in each precision, and right scripts that pass."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support import ORACLE, ROOT, forked, records, succeeded, world

from bench import cases
from bench.host import Gpu, Host
from bench.measure import gate, process

CPU = Host("C", 2)
V100 = Gpu("Tesla V100-SXM2-16GB", (7, 0), 16.0)
# A small net, since a CPU computes fp16 a hundred times as slowly as fp32.
SMALL = ["--dataset", "fashion-mnist", "--device", "cpu", "--arch", "shufflenet_v2_x0_5"]
SMALL += ["--batch-size", 16, "--log-every", 1]
STEPS = {"fp32": ["--max-steps", 5], "bf16": ["--max-steps", 3]}
STEPS["fp16"] = ["--max-steps", 2, "--image-size", 16]
SCRIPTS = {"fp32": "mnmc_ddp_launch.py", "bf16": "techniques/amp.py", "fp16": "techniques/amp.py"}


def backward(factor: str) -> tuple[str, str]:
    """The gradients of a process times this; what is logged is not."""
    return r"loss(\)?\.backward)", rf"(loss * {factor})\1"


# Mistakes that train, do not crash, and are no slower: a pattern, and what to put in its place.
PLANTED = {
    "learning rate 2% off": ("lr=args.lr", "lr=1.02 * args.lr"),
    "no Nesterov": ("nesterov=True", "nesterov=False"),
    "no weight decay": ("weight_decay=1e-4", "weight_decay=0"),
    "one rank's gradient missing": backward("(rank == 0)"),
    "gradients summed": backward("world_size"),
    "loss averaged over one image more": backward("len(labels) / (len(labels) + 1)"),
    "no set_epoch": (r"sampler\.set_epoch\(epoch\)", "pass"),
    "set_epoch once": (r"sampler\.set_epoch\(epoch\)", "sampler.set_epoch(1)"),
    "every rank the same augmentation": (r"draws\[index\]", "draws[: len(index)]"),
    "every rank the same images": (r"Sampler\(train_set, ", "Sampler(train_set, world_size, 0, "),
    "metrics of one rank": (
        r"dist\.all_reduce\(meter\.sums\)",
        "meter.sums *= dist.get_world_size()",
    ),
    "every rank evaluates all": (r"range\(rank, len\(test_set\), world_size\)", "None"),
    "BatchNorm in eval mode": (r"model\.train\(\)", "model.eval()"),
    "BatchNorm in eval mode after the first epoch": (
        r"model\.train\(\)",
        "model.train(epoch == 1)",
    ),
    "labels of one rank off by one": (
        r"( +)images = to_input\(augment",
        r"\1labels = (labels + rank) % len(classes)\n\g<0>",
    ),
    "no zero_grad": (r"optimizer\.zero_grad\(\)", "pass"),
    "evaluation with each rank's averages": (r"dist\.broadcast\(buffer, src=0\)", "pass"),
}


def gated() -> None:
    """Runs in the script's process, as gated.py's main does."""
    from bench.measure.gated import prepare

    prepare([24, gate.TEST_IMAGES], double=False)


def trained(folder, script: str, *flags) -> gate.Trained:
    """Two processes of a script, or the oracle of two."""
    folder.mkdir()
    flags = [*SMALL, *flags, "--log-json", folder / "log.jsonl", "--save", folder / "weights"]
    if script == ORACLE:
        images = ["--images", 24, gate.TEST_IMAGES]
        succeeded(forked(script, *flags, *images, "--parts", 2, prepare=gated))
    else:
        succeeded(*world(2, script, *flags, prepare=gated))
    return gate.Trained(records(folder / "log.jsonl"), folder)


class Runs:
    """What two processes trained in one precision: by the script as it is, and by each mistake."""

    def __init__(self, precision: str, folder):
        self.precision, name = precision, SCRIPTS[precision]
        self.case = cases.Case("x2", name, "torchrun", 2, technique=precision)
        flags, text = STEPS[precision], (ROOT / name).read_text()
        self.exact = trained(folder / "oracle", ORACLE, *flags, "--precision", precision)
        flags = [*flags, "--amp", precision] if precision != "fp32" else flags
        self.mine = {}
        for name, (pattern, wrong) in {"right": ("", ""), **PLANTED}.items():
            planted, count = re.subn(pattern, wrong, text) if pattern else (text, 1)
            assert count, f"{name}: {pattern} is not in the script"
            script = folder / f"{name}.py"
            script.write_text(planted)
            run = trained(folder / name, str(script), *flags)
            self.mine[name] = gate.paired(run, self.exact)[0]

    def judged(self, name: str) -> dict:
        return gate.judged(self.case, self.mine[name], self.exact, CPU)

    def excess(self, name: str, most: gate.Limits) -> float:
        """The largest of its distances, as a multiple of the limit; infinite: of wrong counts."""
        found = self.judged(name)
        if "update" not in found:
            return math.inf
        off = gate.relative(found["losses"], found["oracle_losses"])
        seen = found["evaluation"]["loss"]
        far = zip((off, found["update"], seen), most[:3], strict=True)
        return max(x / y for xs, ys in far for x, y in zip(xs, ys, strict=False))


@pytest.fixture(scope="module", params=SCRIPTS)
def runs(request, tmp_path_factory) -> Runs:
    return Runs(request.param, tmp_path_factory.mktemp(request.param))


def test_the_right_script_passes_and_every_mistake_is_caught(runs):
    """As a CPU's two processes are judged."""
    verdicts = {name: runs.judged(name) for name in runs.mine}
    for name, found in verdicts.items():
        print(runs.precision, name, found.get("update"), found.get("evaluation"), found["reason"])
    assert [name for name, found in verdicts.items() if found["passed"]] == ["right"]
    assert verdicts["right"]["update"] == [0, 0]
    assert all(
        found["reason"].startswith("wrong numbers: ")
        for name, found in verdicts.items()
        if name != "right"
    )


def test_mistakes_are_ten_times_as_far_off_as_what_is_right(runs):
    """By the limits for one and two processes, and by those for more."""
    for most in (gate.SAME, gate.OTHER[runs.precision]):
        wrong = {name: runs.excess(name, most) for name in PLANTED}
        assert all(excess > 1 for excess in wrong.values()), wrong
        assert runs.excess("right", most) < min(wrong.values()) / 10


def test_even_the_limits_for_gpus_let_no_mistake_through_but_the_smallest(runs):
    """They have a margin, and two mistakes hide in it."""
    wrong = {name: runs.excess(name, gate.GPU[runs.precision]) for name in PLANTED}
    print(runs.precision, {k: round(v, 3) for k, v in wrong.items()})
    hidden = {name for name, excess in wrong.items() if excess <= 1}
    assert hidden <= {"no weight decay", "evaluation with each rank's averages"}
