#!/bin/bash
# Installs the libraries of techniques/: Accelerate, Lightning Fabric, DeepSpeed and DALI.
#
#   bash bench/install_techniques.sh               into .venv
#   PYTHON=/path/to/python bash bench/install_techniques.sh
#
# The versions are those of requirements/techniques.lock; torch and what it brought stay as they are.
# DALI is left out where torch is for another CUDA than 13. DeepSpeed comes as source, of Python: there
# is nothing to compile.
#
# Exit code 2, and one line why, where they cannot be installed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$here/.venv/bin/python}

give_up() {
    echo "install_techniques.sh: $*" >&2
    exit 2
}

# Where this Python has its programs and what of torch's own it lacks; then the lines of the lock
# that are not installed.
look() {
    "$PYTHON" - "$here/requirements/techniques.lock" <<'PYTHON'
import importlib.metadata as metadata, importlib.util, sys, sysconfig
import torch
packages = "setuptools", "numpy"
lacks = [name for name in packages if not importlib.util.find_spec(name)]
print(sysconfig.get_path("scripts"), *lacks)
found = metadata.distributions()
there = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in found}
dali = (torch.version.cuda or "13").startswith("13")
for line in open(sys.argv[1]):
    name, _, version = line.split(";")[0].strip().partition("==")
    if version and there.get(name) != version and (dali or not name.startswith("nvidia-")):
        print(line.strip())
PYTHON
}
facts=$(look 2>/dev/null) || give_up "$PYTHON has no torch: set PYTHON to a Python that has it"
read -r scripts lacks <<<"$facts"
[ -z "$lacks" ] || give_up "$PYTHON lacks $lacks: install that first"

log=$(mktemp /tmp/techniques-log.XXXXXX)
wanted=$(mktemp)
trap 'rm -f "$wanted"; [ -s "$log" ] || rm -f "$log"' EXIT
uv=$(PATH=$scripts:$here/.venv/bin:$PATH command -v uv || true)

install() { # without what they ask for: the lock names all of it that torch does not bring
    if [ -n "$uv" ]; then
        "$uv" pip install --python "$PYTHON" --no-deps --compile-bytecode "$@" >>"$log" 2>&1
    else
        "$PYTHON" -m pip install --no-deps "$@" >>"$log" 2>&1
    fi || give_up "could not install ${*: -1}: is there a network? $log"
}

tail -n +2 <<<"$facts" | grep -v "^deepspeed" >"$wanted" || true
# What the markers leave out for this Python is not installed, and asked for again: that is quick.
[ ! -s "$wanted" ] || install -r "$wanted"
deepspeed=$(tail -n +2 <<<"$facts" | grep "^deepspeed" || true)
# Its setup.py imports torch, and on a machine with a GPU asks nvcc, although it compiles nothing.
[ -z "$deepspeed" ] || DS_ACCELERATOR=cpu install --no-build-isolation "$deepspeed"

"$PYTHON" -c 'import accelerate, deepspeed, lightning_fabric' >>"$log" 2>&1 ||
    give_up "they were installed, but cannot be imported: $log"
rm "$log"
echo "Accelerate, Lightning Fabric and DeepSpeed work"
