"""Training that goes on when workers are lost, even in the middle of a step, or come, under Horovod Elastic.

    horovodrun -np 3 --min-np 2 --host-discovery-script ./discover.sh \\
        python elastic_horovod.py /shared/run1 --steps 12 --kill-at 7 --kill-host 127.0.0.1

The worker on that host kills itself, once. Horovod never again uses a host that has lost a worker, so on a single
machine `discover.sh` names it twice: "localhost:2" and "127.0.0.1:1".
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import horovod.torch as hvd
from account import Account, kill_once, make, nothing

import dgcopt.elastic

COMMIT_EVERY = 3

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--seconds", type=float, default=0.0, help="how long a step takes at least")
parser.add_argument("--kill-at", type=int)
parser.add_argument("--reduce", default="gather", help="how sums are made, see dgcopt.DGC")
parser.add_argument("--kill-host")
args = parser.parse_args()

dgcopt.init("horovod", deadline=15)  # a survivor may wait that long for another that has given up already
model, optimizer = make(args.reduce)
state = dgcopt.elastic.State(
    args.directory, model=model, optimizer=optimizer, step=0, computed=nothing(model), applied=nothing(model), worlds=[]
)


def before_gradient() -> None:
    if state.step == args.kill_at and os.environ["HOROVOD_HOSTNAME"] == args.kill_host:
        kill_once(args.directory / "killed")


account = Account(model, optimizer, before_gradient)


@hvd.elastic.run
def train(state) -> None:
    print(f"rank {hvd.rank()} of {hvd.size()} goes on from step {state.step}", flush=True)
    state.worlds = [*state.worlds, hvd.size()]
    while state.step < args.steps:
        time.sleep(args.seconds)
        computed, applied = account.step(state.step)
        state.computed, state.applied = state.computed + computed, state.applied + applied
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()
    account.close(state.computed, state.applied)
    print(f"rank {hvd.rank()} has seen worlds of {state.worlds}", flush=True)


train(state)
