"""Optimizers that are not torch's own, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class ZerosForNone(Optimizer):
    """Normalised momentum that also moves parameters without a gradient, as in the first implementation of Muon."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(momentum / (momentum.norm() + 1e-9), alpha=group["lr"])
        return loss
