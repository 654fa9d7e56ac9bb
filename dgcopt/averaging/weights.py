"""The weights of one bucket on their way through an exchange, and what several algorithms do with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast, Collective, Exchange, watched
from ..comm import Comm
from ..compressors.context import Context
from ..compressors.hierarchical import send_across
from ..flat.buckets import Bucket

__all__ = ["Weights", "between_machines", "distance", "mean"]


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


def between_machines(x: Tensor, ctx: Weights, operation: Callable[[Tensor, Weights], Exchange]) -> Exchange:
    """What `operation` makes of the machines' means, among the first ranks of each; on all ranks of a machine."""
    x = yield AllReduce(x, group="node")
    if ctx.local_rank == 0:
        first = replace(ctx, rank=ctx.node, size=ctx.nodes, weight=1.0)
        x = yield from watched(operation(x, first), send_across)
    return (yield Broadcast(x, group="node"))


def distance(buckets: Iterable[Bucket], comm: Comm) -> Generator[Collective, Tensor, float]:
    """The mean over ranks of |x_i - mean x|^2."""
    square = torch.zeros((), dtype=torch.float64)
    for bucket in buckets:
        x = bucket.read()
        center = yield AllReduce(x.clone(), label="weights to compare")
        square += (x - center).double().square().sum().cpu()
    return float((yield AllReduce(comm.to_wire(square), label="consensus distance")))
