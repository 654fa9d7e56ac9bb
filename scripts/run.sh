#!/usr/bin/env bash
# Install what is missing into .venv, train digits with two workers on this machine, dense and with Deep Gradient
# Compression at 0.1 %, and compare the two. Needs Python 3.10 or later and a network for the first run; no root.
#
#   bash scripts/run.sh
#
# DGCOPT_PYTHON chooses the interpreter (default: python3), DGCOPT_TORCH what to install where torch is missing
# (default: torch==2.13.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "run.sh: $*" >&2
    exit 1
}

source scripts/venv.sh
if ! python -c 'import importlib.metadata as m; m.version("dgcopt")
import jsonargparse, matplotlib, numpy, sklearn, tensorboard, tqdm' 2>/dev/null; then
    echo "installing dgcopt"
    python -m pip install --quiet --disable-pip-version-check --editable ".[train]"
fi

# One thread per worker, so that two fit on two cores; on the CPU, where two workers need no two GPUs.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=""
mkdir -p runs
train() { # name, compressor
    rm -rf "runs/$1"
    echo "training runs/$1"
    torchrun --standalone --nproc-per-node 2 train.py --config configs/tasks/digits.yaml \
        --config "configs/compressors/$2.yaml" --output "runs/$1" >"runs/$1.log" 2>&1 ||
        fail "training failed; the end of runs/$1.log is:"$'\n'"$(tail -n 20 "runs/$1.log")"
}
train digits_dense none
train digits_dgc dgc

echo
python scripts/compare.py runs/digits_dense runs/digits_dgc --plot runs/digits.png
echo
echo "loss curves:  runs/digits.png"
echo "TensorBoard:  .venv/bin/tensorboard --logdir runs"
