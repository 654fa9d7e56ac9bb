"""Dense inside a machine, compressed between machines."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast
from ..segments import SparseSum
from .base import Compressor, Context, GradientExchange
from .wrapper import Wrapper

__all__ = ["Hierarchical"]


class Hierarchical(Wrapper):
    """The machines' means, exchanged by `inner` between the first ranks of each: for several ranks on a machine.

    (a) all ranks of a machine average their gradients, (b) its first rank exchanges that mean with those of the other
    machines, (c) and broadcasts what came of it. Machines with more ranks weigh more, so the result is the mean over
    ranks; in Bagua, whose scheme this is (`hierarchical=True` of its algorithms), every machine weighs the same.

    Costs one allreduce and one broadcast of the whole gradient inside each machine, and between machines what `inner`
    costs among as many ranks as there are machines. Buckets take their later rounds one after another.

    Args:
        inner: the compressor between machines; None is NoCompression. What it remembers lies on the first ranks.
    """

    def __init__(self, inner: Compressor | None = None) -> None:
        super().__init__(inner)

    def _follow(self) -> None:
        super()._follow()
        self.in_turn = True  # first ranks have more rounds than the others, and all must broadcast in the same order

    def in_place(self, kind: Hashable) -> bool:
        return False

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        total = yield AllReduce(grad, op="sum", group="node")
        if ctx.local_rank == 0:
            across = replace(ctx, rank=ctx.node, size=ctx.nodes, op="sum", local=None)
            if ctx.op == "average":
                total /= ctx.size
            exchange, result = self.inner.exchange(total, across), None
            while True:
                try:
                    collective = exchange.send(result)  # type: ignore[arg-type]  # None starts a generator
                except StopIteration as stop:
                    total = dense(stop.value, ctx)
                    break
                collective.group = "across"
                result = yield collective
        return (yield Broadcast(total, root=0, group="node"))

    def payload_bytes(self, ctx: Context) -> int | None:
        return None  # first ranks send more than others


def dense(result: Tensor | SparseSum, ctx: Context) -> Tensor:
    """What an exchange returned as a flat gradient."""
    if isinstance(result, Tensor):
        return result
    return result.add_to(torch.zeros(ctx.numel, dtype=ctx.dtype, device=ctx.segments[0].param.device))
