#!/usr/bin/env bash
# Runs the tests: set-up, then pytest with two workers. Flags go to pytest. GPUs are hidden.
#
#   bash tests/run_all.sh               what to run before a change lands: 5 to 8 minutes, two cores
#   bash tests/run_all.sh --full        all tests: 25 to 50 minutes, with what they install
#   bash tests/run_all.sh tests/test_diffs.py -k letter
#   bash tests/run_all.sh -n 0          without workers, in this process
#   bash tests/run_all.sh -m gpu        only tests that need a GPU
#   bash tests/run_all.sh --full --install
#                                       installs what is missing, too: Slurm and Chromium by apt-get;
#                                       Sphinx, Horovod and the libraries of techniques/ into the
#                                       Python that is used; OneFlow into .cache/; CI=true does the
#                                       same
set -eu
cd "$(dirname "$0")/.."
. bench/setup.sh
[ "${CI:-}" = true ] || exec "$PYTHON" -m pytest -n 2 "$@"
# In CI, what failed runs once more, by itself: a test that fails only beside others, on a machine
# that has too much to do, is reported as unsteady, and a mistake fails again.
"$PYTHON" -m pytest -n 2 "$@" && exit
code=$?
[ $code -eq 1 ] || exit $code # 1: tests failed; all else has another reason
echo "UNSTEADY, if it passes now:"
exec "$PYTHON" -m pytest "$@" -n 0 --last-failed --maxfail 5 -v
