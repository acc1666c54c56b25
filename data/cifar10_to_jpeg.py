"""Writes CIFAR-10 as JPEG files in class folders: what the tables call cifar10-jpeg.

python data/cifar10_to_jpeg.py
python snsc.py --dataset imagenet --data data/cifar10-jpeg --image-size 32

60,000 files of 32x32 pixels: train/CLASS/0000.jpg to 4999.jpg, val/CLASS/0000.jpg to 0999.jpg.
"""

import argparse
import shutil
import tarfile
from itertools import count
from pathlib import Path

from PIL import Image
from torchvision.datasets import CIFAR10


def main(args, fail):
    if args.out.exists():
        fail(f"--out {args.out}: is there already, name another folder or remove it")
    try:
        sets = {"train": CIFAR10(args.data, download=True)}
        sets["val"] = CIFAR10(args.data, train=False)
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        fail(f"--data {args.data}: no CIFAR-10 there, and no download, see data/README.md: {error}")
    part = args.out.with_name(args.out.name + ".part")  # the whole folder or none
    try:
        shutil.rmtree(part, ignore_errors=True)  # what a killed run has left
        for name, images in sets.items():
            write(images, part / name, args.quality)
        part.rename(args.out)
    except OSError as error:
        fail(f"--out {args.out}: cannot be written: {error}")
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write(images, folder, quality):
    """Each image to its class's folder, numbered in the order of the set."""
    for name in images.classes:
        (folder / name).mkdir(parents=True)
    numbers = [count() for _ in images.classes]
    for pixels, label in progress(list(zip(images.data, images.targets, strict=True)), folder):
        path = folder / images.classes[label] / f"{next(numbers[label]):04}.jpg"
        Image.fromarray(pixels).save(path, quality=quality)


def progress(items, folder):
    """The items, under a bar on stderr where rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    return track(items, str(folder), console=Console(stderr=True), transient=True)


def quality(text):
    """A type for argparse: a quality that Pillow takes."""
    if text.isdecimal() and 1 <= int(text) <= 95:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: give a number from 1 to 95")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # a mistake is answered with one line
    )
    add = parser.add_argument
    add("--data", type=Path, default="data", help="where CIFAR-10 is, or is downloaded to [data]")
    add("--out", type=Path, default="data/cifar10-jpeg", help="folder to make [data/cifar10-jpeg]")
    add("--quality", type=quality, default=75, help="JPEG's, 1 to 95 [75]")
    main(parser.parse_args(), parser.error)
