# Finds or makes the Python that runs everything, and sets PYTHON. Sourced by */run_all.sh.
#
#   1. $PYTHON, where it is set: it must have torch and torchvision
#   2. the active python3, where it has them (a cluster's module, a container): used as it is, with
#      the tools (pandas, rich, ...) that are in .tools/, beside it (docs/howto/offline.md)
#   3. .venv/, made by uv from requirements/tools.lock and the torch that this machine can run:
#      torch.lock        the newest, for CUDA 13; also where no GPU is seen
#      torch-cu126.lock  the last for CUDA 12, where a GPU (V100) or the driver is too old for 13
#
# A second call does nothing but look. Where .venv has come to a node with other GPUs, it is made
# anew.

say() { printf '%s\n' "$*" >&2; }
stop() { say "setup: $*"; exit 2; }

fits() { # exit code 0: this Python has all that the scripts need
    "$1" - <<'PY' 2>/dev/null
import importlib.metadata as metadata, sys
def version(name):
    return tuple(int(part) for part in metadata.version(name).split("+")[0].split(".")[:2])
sys.exit(not (sys.version_info >= (3, 11) and version("torch") >= (2, 11) and version("torchvision")))
PY
}

gpus() { # each GPU's compute capability (0: not known) and driver, a line "7.0, 535.183.01"
    case "${CUDA_VISIBLE_DEVICES-all}" in "" | -1) return ;; esac # hidden: for us there are none
    nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null |
        grep -E '^[0-9]+\.[0-9]+, *[0-9]+\.' && return
    # An old nvidia-smi does not know compute_cap. (One that fails says why in the rows' place.)
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null |
        sed -nE 's/^[^,]+(, *[0-9]+\.[0-9.]+)$/0\1/p'
}

# Sets lock to the torch for this machine's GPUs, why to the reason, and gpu where there is one.
#
# CUDA 13 needs a driver of 580 or newer, every CUDA 12 one of 525 or newer:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
# CUDA 13 has lost the GPUs below compute capability 7.5; torch for CUDA 12.6 has those from 5.0 to
# 9.0, and 2.14 is the last: https://github.com/pytorch/pytorch/issues/190385
choose_torch() {
    local low high driver
    lock=torch.lock why="no GPU is seen" gpu=""
    read -r low high driver < <(gpus | awk -F ', *' '
        NR == 1 || $1 < low { low = $1 }
        NR == 1 || $1 > high { high = $1 }
        END { if (NR) print low, high, $2 }') || return 0
    gpu=yes why="compute capability $low, driver $driver"
    [ "${driver%%.*}" -ge 525 ] ||
        stop "the NVIDIA driver $driver is too old, torch needs 525 or newer:" \
            "update it, or set CUDA_VISIBLE_DEVICES= to go without GPUs"
    if [ "$low" = 0 ]; then
        why="nvidia-smi tells no compute capability, and this one has kernels for 5.0 to 9.0"
    elif [ "${low/./}" -lt 75 ]; then
        why="a GPU has compute capability $low, and CUDA 13 needs 7.5"
    elif [ "${driver%%.*}" -lt 580 ]; then
        why="the NVIDIA driver is $driver, and CUDA 13 needs 580"
    else
        return 0
    fi
    [ "${high/./}" -lt 100 ] ||
        stop "no torch of requirements/ is for GPUs of compute capability $low to $high and" \
            "driver $driver: update it to 580, or set PYTHON to one that has such a torch"
    lock=torch-cu126.lock
}

stamp() { # what .venv/.installed says once this lock is installed
    echo "$1 $(cat "requirements/$1" requirements/tools.lock | cksum)"
}

make_venv() {
    local lock why gpu installed base options="--quiet --compile-bytecode --python .venv/bin/python"
    choose_torch
    installed=$(cat .venv/.installed 2>/dev/null) || true
    [ "$installed" = "$(stamp $lock)" ] && return
    [ -z "$gpu" ] && [ "$installed" = "$(stamp torch-cu126.lock)" ] && return # a CPU can run both
    # One torch never over the other: the packages of CUDA 12 and 13 have files in common.
    case "$installed" in "$lock"* | [0-9]* | "") ;; *) rm -rf .venv ;; esac
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # none yet, or a broken one
        for base in python3 python3.14 python3.13 python3.12 python3.11 ""; do
            [ -n "$base" ] || stop "no Python 3.11 or newer on PATH: install one, or set PYTHON"
            "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        done
        "$base" -m venv --clear .venv >&2 || stop "$base -m venv failed: on Debian, apt-get install python3-venv"
    fi
    echo "$lock, not finished" >.venv/.installed
    say "setup: installing requirements/$lock and tools.lock into .venv (once, some 5 GB): $why"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv >&2 ||
        stop "pip could not install uv into .venv: is there a network?"
    # Compiled here, in 15 s: where Python may not write what it compiles (PYTHONDONTWRITEBYTECODE, a
    # folder to read only), every single start would take 4 CPU-seconds more.
    [ $lock = torch.lock ] || options="$options --torch-backend cu126" # an index of its own
    .venv/bin/uv pip install $options -r requirements/$lock -r requirements/tools.lock >&2 ||
        stop "uv could not install requirements/$lock into .venv: is there a network, and 6 GB of disk?"
    if [ -n "$gpu" ] &&
        ! why=$(.venv/bin/python -c 'import torch; torch.ones(1, device="cuda") + 1' 2>&1); then
        stop "the torch of requirements/$lock does not run on this GPU, see docs/howto/troubleshooting.md: ${why##*$'\n'}"
    fi
    stamp $lock >.venv/.installed
}

# Of tools.lock what `bench run` needs, with what that needs; all others are for the tests.
needed="contourpy cycler fonttools kiwisolver markdown-it-py matplotlib mdurl numpy packaging pandas
pillow psutil pygments pyparsing python-dateutil rich scipy tzdata"

use_tools() { # lets this Python find the tools in .tools; stops where it lacks some even then
    local lacks
    [ ! -d .tools ] || export PYTHONPATH="$PWD/.tools${PYTHONPATH:+:$PYTHONPATH}"
    lacks=$("$PYTHON" - $needed <<'PY'
import importlib, os, sys
from importlib.metadata import distributions
lacks = [name for name in sys.argv[1:] if not any(distributions(name=name))]
for name in "matplotlib numpy pandas psutil scipy".split() if os.path.isdir(".tools") else ():
    try:
        importlib.import_module(name)
    except ImportError:  # compiled for another Python or processor
        lacks.append(name)
print(*dict.fromkeys(lacks))
PY
    )
    [ -z "$lacks" ] || stop "$PYTHON lacks $lacks: this adds them beside it, in .tools (without a" \
        "network: docs/howto/offline.md): $PYTHON -m pip install --upgrade --no-deps --target .tools" \
        "-c requirements/tools.lock $lacks"
}

if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || stop "PYTHON=$PYTHON: give one of 3.11 or newer that has torch 2.11 or newer and torchvision"
elif fits python3; then
    PYTHON=$(command -v python3)
else
    PYTHON=.venv/bin/python
fi
case "$PYTHON" in .venv/bin/python | "$PWD/.venv/bin/python") make_venv ;; *) use_tools ;; esac
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
export PYTHON
