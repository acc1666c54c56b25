#!/usr/bin/env bash
# Times every script of the ladder on this machine: set-up, then `python -m bench run`.
#
#   bash bench/run_all.sh                a table and plots: 15 minutes (60 on several GPUs)
#   bash bench/run_all.sh --quick        the same, rougher, within 3 minutes
#   bash bench/run_all.sh --help         all flags
set -eu
cd "$(dirname "$0")/.."
. bench/setup.sh
exec "$PYTHON" -m bench run "$@"
