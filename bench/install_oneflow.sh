#!/bin/bash
# Makes an environment of its own for techniques/oneflow_ddp.py: OneFlow 0.9.0 needs Python 3.10.
#
#   bash bench/install_oneflow.sh FOLDER
#   . FOLDER/bin/activate
#
# The environment takes 4.3 GB. Most of it is for GPUs, but OneFlow is linked to cuDNN and cuBLAS, and
# cannot be imported without them. Python comes from python3.10, pyenv or uv.
#
# Exit code 2, and one line why, where it cannot be installed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

give_up() {
    echo "install_oneflow.sh: $*" >&2
    exit 2
}

[ $# = 1 ] || give_up "name one folder for the environment"
folder=$1
works() {
    "$folder/bin/python" -c 'import oneflow, flowvision' >/dev/null 2>&1
}
if works; then
    echo "OneFlow works in $folder"
    exit
fi

uv=$(PATH=$here/.venv/bin:$PATH command -v uv || true)
python=
for candidate in python3.10 "$(pyenv prefix 3.10 2>/dev/null || true)/bin/python"; do
    # pyenv's python3.10 may be there and not run.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done

[ -n "$python$uv" ] || give_up "found no Python 3.10: install it, or uv, which can get it"

log=$(mktemp /tmp/oneflow-log.XXXXXX)
if [ -n "$python" ]; then
    "$python" -m venv "$folder" >"$log" 2>&1 || give_up "$python cannot make $folder: $log"
else # uv has a Python 3.10 of its own, or downloads it
    "$uv" venv --managed-python --allow-existing -p 3.10 "$folder" >"$log" 2>&1 ||
        give_up "found no Python 3.10, and uv cannot get it: $log"
fi

install() {
    if [ -n "$uv" ]; then
        "$uv" pip install --python "$folder/bin/python" "$@" >>"$log" 2>&1
    else
        "$folder/bin/python" -m pip install "$@" >>"$log" 2>&1
    fi || give_up "could not install ${*: -1}: is there a network? $log"
}
install "setuptools<81" wheel "numpy<2" \
    nvidia-cudnn-cu11==8.9.6.50 nvidia-cublas-cu11==11.11.3.6 oneflow==0.9.0
# Its setup.py needs that old setuptools. Later versions cannot be imported with OneFlow 0.9.0.
install --no-build-isolation flowvision==0.2.1

works || give_up "it was installed, but cannot be imported: $folder/bin/python -c 'import oneflow'"
rm "$log"
echo "OneFlow works in $folder"
