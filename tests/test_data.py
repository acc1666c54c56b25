"""Every path to data, with small real files in each format."""

import fcntl
import hashlib
import io
import pickle
import tarfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support import SHARED, Forked, forked, records, refused, started, succeeded, write_idx
from test_bad_input import nobody

ONE_STEP = ["--max-steps", 1, "--batch-size", 10, "--log-every", 1, "--device", "cpu"]
PARTS = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
ARCHIVE = "cifar-10-python.tar.gz"


def cifar_archive() -> tuple[bytes, dict[str, str]]:
    """An archive in CIFAR-10's format, four images a part, and the md5 of each file in it."""
    names = [name.encode() for name in "plane car bird cat deer dog frog horse ship truck".split()]
    files = {"batches.meta": {b"label_names": names, "label_names": [n.decode() for n in names]}}
    for k, part in enumerate(PARTS):
        import numpy

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


def prepared(url: str, md5: str, sums: dict[str, str], bound: bool) -> None:
    """Runs in the script's process: its CIFAR-10 is the small one."""
    if bound:
        nobody()
    from torchvision.datasets import CIFAR10

    CIFAR10.url, CIFAR10.tgz_md5 = url, md5
    CIFAR10.train_list = [[part, sums[part]] for part in PARTS[:5]]
    CIFAR10.test_list = [[part, sums[part]] for part in PARTS[5:]]
    CIFAR10.meta = {**CIFAR10.meta, "md5": sums["batches.meta"]}


class Downloads:
    """A web server with a small CIFAR-10, which counts how often it is fetched."""

    def __init__(self, folder):
        self.count, self.seconds, (self.archive, self.sums) = 0, 0, cifar_archive()
        (folder / ARCHIVE).write_bytes(self.archive)
        outer = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self):
                outer.count += 1
                time.sleep(outer.seconds)
                super().do_GET()

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
        self.url = f"http://127.0.0.1:{self.server.server_port}/{ARCHIVE}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def start(self, script, data, *flags, bound=False) -> Forked:
        """Starts it alone: one process, or a world of one. bound: without root's powers."""
        md5 = hashlib.md5(self.archive).hexdigest()
        prepare = partial(prepared, self.url, md5, self.sums, bound)
        flags = ["--dataset", "cifar10", "--data", data, *ONE_STEP, *flags]
        (one,) = started(1, script, *flags, prepare=prepare, no_proxy="127.0.0.1")
        return one


@pytest.fixture
def downloads(tmp_path):
    (tmp_path / "served").mkdir()
    served = Downloads(tmp_path / "served")
    yield served
    served.server.shutdown()
    served.server.server_close()


def test_cifar10_is_downloaded_by_one_process_and_the_others_wait(downloads, tmp_path):
    """Three that start at once fetch it once; one that comes later not at all.

    They are worlds of their own that share a folder, as on machines that share one.
    """
    script, data = "mnmc_ddp_launch.py", tmp_path / "data"
    logs = [tmp_path / f"{k}.json" for k in range(4)]
    succeeded(downloads.start(script, tmp_path / "alone").finish())
    once, downloads.count = downloads.count, 0  # torchvision asks for a redirection first
    downloads.seconds = 2  # long enough for those who do not wait to ask too
    together = [downloads.start(script, data, "--log-json", log) for log in logs[:3]]
    succeeded(*(one.finish() for one in together))
    assert downloads.count == once
    succeeded(downloads.start(script, data, "--log-json", logs[3]).finish())
    assert downloads.count == once
    (first, *others) = ([step["loss"] for step in records(log, "train")] for log in logs)
    assert others == [first] * 3
    assert records(logs[0], "eval")[0]["images"] == 4


def test_the_lock_is_a_file_beside_the_data(downloads, tmp_path):
    """Who has download.lock open and locked keeps a process from the network; nothing else does."""
    data = tmp_path / "data"
    data.mkdir()
    with open(data / "download.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        waiting = downloads.start("mnmc_ddp_launch.py", data)
        succeeded(downloads.start("snsc.py", tmp_path / "other").finish())
        fetched = downloads.count  # by the other one: by now this one would have asked, too
        assert fetched and waiting.process.is_alive() and len([*data.iterdir()]) == 1
    succeeded(waiting.finish())
    assert downloads.count == 2 * fetched
    names = {path.name for path in data.iterdir()}
    assert names == {path.name for path in (tmp_path / "other").iterdir()} | {"download.lock"}


scripts = pytest.mark.parametrize("script", ["snsc.py", "mnmc_ddp_launch.py"])


@scripts
def test_intact_data_needs_no_place_to_write_to(script, downloads, tmp_path):
    """A folder that someone else has filled, which this user may only read."""
    data = tmp_path / "data"
    succeeded(downloads.start("snsc.py", data).finish())
    downloads.count = 0
    for folder in (data, data / "cifar-10-batches-py"):
        folder.chmod(0o555)
    succeeded(downloads.start(script, data, bound=True).finish())
    assert not downloads.count and not (data / "download.lock").exists()
    (tmp_path / "empty").mkdir(mode=0o555)  # and a download to such a folder is refused
    done = downloads.start(script, tmp_path / "empty", bound=True).finish()
    refused(done, "--data", "Permission")


@scripts
def test_a_damaged_cifar10_file_is_unpacked_again(script, downloads, tmp_path):
    """A batch that was cut short is no batch; the archive beside it is still good."""
    data = tmp_path / "data"
    succeeded(downloads.start(script, data).finish())
    batch, downloads.count = data / "cifar-10-batches-py" / PARTS[2], 0
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-100])
    succeeded(downloads.start(script, data).finish())
    assert batch.read_bytes() == whole and not downloads.count


@scripts
def test_a_failed_download_is_one_line(script, downloads, tmp_path):
    downloads.url += ".gone"
    refused(downloads.start(script, tmp_path / "data").finish(), "--data", "cifar10", "404")


@scripts
def test_a_corrupt_archive_is_one_line(script, downloads, tmp_path):
    """What the server sends is not what it should be: refused, and not unpacked."""
    (tmp_path / "served" / ARCHIVE).write_bytes(downloads.archive[:-1000])
    done = downloads.start(script, tmp_path / "data").finish()
    refused(done, "--data", "cifar10", "corrupted")
    assert not (tmp_path / "data" / "cifar-10-batches-py").exists()


@scripts
def test_a_corrupt_archive_on_disk_is_fetched_again(script, downloads, tmp_path):
    """A download that was cut off does not need a hand to delete it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ARCHIVE).write_bytes(downloads.archive[:-1000])
    succeeded(downloads.start(script, tmp_path / "data").finish())
    assert (tmp_path / "data" / ARCHIVE).read_bytes() == downloads.archive


@pytest.mark.parametrize("train, test", [(None, 2000), (60, 20)], ids=["embedded", "own"])
def test_fashion_mnist(train, test, tmp_path):
    """The embedded images, and files of another size in a folder of one's own."""
    folder = ["--data", write_idx(tmp_path, train, test)] if train else []
    log = tmp_path / "log.json"
    flags = ["--dataset", "fashion-mnist", *folder, *ONE_STEP, "--log-json", log]
    succeeded(forked("snsc.py", *flags))
    assert records(log, "eval")[0]["images"] == test


def test_imagenet_reads_jpeg_and_png_of_any_size_gray_or_not(photos, tmp_path):
    """Three shades in three classes are told apart soon, and the classes are counted."""
    log = tmp_path / "log.json"
    flags = [*photos, "--epochs", 4, "--lr", 0.02, "--log-json", log]
    succeeded(forked("snsc.py", *flags, "--image-size", 40))
    steps = records(log, "train")
    assert steps[0]["loss"] < 2 and steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert records(log, "eval")[0]["images"] == 18


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no real photographs beside the project")
def test_imagenet_reads_photographs(tmp_path):
    """200 to train on, 224 pixels by default, decoded by two workers."""
    kept = {"train": {}, "val": {}}
    with tarfile.open(SHARED / "data" / "imagenette-2500.tar.xz") as archive:
        for entry in archive:
            *_, part, label, _ = ["", "", *entry.name.split("/")]
            most = {"train": 20, "val": 2}.get(part, 0)
            if entry.isfile() and kept.get(part, {}).get(label, 0) < most:
                kept[part][label] = kept[part].get(label, 0) + 1
                archive.extract(entry, tmp_path, filter="data")
    (train,) = tmp_path.rglob("train")
    assert sum(kept["train"].values()) == 200
    log = tmp_path / "log.json"
    flags = ["--dataset", "imagenet", "--data", train.parent, *ONE_STEP, "--batch-size", 20]
    succeeded(forked("snsc.py", *flags, "--workers", 2, "--log-json", log))
    assert records(log, "start")[0]["image_size"] == 224
    assert records(log, "eval")[0]["images"] == sum(kept["val"].values()) == 20


def test_synthetic_can_be_learnt(tmp_path):
    """A shade a class: in 30 steps the loss falls to less than half of a guess's, which is 2.3."""
    log = tmp_path / "log.json"
    flags = ["--dataset", "synthetic", "--batch-size", 100, "--max-steps", 30, "--log-every", 10]
    succeeded(forked("snsc.py", *flags, "--lr", 0.005, "--device", "cpu", "--log-json", log))
    losses = [step["loss"] for step in records(log, "train")]
    assert losses[-1] < 1.15 < losses[0]
