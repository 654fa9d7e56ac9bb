"""A model's step on one rank without any exchange, with the times when its gradients are ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import clock
from .models import Model

__all__ = ["GradientMarks", "Profile"]


@dataclass(frozen=True)
class Profile:
    """A model's step on one rank, without any exchange.

    Attributes:
        shapes: trained parameters by name.
        ready: seconds from the start of the step until each one's gradient is complete.
        seconds: of forward and backward.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ready: Mapping[str, float]
    seconds: float

    def model(self, name: str) -> Model:
        """Return the model with its parameters in the order in which their gradients become ready, reversed."""
        order = sorted(self.shapes, key=lambda one: self.ready[one])
        start = self.ready[order[0]]
        starts = [start, *(self.ready[one] for one in order[:-1])]
        shares = {one: self.ready[one] - before for one, before in zip(order, starts, strict=True)}
        total = max(self.seconds - start, 1e-9)
        shares[order[-1]] += max(0.0, total - sum(shares.values()))
        back = order[::-1]
        return Model(
            *(name, {one: self.shapes[one] for one in back}, [shares[one] for one in back], self.seconds),
            forward=min(start, self.seconds) / self.seconds,
        )


class GradientMarks:
    """The moments when gradients become complete; on CUDA events, without waiting for the device.

    Args:
        named: parameters by name.
        device: of the parameters.
    """

    def __init__(self, named: Mapping[str, Tensor], device: torch.device) -> None:
        self._marks: dict[str, Any] = {}
        self._hooks = [
            param.register_post_accumulate_grad_hook(
                lambda _, name=name: self._marks.update({name: clock.mark(device)})
            )
            for name, param in named.items()
        ]

    def since(self, start: Any) -> dict[str, float]:
        """Return the seconds from a mark to each gradient, by the parameter's name."""
        return {name: clock.between(start, mark) for name, mark in self._marks.items()}

    def clear(self) -> None:
        """Clear all moments, before the next step."""
        self._marks.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
