"""Simulated ranks of one process, each stepped by itself, as separate processes would be."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from library import SETTINGS
from torch import nn

import dgcopt
from dgcopt import Comm
from faults.training import digest

SIZES = (12, 30, 20, 5)
BUCKETS = {"bucket_mb": 0.0016, "first_bucket_mb": 0.0008}
PLAIN = functools.partial(torch.optim.SGD, lr=0.05)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)

AVERAGING: list[Callable[[], Any]] = [
    lambda: dgcopt.averaging.LocalSGD(2),
    lambda: dgcopt.averaging.SlowMo(2),
    lambda: dgcopt.averaging.DiLoCo(2),
    lambda: dgcopt.averaging.SPARTA(0.1),
    lambda: dgcopt.averaging.SGP(),
    lambda: dgcopt.averaging.Decentralized(),
]
"""Averages of weights, made anew for each rank."""

SUBJECTS = len(SETTINGS) + len(AVERAGING)


def subject_name(subject: int) -> str:
    if subject < len(SETTINGS):
        return repr(SETTINGS[subject][0])
    return type(AVERAGING[subject - len(SETTINGS)]()).__name__


class Actor:
    """One rank: a model, its optimizer, and the two calls of a training loop."""

    def __init__(self, comm: Comm, subject: int, **settings: Any) -> None:
        self.comm = comm
        torch.manual_seed(1)
        pairs = itertools.pairwise(SIZES)
        self.model = nn.Sequential(*(layer for n, m in pairs for layer in (nn.Linear(n, m), nn.Tanh())))
        self.averages = subject >= len(SETTINGS)
        if not self.averages:
            compressor, given = SETTINGS[subject]
            default = PLAIN if isinstance(compressor, dgcopt.Signum | dgcopt.DeMo) else MOMENTUM
            self.optimizer: Any = given.get("optimizer", default)(self.model.parameters())
            settings = {**BUCKETS, "compression": copy.deepcopy(compressor), **settings}
            dgcopt.DistributedOptimizer(self.optimizer, self.model.named_parameters(), comm=comm, **settings)
        else:
            self.optimizer = MOMENTUM(self.model.parameters())
            self.optimizer.register_step_post_hook(self._local_step_ended)
            AVERAGING[subject - len(SETTINGS)]().attach(self.optimizer, self.model.named_parameters(), comm)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        torch.manual_seed(1000 * step + self.comm.rank)
        inputs, targets = torch.randn(6, SIZES[0]), torch.randn(6, SIZES[-1])
        nn.functional.mse_loss(self.model(inputs), targets).backward()

    def step(self, step: int) -> None:
        torch.manual_seed(1000 * step + self.comm.rank + 500)
        self.optimizer.step()

    def _local_step_ended(self, *_: Any) -> None:
        """The weights before they are averaged."""
        self.stepped = self.weights()

    def weights(self) -> str:
        return digest(self.model.state_dict())

    def state(self) -> tuple[str, str, str]:
        """Hashes of the weights, of the optimizer's own state, and of what dgcopt adds to it."""
        state = self.optimizer.state_dict()
        ours = {key: state.pop(key) for key in ("dgcopt", "averaging") if key in state}
        if self.averages:  # it holds a copy of the weights for ranks that come later
            ours["averaging"]["dgcopt"]["memory"].pop("weights", None)
        return self.weights(), digest(state), digest(ours)


def calls_of(actors: list[Actor], step: int) -> list[tuple[Actor, Callable[[], None]]]:
    """The calls of one step in the order in which simulated ranks make them."""
    calls = [(actor, functools.partial(actor.backward, step)) for actor in actors]
    return calls + [(actor, functools.partial(actor.step, step)) for actor in actors]


def one_step(actors: list[Actor], step: int) -> None:
    for _, call in calls_of(actors, step):
        call()
