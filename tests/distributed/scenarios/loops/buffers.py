"""Batch norm's statistics, shared by dgcopt.sync_buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import Comm

from ..training import assert_close, batch
from .pair import SGD, Loop, wrap
from .uneven_data import batches_of


def normalised(seed: int) -> nn.Module:
    """With batch norm's two kinds of statistics, a running mean and a plain one, and an integer that tells them."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


def buffers_are_shared(comm: Comm) -> Loop:
    """Batch norm's statistics as in one process that knows every rank's: those of one rank with data, or their mean."""
    most = batches_of(comm.size - 1)
    for how, every, uneven in (("broadcast", 2, False), ("broadcast", 1, True), ("mean", 1, True)):
        counts = [batches_of(rank) if uneven else most for rank in range(comm.size)]
        replicas = [normalised(3) for _ in range(comm.size)]
        steps = [SGD(replica.parameters()) for replica in replicas]
        mine = normalised(3)
        ours = wrap(SGD(mine.parameters()), mine, comm)
        dgcopt.sync_buffers(mine, ours, every, how)

        def told(step: int, counts: list[int] = counts, replicas: list[nn.Module] = replicas) -> Iterator[int]:
            return (rank for rank in range(comm.size) if step < counts[rank])

        afterwards = []
        for step in range(most):
            active = list(told(step))
            for rank in active:
                x, y = batch(step, 0, None)
                replicas[rank].zero_grad()
                mse_loss(replicas[rank](x[rank :: comm.size]), y[rank :: comm.size]).backward()
            for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = sum(params[rank].grad for rank in active) / len(active)
                for param in params:
                    param.grad = mean.clone()
            for optimizer in steps:
                optimizer.step()
            if (step + 1) % every == 0:
                for buffers in zip(*(replica.buffers() for replica in replicas), strict=True):
                    given = [buffers[rank] for rank in active]
                    floats = how == "mean" and given[0].is_floating_point()
                    value = sum(given) / len(given) if floats else given[0].clone()
                    for buffer in buffers:
                        buffer.copy_(value)
            afterwards.append([buffer.clone() for buffer in replicas[comm.rank].buffers()])

        with dgcopt.join(ours):
            for step in range(counts[comm.rank]):
                ours.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(mine(x), y).backward()
                yield
                ours.step()
                yield
                what = f"buffers, {how}, every {every}, uneven={uneven}, step {step}"
                assert_close(list(mine.buffers()), afterwards[step], 1e-9, what)
        for _ in range(2 * (most - counts[comm.rank]) + 1):
            yield
        assert_close(list(mine.buffers()), afterwards[-1], 1e-9, f"buffers in the end, {how}, every {every}")
        if not comm.takes_turns:
            found = {name: buffer for name, buffer in mine.named_buffers() if every == 1 or most % every == 0}
            dgcopt.check_replicas(found, comm=comm)
        assert_close(list(mine.parameters()), list(replicas[0].parameters()), 1e-9, "with shared buffers")
