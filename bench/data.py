"""Chooses the images of a run: CIFAR-10 where it is or can be had, else the embedded set."""

import sys
import tempfile
from pathlib import Path

from bench import ROOT, process

UNPACKED = "cifar-10-batches-py"
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


def write_images(
    folder: Path, train: int, test: int | None = None, source: Path = ROOT / "data"
) -> Path:
    """A Fashion-MNIST folder with this many images of another one, repeated if it has fewer.

    test: None for all of them.
    """
    raw = Path("FashionMNIST", "raw")
    (folder / raw).mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = raw / f"{part}-{kind}-ubyte"
            content = (source / name).read_bytes()
            there = (len(content) - header) // size
            wanted = there if count is None else count
            with open(folder / name, "wb") as file:
                file.write(content[:4] + wanted.to_bytes(4, "big") + content[8:header])
                for begin in range(0, wanted, there):  # not all at once: it may be hundreds of MB
                    file.write(content[header : header + size * min(there, wanted - begin)])
    return folder


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
