#!/usr/bin/env bash
# Runs the tests: set-up, then pytest; what is given goes to pytest.
#
#   bash tests/run_all.sh
#   bash tests/run_all.sh tests/test_diffs.py -k limits
set -eu
cd "$(dirname "$0")/.."
. bench/setup.sh
exec "$PYTHON" -m pytest "$@"
