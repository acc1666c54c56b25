"""bench/publish.sh: which commands it runs, by a Python that only notes what it is asked for."""

import os
import stat
import sys

import pytest
from support import ROOT

from bench.process import environment, run

# It says that it has torch, the tools and so many GPUs, and makes the files that are looked for.
STAND_IN = """#!{python}
import os, pathlib, sys
words = sys.argv[1:]
text = words[1] if words[:1] == ["-c"] else ""
if words[:1] == ["-"]:
    print("\\n\\n")
elif "sys.executable" in text:
    print({path!r})
elif "device_count" in text:
    print({gpus}, 80 if {gpus} < 8 else 16)
    print("bf16" if {gpus} < 8 else "fp16")
elif not text:
    with open({calls!r}, "a") as file:
        print(*words, file=file)
    if os.environ.get("FAILS") in words:
        sys.exit(1)
    given = dict(zip(words, words[1:]))
    if "run" in words and "--out" in given:
        pathlib.Path(given["--out"]).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(given["--out"]) / "table.md").touch()
    if log := given.get("--log-json") or given.get("--record"):
        pathlib.Path(log).touch()
"""


@pytest.fixture
def publish(tmp_path):
    """Runs it in a copy of the repository's bench/; its result, and the commands so far."""
    (tmp_path / "bench").mkdir()
    for name in ("publish.sh", "setup.sh"):
        (tmp_path / "bench" / name).write_text((ROOT / "bench" / name).read_text())
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    calls, python = tmp_path / "calls", tmp_path / "python"

    def run_it(*words, gpus=1, **env):
        facts = {"python": sys.executable, "path": str(python), "calls": str(calls)}
        python.write_text(STAND_IN.format(**facts, gpus=gpus))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        calls.write_text("")
        env = environment(**env) | {"PYTHON": str(python)}
        done = run(["bash", "bench/publish.sh", *words], 60, env, tmp_path)
        return done, calls.read_text().splitlines()

    return run_it


def test_a_gpu_is_timed_with_more(publish):
    """Two batches, and images of 224 pixels; on a CPU neither."""
    for gpus, count in ((1, 4), (0, 1)):
        done, calls = publish(f"logs/{gpus}", "ladder", "large", "photos", gpus=gpus, MINUTES="9")
        assert done.code == 0, done.err
        runs = [call for call in calls if call.startswith("-m bench run")]
        assert len(runs) == count and all("--budget 9" in call for call in runs)
        assert calls[-1] == "-m bench readme"
    done, calls = publish("logs/new", "ancestors", DATASET="fashion-mnist")
    flags = "--dataset fashion-mnist --techniques ancestors"  # the budget is that of bench run
    assert calls[0].split("--out ")[1] == f"logs/new/ancestors {flags}"


def test_eight_small_gpus_get_what_fits_them(publish):
    """Four of them where a technique is for four, and smaller batches."""
    done, calls = publish("logs/m", "model", "tensor", "photos", gpus=8)
    assert done.code == 0, done.err
    assert ["--world 4" in call for call in calls] == [True, True, False, False]
    assert calls[2].endswith("--batch-size 64")
    done, calls = publish("logs/n", "model", "photos", "imagenet", PHOTOS="/photos", gpus=8)
    recipes = [call for call in calls if "bench.lab.recipe" in call]
    assert len(recipes) == 4 and all("--batch-size 64" in call for call in recipes)
    assert sum("--precision fp16" in call for call in recipes) == 3  # these have no bf16
    done, calls = publish("logs/o", "model", "imagenet", PHOTOS="/photos", gpus=4)
    assert not any("--world" in call for call in calls)


def test_what_is_there_is_left_out_and_what_failed_is_begun_again(publish):
    parts = ("ladder", "memory", "cifar10")
    done, calls = publish("logs/m", *parts, FAILS="memory")
    assert done.code == 2 and done.last_line.startswith("publish: failed: memory;"), done.err
    assert any("snsc.py" in call for call in calls) and calls[-1] == "-m bench readme"
    done, calls = publish("logs/m", *parts)
    assert done.code == 0 and [call.split()[2] for call in calls] == ["run", "readme"]


def test_photographs(publish, tmp_path):
    """Their folder goes to imagenet.py in four ways; without one the part has nothing to do."""
    done, calls = publish("logs/m", "imagenet")
    assert done.code == 0 and calls == ["-m bench readme"]
    done, calls = publish("logs/m", "imagenet", PHOTOS="/photos")
    assert done.code == 0, done.err
    flags = [call.split("--precision ")[1] for call in calls if "bench.lab.recipe" in call]
    assert flags == ["tf32", "bf16", "bf16 --channels-last", "bf16 --channels-last --compile"]
    assert (tmp_path / "logs/m/imagenet/speed.jsonl").exists()


@pytest.mark.parametrize(("words", "said"), [([], "logs/NAME"), (["logs/m", "all"], "all: give")])
def test_what_it_does_not_know(publish, words, said, tmp_path):
    done, calls = publish(*words)
    assert done.code == 2 and said in done.last_line and not calls
    assert not os.path.exists(tmp_path / "logs")
