"""The comparison with the ancestors' loops: its arithmetic, and each loop on little data."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from bench import ROOT, stats
from bench.data import enlarge
from bench.host import Gpu, Host
from bench.lab import loops, peers
from bench.lab.peers import COLUMNS, cells, main, overhead, tabulate
from bench.process import MARK, environment, marked
from bench.run.resident import Resident
from tests.support import records, succeeded, world

LOOPS = ROOT / "bench" / "lab" / "loops.py"
TINY = ["--dataset", "fashion-mnist", "--batch-size", "16", "--seed", "3"]


def slices(section, case, seconds, cpu_seconds, size=256):
    """Slice records of 2048 images, one a round."""
    about = {"kind": "slice", "section": section, "case": case, "batch_size": size, "images": 2048}
    pairs = zip(seconds, cpu_seconds, strict=True)
    return [about | {"round": k, "seconds": s, "cpu_seconds": c} for k, (s, c) in enumerate(pairs)]


def test_the_table_of_a_fixture_is_exact():
    known = [{"kind": "setting"}]
    known += slices("peers", "distribuuuu", [2.4, 2.5, 4.8] * 2, [4.4, 4.4, 4.6] * 2)
    known += slices("peers", "ours", [2.0, 2.0, 4.0] * 2, [4.0] * 6)
    known += slices("peers", "ours again", [2.0, 2.0, 4.0] * 2, [4.0] * 6)
    known += slices("peers", "ours", [1.0], [1.0], size=512)
    ours, again, theirs, other = tabulate(known)
    assert list(theirs) == COLUMNS
    assert [row["case"] for row in (ours, again, theirs)] == ["ours", "ours again", "distribuuuu"]
    assert (other["batch_size"], other["rounds"]) == (512, 1)
    assert ours["images_per_second"] == pytest.approx(2048 / 16 ** (1 / 3))
    assert theirs["images_per_second"] == pytest.approx(2048 / (2.4 * 2.5 * 4.8) ** (1 / 3))
    assert [again[f"{clock}_ratio"] for clock in ("wall", "cpu")] == [1, 1]
    logs = np.log([1.2, 1.25, 1.2] * 2)
    middle, reach = logs.mean(), stats.factor(6, 4) * logs.std(ddof=1) / 6**0.5  # 2 cases, 2 clocks
    wall = np.log([theirs[f"wall_{x}"] for x in ("ratio", "low", "high")])
    assert wall[0] == pytest.approx(middle) and wall[2] - middle == pytest.approx(middle - wall[1])
    assert wall[2] - middle == pytest.approx(reach)
    assert theirs["cpu_ratio"] == pytest.approx((1.1 * 1.1 * 1.15) ** (1 / 3))
    assert theirs["claim"] == "faster" and ours["claim"] == again["claim"] == ""


def test_a_start_is_a_block():
    """However many rounds it has; and with fewer than six nothing is claimed."""
    known = []
    for launch in range(3):
        for case, seconds in (("ours", 2.0), ("ours again", 2.0), ("tczhangzhi", 3.0 + launch)):
            known.append({"kind": "start", "section": "peers", "case": case, "batch_size": 256})
            lines = slices("peers", case, [seconds] * 5, [1.0] * 5)
            known += [line | {"round": line["round"] + 5 * launch} for line in lines]
    theirs = tabulate(known)[-1]
    assert (theirs["blocks"], theirs["rounds"], theirs["claim"]) == (3, 15, "nothing claimed")
    assert theirs["wall_ratio"] == pytest.approx((1.5 * 2 * 2.5) ** (1 / 3))
    assert theirs["wall_low"] is None and "[" not in "".join(cells(theirs))


def test_the_overhead_is_ours_over_the_bare_step_less_one():
    known = slices("overhead", "ours", [1.04] * 6, [1.03] * 6)
    known += slices("overhead", "bare", [1.0] * 6, [1.0] * 6)
    bare = tabulate(known)[1]
    words = "4.0% [4.0%, 4.0%] of the wall time, 3.0% [3.0%, 3.0%] of the CPU time."
    assert overhead(bare) == words


def test_only_rounds_that_both_have_are_compared():
    known = slices("peers", "ours", [2.0, 2.0, 2.0], [1.0] * 3)
    known += slices("peers", "tczhangzhi", [3.0], [1.5])
    theirs = tabulate(known)[1]
    assert theirs["wall_ratio"] == pytest.approx(1.5) and theirs["rounds"] == 1


def test_a_small_set_is_repeated_whole(tmp_path):
    times = enlarge(ROOT / "data", tmp_path / "big", 25_000)
    raw, source = (folder / "FashionMNIST" / "raw" for folder in (tmp_path / "big", ROOT / "data"))
    count = int.from_bytes((source / "train-labels-idx1-ubyte").read_bytes()[4:8], "big")
    assert times == -(-25_000 // count)
    for name, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
        big, small = ((x / f"train-{name}-ubyte").read_bytes() for x in (raw, source))
        assert int.from_bytes(big[4:8], "big") == times * count
        assert len(big) == header + times * count * size
        assert big[header:] == small[header:] * times and big[8:header] == small[8:header]
    assert (raw / "t10k-labels-idx1-ubyte").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("manner", ["distribuuuu", "tczhangzhi"])
def test_the_ancestors_loops_learn_and_count_their_images(manner, tmp_path):
    log = tmp_path / "log.jsonl"
    flags = ["--dataset", "fashion-mnist", "--data", ROOT / "data", "--batch-size", 64]
    flags += ["--max-steps", 18, "--log-every", 6, "--log-json", log]
    succeeded(*world(2, str(LOOPS), "--manner", manner, *flags))
    start, *trains, end = records(log)
    assert (start["event"], start["world_size"], start["local_batch"]) == ("start", 2, 32)
    assert [train["step"] for train in trains] == [6, 12, 18]
    assert all(train["images"] == 6 * 64 for train in trains)
    assert all(0 < train["seconds"] < end["seconds"] for train in trains)
    assert trains[-1]["loss"] < 0.75 * trains[0]["loss"]
    assert trains[-1]["accuracy"] > 0.2 + trains[0]["accuracy"]


@pytest.mark.full
def test_the_command_from_flags_to_files(tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--only", "overhead", "--quick", "--rounds", "2", "--threads", "1", *TINY]
    flags += ["--image-size", "24"]
    assert main([*flags, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in (out / "peers.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "setting" and lines[0]["environment"]["versions"]["torch"]
    images = "fashion-mnist (its training images 6 times over), 24 x 24"
    assert lines[0]["data"] == images and lines[0]["flags"]["image_size"] == 24
    kept = [line for line in lines if line["kind"] == "slice"]
    assert sorted((line["round"], line["turn"]) for line in kept) == [
        (number, turn) for number in (1, 2) for turn in (1, 2, 3)
    ]
    assert {line["case"] for line in kept} == {"ours", "ours again", "bare"}
    for line in kept:
        assert (line["steps"], line["images"]) == (4, 64)
        assert 0 <= line["cpu_seconds"] < 2 * line["seconds"] + 0.5
    assert sum(line["cpu_seconds"] for line in kept) > 0  # one may be 0: its reader came late
    assert (out / "peers.csv").read_text().startswith("section,batch_size,case,blocks,rounds")
    table = (out / "peers.md").read_text()
    assert f"resnet18; {images}; 4 steps a slice" in table
    assert "| bare |" in table and "The overhead of its loop" in table
    assert "nothing claimed" in table and "overhead, global batch 16" in capsys.readouterr().out


def completed(host: Host, folder, *flags: str):
    """The flags of a command line, with those that follow from the machine."""
    args = peers.parse_args([*flags, "--out", str(folder)])
    peers.complete(args, host)
    return args


@pytest.mark.parametrize(("flags", "size"), [([], "32"), (["--image-size", "24"], "24")])
def test_the_image_size_is_that_of_all_loops(flags, size, tmp_path):
    args = completed(Host("C", 2), tmp_path, *flags, "--parts")
    for section, count in (("peers", 8), ("overhead", 3)):
        made = peers.cases(section, args, 256, "data")
        assert len(made) == count
        for words in made.values():
            assert [x for word, x in pairwise(words) if word == "--image-size"] == [size]


@pytest.mark.parametrize("size", [24, 48])
def test_the_loops_make_the_same_images_larger_or_smaller(size):
    """By PIL, one by one, after they are augmented; as large as ours."""
    import torch

    args = SimpleNamespace(dataset="fashion-mnist", data=ROOT / "data", image_size=32, seed=0)
    usual = loops.load_data(args)
    other = loops.load_data(SimpleNamespace(**vars(args) | {"image_size": size}))
    for number in range(8):
        torch.manual_seed(number)  # of the augmentation
        image = usual[number][0]
        torch.manual_seed(number)
        resized = other[number][0]
        assert resized.shape == (3, size, size)
        if size > 32:  # smaller ones PIL averages
            ours = torch.nn.functional.interpolate(image[None], (size, size), mode="bilinear")
            assert (ours[0] - resized).abs().max() < 4 * 1.5 / 255  # rounded to bytes, twice


def test_a_slice_on_a_gpu_is_long_and_an_epoch_holds_some(tmp_path):
    """At the speed of a GPU eight steps would be a twentieth of a second."""
    gpu = Host("C", 2, gpus=(Gpu("NVIDIA H100 80GB HBM3"),))
    for name, host, flags, steps, images in (
        ("cpu", Host("C", 2), [], 8, 60_000),
        ("cpu large", Host("C", 2), ["--batch-size", "64", "2048"], 8, 50 * 2048),
        ("quick", gpu, ["--quick"], 4, 60_000),
        ("gpu", gpu, [], 100, 400 * 256),
        ("gpu large", gpu, ["--batch-size", "2048"], 100, 400 * 2048),
        ("short", gpu, ["--steps", "20"], 20, 60_000),
    ):
        args = completed(host, tmp_path / name, *flags)
        assert (args.steps, peers.enough(args)) == (steps, images), name
        assert args.steps % peers.WINDOWS == 0


@pytest.mark.full
def test_between_slices_a_case_does_nothing_and_after_them_nothing_is_left(tmp_path):
    script = tmp_path / "case.py"
    script.write_text(
        "import json, sys, time\n"
        "log = sys.argv[sys.argv.index('--log-json') + 1]\n"
        "def tell(**r):\n"
        "    open(log, 'a').write(json.dumps(r) + '\\n')\n"
        "tell(event='start', time=time.time())\n"
        "for step in range(1, 100_000):\n"
        "    time.sleep(0.01)\n"
        "    epoch = 1 + step // 1000\n"
        "    tell(event='train', epoch=epoch, step=step, images=8, seconds=0.01)\n"
    )
    with Resident("a case", [sys.executable, str(script)], tmp_path, environment(1)) as case:
        first = case.slice(4)
        assert (first["steps"], first["images"]) == (4, 32)
        assert first["seconds"] == pytest.approx(0.04)
        size = case.log.stat().st_size
        time.sleep(0.2)
        assert case.log.stat().st_size == size
        assert case.slice(8)["images"] == 64
        assert marked(case.mark)
    assert not marked(case.mark)


def test_a_case_that_ends_is_named_with_its_reason(tmp_path):
    with pytest.raises(peers.Failed, match=r"^broken: ValueError: no such thing$"):
        failing = [sys.executable, "-c", "raise ValueError('no such thing')"]
        Resident("broken", failing, tmp_path, environment(1)).__enter__()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process(number, tmp_path):
    flags = ["--only", "overhead", "--quick", "--rounds", "1000", *TINY, "--out", tmp_path / "out"]
    mark = f"test-{time.time_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "peers", *map(str, flags)],
        cwd=ROOT,
        env=environment(1, PEERS_TEST=mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    log = tmp_path / "out" / "peers.jsonl"
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.0)  # the first case is starting
    process.send_signal(number)
    assert process.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    left = [p for p in psutil.process_iter() if _has(p, mark)]
    assert left == []


def _has(process, mark) -> bool:
    try:
        return process.environ().get("PEERS_TEST") == mark and MARK in process.environ()
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "6"], "--steps 6"),
        (["--rounds", "0"], "--rounds"),
        (["--image-size", "0"], "--image-size"),
        (["--image-size", "-32"], "--image-size"),
        (["--batch-size", "255", "--world", "2"], "--batch-size 255"),
        (["--data", "/nowhere"], "--data /nowhere"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere"),
        (["--manner", "mine"], "--manner"),
    ],
)
def test_bad_input_is_one_line(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path), *flags])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1


def test_a_result_is_never_written_over(tmp_path, capsys):
    (tmp_path / "peers.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "name another folder" in capsys.readouterr().err


def test_the_median_is_over_log_ratios():
    ours, theirs = np.array([1.0, 1.0, 1.0, 1.0]), np.array([1.0, 1.0, 4.0, 4.0])
    known = slices("peers", "ours", ours, ours) + slices("peers", "tczhangzhi", theirs, theirs)
    assert tabulate(known)[1]["wall_ratio"] == pytest.approx(2.0)  # the geometric middle, not 2.5
