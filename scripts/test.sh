#!/usr/bin/env bash
# Install everything into .venv, Horovod and Open MPI included, and run the whole suite.
#
#   bash scripts/test.sh                  # everything
#   bash scripts/test.sh tests/unit -x    # arguments go to pytest; the static checks run all the same
#
# Needs Python >= 3.10 with venv and headers, and a C++ compiler; no root. The first run builds Horovod (3-4 minutes
# on 2 cores) and keeps the wheel in the user's cache. DGCOPT_TORCH chooses another torch, DGCOPT_PYTHON another Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/venv.sh
python -m pip install --quiet --editable ".[train,test,frameworks,docs]"
PYTHON=python bash scripts/install_horovod.sh

export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
lint-imports --no-cache
python scripts/check_rooms.py
# tests of one process run while others wait for real processes, in one process of pytest more than cores; those of a
# launch or file stay together; properties draw the same examples every time (others by `pytest --hypothesis-seed=N`)
processes=$(python -c 'import os; print(min(os.cpu_count() + 1, 5))')
exec python -m pytest --numprocesses "$processes" --hypothesis-seed=0 "$@"
