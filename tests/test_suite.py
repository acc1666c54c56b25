"""`python -m bench suite`: parts in order of worth, each with its share, cut off and completed."""

import json
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import made_up
import pytest
from support import ROOT, succeeded, wait_until

from bench import UserError, ladder, process, records, suite
from bench.experiments import check_scripts
from bench.host import Gpu, Host

H100 = Host("C", 16, gpus=(Gpu("NVIDIA H100 80GB HBM3", (9, 0)),))
CPU = Host("C", 2)


@pytest.fixture
def parts(monkeypatch) -> dict:
    """Three parts that note how many seconds they got; `fails` has those that do not finish."""
    known = {"fails": set(), "seconds": {}}

    def work(name: str):
        def note(given: suite.Suite) -> bool:
            known["seconds"].setdefault(name, []).append(given.left())
            (given.folder / name).write_text("a result")
            return name not in known["fails"]

        return note

    made = {
        "first": suite.Part(work("first"), 0.25, 10, 600),
        "second": suite.Part(work("second"), 0.5, 10, 60),
        "long": suite.Part(work("long"), 1, 500, 600),
    }
    monkeypatch.setattr(suite, "PARTS", made)
    monkeypatch.setattr(suite, "look", lambda: CPU)
    return known


def names(pack: Path) -> set[str]:
    with tarfile.open(pack) as tar:
        return {Path(name).name for name in tar.getnames()}


def test_each_part_has_its_share_and_what_is_open_is_begun_again(parts, tmp_path):
    """A quarter of 8 minutes; at most a minute; and a part that would take longer than is left."""
    out, pack = tmp_path / "m", tmp_path / "m.tar.gz"
    parts["fails"] = {"second"}
    assert suite.main(["--minutes", "8", "--out", str(out)]) == 1
    seconds = parts["seconds"]
    assert seconds["first"] == [pytest.approx(120, abs=5)]
    assert seconds["second"] == [pytest.approx(60, abs=5)]
    assert "long" not in seconds
    assert names(pack) == {"m", "first", "second", "parts.jsonl"}
    parts["fails"] = set()
    assert suite.main(["--minutes", "20", "--out", str(out)]) == 0
    assert {name: len(each) for name, each in seconds.items()} == {
        "first": 1,
        "second": 2,
        "long": 1,
    }
    assert suite.main(["--minutes", "1", "--out", str(out)]) == 0  # nothing is left


def test_what_a_part_left_is_packed_when_it_is_cut_off(parts, tmp_path, monkeypatch):
    def cut(given: suite.Suite) -> bool:
        (given.folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setitem(suite.PARTS, "first", suite.Part(cut, least=0))
    with pytest.raises(KeyboardInterrupt):
        suite.main(["--minutes", "8", "--out", str(tmp_path / "m")])
    assert names(tmp_path / "m.tar.gz") == {"m", "half"}


def test_a_named_part_takes_no_time_that_those_behind_it_need(parts, tmp_path, monkeypatch):
    """Of 10 minutes, `long` needs 500 s. Where all parts run, the first of them may take all."""
    monkeypatch.setitem(suite.PARTS, "first", suite.PARTS["first"]._replace(share=1.0))
    flags = ["--minutes", "10", "--out", str(tmp_path / "m")]
    assert suite.main(["first", "long", *flags]) == 0
    assert parts["seconds"]["first"] == [pytest.approx(100, abs=5)]
    parts["seconds"].clear()
    assert suite.main([*flags[:-1], str(tmp_path / "all")]) == 0
    assert parts["seconds"]["first"] == [pytest.approx(600, abs=5)]


def test_the_minutes_begin_with_the_command(parts, tmp_path, monkeypatch):
    """Whoever rents a machine waits for the first import of torch, too."""

    def slow() -> Host:
        time.sleep(3)
        return CPU

    monkeypatch.setattr(suite, "look", slow)
    assert suite.main(["second", "--minutes", "0.5", "--out", str(tmp_path / "m")]) == 0
    (seconds,) = parts["seconds"]["second"]
    assert 15 < seconds <= 27  # all that is left, as the only part; its share would be half of it


def test_a_gpu_that_torch_cannot_use_is_said(parts, tmp_path, monkeypatch):
    """Else all parts would measure the CPU."""
    monkeypatch.setattr(suite, "look", lambda: Host("C", 16, unusable=("NVIDIA H200",)))
    with pytest.raises(UserError, match="NVIDIA H200, which torch cannot use"):
        suite.main(["--minutes", "8", "--out", str(tmp_path / "m")])


def test_what_a_part_has_so_far_is_packed_meanwhile(parts, tmp_path, monkeypatch):
    """The machine may be lost before the part ends."""
    pack = tmp_path / "m.tar.gz"

    def work(given: suite.Suite) -> bool:
        (given.folder / "half").write_text("")
        wait_until(lambda: pack.exists() and "half" in names(pack), 20)
        return True

    monkeypatch.setattr(suite, "PERIOD", 0.05)
    monkeypatch.setitem(suite.PARTS, "first", suite.Part(work, least=0))
    assert suite.main(["first", "--minutes", "8", "--out", str(tmp_path / "m")]) == 0


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A Suite with a made-up GPU. Its commands are noted in `calls`, and done by `does`."""
    args = suite.Namespace(dataset=None, extras=None, photos=tmp_path / "photos", cifar=None)
    found = suite.Suite(args, H100, tmp_path, lambda: 100.0)
    known = {"calls": [], "does": lambda words: True}

    def call(self, words, text=None, **env):
        known["calls"].append([str(word) for word in words])
        if text:
            text.write_text("said\n")
        return known["does"](known["calls"][-1])

    monkeypatch.setattr(suite.Suite, "call", call)
    return found, known


def test_a_run_that_is_cut_off_has_a_table_and_is_resumed(given, tmp_path):
    suite_, known = given
    folder, work = tmp_path / "bench-quick", suite.bench_run("bench-quick", "--quick")

    def cut(words: list[str]) -> bool:
        if "run" in words:
            folder.mkdir()
            made_up.write(folder, made_up.run(tmp_path / "whole", {}, blocks=1)[:-1])
        else:
            (folder / "table.md").write_text("")
        return False

    known["does"] = cut
    (tmp_path / "whole").mkdir()
    assert not work(suite_)
    assert [words[2] for words in known["calls"]] == ["run", "table"] and (
        folder / "table.md"
    ).exists()
    budget = float(known["calls"][0][known["calls"][0].index("--budget") + 1])
    assert 60 * budget == pytest.approx(100 - suite.TABLE, abs=1)

    def complete(words: list[str]) -> bool:
        records.append(folder, "stop", reason="as many blocks as asked for")
        return True

    known["does"] = complete
    assert work(suite_) and known["calls"][-1][-2:] == ["--resume", str(folder)]
    number = len(known["calls"])
    assert work(suite_) and len(known["calls"]) == number  # finished


def test_tests_that_passed_are_not_run_again(given, tmp_path):
    """What they said stays, and what a call that was cut off adds comes behind it."""
    suite_, known = given
    lines = "tests/test_a.py::test_one[a b] PASSED [ 5%]\ntests/test_a.py::test_two FAILED [ 9%]\n"
    (tmp_path / "tests.txt").write_text(lines)
    known["does"] = lambda words: False
    assert not suite.tests(suite_)
    assert (tmp_path / "tests.txt").read_text() == lines + "said\n"
    words = known["calls"][0]
    assert words[words.index("--deselect") :] == ["--deselect", "tests/test_a.py::test_one[a b]"]


def test_imagenet_goes_on_where_one_way_fails(given, tmp_path):
    """A training of a minute has an epoch long enough; what is there is not measured again."""
    suite_, known = given
    for name in ("train/a", "train/b", "val/a"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.jpg").write_text("")
    seen = []

    def work(words: list[str]) -> bool:
        if words[0] == "imagenet.py":
            data, out = (Path(words[words.index(flag) + 1]) for flag in ("--data", "--out"))
            seen.extend(sorted(str(path.relative_to(data)) for path in data.glob("*/*/*/*.jpg")))
            out.mkdir()
            lines = [{"event": "start"}, {"event": "train"}, {"event": "train"}]
            (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            return False  # its time is over
        return "--compile" not in words

    known["does"] = work
    assert not suite.imagenet(suite_)
    assert len(seen) == 2 * suite.MANY + 1
    assert len(records.lines(tmp_path / "imagenet" / "train.jsonl")[0]) == 3
    ways = [" ".join(words[8:]) for words in known["calls"] if "--precision" in words[8:]]
    assert ways[:2] == [
        "--precision bf16 --channels-last",
        "--precision bf16 --channels-last --compile",
    ]
    assert len(ways) == 4 and known["calls"][-1][2] == "loader"
    done = {"precision": "bf16", "channels_last": True, "compile": False}
    (tmp_path / "imagenet" / "speed.jsonl").write_text(json.dumps(done) + "\n")
    known["calls"].clear()
    suite.imagenet(suite_)
    assert known["calls"][0][-1] == "--compile"


def test_a_command_without_time_is_not_begun(tmp_path):
    late = suite.Suite(suite.Namespace(), H100, tmp_path, lambda: -0.5)
    assert not late.call(["-c", "open('begun', 'w')"], tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_every_script_has_a_case():
    """Each script, and each row of the tables of techniques."""
    rows = check_scripts.every_script(H100)
    assert {case.script for case in rows} == {*ladder.SCRIPTS} - {"techniques/oneflow_ddp.py"}
    timed = {name for name, (script, _) in ladder.TIMED.items() if script.path in ladder.SCRIPTS}
    assert timed - {"fp32"} <= {case.name for case in rows}
    assert len({case.name for case in rows}) == len(rows)


# Two scripts for two steps of few images: the parts are those of the command.
SMALL = """
import sys
from bench import suite
from bench.experiments import check_scripts
check_scripts.BATCH, check_scripts.STEPS, check_scripts.LAUNCH = 8, 2, 60.0
every = check_scripts.every_script
check_scripts.every_script = lambda host: [c for c in every(host) if c.name in {names!r}]
sys.exit(suite.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_cut_off_at_a_random_second_it_is_completed(tmp_path):
    """On a pretended GPU, by each way to be cut off; no script's line is there twice."""
    wanted = ["snsc.py", "techniques/grad_accum.py"]
    flags = ["facts", "scripts", "--minutes", "8", "--out", tmp_path / "m"]
    command = [sys.executable, "-c", SMALL.format(names=wanted), *map(str, flags)]
    one = {"PRETEND_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    env = process.environment(1, PYTHONPATH=str(ROOT / "tests" / "pretend"), **one)
    cut = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        run = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        try:
            time.sleep(second := random.uniform(1, 10))
        finally:
            run.send_signal(number)
            code = run.wait(240)
        print(f"signal {number} after {second:.1f} s: exit code {code}")
        cut.append(f"{run.pid}-")
    done = process.run(command, 480, env)
    succeeded(done)
    lines = [json.loads(line) for line in (tmp_path / "m" / "scripts.jsonl").open()]
    assert sorted(line["case"] for line in lines) == sorted(wanted)
    assert all(line["passed"] for line in lines), lines
    assert {"facts.json", "scripts.jsonl", "parts.jsonl"} <= names(tmp_path / "m.tar.gz")
    assert not any(map(process.marked, cut))
