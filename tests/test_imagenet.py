"""imagenet.py: what it trains, its images, its command line. test_interrupted.py has its faults."""

import fcntl
import io
import os
import random
import re
import runpy
import shutil
import signal
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import support
import torch
from kills import SCRIPT
from PIL import Image
from spies import ALWAYS, at_calls
from support import ROOT, Forked, forked, free_port, make_model, records, succeeded, write_photos
from torchvision.transforms import v2

STEPS = 12  # of four epochs
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


def test_what_no_decoder_reads_is_a_bad_image(script):
    picture = Image.new("RGB", (40, 30), (200, 100, 50))
    animated = saved(picture, "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30))])
    kinds = [saved(picture, kind) for kind in ("BMP", "TIFF", "PPM")]
    png = saved(picture, "PNG")
    for data in [b"", animated, *kinds, png[:60], png[:20], b"\x00\x05\x16\x07"]:
        with pytest.raises(script.BadImage):
            script.decode(data)


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
    """Its file is named, or skipped and counted."""
    folder = write_photos(tmp_path / "photos")
    spoil(folder, "3.jpg", b"crash")
    shutil.copy(folder / "train/ant/3.jpg", folder / "val/bee/2.jpg")
    here = [*small_run, "--data", folder, "--max-steps", 4]  # an epoch, its evaluation, a step
    done = forked(SCRIPT, *here, "--out", tmp_path / "a", prepare=crash_at_a_word)
    assert done.code == 2 and "ant/3.jpg: Segmentation fault in the decoder" in done.err
    skip = ["--out", tmp_path / "b", "--bad-images", "skip"]
    succeeded(forked(SCRIPT, *here, *skip, prepare=crash_at_a_word))
    (line,) = records(tmp_path / "b" / "log.jsonl", "eval")
    assert line["unreadable"] == 1
    train = records(tmp_path / "b" / "log.jsonl", "train")
    assert sum(line["unreadable"] for line in train[:3]) == 1


def test_only_what_was_read_is_skipped(small_run, tmp_path):
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


def test_images_are_those_of_image_folder(script, tmp_path):
    """Their order, labels and classes; hidden ones, as Jupyter and macOS make, are left out."""
    folder = write_photos(tmp_path / "photos", per_class=2)
    expected = {f"{path.parent.name}/{path.name}" for path in folder.glob("train/*/*")}
    for place in ("train/.ipynb_checkpoints", "train/bee/.ipynb_checkpoints"):
        shutil.copytree(folder / "train" / "ant", folder / place)
    spoil(folder, "._1.jpg", b"no image")
    args = Namespace(seed=3, bad_images="fail", image_size=32, least_area=0.08, augment="none")
    images = script.Photographs(folder / "train", args, train=True)
    assert images.classes == ["ant", "bee", "cat"] and len(images) == 6
    assert [images[1, k][1] for k in range(6)] == [0, 0, 1, 1, 2, 2]
    assert {os.fsdecode(name) for name in images.names} == expected
    assert not images.names.dtype.hasobject  # else each decoding process would copy the list


@pytest.mark.parametrize("height, width, least", [(375, 500, 0.08), (30, 200, 0.08)])
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
        (["--arch", "resnet"], ["--arch", "invalid choice", "resnet18"]),
        (["--data", "/nowhere"], ["--data /nowhere"]),
        (["--evaluate"], ["best.pt"]),
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
        done = forked(SCRIPT, *small_run, "--out", tmp_path, prepare=does_not_sleep)
    first, last = done.err.splitlines()
    assert done.code == 2 and "waiting up to 120 s: process 7 on there writes there" in first
    assert "process 7 on there writes there, name another" in last


def does_not_sleep():
    """Runs in the script's process: it waits in no time."""
    time.sleep = lambda seconds: None


# Ranks and launchers

MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_SIZE=2"
STEP = "SLURM_STEP_NODELIST=a SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0"
STEP += " SLURM_PROCID=1 SLURM_LOCALID=1"


@pytest.mark.parametrize(
    "variables, found",
    [
        ("RANK=0 WORLD_SIZE=1", ("env", 0, 0, 1, 1)),  # Kubernetes' PyTorchJob
        ("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", ("env", 3, 1, 4, 2)),
        (f"{MPI} OMPI_COMM_WORLD_LOCAL_SIZE=1", ("mpirun", 1, 0, 2, 1)),
        (f"{STEP} PMI_RANK=1 PMI_SIZE=2", ("srun", 1, 1, 2, 2)),
        # srun -N3 -n7 can be three tasks on two nodes, and one on the third:
        (STEP.replace("PER_NODE=2", "PER_NODE=3(x2),1"), ("srun", 1, 1, 7, 3)),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", ("mpiexec", 1, 1, 2, 2)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", ("python", 0, 0, 1, 1)),  # a batch script
        ("RANK=1 WORLD_SIZE=2", "LOCAL_RANK"),
        ("RANK=0 WORLD_SIZE=two", "WORLD_SIZE"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "2/0/2/1: no such rank"),
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


# Numbers


def test_nan_is_never_correct(script):
    """topk takes it for the largest logit."""
    logits = torch.tensor([[float("nan")] * 2, [1.0, 0.0], [float("inf"), float("inf")]])
    labels = torch.zeros(3, dtype=torch.long)
    meter = script.Meter(torch.device("cpu"))
    meter.add(script.losses_of(logits, labels), logits, labels)
    assert meter.sums[1:4].tolist() == [1, 1, 3]


def test_weights_that_are_not_finite_are_not_saved(small_run, tmp_path):
    """The fourth step's: the run ends in one line, before a line of the log shows the loss."""
    more = ["--log-every", 100, "--save-every", 1]
    done = forked(SCRIPT, *small_run, "--out", tmp_path, *more, prepare=diverges)
    refused(done, "not finite")
    assert records(tmp_path / "log.jsonl", "train")[-1]["step"] == 3
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
    """An overflow in the first step: with fp16 the scaler leaves it out, and it leaves no trace."""
    more = ["--precision", precision, "--out", tmp_path, "--max-steps", 3]
    done = forked(SCRIPT, *small_run, *more, prepare=overflows_once)
    losses = [line["loss"] for line in records(tmp_path / "log.jsonl", "train")]
    assert losses[0] is None
    if precision == "fp16":
        succeeded(done)
        assert losses[1] and losses[2]
    else:
        refused(done, "the loss is not finite in the steps up to 1")


def overflows_once():
    """Runs in the script's process: the first step's loss is infinite. What nobody has written is
    nan, as momentum could be whose first step was left out.
    """
    torch.use_deterministic_algorithms(True)
    name = "torch.nn.functional.cross_entropy"
    at_calls({1}, name, lambda loss, *words, **more: loss(*words, **more) * torch.inf)


def test_weights_that_do_not_fit(small_run, tmp_path):
    """--evaluate refuses them; training says how many it took."""
    small, large = (make_model("mobilenet_v3_small", classes) for classes in (3, 1000))
    good = small.state_dict()
    cases = {
        "head": (large.state_dict(), "2 tensors are missing or of another shape, as classifier.3"),
        "list": ([], "no dictionary of tensors"),
    }
    for name, (content, words) in cases.items():
        torch.save(content, tmp_path / name)
        more = ["--evaluate", "--weights", tmp_path / name, "--out", tmp_path / "out"]
        refused(forked(SCRIPT, *small_run, *more), f"{name}: ", words)
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
