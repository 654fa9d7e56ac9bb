"""Dense inside a machine, compressed between machines."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast, Collective, watched
from ..errors import ConfigError
from ..flat.store import is_unsent
from .base import Compressor, GradientExchange
from .context import Context, at_least_float32
from .wrapper import Wrapper

__all__ = ["Hierarchical"]

RANKS = "ranks per machine"
"""By parameter name, in what all ranks share: for how many gradients what machines keep of it counts."""

MOMENTUM = "momentum"
"""What compressors call memory that goes on to make gradients, and is not unsent."""


class Hierarchical(Wrapper):
    """The machines' means, exchanged by `inner` between the first ranks of each: for several ranks on a machine.

    (a) all ranks of a machine average their gradients, (b) its first rank exchanges that mean with those of the other
    machines, (c) and broadcasts the result. Machines with more ranks weigh more, so the result is the mean over
    ranks; in Bagua, whose scheme this is (`hierarchical=True` of its algorithms), every machine weighs the same. A sum
    is the mean times the number of ranks.

    Costs one allreduce and one broadcast of the whole gradient inside each machine, and between machines what `inner`
    costs among as many ranks as there are machines. Buckets take their later rounds one after another.

    Args:
        inner: the compressor between machines; None is NoCompression. Its memory is on the first ranks; other
            ranks hand over the residuals and momentum that a checkpoint of other machines gave them.

    Raises ConfigError for another Hierarchical inside, as between machines there are no machines.
    """

    def __init__(self, inner: Compressor | None = None) -> None:
        super().__init__(inner)
        if any(isinstance(part, Hierarchical) for part in self.inner.parts()):
            raise ConfigError("Hierarchical cannot go around another one: leave one of them away")

    def _follow(self) -> None:
        super()._follow()
        self.in_turn = True  # first ranks have more rounds than the others, and all must broadcast in the same order

    def in_place(self, kind: Hashable) -> bool:
        return False

    def holds_back(self, kind: Hashable) -> str:
        return f"machines' {self.inner.holds_back(kind)}"

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        return self.inner.as_gradient(unsent, ctx).mul_(ctx.size / ctx.nodes)

    def give_back(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """It is that of machines."""

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        ranks = ctx.size / ctx.nodes
        if RANKS not in ctx.scratch:
            ctx.scratch[RANKS] = ranks
            if _count_for(ranks, ctx):
                yield from _hand_over_momentum(ctx)
        if ctx.local_rank > 0:
            ctx.add_unsent(grad, weight=ranks)
        else:
            ctx.add_unsent(grad, ctx.idle, ranks - 1)  # the gradient has it once already
        mean = yield AllReduce(grad, op="average", group="node")
        if ctx.local_rank == 0:
            mean *= ctx.local_size * ctx.nodes / ctx.size  # machines with more ranks weigh more
            across = replace(ctx, rank=ctx.node, size=ctx.nodes, op="average", local=None)
            mean = across.dense((yield from watched(self.inner.exchange(mean, across), send_across)))
        mean = yield Broadcast(mean, root=0, group="node")
        return mean * (ctx.size / ctx.divisor)

    def payload_bytes(self, ctx: Context) -> int | None:
        return None  # first ranks send more than others


def _count_for(ranks: float, ctx: Context) -> bool:
    """Let what was kept between other machines, of other numbers of ranks, count for what it did there.

    Returns whether there may be anything, which all ranks know alike.
    """
    known = ctx.shared.setdefault(RANKS, {})
    any_known = any(segment.name in known for segment in ctx.segments)
    for segment in ctx.segments:
        before = float(known.get(segment.name, ranks))
        for kind, flat in ctx.memory.items() if before != ranks else ():
            if is_unsent(kind) or kind == MOMENTUM:
                segment.view(flat).mul_(before / ranks)
        known[segment.name] = torch.tensor(ranks, dtype=torch.float64)
    return any_known


def _hand_over_momentum(ctx: Context) -> Generator[Collective, Tensor, None]:
    """What ranks have of machines whose first ones they were, the first rank of this machine goes on with."""
    astray = torch.tensor([float(ctx.local_rank > 0 and MOMENTUM in ctx.memory)], device=ctx.device)
    if not (yield AllReduce(astray, op="sum", group="node", label="whether momentum is astray")).any():
        return
    mine, dtype = ctx.memory.pop(MOMENTUM, None), at_least_float32(ctx.dtype)
    flat = torch.zeros(ctx.numel, dtype=dtype, device=ctx.device) if mine is None else mine.to(dtype)
    momentum = yield AllReduce(flat, op="sum", group="node", label="momentum of other machines")
    if ctx.local_rank == 0:
        ctx.memory[MOMENTUM] = momentum


def send_across(collective: Collective) -> None:
    collective.group = "across"
