"""Simulated ranks that average weights, and the same training by bare optimizers whose weights are averaged by hand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt.averaging import Averaging
from tests.support.worlds import small_batch, small_model

Make = Callable[[Iterable[Tensor]], Optimizer]
momentum: Make = functools.partial(SGD, lr=0.1, momentum=0.9)
adam: Make = functools.partial(Adam, lr=0.01)
plain: Make = functools.partial(SGD, lr=0.1)


class World:
    """N ranks; with a rule averaged by it, without one by hand, if asked to."""

    def __init__(
        self, size: int, rule: Averaging | None = None, make: Make = momentum, model=small_model, nodes: int = 1
    ) -> None:
        self.comms = dgcopt.simulated_world(size, nodes)
        self.models: list[nn.Module] = [model() for _ in range(size)]
        self.optimizers: list[Any] = [make(model.parameters()) for model in self.models]
        if rule is not None:
            for model, optimizer, comm in zip(self.models, self.optimizers, self.comms, strict=True):
                assert rule.attach(optimizer, model.named_parameters(), comm) is optimizer

    def __iter__(self) -> Iterator[tuple[int, nn.Module, Any]]:
        return iter(zip(range(len(self.models)), self.models, self.optimizers, strict=True))

    def loss(self, rank: int, seed: int) -> Tensor:
        """Of a rank's own share of a batch."""
        dtype = next(self.models[rank].parameters()).dtype
        inputs, targets = small_batch(seed=seed, dtype=dtype)
        size = len(self.models)
        return nn.functional.cross_entropy(self.models[rank](inputs[rank::size]).float(), targets[rank::size])

    def backward(self, seed: int) -> None:
        for rank, _, optimizer in self:
            optimizer.zero_grad()
            self.loss(rank, seed).backward()

    def step(self, seed: int) -> None:
        self.backward(seed)
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, seeds: Iterable[int]) -> World:
        for seed in seeds:
            self.step(seed)
        return self

    @torch.no_grad()
    def means(self, ranks: Iterable[int] | None = None) -> dict[str, Tensor]:
        """Over all ranks or some, of every parameter that is trained."""
        named = [dict(self.models[rank].named_parameters()) for rank in ranks or range(len(self.models))]
        trained = [name for name, param in named[0].items() if param.requires_grad]
        return {name: sum(mine[name].double() for mine in named) / len(named) for name in trained}

    @torch.no_grad()
    def put(self, values: dict[str, Tensor]) -> None:
        for model in self.models:
            for name, value in values.items():
                model.get_parameter(name).copy_(value)

    def average_by_hand(self) -> None:
        self.put(self.means())

    def weights(self, rank: int = 0) -> list[Tensor]:
        return [param.detach().clone() for param in self.models[rank].parameters()]

    def states(self) -> list[dict[str, Any]]:
        return [copy.deepcopy({"model": m.state_dict(), "optimizer": o.state_dict()}) for _, m, o in self]

    def load(self, states: list[dict[str, Any]]) -> None:
        for (_, model, optimizer), state in zip(self, states, strict=True):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])


def by_hand(world: World, seeds: Iterable[int], every: int) -> World:
    """`world`, of bare optimizers, trained by local SGD from the first step of a window."""
    for step, seed in enumerate(seeds, 1):
        world.step(seed)
        if step % every == 0:
            world.average_by_hand()
    return world


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_worlds_close(ours: World, theirs: World, tolerance: float = 1e-12) -> None:
    for rank in range(len(ours.models)):
        assert_close(ours.weights(rank), theirs.weights(rank), tolerance)


def identical(world: World) -> bool:
    return all(
        torch.equal(x, y)
        for rank in range(1, len(world.models))
        for x, y in zip(world.weights(rank), world.weights(0), strict=True)
    )
