"""Chooses the images of a run: CIFAR-10 where it is or can be had, else the embedded set."""

import sys
import tempfile
from pathlib import Path

from bench import ROOT, process

UNPACKED = "cifar-10-batches-py"
IDX = {"train-images-idx3-ubyte": 16, "train-labels-idx1-ubyte": 8}  # files, bytes of header
NAMES = {
    "cifar10": "CIFAR-10",
    "fashion-mnist": "Fashion-MNIST",
    "imagenet": "photos in folders",
}


def usual_size(dataset: str) -> int:
    """Pixels per side of the images that the scripts train on without --image-size."""
    return 224 if dataset == "imagenet" else 32


def fetch_cifar10(folder: Path, limit: float = 60) -> bool:
    """Has torchvision download CIFAR-10 into the folder, whole or not at all, within so many
    seconds; whether it is there.
    """
    code = "import sys, torchvision; torchvision.datasets.CIFAR10(sys.argv[1], download=True)"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as part:
            if process.run([sys.executable, "-c", code, part], limit).code:
                return False  # no network, or a slow one
            Path(part, UNPACKED).rename(folder / UNPACKED)
    except OSError:
        return False
    return True


def enlarge(source: Path, folder: Path, images: int) -> int:
    """The training images of a Fashion-MNIST folder repeated to this number, if they are fewer.

    Else the embedded 10,000 are an epoch of a few dozen steps, which its first and last batches
    dominate. Returns how often they were repeated.
    """
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (source / "FashionMNIST" / "raw").iterdir():
        (raw / file.name).symlink_to(file.resolve())
    for name, header in IDX.items():
        content = (raw / name).read_bytes()
        count = int.from_bytes(content[4:8], "big")
        times = max(1, -(-images // count))
        (raw / name).unlink()
        with open(raw / name, "wb") as file:
            file.write(content[:4] + (count * times).to_bytes(4, "big") + content[8:header])
            for _ in range(times):  # not all of it at once, which may be hundreds of MB
                file.write(content[header:])
    return times


def embedded(folder: Path) -> int:
    """How many training images a Fashion-MNIST folder has."""
    images = folder / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    return (images.stat().st_size - 16) // 28**2 if images.is_file() else 0


def choose(dataset: str | None, data: Path | None) -> tuple[str, Path, str]:
    """The --dataset and --data of every case, and the words for the table's title."""
    folder = data or ROOT / "data"
    if dataset is None:
        there = (folder / UNPACKED).is_dir() or (folder / "cifar-10-python.tar.gz").is_file()
        dataset = "cifar10" if there or fetch_cifar10(folder) else "fashion-mnist"
    words = NAMES[dataset]
    if dataset == "fashion-mnist":
        words += f" ({embedded(folder):,} images)"
    if dataset == "imagenet":
        words = f"{words} ({folder.name})"
    # Scripts run in the repository's folder, and records should not name where that lies.
    return dataset, folder.relative_to(ROOT) if ROOT in folder.parents else folder, words
