"""Set-up: which torch goes into .venv, which tools are beside a Python that has one; and Apex."""

import ast
import importlib.metadata as metadata
import importlib.util
import re
import site
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import support
from packaging.requirements import Requirement
from support import ROOT, Finished, full, succeeded
from test_apex import apex as reuploaded  # noqa: F401  a real tree of Apex

from bench.process import environment, run

refused = partial(support.refused, code=2)
LOCK = (ROOT / "requirements" / "tools.lock").read_text().splitlines()
LOCK = {line.split("==")[0] for line in LOCK if "win32" not in line and "'nt'" not in line}
NEEDED = re.search('^needed="(.*?)"', (ROOT / "bench" / "setup.sh").read_text(), re.M | re.S)
NEEDED = set(NEEDED[1].split())


def in_shell(text: str, *arguments, cwd: Path = ROOT, **env) -> Finished:
    """Lines of bash, after set-up by a Python that has all, unless env names another."""
    command = ["bash", "-c", f"set -eu; . bench/setup.sh; {text}", "-", *arguments]
    return run(command, 240, environment(1, **({"PYTHON": sys.executable} | env)), cwd)


# --- which torch

CUDA12, USUAL = "torch-cu126.lock", "torch.lock"


@pytest.mark.parametrize(
    "rows, lock, why",
    [
        (["7.0, 535.183.01"] * 4, CUDA12, "compute capability 7.0, and CUDA 13 needs 7.5"),
        (["8.0, 535.183.01"], CUDA12, "the NVIDIA driver is 535.183.01, and CUDA 13 needs 580"),
        (["0, 550.54.15"], CUDA12, "tells no compute capability"),
        (["8.0, 580.65.06"] * 2, USUAL, "compute capability 8.0, driver 580.65.06"),
        ([], USUAL, "no GPU is seen"),
    ],
)
def test_the_torch_that_gpus_and_driver_can_run(rows, lock, why):
    """rows: a GPU's compute capability and driver, each."""
    show = 'gpus() { printf "%s" "$rows"; }; choose_torch; echo "$lock: $why"'
    done = in_shell(show, rows="".join(f"{row}\n" for row in rows))
    succeeded(done)
    assert done.out.startswith(f"{lock}: ") and why in done.out


@pytest.mark.parametrize(
    "rows, words",
    [
        (["7.0, 470.82.01"], ["driver 470.82.01", "525", "CUDA_VISIBLE_DEVICES="]),
        (["7.0, 580.65.06", "12.0, 580.65.06"], ["7.0 to 12.0", "PYTHON"]),
    ],
)
def test_what_no_torch_fits_is_one_line(rows, words):
    show = 'gpus() { printf "%s" "$rows"; }; choose_torch'
    refused(in_shell(show, rows="".join(f"{row}\n" for row in rows)), "setup: ", *words)


OLD_SMI = """case "$*" in
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
*name*) echo 'Tesla V100-SXM2-16GB, 550.54.15' ;;
esac"""
BROKEN_SMI = "echo 'NVIDIA-SMI has failed, as it could not communicate with the driver.'; exit 9"


@pytest.mark.parametrize(
    "smi, hidden, rows",
    [
        ("echo '8.0, 580.65.06'", None, "8.0, 580.65.06\n"),
        ("echo '8.0, 580.65.06'", "", ""),
        (OLD_SMI, None, "0, 550.54.15\n"),
        (BROKEN_SMI, None, ""),
    ],
)
def test_gpus_are_read_from_nvidia_smi(smi, hidden, rows, tmp_path, monkeypatch):
    """An old one knows no compute_cap; one without a driver answers on stdout."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    done = in_shell('PATH="$1:$PATH"; gpus || true', tmp_path, **env)
    assert (done.code, done.out) == (0, rows)


def test_a_venv_that_is_finished_is_taken_as_it_is(tmp_path):
    """Without a word, by a python3 that has no torch; also a node without GPUs takes CUDA 12's."""
    for name in ("bench", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(python)
    for lock in (USUAL, CUDA12):
        stamped = in_shell(f"stamp {lock}").out
        (tmp_path / ".venv" / ".installed").write_text(stamped)
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        done = in_shell('echo "$PYTHON"', cwd=tmp_path, PYTHON="", PATH=path)
        assert (done.code, done.err, done.out) == (0, "", f"{python}\n")


def test_the_locks_can_be_installed_together():
    """What two of them name, they name in one version."""

    def pins(name):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        kept = [line for line in lines if "==" in line and not line.startswith("#")]
        return {line.split("==")[0] + line.partition(";")[2]: line for line in kept}

    for torch in ("torch.lock", "torch-cu126.lock"):
        both = pins(torch).keys() & pins("tools.lock").keys()
        assert both and all(pins(torch)[name] == pins("tools.lock")[name] for name in both)
    assert pins("torch-cu126.lock")["torch"] == "torch==2.14.1+cu126"


# --- the tools beside a Python that has torch


@pytest.fixture
def other(tmp_path) -> Path:
    """A Python that has what this one has, but for rich; beside it a copy of set-up."""
    for name in ("bench", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (place,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for folder in filter(Path.is_dir, map(Path, site.getsitepackages())):
        for path in folder.iterdir():
            if not path.name.startswith("rich") and not (place / path.name).exists():
                (place / path.name).symlink_to(path)
    return tmp_path / "venv" / "bin" / "python"


def put(name: str, tools: Path) -> None:
    """A package that is installed here, in a folder of tools."""
    tools.mkdir(exist_ok=True)
    for part in Path(metadata.distribution(name).locate_file("")).glob(f"{name}*"):
        (tools / part.name).symlink_to(part)


def test_tools_beside_a_python_are_used_and_their_lack_has_a_cure(other, tmp_path):
    """By nothing but their being there; before, one line names what is missing, and the command."""
    show = 'echo "$PYTHONPATH"; "$PYTHON" -c "import rich; print(rich.__file__)"'
    done = in_shell(show, cwd=tmp_path, PYTHON=str(other), PYTHONPATH="/mine")
    refused(done, f"setup: {other} lacks rich", "--target .tools", "docs/howto/offline.md")
    put("rich", tmp_path / ".tools")
    done = in_shell(show, cwd=tmp_path, PYTHON=str(other), PYTHONPATH="/mine")
    path, file = done.out.splitlines()
    assert path == f"{tmp_path}/.tools:/mine" and file.startswith(f"{tmp_path}/.tools/rich/")
    (tmp_path / ".tools" / "numpy").mkdir()  # as one that is compiled for another Python
    (tmp_path / ".tools" / "numpy" / "__init__.py").write_text("import numpy._of_another_python")
    done = in_shell(show, cwd=tmp_path, PYTHON=str(other))
    refused(done, f"setup: {other} lacks", "numpy")


def test_needed_is_what_the_benchmark_imports():
    """And what that imports, of the packages that are locked."""
    found = metadata.packages_distributions()
    imported = set()
    for path in ROOT.glob("bench/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {dist for name in names for dist in found.get(name.split(".")[0], [])}
    wanted, more = set(), {name.lower() for name in imported} & LOCK
    while more:
        wanted |= more
        asked = [Requirement(line) for name in more for line in metadata.requires(name) or []]
        asked = [r.name.lower() for r in asked if not r.marker or r.marker.evaluate({"extra": ""})]
        more = {name.replace("_", "-") for name in asked} & LOCK - wanted
    wanted -= {"nvidia-ml-py"}  # without it the harness goes on
    assert {"numpy", "rich"} < wanted <= NEEDED < LOCK


# --- what is built or installed beside it


@pytest.mark.parametrize("name", ["apex", "horovod", "techniques"])
def test_an_installer_says_why_it_cannot_install(name, tmp_path):
    """No PyTorch: one line and exit code 2."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(["bash", f"bench/install_{name}.sh"], 240, environment(PYTHON=str(python)))
    refused(done, f"install_{name}.sh: ", "no torch", "PYTHON", code=2)


# As Apex's own: it imports torch, and asks nvcc even for what is Python alone.
SETUP = """
import subprocess
from packaging.version import parse
from setuptools import find_packages, setup
from torch.utils.cpp_extension import CUDA_HOME
words = subprocess.check_output([CUDA_HOME + "/bin/nvcc", "-V"], text=True).split()
assert parse(words[words.index("release") + 1].split(",")[0]) >= parse("11")
setup(name="apex", version="0.1", packages=find_packages())
"""
MODULES = {
    "__init__": "",
    "amp": "initialize = scale_loss = print",
    "parallel": "DistributedDataParallel = print",
    "optimizers/__init__": "",
}


@pytest.mark.full
@pytest.mark.skipif(bool(importlib.util.find_spec("apex")), reason="an Apex is installed here")
def test_apex_from_a_folder_by_the_real_pip(tmp_path):
    """Into a Python of its own that sees this one's torch; the folder stays as it was."""
    for name, text in MODULES.items():
        (tmp_path / "apex/apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex/apex" / f"{name}.py").write_text(text)
    (tmp_path / "apex" / "setup.py").write_text(SETUP)
    before = sorted(tmp_path.rglob("*"))
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (place,) = venv.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (place / "this.pth").write_text("".join(lines))
    env = environment(1, PYTHON=str(venv / "bin/python"), APEX_SOURCE=str(tmp_path / "apex"))
    done = run(["bash", "bench/install_apex.sh"], 400, env)
    succeeded(done)
    assert "Apex works, its Python part alone" in done.out
    assert (place / "apex" / "amp.py").exists()
    assert sorted(path for path in tmp_path.rglob("*") if venv not in path.parents) == sorted(
        [*before, venv]
    )


@pytest.mark.parametrize("kind", ["PyPI's", *full("a folder", "NVIDIA's")])
def test_which_apex_is_there(kind, tmp_path, request):
    """The unrelated one of PyPI, a clone that lies about, and the real amp and parallel."""
    path = tmp_path
    (tmp_path / "apex").mkdir()
    if kind == "PyPI's":
        (tmp_path / "apex" / "__init__.py").write_text("import pyramid_mailer")
    if kind == "NVIDIA's":
        path = request.getfixturevalue("reuploaded")
    env = environment(1, PYTHON=sys.executable, PYTHONPATH=str(path), APEX_SOURCE="/nowhere")
    done = run(["bash", "bench/install_apex.sh"], 240, env)
    if kind == "NVIDIA's":
        succeeded(done)
        assert "Apex works, its Python part alone" in done.out
    else:
        refused(done, "pip uninstall apex" if kind == "PyPI's" else "APEX_SOURCE=/nowhere")
