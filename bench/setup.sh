# Finds or makes the Python that runs everything, and sets PYTHON. Sourced by */run_all.sh.
#
#   1. $PYTHON, where it is set: it must have torch and torchvision
#   2. the active python3, where it has them (a cluster's module, a container): used as it is;
#      of the tools (pandas, pytest, ...) only what it lacks is put into .tools/, beside it
#   3. .venv/, made by uv from requirements/*.lock
#
# A second call does nothing but look: 0.2 s.

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

make_venv() {
    local stamp base why
    stamp=$(cat requirements/*.lock | cksum)
    [ "$(cat .venv/.installed 2>/dev/null)" = "$stamp" ] && return
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # none yet, or a broken one
        for base in python3 python3.14 python3.13 python3.12 python3.11 ""; do
            [ -n "$base" ] || stop "no Python 3.11 or newer on PATH: install one, or set PYTHON"
            "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        done
        "$base" -m venv --clear .venv >&2 || stop "$base -m venv failed: on Debian, apt-get install python3-venv"
    fi
    say "setup: installing torch and the tools into .venv (once, some 5 GB)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv >&2 ||
        stop "pip could not install uv into .venv: is there a network?"
    # Compiled here, in 15 s: where Python may not write what it compiles (PYTHONDONTWRITEBYTECODE, a
    # folder to read only), every single start would take 4 CPU-seconds more.
    .venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python \
        -r requirements/torch.lock -r requirements/tools.lock >&2 ||
        stop "uv could not install requirements/*.lock into .venv: is there a network, and 6 GB of disk?"
    if nvidia-smi -L >/dev/null 2>&1 &&
        ! why=$(.venv/bin/python -c 'import torch; torch.ones(1, device="cuda") + 1' 2>&1); then
        stop "the torch of requirements/torch.lock does not run on this GPU, see docs/troubleshooting.md: ${why##*$'\n'}"
    fi
    printf '%s' "$stamp" >.venv/.installed
}

add_tools() { # of the locked tools, those that this Python lacks; never a version over its own
    local stamp missing
    stamp="$PYTHON $(cksum <requirements/tools.lock)"
    if [ "$(cat .tools/.installed 2>/dev/null)" != "$stamp" ]; then
        missing=$(mktemp)
        "$PYTHON" - requirements/tools.lock >"$missing" <<'PY'
import importlib.metadata as metadata, sys
names = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in metadata.distributions()}
for line in open(sys.argv[1]):
    if "==" in line and line.split("==")[0].lower() not in names:
        print(line, end="")
PY
        if [ -s "$missing" ]; then
            say "setup: $PYTHON is used as it is; adding $(wc -l <"$missing") tools beside it, in .tools"
            rm -rf .tools
            "$PYTHON" -m pip install --quiet --no-deps --target .tools -r "$missing" >&2 ||
                uv pip install --quiet --python "$PYTHON" --no-deps --target .tools -r "$missing" >&2 ||
                stop "could not install the tools of requirements/tools.lock for $PYTHON"
        fi
        rm -f "$missing"
        mkdir -p .tools
        printf '%s' "$stamp" >.tools/.installed
    fi
    export PYTHONPATH="$PWD/.tools${PYTHONPATH:+:$PYTHONPATH}"
}

if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || stop "PYTHON=$PYTHON: give one of 3.11 or newer that has torch 2.11 or newer and torchvision"
elif fits python3; then
    PYTHON=$(command -v python3)
else
    PYTHON=.venv/bin/python
fi
case "$PYTHON" in .venv/bin/python | "$PWD/.venv/bin/python") make_venv ;; *) add_tools ;; esac
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
export PYTHON
