"""DiLoCo as its papers say it, on lists of tensors: every rank in one loop, nothing compressed, nothing hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[list[list[Tensor]], int], None]
"""One local step of every rank, in place: weights by rank and parameter, and which step it is, from 0."""


class Nesterov:
    """Outer SGD with momentum, as Sutskever et al. and torch define it: by parameter."""

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.u: dict[int, Tensor] = {}

    def step(self, place: int, anchor: Tensor, grad: Tensor) -> Tensor:
        u = self.u[place] * self.momentum + grad if place in self.u else grad.clone()
        self.u[place] = u
        return anchor - self.lr * (grad + self.momentum * u if self.nesterov else u)


def diloco(
    weights: list[list[Tensor]],
    local_step: Step,
    steps: int,
    every: int,
    outer: Nesterov,
    fragments: Sequence[Sequence[int]],
    delay: int = 0,
    alpha: float = 0.0,
) -> list[list[list[Tensor]]]:
    """The weights of all ranks after each step. `fragments`: places of the parameters that take turns together."""
    size, history = len(weights), []
    anchors = [tensor.clone() for tensor in weights[0]]
    interval = every // len(fragments)
    change: dict[int, Tensor] = {}
    for step in range(1, steps + 1):
        local_step(weights, step - 1)
        turn = fragments[((step + delay) // interval - 1) % len(fragments)]
        if (step + delay) % interval == 0:
            for p in turn:
                change[p] = sum((anchors[p] - weights[rank][p] for rank in range(size)), torch.zeros(())) / size
        if step % interval == 0 and change:
            for p in fragments[(step // interval - 1) % len(fragments)]:
                anchors[p] = outer.step(p, anchors[p], change.pop(p))
                for rank in range(size):
                    weights[rank][p] = (1 - alpha) * anchors[p] + alpha * weights[rank][p]
        history.append([[tensor.clone() for tensor in by_rank] for by_rank in weights])
    return history
