#!/usr/bin/env bash
# Everything that needs a CUDA device, one command, under ten minutes, nothing downloaded.
#
#   bash scripts/gpu.sh               # leaves tables and logs in runs/gpu
#   bash scripts/gpu.sh FOLDER
#
# Needs torch >= 2.11 for CUDA, triton, pytest with pytest-timeout, hypothesis and pyyaml; DGCOPT_PYTHON chooses another
# Python than python3. Exit code 1 if anything failed; FOLDER/summary.txt says what.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:-runs/gpu}
python=${DGCOPT_PYTHON:-python3}
mkdir -p "$folder"
: >"$folder/summary.txt"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
failed=0

# run NAME SECONDS COMMAND...: its output goes to FOLDER/NAME.log, what came of it to the summary
run() {
    local name=$1 limit=$2 start=$SECONDS code=0
    shift 2
    timeout "$limit" "$@" >"$folder/$name.log" 2>&1 || code=$?
    [ "$code" = 0 ] || failed=1
    printf '%-12s exit %-3s %4d s   %s\n' "$name" "$code" $((SECONDS - start)) \
        "$(tail -n 1 "$folder/$name.log" | cut -c 1-150)" | tee -a "$folder/summary.txt"
}

run build 60 "$python" setup.py -q build_ext --inplace
run environment 60 "$python" - <<'PYTHON'
import sys

import torch
import triton

from dgcopt import kernels

assert torch.cuda.is_available(), "torch finds no CUDA device"
found = torch.cuda.get_device_properties(0)
print(
    f"{found.name}, {found.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, triton {triton.__version__}, "
    f"Python {sys.version.split()[0]}, native kernels {kernels.instructions() or 'not built'}"
)
PYTHON
[ "$failed" = 0 ] || exit 1

run kernels 240 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/unit/kernels tests/unit/coding
run compressors 150 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/unit --ignore tests/unit/kernels --ignore tests/unit/coding
run ranks 120 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/distributed
run bench 120 "$python" scripts/bench_kernels.py --device cuda --rounds 10 --json "$folder/kernels.json"
run operations 120 "$python" scripts/bench_operations.py --device cuda --json "$folder/operations.json"

cat "$folder/summary.txt"
exit "$failed"
