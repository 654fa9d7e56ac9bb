"""Training that torchrun starts anew when a worker is killed in the middle of a step; it goes on from a checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 3 --max-restarts 2 elastic_torchrun.py /shared/run1 --steps 12 --kill-at 7
    torchrun --nproc-per-node 2 elastic_torchrun.py /shared/run1 --steps 18

The last line goes on where the one before has ended, with fewer workers. Without the variable, torch hands workers that
it has restarted the addresses of those that are gone (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from account import Account, kill_once, make, nothing

import dgcopt

COMMIT_EVERY = 3

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kill-at", type=int)
parser.add_argument("--reduce", default="gather", help="how sums are made, see dgcopt.DGC")
args = parser.parse_args()

comm = dgcopt.init()
model, optimizer = make(args.reduce)
step, computed, applied = 0, nothing(model), nothing(model)
found = dgcopt.checkpoint.load(args.directory)
if found is None:
    dgcopt.broadcast_parameters(model.state_dict())
else:
    step, state = found
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    computed, applied = state["computed"], state["applied"]
print(f"rank {comm.rank} of {comm.size} goes on from step {step}", flush=True)


def before_gradient() -> None:
    if step == args.kill_at and comm.rank == 1:
        kill_once(args.directory / "killed")


account = Account(model, optimizer, before_gradient)
while step < args.steps:
    computed_now, applied_now = account.step(step)
    computed, applied = computed + computed_now, applied + applied_now
    step += 1
    if step % COMMIT_EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dgcopt.checkpoint.save(args.directory, state | {"computed": computed, "applied": applied}, step)
account.close(computed, applied)
dgcopt.shutdown()
