"""Local training that goes on when workers are lost between two exchanges, or come, under Horovod Elastic.

As elastic_horovod.py, with dgcopt.LocalSGD or DiLoCo: commits fall between exchanges, where each rank has weights of
its own, and whoever goes on does so from the mean of all of them. So the mean of the weights is, at the end, what it
was at the beginning plus the mean of all ranks' local updates, whichever ranks there were; the script asserts it.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from account import kill_once, nothing
from torch import Tensor, nn

import dgcopt.elastic
from dgcopt.collectives import AllReduce

EVERY, COMMIT_EVERY = 4, 3

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--seconds", type=float, default=0.0, help="how long a step takes at least")
parser.add_argument("--diloco", action="store_true", help="with an outer SGD that is as good as the mean")
parser.add_argument("--kill-at", type=int)
parser.add_argument("--kill-host")
args = parser.parse_args()

dgcopt.init("horovod", deadline=15)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 4)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if args.diloco:
    outer = functools.partial(torch.optim.SGD, lr=1.0)
    dgcopt.DiLoCo(optimizer, every=EVERY, outer=outer, warmup_steps=EVERY)
else:
    dgcopt.LocalSGD(optimizer, every=EVERY)


def weights() -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def mean(tensor: Tensor) -> Tensor:
    return optimizer.averaging.comm.run(AllReduce(tensor.clone()))


start = weights()
state = dgcopt.elastic.State(args.directory, model=model, optimizer=optimizer, step=0, moved=nothing(model))


@hvd.elastic.run
def train(state) -> None:
    print(f"rank {hvd.rank()} of {hvd.size()} goes on from step {state.step}", flush=True)
    while state.step < args.steps:
        time.sleep(args.seconds)
        inputs = torch.randn(
            8, 20, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()), dtype=torch.float64
        )
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if state.step == args.kill_at and os.environ["HOROVOD_HOSTNAME"] == args.kill_host:
            kill_once(args.directory / "killed")
        update = torch.cat([-0.1 * param.grad.flatten() for param in model.parameters()])
        optimizer.step()
        state.moved = state.moved + mean(update)
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()
    apart = (weights() - mean(weights())).norm()
    off = float((mean(weights()) - start - state.moved).abs().max())
    print(f"weights on {hvd.size()} ranks: {apart:.2e} apart, their mean off by at most {off:.2e}", flush=True)
    assert apart > 1e-4, "each rank has weights of its own between exchanges"
    assert off < 1e-12, off


train(state)
