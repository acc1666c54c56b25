"""imagenet.py: what it trains, its images, its command line. test_interrupted.py has its faults."""

import errno
import fcntl
import io
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import support
import torch
from kills import SCRIPT, numbers
from PIL import Image
from spies import ALWAYS, at_calls, at_the_end, said, tell
from support import (
    ROOT,
    Forked,
    forked,
    free_port,
    make_model,
    records,
    succeeded,
    world,
    write_photos,
)
from torchvision.transforms import v2

STEPS = 12  # of four epochs
INF = float("inf")
refused = partial(support.refused, code=2)


@pytest.fixture(scope="module")
def script() -> Namespace:
    """The script's names."""
    return Namespace(**runpy.run_path(str(ROOT / SCRIPT)))


def test_the_whole_run_follows_its_flags(whole, whole_folder):
    """Every step once, then the averaged weights' evaluation; and the schedule's learning rate."""
    steps = [key[1] for key in whole if key[0] == "train"]
    assert steps == [*range(1, STEPS + 1)]
    assert {"top1", "ema_top1", "top5", "ema_loss"} <= set(whole["eval", 4])
    rates = [whole["train", step]["lr"] for step in steps]
    assert rates[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < 0.005
    for line in records(whole_folder / "log.jsonl", "eval"):  # waiting is counted
        assert 0 < line["data_seconds"] <= line["seconds"]


# Images


def spoil(folder, name, content) -> None:
    (folder / "train" / "ant" / name).write_bytes(content)


def test_what_is_not_an_image_is_fatal_or_skipped_and_counted(small_run, tmp_path):
    folder = write_photos(tmp_path / "photos")
    good = (folder / "train/ant/1.jpg").read_bytes()
    spoil(folder, "1.jpg", b"")
    spoil(folder, "2.jpg", good[: len(good) // 3])
    spoil(folder, "3.jpg", b"no image at all")
    here = [*small_run, "--data", folder, "--max-steps", 3]
    done = forked(SCRIPT, *here, "--out", tmp_path / "a")
    assert done.code == 2 and "train/ant" in done.last_line and "--bad-images" in done.last_line
    done = forked(SCRIPT, *here, "--out", tmp_path / "b", "--bad-images", "skip")
    succeeded(done)
    train = records(tmp_path / "b" / "log.jsonl", "train")
    named = {path.split("/")[-1] for path in re.findall(r"^skipped: (\S+): ", done.err, re.M)}
    assert {"1.jpg", "3.jpg"} <= named <= {"1.jpg", "2.jpg", "3.jpg"}
    assert sum(r["unreadable"] for r in train) == len(named)
    assert sum(r["images"] for r in train) == 36 - len(named)


def test_pictures_of_every_kind_are_read(script):
    """Gray, palette, transparency, CMYK, 16 bits: all become three channels of bytes."""
    picture = Image.new("RGB", (40, 30), (200, 100, 50))
    kinds = {"JPEG": ("L", "CMYK"), "PNG": ("P", "RGBA", "1", "LA"), "GIF": ("RGB",)}
    kinds["WEBP"] = ("RGBA",)
    data = [saved(picture.convert(mode), kind) for kind in kinds for mode in kinds[kind]]
    data.append(saved(Image.new("I;16", (40, 30), 40_000), "PNG"))
    found = [script.decode(one) for one in data]
    assert {(image.shape, image.dtype) for image in found} == {((3, 30, 40), torch.uint8)}
    assert found[1].float().mean((1, 2))[0] > 150  # CMYK is not inverted
    assert found[-1].float().mean() == 40_000 // 256
    picture.putalpha(0)  # of transparent pixels, the color below counts
    for kind in ("PNG", "WEBP"):
        image = script.decode(saved(picture, kind, exact=True, lossless=True))
        assert image[:, 0, 0].tolist() == [200, 100, 50]


def saved(picture, kind, **how) -> bytes:
    picture.save(file := io.BytesIO(), kind, **how)
    return file.getvalue()


def test_what_no_decoder_reads_is_a_bad_image(script, monkeypatch, tmp_path):
    """Named as such; but where the memory is full, that is no fault of the image."""
    picture = Image.new("RGB", (40, 30), (200, 100, 50))
    animated = saved(picture, "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30))])
    kinds = [saved(picture, kind) for kind in ("BMP", "TIFF", "PPM")]
    png = saved(picture, "PNG")
    for data in [b"", animated, *kinds, png[:60], png[:20], b"\x00\x05\x16\x07"]:
        with pytest.raises(script.BadImage):
            script.decode(data)
    monkeypatch.setitem(script.decode.__globals__, "decode_image", too_large)
    with pytest.raises(MemoryError, match="allocate"):
        script.decode(png)
    images = photographs(script, write_photos(tmp_path), bad_images="skip")
    with pytest.raises(script.UserError, match=r"ant/0\.png: too little memory"):
        images[1, 0]


def too_large(data, mode):
    return torch.empty(1 << 60)


def crash_at_a_word():
    """Runs in the script's process: some bytes crash the decoder, and with it the process."""

    def crash(decode, data, **more):
        if bytes(data[:5].tolist()) == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(data, **more)

    at_calls(ALWAYS, "torchvision.io.decode_image", crash)
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    iterator._try_get_data.__defaults__ = (0.2,)  # seconds, not 5, from one look to the next


def test_a_crash_of_the_decoder_is_a_bad_image(small_run, tmp_path):
    """Its file is named, or skipped: then the numbers are those of a file that is refused."""
    seen = {}
    for word in (b"crash", b"no image"):
        folder = write_photos(tmp_path / word.decode())
        spoil(folder, "3.jpg", word)
        shutil.copy(folder / "train/ant/3.jpg", folder / "val/bee/2.jpg")
        more = ["--data", folder, "--epochs", 2, "--out", tmp_path / f"{word} out"]
        more += ["--bad-images", "skip"]
        succeeded(forked(SCRIPT, *small_run, *more, prepare=crash_at_a_word))
        (*_, line) = records(tmp_path / f"{word} out" / "log.jsonl", "eval")
        assert line["unreadable"] == 1
        seen[word] = numbers(tmp_path / f"{word} out")
    assert seen[b"crash"] == seen[b"no image"]
    more = ["--data", tmp_path / "crash", "--out", tmp_path / "fail"]
    done = forked(SCRIPT, *small_run, *more, prepare=crash_at_a_word)
    assert done.code == 2 and "ant/3.jpg: Segmentation fault in the decoder" in done.err


def test_only_what_was_read_is_skipped(script, small_run, tmp_path):
    """A file that is gone ends the run; so does a folder of which too much is skipped."""
    folder = write_photos(tmp_path / "photos")
    (folder / "train/ant/3.jpg").unlink()
    (folder / "train/ant/3.jpg").symlink_to("/nowhere")
    more = ["--data", folder, "--bad-images", "skip", "--out"]
    refused(forked(SCRIPT, *small_run, *more, tmp_path / "a"), "No such file", "ant/3.jpg")
    (folder / "train/ant/3.jpg").unlink()
    for k in range(1, 12):
        spoil(folder, f"{k}.jpg", b"no image")
    done = forked(SCRIPT, *small_run, *more, tmp_path / "b")
    assert done.code == 2 and re.search(r"1\d of \d\d images were skipped", done.last_line)
    with pytest.raises(OSError, match="Input/output error"), script.user_error("--data"):
        raise OSError(errno.EIO, "Input/output error")


def test_names_that_are_no_text(small_run, tmp_path):
    """In a Latin-1 file system: a file, a class, --out, whose checkpoint is resumed."""
    photos, name = write_photos(tmp_path / "photos"), "caf\udce9"
    for part in ("train", "val"):
        (photos / part / "cat").rename(photos / part / name)
        (photos / part / "ant" / "0.png").rename(photos / part / "ant" / f"{name}.png")
    more = ["--data", photos, "--out", tmp_path / name, "--save-every", 1, "--max-steps"]
    for steps in (2, 3):
        succeeded(forked(SCRIPT, *small_run, *more, steps))
    *_, start = records(tmp_path / name / "log.jsonl", "start")
    assert start["resumed"].startswith("step-000000002") and start["classes"] == 3


def test_a_long_tmpdir_is_refused(small_run, tmp_path):
    """Else the loaders' workers would hang: a socket's path has at most 107 bytes."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    done = forked(
        SCRIPT, *small_run, "--out", tmp_path / "out", TMPDIR=folder, prepare=no_sockets_yet
    )
    refused(done, f"TMPDIR {folder}", "AF_UNIX path too long")


def no_sockets_yet():
    """Runs in the script's process: the folder of its sockets is not that of this process."""
    multiprocessing.current_process()._config.pop("tempdir", None)


def test_random_numbers_are_the_same_in_any_python(script):
    """They follow from random.random() and from torch's generator; this also holds for a resume."""
    dice = script.dice_of(3, 1, 7)
    assert [dice.random() for _ in range(2)] == [0.2487242717171796, 0.8872547643544534]
    assert script.random_window(375, 500, dice, 0.08) == (11, 17, 305, 306, False)
    sampler = script.ResumableSampler(8, 4, 1, 3, Namespace(rank=0, size=1))
    assert [index for _, index in sampler] == [3, 0, 2, 4, 6, 7, 5, 1]


def test_imagenet_as_it_is_downloaded_is_refused(small_run, tmp_path):
    """A val/ without class folders, and archives that are not unpacked."""
    folder = write_photos(tmp_path / "photos")
    for path in [*(folder / "val").iterdir()]:
        shutil.rmtree(path)
    shutil.copy(folder / "train/ant/1.jpg", folder / "val/ILSVRC2012_val_00000001.JPEG")
    refused(
        forked(SCRIPT, *small_run, "--data", folder, "--out", tmp_path / "out"), "sort ImageNet"
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "ILSVRC2012_img_train.tar").touch()
    refused(forked(SCRIPT, *small_run, "--data", bare, "--out", tmp_path / "out"), "unpack")


def test_a_batch_is_the_same_for_any_number_of_ranks(script):
    """And so are its parts, whether ranks or --accumulate make them."""

    def order(rank, world_size, accumulate):
        place = Namespace(rank=rank, size=world_size)
        made = script.ResumableSampler(50, 12, accumulate, 0, place)
        made.begin(3, 1)
        assert len(made) == len([*made])
        return [index for _, index in made]

    one, two = order(0, 1, 1), [order(rank, 2, 1) for rank in range(2)]
    assert len(one) == 36 and len(set(one)) == 36
    for step in range(3):
        parts = [part[6 * step : 6 * step + 6] for part in two]
        batch = one[12 * step : 12 * step + 12]
        assert [batch[0::2], batch[1::2]] == parts
        assert order(0, 1, 2)[12 * step : 12 * step + 12] == parts[0] + parts[1]


def photographs(script, folder, **more):
    """A training set of the script's."""
    args = Namespace(seed=3, bad_images="fail", image_size=32, least_area=0.08, augment="none")
    return script.Photographs(folder / "train", Namespace(**{**vars(args), **more}), train=True)


def test_an_images_augmentation_follows_only_from_its_key(script, tmp_path):
    """The same in any order; another in another epoch; dropout's generator stays as it was."""
    images = photographs(script, write_photos(tmp_path / "photos"), augment="trivial")
    before = torch.get_rng_state()
    first = [images[1, k][0] for k in (0, 1, 2)]
    again = [images[1, k][0] for k in (2, 1, 0)][::-1]
    other = [images[2, k][0] for k in (0, 1, 2)]
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert torch.equal(before, torch.get_rng_state())


def test_images_are_those_of_image_folder(script, tmp_path):
    """Their order, labels and classes; hidden ones, as Jupyter and macOS make, are left out."""
    folder = write_photos(tmp_path / "photos", per_class=2)
    expected = {f"{path.parent.name}/{path.name}" for path in folder.glob("train/*/*")}
    for place in ("train/.ipynb_checkpoints", "train/bee/.ipynb_checkpoints"):
        shutil.copytree(folder / "train" / "ant", folder / place)
    spoil(folder, "._1.jpg", b"no image")
    images = photographs(script, folder)
    assert images.classes == ["ant", "bee", "cat"] and len(images) == 6
    assert [images[1, k][1] for k in range(6)] == [0, 0, 1, 1, 2, 2]
    assert {os.fsdecode(name) for name in images.names} == expected
    assert not images.names.dtype.hasobject  # else each decoding process would copy the list


@pytest.mark.parametrize(
    "height, width, least", [(375, 500, 0.08), (375, 500, 0.9), (30, 200, 0.08)]
)
def test_windows_are_those_of_torchvision(script, height, width, least):
    """Means over many draws: top, left, height, width; and half of the images are flipped."""

    def means(draw):
        return torch.tensor([draw() for _ in range(1500)], dtype=torch.float64).mean(0)

    crop, dice = v2.RandomResizedCrop(10, scale=(least, 1)), random.Random(0)
    shape = [torch.empty(3, height, width, device="meta")]
    names = ("top", "left", "height", "width")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = means(lambda: [crop.make_params(shape)[name] for name in names])
    *ours, flips = means(lambda: script.random_window(height, width, dice, least))
    assert torch.stack(ours).tolist() == pytest.approx(theirs.tolist(), abs=0.02 * width)
    assert flips == pytest.approx(0.5, abs=0.03)


def test_windows_where_no_draw_fits(script):
    """The largest part of the middle with the ratio; in evaluation always the middle."""
    dice = random.Random(0)
    assert script.random_window(300, 2000, dice, 1)[:4] == (0, 800, 300, 400)
    assert script.middle_window(375, 500, dice, 0.8) == (37, 100, 300, 300, False)


def test_schedules(script):
    """Warm-up, half a cosine to nearly 0, or steps; --scale-lr by the global batch."""
    args = Namespace(lr=0.1, scale_lr=True, batch_size=1024, warmup_epochs=1, epochs=10)
    args.schedule, args.decay_epochs = "cosine", 4
    rates = [script.learning_rate(args, step, 10) for step in range(100)]
    assert rates[10] == max(rates) == pytest.approx(0.4) and rates[55] == pytest.approx(0.2)
    assert 0 < rates[99] < 0.001
    args.schedule = "steps"
    rates = [script.learning_rate(args, step, 10) for step in (39, 40, 80)]
    assert rates == pytest.approx([0.4, 0.04, 0.004])


# The command line


def test_a_run_can_be_started_from_its_flags(whole_folder, tmp_path):
    """flags.txt of one run starts another; later flags beat it, and switches can be unset."""
    flags = whole_folder / "flags.txt"
    more = tmp_path / "more"
    more.write_text("--model-ema-decay 0.5  --channels-last  # two in a line\n\n--keep=7\n")
    out = tmp_path / "its folder"
    succeeded(forked(SCRIPT, f"@{flags}", f"@{more}", "--out", out, "--max-steps=1", "--keep", 5))
    changed = {"out": f"'{out}'", "max-steps": "1", "model-ema-decay": "0.5", "keep": "5"}
    expected = {line.partition("=")[0]: line for line in flags.read_text().splitlines()}
    expected |= {f"--{name}": f"--{name}={value}" for name, value in changed.items()}
    expected["--no-channels-last"] = "--channels-last"
    written = (out / "flags.txt").read_text().splitlines()
    assert sorted(written) == sorted(expected.values())
    again = [f"@{out / 'flags.txt'}", "--no-channels-last", "--out", tmp_path / "third"]
    succeeded(forked(SCRIPT, *again))
    assert "--no-channels-last\n" in (tmp_path / "third" / "flags.txt").read_text()


@pytest.mark.parametrize(
    "more, words",
    [
        (["--batch-size", 13, "--accumulate", 2], ["--batch-size 13"]),
        (["--warmup-epochs", 4], ["--warmup-epochs"]),
        (["--arch", "resnet"], ["--arch", "invalid choice", "resnet18"]),
        (["--lr", "nan"], ["--lr"]),
        (["--data", "/nowhere"], ["--data /nowhere"]),
        (["--weights", "/nowhere"], ["/nowhere"]),
        (["@/nowhere"], ["/nowhere"]),
        (["--out", "/dev/null/out"], ["/dev/null"]),
        (["--batch-size", 100], ["--batch-size 100", "36"]),
        (["--evaluate"], ["best.pt"]),
        (["--sync-bn"], ["--sync-bn"]),
        (["--colour", "red"], ["--colour"]),
    ],
)
def test_bad_input_is_one_line(small_run, tmp_path, more, words):
    refused(forked(SCRIPT, *small_run, "--out", tmp_path / "out", *more), *words)


def test_the_best_weights_are_evaluated_alike(small_run, whole, whole_folder, tmp_path):
    """--evaluate takes best.pt of --out, or --weights: a plain state_dict."""
    best = max(line["ema_top1"] for key, line in whole.items() if key[0] == "eval")
    more = ["--out", tmp_path, "--evaluate", "--weights", whole_folder / "best.pt"]
    succeeded(forked(SCRIPT, *small_run, *more))
    (found,) = records(tmp_path / "log.jsonl", "eval")
    assert found["images"] == 18 and found["top1"] == best and found["unreadable"] == 0


def test_a_second_run_in_one_folder_is_refused(small_run, tmp_path):
    """Else two would write over each other's checkpoints."""
    with open(tmp_path / "lock", "w+") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        held.write("process 7 on there\n")
        held.flush()
        done = forked(SCRIPT, *small_run, "--out", tmp_path, prepare=partial(locked_for, 0))
    first, last = done.err.splitlines()
    assert done.code == 2 and "waiting up to 120 s: process 7 on there writes there" in first
    assert "process 7 on there writes there, name another" in last
    # An NFS server keeps a dead machine's lock for its lease: 90 seconds by default.
    more = ["--max-steps", 1, "--out", tmp_path]
    succeeded(forked(SCRIPT, *small_run, *more, prepare=partial(locked_for, 100)))
    assert (tmp_path / "lock").read_text().strip().endswith(f"on {socket.gethostname()}")


def locked_for(seconds):
    """Runs in the script's process, where these seconds pass at once, until it may lock a file."""
    slept, lockf = [0.0], fcntl.lockf

    def refuse(*words):
        if slept[0] < seconds:
            raise BlockingIOError
        lockf(*words)

    def sleep(seconds):
        slept[0] += seconds

    fcntl.lockf, time.sleep = refuse, sleep


# Ranks and launchers


@pytest.mark.parametrize(
    "affinity, quota, variables, srun, torchrun",
    [
        (12, INF, "", 48, 12),  # Slurm has bound each of four tasks to cores of its own
        (64, INF, "", 64, 64),
        (64, INF, "SLURM_CPUS_ON_NODE=40", 40, 40),
        (64, INF, "SLURM_STEP_NODELIST=a SLURM_CPUS_PER_TASK=6 SLURM_CPUS_ON_NODE=40", 24, 6),
        (64, 3.5, "", 3, 3),  # a container's share of the time, of all processes in it
        (64, 0.5, "", 1, 1),
    ],
)
def test_the_cores_of_a_machine(script, monkeypatch, affinity, quota, variables, srun, torchrun):
    """For four ranks, on 64 cores. torchrun's processes share them; srun may bind each."""
    count = script.cores_of_node
    monkeypatch.setattr(os, "environ", dict(pair.split("=") for pair in variables.split()))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(affinity))
    monkeypatch.setitem(count.__globals__, "cores_by_cgroup", lambda: quota)
    found = [count(Namespace(launcher=how, local_size=4)) for how in ("srun", "torchrun")]
    assert found == [srun, torchrun]


MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_SIZE=2"
STEP = "SLURM_STEP_NODELIST=a SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0"
STEP += " SLURM_PROCID=1 SLURM_LOCALID=1"


@pytest.mark.parametrize(
    "variables, found",
    [
        ("RANK=0 WORLD_SIZE=1", ("env", 0, 0, 1, 1)),  # Kubernetes' PyTorchJob
        ("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", ("env", 3, 1, 4, 2)),
        (f"{MPI} OMPI_COMM_WORLD_LOCAL_SIZE=1", ("mpirun", 1, 0, 2, 1)),
        (f"{MPI} OMPI_COMM_WORLD_LOCAL_SIZE=1 {STEP}", ("mpirun", 1, 0, 2, 1)),
        (f"{STEP} PMI_RANK=1 PMI_SIZE=2", ("srun", 1, 1, 2, 2)),
        # srun -N3 -n7 can be three tasks on two nodes, and one on the third:
        (STEP.replace("PER_NODE=2", "PER_NODE=3(x2),1"), ("srun", 1, 1, 7, 3)),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", ("mpiexec", 1, 1, 2, 2)),
        ("RANK= WORLD_SIZE=", ("python", 0, 0, 1, 1)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", ("python", 0, 0, 1, 1)),  # a batch script
        ("RANK=1 WORLD_SIZE=2", "LOCAL_RANK"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", "LOCAL_WORLD_SIZE"),
        ("RANK=0", "WORLD_SIZE"),
        ("RANK=0 WORLD_SIZE=two", "WORLD_SIZE"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "2/0/2/1: no such rank"),
        (MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK=1 PMI_SIZE=2", "MPI_LOCALRANKID"),
    ],
)
def test_ranks_set_by_a_platform(script, monkeypatch, variables, found):
    """What is unset follows for one process; else one line names the variable."""
    monkeypatch.setattr(os, "environ", dict(pair.split("=") for pair in variables.split()))
    if isinstance(found, tuple):
        assert script.find_ranks() == found
    else:
        with pytest.raises(script.UserError, match=found):
            script.find_ranks()


def one_rank_has(small_run, out, *more, prepare=None) -> list:
    """Two ranks; the second one has other flags."""
    env = {"MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    words = [SCRIPT, *small_run, "--out", out]
    first = Forked(*words, **env, RANK=0, LOCAL_RANK=0)
    second = Forked(*words, *more, **env, RANK=1, LOCAL_RANK=1, prepare=prepare)
    return [first.finish(60), second.finish(60)]


def test_ranks_with_other_flags_or_files_are_refused(small_run, tmp_path):
    """All of them: else they would train nonsense, or wait for each other."""
    more = ["--lr", 0.2, "--log-every", 7, "--workers", 1, "--hang-timeout", 99]
    for done in one_rank_has(small_run, tmp_path / "a", *more):
        line = refused(done, "rank 1 (on", "--lr 0.2, not 0.05", "--log-every 7, not 1")
        assert "workers" not in line
    for done in one_rank_has(small_run, tmp_path / "b", prepare=other_files):
        refused(done, "rank 1 (on", "train/cat/5.jpg", "val/cat/5.jpg")
    assert not records(tmp_path / "b" / "log.jsonl", growing=True)


def other_files():
    """Runs in the script's process: some of its files have another content."""
    read = Path.read_bytes
    other = ("train/cat/5.jpg", "val/cat/5.jpg")
    Path.read_bytes = lambda path: read(path) + b"other" * str(path).endswith(other)


def test_one_rank_alone_says_whom_it_waited_for(small_run, tmp_path):
    """In one line, which names the variables."""
    env = {"MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    more = ["--out", tmp_path, "--hang-timeout", 1]
    done = forked(SCRIPT, *small_run, *more, **env, RANK=0, LOCAL_RANK=0)
    assert done.code == 2 and "MASTER_ADDR=" in done.last_line  # torch prints more lines
    assert done.last_line.endswith("rank 1 did not start within 0:00:01")
    for done in world(2, SCRIPT, *small_run, *more[:2], prepare=connects_to_nobody):
        refused(done, "has not joined the others", "GLOO_SOCKET_IFNAME=lo")
    more = {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    refused(forked(SCRIPT, *small_run, "--out", tmp_path, **more), "MASTER_ADDR and MASTER_PORT")


def connects_to_nobody():
    """Runs in the script's process: two minutes pass at once, while it connects."""
    timer = threading.Timer
    threading.Timer = lambda seconds, work: timer(seconds / 100, work)
    torch.distributed.init_process_group = lambda *words, **more: time.sleep(60)


# Numbers


def test_nan_is_never_correct(script):
    """topk takes it for the largest logit."""
    logits = torch.tensor([[float("nan")] * 2, [1.0, 0.0], [float("inf"), float("inf")]])
    labels = torch.zeros(3, dtype=torch.long)
    meter = script.Meter(torch.device("cpu"))
    meter.add(script.losses_of(logits, labels), logits, labels)
    assert meter.sums[1:4].tolist() == [1, 1, 3]


@pytest.mark.parametrize("more", [[], ["--log-every", 100, "--save-every", 1]])
def test_a_loss_that_is_not_finite_ends_the_run(small_run, tmp_path, more):
    """In one line, at the next line of the log or the next save; what was saved is finite."""
    # The weights are not finite after the fourth step, the loss in the fifth.
    done = forked(SCRIPT, *small_run, "--out", tmp_path, *more, prepare=diverges)
    refused(done, "not finite")
    last = records(tmp_path / "log.jsonl", "train")[-1]
    assert last["step"] == (3 if more else 5) and (more or last["loss"] is None)
    found = [torch.load(path)["model"] for path in tmp_path.glob("*.pt") if "step" in path.name]
    assert found and all(part.isfinite().all() for model in found for part in model.values())
    assert not [*tmp_path.glob("*.part")]


def diverges():
    """Runs in the script's process: the fourth step leaves weights that are nan."""

    def diverge(step, optimizer, *words, **more):
        step(optimizer, *words, **more)
        optimizer.param_groups[0]["params"][0].data.fill_(float("nan"))

    at_calls({4}, "torch.optim.SGD.step", diverge)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_the_scaler_skips_ends_nothing(small_run, tmp_path, precision):
    """An overflow in the second step: with fp16 the scaler leaves it out."""
    more = ["--precision", precision, "--out", tmp_path, "--max-steps", 3]
    done = forked(SCRIPT, *small_run, *more, prepare=overflows_once)
    losses = [line["loss"] for line in records(tmp_path / "log.jsonl", "train")]
    assert losses[1] is None and losses[0]
    if precision == "fp16":
        succeeded(done)
        assert losses[2]
    else:
        refused(done, "the loss is not finite in the steps up to 2")


def overflows_once():
    """Runs in the script's process: the second step's loss is infinite."""
    name = "torch.nn.functional.cross_entropy"
    at_calls({2}, name, lambda loss, *words, **more: loss(*words, **more) * torch.inf)


def test_weights_that_do_not_fit(small_run, tmp_path):
    """--evaluate refuses them; training says how many it took. Old files are read."""
    small, large = (make_model("mobilenet_v3_small", classes) for classes in (3, 1000))
    good = small.state_dict()
    old = {key: part for key, part in good.items() if "num_batches" not in key}
    cases = {
        "head": (large.state_dict(), "2 tensors are missing or of another shape, as classifier.3"),
        "arch": (make_model("resnet18", 3).state_dict(), "has no bn1.bias"),
        "list": ([], "no dictionary of tensors"),
        "nan": ({key: part * float("nan") for key, part in good.items()}, "loss is not finite"),
    }
    for name, (content, words) in cases.items():
        torch.save(content, tmp_path / name)
        more = ["--evaluate", "--weights", tmp_path / name, "--out", tmp_path / "out"]
        refused(forked(SCRIPT, *small_run, *more), f"{name}: ", words)
    torch.save(old, tmp_path / "old", _use_new_zipfile_serialization=False)
    more[2] = tmp_path / "old"
    succeeded(forked(SCRIPT, *small_run, *more))
    more = ["--weights", tmp_path / "head", "--out", tmp_path / "train", "--max-steps", 1]
    succeeded(forked(SCRIPT, *small_run, *more))
    (line,) = records(tmp_path / "train" / "log.jsonl", "weights")
    assert line["of"] == len(good) and line["tensors"] == len(good) - 2


def test_nohup_stays(script, monkeypatch):
    """A signal that was ignored when the run began does not stop it."""
    before, noted = {signal.SIGHUP: signal.SIG_IGN}, []
    monkeypatch.setattr(signal, "getsignal", lambda x: before.get(x, signal.SIG_DFL))
    monkeypatch.setattr(signal, "signal", lambda *words: noted.append(words[0]))
    script.Stop()
    assert {*noted} == {*script.SIGNALS} - {signal.SIGHUP}


# The log


def nobody_reads():
    """Runs in the script's process: stdout is a pipe, and its reader is gone."""
    reads, writes = os.pipe()
    os.dup2(writes, 1)
    os.close(reads)
    sys.stdout = open(1, "w", closefd=False)


def test_the_log_does_not_depend_on_stdout(small_run, tmp_path):
    done = forked(SCRIPT, *small_run, "--out", tmp_path, "--max-steps", 2, prepare=nobody_reads)
    succeeded(done)
    events = [line["event"] for line in records(tmp_path / "log.jsonl")]
    assert events == ["start", "train", "train", "end"]
    assert done.err.count("not printed") == 1 and len(done.err.splitlines()) == 1


@pytest.mark.parametrize("epochs, warm", [(5, 0.5), (6, 5.0)])
def test_the_default_warm_up_fits(small_run, tmp_path, epochs, warm):
    """Five epochs, or a tenth of fewer, which it says."""
    cut = small_run.index("--warmup-epochs")
    flags = [*small_run[:cut], *small_run[cut + 2 :], "--epochs", epochs, "--max-steps", 1]
    done = forked(SCRIPT, *flags, "--out", tmp_path)
    succeeded(done)
    (start,) = records(tmp_path / "log.jsonl", "start")
    assert start["warmup_epochs"] == warm
    assert ("instead of 5" in done.err) == (epochs < 6)


# Precision and time


@pytest.mark.parametrize("precision, matmul", [("fp32", False), ("tf32", True)])
def test_fp32_is_that_of_pytorch(small_run, tmp_path, precision, matmul):
    """It has TF32 in convolutions; tf32 adds it to the other products."""
    more = ["--max-steps", 1, "--out", tmp_path, "--precision", precision]
    done = forked(SCRIPT, *small_run, *more, prepare=tell_tf32)
    succeeded(done)
    assert said(done.out, "TF32") == [[True, matmul]]


def tell_tf32():
    """Runs in the script's process: at its end tells where TF32 is allowed."""
    backends = torch.backends
    at_the_end(lambda: tell("TF32", [backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32]))


def test_writing_a_checkpoint_is_no_time_of_training(small_run, tmp_path):
    """Neither rank 0's, nor that of the others, which wait for it."""
    more = ["--out", tmp_path, "--max-steps", 3, "--save-every", 1, "--log-every", 3]
    succeeded(*world(2, SCRIPT, *small_run, *more, prepare=slow_first_save))
    first, second = records(tmp_path / "log.jsonl", "train")
    assert [first["step"], second["step"]] == [1, 3]
    assert second["time"] - first["time"] > 4 > 2 * second["seconds"]


def slow_first_save():
    """Runs in the script's process: the first file takes four seconds."""
    at_calls({1}, "os.fsync", lambda fsync, file: (time.sleep(4), fsync(file)))


def test_a_first_step_that_the_scaler_skips_leaves_no_trace(script):
    """fp16's first gradients may be infinite; then fused SGD's momentum begins with the second."""
    args = Namespace(lr=0.1, weight_decay=1e-4, norm_bias_weight_decay=None)
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    skipping, plain = (script.make_optimizer(model, args) for model in models)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    torch.use_deterministic_algorithms(True)  # fills what nobody has written with nan
    try:
        for scale in (torch.inf, 1.0, 1.0):
            for model in models:
                model.zero_grad()
            scaler.scale(models[0](torch.ones(1, 3)).sum() * scale).backward()
            scaler.step(skipping)
            scaler.update()
            if scale == 1:
                models[1](torch.ones(1, 3)).sum().backward()
                plain.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert models[0].weight.equal(models[1].weight) and models[0].weight.isfinite().all()
