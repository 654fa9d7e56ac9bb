"""Horovod's own elastic training, `TorchState` and all, with one line changed: `import dgcopt.hvd as hvd`.

    horovodrun -np 3 --min-np 2 --host-discovery-script ./discover.sh \\
        python elastic_torch_state.py /shared/run1 --steps 12 --kill-at 7 --kill-host 127.0.0.1

Each worker keeps what it has not sent yet, as of the last commit. What the lost one had not sent is lost with it: the
account is of those that are left. `elastic_horovod.py` loses nothing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from account import Account, kill_once, make, nothing
from horovod.torch import elastic

import dgcopt.hvd as hvd

COMMIT_EVERY = 3

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kill-at", type=int)
parser.add_argument("--kill-host")
args = parser.parse_args()

hvd.init()
model, optimizer = make()
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, worlds=[])


def before_gradient() -> None:
    if state.step == args.kill_at and os.environ["HOROVOD_HOSTNAME"] == args.kill_host:
        kill_once(args.directory / "killed")


account = Account(model, optimizer, before_gradient)


@elastic.run
def train(state) -> None:
    print(f"rank {hvd.rank()} of {hvd.size()} goes on from step {state.step}", flush=True)
    state.worlds = [*state.worlds, hvd.size()]
    applied, computed = nothing(model), account.held()
    print(f"rank {hvd.rank()} begins with {computed.norm():.6f} held back", flush=True)
    while state.step < args.steps:
        new, taken = account.step(state.step)
        computed, applied = computed + new, applied + taken
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()
    account.close(computed, applied)
    print(f"rank {hvd.rank()} has seen worlds of {state.worlds}", flush=True)


train(state)
