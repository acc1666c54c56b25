#!/bin/bash
# Ends what up.sh started: the jobs, then the daemons. The folder stays, with its logs.
#
#   bash bench/slurm/down.sh [FOLDER]
set -euo pipefail

folder=${1:-/tmp/two-node-slurm}
[ -d "$folder/run" ] || exit 0
export SLURM_CONF=$folder/slurm.conf

pids=$(cat "$folder"/run/*.pid 2>/dev/null | xargs || true) # now: a daemon removes its own first
alive() { # of them; a pid file may be older than the process that has its number now
    local pid
    for pid in $pids; do
        case $(awk '{print $2, $3}' "/proc/$pid/stat" 2>/dev/null) in
        *Z) ;; # dead, and not yet collected by its parent
        "(munged)"* | "(slurmctld)"* | "(slurmd)"*) echo "$pid" ;;
        esac
    done
}
[ -n "$(alive)" ] || exit 0

if [ -n "$(timeout 5 squeue -h -o %i 2>/dev/null)" ]; then
    timeout 10 squeue -h -o %i | xargs scancel || true
    for _ in {1..150}; do # KillWait, and a little more
        [ -n "$(timeout 5 squeue -h -o %i 2>/dev/null)" ] || break
        sleep 0.1
    done
fi
for signal in TERM KILL; do
    alive | xargs -r kill -$signal 2>/dev/null || true
    for _ in {1..100}; do
        [ -n "$(alive)" ] || exit 0
        sleep 0.1
    done
done
echo "down.sh: still there: $(alive | xargs)" >&2
exit 1
