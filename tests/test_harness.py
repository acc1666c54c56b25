"""The whole command on fakes instead of scripts: signals, a full disk, --resume, bad records."""

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import ROOT, fake_ladder, full, wait_until

from bench import process, records
from bench.cases import AGAIN, PLAIN

# The command, with three fakes for cases; the second argument limits a file's size (a full disk).
DRIVER = """
import resource, sys
from pathlib import Path
from bench import cases
from bench.show import terminal
from bench.__main__ import main
from bench.run import gate
from bench import process
cases.ROOT = Path(sys.argv[1])
row = lambda name, script: cases.Case(name, script, "python", 1)
rows = [row(cases.PLAIN, "snsc.py"), row(cases.AGAIN, "snsc.py"), row("stubborn", "stubborn.py")]
cases.cases = lambda host, sizes: rows
terminal.print_result = lambda folder: None
gate.STEPS = 2
process.GRACE = 0.3
if sys.argv[2] != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
sys.exit(main(["run", "--fresh", "--dataset", "cifar10", *sys.argv[3:]]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Starts the command in a process of its own: driver(*flags, limit=bytes)."""
    root = fake_ladder(tmp_path_factory.mktemp("fakes") / "ladder")

    def start(*flags, limit: int = 0):
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(root), str(limit), *map(str, flags)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    return start


@pytest.fixture(scope="module")
def one_block(driver, tmp_path_factory) -> Path:
    """A run of one block."""
    folder = tmp_path_factory.mktemp("one") / "block"
    harness = driver("--blocks", 1, "--out", folder)
    said = harness.communicate(timeout=240)[1]
    assert harness.returncode == 0, said
    return folder


@pytest.fixture
def out(one_block, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(one_block, tmp_path / "out")


def samples(folder) -> list[tuple]:
    """(case, block) of every sample that can be read."""
    return [(s["case"], s["block"]) for s in records.of(records.read(folder)[0], "sample")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), *full((signal.SIGINT, 130))])
def test_a_signal_loses_no_record_and_leaves_no_process(number, code, driver, tmp_path):
    """After SIGKILL at the next start; and --resume goes on where it was."""
    out = tmp_path / "out"
    harness = driver("--blocks", 1000, "--out", out)
    file = out / records.NAME
    wait_until(lambda: file.exists() and file.read_text().count('"kind": "sample"') >= 4)
    mark = f"{harness.pid}-"
    wait_until(lambda: len(process.marked(mark)) >= 2)  # stubborn and its child
    harness.send_signal(number)
    harness.communicate(timeout=240)
    assert harness.returncode == code
    if number == signal.SIGKILL:
        process.sweep()
    assert not process.marked(mark)
    before = samples(out)
    most = max(number for _, number in before) + 1
    again = driver("--blocks", most, "--resume", out)
    said = again.communicate(timeout=240)[1]
    assert again.returncode == 0, said
    counts = Counter(samples(out))
    assert set(before) <= set(counts) and set(counts.values()) == {1}
    assert {name for name, number in counts if number == most} == {PLAIN, AGAIN, "stubborn"}


def test_a_full_disk_is_one_line_and_keeps_what_was_whole(driver, out):
    """And when there is room again, --resume goes on."""
    size = (out / records.NAME).stat().st_size
    full = driver("--blocks", 9, "--resume", out, limit=size + 2500)
    said = full.communicate(timeout=240)[1]
    assert full.returncode == 2
    errors = [line for line in said.splitlines() if line.startswith("bench: ")]
    assert len(errors) == 1 and records.NAME in errors[0] and "--resume" in errors[0]
    assert "Traceback" not in said
    records.mend(out)
    known, warning = records.read(out)
    assert warning is None
    assert len(samples(out)) >= 3 and known[-1]["kind"] in ("sample", "stop")
    again = driver("--blocks", 3, "--resume", out)
    said = again.communicate(timeout=240)[1]
    assert again.returncode == 0, said
    found = samples(out)
    assert len(found) == len(set(found))
    assert [number for _, number in found].count(3) == 3


def test_another_environment_is_not_gone_on_with(driver, out):
    """The line says what differs. A plan of before the image size does not, nor other cores, which
    another job of Slurm's has.
    """
    lines = (out / records.NAME).read_text().splitlines()
    first = json.loads(lines[0])
    first["environment"]["versions"]["torch"] = "2.11.0"
    first["environment"]["variables"] |= {"NCCL_ALGO": "Ring", "SLURM_CONF": "/another"}
    first["environment"]["limits"]["affinity"] = [*range(100, 104)]
    first["plan"]["batch_size"] = 128
    assert first["plan"].pop("image_size") is None
    (out / records.NAME).write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    harness = driver("--blocks", 2, "--resume", out)
    said = harness.communicate(timeout=240)[1]
    assert harness.returncode == 2
    line = said.splitlines()[-1]
    assert "torch: 2.11.0 -> " in line and "batch_size: 128 -> 64" in line
    assert "NCCL_ALGO: Ring -> " in line
    assert not any(word in line for word in ("image_size", "SLURM_CONF", "affinity"))


def test_what_lost_a_record_is_not_gone_on_with(driver, out):
    """In one line; the numbers of what is lost would be given again."""
    path = out / records.NAME
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:30], *lines[5:], ""]))
    harness = driver("--blocks", 2, "--resume", out)
    said = harness.communicate(timeout=240)[1]
    assert harness.returncode == 2 and "Traceback" not in said
    assert "line 5 is broken" in said and "start a new run" in said
