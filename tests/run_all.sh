#!/usr/bin/env bash
# Runs the tests: set-up, then pytest; what is given goes to pytest. GPUs are hidden from them.
#
#   bash tests/run_all.sh
#   bash tests/run_all.sh tests/test_diffs.py -k limits
#   bash tests/run_all.sh -m gpu        those that need a GPU, and no others
#   bash tests/run_all.sh --install     installs what is missing: Slurm by apt-get, Horovod and the
#                                       libraries of techniques/ into the Python that is used; CI=true
#                                       does the same
set -eu
cd "$(dirname "$0")/.."
. bench/setup.sh
exec "$PYTHON" -m pytest "$@"
