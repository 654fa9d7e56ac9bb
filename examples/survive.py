"""Training that goes on when a rank is killed; the rank is started anew and joins the others again.

dgcopt run --survive -np 2 survive.py --steps 20 --kill-at 8
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn

import dgcopt
from dgcopt.collectives import AllReduce

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True, help="steps to make, and no fewer than 5 after the last kill")
parser.add_argument("--kill-at", type=int, help="rank 1 is killed before it makes this step")
args = parser.parse_args()

comm = dgcopt.init(survive=True, deadline=60)
model = nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 10))
bare = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = dgcopt.DistributedOptimizer(bare, model.named_parameters(), dgcopt.DGC(0.1))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

state = dgcopt.survive.State(model=model, optimizer=optimizer, scheduler=scheduler, step=0, together=0)
state.sync()

name = os.environ.get("DGCOPT_MEMBER", "the only rank")
print(f"{name} begins at step {state.step}\n", end="", flush=True)  # in one piece, as ranks share the terminal
while state.step < args.steps or (args.kill_at is not None and state.together < 5):
    if state.step == args.kill_at and name == "0.1.0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 40)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    state.step += 1
    state.together += args.kill_at is not None and state.step > args.kill_at + 1 and comm.size == 2

mean = dgcopt.survive.complete(lambda: comm.run(AllReduce(loss.detach().reshape(1), op="average")))
weights = sum(float(param.detach().double().sum()) for param in model.parameters())
print(f"{name} ends with the mean loss {float(mean):.4f} and weights of sum {weights!r}\n", end="", flush=True)
