# Sourced by run.sh and test.sh in the repository's root: makes .venv with torch in it and puts it first on PATH.
# DGCOPT_PYTHON chooses the base interpreter, DGCOPT_TORCH what pip installs for torch.
base=${DGCOPT_PYTHON:-python3}
command -v "$base" >/dev/null || { echo "there is no $base: apt-get install python3 python3-venv" >&2; exit 1; }
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "$("$base" --version) is too old: install Python 3.10 or later, set DGCOPT_PYTHON to it" >&2; exit 1; }
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$base" -c 'import ensurepip, venv' 2>/dev/null || {
        echo "$base cannot make virtual environments: apt-get install python3-venv, or without root" \
            "pip install --user virtualenv && $base -m virtualenv .venv; then run this again" >&2
        exit 1
    }
    echo "making .venv"
    "$base" -m venv .venv
fi
export PATH="$PWD/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
# torch first: whatever depends on it must not bring another version along
if ! python -c 'import torch' 2>/dev/null; then
    echo "installing ${DGCOPT_TORCH:-torch==2.13.0}"
    python -m pip install --quiet "${DGCOPT_TORCH:-torch==2.13.0}"
fi
