"""Measures on the devices at hand what the gate tells apart: a right script, and planted mistakes.

python -m bench calibrate [--precision fp32,bf16] [--only zero_grad,BatchNorm] [--world 2]

For each precision it trains DDP's script as it is, and with each mistake of PLANTED, as a gate
does, and prints how far each is from the oracle. "of the limit" is the largest of these distances,
as a multiple of the limit that the gate has for this machine: at most 1 is hidden. A right script
should be far below 1, and all mistakes above. On one GPU, two processes share it by Gloo, since
NCCL refuses that.
"""

import argparse
import math
import re
import sys
import tempfile
from itertools import chain
from pathlib import Path

from bench import ROOT, UserError, cases, refuse
from bench.host import Host, look
from bench.ladder import TIMED
from bench.process import heed_signals
from bench.run import gate
from bench.show.table import markdown

PRECISIONS = ("fp32", "bf16", "fp16")  # as ladder.TIMED names them


def scaled_backward(factor: str) -> tuple[str, str]:
    """The gradients of a process times this; what is logged is not."""
    return r"loss(\)?\.backward)", rf"(loss * {factor})\1"


# Mistakes that train, do not crash, and are no slower: a pattern, and what to put in its place.
PLANTED = {
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
SHARE_A_GPU = (
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
    """Writes the script of a precision as it is ("right"), and with each mistake; their paths."""
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


def judge_all(precision: str, args: argparse.Namespace, host: Host, say) -> dict[str, dict]:
    """The gate's records of the right script and of each mistake, by name."""
    script, how = TIMED[precision]
    sharing = SHARE_A_GPU if len(host.gpus) == 1 else ()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_scripts(Path(folder), precision, args.mistakes, *sharing)
        about = {"split": script.split, "technique": precision, "flags": how.flags}
        about |= {"variables": how.variables, "batch": args.batch_size}
        rows = [
            cases.Case(name, str(path), script.launcher, args.world, **about)
            for name, path in paths.items()
        ]
        flags = ["--dataset", "fashion-mnist", "--data", "data", "--arch", args.arch]
        found = gate.train_cases(rows, flags, host, say)
        return {case.name: gate.judge(case, *found[case.name], host) for case in rows}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = argparse.ArgumentParser(prog="bench calibrate", description=__doc__.split("\n")[0])
    parser.error, add = refuse, parser.add_argument
    text = "some of these, with commas [%(default)s]"
    add("--precision", default=",".join(PRECISIONS), help=text)
    add("--only", default="", help="mistakes whose names have one of these, with commas [all]")
    add("--world", type=int, default=2, help="processes [2]")
    add("--arch", default="resnet18", help="model [%(default)s]")
    add("--batch-size", type=int, default=64, help="global [64]")
    args = parser.parse_args(argv)
    args.precisions = args.precision.split(",")
    if unknown := {*args.precisions} - {*PRECISIONS}:
        raise UserError(f"--precision {unknown.pop()}: give some of {','.join(PRECISIONS)}")
    args.mistakes = [name for name in PLANTED if any(x in name for x in args.only.split(","))]
    if not args.mistakes:
        raise UserError(f"--only {args.only}: no mistake is named so: {'; '.join(PLANTED)}")
    if args.world < 2 or args.batch_size % args.world:
        raise UserError("--world: give 2 or more, of which --batch-size is a multiple")
    return args


def show(judged: dict[str, dict], most: gate.Limits) -> None:
    """Prints a row for each script, and which mistakes the limits hide."""
    far = {name: excess(found, most) for name, found in judged.items()}
    rows = [["script", "of the limit", "update", "the gate says"]]
    for name, found in judged.items():
        update = ", ".join(f"{x:.1e}" for x in found.get("update", []))
        rows.append([name, f"{far[name]:.2g}", update, found["reason"] or "passed"])
    print(markdown(rows) + "\n")
    hidden = [name for name, x in far.items() if x <= 1 and name != "right"]
    print(f"hidden by the limits: {', '.join(hidden) or 'none'}\n")


def main(argv: list[str]) -> int:
    """The command; 1 if a right script does not pass. Raises UserError."""
    args, host, passed = parse(argv), look(), True
    if 1 < len(host.gpus) < args.world:
        raise UserError(f"--world {args.world}: {len(host.gpus)} GPUs are here")
    heed_signals()
    for precision in args.precisions:
        print(f"## {precision}, {args.world} processes on {host.gpu_names or host.cpu}\n")
        judged = judge_all(precision, args, host, lambda line: print(line, file=sys.stderr))
        case = cases.Case("", TIMED[precision][0].path, "torchrun", args.world, technique=precision)
        show(judged, gate.limits(case, host))
        passed = passed and judged["right"]["passed"]
    return int(not passed)
