"""Ranks with independent parameters, for rules by parameter name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt.compressors import Compressor

SHAPES = {"conv.weight": (70, 9), "conv.bias": (70,), "fc.weight": (50, 33), "fc.bias": (33,), "norm.weight": (65,)}
Make = Callable[[Iterable[Tensor]], Optimizer]


def momentum(params: Iterable[Tensor]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def noise(*what: object, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))
    return torch.randn(shape, generator=generator)


class World:
    """Ranks of one simulated world, whose gradients do not depend on weights, so that no parameter does on another."""

    def __init__(
        self,
        size: int,
        make: Make,
        compressor: Compressor | None,
        names: Iterable[str] = SHAPES,
        nodes: int = 1,
        attach: Callable[..., Any] = dgcopt.DistributedOptimizer,
        **settings: Any,
    ) -> None:
        self.step_count = 0
        self.params = [{name: nn.Parameter(noise(name, shape=SHAPES[name])) for name in names} for _ in range(size)]
        self.optimizers: list[Any] = [
            attach(make(params.values()), params.items(), compressor, comm=comm, **settings)
            for params, comm in zip(self.params, dgcopt.simulated_world(size, nodes), strict=True)
        ]

    def step(self) -> dict[str, Tensor]:
        """The weights after it, alike on all ranks."""
        for rank, (params, optimizer) in enumerate(zip(self.params, self.optimizers, strict=True)):
            optimizer.zero_grad()
            trained = {name: param for name, param in params.items() if param.requires_grad}
            grads = [noise(self.step_count, rank, name, shape=SHAPES[name]) for name in trained]
            sum((p * g).sum() for p, g in zip(trained.values(), grads, strict=True)).backward()  # type: ignore[union-attr]
        for optimizer in self.optimizers:
            optimizer.step()
        self.step_count += 1
        for params in self.params:
            assert all(torch.equal(params[name], first) for name, first in self.params[0].items())
        return {name: param.detach().clone() for name, param in self.params[0].items()}

    def train(self, steps: int = 5) -> list[dict[str, Tensor]]:
        return [self.step() for _ in range(steps)]


def patterns(rules: Mapping[str, Compressor]) -> dict[str, str]:
    return {name: dgcopt.PerParameter(rules).pattern_for(name) for name in SHAPES}


MIXED = {"*.bias": dgcopt.NoCompression(), "*": dgcopt.TopK(0.1)}
EACH_ITS_OWN: dict[str, Compressor] = {
    "*.bias": dgcopt.NoCompression(),
    "fc.*": dgcopt.DGC(0.3),
    "*": dgcopt.TopK(0.1),
}
