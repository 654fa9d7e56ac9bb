"""Parameters that are frozen, added or unused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import mse_loss

from dgcopt import DGC, Comm
from tests.support.wires import share

from ..training import assert_close, batch, make_model, memory_of
from .pair import ADAM, COMPRESSIONS, SGD, Loop, Pair, wrap


def parameters_come_and_go(comm: Comm) -> Loop:
    """Frozen, unfrozen, added, unused on every rank (with momentum and weight decay), and used by some ranks only.

    Also frozen when their gradient is there already, which the step uses as any other.
    """
    for name, make in share(comm, itertools.product(("dense", "DGC at ratio 1"), (SGD, ADAM))):
        models = [make_model(), make_model()]
        optimizers: list[Any] = [make(list(model.parameters())[:4]) for model in models]
        wrap(optimizers[1], models[1], comm, COMPRESSIONS[name])
        for step in range(12):
            for which in (0, 1):
                model, optimizer = models[which], optimizers[which]
                model.zero_grad()
                model[0].requires_grad_(step not in (2, 3))
                model[2].requires_grad_()
                if step == 5:
                    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.05})
                x, y = batch(step, 0, comm if which else None)
                if step == 11:
                    with optimizer.no_sync() if which else nullcontext():
                        (model[2].weight.square().sum() + model[2](model[0](x)).mean()).backward()
                    model[2].requires_grad_(False)
                if step in (7, 8):  # the first layer is used by nobody
                    x = torch.cat([x, x, x], dim=1)[:, :17]
                    mse_loss(model[2:](x), y).backward()
                elif step == 9:  # the bias of the last layer by rank 0 only
                    bias = model[4].bias if which == 0 or comm.rank == 0 else model[4].bias.detach()
                    hidden = model[:4](x) @ model[4].weight.T
                    if which == 0:
                        mask = torch.zeros(len(x), 1, dtype=x.dtype)
                        mask[:: comm.size] = 1
                        bias = bias * mask + bias.detach() * (1 - mask)
                    mse_loss(hidden + bias, y).backward()
                else:
                    mse_loss(model(x), y).backward()
                if step == 10:
                    model[2].requires_grad_(False)
            yield
            for optimizer in optimizers:
                optimizer.step()
            yield
            for ours, whole in zip(models[1].parameters(), models[0].parameters(), strict=True):
                unused = whole.grad is None and step >= 5
                assert not unused or ours.grad is None, "a parameter that nobody used has got a gradient"
        assert_close(list(models[1].parameters()), list(models[0].parameters()), 1e-9, f"come and go, {name}")


def what_nobody_used_is_left_alone(comm: Comm) -> Loop:
    """Also what is remembered of it: residual and momentum."""
    pair = Pair(comm, SGD, DGC(0.1, overlap=True))
    for step in range(4):
        if step == 3:
            before = memory_of(pair.ours)
        pair.ours.zero_grad()
        x, y = batch(step, 0, comm)
        output = pair.models[1](x) if step < 3 else pair.models[1][2:](torch.cat([x, x, x], dim=1)[:, :17])
        mse_loss(output, y).backward()
        yield
        weights = [param.detach().clone() for param in pair.models[1][0].parameters()]
        pair.ours.step()
        yield
    after = memory_of(pair.ours)
    for kind, by_name in after.items():
        for name, tensor in by_name.items():
            assert torch.equal(tensor, before[kind][name]) == name.startswith("0."), f"{kind} of {name}"
    for old, param in zip(weights, pair.models[1][0].parameters(), strict=True):
        assert torch.equal(old, param)
