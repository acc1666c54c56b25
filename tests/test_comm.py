"""bench comm and bench predict: their formulas, two ranks' collectives, published tables."""

import json
import math
import random
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from support import ROOT, refused, succeeded, torchrun, wait_until
from torch.nn.parallel.distributed import _DEFAULT_BUCKET_CAP_MB

from bench import UserError, records
from bench.__main__ import main
from bench.nodes import comm, predict
from bench.process import environment, run
from docs.make import nodes

KB, MB = 2**10, 2**20


def bench(*words, limit=120, cwd=ROOT):
    env = environment(1) | {"PYTHONPATH": str(ROOT)}
    return run([sys.executable, "-m", "bench", *map(str, words)], limit, env, cwd)


# --- comm


def test_two_ranks(tmp_path):
    """From a copy of the folder, where only PyTorch is installed: three sizes or more of each
    collective, all right, a fit for each, and a table; what would take too long is named. The plot
    comes later, where the project is.
    """
    (tmp_path / "nodes").symlink_to(ROOT / "bench/nodes")
    for name in ("rich", "matplotlib", "pandas", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({name!r})")
    words = [sys.executable, "-m", "nodes.comm", "--ranks", "2", "--seconds", "10"]
    done = run(words, 120, environment(1), cwd=tmp_path)
    succeeded(done)
    path = tmp_path / "comm.jsonl"
    lines = comm.read(path)
    wanted = {"backend": "gloo", "ranks": 2, "nodes": 1, "device": "cpu"}
    assert {key: lines[0][key] for key in wanted} == wanted
    for name in comm.FACTORS:
        mine = [x for x in lines if x["kind"] == "size" and x["collective"] == name]
        assert [x["bytes"] for x in mine] == comm.SIZES[: len(mine)] and len(mine) >= 3
        assert all(x["right"] and len(x["seconds"]) >= comm.FEWEST for x in mine)
        (found,) = [x for x in lines if x["kind"] == "fit" and x["collective"] == name]
        low, high = found["bandwidth_ends"]
        assert 0 < low <= high and found["latency"] >= 0 and f"{name}: latency" in done.out
    (overlap,) = [x["overlaps"] for x in lines if x["kind"] == "overlap"]
    assert len(overlap) == comm.MOST and all(0 <= x <= 1 for x in overlap)
    left = [x for x in lines if x["kind"] == "left out"]
    assert left and all(x["needs"] > x["left"] for x in left)
    (text,) = [x for x in done.out.splitlines() if x.startswith("broadcast: left out")]
    assert text.endswith(" 256 MB")
    shown = bench("comm", "--read", path)
    succeeded(shown)
    assert done.out.startswith(shown.out) and "comm: without bench there is no plot" in done.out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_wrong_values_are_found(tmp_path):
    """One element of a sum is off by one on one rank; the parts of a gather are in wrong order."""
    path = tmp_path / "comm.jsonl"
    done = torchrun(2, "tests/wrong_programs/wrong_sums.py", "--out", path, PYTHONPATH=str(ROOT))
    assert done.code == 1
    wrong = {
        (x["collective"], x["bytes"])
        for x in comm.read(path)
        if x["kind"] == "size" and not x["right"]
    }
    assert wrong == {("all_reduce", 4 * KB), ("all_gather", 16 * KB)}
    assert "all_reduce of 4 KB: WRONG VALUES" in done.err and "WRONG" in done.out


def test_three_ranks(tmp_path):
    """No size is a multiple of them: each is rounded up, and told as it was sent."""
    path = tmp_path / "comm.jsonl"
    done = torchrun(3, "tests/wrong_programs/wrong_sums.py", "--out", path, PYTHONPATH=str(ROOT))
    lines = [x for x in comm.read(path) if x["kind"] == "size"]
    assert {x["bytes"] for x in lines} == {1032, 4104, 16392}, done
    assert all(x["right"] for x in lines) and done.code == 0 and "1.01 KB" in done.out


def test_a_start_that_takes_all_seconds_is_one_line(tmp_path):
    done = bench("comm", "--ranks", 2, "--seconds", 0.001, "--out", tmp_path / "x.jsonl")
    refused(done, "--seconds 0.001", code=2)
    assert not (tmp_path / "x.jsonl").exists()


def test_a_signal_ends_the_ranks(tmp_path):
    """Whatever they are doing: here, they are just started."""
    words = [sys.executable, "-m", "bench", "comm", "--ranks", "2", "--out", str(tmp_path / "x")]
    with subprocess.Popen(words, env=environment(1), stderr=subprocess.PIPE, cwd=ROOT) as job:
        wait_until(lambda: len(psutil.Process(job.pid).children()) >= 2, 60)
        ranks = psutil.Process(job.pid).children()
        job.terminate()
        job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(rank.is_running() for rank in ranks), 60)


def test_the_fit_finds_a_made_up_link():
    """100 us and 1 GB/s, with some repeats disturbed; the intervals hold both."""
    dice, lines = random.Random(1), [{"kind": "setting", "ranks": 2}]
    for size in comm.SIZES:
        times = [(1e-4 + size / 1e9) * dice.uniform(0.95, 1.05) for _ in range(15)]
        times[:3] = [10 * t for t in times[:3]]
        lines.append({"kind": "size", "collective": "all_reduce", "bytes": size, "seconds": times})
    (found,) = comm.fit_records(lines)
    assert found["latency"] == pytest.approx(1e-4, rel=0.05)
    assert found["bandwidth"] == pytest.approx(1e9, rel=0.05)
    for key, truth in (("latency_ends", 1e-4), ("bandwidth_ends", 1e9)):
        assert found[key][0] < truth < found[key][1] and found[key][1] < 1.2 * found[key][0]


def test_a_fit_by_hand():
    """Two points, so both lie on it: 1 s for 0 bytes, 3 s for 10. And none is below zero."""
    latency, bandwidth = comm.fit([(0, 1.0), (10, 3.0)])
    assert (latency, bandwidth) == pytest.approx((1, 5))
    assert comm.fit([(10, 1.0), (20, 2.5)])[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["comm", "--ranks", "1"], "--ranks 1"),
        (["comm", "--seconds", "0"], "--seconds 0"),
        (["comm", "--out", "nowhere/x.jsonl"], "--out nowhere"),
        (["comm", "--out", "x.png"], "--out x.png"),
        (["comm", "--read", "README.md"], "--read README.md"),
        (["predict"], "--measured"),
        (["predict", "README.md", "--arch", "resnet18"], "--step-ms"),
        (["predict", "README.md", "--step-ms", "3"], "--arch"),
        (["predict", "README.md", "--step-ms", "3", "--parameters", "1e6"], "README.md"),
        (["predict", "--measured", "1:3,2:5", "--ranks", "4,x"], "--ranks 4,x"),
    ],
)
def test_mistakes_are_one_line(words, said, monkeypatch, capsys):
    """That name the flag; exit code 2."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main(words)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and said in err


# --- predict


def test_buckets_are_those_of_ddp():
    """By torch's own function, for a model with gradients of all sizes."""
    from torchvision import models

    found = predict.gradients("resnet50", 224, 1000)
    with torch.device("meta"):
        weights = [*models.resnet50().parameters()][::-1]
    limits = [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, _DEFAULT_BUCKET_CAP_MB * MB]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(weights, limits)
    sizes = [sum(weights[k].numel() * 4 for k in bucket) for bucket in indices]
    made = predict.buckets(found)
    assert [size for size, _ in made] == sizes and len(sizes) > 3
    readies = [ready for _, ready in made]
    assert readies == sorted(readies) and readies[-1] == 1 and 0 < readies[0] < 0.05


def test_a_ring_by_hand():
    """4 ranks, 100 MB: 6 messages of 25 MB at 10 MB/s and 1 s each are 21 s. Two levels add up."""
    assert predict.ring(4, 100e6, (1.0, 10e6)) == pytest.approx(6 * (1 + 2.5))
    assert predict.ring(1, 100e6, (1.0, 10e6)) == 0
    inside, between = (0.0, 100e6), (0.0, 10e6)
    assert predict.all_reduce(100e6, 8, 4, inside, between) == pytest.approx(1.5 + 10)
    assert predict.all_reduce(100e6, 4, 4, inside, between) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("readies", "each", "overlap", "seconds"),
    [
        # backward() takes 2 s. Bucket 1 is ready after 1 s of it and sent within 0.5 s, bucket 2
        # at its end, and takes another 0.5 s.
        ((0.5, 1.0), 0.5, 1.0, 1 + 2 + 0.5),
        # Nothing is computed meanwhile: all adds up.
        ((0.5, 1.0), 0.5, 0.0, 1 + 2 + 1),
        ((0.5, 1.0), 0.5, 0.5, 1 + 1 + 0.5 + 0.75 + 0.5),
        # A slow link sends bucket after bucket, the first one after 0.5 s of backward().
        ((0.25, 0.5, 1.0), 4.0, 1.0, 1 + 0.5 + 12),
    ],
)
def test_a_step_by_hand(readies, each, overlap, seconds):
    parts = [(1, ready) for ready in readies]
    assert predict.step(3.0, parts, lambda size: each, overlap) == pytest.approx(seconds)


def test_the_local_batch_that_hides():
    """One bucket at the end is never hidden: 1 s is 5% of a step of 20 s, 19 s without it."""
    grown = predict.hides(1.0, [(1, 1.0)], lambda size: 1.0, 1.0)
    assert grown == pytest.approx(19, rel=0.01)


def link_file(path, nodes=1, bandwidth=1e9):
    """A file of comm: a perfect link of two ranks."""
    lines = [{"kind": "setting", "ranks": 2, "nodes": nodes, "backend": "nccl", "device": "a GPU"}]
    for size in comm.SIZES:
        times = [1e-5 + size / bandwidth] * 5
        lines.append({"kind": "size", "collective": "all_reduce", "bytes": size, "seconds": times})
        lines[-1] |= {"right": True}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_made_up_machine(tmp_path, monkeypatch):
    """25 M parameters in buckets of 1 and 25 MiB, a step of 300 ms: by hand, for 16 on 2 nodes."""
    monkeypatch.chdir(tmp_path)
    files = [link_file(tmp_path / "a", 1, 10e9), link_file(tmp_path / "b", 2, 1e9)]
    words = [*map(str, files), "--parameters", "25e6", "--step-ms", "300", "--batch", "64"]
    assert predict.main([*words, "--ranks", "8,16", "--per-node", "8"]) == 0
    eight, sixteen = map(json.loads, (tmp_path / "predict.jsonl").read_text().splitlines())
    assert (eight["nodes"], sixteen["nodes"]) == (1, 2)
    # All but the last bucket hides behind backward(); that one has 100 MB less 1 and 3 x 25 MiB.
    last = 100e6 - sum(size for size, _ in predict.buckets(predict.evenly(25e6))[:-1])
    sent = 14 * (0.5e-5 + last / 8 / 10e9) + 2 * (0.5e-5 + last / 2 / 1e9)
    assert sixteen["step_ms"] == pytest.approx(300 + 1e3 * sent, rel=1e-3)
    assert sixteen["images_per_second"] == pytest.approx(16 * 64 / (0.3 + sent), rel=1e-3)
    assert sixteen["low"] <= sixteen["images_per_second"] <= sixteen["high"]
    assert eight["efficiency"] > sixteen["efficiency"] > 0.9
    assert (tmp_path / "predict.png").read_bytes().startswith(b"\x89PNG")


def test_the_overlap_is_that_of_comm(tmp_path):
    """The median of its repeats, of the file where it is less."""
    files = [link_file(tmp_path / name, k) for k, name in enumerate("ab", 1)]
    for path, values in zip(files, ([0.9, 0.8, 0.0], [0.1, 0.2, 1.0]), strict=True):
        with open(path, "a") as file:
            file.write(json.dumps({"kind": "overlap", "overlaps": values}) + "\n")
    words = [*map(str, files), "--parameters", "25e6", "--step-ms", "300", "--per-node", "1"]
    predict.main([*words, "--ranks", "2", "--out", str(tmp_path / "x")])
    assert json.loads((tmp_path / "x").read_text())["overlap"] == 0.2


@pytest.mark.parametrize(
    ("bandwidth", "said"),
    # Of a busy machine, and of small sizes only: any number of machines would be worth it.
    [(1e9, "one rank on each"), (math.inf, "don't grow")],
)
def test_a_network_that_was_not_measured_is_refused(bandwidth, said, tmp_path):
    words = [str(link_file(tmp_path / "a", bandwidth=bandwidth)), "--parameters", "1e6"]
    words += ["--step-ms", "9", "--per-node", "4", "--ranks", "8", "--out", str(tmp_path / "x")]
    with pytest.raises(UserError, match=said):
        predict.main(words)


def test_a_result_of_bench_run(tmp_path, monkeypatch):
    """Its step, model and measured speeds: the same prediction as by flags. The image size and the
    classes are those of its data set.
    """
    folder = ROOT / "logs/2-cores-xeon-torch2.15/bench"
    plan, speeds, known = predict.from_result(folder)
    assert plan["arch"] == "resnet18" and plan["batch"] == 64 and len(speeds) >= 2
    assert known[1] == pytest.approx(math.exp(sum(map(math.log, speeds)) / len(speeds)))
    link, out = link_file(tmp_path / "a"), tmp_path / "x.jsonl"
    words = [str(link), "--ranks", "2", "--out", str(out)]
    predict.main([*words, "--result", str(folder)])
    by_result = out.read_text()
    steps = ",".join(repr(64e3 / speed) for speed in speeds)
    predict.main([*words, "--step-ms", steps, "--arch", "resnet18", "--batch", "64"])
    assert json.loads(out.read_text()) == pytest.approx(json.loads(by_result))

    found = records.lines(folder / records.NAME)[0]
    assert found[0]["plan"]["image_size"] is None
    found[0]["plan"]["dataset"] = "imagenet"
    next(r for r in found if r.get("start"))["start"]["classes"] = 1000
    (tmp_path / records.NAME).write_text("".join(f"{json.dumps(r)}\n" for r in found))
    asked, real = [], predict.gradients
    monkeypatch.setattr(predict, "gradients", lambda *words: asked.append(words) or real(*words))
    predict.main([*words, "--result", str(tmp_path)])
    assert asked == [("resnet18", 224, 1000)]


def test_two_speeds_are_met_and_growth_is_that_of_the_page():
    """The loss at the known point is met; a ring's share within a node, as much per doubling."""
    middle, low, high = predict.fitted(100.0, 8, 720.0, 8, 8)
    assert middle == pytest.approx(720) and low < 720 < high
    lost = 100 * 8 / 720 - 1
    four, *_ = predict.fitted(100.0, 8, 720.0, 4, 8)
    assert four == pytest.approx(400 / (1 + lost * (3 / 4) / (7 / 8)))
    many, *_ = predict.fitted(100.0, 8, 720.0, 32, 8)
    assert many == pytest.approx(3200 / (1 + 3 * lost))


def test_published_tables():
    """Those that the form was made for: all within 7% and in their interval. The others miss more
    often, which the page says: DLPerf's BERT over a slow network, Lambda's faulty rows. The error
    is the one with which 9 of 10 are inside, also of each table by that of the others.
    """
    assert predict.ERROR == nodes.calibrated(nodes.cases())
    each = [row["inside"] for row in nodes.published()]
    assert sum(each) >= nodes.SHARE * len(each)
    found = nodes.by_source().to_dict("index")
    assert list(found) == [*nodes.SOURCES]
    first, others = found[nodes.FIRST], [x for name, x in found.items() if name != nodes.FIRST]
    assert first["predictions"] == first["inside"] == first["close"] == 6
    assert first["worst"] < 0.06
    slow = found["DLPerf, BERT"]
    assert slow["inside"] < 0.6 * slow["predictions"]
    assert all(x["inside"] / x["predictions"] > 0.8 for x in others if x is not slow)
    assert all(x["close"] / x["predictions"] > 0.7 for x in others if x is not slow)
