# Sourced by run.sh and test.sh in the repository's root: makes .venv with torch in it and sets PYTHON to its interpreter.
# DGCOPT_PYTHON chooses the base interpreter, DGCOPT_TORCH what pip installs for torch.
BASE=${DGCOPT_PYTHON:-python3}
command -v "$BASE" >/dev/null || { echo "there is no $BASE (Debian/Ubuntu: apt-get install python3 python3-venv)" >&2; exit 1; }
"$BASE" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "$BASE is $("$BASE" --version); Python 3.10 or newer is needed (DGCOPT_PYTHON=... chooses another)" >&2; exit 1; }
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$BASE" -m venv .venv ||
        { echo "cannot make a virtual environment (Debian/Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
fi
PYTHON="$PWD/.venv/bin/python"
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    echo "Installing ${DGCOPT_TORCH:-torch==2.13.0} into .venv"
    "$PYTHON" -m pip install --quiet "${DGCOPT_TORCH:-torch==2.13.0}"
fi
