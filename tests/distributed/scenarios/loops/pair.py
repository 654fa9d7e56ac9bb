"""The same training twice: on the whole batch in one process, and on this rank's rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import DGC, Comm

from ..training import TINY, assert_close, batch, make_model

Loop = Generator[None, None, None]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01)
COMPRESSIONS: dict[str, Any] = {
    "dense": None,
    "DGC at ratio 1": DGC(1.0, overlap=True),
    "DGC": DGC(0.1, overlap=True, values="fp64"),
}


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, comm: Comm, compression: Any = None, **more: Any) -> Any:
    return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compression, comm=comm, **{**TINY, **more})


class Pair:
    """The same training twice: on the whole batch with the bare optimizer, and on this rank's rows with ours."""

    def __init__(self, comm: Comm, make: Callable[..., Any] = SGD, compression: Any = None, **more: Any) -> None:
        self.comm = comm
        self.models = (make_model(), make_model())
        self.bare = make(self.models[0].parameters())
        self.ours = wrap(make(self.models[1].parameters()), self.models[1], comm, compression, **more)
        self.optimizers = (self.bare, self.ours)

    def loss(self, which: int, step: int, micro: int = 0) -> Tensor:
        x, y = batch(step, micro, self.comm if which else None)
        return mse_loss(self.models[which](x), y)

    def both(self) -> Iterator[tuple[int, nn.Module, Any]]:
        return iter([(which, self.models[which], self.optimizers[which]) for which in (0, 1)])

    def train(self, steps: int) -> Loop:
        for step in range(steps):
            for which, _, optimizer in self.both():
                optimizer.zero_grad()
                self.loss(which, step).backward()
            yield
            for optimizer in self.optimizers:
                optimizer.step()
            yield

    def assert_equal(self, what: str) -> None:
        assert_close(list(self.models[1].parameters()), list(self.models[0].parameters()), 1e-9, what)
