"""The context of an exchange of weights, and operations that several algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast, Collective, Exchange, watched
from ..comm import Comm
from ..compressors.context import Context, Place
from ..compressors.wrappers.hierarchical import send_across
from ..flat.buckets import Bucket

__all__ = ["Weights", "between_machines", "distance", "mean"]


@dataclass(eq=False)
class Weights(Context):
    """The context of an exchange of weights: that of gradients, with these changes.

    Attributes:
        step: local steps since the warm-up.
        group: the optimizer's parameter group of all parameters in the bucket.
        weight: the weight of this rank in a mean; 1 unless ranks have run out of data.
    """

    group: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    def at(self, step: int) -> Weights:
        """Set the number of local steps since the warm-up, and return this context."""
        self.place = replace(self.place, step=step)
        return self

    def move(self, place: Place) -> None:
        """Go on at another place."""
        self.place = place

    def use_settings(self, group: dict[str, Any]) -> None:
        """Use another parameter group's settings."""
        self.group = group

    def set_weight(self, weight: float) -> None:
        """Set the weight of this rank in a mean."""
        self.weight = weight

    def keep_settings(self) -> None:
        """Keep the current settings of the parameter group: a scheduler may step before others have voted."""
        self.group = dict(self.group)

    @property
    def lr(self) -> float:
        """The current learning rate."""
        return float(self.group["lr"])


def mean(x: Tensor, ctx: Weights) -> Exchange:
    """Return the mean over ranks, bit-identical on all; overwrites `x`."""
    return (yield AllReduce(x if ctx.weight == 1 else x.mul_(ctx.weight)))


def between_machines(x: Tensor, ctx: Weights, operation: Callable[[Tensor, Weights], Exchange]) -> Exchange:
    """Apply `operation` to the machines' means among their first ranks; return its result on all ranks."""
    x = yield AllReduce(x, group="node")
    if ctx.place.local_rank == 0:
        first = replace(ctx.placed(rank=ctx.place.node, size=ctx.place.nodes), weight=1.0)
        x = yield from watched(operation(x, first), send_across)
    return (yield Broadcast(x, group="node"))


def distance(buckets: Iterable[Bucket], comm: Comm) -> Generator[Collective, Tensor, float]:
    """Return the mean over ranks of |x_i - mean x|^2."""
    square = torch.zeros((), dtype=torch.float64)
    for bucket in buckets:
        x = bucket.read()
        center = yield AllReduce(x.clone(), label="weights to compare")
        square += (x - center).double().square().sum().cpu()
    apart = yield AllReduce(comm.to_wire(square), label="consensus distance")
    if comm.size_of("replica") > 1:  # of which this rank holds a shard
        apart = yield AllReduce(apart, "sum", group="replica", label="consensus distance of shards")
    return float(apart)
