"""data/cifar10_to_jpeg.py with a small CIFAR-10: the whole folder, or one line and nothing."""

import hashlib
import io
import pickle
import tarfile
from functools import partial
from pathlib import Path

import pytest
import support
from PIL import Image
from support import forked, succeeded
from test_data import ARCHIVE, PARTS, cifar_archive, prepared

SCRIPT = "data/cifar10_to_jpeg.py"
refused = partial(support.refused, code=2)


@pytest.fixture
def convert(tmp_path):
    """Runs it on a folder that has the archive; more is to be done in its process before."""
    packed, sums = cifar_archive()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ARCHIVE).write_bytes(packed)
    nowhere = "http://127.0.0.1:9/" + ARCHIVE  # a port that nobody listens on
    point = partial(prepared, nowhere, hashlib.md5(packed).hexdigest(), sums)

    def convert(*flags, prepare=point):
        places = ["--data", tmp_path / "data", "--out", tmp_path / "jpeg"]
        return forked(SCRIPT, *places, *flags, prepare=prepare, no_proxy="127.0.0.1")

    convert.point = point
    return convert


def expected(quality: int) -> dict[str, bytes]:
    """Each file's bytes by its name, from the archive itself."""
    files, numbers = {}, {}
    with tarfile.open(fileobj=io.BytesIO(cifar_archive()[0])) as archive:

        def read(name):
            return pickle.load(archive.extractfile(f"cifar-10-batches-py/{name}"))

        names = read("batches.meta")["label_names"]
        for part in PARTS:
            batch = read(part)
            for pixels, label in zip(batch["data"], batch["labels"], strict=True):
                folder = f"{'val' if part == PARTS[5] else 'train'}/{names[label]}"
                numbers[folder] = numbers.get(folder, -1) + 1
                picture = Image.fromarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0).copy())
                picture.save(file := io.BytesIO(), "JPEG", quality=quality)
                files[f"{folder}/{numbers[folder]:04}.jpg"] = file.getvalue()
    return files


def written(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_each_image_is_a_file_in_its_class(convert, tmp_path):
    """Byte for byte; a class without images has its folder, too."""
    (tmp_path / "jpeg.part").mkdir()
    (tmp_path / "jpeg.part" / "left").touch()  # by a run that was killed
    succeeded(convert("--quality", 30))
    files = written(tmp_path / "jpeg")
    assert files == expected(30) and len(files) == 24
    assert "train/car/0004.jpg" in files and "val/frog/0000.jpg" not in files
    assert len(list((tmp_path / "jpeg").glob("*/*"))) == 20
    assert not (tmp_path / "jpeg.part").exists()
    assert Image.open(tmp_path / "jpeg" / "train/car/0000.jpg").size == (32, 32)


def test_a_folder_that_is_there_is_not_touched(convert, tmp_path):
    (tmp_path / "jpeg").mkdir()
    (tmp_path / "jpeg" / "mine").touch()
    refused(convert(), "--out", "jpeg", "already")
    assert list(written(tmp_path / "jpeg")) == ["mine"]


def test_no_data_and_no_network(convert, tmp_path):
    (tmp_path / "data" / ARCHIVE).unlink()
    refused(convert(), "--data", "data/README.md")
    assert not (tmp_path / "jpeg").exists()
