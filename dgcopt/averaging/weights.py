"""The weights of one bucket on their way through an exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..collectives import AllReduce, Exchange
from ..compressors.context import Context

__all__ = ["Weights", "mean"]


@dataclass(eq=False)
class Weights(Context):
    """What an exchange of weights may know of its place: as that of gradients, and beyond it the following.

    Attributes:
        step: local steps made so far, after a warm-up.
        group: the wrapped optimizer's parameter group, to which all parameters of the bucket belong.
        weight: what this rank's weights count for in a mean; 1, unless ranks have run out of data.
    """

    group: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def lr(self) -> float:
        """The learning rate as it is now."""
        return float(self.group["lr"])


def mean(x: Tensor, ctx: Weights) -> Exchange:
    """The mean over ranks, the same bits on all; overwrites `x`."""
    return (yield AllReduce(x if ctx.weight == 1 else x.mul_(ctx.weight)))
