"""python -m bench loader --data FOLDER: how fast imagenet.py gets its images.

Several ways to make training images of the photographs in FOLDER take turns, each with one process
or thread per core: only decoding, imagenet.py's images one by one, its loader, and the loader that
most scripts have (Pillow, ToTensor, Normalize). Nothing is trained meanwhile.
bench.experiments.recipe compares the loader with the training.
"""

import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import datasets, transforms
from torchvision.io import decode_image

import imagenet
from bench import UserError, records
from bench.options import make_parser
from bench.show import terminal
from bench.show.claims import span
from bench.stats import block_means, interval

DECODE, ITEMS, OURS = "decode_image alone", "imagenet.py's images", "imagenet.py"
PILLOW = "Pillow, ToTensor, Normalize"
BATCH = 64


def enlarged(data: Path, folder: Path, count: int, width: int, height: int) -> Path:
    """Some of the photographs in another size, as JPEG of quality 90; the new --data folder.

    Enlarging adds no detail, so they should decode a little faster than a camera's would.
    """
    paths = sorted(p for p in (data / "train").glob("*/*") if p.is_file())
    for path in random.Random(0).sample(paths, min(count, len(paths))):
        new = folder / "train" / path.parent.name / f"{path.stem}.jpg"
        new.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.open(path).convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        picture.save(new, quality=90)
    return folder


class Only(Dataset):
    """Work on one image at a time, whose result stays in the worker."""

    def __init__(self, work: Callable[[int], object], count: int):
        self.work, self.count = work, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> tuple[int, int]:
        self.work(k)
        return 0, 0


class Endless:
    """Batches of a loader, epoch after epoch; those it has prefetched are not counted."""

    def __init__(self, loader, stock: int):
        self.stock = stock
        self.batches = (batch for _ in itertools.count() for batch in loader)

    def speed(self, seconds: float) -> float:
        """Images a second; then it waits until the loader has prefetched again, and is idle."""
        for _ in range(self.stock):
            next(self.batches)
        begun, images = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            images += len(next(self.batches)[1])
        found = images / (time.perf_counter() - begun)
        time.sleep(1.5 * self.stock * BATCH / found)
        return found


def contenders(data: Path, size: int, workers: int) -> dict[str, Endless]:
    """The loaders by name."""
    args = SimpleNamespace(seed=0, bad_images="fail", image_size=size, least_area=0.08)
    args.augment = "none"
    world = SimpleNamespace(local_size=1, device=torch.device("cpu"))
    photographs = imagenet.Photographs(data / "train", args, train=True)
    paths = [str(data / "train" / os.fsdecode(name)) for name in photographs.names]
    # Each photograph many times: at the end of its indices a loader waits for its workers.
    keys = [(1, index) for _ in range(200) for index in torch.randperm(len(paths)).tolist()]
    usual = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(imagenet.MEAN, imagenet.STD),
        ]
    )

    def plain(images: Dataset) -> DataLoader:
        sampler = RandomSampler(images, replacement=True, num_samples=len(keys))
        options = {"num_workers": workers, "persistent_workers": True}
        return DataLoader(images, BATCH, sampler=sampler, **options)

    loaders = {
        DECODE: plain(Only(lambda k: decode_image(paths[k], mode="RGB"), len(paths))),
        ITEMS: plain(Only(lambda k: photographs[1, k], len(paths))),
        OURS: imagenet.make_loader(photographs, keys, BATCH, workers, world),
        PILLOW: plain(datasets.ImageFolder(data / "train", usual)),
    }
    return {name: Endless(loader, 2 * workers) for name, loader in loaders.items()}


def measure(data: Path, args) -> list[dict]:
    """A record per turn: images a second, by contender, start and turn."""
    found = []
    for start in range(1, args.starts + 1):
        ready = contenders(data, args.image_size, args.workers)
        for turn in range(args.turns + 1):
            for name in random.sample([*ready], len(ready)):
                speed = ready[name].speed(args.seconds)
                if turn:  # the first one warms up
                    about = {"name": name, "start": start, "turn": turn}
                    found.append({**about, "images_per_second": speed})
        del ready  # before the next ones start
        print(f"start {start} of {args.starts}", file=sys.stderr)
    return found


def analysed(found: list[dict]) -> list[dict]:
    """Each contender's images a second, and its ratios to decoding and to Pillow's loader, with 95%
    intervals over starts.
    """
    speeds = pd.DataFrame(found).rename(columns={"start": "block"})
    speeds = speeds.pivot(index=["block", "turn"], columns="name", values="images_per_second")
    logs, rows = np.log(speeds), []
    for name in speeds:
        row = {"name": name, "images_per_second": float(speeds[name].median())}
        for label, other in (("of_decoding", DECODE), ("of_pillow", PILLOW)):
            row[label] = interval(block_means(logs[name] - logs[other]))
        rows.append(row)
    return sorted(rows, key=lambda row: -row["images_per_second"])


def show(rows: list[dict], args) -> None:
    """A table for people."""
    texts = [["", "images/s", "of decoding alone", "of Pillow's"]]
    for row in rows:
        ratios = [span(*row[of], digits=2) for of in ("of_decoding", "of_pillow")]
        texts.append([row["name"], f"{row['images_per_second']:.0f}", *ratios])
    terminal.show(f"images of {args.image_size} pixels, by {args.workers} workers", texts)


def main(argv: list[str]) -> int:
    """The command; returns the exit code."""
    parser = make_parser("loader", __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="with train/, a folder for each class in it")
    add("--image-size", type=int, default=224)
    add("--enlarge", help="WIDTHxHEIGHT: first resize 400 of the photographs to this")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    add("--starts", type=int, default=6, help="of all contenders")
    add("--turns", type=int, default=3, help="of each contender per start")
    add("--seconds", type=float, default=2.0, help="of a turn")
    add("--out", type=Path, help="file for the records, as JSON lines")
    args = parser.parse_args(argv)
    if not (args.data / "train").is_dir():
        raise UserError(f"--data {args.data}: has no train/")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        data = args.data
        if args.enlarge:
            try:
                width, height = map(int, args.enlarge.split("x"))
            except ValueError:
                raise UserError(f"--enlarge {args.enlarge}: give WIDTHxHEIGHT") from None
            data = enlarged(args.data, Path(folder), 400, width, height)
        found = measure(data, args)
    about = {"image_size": args.image_size, "photographs": args.enlarge, "workers": args.workers}
    if args.out:
        records.write_whole(args.out, "".join(f"{json.dumps({**about, **r})}\n" for r in found))
    show(analysed(found), args)
    return 0
