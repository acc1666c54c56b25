#!/bin/bash
# Installs NVIDIA's Apex 25.05, the last with apex.amp and apex.parallel, for the installed torch.
#
#   bash bench/install_apex.sh               its Python part, enough to train, into .venv
#   bash bench/install_apex.sh --kernels     with its CUDA kernels: needs nvcc, and takes a while
#   PYTHON=/path/to/python bash bench/install_apex.sh
#   APEX_SOURCE=FOLDER bash bench/install_apex.sh     from a checkout of tag 25.05, without a network
#
# Exit code 2, and one line why, where it cannot be installed.
set -euo pipefail

VERSION=25.05
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$here/.venv/bin/python}

give_up() {
    echo "install_apex.sh: $*" >&2
    exit 2
}

case "$*" in
"") kernels=no ;;
--kernels) kernels=yes ;;
*) give_up "$*: the only flag is --kernels" ;;
esac

# Which apex is there: none (missing), one that works, one that works with its kernels, another of
# NVIDIA's (old), or someone else's (foreign)? Then torch's CUDA, its toolkit, and what setup.py lacks.
look() {
    "$PYTHON" -P -c '
import contextlib, importlib.util, os, sys, warnings
import torch
from torch.utils.cpp_extension import CUDA_HOME
warnings.simplefilter("ignore")
spec = importlib.util.find_spec("apex")
state = "missing"
if spec and spec.origin:  # without, it is a mere folder of that name
    folder = os.path.dirname(spec.origin)
    state = "old" if os.path.isdir(f"{folder}/optimizers") else "foreign"
    try:
        with contextlib.redirect_stdout(None):
            from apex import amp, parallel
            parallel.DistributedDataParallel, amp.initialize, amp.scale_loss
            state = "works"
            import amp_C
        state = "kernels"
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
def missing(name):
    try:
        return not importlib.util.find_spec(name)
    except ModuleNotFoundError:  # not even the package that it is in
        return True
needs = list(filter(missing, ["pip", "setuptools", "packaging"]))
if missing("setuptools.command.bdist_wheel") and missing("wheel"):  # setuptools older than 70.1
    needs.append("wheel")
print(state, torch.version.cuda or "none", CUDA_HOME or "none", *needs)
'
}
facts=$(look 2>/dev/null) || give_up "$PYTHON has no torch: set PYTHON to a Python that has it"
read -r state cuda toolkit needs <<<"$facts"

finish() {
    if [ "$state" = kernels ]; then
        echo "Apex works, with its CUDA kernels: from apex import amp, parallel"
    else
        echo "Apex works, its Python part alone: from apex import amp, parallel"
    fi
    exit
}
case "$state $kernels" in "kernels "* | "works no") finish ;; esac
[ "$state" != foreign ] || give_up "an apex that is not NVIDIA's is in the way:" \
    "$PYTHON -m pip uninstall apex, then run this again"
[ -z "$needs" ] || give_up "$PYTHON lacks $needs: install that first"

work=$(mktemp -d /tmp/apex.XXXXXX)
log=$(mktemp /tmp/apex-log.XXXXXX)
trap 'rm -rf "$work"; [ -s "$log" ] || rm -f "$log"' EXIT

options=(--no-deps --no-cache-dir --force-reinstall --disable-pip-version-check
    --no-build-isolation) # setup.py imports torch
if [ $kernels = yes ]; then
    [ "$cuda" != none ] || give_up "--kernels: this torch is one for the CPU, $PYTHON"
    release=$("$toolkit/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p') ||
        give_up "--kernels needs nvcc: install CUDA $cuda, or set CUDA_HOME to where it is"
    [ "$release" = "$cuda" ] || # else Apex refuses, forty lines later
        give_up "--kernels: nvcc is of CUDA $release, torch of $cuda: set CUDA_HOME to that toolkit"
    # Asked for as options by 25.05, as variables by what came after it.
    options+=(--config-settings --build-option=--cpp_ext --config-settings --build-option=--cuda_ext)
    export APEX_CPP_EXT=1 APEX_CUDA_EXT=1
    jobs=$(nproc)
    memory=$(awk '/MemAvailable/ {print int($2 / 4194304)}' /proc/meminfo) # 4 GiB a compiler
    [ "$jobs" -le "$memory" ] || jobs=$((memory > 1 ? memory : 1))
    export MAX_JOBS="${MAX_JOBS:-$jobs}"
else # setup.py asks nvcc for its version even where it compiles nothing: this one answers
    mkdir -p "$work/cuda/bin"
    printf '#!/bin/sh\necho "Cuda compilation tools, release 12.6, V12.6.77"\n' >"$work/cuda/bin/nvcc"
    chmod +x "$work/cuda/bin/nvcc"
    export CUDA_HOME=$work/cuda
fi

if [ -n "${APEX_SOURCE:-}" ]; then
    [ -f "$APEX_SOURCE/setup.py" ] && [ -d "$APEX_SOURCE/apex" ] ||
        give_up "APEX_SOURCE=$APEX_SOURCE: give a folder with Apex $VERSION, its setup.py and apex/"
    cp -r "$APEX_SOURCE" "$work/source" # the build writes beside setup.py
else # not by pip: it would fetch the submodules, too, which only parts that we do not build need
    command -v git >/dev/null ||
        give_up "no git: install it, or set APEX_SOURCE to a folder with Apex $VERSION"
    GIT_TERMINAL_PROMPT=0 git clone --quiet --depth 1 --branch $VERSION \
        https://github.com/NVIDIA/apex "$work/source" >"$log" 2>&1 ||
        give_up "git could not clone Apex $VERSION: is there a network? If not, set APEX_SOURCE. $log"
fi

echo "installing Apex $VERSION into $PYTHON, log: $log"
"$PYTHON" -m pip install "${options[@]}" "$work/source" >>"$log" 2>&1 ||
    give_up "Apex $VERSION could not be installed: $log"
read -r state _ < <(look 2>>"$log") || true
case "$state $kernels" in
"kernels "* | "works no") ;;
"works yes") give_up "Apex was installed, but without its kernels: $log" ;;
*) give_up "Apex was installed, but its amp and parallel do not work: $log" ;;
esac
rm "$log"
finish
