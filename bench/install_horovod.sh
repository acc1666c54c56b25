#!/bin/bash
# Builds Horovod against the installed torch, keeps the wheel, installs it.
#
#   bash bench/install_horovod.sh                  into .venv
#   PYTHON=/path/to/python bash bench/install_horovod.sh
#
# Horovod's last release asks for C++14 and torch's headers need C++20: a compiler wrapper rewrites
# that one flag, no source is edited. The build happens in an environment of its own, thrown away
# afterwards. The wheel is kept in ${HOROVOD_WHEELS:-~/.cache/horovod-wheels}/KEY, where KEY names
# torch, Python, CUDA and the machine: the build takes minutes, the next install seconds.
#
# Exit code 2, and one line why, where it cannot be built.
set -euo pipefail

VERSION=0.28.1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$here/.venv/bin/python}

give_up() {
    echo "install_horovod.sh: $*" >&2
    exit 2
}

# Of which build? torch's version, Python's, and whether a GPU and a whole CUDA toolkit are there.
# And is it installed already?
look() {
    "$PYTHON" -c '
import os, platform, sys, sysconfig
import torch
from torch.utils.cpp_extension import CUDA_HOME
nccl = [f"{path}/nvidia/nccl" for path in sys.path if os.path.exists(f"{path}/nvidia/nccl/include")]
header = f"{CUDA_HOME}/include/cuda_runtime.h"
gpus = torch.cuda.device_count()
mode = "nccl" if gpus and CUDA_HOME and os.path.exists(header) and nccl else "gloo"
chips = sorted({"%d%d" % torch.cuda.get_device_capability(i) for i in range(gpus)})
try:
    import contextlib, horovod
    with contextlib.redirect_stdout(None):  # without its library it is importable, and says so
        import horovod.torch as hvd
    works = horovod.__version__ == sys.argv[1] and getattr(hvd, f"{mode}_built")()
except (ImportError, OSError, AttributeError):
    works = False
print(torch.__version__, f"cp{sys.version_info[0]}{sys.version_info[1]}", torch.version.cuda or "cpu")
print(platform.machine(), mode, ",".join(chips) or "none", "works" if works else "missing")
print(sysconfig.get_path("scripts"), CUDA_HOME or "none", *(nccl or ["none"])[:1])
' $VERSION 2>/dev/null
}
facts=$(look) || give_up "$PYTHON has no torch: set PYTHON to a Python that has it"
{ read -r torch tag cuda; read -r machine mode chips state; read -r scripts cuda_home nccl; } <<<"$facts"
key=horovod-$VERSION-torch-$torch-$tag-cuda-$cuda-$machine-$mode
[ "$mode" = gloo ] || key=$key-${chips//,/-}
if [ "$mode" = gloo ] && [ "$chips" != none ]; then
    echo "install_horovod.sh: no whole CUDA toolkit and NCCL here: for the CPU only" >&2
fi
uv=$(PATH=$(dirname "$PYTHON"):$here/.tools/bin:$PATH command -v uv || true)

install() { # the wheel, over a Horovod of the same version that was built for another torch
    local packages=("$1" numpy) # numpy: an undeclared need of broadcast_object
    if [ -n "$uv" ]; then
        "$uv" pip install --python "$PYTHON" --reinstall-package horovod "${packages[@]}"
    else
        "$PYTHON" -m pip uninstall --yes horovod
        "$PYTHON" -m pip install "${packages[@]}"
    fi
}

build() { # the wheel, into the folder $work/wheel
    "$PYTHON" -m venv "$work/env" || # fails where Debian's python3-venv is missing
        "$uv" venv --clear --seed --python "$PYTHON" "$work/env"
    local site env=()
    site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$work/env/bin/python" -m pip install setuptools wheel packaging
    command -v cmake || "$work/env/bin/python" -m pip install cmake # after this, the one on PATH
    # torch, from where it is: the last on the path, so that the tools above win
    "$PYTHON" -c 'import os, sys
for path in filter(os.path.isdir, sys.path[1:]):
    print(f"import site; site.addsitedir({path!r})")' >"$site/zz_torch.pth"
    # Only this flag: to rewrite every -std= would break what nvcc hands to the host compiler.
    printf '#!/bin/bash\nexec %q "${@/#-std=c++14/-std=c++20}" -O1 -g0\n' "$compiler" >"$work/cxx"
    chmod +x "$work/cxx"
    if [ "$mode" = nccl ]; then # the steps are measured; no multi-GPU machine has run the result
        mkdir -p "$work/nccl/lib"
        ln -s "$nccl/include" "$work/nccl/include"
        ln -s "$nccl"/lib/libnccl.so.2 "$work/nccl/lib/libnccl.so"
        env+=(CUDA_HOME="$cuda_home" HOROVOD_CUDA_HOME="$cuda_home" CUDAToolkit_ROOT="$cuda_home"
            HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME="$work/nccl" HOROVOD_NCCL_LINK=SHARED
            HOROVOD_BUILD_CUDA_CC_LIST="$chips")
    else # part of a CUDA toolkit breaks the build: neither torch nor cmake may see any
        mkdir "$work/none"
        env+=(CUDACXX="$work/none/nvcc" CUDAToolkit_ROOT="$work/none")
        cat >"$site/sitecustomize.py" <<'PYTHON'
import os
import shutil

exists, which = os.path.exists, shutil.which
os.path.exists = lambda path: path != "/usr/local/cuda" and exists(path)
shutil.which = lambda name, *rest, **named: None if name == "nvcc" else which(name, *rest, **named)
for name in ("CUDA_HOME", "CUDA_PATH"):
    os.environ.pop(name, None)
PYTHON
    fi
    local jobs memory
    memory=$(awk '/MemAvailable/ {print int($2 / 2097152)}' /proc/meminfo) # 2 GiB a compiler
    jobs=$(nproc)
    [ "$jobs" -le "$memory" ] || jobs=$((memory > 1 ? memory : 1))
    env PATH="$work/env/bin:$PATH" CXX="$work/cxx" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        MAKEFLAGS="-j$jobs" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
        HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 "${env[@]}" \
        "$work/env/bin/python" -m pip wheel --no-cache-dir --no-build-isolation --no-deps \
        --no-binary horovod --wheel-dir "$work/wheel" "horovod==$VERSION"
}

cache=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod-wheels}/$key
mkdir -p "$cache" 2>/dev/null || give_up "cannot write to $cache: set HOROVOD_WHEELS to a folder"
exec 9>"$cache/lock"
flock 9 # a second run waits for the first, then finds its wheel
if [ $state = missing ]; then
    wheel=$(ls "$cache"/horovod-*.whl 2>/dev/null || true)
    if [ -z "$wheel" ]; then
        compiler=$(command -v "${CXX:-g++}") || give_up "no ${CXX:-g++}: install a C++20 compiler"
        # Not in the cache: Horovod takes the folder's name for a regular expression, and a + in it
        # (torch-2.15.0+cu132) puts the library where nothing finds it.
        work=$(mktemp -d /tmp/horovod.XXXXXX)
        trap 'rm -rf "$work"' EXIT
        echo "building Horovod $VERSION for torch $torch ($mode): minutes, see $cache/build.log"
        set +e # bash switches -e off in what an || follows: so a subshell with an -e of its own
        (
            set -e
            build
        ) >"$cache/build.log" 2>&1 9>&-
        code=$?
        set -e
        [ $code = 0 ] || give_up "Horovod $VERSION does not build for torch $torch: $cache/build.log"
        cp "$work"/wheel/horovod-*.whl "$cache/part"
        wheel=$cache/$(basename "$work"/wheel/horovod-*.whl)
        mv "$cache/part" "$wheel" # the whole file or none
    fi
    install "$wheel" >"$cache/install.log" 2>&1 ||
        give_up "could not install $wheel into $PYTHON: $cache/install.log"
    [[ $(look) = *works* ]] || give_up "$wheel does not work: remove $cache, and run this again"
fi
PATH=$scripts:$PATH horovodrun --check-build
