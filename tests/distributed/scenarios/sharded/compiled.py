"""torch.compile around sharded parameters: equal to eager, and buckets leave during backward as without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD

from dgcopt import DGC, Comm

from .setup import TOLERANCE, Wide, assert_close, loss_of, mesh_of, sharded, started_by, whole, wrap


def equals_eager(comm: Comm) -> None:
    """Layers that are compiled before fully_shard, and the model that is compiled after it."""
    mesh, ends = mesh_of(comm, 2), dict[str, Any]()
    for way in ("eager", "layers", "model"):
        torch._dynamo.reset()
        model: Any = Wide()
        for layer in model if way == "layers" else ():
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        sharded(mesh["shard"], model)
        make = functools.partial(SGD, lr=0.05, momentum=0.9)
        optimizer = wrap(model, make(model.parameters()), mesh, DGC(0.3, overlap=True))
        called = torch.compile(model, backend="aot_eager") if way == "model" else model
        for step in range(4):
            optimizer.zero_grad()
            with started_by(optimizer) as started:
                loss_of(called, comm, step).backward()
                during = list(started)
                optimizer.step()
        assert during and during == started, f"{way}: {set(started) - set(during)} waited for the end of backward"
        ends[way] = whole(model)
        assert_close(ends[way], ends["eager"], TOLERANCE, way)


SCENARIOS: dict[str, Callable[[Comm], Any]] = {"sharded compiled: equals_eager": equals_eager}
"""Among four ranks."""
