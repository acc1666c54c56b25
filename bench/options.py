"""The flags of `run`; docs/reference/benchmark.md explains them."""

import argparse
from pathlib import Path

from bench import refuse
from bench.ladder import GROUPS, KERNELS

EXTRAS = ("slurm", "horovod", "apex", "techniques")  # what --with can set up


def positive(kind):
    """An argparse type: a number of this kind above 0."""

    def number(text: str):
        if not 0 < (value := kind(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
        return value

    number.__name__ = kind.__name__
    return number


def make_parser(command: str, text: str) -> argparse.ArgumentParser:
    """The parser of a command of its own; a user's mistake raises UserError."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"bench {command}", description=text, formatter_class=raw)
    parser.error = refuse
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser."""
    add, switch = parser.add_argument, {"action": "store_true"}
    add("--quick", **switch, help="rougher, within 3 minutes on two cores")
    add("--budget", type=positive(float), help="minutes; 14, --quick 2.95; --fresh: and six blocks")
    add("--blocks", type=positive(int), help="at most; as many as fit into the budget")
    text = "one case after the other, not in short turns; always on GPUs"
    add("--fresh", **switch, help=text)
    add("--only", help="cases whose names contain one of these, with commas: launch,mp")
    text = f"groups of DDP techniques instead of the launchers: {','.join(GROUPS)} [{KERNELS}]"
    add("--techniques", nargs="?", const=KERNELS, help=text)
    text = "world sizes, with commas; 1, 2, 4, ... up to the GPUs, or else the cores"
    add("--world", help=text)
    text = "machines: names with commas, this one first; in a Slurm job, those of the job"
    add("--nodes", help=text)
    text = "how a command starts on another machine; ssh -T {host}, in a Slurm job srun"
    add("--remote", metavar="COMMAND", help=text)
    names = ["cifar10", "fashion-mnist", "imagenet"]
    text = "cifar10 if it is there or can be downloaded, else fashion-mnist"
    add("--dataset", choices=names, help=text)
    add("--data", type=Path, help="folder of the data set; data")
    add("--arch", default="resnet18", help="any classification model of torchvision")
    add("--image-size", type=positive(int), help="pixels per side; 32, imagenet 224")
    text = "weak: constant batch per device, the default; strong: constant global batch"
    add("--scaling", choices=["weak", "strong"], help=text)
    text = "weak: per device; strong: global; 256 per GPU, 64 per core or for imagenet"
    add("--batch-size", type=positive(int), help=text)
    add("--workers", type=int, help="loader processes per device; photographs, GPUs: 4, else 0")
    add("--seed", type=int, default=0, help="of the order of the cases, and of the scripts")
    add("--out", type=Path, help="a new folder for the result; logs/runs/DATE-TIME")
    add("--resume", type=Path, metavar="DIR", help="resume the run in this folder")
    text = f"set up what is missing: {','.join(EXTRAS)}"
    add("--with", dest="extras", metavar="NAMES", help=text)
    add("--list", **switch, help="show the cases and what keeps them from running")
