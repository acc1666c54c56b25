"""techniques/dali.py: DALI decodes what torchvision decodes, in the same order."""

import runpy
from functools import partial

import pytest
import torch
from PIL import Image
from real import ARCH, train
from support import ROOT, world, write_photos
from torch.utils.data import DataLoader

SCRIPT = "techniques/dali.py"
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("libraries")]


def batches(script: str, folder, size: int) -> list:
    """All training images as two epochs' batches, by a script's own functions."""
    names = runpy.run_path(str(ROOT / script))
    images, _ = names["load_dataset"]("imagenet", folder, size, train=True)
    order = range(len(images) - 1, -1, -1)
    if make_loader := names.get("make_loader"):
        loader = make_loader(images, torch.device("cpu"), order, 8, num_workers=0)
    else:
        loader = DataLoader(images, 8, sampler=order)
    return [*loader, *loader]


def test_it_makes_the_same_images(tmp_path):
    """The same order, labels and crops. Where an image is resized, a pixel differs by less than a
    quarter of 255 levels' unit in the mean; a crop that is a pixel off differs by several units.
    """
    folder = write_photos(tmp_path / "photos")
    turned = Image.open(folder / "train" / "bee" / "2.jpg")
    exif = turned.getexif()
    exif[0x0112] = 6  # "the camera was turned": no loader of this project heeds it
    turned.save(folder / "train" / "bee" / "2.jpg", exif=exif, quality=95)
    pairs = zip(batches(SCRIPT, folder, 32), batches("mnmc_ddp_launch.py", folder, 32), strict=True)
    for (images, labels), (expected, others) in pairs:
        assert labels.equal(others) and images.shape == expected.shape
        assert images.dtype == expected.dtype and images.stride() == expected.stride()
        distance = (images.float() - expected.float()).abs()
        assert distance.mean((1, 2, 3)).max() < 0.5 and distance.max() < 10


def test_two_processes_train_what_the_parent_trains(tmp_path):
    """Bit for bit if no image is resized; in each epoch another order; both data sets are used."""
    folder = write_photos(tmp_path / "photos")
    for path in folder.rglob("*.*"):
        Image.open(path).convert("RGB").resize((32, 32)).save(path, quality=90)
    flags = ["--dataset", "imagenet", "--data", folder, "--image-size", 32, "--device", "cpu"]
    flags += ["--arch", ARCH, "--epochs", 3, "--batch-size", 12, "--workers", 0, "--log-every", 1]
    ours, parents = (
        train(partial(world, 2), script, *flags, classes=3)
        for script in (SCRIPT, "mnmc_ddp_launch.py")
    )
    assert len(ours.losses) == 9
    ours.equals(parents)
