"""The context of an exchange of weights, and operations that several algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllReduce, Broadcast, Collective, Exchange, watched
from ..comm import Comm
from ..compressors.context import Context, Place
from ..compressors.wrappers.hierarchical import send_across
from ..errors import ConfigError
from ..flat.buckets import Bucket
from ..flat.local_shard import as_stepped, local

__all__ = ["ParameterGroup", "Weights", "between_machines", "distance", "mean"]


@dataclass(frozen=True)
class ParameterGroup:
    """An optimizer's parameter group: its current settings, and the optimizer, which has its state."""

    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer | None = None


@dataclass(eq=False)
class Weights(Context):
    """The context of an exchange of weights: that of gradients, with these changes.

    Attributes:
        step: local steps since the warm-up.
        trained_by: the parameter group of all parameters in the bucket, and its optimizer.
        has_progress: True if this rank has made a step since the last round that reached all ranks, as all have unless
            ranks have run out of data.
    """

    trained_by: ParameterGroup = field(default_factory=ParameterGroup)
    has_progress: bool = True

    @property
    def weight(self) -> float:
        """The weight of this rank in a mean: its share."""
        return self.place.share

    def at(self, step: int) -> Weights:
        """Set the number of local steps since the warm-up, and return this context."""
        self.place = replace(self.place, step=step)
        return self

    def move(self, place: Place) -> None:
        """Go on at another place."""
        self.place = replace(place, share=self.place.share)

    def use_settings(self, group: dict[str, Any]) -> None:
        """Use another parameter group's settings."""
        self.trained_by = replace(self.trained_by, settings=group)

    def set_weight(self, weight: float, has_progress: bool = True) -> None:
        """Set the weight of this rank in a mean."""
        self.place, self.has_progress = replace(self.place, share=weight), has_progress

    def keep_settings(self) -> None:
        """Keep the current settings of the parameter group: a scheduler may step before others have voted."""
        self.use_settings(dict(self.group))

    def state_bucket(self, name: str) -> Bucket:
        """Return a state of the optimizer, such as "exp_avg", in the layout of the weights.

        Zeros stand for that of parameters without any state yet, and of those that the optimizer steps by another rule,
        as MuonAdamW. Raises ConfigError for a state that no parameter has, that has not its parameter's shape, or that
        is sparse, as SGD's momentum of sparse gradients.
        """
        optimizer, segments = self.trained_by.optimizer, []
        assert optimizer is not None
        is_held = any(isinstance(kept.get(name), Tensor) for kept in optimizer.state.values())
        kept_here = [optimizer.state.get(as_stepped(segment.param), {}).get(name) for segment in self.segments]
        dtype = next((state.dtype for state in kept_here if isinstance(state, Tensor)), None)  # may be a wider one
        for segment in self.segments:
            state = optimizer.state.get(as_stepped(segment.param), {})
            value = local(state[name]) if isinstance(state.get(name), Tensor) else None
            is_sparse = value is not None and value.layout is not torch.strided
            if (state and not is_held) or is_sparse or (value is not None and value.shape != segment.param.shape):
                shaped = [k for k, kept in state.items() if isinstance(kept, Tensor) and kept.dim() and k != name]
                raise ConfigError(
                    f"parameter {segment.name!r}: {type(optimizer).__name__} has no {'dense ' if is_sparse else ''}"
                    f"state {name!r} of its shape. Average one of {', '.join(map(repr, shaped)) or 'none'}."
                )
            held = torch.zeros_like(segment.param, dtype=dtype) if value is None else value
            segments.append(replace(segment, param=held))
        return Bucket(self.index, tuple(segments), self.kind, self.numel)

    @property
    def group(self) -> dict[str, Any]:
        """The current settings of the parameter group of all parameters in the bucket."""
        return self.trained_by.settings

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
        first = ctx.placed(rank=ctx.place.node, size=ctx.place.nodes, share=1.0)
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
