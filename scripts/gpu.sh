#!/usr/bin/env bash
# What needs a CUDA device, in three parts of under ten minutes each, 25 minutes in all; nothing is downloaded.
#
#   bash scripts/gpu.sh tests                 # kernels, compressors, ranks, what is waited for, compute-sanitizer
#   bash scripts/gpu.sh bench                 # kernels in GB/s, the whole step, real models, a picture of the overlap
#   bash scripts/gpu.sh replicas              # loss over bytes of a GPT on many replicas
#   bash scripts/gpu.sh -o FOLDER kernels models        # single steps, by their names
#
# FOLDER (DGCOPT_GPU_FOLDER, or runs/gpu) gets gpu.md, with the tables to be pasted into docs/benchmarks.md, and log.txt,
# with all output as it comes; the terminal shows it too. A step that takes too long ends with all that it has started.
#
# Needs torch >= 2.11 for CUDA, triton, pytest with pytest-timeout, hypothesis and pyyaml; DGCOPT_PYTHON chooses another
# Python than python3. DEVICE=cpu tries the benchmarks where there is no device, at small sizes. Exit code 1 if anything
# failed; gpu.md says what.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${DGCOPT_GPU_FOLDER:-runs/gpu}
[ "${1:-}" = -o ] && folder=$2 && shift 2
parts=" $* "
case "$parts" in
*" tests "*) parts+=" kernels compressors ranks memcheck racecheck " ;;&
*" bench "*) parts+=" operations operations-350M step models " ;;&
esac
device=${DEVICE:-cuda}
python=${DGCOPT_PYTHON:-python3}
mkdir -p "$folder"
: >"$folder/log.txt"
echo "## $(date -u +%F): $*" >>"$folder/gpu.md"
trap 'end $$.' EXIT
trap 'exit 130' INT TERM
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
failed=0

# end TOKEN: kill whatever has this in its environment, such as ranks, which launchers start in sessions of their own
end() {
    local environment
    for environment in /proc/[0-9]*/environ; do
        if grep -qsa "DGCOPT_GPU_STEP=$1" "$environment"; then kill -KILL "$(basename "${environment%/*}")" 2>/dev/null; fi
    done
}

# run NAME SECONDS COMMAND...: what came of it goes to gpu.md, and the table that a benchmark prints
run() {
    local name=$1 limit=$2 start=$SECONDS code=0 token=$$.$RANDOM.$SECONDS output
    shift 2
    output=$(mktemp)
    printf '== %s\n' "$name" | tee -a "$folder/log.txt"
    # to a file, which nobody has to close: what a step leaves behind would keep a pipe open, and hold up all others
    DGCOPT_GPU_STEP=$token timeout --kill-after=5 "$limit" "$@" >"$output" 2>&1 <&0 &
    local step=$!
    tail -n +1 -s 0.2 -f --pid=$step "$output" | tee -a "$folder/log.txt"
    wait $step || code=$?
    end "$token"
    [ "$code" = 0 ] || failed=1
    {
        printf '\n### %s: exit %s, %d s\n\n' "$name" "$code" $((SECONDS - start))
        if [ "$1" = "$python" ] && [[ ${2:-} == scripts/* ]]; then cat "$output"; else tail -n 1 "$output"; fi
    } >>"$folder/gpu.md"
    printf '== %s: exit %s, %d s\n' "$name" "$code" $((SECONDS - start))
    rm -f "$output"
}

# step NAME SECONDS COMMAND...: `run`, if it was asked for
step() {
    case "$parts" in *" $1 "*) run "$@" ;; esac
}

run build 60 "$python" setup.py -q build_ext --inplace
run environment 60 "$python" - "$device" <<'PYTHON'
import sys

import torch
import triton

from dgcopt import kernels

name = "no device"
if sys.argv[1] == "cuda":
    assert torch.cuda.is_available(), "torch finds no CUDA device"
    found = torch.cuda.get_device_properties(0)
    name = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
print(
    f"{name}, torch {torch.__version__}, triton {triton.__version__}, "
    f"Python {sys.version.split()[0]}, native kernels {kernels.instructions() or 'not built'}"
)
PYTHON
[ "$failed" = 0 ] || exit 1

if [ "$device" = cuda ]; then
    n=25600000 large=350000000 models="resnet50 gpt" rounds=10 replicas=""
else
    n=65536 large=131072 models=tiny rounds=1 replicas="--shape 2 2 64 --context 32 --replicas 2 --steps 50"
fi
# without what compiles every kernel for CUDA once more, into a cache of its own, for machines that have no device
tests=("$python" -m pytest -q -p no:cacheprovider -m gpu -k "not compiles_for_cuda" --durations=5)
"$python" -c "import xdist" 2>/dev/null && many=(-n 8) || many=()  # most of their time goes into compiling
unit=(--ignore tests/unit/kernels --ignore tests/unit/coding tests/unit)
streaming="accumulate look select block_maxima add_and_maxima copy_scaled pack_signs round_levels select_above peaks"
every=("$python" scripts/bench_operations.py --device "$device" --numel 65536 --rounds 1)

step kernels 220 "${tests[@]}" "${many[@]}" tests/unit/kernels tests/unit/coding
step compressors 120 "${tests[@]}" "${many[@]}" "${unit[@]}"
step ranks 100 "${tests[@]}" tests/distributed
if command -v compute-sanitizer >/dev/null; then
    case "$parts" in *" memcheck "* | *" racecheck "*) run warm-up 120 "${every[@]}" ;; esac  # Triton's cache
    # every tensor has memory of its own then, so that what lies beyond it is nobody else's
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    step memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "${every[@]}"
    step racecheck 40 compute-sanitizer --tool racecheck --error-exitcode 9 "${every[@]}" select accumulate round_trits
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
fi
# shellcheck disable=SC2086
step models 200 "$python" scripts/bench_models.py --device "$device" --models $models --rounds $rounds \
    --json "$folder/models.json" --trace "$(mktemp)" --plot "$folder/overlap.png"
step step 80 "$python" scripts/bench_kernels.py --device "$device" --rounds $rounds --json "$folder/step.json"
step operations 90 "$python" scripts/bench_operations.py --device "$device" --numel "$n" --rounds $rounds \
    --json "$folder/operations.json"
# shellcheck disable=SC2086 # a list of names
step operations-350M 70 "$python" scripts/bench_operations.py --device "$device" --numel "$large" --rounds $rounds \
    --json "$folder/operations-350M.json" $streaming
# shellcheck disable=SC2086
step replicas 440 "$python" scripts/bench_replicas.py --device "$device" --seconds 380 --folder "$(mktemp -d)" \
    --plot "$folder/replicas.png" $replicas

exit "$failed"
