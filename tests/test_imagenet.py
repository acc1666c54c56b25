"""imagenet.py: what it trains, its images, its command line. test_interrupted.py has its faults."""

import random
import re
import runpy
import shutil
import sys
import time
from argparse import Namespace

import pytest
import torch
from kills import SCRIPT, numbers
from PIL import Image
from support import ROOT, forked, records, refused, succeeded, world, write_photos

STEPS = 12  # of four epochs


@pytest.fixture(scope="module")
def script() -> Namespace:
    """The script's names."""
    return Namespace(**runpy.run_path(str(ROOT / SCRIPT)))


def test_the_whole_run_is_that_of_its_flags(whole):
    """Every step once, then the averaged weights' evaluation; the learning rate as it should be."""
    steps = [key[1] for key in whole if key[0] == "train"]
    assert steps == [*range(1, STEPS + 1)]
    assert {"top1", "ema_top1", "top5", "ema_loss"} <= set(whole["eval", 4])
    rates = [whole["train", step]["lr"] for step in steps]
    assert rates[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < 0.005


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


def test_a_line_to_stderr_is_one_write(script, monkeypatch):
    """Else the workers' lines run into each other where PYTHONUNBUFFERED is set."""
    writes = []
    monkeypatch.setattr(sys, "stderr", Namespace(write=writes.append))
    script.say("skipped: a picture")
    images = Namespace(samples=[("none.jpg", 0)], skip=True, told=set(), size=32)
    script.Photographs.__getitem__(images, (1, 0))
    assert writes[0] == "skipped: a picture\n"
    assert len(writes) == 2 and re.fullmatch(r"skipped: none\.jpg: .+\n", writes[1])


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


def test_the_traps_of_the_data_set_are_named(small_run, tmp_path):
    """val/ as it comes out of its archive, and archives that are not unpacked."""
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
    args.crop_pct = 0.875
    images = script.Photographs(folder / "train", args, train=True)
    before = torch.get_rng_state()
    first = [images[1, k][0] for k in (0, 1, 2)]
    again = [images[1, k][0] for k in (2, 1, 0)][::-1]
    other = [images[2, k][0] for k in (0, 1, 2)]
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("train", [True, False])
def test_dali_makes_the_same_images(script, libraries, tmp_path, train):
    """The same keys, crops, flips and labels; pixels differ by less than one of 255 in the mean,
    and by 12 if an image were flipped. (Not so for tests, where these small pictures are enlarged.)
    """
    folder = write_photos(tmp_path / "photos") / ("train" if train else "val")
    turned = Image.open(folder / "bee" / "2.jpg")
    exif = turned.getexif()
    exif[0x0112] = 6  # a camera's note that the picture lies on its side; nobody is to heed it
    turned.save(folder / "bee" / "2.jpg", exif=exif, quality=95)
    args = Namespace(seed=3, bad_images="fail", image_size=48, least_area=0.08, augment="none")
    args.crop_pct, args.workers = 0.875, 0
    place = Namespace(local_size=1, size=1, rank=0, local_rank=0, device=torch.device("cpu"))
    images = script.Photographs(folder, args, train)
    keys = [(2, index) for index in range(len(images))]
    args.loader = "torch"
    expected = [*script.make_loader(images, keys, 8, args, place)]
    args.loader = "dali"
    made = script.make_loader(images, keys, 8, args, place)
    for _ in range(2):  # a loader is used once in an epoch
        for (one, labels), (two, same) in zip(made, expected, strict=True):
            assert labels.equal(same) and one.shape == two.shape and one.dtype == two.dtype
            distance = (one.float() - two.float()).abs().mean()
            assert distance < (1 if train else 8), distance


@pytest.mark.parametrize(
    "height, width, least", [(375, 500, 0.08), (375, 500, 0.9), (30, 200, 0.08)]
)
def test_windows_are_those_of_torchvision(script, height, width, least):
    """Their means over many draws: top, left, height, width; and half of the images are flipped."""
    from torchvision.transforms import v2

    def means(draw):
        return torch.tensor([draw() for _ in range(4000)], dtype=torch.float64).mean(0)

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
    """As much of the middle as has the ratio; for tests always the middle."""
    dice = random.Random(0)
    assert script.random_window(300, 2000, dice, 1)[:4] == (0, 800, 300, 400)
    assert script.middle_window(375, 500, dice, 0.8) == (37, 100, 300, 300, False)


def test_dali_goes_on_bit_for_bit(small_run, libraries, tmp_path):
    here = [*small_run, "--loader", "dali", "--epochs", 2]
    for out, steps in (("one", [6]), ("two", [2, 6])):
        for step in steps:
            succeeded(*world(2, SCRIPT, *here, "--out", tmp_path / out, "--max-steps", step))
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")


def test_dali_and_a_damaged_image(small_run, libraries, tmp_path):
    """A file that is none is named; of one that is cut off DALI does not say which it was."""
    folder = write_photos(tmp_path / "photos")
    here = [*small_run, "--data", folder, "--loader", "dali", "--out", tmp_path / "out"]
    path = folder / "train/ant/1.jpg"
    good = path.read_bytes()
    path.write_bytes(b"no image at all")
    refused(forked(SCRIPT, *here), "train/ant/1.jpg")
    path.write_bytes(good[: len(good) * 3 // 4])
    done = forked(SCRIPT, *here)
    assert done.code == 2 and "--loader torch says which" in done.err.splitlines()[-1], done.err


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


def test_a_regnet_can_be_trained(small_run, tmp_path):
    """torchvision cannot make one without numbers, which is how the image size is tried."""
    more = ["--arch", "regnet_y_400mf", "--max-steps", 1, "--out", tmp_path]
    succeeded(forked(SCRIPT, *small_run, *more))


# The command line


def test_the_configuration_is_written_and_can_be_given_again(whole_folder, tmp_path):
    config = whole_folder / "config.toml"
    done = forked(
        SCRIPT, "--config", config, f"out={tmp_path}", "max-steps=1", "model-ema-decay=0.5"
    )
    succeeded(done)
    written = (tmp_path / "config.toml").read_text()
    changed = {"out", "max_steps", "model_ema_decay"}
    pairs = [line.split(" = ") for line in config.read_text().splitlines()]
    for name, value in pairs:
        assert name in changed or f"{name} = {value}\n" in written
    assert "model_ema_decay = 0.5\n" in written


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
        (["--loader", "dali", "--augment", "rand"], ["--augment"]),
        (["--loader", "dali", "--bad-images", "skip"], ["--bad-images"]),
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
    import fcntl

    with open(tmp_path / "lock", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        refused(forked(SCRIPT, *small_run, "--out", tmp_path, prepare=no_patience), "another run")


def no_patience():
    """Runs in the script's process: a minute passes at once."""
    time.sleep = lambda seconds: None


# Half precision


def test_a_first_step_that_the_scaler_skips_leaves_no_trace(script):
    """fp16's first gradients may be infinite; then fused SGD's momentum is that of the second."""
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
