"""imagenet.py: an interrupted run goes on bit for bit, whatever it was that interrupted it."""

import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace

import psutil
import pytest
import torch
from PIL import Image
from support import ROOT, forked, records, refused, started, succeeded, world, write_photos

from bench.measure.process import environment

SCRIPT = "imagenet.py"
STEPS = 12  # of four epochs


@pytest.fixture(scope="module")
def script() -> Namespace:
    """The script's names."""
    return Namespace(**runpy.run_path(str(ROOT / SCRIPT)))


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list:
    """36 small pictures to train on, in 3 steps an epoch; all that has a state is switched on."""
    folder = write_photos(tmp_path_factory.mktemp("photos"))
    flags = ["--data", folder, "--arch", "mobilenet_v3_small", "--image-size", 32]  # has dropout
    flags += ["--batch-size", 12, "--epochs", 4, "--warmup-epochs", 1, "--ema", 0.9, "--lr", 0.05]
    return [*flags, "--log-every", 1, "--device", "cpu", "--workers", 2, "--hang-timeout", 120]


@pytest.fixture(scope="module")
def whole_folder(flags, tmp_path_factory):
    """The run of two processes that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole")
    succeeded(*world(2, SCRIPT, *flags, "--out", out))
    return out


@pytest.fixture(scope="module")
def whole(whole_folder) -> dict:
    """Its numbers."""
    return numbers(whole_folder)


def numbers(out) -> dict:
    """The loss of each step and each evaluation; where one was done again, both must agree."""
    found = {}
    for line in records(out / "log.jsonl"):
        if line["event"] in ("train", "eval"):
            key = line["event"], line.get("step", line["epoch"])
            kept = {k: v for k, v in line.items() if k.endswith(("loss", "top1", "top5", "lr"))}
            assert found.setdefault(key, kept) == kept, key
    return found


def wait_for(out, step) -> None:
    """Waits until a run has logged a step."""
    log, limit = out / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and any(r["step"] >= step for r in records(log, "train"))):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_the_whole_run_is_that_of_its_flags(whole):
    """Every step once, then the averaged weights' evaluation; the learning rate as it should be."""
    steps = [key[1] for key in whole if key[0] == "train"]
    assert steps == [*range(1, STEPS + 1)]
    assert {"top1", "ema_top1", "top5", "ema_loss"} <= set(whole["eval", 4])
    rates = [whole["train", step]["lr"] for step in steps]
    assert rates[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < 0.005


@pytest.mark.parametrize("step", [2, 3, 7])
def test_the_position_in_an_epoch_is_kept(flags, whole, tmp_path, step):
    succeeded(*world(2, SCRIPT, *flags, "--out", tmp_path, "--max-steps", step))
    succeeded(*world(2, SCRIPT, *flags, "--out", tmp_path))
    assert numbers(tmp_path) == whole


def test_three_processes_go_on_bit_for_bit(flags, tmp_path):
    """Their sums depend on the order, so on how DDP sorts the gradients; two hide that."""
    for out, steps in (("one", [7]), ("two", [2, 5, 7])):
        for step in steps:
            more = ["--out", tmp_path / out, "--max-steps", step]
            succeeded(*world(3, SCRIPT, *flags, *more))
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_all_at_one_step(flags, whole, tmp_path, number):
    """Given to one process; all save, end with exit code 75, and go on bit for bit."""
    ranks = started(2, SCRIPT, *flags, "--out", tmp_path)
    wait_for(tmp_path, 2)
    for process in [*psutil.Process(ranks[1].process.pid).children(), ranks[1].process]:
        os.kill(process.pid, number)  # the loader's workers, too, as Slurm does
    ended = [rank.finish(60) for rank in ranks]
    assert [done.code for done in ended] == [75, 75], ended
    (end,) = records(tmp_path / "log.jsonl", "end")
    assert end["finished"] is False and 2 < end["step"] < STEPS
    succeeded(*world(2, SCRIPT, *flags, "--out", tmp_path))
    assert numbers(tmp_path) == whole


def test_a_signal_cuts_an_evaluation_short(flags, tmp_path):
    """What it had so far is no result; the next start evaluates all."""
    folder = write_photos(tmp_path / "photos")
    for path in [*folder.glob("val/*/*")]:
        for k in range(150):  # 2,700 images more
            (path.parent / f"{k}-{path.name}").symlink_to(path)
    here, out = [*flags, "--data", folder, "--epochs", 2], tmp_path / "out"
    ranks = started(2, SCRIPT, *here, "--out", out)
    wait_for(out, 3)
    os.kill(ranks[1].process.pid, signal.SIGTERM)
    assert [rank.finish(60).code for rank in ranks] == [75, 75]
    assert not records(out / "log.jsonl", "eval")
    (end,) = records(out / "log.jsonl", "end")
    assert end["step"] == 3 and end["finished"] is False
    succeeded(*world(2, SCRIPT, *here, "--out", out, "--max-steps", 4))
    (line,) = records(out / "log.jsonl", "eval")
    assert line["epoch"] == 1 and line["images"] == 18 * 151


def test_killed_processes_lose_what_came_after_the_last_checkpoint(flags, whole, tmp_path):
    """SIGKILL: the others end by themselves; what is trained again gives the same numbers."""
    every = [*flags, "--out", tmp_path, "--save-every", 1]
    for step in (2, 5, 8):
        ranks = started(2, SCRIPT, *every)
        wait_for(tmp_path, step)
        ranks[step % 2].process.kill()
        ended = [rank.finish(60) for rank in ranks]
        assert all(done.code and not done.timed_out for done in ended)
    succeeded(*world(2, SCRIPT, *every))
    assert numbers(tmp_path) == whole


def test_the_number_of_processes_may_change(flags, tmp_path):
    """One process, with the same parts one after the other, goes on with the same loss.

    Without dropout, which then draws other numbers; of the next step, since a difference from
    another order of a sum grows tenfold a step.
    """
    same = [*flags, "--arch", "resnet18"]
    succeeded(*world(2, SCRIPT, *same, "--out", tmp_path / "two", "--max-steps", 4))
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    succeeded(*world(2, SCRIPT, *same, "--out", tmp_path / "two", "--max-steps", 5))
    more = ["--out", tmp_path / "one", "--max-steps", 5, "--accumulate", 2]
    succeeded(forked(SCRIPT, *same, *more))
    one, two = (records(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    for lines in (one, two):
        assert [r["resumed"] for r in lines if r["event"] == "start"][-1].startswith(
            "step-000000004"
        )
    assert one[-2]["step"] == two[-2]["step"] == 5
    assert one[-2]["loss"] == pytest.approx(two[-2]["loss"], rel=1e-5)


def damaged(path, how):
    """Spoils a checkpoint."""
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = b""
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(flags, whole, tmp_path, how):
    every = [*flags, "--out", tmp_path, "--save-every", 1]
    succeeded(*world(2, SCRIPT, *every, "--max-steps", 5))
    newest = sorted(tmp_path.glob("step-*.pt"))[-1]
    damaged(newest, how)
    first, other = world(2, SCRIPT, *every)
    succeeded(first, other)
    assert f"not used: {newest}" in first.err
    *_, start = records(tmp_path / "log.jsonl", "start")
    assert start["resumed"] == "step-000000004-epochs-0001.pt"
    assert numbers(tmp_path) == whole
    assert [path.name for path in tmp_path.glob("*.damaged")] == [f"{newest.stem}.damaged"]


@pytest.fixture(scope="module")
def begun(flags, tmp_path_factory):
    """A folder with checkpoints of one process."""
    out = tmp_path_factory.mktemp("begun")
    succeeded(forked(SCRIPT, *flags, "--out", out, "--save-every", 1, "--max-steps", 2))
    return out


@pytest.fixture
def copy(begun, tmp_path):
    """The same to spoil."""
    return shutil.copytree(begun, tmp_path / "copy")


def test_nothing_is_started_anew_where_no_checkpoint_is_whole(flags, copy):
    for path in copy.glob("step-*.pt"):
        damaged(path, "empty")
    done = forked(SCRIPT, *flags, "--out", copy)
    assert done.code == 2 and "no checkpoint there is whole" in done.last_line


class Evil:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_checkpoint_that_would_run_code_is_refused(flags, copy):
    for path in copy.glob("step-*.pt"):
        torch.save({"model": Evil()}, path, pickle_module=pickle)
    done = forked(SCRIPT, *flags, "--out", copy)
    assert done.code == 2 and "holds more than tensors" in done.err
    done = forked(SCRIPT, *flags, "--out", copy.parent / "new", "--weights", path)
    refused(done, "holds more than tensors")
    assert not (ROOT / "evil").exists()


@pytest.mark.parametrize("flag, value", [("--arch", "resnet18"), ("--lr", 0.1), ("--epochs", 5)])
def test_another_runs_checkpoint_is_refused(flags, begun, flag, value):
    refused(forked(SCRIPT, *flags, "--out", begun, flag, value), f"--out {begun}", flag)


def no_space():
    """Runs in the script's process: after a few files the disk is full."""
    import errno

    left, fsync = [6], os.fsync

    def full(file):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    os.fsync = full


def test_training_goes_on_where_the_disk_is_full(flags, tmp_path):
    """It is said, older checkpoints stay, no part of a file is left; at the end it is fatal."""
    every = [*flags, "--out", tmp_path, "--save-every", 1, "--max-steps", 6]
    done = forked(SCRIPT, *every, prepare=no_space)
    assert done.code == 2 and "could not be saved" in done.last_line
    assert "not saved: [Errno 28] No space left" in done.err
    assert len(records(tmp_path / "log.jsonl", "train")) == 6
    steps = [path.name[:14] for path in sorted(tmp_path.glob("step-*.pt"))]
    assert steps == ["step-000000001", "step-000000002"] and not [*tmp_path.glob("*.part")]


def test_a_log_on_a_full_disk_ends_nothing(flags, tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    done = forked(SCRIPT, *flags, "--out", tmp_path, "--max-steps", 2)
    succeeded(done)
    assert "not logged: [Errno 28]" in done.err and "train epoch=1 step=2" in done.out


def test_a_process_that_hangs_ends_all_and_shows_where(flags, tmp_path):
    ranks = started(2, SCRIPT, *flags, "--out", tmp_path, "--hang-timeout", 5)
    wait_for(tmp_path, 2)
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    try:
        done = ranks[0].finish(60)
    finally:
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        ranks[1].finish(60)
    assert done.code == 1 and "Timeout (0:00:05)!" in done.err and "in main" in done.err


def elastic(flags, out, restarts) -> subprocess.Popen:
    """A run of two processes by torchrun, one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", restarts, SCRIPT, *flags]
    command += ["--out", out, "--save-every", 1]
    words = [str(word) for word in command]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, cwd=ROOT, env=environment(1), start_new_session=True, **quiet)


def workers_of(job) -> list[psutil.Process]:
    """The processes that torchrun has started."""
    return psutil.Process(job.pid).children()


def test_torchrun_starts_a_killed_process_again(flags, whole, tmp_path):
    """Elastic: all processes are new, and go on from the last checkpoint to the same end."""
    job = elastic(flags, tmp_path, 3)
    try:
        for kill, step in enumerate((2, 6)):
            wait_for(tmp_path, step)
            workers_of(job)[kill].kill()
        assert job.wait(120) == 0
    finally:
        job.kill()
    assert len(records(tmp_path / "log.jsonl", "start")) == 3
    assert numbers(tmp_path) == whole


def test_when_torchrun_is_killed_its_processes_save_and_end(flags, whole, tmp_path):
    """Else they would go on beside those of the next start."""
    job = elastic(flags, tmp_path, 0)
    wait_for(tmp_path, 2)
    ranks = workers_of(job)
    job.kill()
    job.wait()
    _, alive = psutil.wait_procs(ranks, 60)
    assert not alive
    (end,) = records(tmp_path / "log.jsonl", "end")
    assert end["finished"] is False
    succeeded(*world(2, SCRIPT, *flags, "--out", tmp_path))
    assert numbers(tmp_path) == whole


# Images


def spoil(folder, name, content) -> None:
    (folder / "train" / "ant" / name).write_bytes(content)


def test_what_is_not_an_image_is_fatal_or_skipped_and_counted(flags, tmp_path):
    folder = write_photos(tmp_path / "photos")
    good = (folder / "train/ant/1.jpg").read_bytes()
    spoil(folder, "1.jpg", b"")
    spoil(folder, "2.jpg", good[: len(good) // 3])
    spoil(folder, "3.jpg", b"no image at all")
    here = [*flags, "--data", folder, "--max-steps", 3]
    done = forked(SCRIPT, *here, "--out", tmp_path / "a")
    assert done.code == 2 and "train/ant" in done.last_line and "--bad-images" in done.last_line
    done = forked(SCRIPT, *here, "--out", tmp_path / "b", "--bad-images", "skip")
    succeeded(done)
    train = records(tmp_path / "b" / "log.jsonl", "train")
    named = {path.split("/")[-1] for path in re.findall(r"^skipped: (\S+): ", done.err, re.M)}
    assert {"1.jpg", "3.jpg"} <= named <= {"1.jpg", "2.jpg", "3.jpg"}
    assert sum(r["unreadable"] for r in train) == len(named)
    assert sum(r["images"] for r in train) == 36 - len(named)


def test_pictures_of_every_kind_are_read(script, tmp_path):
    """Gray, palette, with transparency, CMYK, 16 bits: three channels of bytes."""
    picture = Image.new("RGB", (40, 30), (200, 100, 50))
    for mode, name in [("L", "a.jpg"), ("CMYK", "b.jpg"), ("P", "c.png"), ("RGBA", "d.png")]:
        picture.convert(mode).save(tmp_path / name)
    Image.new("I;16", (40, 30), 40_000).save(tmp_path / "e.png")
    for path in sorted(tmp_path.iterdir()):
        image = script.decode(str(path))
        assert image.shape == (3, 30, 40) and image.dtype == torch.uint8, path
    assert script.decode(str(tmp_path / "e.png")).float().mean() == 40_000 // 256
    assert script.decode(str(tmp_path / "b.jpg")).float().mean((1, 2))[0] > 150


def test_the_traps_of_the_data_set_are_named(flags, tmp_path):
    """val/ as it comes out of its archive, and archives that are not unpacked."""
    folder = write_photos(tmp_path / "photos")
    for path in [*(folder / "val").iterdir()]:
        shutil.rmtree(path)
    shutil.copy(folder / "train/ant/1.jpg", folder / "val/ILSVRC2012_val_00000001.JPEG")
    refused(forked(SCRIPT, *flags, "--data", folder, "--out", tmp_path / "out"), "sort ImageNet")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "ILSVRC2012_img_train.tar").touch()
    refused(forked(SCRIPT, *flags, "--data", bare, "--out", tmp_path / "out"), "unpack")


def test_a_batch_is_the_same_for_any_number_of_processes(script):
    """And so are its parts, whether processes or --accumulate make them."""

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


def test_an_image_is_augmented_by_its_key_alone(script, tmp_path):
    """The same in whatever order; otherwise in another epoch; and dropout's generator stays."""
    folder = write_photos(tmp_path / "photos")
    args = Namespace(seed=3, bad_images="fail", image_size=32, least_area=0.08, augment="trivial")
    images = script.Photographs(folder / "train", script.training_transform(args), args)
    before = torch.get_rng_state()
    first = [images[1, k][0] for k in (0, 1, 2)]
    again = [images[1, k][0] for k in (2, 1, 0)][::-1]
    other = [images[2, k][0] for k in (0, 1, 2)]
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert torch.equal(before, torch.get_rng_state())


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


def test_the_configuration_is_written_and_can_be_given_again(flags, begun, tmp_path):
    config = begun / "config.toml"
    done = forked(SCRIPT, "--config", config, f"out={tmp_path}", "max-steps=1", "ema=0.5")
    succeeded(done)
    written = (tmp_path / "config.toml").read_text()
    changed = {"out", "max_steps", "ema", "save_every"}
    pairs = [line.split(" = ") for line in config.read_text().splitlines()]
    for name, value in pairs:
        assert name in changed or f"{name} = {value}\n" in written
    assert "ema = 0.5\n" in written


@pytest.mark.parametrize(
    "more, words",
    [
        (["--batch-size", 13, "--accumulate", 2], ["--batch-size 13"]),
        (["--warmup-epochs", 4], ["--warmup-epochs"]),
        (["--arch", "resnet"], ["--arch", "no such model"]),
        (["--lr", "nan"], ["--lr"]),
        (["--data", "/nowhere"], ["--data /nowhere"]),
        (["--weights", "/nowhere"], ["/nowhere"]),
        (["--config", "/nowhere"], ["--config"]),
        (["--batch-size", 100], ["--batch-size 100", "36"]),
        (["--evaluate"], ["best.pt"]),
        (["--sync-bn"], ["--sync-bn"]),
        (["colour=red"], ["colour"]),
        (["--image-size", 1, "--arch", "alexnet"], ["--image-size: 1"]),
    ],
)
def test_bad_input_is_one_line(flags, tmp_path, more, words):
    refused(forked(SCRIPT, *flags, "--out", tmp_path / "out", *more), *words)


def test_the_best_weights_are_evaluated_alike(flags, whole, whole_folder, tmp_path):
    """--evaluate takes best.pt of --out, or --weights: a plain state_dict."""
    best = max(line["ema_top1"] for key, line in whole.items() if key[0] == "eval")
    succeeded(
        forked(
            SCRIPT, *flags, "--out", tmp_path, "--evaluate", "--weights", whole_folder / "best.pt"
        )
    )
    (found,) = records(tmp_path / "log.jsonl", "eval")
    assert found["images"] == 18 and found["top1"] == best and found["unreadable"] == 0


def test_a_second_run_in_one_folder_is_refused(flags, tmp_path):
    """Else two would write over each other's checkpoints."""
    import fcntl

    with open(tmp_path / "lock", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        refused(forked(SCRIPT, *flags, "--out", tmp_path, prepare=no_patience), "another run")


def no_patience():
    """Runs in the script's process: a minute passes at once."""
    time.sleep = lambda seconds: None
