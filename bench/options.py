"""Holds the flags of `run`: as fields for the harness, and as flags of its command line."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

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


def flag(text: str, default=None, **settings):
    """A field with its help and what else argparse must know; without a type it is a switch."""
    if "type" not in settings and "choices" not in settings and "nargs" not in settings:
        settings["action"] = "store_true"
        default = False
    return field(default=default, metadata={"help": text, **settings})


@dataclass
class Options:
    """The flags of `run`; docs/reference/benchmark.md explains them."""

    quick: bool = flag("rougher, within 3 minutes on two cores")
    budget: float | None = flag("minutes; 14, --fresh 60, --quick 2.95", type=positive(float))
    blocks: int | None = flag("at most; as many as fit into the budget", type=positive(int))
    precise: bool = flag("cases take short turns: the default")
    fresh: bool = flag("one after the other: the default on several GPUs")
    only: str | None = flag(
        "cases whose names contain one of these, with commas: launch,mp", type=str
    )
    techniques: str | None = flag(
        f"groups of DDP techniques instead of the launchers: {','.join(GROUPS)} [{KERNELS}]",
        nargs="?",
        const=KERNELS,
    )
    world: str | None = flag(
        "world sizes, with commas; 1, 2, 4, ... up to the GPUs, or else the cores", type=str
    )
    threads: str | None = flag(
        "on a CPU: one per process, as it would have one GPU, or all cores for all; one",
        choices=["one", "all"],
    )
    dataset: str | None = flag(
        "cifar10 if it is there or can be downloaded, else fashion-mnist",
        choices=["cifar10", "fashion-mnist", "imagenet"],
    )
    data: Path | None = flag("folder of the data set; data", type=Path)
    arch: str = flag("any classification model of torchvision", "resnet18", type=str)
    image_size: int | None = flag("pixels per side; 32, imagenet 224", type=positive(int))
    scaling: str | None = flag(
        "weak: constant batch per device, the default; strong: constant global batch",
        choices=["weak", "strong"],
    )
    batch_size: int | None = flag(
        "weak: per device; strong: global; 256 per device, imagenet 64", type=positive(int)
    )
    workers: int | None = flag("processes per device that decode photographs; 4", type=int)
    price: float | None = flag(
        "of this machine per hour: adds a column of costs", type=positive(float)
    )
    seed: int = flag("of the order of the cases, and of the scripts", 0, type=int)
    out: Path | None = flag("a new folder for the result; logs/runs/DATE-TIME", type=Path)
    resume: Path | None = flag("resume the run in this folder", type=Path, metavar="DIR")
    extras: str | None = flag(
        f"set up what is missing: {','.join(EXTRAS)}", type=str, metavar="NAMES"
    )
    list: bool = flag("show the cases and what keeps them from running")

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags to a parser. `with` is a word of Python, so its field is `extras`."""
        for each in fields(cls):
            name = "with" if each.name == "extras" else each.name.replace("_", "-")
            more = {"dest": each.name, "default": each.default}
            parser.add_argument(f"--{name}", **more, **each.metadata)

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> "Options":
        """What the parser has read."""
        return cls(**{each.name: getattr(parsed, each.name) for each in fields(cls)})
