"""Which images a run trains on: CIFAR-10 where it is or can be had, else the embedded set."""

import hashlib
import time
import urllib.request
from pathlib import Path

from bench import ROOT

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
NAMES = {
    "cifar10": "CIFAR-10",
    "fashion-mnist": "Fashion-MNIST",
    "imagenet": "photos in folders",
    "synthetic": "synthetic images",
}


def fetch_cifar10(folder: Path, limit: float = 60, url: str = URL, md5: str = MD5) -> bool:
    """Gets the archive into the folder, whole or not at all, within limit seconds.

    torchvision unpacks it when a script first asks for it.
    """
    deadline, part = time.monotonic() + limit, folder / "cifar-10-python.tar.gz.part"
    digest = hashlib.md5()
    try:
        with urllib.request.urlopen(url, timeout=min(10, limit)) as source, part.open("wb") as file:
            while block := source.read(1 << 20):
                digest.update(block)
                file.write(block)
                if time.monotonic() > deadline:
                    return False
        if digest.hexdigest() != md5:
            return False
        part.replace(folder / "cifar-10-python.tar.gz")
        return True
    except OSError:  # no network, or a network that says no
        return False
    finally:
        part.unlink(missing_ok=True)


def choose(dataset: str | None, data: Path | None) -> tuple[str, Path, str]:
    """The --dataset and --data of every case, and the words for the table's title."""
    folder = data or ROOT / "data"
    if dataset is None:
        there = (folder / "cifar-10-batches-py").is_dir()
        there = there or (folder / "cifar-10-python.tar.gz").is_file()
        dataset = "cifar10" if there or fetch_cifar10(folder) else "fashion-mnist"
    words = NAMES[dataset]
    if dataset == "fashion-mnist":
        images = folder / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
        count = (images.stat().st_size - 16) // 28**2 if images.is_file() else 0
        words += f" ({count:,} images)"
    if dataset == "imagenet":
        words = f"{words} ({folder.name})"
    # Scripts run in the repository's folder, and records should not name where that lies.
    return dataset, folder.relative_to(ROOT) if ROOT in folder.parents else folder, words
