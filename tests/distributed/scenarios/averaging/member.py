"""One rank's training with averaged weights, and every algorithm with an optimizer to wrap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt import Comm, LocalSGD
from dgcopt.averaging import (
    SGP,
    SPARTA,
    Averaging,
    Decentralized,
    DiLoCo,
    Graph,
    LowPrecisionDecentralized,
    Ring,
    SlowMo,
    SparseLoCo,
)
from dgcopt.collectives import AllGather, AllReduce

from ..training import batch, make_model

Make = Callable[[Iterable[Tensor]], Optimizer]
PLAIN: Make = functools.partial(SGD, lr=0.1)
MOMENTUM: Make = functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM: Make = functools.partial(Adam, lr=0.01)


@dataclass(frozen=True)
class Star(Graph):
    """Everyone sends half of its weights to rank 0, who sends them on."""

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        return {0: 0.5} if rank else dict.fromkeys(range(1, size), 0.5 / (size - 1))


STEPS = 7
AVERAGED: dict[str, tuple[Averaging, Make]] = {
    "LocalSGD": (LocalSGD(3), MOMENTUM),
    "LocalSGD, every step": (LocalSGD(1), PLAIN),
    "LocalSGD, overlap": (LocalSGD(2, overlap=True), ADAM),
    "LocalSGD, hierarchical": (LocalSGD(4, node_every=2), MOMENTUM),
    "LocalSGD, warm-up": (LocalSGD(3, warmup_steps=2), ADAM),
    "SlowMo": (SlowMo(4, base=LocalSGD(2)), MOMENTUM),
    "SlowMo, whole": (SlowMo(2, sharded=False, faithful=False), ADAM),
    "SlowMo, of each rank": (SlowMo(3, base=SGP(), sharded=False, exact=False), PLAIN),
    "SlowMo, faithful": (SlowMo(3, faithful=True, warmup_steps=1), MOMENTUM),
    "SGP": (SGP(), MOMENTUM),
    "SGP, ring, overlap": (SGP(Ring(), overlap=True), PLAIN),
    "SGP, not balanced": (SGP(Star()), PLAIN),
    "SGP, every other step": (SGP(Ring(directed=True), every=2, warmup_steps=1), ADAM),
    "SGP, hierarchical": (SGP(hierarchical=True), PLAIN),
    "Decentralized": (Decentralized(), MOMENTUM),
    "Decentralized, pairs": (Decentralized("shift_one", every=2), MOMENTUM),
    "Decentralized, hierarchical": (Decentralized("shift_one", hierarchical=True, warmup_steps=1), PLAIN),
    "LowPrecisionDecentralized": (LowPrecisionDecentralized(), MOMENTUM),
    "LowPrecisionDecentralized, hierarchical": (LowPrecisionDecentralized(2, hierarchical=True), PLAIN),
    "SPARTA": (SPARTA(0.1), ADAM),
    "SPARTA, strided, overlap": (SPARTA(0.3, "strided", overlap=True), MOMENTUM),
    "SPARTA, drift": (SPARTA(0.3, "drift", every=2, budgets={"*.bias": 1.0, "4.*": 0.0}), MOMENTUM),
    "DiLoCo": (DiLoCo(3), ADAM),
    "DiLoCo, streaming": (DiLoCo(6, fragments=2, delay=2, alpha=0.5), MOMENTUM),
    "DiLoCo, DGC": (DiLoCo(2, functools.partial(SGD, lr=0.7), dgcopt.DGC(0.1), warmup_steps=1), ADAM),
    "DiLoCo, unsent local": (DiLoCo(2, compression=dgcopt.TopK(0.1), unsent="local"), ADAM),
    "SparseLoCo": (SparseLoCo(3, 0.1, 64), ADAM),
}
"""Algorithms, each with an optimizer to go around."""
LIKE_OTHERS = {
    *("LocalSGD, every step", "LocalSGD, hierarchical", "SlowMo, whole", "SlowMo, of each rank", "SGP", "SPARTA"),
    *("SGP, every other step", "Decentralized", "Decentralized, hierarchical", "LowPrecisionDecentralized", "DiLoCo"),
    "SGP, hierarchical",
}
"""What others show as well of checkpoints."""


class Member:
    """One rank's training."""

    def __init__(self, rule: Averaging, make: Make, comm: Comm, model: Callable[[], nn.Module] = make_model) -> None:
        self.comm = comm
        self.model = model()
        self.optimizer: Any = make(self.model.parameters())
        rule.attach(self.optimizer, self.model.named_parameters(), comm)

    @property
    def averaging(self) -> Any:
        return self.optimizer.averaging

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def flat(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.parameters])

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, 0, self.comm, self.parameters[0].dtype)
        return mse_loss(self.model(x), y)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(members: Sequence[Member], steps: Iterable[int]) -> None:
    for step in steps:
        for member in members:
            member.backward(step)
        for member in members:
            member.optimizer.step()


def gathered(comm: Comm, mine: Tensor) -> Tensor:
    """Everyone's, a row each."""
    return comm.run(AllGather(mine.clone(), label="what all ranks have"))


def usable(comm: Comm) -> None:
    assert comm.run(AllReduce(torch.ones(3), op="sum", label="after an error")).tolist() == [comm.size] * 3
