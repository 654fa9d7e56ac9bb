#!/bin/bash
# Train on two machines of a Slurm cluster:  sbatch deploy/slurm.sh [more arguments of train.py]
# Submitted from the clone, on a folder that all machines share, with .venv in it (scripts/venv.sh).
#SBATCH --job-name=dgcopt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by sbatch}"
export PATH="$PWD/.venv/bin:$PATH"

# --resume: a job that was put back in the queue goes on from its newest checkpoint
exec dgcopt run --launcher srun -np "$SLURM_NTASKS" --threads "${SLURM_CPUS_PER_TASK:-1}" train.py \
    --config configs/tasks/digits.yaml --config configs/compressors/dgc.yaml --output runs/digits --resume "$@"
