"""Every data set, with small real files in its format; DDP downloads nothing."""

import ast
import hashlib
import io
import os
import pickle
import tarfile
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from real import ARCH
from support import ROOT, forked, records, started, succeeded, write_photos

from bench import oracle
from bench.data import write_images
from bench.process import Finished

SHORT = ["--epochs", 1, "--batch-size", 10, "--log-every", 1, "--device", "cpu", "--arch", ARCH]
PARTS = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
ARCHIVE = "cifar-10-python.tar.gz"
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")


def cifar_archive() -> tuple[bytes, dict[str, str]]:
    """An archive in CIFAR-10's format, four images per part, and the md5 of each file in it."""
    names = [name.encode() for name in "plane car bird cat deer dog frog horse ship truck".split()]
    files = {"batches.meta": {b"label_names": names, "label_names": [n.decode() for n in names]}}
    for k, part in enumerate(PARTS):
        pixels = numpy.random.default_rng(k).integers(256, size=(4, 3072), dtype=numpy.uint8)
        files[part] = {"data": pixels, "labels": [k, 1, 2, 3]}
    packed, sums = io.BytesIO(), {}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            data = pickle.dumps(content)
            sums[name] = hashlib.md5(data).hexdigest()
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue(), sums


def prepared(url: str, md5: str, sums: dict[str, str]) -> None:
    """Runs in the script's process: its CIFAR-10 is the small one."""
    from torchvision.datasets import CIFAR10

    CIFAR10.url, CIFAR10.tgz_md5 = url, md5
    CIFAR10.train_list = [[part, sums[part]] for part in PARTS[:5]]
    CIFAR10.test_list = [[part, sums[part]] for part in PARTS[5:]]
    CIFAR10.meta = {**CIFAR10.meta, "md5": sums["batches.meta"]}


@contextmanager
def served(folder: Path):
    """A web server with this folder's files: its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_cifar10_is_downloaded_once_and_by_snsc(tmp_path):
    """mnmc_ddp_launch.py asks the network for nothing: it fails by torchvision's message, and
    trains on what snsc.py has downloaded. Then neither needs the server.
    """
    ddp, data, log = "mnmc_ddp_launch.py", tmp_path / "data", tmp_path / "log.json"
    archive, sums = cifar_archive()
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / ARCHIVE).write_bytes(archive)

    def trained(script: str, *flags) -> Finished:
        prepare = partial(prepared, f"{url}/{ARCHIVE}", hashlib.md5(archive).hexdigest(), sums)
        flags = ["--dataset", "cifar10", "--data", data, *SHORT, *flags]
        (one,) = started(1, script, *flags, prepare=prepare, no_proxy="127.0.0.1")
        return one.finish()

    with served(tmp_path / "served") as url:
        done = trained(ddp)
        assert done.code == 1 and "not found" in done.last_line and not [*data.rglob("*.gz")]
        succeeded(trained("snsc.py"))
    assert (data / ARCHIVE).read_bytes() == archive
    succeeded(trained(ddp, "--log-json", log), trained("snsc.py", "--log-json", log))
    steps = records(log, "train")
    assert [step["step"] for step in steps] == [1, 2, 1, 2]  # of 10 of the 20 images
    assert [step["loss"] for step in steps[:2]] == [step["loss"] for step in steps[2:]]
    assert records(log, "eval")[0]["images"] == 4


def decoder(script: str):
    """The script's decode(). test_diffs.py holds those of most scripts equal to snsc.py's."""
    (code,) = (
        node
        for node in ast.parse((ROOT / script).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "decode"
    )
    from torchvision.io import decode_image

    names = {"Path": Path, "torch": torch, "decode_image": decode_image, "Image": Image}
    exec(ast.unparse(code), names := {**names, "np": numpy})

    def decode(path) -> torch.Tensor:
        image = names["decode"](os.fspath(path))
        if isinstance(image, torch.Tensor):
            return image
        assert image.mode == "RGB"
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

    return decode


DECODERS = pytest.mark.parametrize("script", ["snsc.py", "techniques/oneflow_ddp.py"])


@DECODERS
def test_16_bits_per_sample_train_on_what_8_bits_do(script, tmp_path):
    """They gave inputs of 150 to 940 instead of -2 to 2."""
    pixels = numpy.random.default_rng(0).integers(2**16, size=(32, 32), dtype=numpy.uint16)
    file = tmp_path / "train" / "a" / "16.png"
    file.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(file)
    expected = torch.from_numpy((pixels // 256).astype(numpy.uint8)).expand(3, -1, -1)
    assert decoder(script)(file).equal(expected)
    args = SimpleNamespace(dataset="imagenet", data=tmp_path, image_size=32, images=[None, None])
    assert oracle.read(args, train=True)[0](0)[0].equal(expected)


@DECODERS
def test_images_that_need_no_more_than_8_bits(script, tmp_path):
    """Gray, with few bits, with a palette, progressive, of four inks, one frame: all are read."""
    shades = numpy.random.default_rng(0).integers(256, size=(32, 32, 4), dtype=numpy.uint8)
    color = Image.fromarray(shades[..., :3])
    color.convert("1").save(tmp_path / "1.png")
    color.convert("P").save(tmp_path / "palette.png")
    color.convert("P").save(tmp_path / "still.gif")
    color.save(tmp_path / "progressive.jpg", progressive=True)
    color.save(tmp_path / "lossless.webp", lossless=True)
    Image.fromarray(shades, "CMYK").save(tmp_path / "inks.jpg")
    for path in tmp_path.iterdir():
        image = decoder(script)(path)
        assert image.shape == (3, 32, 32) and image.dtype == torch.uint8, path.name


@DECODERS
def test_a_name_that_is_no_utf_8(script, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    Image.new("L", (2, 2)).save(path)
    assert decoder(script)(path).shape == (3, 2, 2)


@DECODERS
def test_an_image_that_cannot_be_decoded_is_named(script, tmp_path):
    """By the error's one line that says what is wrong with it."""
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    for kind in ("gif", "webp"):
        frames[0].save(tmp_path / f"moves.{kind}", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "whole.jpg").unlink()
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "._x.JPEG").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X" + bytes(100))
    if script == "snsc.py":  # Pillow reads these
        frames[0].save(tmp_path / "x.bmp")
        frames[0].save(tmp_path / "x.tiff")
    for path in tmp_path.iterdir():
        with pytest.raises(RuntimeError) as caught:
            decoder(script)(path)
        assert str(caught.value).startswith(f"{path}: "), path.name


def test_a_bad_image_is_named_by_the_run(photos, tmp_path):
    """Also if a loader's worker reads it."""
    bad = write_photos(tmp_path) / "train" / "bee" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    done = forked("snsc.py", *photos, "--data", tmp_path, "--workers", 1)
    assert done.code == 1 and not done.timed_out
    assert f"RuntimeError: {bad}: " in done.err


@pytest.mark.parametrize("train, test", [(12, 5), (25_000, None)])
def test_images_are_the_first_ones_or_repeated(train, test, tmp_path):
    from torchvision import datasets

    write_images(tmp_path, train, test)
    for part, count in ((True, train), (False, test)):
        some, whole = (datasets.FashionMNIST(path, part) for path in (tmp_path, ROOT / "data"))
        count, there = count or len(whole), len(whole)
        assert len(some) == count
        chosen = torch.arange(count) % there
        assert some.data.equal(whole.data[chosen]) and some.targets.equal(whole.targets[chosen])
