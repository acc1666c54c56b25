"""Set-up on machines that we do not have: which torch goes into .venv, which tools beside a Python
that has one, and Apex; without a network.

The programs that set-up calls are stand-ins, alone on PATH, that write down how they were called.
"""

import ast
import importlib.metadata as metadata
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import support
from packaging.requirements import Requirement
from support import ROOT, Finished, succeeded
from test_apex import apex as reuploaded  # noqa: F401  a real tree of Apex

from bench import install
from bench.process import environment, run

refused = partial(support.refused, code=2)
TOOLS = "awk bash basename cat chmod cksum cp dirname grep mkdir mktemp mv nproc rm sed sh".split()


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class Machine:
    """A copy of what set-up consists of, and a PATH with nothing but stand-ins and plain tools."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "repository", folder / "bin", folder / "calls"
        for name in ("bench", "requirements"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("*.py"))
        self.bin.mkdir()
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name))

    def calls(self, name: str) -> list[str]:
        """How a stand-in was called since the last time we asked; of the others we forget it."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def run(self, *command, **env) -> Finished:
        return run(command, 60, {"PATH": str(self.bin), **env}, self.root)


# --- which torch

# The active python3, which has no torch, and later .venv/bin/python
PYTHON = """
case "$*" in
-) exit 1 ;; # has it torch?
*venv*) echo "venv $*" >>LOG; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*"pip install"*) echo "pip $*" >>LOG; cp UV .venv/bin/uv ;;
*torch.ones*) [ -z "$BROKEN" ] || { echo 'Traceback ...'; echo "$BROKEN"; exit 1; } ;;
*sys.executable*) echo "$PWD/.venv/bin/python" ;;
esac
"""
UV = """echo "uv $*" >>LOG; exit ${UV_CODE:-0}"""
OPTIONS = "pip install --quiet --compile-bytecode --python .venv/bin/python"
USUAL = [f"{OPTIONS} -r requirements/torch.lock -r requirements/tools.lock"]
CUDA12 = "--torch-backend cu126 -r requirements/torch-cu126.lock -r requirements/tools.lock"
CUDA12 = [f"{OPTIONS} {CUDA12}"]
V100, A100 = ["7.0, 535.183.01"] * 4, ["8.0, 580.65.06"] * 2


@pytest.fixture
def machine(tmp_path):
    """A machine where .venv can be made; machine(*gpus) sets it up on a node with these."""
    made = Machine(tmp_path)
    uv = program(tmp_path / "uv", UV.replace("LOG", str(made.log)))
    text = PYTHON.replace("LOG", str(made.log)).replace("UV", str(uv))
    program(made.bin / "python3", text)

    def setup(*rows, smi="", **env) -> Finished:
        """Each row is of a GPU, as nvidia-smi gives it; smi: a script in its place."""
        (made.bin / "nvidia-smi").unlink(missing_ok=True)
        if rows or smi:
            answer = "\n".join(["cat <<END", *rows, "END"])
            case = f'case "$*" in *=compute_cap,driver_version*)\n{answer}\nesac'
            program(made.bin / "nvidia-smi", smi or case)
        script = 'set -eu; . bench/setup.sh; echo "$PYTHON"'
        return made.run("bash", "-c", script, BROKEN=env.pop("BROKEN", ""), **env)

    made.setup = setup
    return made


@pytest.mark.parametrize(
    "rows, command, why",
    [
        (V100, CUDA12, "a GPU has compute capability 7.0, and CUDA 13 needs 7.5"),
        (["7.0, 580.65.06"], CUDA12, "compute capability 7.0"),
        (["8.0, 535.183.01"], CUDA12, "the NVIDIA driver is 535.183.01, and CUDA 13 needs 580"),
        (["8.0, 580.65.06", "6.1, 580.65.06"], CUDA12, "compute capability 6.1"),
        (["9.0, 525.60.13"], CUDA12, "driver is 525.60.13"),
        (A100, USUAL, "compute capability 8.0, driver 580.65.06"),
        (["7.5, 580.65.06"], USUAL, "compute capability 7.5"),
        (["12.0, 595.84", "8.9, 595.84"], USUAL, "compute capability 8.9, driver 595.84"),
        ([], USUAL, "no GPU is seen"),
    ],
)
def test_the_torch_that_gpus_and_driver_can_run(machine, rows, command, why):
    """Into .venv, in one command; one line says which and why."""
    done = machine.setup(*rows)
    assert (done.code, done.out) == (0, f"{machine.root}/.venv/bin/python\n"), done.err
    (line,) = done.err.splitlines()
    lock = command[0].split()[-3]
    assert line.startswith(f"setup: installing {lock} ") and why in line
    assert machine.calls("uv") == command


def test_an_nvidia_smi_that_does_not_know_compute_cap(machine):
    """Then the build that has kernels for all GPUs of those days; the line says so."""
    smi = """case "$*" in
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
*name*) echo 'Tesla V100-SXM2-16GB, 550.54.15' ;;
esac"""
    done = machine.setup(smi=smi)
    assert "tells no compute capability" in done.err
    assert machine.calls("uv") == CUDA12
    refused(machine.setup(smi=smi.replace("550.54.15", "440.33.01")), "440.33.01", "525")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_none(machine, hidden):
    """Neither chosen for nor tried."""
    done = machine.setup(*V100, CUDA_VISIBLE_DEVICES=hidden, BROKEN="no GPU")
    assert done.code == 0 and "no GPU is seen" in done.err
    assert machine.calls("uv") == USUAL


def test_a_driver_that_does_not_answer_is_no_gpu(machine):
    """What nvidia-smi says then goes to stdout, and is no GPU."""
    said = "NVIDIA-SMI has failed because it couldn't communicate, with the NVIDIA driver."
    done = machine.setup(smi=f'echo "{said}"; exit 9')
    assert done.code == 0 and "no GPU is seen" in done.err
    assert machine.calls("uv") == USUAL


@pytest.mark.parametrize(
    "rows, words",
    [
        (["7.0, 470.82.01"], ["driver 470.82.01", "525", "CUDA_VISIBLE_DEVICES="]),
        (["8.0, 515.65.01"], ["driver 515.65.01", "525"]),
        (["12.0, 570.86.10"], ["12.0", "driver 570.86.10", "580", "PYTHON"]),
        (["7.0, 580.65.06", "12.0, 580.65.06"], ["7.0 to 12.0", "PYTHON"]),
    ],
)
def test_what_no_torch_fits_is_one_line(machine, rows, words):
    """And nothing is installed."""
    refused(machine.setup(*rows), "setup: ", *words)
    assert machine.calls("uv") == [] and not (machine.root / ".venv").exists()


def test_a_second_call_installs_nothing(machine):
    """Nor says anything; after a change of a lock it installs into the same .venv."""
    for rows, lock in ((V100, "torch-cu126.lock"), (A100, "torch.lock")):
        machine.setup(*rows)
        assert (machine.root / ".venv" / ".installed").read_text().startswith(f"{lock} ")
        machine.calls("")
        done = machine.setup(*rows)
        assert (done.code, done.err) == (0, "") and not machine.log.exists()
    (machine.root / ".venv" / "kept").touch()
    with open(machine.root / "requirements" / "tools.lock", "a") as file:
        file.write("more==1\n")
    machine.setup(*A100)
    assert machine.calls("uv") == USUAL and (machine.root / ".venv" / "kept").exists()


def test_a_venv_that_comes_to_another_node_is_made_anew(machine):
    """Not over the other: the packages of CUDA 12 and 13 have files in common."""
    for rows, command in ((A100, USUAL), (V100, CUDA12), (A100, USUAL)):
        machine.setup(*rows)
        assert not (machine.root / ".venv" / "other").exists()
        assert machine.calls("uv") == command
        (machine.root / ".venv" / "other").touch()


def test_a_node_without_gpus_takes_either(machine):
    """A cluster's login node does not undo what its V100 nodes have installed."""
    machine.setup(*V100)
    machine.calls("")
    assert machine.setup().err == "" and not machine.log.exists()


def test_an_installation_that_failed_goes_on_or_starts_anew(machine):
    """On the same node it goes on; on another one it has to begin again."""
    done = machine.setup(*V100, UV_CODE="1")
    assert done.code == 2 and "requirements/torch-cu126.lock" in done.err.splitlines()[-1]
    (machine.root / ".venv" / "half").touch()
    machine.calls("")
    machine.setup(*V100, UV_CODE="1")
    assert machine.calls("uv") == CUDA12 and (machine.root / ".venv" / "half").exists()
    machine.setup(*A100)
    assert machine.calls("uv") == USUAL and not (machine.root / ".venv" / "half").exists()


def test_a_torch_that_does_not_run_on_the_gpu_is_said(machine):
    """And tried again by the next call."""
    for _ in range(2):
        done = machine.setup(*A100, BROKEN="RuntimeError: no kernel image")
        last = done.err.splitlines()[-1]
        assert done.code == 2 and "requirements/torch.lock" in last and "no kernel image" in last
        assert machine.calls("uv") == USUAL


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

PIP = """
import os, pathlib, sys
target, path = pathlib.Path(sys.argv[sys.argv.index("--target") + 1]), pathlib.Path(sys.argv[-1])
names = [line.split("==")[0] for line in path.read_text().splitlines()]
print("pip", *names, file=open({log!r}, "a"))
if os.environ.get("PIP_CODE"):
    sys.exit("WARNING: Retrying ...\\nERROR: no network")
for name in names:
    (target / f"{{name}}-1.dist-info").mkdir()
    (target / f"{{name}}-1.dist-info" / "METADATA").write_text(f"Name: {{name}}")
"""
LOCK = (ROOT / "requirements" / "tools.lock").read_text().splitlines()
LOCK = {line.split("==")[0] for line in LOCK if "win32" not in line and "'nt'" not in line}
NEEDED = re.search('^needed="(.*?)"', (ROOT / "bench" / "setup.sh").read_text(), re.M | re.S)
NEEDED = set(NEEDED[1].split())
NO_NETWORK = {"PIP_CODE": "1"}


def put(place: Path, *names: str, version: str = "1", tag: str = "py3-none-any") -> None:
    """Makes packages look installed there; their folders are named as wheels are."""
    for name in names:
        folder = place / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")


@pytest.fixture
def cluster(tmp_path):
    """A machine whose Python has torch: cluster.lacks(names) takes tools from it, cluster.setup()
    sets up; its pip can do what pip's does, or cannot where PIP_CODE is set.
    """
    made = Machine(tmp_path)
    venv.create(tmp_path / "python", symlinks=True)
    (place,) = (tmp_path / "python").glob("lib/python*/site-packages")
    put(place, "torch", version="2.15.0")
    put(place, "torchvision", version="0.30.0")
    (place / "pip").mkdir()
    (place / "pip" / "__main__.py").write_text(PIP.format(log=str(made.log)))
    made.tools, python = made.root / ".tools", tmp_path / "python" / "bin" / "python"

    def lacks(*names):
        put(place, *(LOCK - {*names}))

    def setup(**env) -> Finished:
        script = 'set -eu; . bench/setup.sh; echo "$PYTHON:${PYTHONPATH-}"'
        done = made.run("bash", "-c", script, PYTHON=str(python), **env)
        made.path = done.out.strip().removeprefix(f"{python}:") if done.code == 0 else None
        return done

    made.lacks, made.setup = lacks, setup
    return made


def test_a_python_that_has_all_is_used_alone(cluster):
    """Whatever lies in .tools, from another machine for one."""
    cluster.lacks()
    put(cluster.tools, "numpy", tag="cp39-cp39-win32")
    done = cluster.setup(**NO_NETWORK)
    assert (done.code, done.err, cluster.path) == (0, "", "") and not cluster.log.exists()


def test_what_a_python_lacks_is_added_beside_it(cluster):
    """That alone, in the order of the lock; a second call installs nothing and says nothing."""
    cluster.lacks("rich", "ruff", "pysocks")
    done = cluster.setup(PYTHONPATH="/mine")
    (line,) = done.err.splitlines()
    assert line.startswith("setup: ") and "in .tools" in line
    assert cluster.path == f"{cluster.tools}:/mine"
    assert cluster.calls("pip") == ["pysocks rich ruff"]
    for more in ({}, {"PYTHONPATH": str(cluster.tools)}):  # in a run_all.sh that another one calls
        assert cluster.setup(**NO_NETWORK, **more).err == "" and not cluster.log.exists()
    cluster.tools.rename(cluster.root / "gone")
    cluster.setup()
    assert cluster.calls("pip") == ["pysocks rich ruff"]


def test_tools_that_were_brought_along_are_taken(cluster):
    """By nothing but their being there; of compiled ones, those for this Python."""
    cluster.lacks("rich", "python-dateutil", "numpy", "psutil")
    mine = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    linux = f"manylinux_2_28_{os.uname().machine}"
    put(cluster.tools, "rich", "python-dateutil")
    put(cluster.tools, "numpy", tag=f"{mine}-{mine}-{linux}\nTag: {mine}-{mine}-linux_other")
    put(cluster.tools, "psutil", tag=f"cp36-abi3-{linux}")
    done = cluster.setup(**NO_NETWORK)
    assert (done.code, done.err, cluster.path) == (0, "", str(cluster.tools))
    assert not cluster.log.exists()


def test_what_was_not_brought_along_is_added(cluster):
    """With all that this Python lacks, since pip adds nothing to a folder's bin."""
    cluster.lacks("rich", "ruff")
    put(cluster.tools, "rich", version="0.1")
    cluster.setup()
    assert cluster.calls("pip") == ["rich ruff"]
    assert not (cluster.tools / "rich-0.1.dist-info").exists()


OTHERS = ["cp39-cp39-manylinux_2_28_x86_64", "cp39-cp39-any", "py3-none-macosx_11_0_x86_64"]


@pytest.mark.parametrize("tag", [*OTHERS, "py3-none-manylinux_2_17_s390x"])
def test_tools_for_another_python_or_machine_do_not_count(cluster, tag):
    """They are replaced, or where they cannot be they are not used."""
    cluster.lacks("rich", "ruff")
    put(cluster.tools, "rich", "ruff")
    put(cluster.tools, "numpy", tag=tag)
    done = cluster.setup(**NO_NETWORK)
    line = done.err.splitlines()[-1]
    assert done.code == 2 and "lacks rich, " in line and "see its numpy" in line
    assert (cluster.tools / "numpy-1.dist-info").exists()
    cluster.calls("")
    assert cluster.setup().code == 0
    assert cluster.calls("pip") == ["rich ruff"] and cluster.path == str(cluster.tools)
    assert not (cluster.tools / "numpy-1.dist-info").exists()


@pytest.mark.parametrize("tag, used", [("py3-none-any", True), (OTHERS[0], False)])
def test_without_a_network_the_benchmark_goes_on(cluster, tag, used):
    """Where only the tests lack something; .tools stays, and is used if it is for this Python."""
    cluster.lacks("ruff", "selenium", "pytest")
    put(cluster.tools, "pytest", tag=tag)
    done = cluster.setup(**NO_NETWORK)
    _, line = done.err.splitlines()
    assert done.code == 0 and (cluster.tools / "pytest-1.dist-info").exists()
    assert cluster.path == (str(cluster.tools) if used else "")
    lacks = "lacks ruff, selenium, which" if used else "lacks pytest, ruff, selenium, which"
    assert all(word in line for word in (lacks, "ERROR: no network", "only the tests need"))


def test_without_a_network_what_is_needed_and_the_cure_are_named(cluster):
    cluster.lacks("rich", "pandas", "ruff")
    done = cluster.setup(**NO_NETWORK)
    _, line = done.err.splitlines()
    assert done.code == 2 and line.startswith("setup: ")
    words = [" lacks pandas, rich, which", "ERROR: no network", "docs/howto/offline.md"]
    assert all(word in line for word in words) and "ruff" not in line


def test_uv_where_pip_does_not_work(cluster):
    cluster.lacks("rich")
    program(cluster.bin / "uv", f"""echo "uv $*" >>{cluster.log}""")
    assert cluster.setup(**NO_NETWORK).code == 0
    lines = cluster.log.read_text().splitlines()
    assert lines[0] == "pip rich" and lines[1].startswith("uv pip install --python ")


def test_needed_is_what_the_benchmark_imports():
    """And what that imports, of the packages that are locked."""
    found = metadata.packages_distributions()
    imported = set()
    for path in ROOT.glob("bench/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported |= {dist for name in names for dist in found.get(name.split(".")[0], [])}
    wanted, more = set(), {name.lower() for name in imported} & LOCK
    while more:
        wanted |= more
        asked = [Requirement(line) for name in more for line in metadata.requires(name) or []]
        asked = [r.name.lower() for r in asked if not r.marker or r.marker.evaluate({"extra": ""})]
        more = {name.replace("_", "-") for name in asked} & LOCK - wanted
    wanted -= {"nvidia-ml-py"}  # without it the harness goes on
    assert {"numpy", "rich"} < wanted <= NEEDED < LOCK


# --- Apex

# A Python: STATE is what the installer's look at it finds, before pip and, after it, AFTER.
APEX_PYTHON = """
case "$*" in
*"pip install"*)
    echo "pip $*" >>LOG
    echo "built $CUDA_HOME $APEX_CPP_EXT$APEX_CUDA_EXT $MAX_JOBS $("$CUDA_HOME/bin/nvcc" -V)" >>LOG
    [ -f "$(echo "$*" | sed 's/.* //')/setup.py" ] || exit 3
    echo "much, as pip does"; touch DONE; exit ${PIP_CODE:-0} ;;
*-c*) [ -n "$STATE" ] || exit 1
    [ -f DONE ] && echo "$AFTER" || echo "$STATE" ;;
esac
"""
GIT = """echo "git $*" >>LOG; [ -z "$GIT_CODE" ] || { echo fatal: no host; exit $GIT_CODE; }
mkdir -p "$(echo "$*" | sed 's/.* //')"; touch "$(echo "$*" | sed 's/.* //')/setup.py" """
BUILD = "-m pip install --no-deps --no-cache-dir --force-reinstall --disable-pip-version-check"
BUILD += " --no-build-isolation"
MISSING = "missing 12.6 none"


@pytest.fixture
def node(tmp_path):
    """A machine where Apex can be installed, by node.apex(flags, STATE=..., AFTER=...)."""
    made = Machine(tmp_path)
    (made.bin / "touch").symlink_to(shutil.which("touch"))
    program(made.bin / "git", GIT.replace("LOG", str(made.log)))
    text = APEX_PYTHON.replace("LOG", str(made.log)).replace("DONE", str(tmp_path / "done"))
    python = program(tmp_path / "python", text)
    program(tmp_path / "cuda/bin/nvcc", "echo 'Cuda compilation tools, release 12.6, V12.6.77'")

    def apex(*flags, STATE=MISSING, AFTER="works 12.6 none", **env) -> Finished:
        (tmp_path / "done").unlink(missing_ok=True)
        env |= {"PYTHON": str(python), "STATE": STATE, "AFTER": AFTER}
        return made.run("bash", "bench/install_apex.sh", *flags, **env)

    made.apex, made.toolkit = apex, f"{tmp_path}/cuda"
    return made


def test_apex_is_installed_from_its_last_tag_that_has_amp(node):
    """Its Python part, and without nvcc, for whose version its setup.py asks nevertheless."""
    done = node.apex()
    succeeded(done)
    assert "Apex works, its Python part alone" in done.out
    git, pip, built = node.log.read_text().splitlines()
    source = git.split()[-1]
    options = "git clone --quiet --depth 1 --branch 25.05 https://github.com/NVIDIA/apex"
    assert git == f"{options} {source}" and pip == f"pip {BUILD} {source}"
    toolkit = str(Path(source).parent / "cuda")
    assert built.split()[1] == toolkit and "release 12.6, V" in built
    assert not Path(source).parent.exists()  # nothing is left


def test_apex_with_its_kernels(node):
    """Asked for in both ways that its setup.py has had; as many compilers as fit into memory."""
    facts = f"12.6 {node.toolkit}"
    env = {"STATE": f"works {facts}", "AFTER": f"kernels {facts}", "CUDA_HOME": node.toolkit}
    done = node.apex("--kernels", **env)
    succeeded(done)
    assert "Apex works, with its CUDA kernels" in done.out
    _, pip, built = node.log.read_text().splitlines()
    asked = "--config-settings --build-option=--cpp_ext --config-settings --build-option=--cuda_ext"
    assert pip.startswith(f"pip {BUILD} {asked} ")
    toolkit, variables, jobs = built.split()[1:4]
    assert (toolkit, variables) == (node.toolkit, "11") and 1 <= int(jobs) <= os.cpu_count()


@pytest.mark.parametrize(
    "flags, state", [([], "works"), ([], "kernels"), (["--kernels"], "kernels")]
)
def test_an_apex_that_works_is_left_alone(node, flags, state):
    done = node.apex(*flags, STATE=f"{state} 12.6 none")
    succeeded(done)
    assert "Apex works" in done.out and not node.log.exists()


CANNOT = {
    "no torch": ([], {"STATE": ""}, ["no torch", "PYTHON"]),
    "another flag": (["--kernel"], {}, ["--kernel", "--kernels"]),
    "someone else's": ([], {"STATE": "foreign 12.6 none"}, ["not NVIDIA's", "pip uninstall apex"]),
    "no setuptools": ([], {"STATE": f"{MISSING} setuptools"}, ["lacks setuptools"]),
    "no network": ([], {"GIT_CODE": "128"}, ["network", "APEX_SOURCE"]),
    "no source": ([], {"APEX_SOURCE": "/nowhere"}, ["APEX_SOURCE=/nowhere", "setup.py"]),
    "does not build": ([], {"PIP_CODE": "1"}, ["could not be installed"]),
    "does not work": ([], {"AFTER": "old 12.6 none"}, ["do not work"]),
    "a CPU's torch": (["--kernels"], {"STATE": "missing none none"}, ["--kernels", "CPU"]),
    "no nvcc": (["--kernels"], {"STATE": MISSING}, ["--kernels", "nvcc", "CUDA_HOME"]),
    "another nvcc": (
        ["--kernels"],
        {"STATE": "missing 13.2 TOOLKIT"},
        ["12.6", "13.2", "CUDA_HOME"],
    ),
    "no kernels": (
        ["--kernels"],
        {"STATE": "missing 12.6 TOOLKIT", "CUDA_HOME": "TOOLKIT"},
        ["without its kernels"],
    ),
}


@pytest.mark.parametrize("why", CANNOT)
def test_why_apex_cannot_be_installed(node, why):
    """One line and exit code 2; a log is kept where the line names it, and only there."""
    flags, env, words = CANNOT[why]
    env = {name: value.replace("TOOLKIT", node.toolkit) for name, value in env.items()}
    line = refused(node.apex(*flags, **env), "install_apex.sh: ", *words)
    logs = [Path(word) for word in line.split() if word.startswith("/tmp/apex-log.")]
    assert all(log.stat().st_size for log in logs)
    assert bool(logs) == (why in ("no network", "does not build", "does not work", "no kernels"))
    for log in logs:
        log.unlink()


def test_apex_without_git(node):
    (node.bin / "git").unlink()
    refused(node.apex(), "no git", "APEX_SOURCE")


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
    done = run(["bash", "bench/install_apex.sh"], 120, env)
    succeeded(done)
    assert "Apex works, its Python part alone" in done.out
    assert (place / "apex" / "amp.py").exists()
    assert sorted(path for path in tmp_path.rglob("*") if venv not in path.parents) == sorted(
        [*before, venv]
    )


@pytest.mark.parametrize("kind", ["PyPI's", "a folder", "NVIDIA's"])
def test_which_apex_is_there(kind, tmp_path, request):
    """The unrelated one of PyPI, a clone that lies about, and the real amp and parallel."""
    path = tmp_path
    (tmp_path / "apex").mkdir()
    if kind == "PyPI's":
        (tmp_path / "apex" / "__init__.py").write_text("import pyramid_mailer")
    if kind == "NVIDIA's":
        path = request.getfixturevalue("reuploaded")
    env = environment(1, PYTHON=sys.executable, PYTHONPATH=str(path), APEX_SOURCE="/nowhere")
    done = run(["bash", "bench/install_apex.sh"], 60, env)
    if kind == "NVIDIA's":
        succeeded(done)
        assert "Apex works, its Python part alone" in done.out
    else:
        refused(done, "pip uninstall apex" if kind == "PyPI's" else "APEX_SOURCE=/nowhere")


def test_with_apex_calls_the_installer(tmp_path, monkeypatch):
    """Its line becomes the benchmark's."""
    monkeypatch.setenv("PYTHON", str(program(tmp_path / "python", "exit 1")))
    said = []
    install.provide(["apex"], ExitStack(), said.append)
    assert len(said) == 2 and said[1].startswith("--with apex: install_apex.sh: ")
    assert "no torch" in said[1]
