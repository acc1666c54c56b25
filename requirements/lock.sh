#!/usr/bin/env bash
# Makes the locks from pyproject.toml, with uv: what is pinned stays as it is, unless you upgrade.
#
#   bash requirements/lock.sh                     after a change of pyproject.toml
#   bash requirements/lock.sh --upgrade           everything to its newest version
#   bash requirements/lock.sh --upgrade-package torch
#
# torch-cu126.lock is written by hand, for GPUs that CUDA 13 has left behind.
set -eu
cd "$(dirname "$0")/.."
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

compile() { # compile NAME [what uv compiles]: the lock behind its comment, which stays
    local name=$1 lock=requirements/$1.lock
    shift
    grep -v '^#' "$lock" >"$new/$name" # the versions that uv keeps
    uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
        --output-file "$new/$name" "$@"
}

finish() { # puts the lock in its place at once
    { grep '^#' "requirements/$1.lock" || true; cat "$new/$1"; } >"$new/whole"
    mv "$new/whole" "requirements/$1.lock"
}

compile torch "$@" pyproject.toml
finish torch
compile tools "$@" --group tools -c requirements/torch.lock
finish tools
compile techniques "$@" --group techniques -c requirements/torch.lock -c requirements/tools.lock
# What the other two have already must come from them: torch may be the one for CUDA 12.
cat requirements/torch.lock requirements/tools.lock | cut -d= -f1 | sort -u >"$new/there"
while read -r line; do
    grep -qxF "${line%%==*}" "$new/there" || echo "$line"
done <"$new/techniques" >"$new/rest"
mv "$new/rest" "$new/techniques"
finish techniques
compile site "$@" --group site -c requirements/torch.lock -c requirements/tools.lock \
    -c requirements/techniques.lock
finish site
